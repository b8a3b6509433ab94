"""The way to run a bundle: as asked for, or the fastest on this machine, measured once."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitrail.bundles.metadata import Parts, read_parts
from vitrail.core.errors import DamagedError, MissingError, UnprovedError, UsageError, VitrailError, did_you_mean
from vitrail.core.intervals import wilson
from vitrail.core.settings import check_share
from vitrail.core.terminal import say
from vitrail.inference.benchmark_store import Agreement, Load, Measured, Reason, Speed
from vitrail.inference.engine import Way, batch_for, cores, limit_threads
from vitrail.inference.proof import sample
from vitrail.inference.registry import ENGINES, PRECISIONS

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle
    from vitrail.data.preprocess import ImageLike

TOLERANCE = 0.02
_EXACT = PRECISIONS[0]
_ALWAYS = next(iter(ENGINES))
_NOTICED = 1.05  # times as long: less is not told from noise
_ENOUGH = 40  # images to compare answers on; embedded ones, where fewer are given
_COMPARED = 200  # images of those given on which answers are compared


class Wish(NamedTuple):
    """How a user wants a model to be run."""

    engine: str = _ALWAYS
    precision: str = _EXACT
    tolerance: float = TOLERANCE
    """Of precision `auto`: the largest share of answers that may differ from those in float32."""

    def check(self) -> None:
        """Refuse what is neither an engine, a precision nor `auto`, and precisions that the engine does not have."""
        for sort, name, known in (("Engine", self.engine, ENGINES), ("Precision", self.precision, PRECISIONS)):
            if name != "auto" and name not in known:
                near = did_you_mean(name, known)
                raise UsageError(f"{sort} must be {', '.join(known)} or auto, got {name!r}.{near}")
        check_share("tolerance", self.tolerance, 1)
        if "auto" not in (self.engine, self.precision):
            ENGINES[self.engine].check(self.precision)


AS_USUAL = Wish()


def choose_way(
    wish: Wish,
    bundle: "Bundle | str | Path",
    *,
    images: "Sequence[ImageLike] | np.ndarray" = (),
    threads: int | None = None,
    load: Load | None = None,
    device: str | None = None,
) -> Way:
    """The way that is asked for; for `auto` the fastest one for these images (without images: for very many), under the
    load of a `Classifier` unless another is given. In memory, a bundle has torch's ways only, and nothing is
    measured."""
    wish.check()
    if not isinstance(bundle, str | Path) or device not in (None, "auto", "cpu"):
        return Way(
            _ALWAYS if wish.engine == "auto" else wish.engine, _EXACT if wish.precision == "auto" else wish.precision
        )
    if "auto" not in wish[:2] and wish.precision == _EXACT:
        return Way(wish.engine, _EXACT)
    parts = read_parts(bundle, weights=False)
    parts.check_computable()
    load = load or Load(batch_for(parts.config), limit_threads(threads) if threads else cores(), 1)
    load = load._replace(device=device or load.device)
    measured = Measured.read(bundle)
    engines = [name for name in ENGINES if wish.engine in (name, "auto")]
    ways = [Way(name, one) for name in engines for one in _precisions(wish, name)]
    speeds = _speeds(str(bundle), measured, load, ways)
    if "auto" not in wish[:2]:
        way = Way(wish.engine, wish.precision)
        _warn(way, speeds)
        return way
    speeds = {way: speed for way, speed in speeds.items() if wish.precision in ("auto", way.precision)}
    if not speeds:
        raise UsageError(
            f"Precision must be one that an engine has on this machine, got {wish.precision!r} for"
            f" {', '.join(engines)}. Use float32."
        )
    count = len(images) or math.inf
    order = sorted(speeds, key=lambda way: speeds[way].seconds(count))
    if wish.precision != "auto":
        say(_reason(order, speeds))
        return order[0]
    return _within(wish.tolerance, order, speeds, _Answers(str(bundle), parts, measured, images))


def _precisions(wish: Wish, engine: str) -> list[str]:
    """The precisions of an engine to be measured: with a reduced one, float32 beside it."""
    known = ENGINES[engine].precisions
    return [one for one in known if wish.precision in (one, "auto") or (wish.engine != "auto" and one == _EXACT)]


def _speeds(path: str, measured: Measured, load: Load, ways: list[Way]) -> dict[Way, Speed]:
    """The speeds of those ways that this machine has: kept, or measured now."""
    installed = [way for way in ways if _is_installed(way.engine)]
    if missing := {way.engine for way in ways} - {way.engine for way in installed}:
        say(f"auto: {' and '.join(sorted(missing))} left out: not installed")
    possible = [way for way in installed if way not in measured.refused()]
    known = measured.speeds(load)
    if not all(way in known for way in possible):
        from vitrail.inference.measure import measure

        usable, refused = find_usable(path, possible)
        for way, reason in refused.items():
            say(f"auto: {way} left out: {reason.text}")
        known = measure(path, usable, load) if usable else {}
        measured.keep_speeds(load, known, refused)
    return {way: known[way] for way in possible if way in known}


def every_way() -> list[Way]:
    """All precisions of all engines."""
    return [Way(name, precision) for name in ENGINES for precision in ENGINES[name].precisions]


def find_usable(path: str, ways: list[Way]) -> tuple[list[Way], dict[Way, Reason]]:
    """The ways that can be used here, with their files made, and why the others cannot."""
    usable: list[Way] = []
    refused: dict[Way, Reason] = {}
    for way in ways:
        is_checked = False
        try:
            ENGINES[way.engine].check(way.precision)
            is_checked = True
            ENGINES[way.engine].prepare(path, way.precision)
            usable.append(way)
        except DamagedError:
            raise
        except VitrailError as error:
            # What is missing may be there the next time, and a file that cannot be made; not so what this CPU lacks,
            # and a proof.
            lasts = isinstance(error, UnprovedError) or not (is_checked or isinstance(error, MissingError))
            refused[way] = Reason(str(error), lasts)
    return usable, refused


def _is_installed(engine: str) -> bool:
    """Whether the packages of an engine are there. Nothing is imported: OpenVINO alone takes half a second."""
    try:
        return all(find_spec(package) is not None for package in ENGINES[engine].packages)
    except ValueError:
        return False


def _warn(way: Way, speeds: dict[Way, Speed]) -> None:
    """Say so if a reduced precision, which somebody asked for, is slower than float32 on this machine."""
    exact, own = speeds.get(Way(way.engine, _EXACT)), speeds.get(way)
    if exact is not None and own is not None and (slower := own.image / exact.image) > _NOTICED:
        say(f"note: {way} takes {slower:.1f} times as long as {_EXACT} on this machine (measured)")


class _Answers:
    """How many answers of a way are those of float32: as `vitrail bench --data` found it, otherwise on
    some of the given images, and on embedded ones where these are few."""

    def __init__(self, path: str, parts: Parts, measured: Measured, images: "Sequence[ImageLike] | np.ndarray") -> None:
        parts.check_classifies()
        self._path, self._parts, self._measured, self._images = path, parts, measured, images

    def of(self, way: Way, exact: Way) -> Agreement:
        """The agreement of a way with an exact one."""
        if (found := self._measured.agreements().get(way)) is not None:
            return found
        pixels, name = self._pixels()
        one, other = (_decide(self._path, self._parts, each, pixels) for each in (way, exact))
        # Not kept: it tells about these images, and the next ones are others.
        return Agreement(name, len(pixels), int((one == other).all(axis=1).sum()))

    def _pixels(self) -> tuple[np.ndarray, str]:
        count, preprocess = len(self._images), self._parts.preprocess
        crops = []
        # Evenly spaced: files are sorted by class.
        for index in np.unique(np.linspace(0, count - 1, min(_COMPARED, count)).round().astype(np.int64)):
            try:
                crops.append(preprocess.crop(self._images[index]))
            except VitrailError:  # it is reported when it is classified
                continue
        if len(crops) >= _ENOUGH:
            return np.stack(crops), "given images"
        embedded = sample(preprocess, _ENOUGH - len(crops))
        return np.concatenate([*(crop[None] for crop in crops), embedded]), (
            f"{len(crops)} given and {len(embedded)} embedded images" if crops else "embedded images"
        )


def _decide(path: str, parts: Parts, way: Way, pixels: np.ndarray) -> np.ndarray:
    size = batch_for(parts.config)
    with ENGINES[way.engine].open(path, None, way.precision).running(None) as run:
        logits = [run(pixels[at : at + size]).logits for at in range(0, len(pixels), size)]
    return parts.answer.decide(np.concatenate(logits))


def _within(tolerance: float, order: list[Way], speeds: dict[Way, Speed], answers: _Answers) -> Way:
    """The fastest way whose share of other answers is within the tolerance. Those in float32 have none."""
    exact = next((way for way in order if way.precision == _EXACT), None)
    if exact is None:
        raise UsageError(f"Precision auto must have {_EXACT} to compare with, got {', '.join(map(str, order))}.")
    refused: list[str] = []

    def chosen(way: Way, *more: str) -> Way:
        say("; ".join([_reason([way, *(one for one in order if one != way)], speeds), *more, *refused]))
        return way

    for way in order:
        if way == exact:
            break
        found = answers.of(way, exact)
        low, high = wilson(found.images - found.same, found.images)
        gave = (
            f"{found.images - found.same} of {found.images} answers differ from {_EXACT} on {found.data}"
            f" ({low:.1%} to {high:.1%})"
        )
        if found.changed <= tolerance:
            return chosen(way, gave)
        refused.append(f"not {way}: {gave}, more than {tolerance:g}")
    return chosen(exact)


def _reason(order: list[Way], speeds: dict[Way, Speed]) -> str:
    first, *others = (f"{way} {1 / speeds[way].image:.1f} images/s after {speeds[way].start:.1f} s" for way in order)
    return f"auto: {first}" + (f" ({', '.join(others)})" if others else "")
