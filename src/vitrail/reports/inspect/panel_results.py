"""Computes all panels of `vitrail inspect` for a bundle and some images."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from vitrail.bundles.bundle import Bundle
from vitrail.bundles.metadata import OVERFLOWS
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.core.message_files import Messages
from vitrail.core.settings import Pair
from vitrail.core.terminal import Meter
from vitrail.data.preprocess import ImageLike
from vitrail.models.activations import look
from vitrail.models.device import evaluating
from vitrail.reports.inspect.panel import InspectionContext, Panel
from vitrail.reports.inspect.registry import PANELS

MOST = 32
"""Largest number of images on one page."""


@dataclasses.dataclass(frozen=True)
class PanelResults:
    """The result of inspecting a bundle on some images."""

    context: InspectionContext
    panels: Mapping[str, Panel]
    """By name, in the order of the page; absent ones are empty and give the reason."""
    measured_on: int
    """Number of images that panels observed."""
    notes: Sequence[str] = ()
    """Why panels of other packages could not be loaded."""

    @property
    def is_trained(self) -> bool:
        """Whether the bundle records its training."""
        return self.context.bundle.is_trained

    def to_json(self) -> dict[str, Any]:
        """The content of `inspect.json`: all numbers of all panels."""
        config, panels = self.context.model.config, self.panels.values()
        layers = [{"layer": layer} for layer in range(config.depth)]
        images = [{"file": name} for name in self.context.names]
        document = {
            "bundle": self.context.name,
            "model": {"family": config.family, **config.to_json()},
            "trained": self.is_trained,
            "measured_on": self.measured_on,
            "layers": [join([row, *(panel.layer_numbers(row["layer"]) for panel in panels)]) for row in layers],
            "pictures": [
                join([row, *(panel.image_numbers(number) for panel in panels)]) for number, row in enumerate(images)
            ],
        }
        absent = [
            {"panel": part, "reason": panel.english(why, **panel.fields())}
            for panel in panels
            for part, _, why in panel.absences()
        ]
        return join([document, *(panel.numbers() for panel in panels), {"absent": absent}])


def join(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the mappings of several panels, whose keys must be distinct."""
    joined: dict[str, Any] = {}
    for part in parts:
        if taken := sorted(joined.keys() & part.keys()):
            raise VitrailError(f"Names that a panel writes must be its own, got {taken[0]!r} from two panels.")
        joined |= part
    return joined


def compute_panels(
    bundle: Bundle,
    images: Sequence[ImageLike],
    *,
    name: str = "bundle",
    names: Sequence[str] | None = None,
    evidence: bool = False,
    others: Sequence[ImageLike] = (),
    against: tuple[str, Bundle] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    patch: Pair | None = None,
    inside: Sequence[int] | None = None,
    snapshots: Sequence[tuple[int, Path]] = (),
    seed: int = 0,
) -> PanelResults:
    """Inspect a bundle, called `name`, on some images, called `names` (default: their paths, or numbers).

    `others` are more images for results that need many (CKA, distances); duplicates of `images` are ignored. The page
    shows the attention of `layers` and `heads`, from 0 or from the end (-1), default all. Numbers are computed for all
    layers and heads. `patch` is the row and column of the patch to follow (default: the centre), `inside` are layers to
    show step by step (default: the first, the middle and the last), and `snapshots` are steps and folders of the model
    during its training.
    """
    if not 1 <= len(images) <= MOST:
        raise UsageError(
            f"Images on one page must be 1 to {MOST}, got {len(images):,}."
            + (" Name some of them, and give the folder by --data (in Python: others)." if images else "")
        )
    names = [_name_of(image, index) for index, image in enumerate(images)] if names is None else names
    context = InspectionContext(
        bundle=bundle,
        name=_as_text(name),
        shown=images,
        names=[_as_text(one) for one in names],
        others=others,
        layers=layers,
        heads=heads,
        evidence=evidence,
        against=None if against is None else (_as_text(against[0]), against[1]),
        patch=patch,
        inside=inside,
        snapshots=snapshots,
        seed=seed,
    )
    _ = context.followed  # refused before any image is decoded
    panels = {name: _open_panel(name, context) for name in PANELS}
    present = [panel for panel in panels.values() if panel.why_absent() is None]
    observed = len(context.images) if any(panel.sees_others for panel in present) else len(images)
    opened = frozenset[int]().union(*(panel.opens for panel in present))
    with evaluating(bundle.model), Meter(observed, "images") as meter:
        for number, image in enumerate(context.images[:observed]):
            activations = look(bundle.model, image[None], inside=opened if number < len(images) else ())
            if not activations.logits.isfinite().all():
                raise CorruptFileError(OVERFLOWS)
            for panel in present:
                meter(number)
                if panel.sees_others or number < len(images):
                    panel.record(number, image, activations)
            meter(number + 1)
        for panel in present:
            panel.finish()
    notes = [panel.error for panel in panels.values() if isinstance(panel, _Unusable)]
    return PanelResults(context, panels, observed, notes)


class _Unusable(Panel):
    """In place of a panel of another package that cannot be loaded: absent, with the error as the reason."""

    words: ClassVar[Messages] = {"title": {"en": "{panel}"}, "unusable": {"en": "{error}"}}

    def __init__(self, name: str, context: InspectionContext, error: str) -> None:
        super().__init__(name, context)
        self.error = error

    def why_absent(self) -> str | None:
        return "unusable"

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "panel": self.name, "error": self.error}


def _open_panel(name: str, context: InspectionContext) -> Panel:
    try:
        panel = PANELS[name]
    except VitrailError as error:
        if name not in PANELS.extension_names:
            raise
        return _Unusable(name, context, str(error))
    return panel(name, context)


def _name_of(image: ImageLike, index: int) -> str:
    return str(image) if isinstance(image, str | Path) else f"image {index}"


def _as_text(name: str) -> str:
    """A name as valid Unicode; other bytes are escaped."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
