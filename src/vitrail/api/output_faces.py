"""How the command line prints the results of `vitrail faces`."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from vitrail.api.output import Given, say_notes
from vitrail.api.results import Report, Rows
from vitrail.core.errors import CorruptFileError
from vitrail.core.terminal import escape_unprintable, print_json, print_table, say


def show_evaluation(report: Report, given: Given) -> None:
    """Error rates."""
    say_notes(report["notes"])
    if given.json:
        return print_json(report.to_json())
    _print_report(report)
    output = given.values.get("output")
    return None if output is None else print_table(None, [["page", str(output / "index.html")]])


def show_enrolled(found: Report, given: Given) -> None:
    """How many images a person and the gallery have."""
    if found["threshold_dropped"]:
        say(f"note: the threshold of identify was for other people: calibrate {given.values['gallery']} again")
    if given.json:
        return print_json(found.to_json())
    shown = f"{found['name']}: {found['new']:,} new, {found['images']:,} in all"
    return print_table(None, [["images", shown], ["gallery", f"{found['gallery']}: {_people(found['people'])}"]])


def show_removed(found: Report, given: Given) -> None:
    """Whether a person was removed."""
    name = found["name"]
    if not found["removed"]:
        say(f"note: {name!r} was not enrolled (any more); what an earlier removal had left is gone now")
    if given.json:
        return print_json(found.to_json())
    shown = f"{name}, with every trace" if found["removed"] else "the traces that an earlier removal had left"
    return print_table(None, [["removed", shown], ["gallery", f"{found['gallery']}: {_people(found['people'])}"]])


def show_verified(found: Report, given: Given) -> None:
    """The score of two images, and whether they show one person."""
    if found["same"] is None:
        _say_no_threshold("verify")
    if given.json:
        return print_json(found.to_json())
    answer = {True: "the same person", False: "different people", None: "-"}[found["same"]]
    return print_table(None, [["score", f"{found['score']:.4f}"], *_threshold_rows(found), ["answer", answer]])


def receive_identified(given: Given) -> Callable[[list[str]], Callable[[dict[str, Any]], None]]:
    """Print each result of identify as soon as it is known."""

    def begin(files: list[str]) -> Callable[[dict[str, Any]], None]:
        width, notes = max(len(escape_unprintable(file)) for file in files), []

        def receive(row: dict[str, Any]) -> None:
            if "error" not in row and row["threshold"] is None and not notes:
                notes.append("no threshold")
                _say_no_threshold("identify")
            if given.json:
                print_json(row)
            else:
                sys.stdout.write(f"{escape_unprintable(row['file']):<{width}}  {_answer(row)}\n")
            sys.stdout.flush()

        return receive

    return begin


def show_identified(failed: Rows, given: Given) -> None:
    """Exit code 1 if images could not be read."""
    if failed:
        first = failed[0]["error"]
        raise CorruptFileError(f"{len(failed):,} of {failed.total:,} images could not be read; the first: {first}")


def show_calibrated(found: Report, given: Given) -> None:
    """The thresholds, and the error rates at these."""
    if given.json:
        return print_json(found.to_json())
    rows = []
    for name in (name for name in ("verify", "identify") if name in found):
        one = found[name]
        low, high = one["interval"]
        unit = "pairs" if name == "verify" else f"images, {_people(one['gallery_people'])} enrolled"
        measured = f"{one['errors']:,} of {one['trials']:,} {unit}"
        rows.append([name, f"{one['threshold']:.4f}", measured, f"{low:.2%} to {high:.2%}", _percent(one["tar"])])
    return print_table(("task", "threshold", "false accepts in DATA", "95 % interval", "true accepts"), rows)


def _people(count: int) -> str:
    return "1 person" if count == 1 else f"{count:,} people"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _spoken(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "not enough data"
    return f"{value:.2%}" if interval is None else f"{value:.2%} ({interval[0]:.2%} to {interval[1]:.2%})"


def _say_no_threshold(task: str) -> None:
    say(
        f"note: no threshold is set, so nobody is accepted or refused: `vitrail faces calibrate` sets that of {task} in"
        " a gallery, for your data and the rate of errors that you can bear"
    )


def _threshold_rows(found: dict[str, Any]) -> list[list[str]]:
    if found["threshold"] is None:
        return []
    low, high = found["far_interval"]
    about = f"{found['threshold']:.4f} (false accepts {found['far']:g} demanded, {low:.2%} to {high:.2%} measured)"
    return [["threshold", about]]


def _answer(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"error: {escape_unprintable(row['error'])}"
    shown = ", ".join(f"{escape_unprintable(one['name'])} {one['score']:.4f}" for one in row["candidates"])
    answer = {True: escape_unprintable(row["name"] or ""), False: "unknown", None: "-"}[row["accepted"]]
    return f"{answer} ({shown})"


def _print_report(report: dict[str, Any]) -> None:
    pairs = f"{report['genuine']:,} genuine pairs, {report['impostor']:,} impostor pairs"
    rows = [
        ["data", f"{report['data']} ({report['split']}): {report['images']:,} images of {_people(report['people'])}"],
        ["pairs", pairs],
        ["equal error rate", _spoken(report["eer"], report["eer_interval"])],
    ]
    rows += [[f"TAR at FAR {row['far']:g}", _spoken(row["tar"], row["interval"])] for row in report["tar"]]
    if report["accuracy"] is not None:
        folds = f"; {len(report['accuracy_folds'])} folds"
        rows.append(["accuracy", _spoken(report["accuracy"], report["accuracy_interval"]) + folds])
    if report["rank1"] is not None:
        rows.append(["rank-1 identification", _spoken(report["rank1"], report["rank1_interval"])])
    rows += [[f"DIR at FAR {row['far']:g}", _spoken(row["dir"], row["interval"])] for row in report["dir"]]
    print_table(None, rows)
    if "groups" in report:
        sys.stdout.write("\n")
        fars = [one["far"] for one in max((row["at"] for row in report["groups"]), key=len, default=[])]
        cells = []
        for row in report["groups"]:
            at = {one["far"]: f"{one['group_far']:.3%} / {1 - one['tar']:.1%}" for one in row["at"]}
            own = [row["group"], f"{row['people']:,}", _spoken(row["eer"], row["eer_interval"])]
            cells.append([*own, *(at.get(far, "-") for far in fars)])
        names = [f"false accepts / refusals at FAR {far:g} of all" for far in fars]
        print_table(("group", "people", "equal error rate", *names), cells)
    sys.stdout.write("\n")
