"""A family in numbers: fully connected layers on the means of a few large cells. No torch here."""

import dataclasses
from typing import ClassVar

from vitrail.core.settings import Pair
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
    cells: int = 4
    """Rows and columns of cells."""
    width: int = 32
    """Width of the input of the head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_integer("cells", low=1, high=64)
        self._set_integer("width", low=1, high=4096)

    @property
    def parameters(self) -> int:
        return self.macs + self.width + self.classes

    @property
    def macs(self) -> int:
        return self.cells**2 * self.channels * self.width + self.width * self.classes
