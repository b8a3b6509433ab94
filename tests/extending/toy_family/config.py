"""A family in numbers: fully connected layers on the means of a few large cells. No torch here."""

import dataclasses
from typing import Annotated, ClassVar

from vitrail.core.settings import Bounds, Pair
from vitrail.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoarseConfig(ModelConfig):
    """An image as the means of `cells` x `cells` parts of it."""

    family: ClassVar[str] = "coarse"
    model: ClassVar[str] = "toy_family.model:Coarse"
    sizes: ClassVar[str] = "toy_family.sizes:SIZES"

    classes: int = 10
    channels: int = 1
    resolution: Pair = (8, 8)
    cells: Annotated[int, Bounds(1, 64)] = 4
    """Rows and columns of cells."""
    width: Annotated[int, Bounds(1, 4096)] = 32
    """Width of the input of the head."""

    @property
    def parameters(self) -> int:
        return self.macs + self.width + self.classes

    @property
    def macs(self) -> int:
        return self.cells**2 * self.channels * self.width + self.width * self.classes
