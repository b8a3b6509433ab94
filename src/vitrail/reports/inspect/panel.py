"""The interface of panels of `vitrail inspect`.

A panel is one class in one file and one line in `registry.py` (or an entry point `panel.NAME` in another package).
`compute_panels` creates each panel and passes it every image once; `page` writes the results.
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
from vitrail.reports.inspect.shared_messages import SHARED, SYMBOLS
from vitrail.reports.translations import translate

Figure = np.ndarray | str
"""Pixels, uint8 (h, w, 3), written as PNG; or an SVG element, written as SVG."""


@dataclasses.dataclass(frozen=True)
class InspectionContext:
    """The bundle, the images and the options of an inspection. Images are decoded when a panel first needs them."""

    bundle: Bundle
    name: str
    """Name of the bundle on the page."""
    shown: Sequence[ImageLike]
    """The images of the page."""
    names: Sequence[str]
    """Their names."""
    others: Sequence[ImageLike] = ()
    """More images, for results that need many."""
    layers: Sequence[int] | None = None
    """Layers whose attention is shown, from 0 or from the end (-1); default all."""
    heads: Sequence[int] | None = None
    """The same for heads."""
    evidence: bool = False
    """Whether to compute panels that need hundreds of forward passes."""
    against: tuple[str, Bundle] | None = None
    """Another bundle, with its name, to compare layers with."""
    seed: int = 0
    patch: Pair | None = None
    """Row and column of the followed patch, from 0; default: the one at the centre."""
    inside: Sequence[int] | None = None
    """Layers that are shown step by step; default: the first, the middle and the last."""
    snapshots: Sequence[tuple[int, Path]] = ()
    """The model during its training: steps, and the folders of bundles."""

    @property
    def grid(self) -> Pair:
        """Rows and columns of the places that can be followed; (1, 1) for a family without places."""
        return self.model.config.grid or (1, 1)

    @functools.cached_property
    def followed(self) -> int | None:
        """The followed patch, counted row by row; None for a family without places."""
        rows, columns = self.grid
        if self.model.config.grid is None:
            if self.patch is not None:
                raise UsageError(
                    f"Patch must not be given for family {self.model.config.family}: its layers have no places."
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
        """The names of the classes; their numbers if they have none."""
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
        """Layout of the tokens; None for a model without attention between patches, or with a single patch."""
        found = self.model.layout()
        return None if found is not None and found.grid == (1, 1) else found

    @functools.cached_property
    def _decoded(self) -> list[tuple[ImageLike, np.ndarray]]:
        """Every image with its crop, the shown ones first; duplicates among the others are left out."""
        crop = self.bundle.preprocess.crop
        shown = [(image, crop(image)) for image in self.shown]
        same = {pixels.tobytes() for _, pixels in shown}
        others = ((image, crop(image)) for image in self.others)
        return shown + [(image, pixels) for image, pixels in others if pixels.tobytes() not in same]

    @property
    def sources(self) -> list[ImageLike]:
        """Every image as it was given, the shown ones first."""
        return [image for image, _ in self._decoded]

    def pixels(self, number: int) -> np.ndarray:
        """A shown image, cropped for the model, uint8 (H, W, C)."""
        return self._decoded[number][1]

    @functools.cached_property
    def images(self) -> Tensor:
        """Every image, preprocessed, the shown ones first."""
        return prepare(self.bundle, [pixels for _, pixels in self._decoded])

    def why_no_attention(self) -> str | None:
        """Name of the sentence why there is no attention between patches; None if there is."""
        if self.layout is not None:
            return None
        return "no-attention" if self.model.layout() is None else "one-patch"

    def why_no_prediction(self) -> str | None:
        """Name of the sentence why the model predicts no class; None if it does."""
        if not self.model.config.classifies:
            return f"predicts-{self.model.config.predicts}"
        return None if self.bundle.parts.classifies else "no-classes"


def prepare(bundle: Bundle, crops: Sequence[np.ndarray]) -> Tensor:
    """Crops as a batch for the model, on its device and in its dtype."""
    weight = next(bundle.model.parameters())
    pixels = torch.from_numpy(np.stack(crops)).to(weight.device)
    return bundle.preprocess.scale(pixels).to(weight.dtype)


def place_in(patch: int, grid: Pair, other: Pair) -> int:
    """The place of a finer or coarser grid at the centre of a patch, both counted row by row."""
    row, column = divmod(patch, grid[1])
    down, across = ((2 * at + 1) * many // (2 * few) for at, few, many in zip((row, column), grid, other, strict=True))
    return down * other[1] + across


class Panel:
    """One section of the page, with its numbers, figures and sentences. Methods that a subclass does not define return
    nothing."""

    words: ClassVar[Messages] = {}
    """Its sentences; `title` is its heading. Those it lacks are looked up in `words.toml`."""
    script: ClassVar[str] = ""
    """JavaScript that the page runs for it; `data` there is what `data()` returns here."""
    sees_others: ClassVar[bool] = False
    """Whether `observe` gets all images, not only the shown ones."""

    def __init__(self, name: str, context: InspectionContext) -> None:
        """Refuse impossible options here, before any image is decoded."""
        self.name, self.context = name, context

    @property
    def notice(self) -> str:
        """Name of the sentence that says what to notice; empty for none."""
        return "notice" if "notice" in self.words else ""

    @property
    def opens(self) -> frozenset[int]:
        """Layers whose every step it observes: `look(..., inside=...)` records those alone."""
        return frozenset()

    def why_absent(self) -> str | None:
        """Name of the sentence why this panel does not apply to the model; then nothing is computed. None if it
        applies."""
        return None

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        """Record what is needed of one image and of the result of `look` for it."""

    def finish(self) -> None:
        """Compute what needs all images, or none, after the last one."""

    def numbers(self) -> dict[str, Any]:
        """Entries of `inspect.json`."""
        return {}

    def layer_numbers(self, layer: int) -> dict[str, Any]:
        """Entries of a layer in `inspect.json`."""
        return {}

    def image_numbers(self, number: int) -> dict[str, Any]:
        """Entries of a shown image in `inspect.json`."""
        return {}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Its figures, by the names of their files."""
        yield from ()

    def arrays(self) -> dict[str, np.ndarray]:
        """Its entries of `arrays.npz`."""
        return {}

    def html(self, figures: Mapping[str, Figure]) -> str:
        """Its section below the heading, from its figures; empty for no section."""
        return ""

    def data(self) -> dict[str, Any]:
        """What its script reads."""
        return {}

    def least_bytes(self) -> int:
        """Lower bound of its size on the page, as far as it is known before writing."""
        return 0

    def smaller(self) -> Iterator[Self]:
        """Yield smaller versions of the panel, for a page that would be too large."""
        yield from ()

    def absences(self) -> Iterator[tuple[str, str, str]]:
        """Missing parts of this panel: the name of the part, and the names of its title and of the sentence why."""
        if (why := self.why_absent()) is not None:
            yield self.name, "title", why

    def fields(self) -> dict[str, Any]:
        """Values for the placeholders in the sentences why something is missing."""
        config, provenance = self.context.model.config, self.context.bundle.provenance
        return {"family": config.family, "objective": provenance.get("objective", "")}

    # What panels build their sections from.

    def word(self, name: str, tag: str = "span", **fields: Any) -> Html:
        """One of its sentences, or of those of the family's walkthrough, in both languages."""
        return translate(name, tag, messages={**SHARED, **self.context.walkthrough.messages, **self.words}, **fields)

    def say(self, name: str, **fields: Any) -> Html:
        """The same as a paragraph."""
        return self.word(name, "p", **fields)

    def label(self, name: str) -> Html:
        """The same inside an SVG element."""
        return self.word(name, "tspan")

    def english(self, name: str, **fields: Any) -> str:
        """The same in English, as plain text."""
        return {**SHARED, **self.words}[name]["en"].format(**fields)

    def symbols(self, equation: str) -> Html:
        """What the symbols of an equation mean, to unfold."""
        known = []
        for name in symbols(equation):
            base = name.partition("_")[0]
            explained = next((one for one in (name, base, base.rstrip("'")) if one in SYMBOLS), None)
            if explained is not None:
                known.append((explained, name if explained == name else base))
        rows = "".join(
            f"<dt>{typeset(shown)}</dt><dd>{translate(explained, messages=SYMBOLS)}</dd>"
            for explained, shown in dict(known).items()
        )
        return Html(f'<details class="symbols"><summary>{self.word("symbols")}</summary><dl>{rows}</dl></details>')

    def each(self, number: int, content: str) -> str:
        """A part that is visible while this image is selected."""
        return f'<div data-image="{number}">{content}</div>'

    def photo(self, number: int, inside: str = "", *, attributes: str = 'class="photo" role="img"') -> Html:
        """A shown image, with elements over it. Its pixels are in the page once, as the background `p{number}`."""
        height, width = self.context.pixels(number).shape[:2]
        return Html(
            f'<div style="aspect-ratio: {width} / {height}" aria-label="{escape(self.context.names[number])}"'
            f' {attributes}><div class="under p{number}"></div>{inside}</div>'
        )

    def overlay(self, number: int, colours: Figure) -> Html:
        """A map over a shown image."""
        inside = f'<img class="heat" src="{_address(colours)}" alt="">'
        return self.photo(number, inside, attributes='class="photo laid" role="img"')


def wide_image(pixels: Figure, text: str) -> str:
    """A figure across its section, with a text that says what it shows."""
    return f'<img class="wide" src="{_address(pixels)}" alt="{escape(text)}">'


def _address(pixels: Figure) -> str:
    assert isinstance(pixels, np.ndarray)
    return image_data_url(pixels)


def rgb(pixels_HWC: np.ndarray) -> np.ndarray:
    """The channels to show: the first three, otherwise the first."""
    return pixels_HWC[..., :3] if pixels_HWC.shape[2] >= 3 else pixels_HWC[..., :1]


def interval(values: np.ndarray) -> list[float] | None:
    """The 95 % interval of a mean for `inspect.json`; None for a single value."""
    ends = mean_interval(values.tolist())
    return None if ends is None else list(ends)


def rounded(table: np.ndarray) -> list[list[float]]:
    """An array as nested lists of rounded numbers for `inspect.json`."""
    return [[round(float(value), 6) for value in row] for row in table]
