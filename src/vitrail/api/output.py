"""Print the results of commands: as a table, or as JSON with --json. Each `show_...` function is for one command."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrail.api.results import Report, Rows
from vitrail.core.language import current_language, localise
from vitrail.core.terminal import (
    escape_unprintable,
    format_cell,
    format_duration,
    format_setting,
    print_json,
    print_line,
    print_table,
    say,
)

if TYPE_CHECKING:
    from vitrail.api.predictions import Evaluation
    from vitrail.api.training_commands import Diagnosis
    from vitrail.evaluation.compare_runs import RunComparison
    from vitrail.reports.inspect.inspection_page import Inspection
    from vitrail.training.run import Result


class CliArguments(NamedTuple):
    """Arguments on the command line, which decide how a result is printed."""

    values: Mapping[str, Any]
    """Values of the command's parameters that differ from their defaults."""
    json: bool = False
    open: bool = False


def say_notes(notes: Sequence[str]) -> None:
    """Print notes to stderr."""
    for note in notes:
        say(f"note: {note}")


def _print_page_path(folder: Path | str) -> None:
    print_table(None, [["page", str(Path(folder) / "index.html")]])


def _print_report_path(folder: Path | str) -> None:
    print_line(f"report  {Path(folder) / 'index.html'}")


def _open_in_browser(page: Path) -> None:
    import webbrowser

    webbrowser.open(page.absolute().as_uri())


def show_models(rows: Rows, arguments: CliArguments) -> None:
    """Print models with their parameters, multiply-accumulates and shapes."""
    if arguments.json:
        return print_json(rows.to_json())
    headers = ("name", "family", "parameters", "MACs", "tokens", "resolution", "patch", "width", "depth", "heads")
    keys = [header.lower() for header in headers]
    droppable = ("heads", "patch", "width", "depth", "resolution", "tokens", "MACs", "family")
    return print_table(headers, [[format_cell(row[key]) for key in keys] for row in rows], droppable=droppable)


def show_info(row: Report, arguments: CliArguments) -> None:
    """Print the size and cost of a model."""
    from vitrail.models.zoo import alias_notes

    say_notes(alias_notes(arguments.values["model"]))
    if arguments.json:
        return print_json(row.to_json())
    return print_table(None, [[key, format_cell(value)] for key, value in row.items()])


def show_recipes(result: Report | Rows, arguments: CliArguments) -> None:
    """Print the names of recipes, or the settings of one."""
    if arguments.json:
        return print_json(result.to_json())
    if isinstance(result, Rows):
        return print_table(None, [[row["name"], localise(row["purpose"], "settings")] for row in result])
    sys.stdout.write(f"{escape_unprintable(localise(result['purpose'], 'settings'))}\n\n")
    cells = [
        [row["setting"], *map(format_setting, (row["value"], row["default"])), localise(row["meaning"], "settings")]
        for row in result["settings"]
    ]
    return print_table(("setting", "value", "default", "meaning"), cells)


def show_weights(checkpoints: Rows, arguments: CliArguments) -> None:
    """Print public checkpoints."""
    if arguments.json:
        return print_json(checkpoints.to_json())
    rows = []
    for checkpoint in checkpoints:
        linear = "" if checkpoint.linear is None else f"{checkpoint.linear:.1f} linear"
        score = linear if checkpoint.accuracy is None else f"{checkpoint.accuracy:.1f}"
        classes = f"{checkpoint.classes:,}" if checkpoint.classes else "-"
        shape = [checkpoint.model, f"{checkpoint.config.parameters:,}", f"{checkpoint.pixels}", classes]
        origin = [checkpoint.source or "-", checkpoint.licence, checkpoint.address]
        rows.append([checkpoint.name, *shape, score or "-", *origin])
    headers = ("name", "model", "parameters", "pixels", "classes", "accuracy %", "source", "licence", "where")
    return print_table(headers, rows, droppable=("where", "source", "classes", "licence", "model"))


def show_doctor(diagnosis: "Diagnosis", arguments: CliArguments) -> None:
    """Print the problems of a data set. Exit with code 1 if there are errors."""
    from vitrail.data.doctor import format_findings

    dataset = diagnosis.dataset
    say_notes(dataset.notes)
    if arguments.json:
        print_json(diagnosis.to_json())
    else:
        counts = ", ".join(f"{len(split):,} {name}" for name, split in dataset.splits.items())
        rows = [["data", arguments.values["data"]], ["images", counts], ["classes", f"{len(dataset.labels):,}"]]
        print_table(None, rows)
        for lines in format_findings(diagnosis.findings, dataset.root):
            sys.stdout.write("\n" + "\n    ".join(escape_unprintable(localise(line)) for line in lines) + "\n")
        if not diagnosis.findings:
            sys.stdout.write("\n")
            print_line("no problems found")
    if diagnosis.errors:
        sys.exit(1)


def show_run(result: "Result", arguments: CliArguments) -> None:
    """Print the scores and files of a run. With several ranks, only the first one prints."""
    if result.is_first and result.folder is not None:
        print_run(result.sentence, result.folder)


def show_demo(result: "Result", arguments: CliArguments) -> None:
    """Open the report of the demo with --open. The demo itself prints its results."""
    if arguments.open and result.folder is not None:
        _open_in_browser(result.folder / "report.html")


def show_evaluation(evaluation: "Evaluation", arguments: CliArguments) -> None:
    """Print scores and the paths of written files."""
    say_notes(evaluation.notes)
    if arguments.json:
        return print_json(evaluation.to_json())
    print_scores(evaluation.scores)
    output, page = arguments.values.get("output"), arguments.values.get("page")
    written = {"predictions": output, "page": page and page / "index.html"}
    if rows := [[name, str(path)] for name, path in written.items() if path]:
        sys.stdout.write("\n")
        print_table(None, rows)
    return None


def show_runs(comparison: "RunComparison", arguments: CliArguments) -> None:
    """Print runs side by side."""
    say_notes(comparison.notes)
    if arguments.json:
        return print_json(comparison.to_json())
    print_runs(comparison.to_json())
    return _print_page_path(arguments.values["page"]) if "page" in arguments.values else None


def show_inspection(inspection: "Inspection", arguments: CliArguments) -> None:
    """Print the path of an inspection's page, or its numbers."""
    from vitrail.reports.inspect.inspection_page import LIMIT

    output = arguments.values["output"]
    if (size := (output / "index.html").stat().st_size) > LIMIT and not arguments.values.get("full"):
        say(f"note: the page has {size / 1e6:.1f} MB; use fewer images or layers to make it smaller")
    say_notes(inspection.notes)
    if not inspection.results.is_trained:
        say("note: this model may be untrained; attention maps of random weights are meaningless")
    return print_json(inspection.numbers) if arguments.json else _print_page_path(output)


def show_explain(page: Path, arguments: CliArguments) -> None:
    """Print the path of the page, and open it with --open."""
    print_table(None, [["page", str(page)]])
    if arguments.open:
        _open_in_browser(page)


def show_conversion(report: Report, arguments: CliArguments) -> None:
    """Print the result and the verification of a conversion."""
    say_notes(report["notes"])
    return print_json(report.to_json()) if arguments.json else print_conversion(report)


def show_renamed(report: Report, arguments: CliArguments) -> None:
    """Print the old and new names of labels, and the path of the bundle."""
    if arguments.json:
        return print_json(report.to_json())
    print_table(("label", "new name"), [list(names) for names in report["renamed"].items()])
    sys.stdout.write("\n")
    return print_table(None, [["bundle", report["bundle"]]])


def show_bench(report: Report, arguments: CliArguments) -> None:
    """Print the measurements of every engine."""
    for row in report["left_out"]:
        say(f"note: {row['engine']} {row['precision']} is left out: {row['reason']}")
    say_notes(report["notes"])
    return print_json(report.to_json()) if arguments.json else print_bench(report)


def show_export(proof: Report, arguments: CliArguments) -> None:
    """Print the files of an export and its verification."""
    if arguments.json:
        return print_json(proof.to_json())
    same = f"{proof['same_answers']} of {proof['pictures']} predictions as with torch"
    rows = [["model", ", ".join(proof["files"])], ["to", f"{arguments.values['to']}, {arguments.values['output']}"]]
    if "merging" in proof:
        from vitrail.inference.targets.readme import describe_merging

        rows.append(["merges", describe_merging(proof["merging"])])
    return print_table(None, [*rows, ["proof", f"{same}, logits at most {proof['max_logit_difference']:.1e} apart"]])


CLAIMS = ("lab/lab_report.toml", "lab/questions/*.toml")
"""Message files of the report of the bias lab, which has its claims in both languages."""


def show_comparison(report: Report, arguments: CliArguments) -> None:
    """Print the verdicts of the bias lab, or the measures of bundles."""
    if arguments.json:
        return print_json(report.to_json())
    if "claims" in report:
        _print_lab(report)
    else:
        bundles = report["bundles"]
        names = list(dict.fromkeys(name for bundle in bundles for name in bundle["measures"]))
        rows = [[name, *(_format_measure(bundle["measures"].get(name)) for bundle in bundles)] for name in names]
        print_table(("measure", *(bundle["name"] for bundle in bundles)), rows)
    return _print_report_path(arguments.values["output"])


def _print_lab(report: Report) -> None:
    """Print the claims of the lab, how many have each verdict, and its recommendation."""
    _print_claims(report["claims"])
    lines = ["", *(localise(sentence, CLAIMS) for sentence in report["summary"])]
    if advice := report["recommendation"][current_language()]:
        lines += ["", localise("For images like these:", CLAIMS), *advice]
    sys.stdout.write("".join(f"{escape_unprintable(line)}\n" for line in lines))


def _print_claims(claims: Sequence[dict[str, Any]]) -> None:
    """Print the sentence of each claim of the lab with its verdict, value and interval."""
    points = localise("points", CLAIMS)
    rows = []
    for claim in claims:
        scale, digits, unit = (100, 1, f" {points}") if claim["unit"] == "share" else (1, 2, "")
        value, interval = "-", "-"
        if claim["kind"] == "trained" and claim["value"] is not None:
            value = f"{scale * claim['value']:+.{digits}f}{unit}"
            if claim["interval"] is not None:
                interval = " … ".join(f"{scale * end:+.{digits}f}" for end in claim["interval"])
        sentence, verdict = (localise(claim[name], CLAIMS) for name in ("claim", "verdict"))
        rows.append([claim["id"], sentence, verdict, value, interval])
    headers = ("", "claim", "verdict", "value", "95 % interval")
    print_table(headers, rows, droppable=("95 % interval", "value"), wrapped="claim")


def _format_measure(measure: dict[str, Any] | None) -> str:
    if measure is None:
        return "-"
    low, high = measure["interval"]
    reference = f"  [{measure['reference']:.3f}]" if "reference" in measure else ""
    return f"{measure['value']:.3f} ({low:.3f} to {high:.3f}){reference}"


def print_run(sentence: str | None, folder: Path) -> None:
    """Print the scores of a finished run and its folder."""
    if sentence:
        print_line(sentence)
    print_line(f"model   {folder / 'bundle'}")
    print_line(f"report  {folder / 'report.html'}")


def print_bench(report: dict[str, Any]) -> None:
    """Print a row for each engine and precision of `vitrail bench`, and the workload."""
    headers = ["engine", "precision", "images/s", "start s", "memory MB", "size MB", "same predictions"]
    has_accuracy = any("accuracy" in row for row in report["ways"])
    rows = []
    for row in report["ways"]:
        sizes = [f"{row['memory'] / 1e6:,.0f}", f"{row['size'] / 1e6:,.1f}"]
        same = localise(f"{row['same']:,} of {row['images']:,}", "cells") if "same" in row else "-"
        cells = [f"{row['images_per_second']:,.1f}", f"{row['start_seconds']:.2f}", *sizes, same]
        if has_accuracy:
            low, high = row.get("accuracy_interval", (0, 0))
            is_measured = "accuracy" in row
            cells.append(f"{row['accuracy']:.1%} ({format_interval(low, high, 1)})" if is_measured else "-")
            pair = f"{row['only_this']} against {row['only_float32']}, p = {row['p_value']:.2g}" if is_measured else "-"
            cells.append(pair)
        rows.append([row["engine"], row["precision"], *cells])
    accuracy_headers = ["accuracy", "right only with it, only with float32"] if has_accuracy else []
    print_table([*headers, *accuracy_headers], rows)
    if dependent := [f"{row['engine']} {row['precision']}" for row in report["ways"] if row["depends_on_batch"]]:
        sys.stdout.write("\n")
        print_line(f"{', '.join(dependent)}: a prediction may depend on the other images of its batch")
    workload = report["load"]
    sys.stdout.write("\n")
    print_line(f"batches of {workload['batch']}, {workload['callers']} threads, predictions on {report['data']}")
    print_line(report["machine"])


def print_scores(scores: dict[str, Any]) -> None:
    """Print the main scores of an evaluation, and the classes, worst first."""
    from vitrail.evaluation.metrics import worst_first

    matched = f"; classes matched {scores['labels_matched']}" if "labels_matched" in scores else ""
    rows = [["data", f"{scores['data']} ({scores['split']}, {scores['count']:,} images{matched})"]]
    if "features" in scores:
        origin = "input of the head" if scores["layer"] is None else f"layer {scores['layer']}, {scores['pooling']}"
        cached = "; cached" if scores["cached"] else ""
        rows.append(
            ["learned from", f"{scores['train_count']:,} images, {scores['features']} features ({origin}{cached})"]
        )
    if scores.get("penalty") is not None:
        rows.append(["penalty", f"{scores['penalty']:.3g}"])
    if "map" in scores:
        return _print_multilabel_scores(scores, rows)
    low, high = scores["accuracy_interval"]
    rows += [
        ["accuracy", f"{scores['accuracy']:.2%} (95 % interval {low:.2%} to {high:.2%})"],
        ["top 5", f"{scores['top5']:.2%}"],
    ]
    if scores["ece"] is not None:
        rows.append(["calibration error", f"{scores['ece']:.3f}"])
    rows.append(_macro_row(scores["macro"]))
    if "against" in scores:
        rows.append(["against", scores["against"]["sentence"]])
    print_table(None, rows)
    if "shots" in scores:
        sys.stdout.write("\n")
        rows = [[f"{row['shots']}", f"{row['train_count']:,}", *_mean_cells(row)] for row in scores["shots"]]
        rows.append(
            ["all", f"{scores['train_count']:,}", f"{scores['accuracy']:.2%}", f"{format_interval(low, high)} (Wilson)"]
        )
        print_table(("of each class", "images", "accuracy", f"95 % interval ({scores['seeds']} draws)"), rows)
    sys.stdout.write("\n")
    rows = [
        [row["label"], f"{row['right']:,}", f"{row['count']:,}", *(f"{row[name]:.1%}" for name in _CLASS_METRICS)]
        for row in worst_first(scores["per_class"], "accuracy")[:20]
    ]
    print_table(("class (worst first)", "right", "of", "precision", "recall", "F1"), rows)
    return None


_CLASS_METRICS = ("precision", "recall", "f1")


def _macro_row(macro: dict[str, float | None]) -> list[str]:
    precision, recall, f1 = (_format_share(macro[name]) for name in _CLASS_METRICS)
    return ["mean of classes", f"precision {precision}, recall {recall}, F1 {f1}"]


def _print_multilabel_scores(scores: dict[str, Any], rows: list[list[str]]) -> None:
    """Print the scores of a bundle that predicts several labels per image, after the given rows."""
    from vitrail.evaluation.metrics import worst_first

    rows += [
        ["mAP", _format_share(scores["map"])],
        ["F1 at the thresholds", _format_share(scores["f1"])],
        ["all labels right", _format_share(scores["accuracy"])],
        _macro_row(scores["macro"]),
    ]
    print_table(None, rows)
    sys.stdout.write("\n")
    cells = [
        [
            row["label"],
            f"{row['count']:,}",
            *(_format_share(row[name]) for name in ("average_precision", *_CLASS_METRICS)),
        ]
        for row in worst_first(scores["per_class"], "average_precision")[:20]
    ]
    print_table(("label (worst first)", "images", "average precision", "precision", "recall", "F1"), cells)


def _format_share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _mean_cells(row: dict[str, Any]) -> list[str]:
    interval = row["accuracy_interval"]
    return [f"{row['accuracy']:.2%}", "-" if interval is None else format_interval(*interval)]


def format_interval(low: float, high: float, digits: int = 2) -> str:
    """Return an interval of shares as percentages."""
    return localise(f"{low:.{digits}%} to {high:.{digits}%}", "cells")


_MAX_PAIRS = 10


def print_runs(comparison: dict[str, Any]) -> None:
    """Print runs side by side, the best first: scores, settings that differ, comparisons."""
    rows = []
    for run in comparison["runs"]:
        accuracy, interval, images = "-", "-", "-"
        if run["accuracy"] is not None:
            low, high = run["accuracy_interval"]
            accuracy, interval = f"{run['accuracy']:.1%}", format_interval(low, high, 1)
            images = f"{run['count']:,} {run['split']}"
        steps = f"{run['steps']:,}{'' if run['finished'] else ' (unfinished)'}"
        time = "-" if run["seconds"] is None else format_duration(run["seconds"])
        rows.append([run["folder"], run["result"], accuracy, interval, images, steps, time])
    names = ("run", "model", "accuracy", "95 % interval", "images", "steps", "time")
    print_table(names, rows, droppable=("time", "steps", "images"))
    if comparison["differences"]:
        sys.stdout.write("\n")
        rows = [[key, *map(format_setting, values)] for key, values in comparison["differences"].items()]
        print_table(("setting that differs", *(run["name"] for run in comparison["runs"])), rows)
    if pairs := comparison["pairs"]:
        best_run = comparison["runs"][0]["name"]
        best_pairs = [pair for pair in pairs if best_run in (pair["one"], pair["other"])]
        printed_pairs = pairs if len(pairs) <= _MAX_PAIRS else best_pairs
        sys.stdout.write("\n")
        for pair in printed_pairs:
            print_line(pair["sentence"])
        if len(printed_pairs) < len(pairs):
            print_line(f"({len(pairs):,} pairs in total; --json and --page show all)")
    sys.stdout.write("\n")


def print_conversion(report: dict[str, Any]) -> None:
    """Print the result and the verification of a conversion."""
    rows = [
        ["model", f"{report['model']}, {report['parameters']:,} parameters"],
        ["from", f"{report['from']}, {report['tensors']} tensors, all matched"],
        *_source_rows(report["source"]),
        *([["left out", ", ".join(report["left_out"])]] if report["left_out"] else []),
        ["to", f"{report['to']}, {report['destination']}"],
        *(["proof", _format_proof(proof)] for proof in report["proofs"]),
    ]
    print_table(None, rows)


def _source_rows(source: dict[str, Any] | None) -> list[list[str]]:
    if source is None:
        return []
    hashes = [["SHA-256", f"{digest} ({name})"] for name, digest in source["sha256"].items()]
    return [["source", source["address"]], *hashes]


def _format_proof(proof: dict[str, Any]) -> str:
    if "not_verified" in proof:
        return f"not verified with {proof['library']}: {proof['not_verified']}"
    same = f", equal answers {proof['equal_answers']} of {proof['pictures']}" if "equal_answers" in proof else ""
    return (
        f"{proof['library']} on {proof['pictures']} images: largest difference of {proof['compared']}"
        f" {proof['largest_difference']:.1e} (of {proof['largest_value']:.3g}){same}"
    )
