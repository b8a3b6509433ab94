"""RandAugment (arXiv 1909.13719): random operations for each image, from a table.

A row has the name of an operation, its function, its arguments as a function of the context, and the supported numbers
of channels. New operations are added at the end.
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
    """What the arguments of an operation may depend on."""

    magnitude: int
    fill: int
    height: int
    width: int
    sign: np.ndarray
    """-1 or 1 at random for each image (B)."""
    stream: Stream
    """Random stream of these images."""

    def rising(self, end: float) -> float:
        """From 0 to `end` over torchvision's 31 magnitudes, in its single precision."""
        return _linspace(0.0, end)[self.magnitude]

    def falling(self, start: float) -> float:
        """From `start` to 0 over torchvision's 31 magnitudes, in its single precision."""
        return _linspace(start, 0.0)[self.magnitude]

    @property
    def tenths(self) -> float:
        """The magnitude on Google's scale, where 10 is usual."""
        return self.magnitude / 10

    def all(self, strength: float) -> np.ndarray:
        """The same strength for every image."""
        return np.full(len(self.sign), float(strength))


class Operation(NamedTuple):
    """A row: `apply(images, *arguments(context))`."""

    name: str
    apply: Callable[..., Images]
    arguments: Callable[[OperationContext], tuple[Any, ...]] = lambda _: ()
    channels: tuple[int, ...] | None = None
    """Supported numbers of channels; None is any."""


# Strengths of `torchvision.transforms.RandAugment`, under its names.
TORCHVISION = (
    Operation("Identity", lambda images: images),
    Operation("ShearX", operations.shear_x, lambda at: (at.rising(0.3) * at.sign, at.fill), GREY_OR_COLOUR),
    Operation("ShearY", operations.shear_y, lambda at: (at.rising(0.3) * at.sign, at.fill), GREY_OR_COLOUR),
    Operation(
        "TranslateX",
        operations.translate_x,
        lambda at: (at.rising(150 / 331 * at.width) * at.sign, at.fill),
        GREY_OR_COLOUR,
    ),
    Operation(
        "TranslateY",
        operations.translate_y,
        lambda at: (at.rising(150 / 331 * at.height) * at.sign, at.fill),
        GREY_OR_COLOUR,
    ),
    Operation("Rotate", operations.rotate, lambda at: (at.rising(30.0) * at.sign, at.fill), GREY_OR_COLOUR),
    Operation("Brightness", operations.brightness, lambda at: (1 + at.rising(0.9) * at.sign,)),
    Operation("Color", operations.saturation, lambda at: (1 + at.rising(0.9) * at.sign,), GREY_OR_COLOUR),
    Operation("Contrast", operations.contrast, lambda at: (1 + at.rising(0.9) * at.sign,), GREY_OR_COLOUR),
    Operation("Sharpness", operations.sharpness, lambda at: (1 + at.rising(0.9) * at.sign,)),
    Operation("Posterize", operations.posterise, lambda at: (at.all(8 - round(at.magnitude / 7.5)),)),
    Operation("Solarize", operations.solarise, lambda at: (at.all(at.falling(255.0)),)),
    Operation("AutoContrast", operations.autocontrast),
    Operation("Equalize", operations.equalise),
)

# Strengths of big_vision's `randaug`, under its names. Its lengths are for images of 224 pixels; here they follow the
# size.
GOOGLE = (
    Operation("AutoContrast", operations.autocontrast),
    Operation("Equalize", operations.equalise),
    Operation("Invert", operations.invert),
    Operation("Rotate", operations.rotate, lambda at: (30 * at.tenths * at.sign, at.fill), GREY_OR_COLOUR),
    Operation("Posterize", operations.posterise, lambda at: (at.all(min(int(4 * at.tenths), 8)),)),
    Operation("Solarize", operations.solarise, lambda at: (at.all(int(256 * at.tenths)),)),
    Operation("Color", operations.saturation, lambda at: (at.all(1.8 * at.tenths + 0.1),), GREY_OR_COLOUR),
    Operation("Contrast", operations.contrast, lambda at: (at.all(1.8 * at.tenths + 0.1),), GREY_OR_COLOUR),
    Operation("Brightness", operations.brightness, lambda at: (at.all(1.8 * at.tenths + 0.1),)),
    Operation("Sharpness", operations.sharpness, lambda at: (at.all(1.8 * at.tenths + 0.1),)),
    Operation("ShearX", operations.shear_x, lambda at: (0.3 * at.tenths * at.sign, at.fill), GREY_OR_COLOUR),
    Operation("ShearY", operations.shear_y, lambda at: (0.3 * at.tenths * at.sign, at.fill), GREY_OR_COLOUR),
    Operation(
        "TranslateX",
        operations.translate_x,
        lambda at: (100 * at.tenths * at.sign * at.width / 224, at.fill),
        GREY_OR_COLOUR,
    ),
    Operation(
        "TranslateY",
        operations.translate_y,
        lambda at: (100 * at.tenths * at.sign * at.height / 224, at.fill),
        GREY_OR_COLOUR,
    ),
    Operation(
        "Cutout",
        operations.cut_out,
        lambda at: (
            at.stream.integers(at.height, "cut out down"),
            at.stream.integers(at.width, "cut out right"),
            int(40 * at.tenths * at.height / 224),
            int(40 * at.tenths * at.width / 224),
            at.fill,
        ),
    ),
    Operation("SolarizeAdd", operations.solarise_add, lambda at: (int(110 * at.tenths),)),
)

TABLES = {"torchvision": TORCHVISION, "google": GOOGLE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandAugment(FillingAugmentation):
    """Random operations of a table."""

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
            kind = stream.integers(len(table), f"operation {turn}")
            sign = np.where(stream.uniform(f"sign {turn}") < 0.5, -1.0, 1.0)
            images = images.copy()
            for number in np.unique(kind):
                chosen = kind == number
                images[chosen] = self.apply_row(table[number], images[chosen], sign[chosen], stream.take(chosen))
        return images

    def apply_row(self, row: Operation, images: Images, sign: np.ndarray, stream: Stream) -> Images:
        """Apply one operation to images (B, H, W, C)."""
        height, width = images.shape[1:3]
        context = OperationContext(self.magnitude, self.fill, height, width, sign, stream)
        return row.apply(images, *row.arguments(context))


def _linspace(start: float, end: float) -> list[float]:
    """The strengths of torchvision's 31 magnitudes."""
    import torch  # settings must be readable without it

    return torch.linspace(start, end, 31).tolist()
