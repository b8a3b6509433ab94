"""Print predictions, each as soon as it is computed: as a table, or as JSON lines with --json."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vitrail.api.output import CliArguments
from vitrail.core.errors import CorruptFileError
from vitrail.core.language import localise
from vitrail.core.terminal import display_width, escape_unprintable, print_json, print_table, terminal_width

if TYPE_CHECKING:
    from vitrail.bundles.metadata import BundleInfo
    from vitrail.inference.classifier import Prediction, Predictions


def receive_predictions(
    arguments: CliArguments, names: Sequence[str], labels: Sequence[str], info: "BundleInfo"
) -> "Callable[[Prediction], None]":
    """Return a function that prints each prediction as soon as it is computed, unless only files are written."""
    values = arguments.values
    if arguments.json:
        show = _print_json_line
    elif "output" in values or "page" in values:
        return lambda prediction: None
    else:
        # Classes that do not fit into the terminal are left out, unless the user asked for their number.
        columns = terminal_width(sys.stdout) if sys.stdout.isatty() and "top_k" not in values else None
        show = prediction_table(names, labels, blank=info.answer.no_label, columns=columns)
    writes_files = not values.keys().isdisjoint(("features", "output", "page"))
    return _ignore_closed_pipe(show) if writes_files else show


def _print_json_line(prediction: "Prediction") -> None:
    """Print a prediction as one line of JSON, without delay."""
    print_json(prediction.to_json())
    sys.stdout.flush()


def _ignore_closed_pipe(show: "Callable[[Prediction], None]") -> "Callable[[Prediction], None]":
    """Wrap a function that prints predictions: after stdout is closed (`| head`), it prints nothing and raises nothing.

    The files of predictions are still to be written.
    """

    def receive(prediction: "Prediction") -> None:
        try:
            show(prediction)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115

    return receive


def show_predictions(failed: "Predictions", arguments: CliArguments) -> None:
    """Print the paths of written files. Exit with code 1 if images could not be classified."""
    output, page, features = map(arguments.values.get, ("output", "page", "features"))
    is_printed = arguments.json or (output is None and page is None)
    written = {"predictions": output, "page": page and page / "index.html"}
    if not failed.labels or not is_printed:
        written["features"] = features
    if not arguments.json and (lines := [[name, str(path)] for name, path in written.items() if path is not None]):
        print_table(None, lines)
    if failed and is_printed and sys.stdout.isatty():  # the terminal shows their errors already
        sys.exit(1)
    if failed:
        counts = f"{len(failed):,} of {failed.total:,} images"
        raise CorruptFileError(f"{counts} could not be classified; the first: {failed[0].error}")


def prediction_table(
    paths: Sequence[str], labels: Sequence[str], *, blank: str = "", columns: int | None = None
) -> "Callable[[Prediction], None]":
    """Return a function that prints the row of a prediction.

    Column widths are computed from `paths` and `labels`, so that rows can be printed one by one. `blank` is the text
    for a prediction without labels; if it is empty, no row is printed. If a row is longer than `columns`, its least
    probable classes are left out.
    """
    file_width = max(display_width(escape_unprintable(path)) for path in paths)
    label_width = min(max(display_width(escape_unprintable(label)) for label in labels or "-"), 40) + len(" 0.123")

    def show(prediction: "Prediction") -> None:
        if prediction.error is None and not prediction.classes and not blank:  # a model without a head
            return
        best, *rest = [f"{label} {score:.3f}" for label, score in prediction.classes] or [blank]
        if prediction.error is not None:
            best, rest = localise(f"error: {prediction.error}"), []
        row = ""
        for cell, width in ((prediction.file, file_width), (best, label_width)):
            text = escape_unprintable(cell)
            row += text + " " * max(width - display_width(text), 0) + "  "
        row += (
            ", ".join(map(escape_unprintable, rest))
            if columns is None
            else _join_fitting(rest, columns - display_width(row))
        )
        sys.stdout.write(row.rstrip() + "\n")
        sys.stdout.flush()

    return show


def _join_fitting(entries: Sequence[str], columns: int) -> str:
    """Join entries by commas, as many as fit into `columns`."""
    for count in range(len(entries), 0, -1):
        text = escape_unprintable(", ".join(entries[:count])) + ("" if count == len(entries) else ", ...")
        if display_width(text) <= columns:
            return text
    return ""
