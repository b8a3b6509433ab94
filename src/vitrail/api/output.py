"""How the command line prints results: as a table, or with --json as a document. Each function shows the result of one
command; `Given` has the words that it was given."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrail.api.results import Report, Rows
from vitrail.core.errors import CorruptFileError
from vitrail.core.terminal import (
    display_width,
    escape_unprintable,
    format_cell,
    format_duration,
    format_setting,
    print_json,
    print_table,
    say,
)

if TYPE_CHECKING:
    from vitrail.api.predictions import Evaluation, Prediction, Predictions
    from vitrail.api.training_commands import Diagnosis
    from vitrail.bundles.metadata import BundleInfo
    from vitrail.evaluation.compare_runs import RunComparison
    from vitrail.reports.inspect.inspection_page import Inspection
    from vitrail.training.run import Result


class Given(NamedTuple):
    """What the command line stated."""

    values: Mapping[str, Any]
    """Of each parameter that was given."""
    json: bool = False
    open: bool = False


def say_notes(notes: Sequence[str]) -> None:
    for note in notes:
        say(f"note: {note}")


def _print_page(folder: Path | str) -> None:
    print_table(None, [["page", str(Path(folder) / "index.html")]])


def _print_report(folder: Path | str) -> None:
    sys.stdout.write(f"report  {escape_unprintable(str(Path(folder) / 'index.html'))}\n")


def _open_in_browser(page: Path) -> None:
    import webbrowser

    webbrowser.open(page.absolute().as_uri())


def show_models(rows: Rows, given: Given) -> None:
    """Models with their parameters, multiply-accumulates and shapes."""
    if given.json:
        return print_json(rows.to_json())
    headers = ("name", "family", "parameters", "MACs", "tokens", "resolution", "patch", "width", "depth", "heads")
    keys = [header.lower() for header in headers]
    shape = ("heads", "patch", "width", "depth", "resolution", "tokens", "MACs", "family")
    return print_table(headers, [[format_cell(row[key]) for key in keys] for row in rows], droppable=shape)


def show_info(row: Report, given: Given) -> None:
    """The size and cost of a model."""
    from vitrail.models.zoo import alias_notes

    say_notes(alias_notes(given.values["model"]))
    if given.json:
        return print_json(row.to_json())
    return print_table(None, [[key, format_cell(value)] for key, value in row.items()])


def show_recipes(found: Report | Rows, given: Given) -> None:
    """Recipes, or the settings of one."""
    if given.json:
        return print_json(found.to_json())
    if isinstance(found, Rows):
        return print_table(None, [[row["name"], row["purpose"]] for row in found])
    sys.stdout.write(f"{escape_unprintable(found['purpose'])}\n\n")
    cells = [
        [row["setting"], *map(format_setting, (row["value"], row["default"])), row["meaning"]]
        for row in found["settings"]
    ]
    return print_table(("setting", "value", "default", "meaning"), cells)


def show_weights(found: Rows, given: Given) -> None:
    """Public checkpoints."""
    if given.json:
        return print_json(found.to_json())
    rows = []
    for one in found:
        linear = "" if one.linear is None else f"{one.linear:.1f} linear"
        score = linear if one.accuracy is None else f"{one.accuracy:.1f}"
        shape = [one.model, f"{one.config.parameters:,}", f"{one.pixels}", f"{one.classes:,}" if one.classes else "-"]
        rows.append([one.name, *shape, score or "-", one.source or "-", one.licence, one.address])
    headers = ("name", "model", "parameters", "pixels", "classes", "accuracy %", "source", "licence", "where")
    return print_table(headers, rows, droppable=("where", "source", "classes", "licence", "model"))


def show_doctor(found: "Diagnosis", given: Given) -> None:
    """The problems of a data set. Exit code 1 if there are errors."""
    from vitrail.data.doctor import format_findings

    dataset = found.dataset
    say_notes(dataset.notes)
    if given.json:
        print_json(found.to_json())
    else:
        counts = ", ".join(f"{len(split):,} {name}" for name, split in dataset.splits.items())
        rows = [["data", given.values["data"]], ["images", counts], ["classes", f"{len(dataset.labels):,}"]]
        print_table(None, rows)
        for lines in format_findings(found.findings, dataset.root):
            sys.stdout.write("\n" + "\n    ".join(escape_unprintable(line) for line in lines) + "\n")
        if not found.findings:
            sys.stdout.write("\nno problems found\n")
    if found.errors:
        sys.exit(1)


def show_run(result: "Result", given: Given) -> None:
    """The scores of a run and its files; of several ranks, the first one prints them."""
    if result.is_first and result.folder is not None:
        print_run(result.sentence, result.folder)


def show_demo(result: "Result", given: Given) -> None:
    """Open the report of the demo; everything else was printed by it."""
    if given.open and result.folder is not None:
        _open_in_browser(result.folder / "report.html")


def show_evaluation(found: "Evaluation", given: Given) -> None:
    """Scores, and what was written."""
    say_notes(found.notes)
    if given.json:
        return print_json(found.to_json())
    print_scores(found.scores)
    output, page = given.values.get("output"), given.values.get("page")
    written = {"answers": output, "page": page and page / "index.html"}
    if rows := [[name, str(path)] for name, path in written.items() if path]:
        sys.stdout.write("\n")
        print_table(None, rows)
    return None


def show_runs(found: "RunComparison", given: Given) -> None:
    """Runs side by side."""
    say_notes(found.notes)
    if given.json:
        return print_json(found.to_json())
    print_runs(found.to_json())
    return _print_page(given.values["page"]) if "page" in given.values else None


def show_inspection(found: "Inspection", given: Given) -> None:
    """The page of an inspection, or its numbers."""
    from vitrail.reports.inspect.inspection_page import LIMIT

    output = given.values["output"]
    if (size := (output / "index.html").stat().st_size) > LIMIT and not given.values.get("full"):
        say(f"note: the page has {size / 1e6:.1f} MB; fewer images or layers would make it smaller")
    say_notes(found.notes)
    if not found.results.is_trained:
        say("note: nothing says that this model was trained; maps of random weights mean nothing")
    return print_json(found.numbers) if given.json else _print_page(output)


def show_explain(page: Path, given: Given) -> None:
    """The page."""
    print_table(None, [["page", str(page)]])
    if given.open:
        _open_in_browser(page)


def show_conversion(report: Report, given: Given) -> None:
    """What was converted, and the proofs."""
    say_notes(report["notes"])
    return print_json(report.to_json()) if given.json else print_conversion(report)


def show_bench(found: Report, given: Given) -> None:
    """The speed of every engine."""
    for one in found["left_out"]:
        say(f"note: {one['engine']} {one['precision']} is left out: {one['reason']}")
    say_notes(found["notes"])
    return print_json(found.to_json()) if given.json else print_bench(found)


def show_export(proof: Report, given: Given) -> None:
    """What was written, and its proof."""
    if given.json:
        return print_json(proof.to_json())
    same = f"{proof['same_answers']} of {proof['pictures']} answers as torch's"
    rows = [["model", ", ".join(proof["files"])], ["to", f"{given.values['to']}, {given.values['output']}"]]
    if "merging" in proof:
        from vitrail.inference.targets.readme import merging_words

        rows.append(["merges", merging_words(proof["merging"])])
    return print_table(None, [*rows, ["proof", f"{same}, logits at most {proof['max_logit_difference']:.1e} apart"]])


def show_comparison(found: Report, given: Given) -> None:
    """The verdicts of the lab, or the measures of bundles."""
    if given.json:
        return print_json(found.to_json())
    if "claims" in found:
        rows = [[one["id"], one["verdict"], one["question"], one["rule"]] for one in found["claims"]]
        print_table(("claim", "verdict", "question", "decided by"), rows)
    else:
        bundles = found["bundles"]
        names = list(dict.fromkeys(name for one in bundles for name in one["measures"]))
        rows = [[name, *(_measured(one["measures"].get(name)) for one in bundles)] for name in names]
        print_table(("measure", *(one["name"] for one in bundles)), rows)
    return _print_report(given.values["output"])


def _measured(measure: dict[str, Any] | None) -> str:
    if measure is None:
        return "-"
    low, high = measure["interval"]
    reference = f"  [{measure['reference']:.3f}]" if "reference" in measure else ""
    return f"{measure['value']:.3f} ({low:.3f} to {high:.3f}){reference}"


def receive_predictions(
    given: Given,
) -> "Callable[[Sequence[str], Sequence[str], BundleInfo], Callable[[Prediction], None]]":
    """Print each prediction as soon as it is known, unless only files are asked for."""
    files = [given.values[name] for name in ("features", "output", "page") if name in given.values]
    if not given.json and ("output" in given.values or "page" in given.values):
        return lambda names, labels, parts: lambda prediction: None

    def begin(names: Sequence[str], labels: Sequence[str], parts: "BundleInfo") -> "Callable[[Prediction], None]":
        row = _print_line if given.json else prediction_table(names, labels, blank=parts.answer.no_label)
        return row if not files else _outlive_reader(row)

    return begin


def _print_line(prediction: "Prediction") -> None:
    print_json(prediction.to_json())
    sys.stdout.flush()


def _outlive_reader(show: "Callable[[Prediction], None]") -> "Callable[[Prediction], None]":
    """The same without an error if the reader of stdout leaves (`| head`), because files are still to be written."""

    def receive(prediction: "Prediction") -> None:
        try:
            show(prediction)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115

    return receive


def show_predictions(failed: "Predictions", given: Given) -> None:
    """The files that were written. Exit code 1 if images could not be classified."""
    output, page, features = map(given.values.get, ("output", "page", "features"))
    is_shown = given.json or (output is None and page is None)
    written = {"answers": output, "page": page and page / "index.html"}
    if not failed.labels or not is_shown:
        written["features"] = features
    if not given.json and (lines := [[name, str(path)] for name, path in written.items() if path is not None]):
        print_table(None, lines)
    if failed and is_shown and sys.stdout.isatty():  # each of them has just been seen
        sys.exit(1)
    if failed:
        counts = f"{len(failed):,} of {failed.total:,} images"
        raise CorruptFileError(f"{counts} could not be classified; the first: {failed[0].error}")


def prediction_table(paths: Sequence[str], labels: Sequence[str], *, blank: str = "") -> "Callable[[Prediction], None]":
    """Return a function that prints a row; `blank` stands for no prediction, otherwise there is no row. Column
    widths follow from the names, so rows can be printed one by one."""
    first = max(display_width(escape_unprintable(path)) for path in paths)
    second = min(max(display_width(escape_unprintable(label)) for label in labels or "-"), 40) + len(" 0.123")

    def show(prediction: "Prediction") -> None:
        if prediction.error is None and not prediction.classes and not blank:  # features alone
            return
        best, *rest = [f"{label} {score:.3f}" for label, score in prediction.classes] or [blank]
        if prediction.error is not None:
            best, rest = f"error: {prediction.error}", []
        cells = list(map(escape_unprintable, (prediction.file, best, ", ".join(rest))))
        gaps = [" " * max(wide - display_width(text), 0) for wide, text in zip((first, second), cells, strict=False)]
        sys.stdout.write(f"{cells[0]}{gaps[0]}  {cells[1]}{gaps[1]}  {cells[2]}".rstrip() + "\n")
        sys.stdout.flush()

    return show


def print_run(sentence: str | None, folder: Path) -> None:
    """Print the scores of a finished run and its folder."""
    lines = [f"model   {folder / 'bundle'}", f"report  {folder / 'report.html'}"]
    sys.stdout.write("".join(f"{escape_unprintable(line)}\n" for line in ([sentence] if sentence else []) + lines))


def print_bench(found: dict[str, Any]) -> None:
    """Print a row for each engine and precision, and what they were measured on."""
    headers = ["engine", "precision", "images/s", "start s", "memory MB", "size MB", "same answers"]
    is_judged = any("accuracy" in row for row in found["ways"])
    rows = []
    for row in found["ways"]:
        sizes = [f"{row['memory'] / 1e6:,.0f}", f"{row['size'] / 1e6:,.1f}"]
        same = f"{row['same']:,} of {row['images']:,}" if "same" in row else "-"
        cells = [f"{row['images_per_second']:,.1f}", f"{row['start_seconds']:.2f}", *sizes, same]
        if is_judged:
            low, high = row.get("accuracy_interval", (0, 0))
            is_known = "accuracy" in row
            cells.append(f"{row['accuracy']:.1%} ({low:.1%} to {high:.1%})" if is_known else "-")
            won = f"{row['only_this']} against {row['only_float32']}, p = {row['p_value']:.2g}" if is_known else "-"
            cells.append(won)
        rows.append([row["engine"], row["precision"], *cells])
    judged = ["accuracy", "right only by it, only by float32"] if is_judged else []
    print_table([*headers, *judged], rows)
    if shared := [f"{row['engine']} {row['precision']}" for row in found["ways"] if row["depends_on_batch"]]:
        sys.stdout.write(f"\n{', '.join(shared)}: a prediction may depend on the other images of its batch\n")
    load = found["load"]
    about = f"batches of {load['batch']}, {load['callers']} threads, answers to {found['data']}"
    sys.stdout.write(f"\n{escape_unprintable(about)}\n{escape_unprintable(found['machine'])}\n")


def print_scores(scores: dict[str, Any]) -> None:
    """Print the main scores of a protocol, and the classes, worst first."""
    matched = f"; classes matched {scores['labels_matched']}" if "labels_matched" in scores else ""
    rows = [["data", f"{scores['data']} ({scores['split']}, {scores['count']:,} images{matched})"]]
    if "features" in scores:
        place = "what the head reads" if scores["layer"] is None else f"layer {scores['layer']}, {scores['pooling']}"
        again = "; remembered" if scores["cached"] else ""
        rows.append(
            ["learned from", f"{scores['train_count']:,} images, {scores['features']} features ({place}{again})"]
        )
    if scores.get("penalty") is not None:
        rows.append(["penalty", f"{scores['penalty']:.3g}"])
    if "map" in scores:
        return _print_labels(scores, rows)
    low, high = scores["accuracy_interval"]
    rows += [
        ["accuracy", f"{scores['accuracy']:.2%} (95 % interval {low:.2%} to {high:.2%})"],
        ["top 5", f"{scores['top5']:.2%}"],
    ]
    if scores["ece"] is not None:
        rows.append(["calibration error", f"{scores['ece']:.3f}"])
    if "against" in scores:
        rows.append(["against", scores["against"]["sentence"]])
    print_table(None, rows)
    if "shots" in scores:
        sys.stdout.write("\n")
        rows = [[f"{row['shots']}", f"{row['train_count']:,}", *_mean_cells(row)] for row in scores["shots"]]
        rows.append(
            ["all", f"{scores['train_count']:,}", f"{scores['accuracy']:.2%}", f"{low:.2%} to {high:.2%} (Wilson)"]
        )
        print_table(("of each class", "images", "accuracy", f"95 % interval ({scores['seeds']} draws)"), rows)
    sys.stdout.write("\n")
    worst = sorted((row for row in scores["per_class"] if row["count"]), key=lambda row: row["accuracy"])
    rows = [[row["label"], f"{row['right']:,}", f"{row['count']:,}", f"{row['accuracy']:.1%}"] for row in worst[:20]]
    print_table(("class (worst first)", "right", "of", "accuracy"), rows)
    return None


def _print_labels(scores: dict[str, Any], rows: list[list[str]]) -> None:
    """The scores of several labels an image."""
    rows += [
        ["mAP", _share(scores["map"])],
        ["F1 at the thresholds", _share(scores["f1"])],
        ["all labels right", _share(scores["accuracy"])],
    ]
    print_table(None, rows)
    sys.stdout.write("\n")
    worst = sorted((row for row in scores["per_class"] if row["count"]), key=lambda row: row["average_precision"])
    cells = [
        [row["label"], f"{row['count']:,}", *(_share(row[key]) for key in ("average_precision", "precision", "recall"))]
        for row in worst[:20]
    ]
    print_table(("label (worst first)", "images", "average precision", "precision", "recall"), cells)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _mean_cells(row: dict[str, Any]) -> list[str]:
    interval = row["accuracy_interval"]
    return [f"{row['accuracy']:.2%}", "-" if interval is None else f"{interval[0]:.2%} to {interval[1]:.2%}"]


_MOST_PAIRS = 10


def print_runs(found: dict[str, Any]) -> None:
    """Print runs side by side, the best first: scores, settings that differ, comparisons."""
    rows = []
    for run in found["runs"]:
        accuracy, interval, images = "-", "-", "-"
        if run["accuracy"] is not None:
            low, high = run["accuracy_interval"]
            accuracy, interval = f"{run['accuracy']:.1%}", f"{low:.1%} to {high:.1%}"
            images = f"{run['count']:,} {run['split']}"
        steps = f"{run['steps']:,}{'' if run['finished'] else ' (unfinished)'}"
        time = "-" if run["seconds"] is None else format_duration(run["seconds"])
        rows.append([run["folder"], run["result"], accuracy, interval, images, steps, time])
    names = ("run", "model", "accuracy", "95 % interval", "images", "steps", "time")
    print_table(names, rows, droppable=("time", "steps", "images"))
    if found["differences"]:
        sys.stdout.write("\n")
        rows = [[key, *map(format_setting, values)] for key, values in found["differences"].items()]
        print_table(("setting that differs", *(run["name"] for run in found["runs"])), rows)
    if pairs := found["pairs"]:
        best = found["runs"][0]["name"]
        shown = pairs if len(pairs) <= _MOST_PAIRS else [pair for pair in pairs if best in (pair["one"], pair["other"])]
        sys.stdout.write("\n" + "".join(f"{escape_unprintable(pair['sentence'])}\n" for pair in shown))
        if len(shown) < len(pairs):
            sys.stdout.write(f"({len(pairs):,} pairs in all: --json or --page)\n")
    sys.stdout.write("\n")


def print_conversion(report: dict[str, Any]) -> None:
    """Print what was converted, and the proofs."""
    rows = [
        ["model", f"{report['model']}, {report['parameters']:,} parameters"],
        ["from", f"{report['from']}, {report['tensors']} tensors, all matched"],
        *_source_rows(report["source"]),
        *([["left out", ", ".join(report["left_out"])]] if report["left_out"] else []),
        ["to", f"{report['to']}, {report['destination']}"],
        *(["proof", _spoken_proof(proof)] for proof in report["proofs"]),
    ]
    print_table(None, rows)


def _source_rows(source: dict[str, Any] | None) -> list[list[str]]:
    if source is None:
        return []
    hashes = [["SHA-256", f"{digest} ({name})"] for name, digest in source["sha256"].items()]
    return [["source", source["address"]], *hashes]


def _spoken_proof(proof: dict[str, Any]) -> str:
    if "not_verified" in proof:
        return f"not verified with {proof['library']}: {proof['not_verified']}"
    same = f", equal answers {proof['equal_answers']} of {proof['pictures']}" if "equal_answers" in proof else ""
    return (
        f"{proof['library']} on {proof['pictures']} images: largest difference of {proof['compared']}"
        f" {proof['largest_difference']:.1e} (of {proof['largest_value']:.3g}){same}"
    )
