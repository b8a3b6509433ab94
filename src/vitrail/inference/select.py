"""Selection of the engine and precision for a bundle: as requested, or the fastest on this machine, measured once."""

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
from vitrail.inference.engine import EngineChoice, EngineRequest, batch_for, thread_count
from vitrail.inference.proof import crop_embedded_images
from vitrail.inference.registry import ENGINES, PRECISIONS

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle
    from vitrail.data.preprocess import ImageLike

_EXACT = PRECISIONS[0]
_DEFAULT_ENGINE = next(iter(ENGINES))
_NOTICEABLE_SLOWDOWN = 1.05  # below it, a slowdown may be noise
_MIN_IMAGES = 40  # images on which predictions are compared; embedded images are added to fewer
_MAX_IMAGES = 200  # sampled from the user's images


def choose_engine(
    request: EngineRequest,
    bundle: "Bundle | str | Path",
    *,
    images: "Sequence[ImageLike] | np.ndarray" = (),
    choose_images: "Callable[[BundleInfo], Sequence[ImageLike] | np.ndarray] | None" = None,
    threads: int | None = None,
    workload: Workload | None = None,
    device: str | None = None,
) -> EngineChoice:
    """Return the engine and precision of a request, with `auto` resolved by measurement.

    `auto` selects the fastest for the number of `images` (without images: for very many), under the workload of a
    `Classifier` unless another one is passed. `choose_images` returns the images from the metadata of the bundle; it is
    called only for `auto`. Nothing is measured for a bundle in memory or another device than the CPU: `auto` is then
    torch in float32. Raises UsageError if no engine on this machine has the precision.
    """
    request.check()
    if not isinstance(bundle, str | Path) or device not in (None, "auto", "cpu"):
        return EngineChoice(
            _DEFAULT_ENGINE if request.engine == "auto" else request.engine,
            _EXACT if request.precision == "auto" else request.precision,
        )
    if "auto" not in request[:2] and request.precision == _EXACT:
        return EngineChoice(request.engine, _EXACT)
    info = read_bundle_info(bundle, weights=False)
    info.check_computable()
    if choose_images is not None and "auto" in request[:2]:
        images = choose_images(info)
    workload = workload or Workload(batch_for(info.config), thread_count(threads or None), 1)
    workload = workload._replace(device=device or workload.device)
    store = BenchmarkStore.read(bundle)
    engines = [name for name in ENGINES if request.engine in (name, "auto")]
    choices = [EngineChoice(name, precision) for name in engines for precision in _select_precisions(request, name)]
    speeds = _read_or_measure_speeds(str(bundle), store, workload, choices)
    if "auto" not in request[:2]:
        choice = EngineChoice(request.engine, request.precision)
        _warn_if_slower(choice, speeds)
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
        say(_describe_order(order, speeds))
        return order[0]
    return _choose_within_tolerance(request.tolerance, order, speeds, _AgreementMeter(str(bundle), info, store, images))


def _select_precisions(request: EngineRequest, engine: str) -> list[str]:
    """Return the precisions of an engine to benchmark. float32 is always included as the reference for one engine."""
    return [
        precision
        for precision in ENGINES[engine].precisions
        if request.precision in (precision, "auto") or (request.engine != "auto" and precision == _EXACT)
    ]


def _read_or_measure_speeds(
    path: str, store: BenchmarkStore, workload: Workload, choices: list[EngineChoice]
) -> dict[EngineChoice, Speed]:
    """Return the speeds of the engine choices that this machine has: stored ones, otherwise measured now and stored."""
    installed = [choice for choice in choices if _is_installed(choice.engine)]
    if missing := {choice.engine for choice in choices} - {choice.engine for choice in installed}:
        say(f"auto: {' and '.join(sorted(missing))} left out: not installed")
    possible = [choice for choice in installed if choice not in store.refused()]
    speeds = store.speeds(workload)
    if not all(choice in speeds for choice in possible):
        from vitrail.inference.measure import measure_speeds

        usable, refused = find_usable(path, possible)
        for choice, reason in refused.items():
            say(f"auto: {choice} left out: {reason.text}")
        speeds = measure_speeds(path, usable, workload) if usable else {}
        store.save_speeds(workload, speeds, refused)
    return {choice: speeds[choice] for choice in possible if choice in speeds}


def list_choices() -> list[EngineChoice]:
    """Return every precision of every engine."""
    return [EngineChoice(name, precision) for name in ENGINES for precision in ENGINES[name].precisions]


def find_usable(path: str, choices: list[EngineChoice]) -> tuple[list[EngineChoice], dict[EngineChoice, Refusal]]:
    """Build the model files of engine choices. Return the usable choices, and the reasons against the others."""
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
            # A failed proof and a precision that this CPU lacks are permanent. A missing package can be installed, and
            # a file that could not be written may be written the next time.
            lasts = isinstance(error, UnprovedError) or not (is_checked or isinstance(error, MissingError))
            refused[choice] = Refusal(str(error), lasts)
    return usable, refused


def _is_installed(engine: str) -> bool:
    """Return whether the packages of an engine are installed, without importing them: OpenVINO takes half a second."""
    try:
        return all(find_spec(package) is not None for package in ENGINES[engine].packages)
    except ValueError:
        return False


def _warn_if_slower(choice: EngineChoice, speeds: dict[EngineChoice, Speed]) -> None:
    """Print a note if the requested reduced precision is slower than float32 on this machine."""
    exact, reduced = speeds.get(EngineChoice(choice.engine, _EXACT)), speeds.get(choice)
    if exact is not None and reduced is not None and (slowdown := reduced.image / exact.image) > _NOTICEABLE_SLOWDOWN:
        say(f"note: {choice} takes {slowdown:.1f} times as long as {_EXACT} on this machine (measured)")


class _AgreementMeter:
    """Measures how many predictions of an engine choice are the same as in float32.

    It uses the stored result of `vitrail bench --data`; otherwise a sample of the user's images, with embedded images
    if there are only a few.
    """

    def __init__(
        self, path: str, info: BundleInfo, store: BenchmarkStore, images: "Sequence[ImageLike] | np.ndarray"
    ) -> None:
        info.check_classifies()
        self._path, self._info, self._store, self._images = path, info, store, images

    def measure(self, choice: EngineChoice, exact: EngineChoice) -> Agreement:
        """Return the agreement of an engine choice with the exact one."""
        if (stored := self._store.agreements().get(choice)) is not None:
            return stored
        pixels, name = self._sample_pixels()
        decisions, expected = (_decide(self._path, self._info, each, pixels) for each in (choice, exact))
        # Not stored: the next images may be different ones.
        return Agreement(name, len(pixels), int((decisions == expected).all(axis=1).sum()))

    def _sample_pixels(self) -> tuple[np.ndarray, str]:
        """Return cropped images to compare predictions on, and their description."""
        count, preprocess = len(self._images), self._info.preprocess
        crops = []
        # Evenly spaced, because files are sorted by class.
        for index in np.unique(np.linspace(0, count - 1, min(_MAX_IMAGES, count)).round().astype(np.int64)):
            try:
                crops.append(preprocess.crop(self._images[index]))
            except VitrailError:  # reported when the image is classified
                continue
        if len(crops) >= _MIN_IMAGES:
            return np.stack(crops), "given images"
        embedded = crop_embedded_images(preprocess, _MIN_IMAGES - len(crops))
        return np.concatenate([*(crop[None] for crop in crops), embedded]), (
            f"{len(crops)} given and {len(embedded)} embedded images" if crops else "embedded images"
        )


def _decide(path: str, info: BundleInfo, choice: EngineChoice, pixels: np.ndarray) -> np.ndarray:
    """Return the predictions of an engine choice for cropped images, as the bundle's decision rule gives them."""
    size = batch_for(info.config)
    with ENGINES[choice.engine].open(path, None, choice.precision).running(None) as run:
        logits = [run(pixels[start : start + size]).logits for start in range(0, len(pixels), size)]
    return info.answer.decide(np.concatenate(logits))


def _choose_within_tolerance(
    tolerance: float, order: list[EngineChoice], speeds: dict[EngineChoice, Speed], meter: _AgreementMeter
) -> EngineChoice:
    """Return the fastest engine choice whose share of predictions that differ from float32 is within the tolerance.

    `order` has the engine choices with the fastest first. Prints a line with the choice and the rejected ones.
    """
    exact = next((choice for choice in order if choice.precision == _EXACT), None)
    if exact is None:
        raise UsageError(f"Precision auto must have {_EXACT} to compare with, got {', '.join(map(str, order))}.")
    chosen, details, rejected = exact, [], []
    for choice in order:
        if choice == exact:
            break
        agreement = meter.measure(choice, exact)
        changed = agreement.images - agreement.same
        low, high = wilson_interval(changed, agreement.images)
        difference = (
            f"{changed} of {agreement.images} predictions differ from {_EXACT} on {agreement.data}"
            f" ({low:.1%} to {high:.1%})"
        )
        if agreement.changed <= tolerance:
            chosen, details = choice, [difference]
            break
        rejected.append(f"not {choice}: {difference}, more than {tolerance:g}")
    chosen_first = [chosen, *(choice for choice in order if choice != chosen)]
    say("; ".join([_describe_order(chosen_first, speeds), *details, *rejected]))
    return chosen


def _describe_order(order: list[EngineChoice], speeds: dict[EngineChoice, Speed]) -> str:
    """Return a line with the speed of the first engine choice, and with those of the others in parentheses."""
    first, *others = (
        f"{choice} {1 / speeds[choice].image:.1f} images/s after {speeds[choice].start:.1f} s" for choice in order
    )
    return f"auto: {first}" + (f" ({', '.join(others)})" if others else "")
