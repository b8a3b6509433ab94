"""Base class of the panels of `vitrail inspect`, and the data that all panels share.

A panel is one section of the page: one class in its own module, and one line in `registry.py` (in another package, an
entry point `panel.NAME`). `compute_panels` creates each panel and passes it the activations of every image.
`inspection_page` writes the results.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.bundle import Bundle
from vitrail.core.errors import UsageError
from vitrail.core.html import Html, escape
from vitrail.core.message_files import Messages
from vitrail.core.settings import Pair
from vitrail.data.preprocess import ImageLike
from vitrail.data.thumbnail import image_data_url
from vitrail.evaluation.metrics import mean_interval
from vitrail.models.activations import Activations
from vitrail.models.base import AnyModel, Layout
from vitrail.models.walkthrough import Walkthrough, walkthrough_of
from vitrail.reports.equations import symbols, typeset
from vitrail.reports.inspect.shared_messages import SHARED_MESSAGES, SYMBOL_MEANINGS
from vitrail.reports.translations import translate

Figure = np.ndarray | str
"""Pixels, uint8 (h, w, 3), written as PNG; or an SVG element as text, written as SVG."""


@dataclasses.dataclass(frozen=True)
class InspectionContext:
    """The bundle, the images and the options of an inspection. Images are decoded when a panel first needs them."""

    bundle: Bundle
    name: str
    """Name of the bundle on the page."""
    page_images: Sequence[ImageLike]
    """Images shown on the page."""
    image_names: Sequence[str]
    """Names of the page images."""
    other_images: Sequence[ImageLike] = ()
    """Images that are not shown, for statistics that need many images."""
    layers: Sequence[int] | None = None
    """Layers whose attention is shown, from 0 or from the end (-1). None: all."""
    heads: Sequence[int] | None = None
    """Heads whose attention is shown, from 0 or from the end (-1). None: all."""
    evidence: bool = False
    """Whether to compute panels that need hundreds of forward passes."""
    against: tuple[str, Bundle] | None = None
    """Name and bundle of another model, to compare layers with."""
    seed: int = 0
    patch: Pair | None = None
    """Row and column of the followed patch, from 0. None: the patch at the centre."""
    inside: Sequence[int] | None = None
    """Layers shown step by step. None: the first, the middle and the last."""
    snapshots: Sequence[tuple[int, Path]] = ()
    """Snapshots of the training: (step, folder of the bundle)."""

    @property
    def grid(self) -> Pair:
        """Rows and columns of the positions that can be followed. (1, 1) for a family without positions."""
        return self.model.config.grid or (1, 1)

    @functools.cached_property
    def followed(self) -> int | None:
        """Raster index of the followed patch. None for a family without positions.

        Raise UsageError if `patch` is outside the grid.
        """
        rows, columns = self.grid
        if self.model.config.grid is None:
            if self.patch is not None:
                raise UsageError(
                    f"Patch must be omitted for family {self.model.config.family}, whose layers have no positions."
                )
            return None
        row, column = self.patch or (rows // 2, columns // 2)
        if not (0 <= row < rows and 0 <= column < columns):
            raise UsageError(
                f"Patch must be a row from 0 to {rows - 1} and a column from 0 to {columns - 1}, got {row} {column}."
            )
        return row * columns + column

    @property
    def labels(self) -> Sequence[str]:
        """Class names, or class indices as text if the bundle has no names."""
        return self.bundle.labels or tuple(map(str, range(self.model.config.classes)))

    @property
    def model(self) -> AnyModel:
        """The model of the bundle."""
        return self.bundle.model

    @functools.cached_property
    def walkthrough(self) -> Walkthrough[Any]:
        """The steps of the model, with their equations and messages."""
        return walkthrough_of(self.model)

    @functools.cached_property
    def layout(self) -> Layout | None:
        """Layout of the tokens. None for a model without attention between patches, or with a single patch."""
        layout = self.model.layout()
        return None if layout is not None and layout.grid == (1, 1) else layout

    @functools.cached_property
    def _crops(self) -> list[tuple[ImageLike, np.ndarray]]:
        """Every image with its crop, page images first. Other images that equal a page image are left out."""
        crop = self.bundle.preprocess.crop
        page_crops = [(image, crop(image)) for image in self.page_images]
        page_bytes = {pixels.tobytes() for _, pixels in page_crops}
        other_crops = ((image, crop(image)) for image in self.other_images)
        return page_crops + [(image, pixels) for image, pixels in other_crops if pixels.tobytes() not in page_bytes]

    @property
    def sources(self) -> list[ImageLike]:
        """Every image before cropping, page images first."""
        return [image for image, _ in self._crops]

    def pixels(self, number: int) -> np.ndarray:
        """Return the page image with index `number`, cropped for the model, uint8 (H, W, C)."""
        return self._crops[number][1]

    @functools.cached_property
    def images(self) -> Tensor:
        """Every image, preprocessed (B, C, H, W), page images first."""
        return make_batch(self.bundle, [pixels for _, pixels in self._crops])

    def why_no_attention(self) -> str | None:
        """Return the message name of the reason why the model has no attention between patches. None if it has."""
        if self.layout is not None:
            return None
        return "no-attention" if self.model.layout() is None else "one-patch"

    def why_no_prediction(self) -> str | None:
        """Return the message name of the reason why the model predicts no class. None if it does."""
        if not self.model.config.classifies:
            return f"predicts-{self.model.config.predicts}"
        return None if self.bundle.info.classifies else "no-classes"


def make_batch(bundle: Bundle, crops: Sequence[np.ndarray]) -> Tensor:
    """Return crops, uint8 (H, W, C), as a batch (B, C, H, W) on the device and in the dtype of the model."""
    weight = next(bundle.model.parameters())
    pixels = torch.from_numpy(np.stack(crops)).to(weight.device)
    return bundle.preprocess.scale(pixels).to(weight.dtype)


def position_in_grid(patch: int, grid: Pair, other_grid: Pair) -> int:
    """Return the raster index, in a finer or coarser grid, of the cell at the centre of a patch."""
    row, column = divmod(patch, grid[1])
    other_row, other_column = (
        (2 * index + 1) * other_count // (2 * count)
        for index, count, other_count in zip((row, column), grid, other_grid, strict=True)
    )
    return other_row * other_grid[1] + other_column


class Panel:
    """One section of the page, with its numbers, figures and messages. Every method has an empty default."""

    messages: ClassVar[Messages] = {}
    """Messages of the panel. `title` is its heading. Missing ones are looked up in `shared_messages.toml`."""
    script: ClassVar[str] = ""
    """JavaScript of the panel. It reads the value of `script_data()` as `data`."""
    needs_other_images: ClassVar[bool] = False
    """Whether `record` is called for all images or only for the page images."""

    def __init__(self, name: str, context: InspectionContext) -> None:
        """Subclasses check their options here, before any image is decoded."""
        self.name, self.context = name, context

    @property
    def notice(self) -> str:
        """Name of the message that says what to notice. Empty for none."""
        return "notice" if "notice" in self.messages else ""

    @property
    def inside_layers(self) -> frozenset[int]:
        """Layers whose every step the panel reads. They are recorded by `look(..., inside=...)`."""
        return frozenset()

    def why_absent(self) -> str | None:
        """Return the name of the message why the panel does not apply to the model. None if it applies.

        A panel that does not apply computes nothing.
        """
        return None

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        """Store results of the image with index `number`. `activations` is the result of `look` for it."""

    def finish(self) -> None:
        """Compute results of all images together. Called once, after the last image."""

    def numbers(self) -> dict[str, Any]:
        """Return the values of the panel, as entries for `inspect.json`."""
        return {}

    def layer_numbers(self, layer: int) -> dict[str, Any]:
        """Return the values of a layer, as entries for `inspect.json`."""
        return {}

    def image_numbers(self, number: int) -> dict[str, Any]:
        """Return the values of the page image with index `number`, as entries for `inspect.json`."""
        return {}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield figures as (file name without suffix, figure)."""
        yield from ()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return entries for `arrays.npz`."""
        return {}

    def html(self, figures: Mapping[str, Figure]) -> str:
        """Return the section below its heading. Empty for no section."""
        return ""

    def script_data(self) -> dict[str, Any]:
        """Return the JSON data of the script."""
        return {}

    def min_bytes(self) -> int:
        """Return a lower bound of the section's size, without rendering it."""
        return 0

    def smaller_versions(self) -> Iterator[Self]:
        """Yield versions of the panel with less content, for a page that would be too large."""
        yield from ()

    def missing_parts(self) -> Iterator[tuple[str, str, str]]:
        """Yield parts that do not apply: (name of the part, message name of its title, message name of the reason)."""
        if (reason := self.why_absent()) is not None:
            yield self.name, "title", reason

    def message_fields(self) -> dict[str, Any]:
        """Return values for the placeholders of messages about missing parts."""
        config, provenance = self.context.model.config, self.context.bundle.provenance
        return {"family": config.family, "objective": provenance.get("objective", "")}

    # Helpers for subclasses

    def t(self, name: str, tag: str = "span", **fields: Any) -> Html:
        """Return a message of the panel, of the walkthrough or of all panels, in both languages."""
        messages = {**SHARED_MESSAGES, **self.context.walkthrough.messages, **self.messages}
        return translate(name, tag, messages=messages, **fields)

    def paragraph(self, name: str, **fields: Any) -> Html:
        """Return a message as a paragraph."""
        return self.t(name, "p", **fields)

    def svg_label(self, name: str) -> Html:
        """Return a message for use inside an SVG text."""
        return self.t(name, "tspan")

    def english(self, name: str, **fields: Any) -> str:
        """Return a message as plain English text."""
        return {**SHARED_MESSAGES, **self.messages}[name]["en"].format(**fields)

    def symbol_list(self, equation: str) -> Html:
        """Return a folded list of the meanings of an equation's symbols."""
        meanings = {}
        for symbol in symbols(equation):
            base = symbol.partition("_")[0]
            entry = next((name for name in (symbol, base, base.rstrip("'")) if name in SYMBOL_MEANINGS), None)
            if entry is not None:
                meanings[entry] = symbol if entry == symbol else base
        rows = "".join(
            f"<dt>{typeset(symbol)}</dt><dd>{translate(entry, messages=SYMBOL_MEANINGS)}</dd>"
            for entry, symbol in meanings.items()
        )
        return Html(f'<details class="symbols"><summary>{self.t("symbols")}</summary><dl>{rows}</dl></details>')

    def block_for_image(self, number: int, content: str) -> str:
        """Return HTML that is visible only while this page image is selected."""
        return f'<div data-image="{number}">{content}</div>'

    def photo(self, number: int, overlay: str = "", *, attributes: str = 'class="photo" role="img"') -> Html:
        """Return a page image with HTML elements over it. The pixels are the background of the class `p{number}`."""
        height, width = self.context.pixels(number).shape[:2]
        return Html(
            f'<div style="aspect-ratio: {width} / {height}" aria-label="{escape(self.context.image_names[number])}"'
            f' {attributes}><div class="under p{number}"></div>{overlay}</div>'
        )

    def photo_with_map(self, number: int, colours: Figure) -> Html:
        """Return a page image with a map over it."""
        overlay = f'<img class="heat" src="{_data_url(colours)}" alt="">'
        return self.photo(number, overlay, attributes='class="photo laid" role="img"')


def wide_image(pixels: Figure, alt_text: str) -> str:
    """Return a figure as an image of the full width of its section."""
    return f'<img class="wide" src="{_data_url(pixels)}" alt="{escape(alt_text)}">'


def _data_url(pixels: Figure) -> str:
    assert isinstance(pixels, np.ndarray)
    return image_data_url(pixels)


def rgb(pixels_HWC: np.ndarray) -> np.ndarray:
    """Return the displayed channels: the first three, or the first if there are fewer."""
    return pixels_HWC[..., :3] if pixels_HWC.shape[2] >= 3 else pixels_HWC[..., :1]


def interval(values: np.ndarray) -> list[float] | None:
    """Return the 95 % interval of the mean for `inspect.json`. None for a single value."""
    ends = mean_interval(values.tolist())
    return None if ends is None else list(ends)


def rounded(table: np.ndarray) -> list[list[float]]:
    """Return a 2-D array as nested lists of rounded numbers for `inspect.json`."""
    return [[round(float(value), 6) for value in row] for row in table]
