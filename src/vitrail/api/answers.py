"""Commands that let a bundle answer: on data with labels, and on images."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitrail.api import tasks
from vitrail.api.flags import (
    BundlePath,
    Data,
    Device,
    EngineName,
    Json,
    Precision,
    Tolerance,
    arg,
    lines_of_stdin,
)
from vitrail.core.errors import DamagedError, UsageError
from vitrail.core.settings import check_integer
from vitrail.core.terminal import (
    Meter,
    prediction_table,
    print_json,
    print_scores,
    print_table,
    say,
)
from vitrail.data.image_files import find_images
from vitrail.data.sources.registry import find_split
from vitrail.evaluation.predictions.tables import endings


def evaluate(
    bundle: BundlePath,
    data: Data,
    *,
    split: Annotated[
        str | None,
        arg(
            metavar="S",
            help="train, val, test, all or held-out; default: test, otherwise val, otherwise the images that the"
            " bundle's training held out of DATA, otherwise all images.",
        ),
    ] = None,
    protocol: Annotated[
        Literal["classify", "knn", "probe", "fewshot"],
        arg(
            help="classify: the bundle's own predictions. The others fit a classifier of DATA's classes on the frozen"
            " model's features of the train split: knn, nearest neighbours; probe, logistic regression; fewshot, the"
            " paper's least squares from a few images of each class."
        ),
    ] = "classify",
    layer: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Use the output of this layer as features, from 0 or from the end (-1): [CLS] or the mean. Default:"
            " the input of the head.",
        ),
    ] = None,
    neighbours: Annotated[int | None, arg(metavar="K", help="knn: number of neighbours (20).")] = None,
    temperature: Annotated[
        float | None, arg(metavar="T", help="knn: weight of a vote exp(similarity / T) (0.07); 0: equal weights.")
    ] = None,
    shots: Annotated[
        tuple[int, ...] | None, arg(metavar="K", help="fewshot: numbers of images per class (1 5 10 25); then all.")
    ] = None,
    seeds: Annotated[
        int | None, arg(metavar="N", help="fewshot: random choices of images for each number (5).")
    ] = None,
    penalty: Annotated[
        float | None,
        arg(metavar="L", help="probe, fewshot: L2 penalty; default: chosen on held-out images or by leave-one-out."),
    ] = None,
    seed: Annotated[
        int | None,
        arg(
            metavar="S",
            help="Seed of the held-out share of data without splits (by default as in the bundle's training), of probe"
            " and of fewshot (0).",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        arg(metavar="DIR", help="Cache of features (~/.cache/vitrail/features); it can be deleted at any time."),
    ] = None,
    engine: EngineName = "torch",
    precision: Precision = "float32",
    tolerance: Tolerance = 0.02,
    workers: Annotated[int, arg(metavar="N", help="Number of threads that decode and prepare images.")] = 2,
    device: Device = "auto",
    output: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help=f"Also write each image's label and answers: a file that ends in {', '.join(endings())}; or .npz, to"
            " compare them later, as in a run.",
        ),
    ] = None,
    page: Annotated[
        Path | None, arg(metavar="DIR", help="Also write pages of all mistakes; labels that are likely wrong first.")
    ] = None,
    against: Annotated[
        str | None,
        arg(metavar="BUNDLE|NPZ", help="Another bundle, or answers of one: which is better, by a paired test?"),
    ] = None,
    force: Annotated[bool, arg(help="Overwrite FILE and DIR.")] = False,
    json: Json = False,
) -> None:
    """Evaluate a bundle on data: accuracy with its interval, top 5, calibration, each class; of several labels, mAP."""
    settings: dict[str, Any] = {
        "layer": layer,
        "neighbours": neighbours,
        "temperature": temperature,
        "shots": shots,
        "seeds": seeds,
        "penalty": penalty,
        "seed": seed,
        "cache": cache,
    }
    running: dict[str, Any] = {"workers": workers, "device": device}
    way: dict[str, Any] = {"engine": engine, "precision": precision, "tolerance": tolerance}
    outputs: dict[str, Any] = {"output": output, "page": page, "against": against}
    if asked := [name for name, value in outputs.items() if value is not None]:
        if protocol != "classify":
            raise UsageError(f"--{asked[0]} must come with --protocol classify, got {protocol}.")
        from vitrail.evaluation.protocols import check_settings
        from vitrail.inference.select import Wish
        from vitrail.reports.evaluation_outputs import evaluate_each

        check_settings(protocol, settings)
        scores = evaluate_each(bundle, data, split, force=force, wish=Wish(**way), **outputs, **running)
    else:
        scores = tasks.evaluate(bundle, data, split, protocol=protocol, **settings, **running, **way).scores
    for note in scores["notes"]:
        say(f"note: {note}")
    if json:
        return print_json(scores)
    print_scores(scores)
    written = [
        [name, str(path)] for name, path in (("answers", output), ("page", page and page / "index.html")) if path
    ]
    if written:
        sys.stdout.write("\n")
        print_table(None, written)
    return None


def predict(
    bundle: BundlePath,
    files: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        arg(
            metavar="FILE|DIR|GLOB|DATA|-",
            help="Images, folders of them, quoted patterns such as 'photos/**/*.jpg', a data set alone (.npz, .csv,"
            " digits, ...), or - for names from stdin, one per line.",
        ),
    ],
    *,
    top_k: Annotated[
        int | None,
        arg(metavar="K", help="Number of classes to show for each image (5); of several labels, the most to show."),
    ] = None,
    threshold: Annotated[
        float | None,
        arg(
            metavar="T",
            help="For a bundle that answers with several labels: show those with at least this probability; default:"
            " each label's own, stored in BUNDLE.",
        ),
    ] = None,
    engine: EngineName = "torch",
    precision: Precision = "float32",
    tolerance: Tolerance = 0.02,
    threads: Annotated[
        int | None, arg(metavar="N", help="Number of threads that decode and compute; default: every core.")
    ] = None,
    device: Device = "auto",
    jpeg: Annotated[
        Literal["exact", "double"] | None,
        arg(
            metavar="{exact,double}",
            help="Decode JPEG files exactly, or (double) large ones at a reduced scale, faster; default: as in BUNDLE.",
        ),
    ] = None,
    features: Annotated[
        Path | None,
        arg(metavar="OUT.npz", help="Also write features, the input of the head: arrays `files` and `features`."),
    ] = None,
    output: Annotated[
        Path | None,
        arg(metavar="FILE", help=f"Write the answers to a file that ends in {', '.join(endings())}, a row an image."),
    ] = None,
    page: Annotated[
        Path | None, arg(metavar="DIR", help="Write a contact sheet: pages of all images by their answer.")
    ] = None,
    sort: Annotated[
        Literal["uncertain", "confident"] | None,
        arg(metavar="{uncertain,confident}", help="Order of the answers, when all are known; default: as given."),
    ] = None,
    split: Annotated[
        str | None, arg(metavar="S", help="Of a data set: train, val or test; default: as in evaluate.")
    ] = None,
    force: Annotated[bool, arg(help="Overwrite OUT.npz, FILE and DIR.")] = False,
    json: Annotated[bool, arg(help="Print a JSON line for each image instead of a table.")] = False,
) -> None:
    """Classify images. Files that cannot be read are reported, the others classified; the exit code is then 1.

    With --output or --page, the answers go there instead of to the terminal.
    """
    if top_k is not None:
        check_integer("top_k", top_k, low=1, high=10_000_000)
    from vitrail.bundles.metadata import read_parts
    from vitrail.inference.classifier import Classifier
    from vitrail.inference.select import Wish, choose_way
    from vitrail.reports.prediction_outputs import Outputs

    outputs = Outputs(table=output, page=page, features=features, sort=sort, force=force)
    outputs.check()
    data = find_split(files, split)
    names = find_images(files, lines_of_stdin()) if data is None else list(map(data.name_of, range(len(data))))
    images = names if data is None else data.images
    wish = Wish(engine, precision, tolerance)
    wish.check()
    parts = read_parts(bundle, weights=False)
    parts.answer.check_threshold(threshold)
    if features is None or outputs.need_classes:
        parts.check_classifies()
    if outputs.need_classes:
        parts.check_one_class("--output, --page and --sort")
    way = choose_way(wish, bundle, images=images, threads=threads, device=device)
    classifier = Classifier(bundle, **way._asdict(), threads=threads, jpeg=jpeg, device=device)
    is_shown = json or (output is None and page is None)
    goes_on = any((features, output, page))
    asked = {"features": features is not None, "thumbnails": page is not None}
    with Meter(len(names), "images") as meter:
        show = None
        if is_shown:
            show = _printing(json, names, classifier.labels, parts.answer.nothing, meter, goes_on=goes_on)
        answers = _metered(classifier.stream(images, names=names, top_k=top_k, threshold=threshold, **asked), meter)
        errors = outputs.take(answers, model=bundle, best=min(top_k or 5, len(classifier.labels)), show=show)
    written = {"answers": output, "page": page and page / "index.html"}
    if not classifier.labels or not is_shown:
        written["features"] = features
    if not json and (lines := [[name, str(path)] for name, path in written.items() if path is not None]):
        print_table(None, lines)
    if errors and is_shown and sys.stdout.isatty():  # each of them has just been seen
        sys.exit(1)
    if errors:
        raise DamagedError(f"{len(errors):,} of {len(names):,} images could not be classified; the first: {errors[0]}")


def _metered(answers: Iterable[dict[str, Any]], meter: Meter) -> Iterator[dict[str, Any]]:
    """The answers; the meter is told of each when it has been taken."""
    for done, answer in enumerate(answers, 1):
        yield answer
        meter(done)


def _printing(
    json: bool, names: Sequence[str], labels: Sequence[str], blank: str, meter: Meter, *, goes_on: bool
) -> Callable[[dict[str, Any]], None]:
    """What prints an answer as soon as it is known. If its reader leaves (`| head`), other outputs may still be due."""
    show = print_json if json else prediction_table(names, labels, blank=blank)

    def receive(answer: dict[str, Any]) -> None:
        if sys.stdout.isatty():  # rows and the meter share the terminal
            meter.clear()
        try:
            show(answer)
            sys.stdout.flush()
        except BrokenPipeError:
            if not goes_on:
                raise
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115

    return receive
