"""`vitrail.train`, `finetune`, `evaluate`, `predict` and `inspect`: each command as a function, and what it returns.

The commands call these functions, except where they write the answer to each image. torch is imported only when the
arguments have been checked.
"""

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, Never, TypedDict, Unpack

from vitrail.bundles.folder import check_folder
from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.other_tools import same_word
from vitrail.core.settings import as_integer, check_integer, spoken
from vitrail.core.terminal import Meter, in_notebook
from vitrail.data.image_files import find_images
from vitrail.models import zoo
from vitrail.training.options import Options
from vitrail.training.recipe import (
    Recipe,
    adjust_recipe,
    find_recipe,
    recipe_names,
)

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle
    from vitrail.data.preprocess import ImageLike
    from vitrail.data.sources.registry import AnyData
    from vitrail.evaluation.protocols import Protocol
    from vitrail.reports.inspect.page import Inspection
    from vitrail.training.callback import Callback
    from vitrail.training.run import Result


class RunOptions(TypedDict, total=False):
    """The less usual keywords of `train` and `finetune`, with the meaning of the flags of these names."""

    workers: int
    """Threads that prepare images (2)."""
    threads: int | None
    """Threads that compute; by default torch's choice."""
    device: str
    """cpu, cuda, xpu, mps, ...; auto (default) takes the accelerator that torch finds, otherwise the CPU."""
    precision: Literal["float32", "bfloat16"]
    """bfloat16 computes in 16 bits where that is safe (float32)."""
    amp: bool
    """The same as precision="bfloat16"."""
    compile: bool
    """Compile the model first."""
    cache: str | None
    """Folder for decoded images, so that later epochs decode no JPEG files."""
    cache_gigabytes: float
    """Maximum size of the cache (10)."""
    checkpoint_seconds: float
    """Seconds between checkpoints (30); one is also written at the end of an epoch."""
    snapshots: int
    """Keep the model at this many log-spaced steps as bundles in the folder of the run."""
    gradients: bool
    """Log the norm of each layer's gradient with the loss."""
    keep: int
    """Number of newest checkpoints to keep, besides the best (2)."""


def train(
    data: "AnyData",
    model: str,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    recipe: str | Path | Recipe = "small",
    lr: float | None = None,
    batch: int | None = None,
    per_class: int | None = None,
    patience: int | None = None,
    settings: Mapping[str, Any] | Iterable[str] = (),
    objective: str | None = None,
    resolution: int | tuple[int, int] | None = None,
    seed: int = 0,
    output: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    callback: "Callback | None" = None,
    quiet: bool | None = None,
    command: str = "",
    **options: Unpack[RunOptions],
) -> "Result":
    """Train a model from scratch, as `vitrail train` does: `vitrail.train("photos", "ViT-S/16", epochs=20)`.

    The keywords have the meaning of the command's flags:

        data         a path or a built-in name; arrays (images, labels), (paths, labels), a mapping of `train_images`
                     ... `test_labels`; or a `vitrail.data.dataset.Dataset`
        model        a name of `vitrail models`; channels, classes and small presets' resolution come from the data
        epochs, steps, minutes    the length: one of them, unless the recipe has one
        recipe       a name of `vitrail recipes`, a .toml file, or a `Recipe`
        lr, batch    peak learning rate and global batch size, instead of the recipe's
        per_class    train on at most this many images of each class
        patience     end after this many evaluations without a better one on held-out images, and keep the best weights
        settings     any other settings of the recipe: {"clip": 1.0, "augment.mixup": 0.2, "model.dropout": 0.1}
        objective    classify, masked or next-pixel, instead of the recipe's
        resolution   input size: 224, or (224, 384) for height and width
        seed         of everything random
        output       folder of the run, as the command writes it; None: nothing is left but what is returned
        resume       continue the run in `output` from its newest intact checkpoint, or start if there is none
        force        overwrite the run in `output`
        callback     a function that is called with a `Step` (step, total, epoch, loss, learning_rate, model, held_out)
                     after every step; it ends the run by returning True
        quiet        print no notes and progress; by default they are shown in terminals and notebooks only
        command      what the run records about how it was made; by default this call
        options      `RunOptions`: workers, threads, device, ...

        >>> result = vitrail.train("digits", "ViT-Pico/2", steps=2, batch=16)
        >>> result.steps, result.scores["count"], result.bundle.labels[:3]
        (2, 360, ('0', '1', '2'))
    """
    command = command or _as_call(train, locals())
    chosen_options = _check_options(train, options, seed)
    _check_callback(callback)
    given = {"learning_rate": lr, "batch": batch, "per_class": per_class, "patience": patience}
    chosen = recipe if isinstance(recipe, Recipe) else find_recipe(str(recipe))
    if objective is not None:
        chosen = chosen.replace(objective=objective)
    chosen = adjust_recipe(chosen, given, settings, epochs=epochs, steps=steps, minutes=minutes)
    if resolution is not None:
        height, width = _as_pair(resolution)
        sides = height if height == width else [height, width]
        chosen = chosen.replace(model={**chosen.model, "resolution": sides})
    if not isinstance(model, str):
        raise UsageError(
            f"Model must be a name that `vitrail models` lists, got {type(model).__name__}. A model that exists is"
            " trained by vitrail.finetune(vitrail.Bundle(model=model, preprocess=...), data)."
        )
    zoo.find(model)
    with _folder_of(output, resume=resume, chosen=chosen_options) as folder:
        from vitrail.training.run import train as run

        result = run(
            data,
            model,
            folder,
            chosen,
            chosen_options,
            resumes=resume,
            force=force,
            quiet=_is_quiet(quiet),
            command=command,
            callback=callback,
        )
    return dataclasses.replace(result, folder=None) if output is None else result


def finetune(
    bundle: "str | Path | Bundle",
    data: "AnyData",
    *,
    epochs: int | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    recipe: str | Path | Recipe = "auto",
    lr: float | None = None,
    batch: int | None = None,
    per_class: int | None = None,
    patience: int | None = None,
    settings: Mapping[str, Any] | Iterable[str] = (),
    resolution: int | tuple[int, int] | None = None,
    seed: int = 0,
    output: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    callback: "Callback | None" = None,
    quiet: bool | None = None,
    command: str = "",
    **options: Unpack[RunOptions],
) -> "Result":
    """Fine-tune a bundle on other data, as `vitrail finetune` does: `vitrail.finetune("deit", "photos", epochs=5)`.

    The keywords are those of `train`, and:

        bundle       a folder written by train, finetune or convert, an embedded bundle's name, or a
                     `vitrail.Bundle`, which stays as it is
        recipe       auto: fit the head by least squares, then train all layers if the time allows (5 minutes), and
                     keep the better of both on held-out images; frozen: only that head; or another recipe
        resolution   input size, 384 or (224, 384); position embeddings are interpolated

        >>> shades = np.stack([np.zeros((20, 28, 28)), np.full((20, 28, 28), 255)]).astype(np.uint8)
        >>> tuned = vitrail.finetune("fashion", (shades.reshape(40, 28, 28), ["dark"] * 20 + ["light"] * 20), steps=1)
        >>> tuned.bundle.labels, tuned.accuracy
        (('dark', 'light'), 1.0)
    """
    command = command or _as_call(finetune, locals())
    chosen_options = _check_options(finetune, options, seed)
    _check_callback(callback)
    given = {"learning_rate": lr, "batch": batch, "per_class": per_class, "patience": patience}
    chosen = recipe if isinstance(recipe, Recipe) else find_recipe(str(recipe))
    if str(recipe) in recipe_names():  # their preprocessing is for new models; here it is the bundle's
        chosen = chosen.replace(preprocess={})
    chosen = adjust_recipe(chosen, given, settings, epochs=epochs, steps=steps, minutes=minutes)
    if isinstance(bundle, str | Path):
        check_folder(bundle)
    with _folder_of(output, resume=resume, chosen=chosen_options) as folder:
        from vitrail.training.finetune import finetune as run

        result = run(
            bundle,
            data,
            folder,
            chosen,
            chosen_options,
            resolution=None if resolution is None else _as_pair(resolution),
            resumes=resume,
            force=force,
            quiet=_is_quiet(quiet),
            command=command,
            callback=callback,
        )
    return dataclasses.replace(result, folder=None) if output is None else result


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """Scores of a bundle on data."""

    accuracy: float
    """Share of images whose class was predicted; of several labels, of those with all labels right."""
    accuracy_interval: tuple[float, float]
    """Its 95 % interval (Wilson's)."""
    count: int
    """Number of images."""
    top5: float | None
    """Share of images whose class is among the five most probable; None for several labels."""
    ece: float | None
    """Expected calibration error; None if the protocol has no probabilities."""
    split: str
    """Which images: test, val, held-out, all, ..."""
    scores: dict[str, Any]
    """All scores, as `vitrail evaluate --json` prints them: also `per_class`, `confusion` and `notes`."""
    map: float | None = None
    """Mean average precision, if the bundle answers with several labels."""
    trained_on: bool = False
    """Whether the bundle was trained on images among these, as far as its provenance says."""

    @property
    def right(self) -> int:
        """Number of images whose class was predicted."""
        return round(self.accuracy * self.count)

    def __repr__(self) -> str:
        trained_on = ", training images" if self.trained_on else ""
        if self.map is not None:
            return f"Evaluation({self.split} mAP {self.map:.1%}, {self.count:,} images{trained_on})"
        low, high = self.accuracy_interval
        calibration = "" if self.ece is None else f", calibration error {self.ece:.3f}"
        return (
            f"Evaluation({self.split} accuracy {self.accuracy:.1%}, {self.right:,} of {self.count:,}, 95 % interval"
            f" {low:.1%} to {high:.1%}{calibration}{trained_on})"
        )

    def _repr_html_(self) -> str:
        from vitrail.core.notebook import card

        low, high = self.accuracy_interval
        rows = [
            (
                "accuracy",
                f"{self.accuracy:.1%} ({self.right:,} of {self.count:,}; 95 % interval {low:.1%} to {high:.1%})",
            ),
            *([] if self.map is None else [("mean average precision", f"{self.map:.1%}")]),
            *([] if self.top5 is None else [("top 5", f"{self.top5:.1%}")]),
            *([] if self.ece is None else [("calibration error", f"{self.ece:.3f}")]),
        ]
        what = f"{self.split} images" + (" (training images)" if self.trained_on else "")
        return card(what, rows, "vitrail.evaluate")


def evaluate(
    bundle: "str | Path | Bundle",
    data: "AnyData",
    split: str | None = None,
    *,
    protocol: "Protocol" = "classify",
    layer: int | None = None,
    neighbours: int | None = None,
    temperature: float | None = None,
    shots: Sequence[int] | None = None,
    seeds: int | None = None,
    penalty: float | None = None,
    seed: int | None = None,
    cache: str | Path | None = None,
    engine: str = "torch",
    precision: str = "float32",
    tolerance: float = 0.02,
    workers: int = 2,
    device: str | None = None,
    **others: Never,
) -> Evaluation:
    """Evaluate a bundle on data, as `vitrail evaluate` does: `vitrail.evaluate("run/bundle", "photos").accuracy`.

    The keywords have the meaning of the command's flags:

        bundle       a path, an embedded bundle's name, or a `vitrail.Bundle`
        data         as for `train`
        split        train, val, test, all or held-out; by default test, otherwise val, otherwise the images that the
                     bundle's training held out of this data, otherwise all images (a note says so)
        protocol     classify: the bundle's own predictions; knn, probe or fewshot: a classifier of the data's
                     classes on the features of the frozen model
        layer, neighbours, temperature, shots, seeds, penalty, seed, cache    settings of these protocols
        engine, precision, tolerance    how to run the model with protocol classify, as for `predict`
        workers      threads that prepare images
        device       where to compute: by default auto, as in `train`, or where the model of a `vitrail.Bundle` is

        >>> found = vitrail.evaluate("fashion", "fashion-40")
        >>> found.count, found.right == round(40 * found.accuracy), found.accuracy > 0.8
        (40, True, True)
    """
    if "against" in others:
        raise UsageError(
            "Against must be left out: two models are compared by the command `vitrail evaluate BUNDLE DATA --against"
            " OTHER`."
        )
    _check_keywords(evaluate, others)
    from vitrail.evaluation.protocols import evaluate as judge
    from vitrail.inference.select import Wish

    scores = judge(
        bundle,
        data,
        split,
        protocol=protocol,
        layer=layer,
        neighbours=neighbours,
        temperature=temperature,
        shots=shots,
        seeds=seeds,
        penalty=penalty,
        seed=seed,
        cache=cache,
        workers=workers,
        device=device,
        wish=Wish(engine, precision, tolerance),
    )
    low, high = scores["accuracy_interval"]
    names = ("accuracy", "count", "top5", "ece", "split", "map", "trained_on")
    kept: dict[str, Any] = {name: scores.get(name) for name in names}
    return Evaluation(**kept, accuracy_interval=(low, high), scores=scores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The answer for one image."""

    file: str
    """Path of the image; "image 3" if it was given as an array."""
    label: str | None
    """The most probable class; None if the image could not be read."""
    score: float | None
    """Its probability."""
    classes: tuple[tuple[str, float], ...] = dataclasses.field(repr=False)
    """The most probable classes with their probabilities, best first."""
    error: str | None = None
    """Why the image could not be classified."""


class Predictions(list[Prediction]):
    """A list of `Prediction`, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from vitrail.core.notebook import bar, rows_of

        rows = [
            (one.file, one.error) if one.label is None else (one.file, one.label, bar(one.score or 0.0))
            for one in self[:_SHOWN]
        ]
        return rows_of(("image", "class", "probability"), rows, max(len(self) - _SHOWN, 0))


_SHOWN = 20  # predictions in a notebook


def predict(
    bundle: "str | Path | Bundle",
    images: "ImageLike | Iterable[ImageLike]",
    *,
    top_k: int | None = None,
    threshold: float | None = None,
    engine: str = "torch",
    precision: str = "float32",
    tolerance: float = 0.02,
    threads: int | None = None,
    jpeg: Literal["exact", "double"] | None = None,
    device: str | None = None,
    **others: Never,
) -> Predictions:
    """Classify images, as `vitrail predict` does: `vitrail.predict("run/bundle", "new-photos")[0].label`.

    An image that cannot be read has an `error` instead of a label; the others are classified. The keywords:

        bundle       a path, an embedded bundle's name, or a `vitrail.Bundle`
        images       a file, a folder, a pattern such as "photos/**/*.jpg", or a list of these; or pixels (n, height,
                     width[, channels]), uint8, an array or a tensor; or a list of arrays, Pillow images, or files in
                     bytes
        top_k        number of classes in `classes` (5); of several labels, the most
        threshold    for a bundle that answers with several labels: the least probability of those in `classes`;
                     default: each label's own, stored in the bundle
        engine       torch, onnx or openvino (a bundle on disk), or auto, the fastest by measurement
        precision    float32, bfloat16 or int8, where the engine has it; auto: the fastest whose answers differ from
                     those in float32 on at most a share `tolerance` of the images
        threads      number of threads that decode and compute; by default every core
        jpeg         decode JPEG files exactly, or (double) large ones at a reduced scale, faster; default: the
                     bundle's way
        device       where torch computes: by default auto, as in `train`, or where the model of a `vitrail.Bundle` is

        >>> answers = vitrail.predict("fashion", np.zeros((3, 28, 28), np.uint8), top_k=2)
        >>> len(answers), answers[2].file, len(answers[2].classes), 0 < answers[2].score < 1
        (3, 'image 2', 2, True)
    """
    _check_keywords(predict, others)
    if top_k is not None:
        top_k = check_integer("top_k", top_k, low=1, high=10_000_000)
    chosen, names = _find(images)
    from vitrail.inference.classifier import Classifier
    from vitrail.inference.select import Wish, choose_way

    way = choose_way(Wish(engine, precision, tolerance), bundle, images=chosen, threads=threads, device=device)
    classifier = Classifier(bundle, **way._asdict(), threads=threads, jpeg=jpeg, device=device)
    if hasattr(images, "shape") and not isinstance(chosen[0], str):  # what is wrong with one of its images is with all
        classifier.preprocess.read(chosen[0])
    found = Predictions()
    meter = Meter(len(chosen), "images")
    for answer in classifier.stream(chosen, names=names, top_k=top_k, threshold=threshold):
        classes = tuple((one["label"], one["score"]) for one in answer.get("predictions", ()))
        label, score = classes[0] if classes else (None, None)
        found.append(
            Prediction(file=answer["file"], label=label, score=score, classes=classes, error=answer.get("error"))
        )
        meter(len(found))
    return found


_MORE = 64  # images of `data` that an inspection takes


def inspect(
    bundle: "str | Path | Bundle",
    images: "ImageLike | Iterable[ImageLike]",
    *,
    output: str | Path | None = None,
    evidence: bool = False,
    data: "AnyData | None" = None,
    against: "str | Path | Bundle | None" = None,
    patch: tuple[int, int] | None = None,
    inside: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    full: bool = False,
    device: str | None = None,
    force: bool = False,
    **others: Never,
) -> "Inspection":
    """Look inside a model, as `vitrail inspect` does: `vitrail.inspect("run/bundle", "photo.jpg")`.

    In a notebook the result is displayed as its page. The keywords have the meaning of the command's flags:

        bundle       a path, an embedded bundle's name, or a `vitrail.Bundle`; a run, whose snapshots show what grows
                     over training; or the name of a model, whose weights are then new and random
        images       up to 32, as for `predict`
        output       folder to write: index.html, figures and inspect.json; None: nothing is written
        evidence     also remove parts of the images and run the model again, hundreds of times
        data         more images (up to 64) for results that need many: as for `train`, or any folder of images
        against      another bundle to compare layers with
        patch        row and column of the patch to follow, from 0; by default the centre
        inside       layers to show step by step, from 0 or from the end (-1); by default first, middle and last
        layers, heads    show only the attention of these
        full         keep everything on the page, however large it becomes, and write arrays.npz
        device       where to compute: by default auto, as in `train`, or where the model of a `vitrail.Bundle` is
        force        overwrite the folder `output`

        >>> seen = vitrail.inspect("fashion", np.zeros((1, 28, 28), np.uint8), patch=(2, 3))
        >>> seen.numbers["followed"], len(seen.numbers["pictures"][0]["inside"][0]["heads"])
        ({'row': 2, 'column': 3}, 3)
    """
    _check_keywords(inspect, others)
    if output is not None:
        from vitrail.core.files import check_output

        check_output(Path(output), force=force)
    shown, names = _find(images)
    if patch is not None:
        match [as_integer(side) for side in patch] if isinstance(patch, Iterable) else []:
            case int() as row, int() as column:
                patch = row, column
            case _:
                raise UsageError(f"Patch must be a row and a column, got {patch!r}.")
    from vitrail.analysis.inspected_model import open_subject
    from vitrail.data.sources.registry import some_images
    from vitrail.reports.inspect.compute import examine
    from vitrail.reports.inspect.page import Inspection

    subject = open_subject(bundle, device=device)
    other = None if against is None else open_subject(against, device=device)
    found = examine(
        subject.bundle,
        shown,
        name=subject.name,
        names=names,
        evidence=evidence,
        others=() if data is None else some_images(data, _MORE),
        against=None if other is None else (other.name, other.bundle),
        layers=layers,
        heads=heads,
        patch=patch,
        inside=inside,
        snapshots=subject.snapshots,
    )
    made = Inspection(found, full=full, notes=[*subject.notes, *found.notes])
    return made if output is None else made.save(output, force=force)


def _find(images: "ImageLike | Iterable[ImageLike]") -> tuple[list[Any], list[str]]:
    """All images, with folders and patterns replaced by their files, and the name of each."""
    if (shape := getattr(images, "shape", None)) is not None:
        from vitrail.data.sources.arrays import are_paths, pixels_in_memory

        if not are_paths(images):
            if len(shape) < 3 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
                raise UsageError(f"Images must be several, got one array of shape {tuple(shape)}. Put it in brackets.")
            pixels = pixels_in_memory(images)
            return list(pixels), [f"image {number}" for number in range(len(pixels))]
    is_one = isinstance(images, str | bytes | os.PathLike) or not isinstance(images, Iterable)
    chosen: list[Any] = []
    names: list[str] = []
    for image in (images,) if is_one else images:
        if isinstance(image, str | os.PathLike):
            files = find_images([str(image)])
            chosen += files
            names += files
        else:
            names.append(f"image {len(names)}")
            chosen.append(image)
    if not chosen:
        raise UsageError("Images must be given: files, folders, patterns or arrays, got none.")
    return chosen, names


def _as_pair(resolution: object) -> tuple[int, int]:
    sides = resolution if isinstance(resolution, list | tuple) else (resolution, resolution)
    match [as_integer(side) for side in sides]:
        case int() as height, int() as width:
            return height, width
    raise UsageError(f"Resolution must be an integer or a pair (height, width), got {resolution!r}.")


def _check_options(function: FunctionType, options: Mapping[str, Any], seed: int) -> Options:
    """The options of a run; unknown keywords are refused with a suggestion."""
    _check_keywords(function, options, tuple(field.name for field in dataclasses.fields(Options)))
    return Options(seed=seed, **options)


def _check_keywords(function: FunctionType, given: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Refuse what is neither a keyword of the function nor one of `others`, with a suggestion."""
    parameters = signature(function).parameters
    known = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    known += [name for name in others if name not in known]
    for name, value in given.items():
        if name in known:
            continue
        elsewhere, settings = same_word(name, known), Recipe.__dataclass_fields__
        setting = same_word(name, settings).get(name, name)
        if "settings" in known and setting in settings and not elsewhere:
            near = f" It is a setting of recipes: settings={{{setting!r}: {value!r}}}."
        else:
            near = did_you_mean(name, known, elsewhere)
        raise UsageError(f"Keyword of {function.__name__} must be one that help() lists, got {name!r}.{near}")


def _check_callback(callback: object) -> None:
    """Before the first step, not after it."""
    if callback is None:
        return
    rule = "Callback must be a function of one argument, the Step"
    if not callable(callback):
        raise UsageError(f"{rule}, got {callback!r}.")
    try:
        words = signature(callback)
    except (TypeError, ValueError):  # of some built-in functions it is not known
        return
    try:
        words.bind(None)
    except TypeError:
        raise UsageError(f"{rule}, got {getattr(callback, '__name__', 'one')}{words}.") from None


@contextlib.contextmanager
def _folder_of(output: str | Path | None, *, resume: bool, chosen: Options) -> Generator[Path]:
    """The folder of a run: the given one, or a temporary one that is removed in the end."""
    if output is not None:
        yield Path(output)
        return
    for word, is_given in (("resume", resume), ("snapshots", chosen.snapshots)):
        if is_given:
            raise UsageError(f"{spoken(word)} must come with an output, the folder of the run, got none.")
    with tempfile.TemporaryDirectory(prefix="vitrail-") as folder:
        yield Path(folder) / "run"


def _is_quiet(quiet: bool | None) -> bool:
    """As told; otherwise quiet unless somebody can watch: in a terminal or a notebook."""
    if quiet is not None:
        return quiet
    return not (in_notebook() or (sys.stderr is not None and sys.stderr.isatty()))


def _as_call(function: FunctionType, given: Mapping[str, Any]) -> str:
    """The call of a function, for the record: its arguments in words, without those that are left at their defaults."""
    words = []
    for name, parameter in signature(function).parameters.items():
        value = given[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            words += [f"{key}={_in_words(one)}" for key, one in value.items()]
        elif parameter.default is parameter.empty:
            words.append(_in_words(value))
        elif value is not parameter.default:
            words.append(f"{name}={_in_words(value)}")
    return f"vitrail.{function.__name__}({', '.join(words)})"


def _in_words(value: object) -> str:
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, str | int | float | None):
        return repr(value)
    if isinstance(value, dict) and all(isinstance(one, str | int | float | None) for one in value.values()):
        return repr(value)
    return f"<{getattr(value, '__name__', type(value).__name__)}>"
