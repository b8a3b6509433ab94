"""RandAugment (arXiv 1909.13719): random operations for each image, from a table.

A row of a table has the name of an operation, its function, the arguments as a function of the context (`ctx`), and the
supported numbers of channels. Append new operations at the end: a random number selects the row.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from vitrail.core.rng import Stream
from vitrail.core.settings import Bounds
from vitrail.data.augment import operations
from vitrail.data.augment.base import FillingAugmentation, require_channels
from vitrail.data.augment.operations import GREY_OR_COLOUR, Images
from vitrail.data.preprocess import Preprocess


class OperationContext(NamedTuple):
    """Values from which a row of a table computes the arguments of its operation."""

    magnitude: int
    fill: int
    height: int
    width: int
    sign: np.ndarray
    """-1 or 1 at random for each image (B)."""
    stream: Stream
    """Random stream of these images."""

    def rising(self, end: float) -> float:
        """Return the strength of the magnitude on torchvision's scale of 31 strengths from 0 to `end`."""
        return _linspace(0.0, end)[self.magnitude]

    def falling(self, start: float) -> float:
        """Return the strength of the magnitude on torchvision's scale of 31 strengths from `start` to 0."""
        return _linspace(start, 0.0)[self.magnitude]

    @property
    def tenths(self) -> float:
        """The magnitude on Google's scale, where 10 is usual."""
        return self.magnitude / 10

    def for_all(self, strength: float) -> np.ndarray:
        """Return the same strength for every image (B)."""
        return np.full(len(self.sign), float(strength))


class Operation(NamedTuple):
    """A row of a table of operations. It computes `apply(images, *arguments(context))`."""

    name: str
    apply: Callable[..., Images]
    arguments: Callable[[OperationContext], tuple[Any, ...]] = lambda _: ()
    channels: tuple[int, ...] | None = None
    """Supported numbers of channels; None for any number."""


# Strengths of `torchvision.transforms.RandAugment`, under its names.
TORCHVISION = (
    Operation("Identity", lambda images: images),
    Operation("ShearX", operations.shear_x, lambda ctx: (ctx.rising(0.3) * ctx.sign, ctx.fill), GREY_OR_COLOUR),
    Operation("ShearY", operations.shear_y, lambda ctx: (ctx.rising(0.3) * ctx.sign, ctx.fill), GREY_OR_COLOUR),
    Operation(
        "TranslateX",
        operations.translate_x,
        lambda ctx: (ctx.rising(150 / 331 * ctx.width) * ctx.sign, ctx.fill),
        GREY_OR_COLOUR,
    ),
    Operation(
        "TranslateY",
        operations.translate_y,
        lambda ctx: (ctx.rising(150 / 331 * ctx.height) * ctx.sign, ctx.fill),
        GREY_OR_COLOUR,
    ),
    Operation("Rotate", operations.rotate, lambda ctx: (ctx.rising(30.0) * ctx.sign, ctx.fill), GREY_OR_COLOUR),
    Operation("Brightness", operations.brightness, lambda ctx: (1 + ctx.rising(0.9) * ctx.sign,)),
    Operation("Color", operations.saturation, lambda ctx: (1 + ctx.rising(0.9) * ctx.sign,), GREY_OR_COLOUR),
    Operation("Contrast", operations.contrast, lambda ctx: (1 + ctx.rising(0.9) * ctx.sign,), GREY_OR_COLOUR),
    Operation("Sharpness", operations.sharpness, lambda ctx: (1 + ctx.rising(0.9) * ctx.sign,)),
    Operation("Posterize", operations.posterise, lambda ctx: (ctx.for_all(8 - round(ctx.magnitude / 7.5)),)),
    Operation("Solarize", operations.solarise, lambda ctx: (ctx.for_all(ctx.falling(255.0)),)),
    Operation("AutoContrast", operations.autocontrast),
    Operation("Equalize", operations.equalise),
)

# Strengths of big_vision's `randaug`, under its names. Its lengths are for images of 224 pixels; ours are
# proportional to the size.
GOOGLE = (
    Operation("AutoContrast", operations.autocontrast),
    Operation("Equalize", operations.equalise),
    Operation("Invert", operations.invert),
    Operation("Rotate", operations.rotate, lambda ctx: (30 * ctx.tenths * ctx.sign, ctx.fill), GREY_OR_COLOUR),
    Operation("Posterize", operations.posterise, lambda ctx: (ctx.for_all(min(int(4 * ctx.tenths), 8)),)),
    Operation("Solarize", operations.solarise, lambda ctx: (ctx.for_all(int(256 * ctx.tenths)),)),
    Operation("Color", operations.saturation, lambda ctx: (ctx.for_all(1.8 * ctx.tenths + 0.1),), GREY_OR_COLOUR),
    Operation("Contrast", operations.contrast, lambda ctx: (ctx.for_all(1.8 * ctx.tenths + 0.1),), GREY_OR_COLOUR),
    Operation("Brightness", operations.brightness, lambda ctx: (ctx.for_all(1.8 * ctx.tenths + 0.1),)),
    Operation("Sharpness", operations.sharpness, lambda ctx: (ctx.for_all(1.8 * ctx.tenths + 0.1),)),
    Operation("ShearX", operations.shear_x, lambda ctx: (0.3 * ctx.tenths * ctx.sign, ctx.fill), GREY_OR_COLOUR),
    Operation("ShearY", operations.shear_y, lambda ctx: (0.3 * ctx.tenths * ctx.sign, ctx.fill), GREY_OR_COLOUR),
    Operation(
        "TranslateX",
        operations.translate_x,
        lambda ctx: (100 * ctx.tenths * ctx.sign * ctx.width / 224, ctx.fill),
        GREY_OR_COLOUR,
    ),
    Operation(
        "TranslateY",
        operations.translate_y,
        lambda ctx: (100 * ctx.tenths * ctx.sign * ctx.height / 224, ctx.fill),
        GREY_OR_COLOUR,
    ),
    Operation(
        "Cutout",
        operations.cut_out,
        lambda ctx: (
            ctx.stream.integers(ctx.height, "cut out down"),
            ctx.stream.integers(ctx.width, "cut out right"),
            int(40 * ctx.tenths * ctx.height / 224),
            int(40 * ctx.tenths * ctx.width / 224),
            ctx.fill,
        ),
    ),
    Operation("SolarizeAdd", operations.solarise_add, lambda ctx: (int(110 * ctx.tenths),)),
)

TABLES = {"torchvision": TORCHVISION, "google": GOOGLE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandAugment(FillingAugmentation):
    """RandAugment: random operations of a table, with the same magnitude for all."""

    randaugment: Annotated[int, Bounds(0, 16)] = 0
    """Number of random operations (RandAugment, arXiv 1909.13719)."""
    operations: Literal["torchvision", "google"] = "torchvision"
    """Operations and strengths: those of torchvision, or of Google's code (used by AugReg), where some operations get
    weaker with a higher magnitude."""
    magnitude: Annotated[int, Bounds(0, 30)] = 9
    """Strength of RandAugment, up to 30 on torchvision's scale; 10 is usual on Google's."""

    @property
    def is_active(self) -> bool:
        return self.randaugment > 0

    def check_channels(self, channels: int) -> None:
        for row in TABLES[self.operations]:
            require_channels("randaugment", row.name, row.channels, channels)

    def apply(self, images: Images, stream: Stream, preprocess: Preprocess) -> Images:
        table = TABLES[self.operations]
        for turn in range(self.randaugment):
            rows = stream.integers(len(table), f"operation {turn}")
            sign = np.where(stream.uniform(f"sign {turn}") < 0.5, -1.0, 1.0)
            images = images.copy()
            for row in np.unique(rows):
                mask = rows == row
                images[mask] = self.apply_row(table[row], images[mask], sign[mask], stream.take(mask))
        return images

    def apply_row(self, row: Operation, images: Images, sign: np.ndarray, stream: Stream) -> Images:
        """Apply the operation of a row to images (B, H, W, C)."""
        height, width = images.shape[1:3]
        context = OperationContext(self.magnitude, self.fill, height, width, sign, stream)
        return row.apply(images, *row.arguments(context))


def _linspace(start: float, end: float) -> list[float]:
    """Return the strengths of torchvision's 31 magnitudes, computed in single precision."""
    import torch  # not at the top: settings must be readable without torch

    return torch.linspace(start, end, 31).tolist()
