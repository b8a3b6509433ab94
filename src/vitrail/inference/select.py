"""The engine and precision for a bundle: as asked for, or the fastest on this machine, measured once."""

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.bundles.metadata import BundleInfo, read_bundle_info
from vitrail.core.errors import CorruptFileError, MissingError, UnprovedError, UsageError, VitrailError
from vitrail.core.intervals import wilson_interval
from vitrail.core.terminal import say
from vitrail.inference.benchmark_store import Agreement, BenchmarkStore, Refusal, Speed, Workload
from vitrail.inference.engine import EngineChoice, EngineRequest, batch_for, cores, limit_threads
from vitrail.inference.proof import crop_embedded_images
from vitrail.inference.registry import ENGINES, PRECISIONS

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle
    from vitrail.data.preprocess import ImageLike

_EXACT = PRECISIONS[0]
_ALWAYS = next(iter(ENGINES))
_NOTICED = 1.05  # times as long: less is not told from noise
_ENOUGH = 40  # images to compare answers on; embedded ones, where fewer are given
_COMPARED = 200  # images of those given on which answers are compared


def choose_engine(
    request: EngineRequest,
    bundle: "Bundle | str | Path",
    *,
    images: "Sequence[ImageLike] | np.ndarray" = (),
    choose_images: "Callable[[BundleInfo], Sequence[ImageLike] | np.ndarray] | None" = None,
    threads: int | None = None,
    load: Workload | None = None,
    device: str | None = None,
) -> EngineChoice:
    """The engine and precision of a request; for `auto` the fastest for these images (without images: for very many),
    under the load of a `Classifier` unless another is given. For `auto`, `choose_images` returns the images for a
    bundle. A bundle in memory has engine torch only, and nothing is measured."""
    request.check()
    if not isinstance(bundle, str | Path) or device not in (None, "auto", "cpu"):
        return EngineChoice(
            _ALWAYS if request.engine == "auto" else request.engine,
            _EXACT if request.precision == "auto" else request.precision,
        )
    if "auto" not in request[:2] and request.precision == _EXACT:
        return EngineChoice(request.engine, _EXACT)
    info = read_bundle_info(bundle, weights=False)
    info.check_computable()
    if choose_images is not None and "auto" in request[:2]:
        images = choose_images(info)
    load = load or Workload(batch_for(info.config), limit_threads(threads) if threads else cores(), 1)
    load = load._replace(device=device or load.device)
    measured = BenchmarkStore.read(bundle)
    engines = [name for name in ENGINES if request.engine in (name, "auto")]
    choices = [EngineChoice(name, one) for name in engines for one in _precisions(request, name)]
    speeds = _speeds(str(bundle), measured, load, choices)
    if "auto" not in request[:2]:
        choice = EngineChoice(request.engine, request.precision)
        _warn(choice, speeds)
        return choice
    speeds = {choice: speed for choice, speed in speeds.items() if request.precision in ("auto", choice.precision)}
    if not speeds:
        raise UsageError(
            f"Precision must be one that an engine has on this machine, got {request.precision!r} for"
            f" {', '.join(engines)}. Use float32."
        )
    count = len(images) or math.inf
    order = sorted(speeds, key=lambda choice: speeds[choice].seconds(count))
    if request.precision != "auto":
        say(_reason(order, speeds))
        return order[0]
    return _within(request.tolerance, order, speeds, _Answers(str(bundle), info, measured, images))


def _precisions(request: EngineRequest, engine: str) -> list[str]:
    """The precisions of an engine to be measured: with a reduced one, float32 beside it."""
    known = ENGINES[engine].precisions
    return [one for one in known if request.precision in (one, "auto") or (request.engine != "auto" and one == _EXACT)]


def _speeds(
    path: str, measured: BenchmarkStore, load: Workload, choices: list[EngineChoice]
) -> dict[EngineChoice, Speed]:
    """The speeds of those engine choices that this machine has: kept, or measured now."""
    installed = [choice for choice in choices if _is_installed(choice.engine)]
    if missing := {choice.engine for choice in choices} - {choice.engine for choice in installed}:
        say(f"auto: {' and '.join(sorted(missing))} left out: not installed")
    possible = [choice for choice in installed if choice not in measured.refused()]
    known = measured.speeds(load)
    if not all(choice in known for choice in possible):
        from vitrail.inference.measure import measure_speeds

        usable, refused = find_usable(path, possible)
        for choice, reason in refused.items():
            say(f"auto: {choice} left out: {reason.text}")
        known = measure_speeds(path, usable, load) if usable else {}
        measured.keep_speeds(load, known, refused)
    return {choice: known[choice] for choice in possible if choice in known}


def list_choices() -> list[EngineChoice]:
    """All precisions of all engines."""
    return [EngineChoice(name, precision) for name in ENGINES for precision in ENGINES[name].precisions]


def find_usable(path: str, choices: list[EngineChoice]) -> tuple[list[EngineChoice], dict[EngineChoice, Refusal]]:
    """The engine choices that can be used here, with their files made, and why the others cannot."""
    usable: list[EngineChoice] = []
    refused: dict[EngineChoice, Refusal] = {}
    for choice in choices:
        is_checked = False
        try:
            ENGINES[choice.engine].check(choice.precision)
            is_checked = True
            ENGINES[choice.engine].prepare(path, choice.precision)
            usable.append(choice)
        except CorruptFileError:
            raise
        except VitrailError as error:
            # What is missing may be there the next time, and a file that cannot be made; not so what this CPU lacks,
            # and a proof.
            lasts = isinstance(error, UnprovedError) or not (is_checked or isinstance(error, MissingError))
            refused[choice] = Refusal(str(error), lasts)
    return usable, refused


def _is_installed(engine: str) -> bool:
    """Whether the packages of an engine are there. Nothing is imported: OpenVINO alone takes half a second."""
    try:
        return all(find_spec(package) is not None for package in ENGINES[engine].packages)
    except ValueError:
        return False


def _warn(choice: EngineChoice, speeds: dict[EngineChoice, Speed]) -> None:
    """Say so if a reduced precision, which somebody asked for, is slower than float32 on this machine."""
    exact, own = speeds.get(EngineChoice(choice.engine, _EXACT)), speeds.get(choice)
    if exact is not None and own is not None and (slower := own.image / exact.image) > _NOTICED:
        say(f"note: {choice} takes {slower:.1f} times as long as {_EXACT} on this machine (measured)")


class _Answers:
    """How many answers of an engine choice are those of float32: as `vitrail bench --data` found it, otherwise on
    some of the given images, and on embedded ones where these are few."""

    def __init__(
        self, path: str, info: BundleInfo, measured: BenchmarkStore, images: "Sequence[ImageLike] | np.ndarray"
    ) -> None:
        info.check_classifies()
        self._path, self._info, self._measured, self._images = path, info, measured, images

    def of(self, choice: EngineChoice, exact: EngineChoice) -> Agreement:
        """The agreement of an engine choice with an exact one."""
        if (found := self._measured.agreements().get(choice)) is not None:
            return found
        pixels, name = self._pixels()
        one, other = (_decide(self._path, self._info, each, pixels) for each in (choice, exact))
        # Not kept: it tells about these images, and the next ones are others.
        return Agreement(name, len(pixels), int((one == other).all(axis=1).sum()))

    def _pixels(self) -> tuple[np.ndarray, str]:
        count, preprocess = len(self._images), self._info.preprocess
        crops = []
        # Evenly spaced: files are sorted by class.
        for index in np.unique(np.linspace(0, count - 1, min(_COMPARED, count)).round().astype(np.int64)):
            try:
                crops.append(preprocess.crop(self._images[index]))
            except VitrailError:  # it is reported when it is classified
                continue
        if len(crops) >= _ENOUGH:
            return np.stack(crops), "given images"
        embedded = crop_embedded_images(preprocess, _ENOUGH - len(crops))
        return np.concatenate([*(crop[None] for crop in crops), embedded]), (
            f"{len(crops)} given and {len(embedded)} embedded images" if crops else "embedded images"
        )


def _decide(path: str, info: BundleInfo, choice: EngineChoice, pixels: np.ndarray) -> np.ndarray:
    size = batch_for(info.config)
    with ENGINES[choice.engine].open(path, None, choice.precision).running(None) as run:
        logits = [run(pixels[at : at + size]).logits for at in range(0, len(pixels), size)]
    return info.answer.decide(np.concatenate(logits))


def _within(
    tolerance: float, order: list[EngineChoice], speeds: dict[EngineChoice, Speed], answers: _Answers
) -> EngineChoice:
    """The fastest engine choice whose share of other answers is within the tolerance. Those in float32 have none."""
    exact = next((choice for choice in order if choice.precision == _EXACT), None)
    if exact is None:
        raise UsageError(f"Precision auto must have {_EXACT} to compare with, got {', '.join(map(str, order))}.")
    refused: list[str] = []

    def chosen(choice: EngineChoice, *more: str) -> EngineChoice:
        say("; ".join([_reason([choice, *(one for one in order if one != choice)], speeds), *more, *refused]))
        return choice

    for choice in order:
        if choice == exact:
            break
        found = answers.of(choice, exact)
        low, high = wilson_interval(found.images - found.same, found.images)
        gave = (
            f"{found.images - found.same} of {found.images} answers differ from {_EXACT} on {found.data}"
            f" ({low:.1%} to {high:.1%})"
        )
        if found.changed <= tolerance:
            return chosen(choice, gave)
        refused.append(f"not {choice}: {gave}, more than {tolerance:g}")
    return chosen(exact)


def _reason(order: list[EngineChoice], speeds: dict[EngineChoice, Speed]) -> str:
    first, *others = (
        f"{choice} {1 / speeds[choice].image:.1f} images/s after {speeds[choice].start:.1f} s" for choice in order
    )
    return f"auto: {first}" + (f" ({', '.join(others)})" if others else "")
