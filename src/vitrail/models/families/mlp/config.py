"""Configuration of an MLP on pixels, which has no inductive bias for images."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from vitrail.core.settings import Bounds
from vitrail.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig(ModelConfig):
    """An MLP on pixels: the image as one vector, hidden layers, a linear head."""

    family: ClassVar[str] = "mlp"
    model: ClassVar[str] = "vitrail.models.families.mlp.model:PixelMLP"
    sizes: ClassVar[str] = "vitrail.models.families.mlp.sizes:SIZES"
    walkthrough: ClassVar[str] = "vitrail.models.families.mlp.walkthrough:MLPWalkthrough"
    surgery: ClassVar[str] = "vitrail.models.families.mlp.surgery:MLPSurgery"

    width: Annotated[int, Bounds(1, 1_048_576)] = 1024
    """Width of each hidden layer."""
    depth: Annotated[int, Bounds(1, 1000)] = 2
    """Number of hidden layers."""
    activation: Literal["gelu", "gelu-tanh", "relu", "tanh"] = "gelu"
    """Non-linearity after each hidden layer."""
    dropout: Annotated[float, Bounds(0, below=1)] = 0.0
    """Probability of zeroing a feature after each hidden layer, in training."""

    @property
    def parameters(self) -> int:
        return self._hidden_weights + self.depth * self.width + self._head_parameters(self.width)

    @property
    def macs(self) -> int:
        return self._hidden_weights + self._head_macs(self.width)

    @property
    def _hidden_weights(self) -> int:
        pixels = self.channels * self.resolution[0] * self.resolution[1]
        return pixels * self.width + (self.depth - 1) * self.width**2
