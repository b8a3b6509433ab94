"""Print the results of the commands of `vitrail faces`: as a table, or as JSON with --json."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from vitrail.api.output import CliArguments, format_interval, say_notes
from vitrail.api.results import Report, Rows
from vitrail.core.errors import CorruptFileError
from vitrail.core.language import localise
from vitrail.core.terminal import display_width, escape_unprintable, print_json, print_table, say


def show_evaluation(report: Report, arguments: CliArguments) -> None:
    """Print the error rates of an evaluation."""
    say_notes(report["notes"])
    if arguments.json:
        return print_json(report.to_json())
    _print_error_rates(report)
    output = arguments.values.get("output")
    return None if output is None else print_table(None, [["page", str(output / "index.html")]])


def show_enrolled(report: Report, arguments: CliArguments) -> None:
    """Print the number of images of a person, and of people in the gallery."""
    if report["threshold_dropped"]:
        say(
            f"note: the threshold of identify was dropped, because the people changed; calibrate"
            f" {arguments.values['gallery']} again"
        )
    if arguments.json:
        return print_json(report.to_json())
    counts = f"{report['name']}: {report['new']:,} new, {report['images']:,} in all"
    return print_table(
        None, [["images", counts], ["gallery", f"{report['gallery']}: {_format_people(report['people'])}"]]
    )


def show_removed(report: Report, arguments: CliArguments) -> None:
    """Print whether a person was removed."""
    name = report["name"]
    if not report["removed"]:
        say(f"note: {name!r} is not enrolled; remaining data of an earlier removal was erased")
    if arguments.json:
        return print_json(report.to_json())
    counts = f"{name}, with all data" if report["removed"] else "remaining data of an earlier removal"
    return print_table(
        None, [["removed", counts], ["gallery", f"{report['gallery']}: {_format_people(report['people'])}"]]
    )


def show_verified(report: Report, arguments: CliArguments) -> None:
    """Print the score of two images, and whether they show the same person."""
    if report["same"] is None:
        _say_no_threshold("verify")
    if arguments.json:
        return print_json(report.to_json())
    answer = {True: "the same person", False: "different people", None: "-"}[report["same"]]
    return print_table(None, [["score", f"{report['score']:.4f}"], *_threshold_rows(report), ["answer", answer]])


def receive_identified(arguments: CliArguments, files: list[str]) -> Callable[[dict[str, Any]], None]:
    """Return a function that prints each result of identify as soon as it is computed."""
    width, printed_notes = max(display_width(escape_unprintable(file)) for file in files), []

    def print_result(row: dict[str, Any]) -> None:
        if "error" not in row and row["threshold"] is None and not printed_notes:
            printed_notes.append("no threshold")
            _say_no_threshold("identify")
        if arguments.json:
            print_json(row)
        else:
            file = escape_unprintable(row["file"])
            sys.stdout.write(f"{file}{' ' * (width - display_width(file))}  {_format_identity(row)}\n")
        sys.stdout.flush()

    return print_result


def show_identified(failed: Rows, arguments: CliArguments) -> None:
    """Raise an error (exit code 1) if images could not be read; the others are printed already."""
    if failed:
        first = failed[0]["error"]
        raise CorruptFileError(f"{len(failed):,} of {failed.total:,} images could not be read; the first: {first}")


def show_calibrated(report: Report, arguments: CliArguments) -> None:
    """Print the thresholds of a gallery and the error rates at them."""
    if arguments.json:
        return print_json(report.to_json())
    rows = []
    for name in (name for name in ("verify", "identify") if name in report):
        result = report[name]
        low, high = result["interval"]
        unit = "pairs" if name == "verify" else f"images, {_format_people(result['gallery_people'])} enrolled"
        measured = localise(f"{result['errors']:,} of {result['trials']:,} {unit}", "cells")
        rows.append(
            [name, f"{result['threshold']:.4f}", measured, format_interval(low, high), _format_percent(result["tar"])]
        )
    return print_table(("task", "threshold", "false accepts in DATA", "95 % interval", "true accepts"), rows)


def _format_people(count: int) -> str:
    return "1 person" if count == 1 else f"{count:,} people"


def _format_percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _format_rate(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return localise("not enough data", "cells")
    return f"{value:.2%}" if interval is None else f"{value:.2%} ({format_interval(interval[0], interval[1])})"


def _say_no_threshold(task: str) -> None:
    say(
        f"note: no threshold is set, so nobody is accepted or rejected; `vitrail faces calibrate` sets the threshold of"
        f" {task} in a gallery"
    )


def _threshold_rows(report: dict[str, Any]) -> list[list[str]]:
    if report["threshold"] is None:
        return []
    low, high = report["far_interval"]
    about = f"{report['threshold']:.4f} (false accepts: {report['far']:g} requested, {low:.2%} to {high:.2%} measured)"
    return [["threshold", about]]


def _format_identity(row: dict[str, Any]) -> str:
    if "error" in row:
        return escape_unprintable(localise(f"error: {row['error']}"))
    candidates = ", ".join(
        f"{escape_unprintable(candidate['name'])} {candidate['score']:.4f}" for candidate in row["candidates"]
    )
    identity = {True: escape_unprintable(row["name"] or ""), False: "unknown", None: "-"}[row["accepted"]]
    return f"{identity} ({candidates})"


def _print_error_rates(report: dict[str, Any]) -> None:
    """Print the error rates of verification and identification, then those of each group of people."""
    pairs = f"{report['genuine']:,} genuine pairs, {report['impostor']:,} impostor pairs"
    rows = [
        [
            "data",
            f"{report['data']} ({report['split']}): {report['images']:,} images of {_format_people(report['people'])}",
        ],
        ["pairs", pairs],
        ["equal error rate", _format_rate(report["eer"], report["eer_interval"])],
    ]
    rows += [[f"TAR at FAR {row['far']:g}", _format_rate(row["tar"], row["interval"])] for row in report["tar"]]
    if report["accuracy"] is not None:
        folds = f"; {len(report['accuracy_folds'])} folds"
        rows.append(["accuracy", _format_rate(report["accuracy"], report["accuracy_interval"]) + folds])
    if report["rank1"] is not None:
        rows.append(["rank-1 identification", _format_rate(report["rank1"], report["rank1_interval"])])
    rows += [[f"DIR at FAR {row['far']:g}", _format_rate(row["dir"], row["interval"])] for row in report["dir"]]
    print_table(None, rows)
    if "groups" in report:
        sys.stdout.write("\n")
        fars = [rates["far"] for rates in max((row["at"] for row in report["groups"]), key=len, default=[])]
        cells = []
        for row in report["groups"]:
            rates_at = {rates["far"]: f"{rates['group_far']:.3%} / {1 - rates['tar']:.1%}" for rates in row["at"]}
            own = [row["group"], f"{row['people']:,}", _format_rate(row["eer"], row["eer_interval"])]
            cells.append([*own, *(rates_at.get(far, "-") for far in fars)])
        names = [f"false accepts / false rejects at FAR {far:g} of all" for far in fars]
        print_table(("group", "people", "equal error rate", *names), cells)
    sys.stdout.write("\n")
