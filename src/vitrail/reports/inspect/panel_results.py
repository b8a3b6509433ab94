"""Compute all panels of `vitrail inspect` for a bundle and its images."""

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

MAX_IMAGES = 32
"""Largest number of images on one page."""


@dataclasses.dataclass(frozen=True)
class PanelResults:
    """All panels of an inspection, after they have recorded every image."""

    context: InspectionContext
    panels: Mapping[str, Panel]
    """Panels by name, in the order of the page. A panel that does not apply is empty and gives the reason."""
    measured_on: int
    """Number of images that were passed through the model."""
    notes: Sequence[str] = ()
    """Errors of panels of other packages that could not be loaded."""

    @property
    def is_trained(self) -> bool:
        """Whether the bundle records its training."""
        return self.context.bundle.is_trained

    def to_json(self) -> dict[str, Any]:
        """Return the content of `inspect.json`: the numbers of all panels."""
        config, panels = self.context.model.config, self.panels.values()
        layers = [{"layer": layer} for layer in range(config.depth)]
        images = [{"file": name} for name in self.context.image_names]
        document = {
            "bundle": self.context.name,
            "model": {"family": config.family, **config.to_json()},
            "trained": self.is_trained,
            "measured_on": self.measured_on,
            "layers": [
                merge_entries([entry, *(panel.layer_numbers(entry["layer"]) for panel in panels)]) for entry in layers
            ],
            "pictures": [
                merge_entries([entry, *(panel.image_numbers(number) for panel in panels)])
                for number, entry in enumerate(images)
            ],
        }
        absent = [
            {"panel": part, "reason": panel.english(reason, **panel.message_fields())}
            for panel in panels
            for part, _, reason in panel.missing_parts()
        ]
        return merge_entries([document, *(panel.numbers() for panel in panels), {"absent": absent}])


def merge_entries(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the entries of several panels. Raise VitrailError if two panels use the same key."""
    merged: dict[str, Any] = {}
    for entry in entries:
        if duplicates := sorted(merged.keys() & entry.keys()):
            raise VitrailError(f"Keys of a panel must be its own, got {duplicates[0]!r} from two panels.")
        merged |= entry
    return merged


def compute_panels(
    bundle: Bundle,
    images: Sequence[ImageLike],
    *,
    name: str = "bundle",
    names: Sequence[str] | None = None,
    evidence: bool = False,
    other_images: Sequence[ImageLike] = (),
    against: tuple[str, Bundle] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    patch: Pair | None = None,
    inside: Sequence[int] | None = None,
    snapshots: Sequence[tuple[int, Path]] = (),
    seed: int = 0,
) -> PanelResults:
    """Run a bundle on images and compute all panels.

    `name` is the name of the bundle on the page. `names` are those of the images (default: their paths or numbers).
    `other_images` are not shown. They are used for statistics that need many images (CKA, distances), and duplicates
    of `images` are ignored.

    `layers` and `heads`, from 0 or from the end (-1), select the attention that is shown (default: all). Numbers are
    computed for all layers and heads. `patch` is the row and column of the followed patch (default: the centre).
    `inside` are the layers to show step by step (default: the first, the middle and the last). `snapshots` are the
    snapshots of the training, as (step, folder of the bundle).

    Raise UsageError for impossible options and CorruptFileError if the logits are not finite.
    """
    if not 1 <= len(images) <= MAX_IMAGES:
        raise UsageError(
            f"Images on one page must be 1 to {MAX_IMAGES}, got {len(images):,}."
            + (" Name some of them, and give the folder by --data (in Python: data)." if images else "")
        )
    names = [_default_name(image, index) for index, image in enumerate(images)] if names is None else names
    context = InspectionContext(
        bundle=bundle,
        name=_as_text(name),
        page_images=images,
        image_names=list(map(_as_text, names)),
        other_images=other_images,
        layers=layers,
        heads=heads,
        evidence=evidence,
        against=None if against is None else (_as_text(against[0]), against[1]),
        patch=patch,
        inside=inside,
        snapshots=snapshots,
        seed=seed,
    )
    _ = context.followed  # raises for a wrong patch, before any image is decoded
    panels = {name: _create_panel(name, context) for name in PANELS}
    measured_on = _record_images(context, [panel for panel in panels.values() if panel.why_absent() is None])
    notes = [panel.error for panel in panels.values() if isinstance(panel, _UnloadablePanel)]
    return PanelResults(context, panels, measured_on, notes)


def _record_images(context: InspectionContext, panels: Sequence[Panel]) -> int:
    """Pass every image to the panels that need it, and finish the panels. Return the number of images."""
    page_count = len(context.page_images)
    count = len(context.images) if any(panel.needs_other_images for panel in panels) else page_count
    inside = frozenset[int]().union(*(panel.inside_layers for panel in panels))
    model = context.model
    with evaluating(model), Meter(count, "images") as meter:
        for number, image in enumerate(context.images[:count]):
            activations = look(model, image[None], inside=inside if number < page_count else ())
            if not activations.logits.isfinite().all():
                raise CorruptFileError(OVERFLOWS)
            for panel in panels:
                meter(number)
                if panel.needs_other_images or number < page_count:
                    panel.record(number, image, activations)
            meter(number + 1)
        for panel in panels:
            panel.finish()
    return count


class _UnloadablePanel(Panel):
    """Placeholder for a panel of another package that cannot be loaded. The page shows the error as the reason."""

    messages: ClassVar[Messages] = {"title": {"en": "{panel}"}, "unusable": {"en": "{error}"}}

    def __init__(self, name: str, context: InspectionContext, error: str) -> None:
        super().__init__(name, context)
        self.error = error

    def why_absent(self) -> str | None:
        return "unusable"

    def message_fields(self) -> dict[str, Any]:
        return {**super().message_fields(), "panel": self.name, "error": self.error}


def _create_panel(name: str, context: InspectionContext) -> Panel:
    try:
        panel_class = PANELS[name]
    except VitrailError as error:
        if name not in PANELS.extension_names:
            raise
        return _UnloadablePanel(name, context, str(error))
    return panel_class(name, context)


def _default_name(image: ImageLike, index: int) -> str:
    return str(image) if isinstance(image, str | Path) else f"image {index}"


def _as_text(name: str) -> str:
    """Return a file name as valid Unicode. Undecodable bytes become replacement characters."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
