"""Configuration of the hybrid: a Vision Transformer on the feature map of a convolutional stem."""

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, check_integer
from vitrail.models.convolution_cost import CostCounter
from vitrail.models.families.vit.config import ViTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(ViTConfig):
    """A ViT whose patches are cut from a feature map instead of from pixels (section 3.1, "Hybrid Architecture")."""

    family: ClassVar[str] = "hybrid"
    model: ClassVar[str] = "vitrail.models.families.hybrid.model:Hybrid"
    sizes: ClassVar[str] = "vitrail.models.families.hybrid.sizes:SIZES"
    weights: ClassVar[str] = "vitrail.models.families.hybrid.weights:MAPPINGS"
    walkthrough: ClassVar[str] = "vitrail.models.families.hybrid.walkthrough:HybridWalkthrough"

    stem: Literal["resnet", "light"] = "resnet"
    """The ResNet of the paper (weight-standardised convolutions, GroupNorm), or a few 3x3 convolutions with BatchNorm
    for small images (arXiv 2106.14881)."""
    stem_layers: tuple[int, ...] = (3, 4, 9)
    """ResNet: units in each stage. Light: output channels of each convolution."""
    stem_strides: tuple[int, ...] = ()
    """Light: the stride of each convolution."""
    stem_base: Annotated[int, Bounds(1, 4096)] = 64
    """ResNet: channels after its first convolution."""

    def wider(self, factor: float) -> dict[str, Any]:
        """Return the settings that multiply the width and the channels of the stem by `factor`."""
        return {**super().wider(factor), "stem_layers": [round(channels * factor) for channels in self.stem_layers]}

    @property
    def canvas(self) -> tuple[int, int, int]:
        counter = self._stem_cost
        return counter.channels, *counter.size

    @property
    def canvas_scale(self) -> int:
        return 4 * 2 ** max(len(self.stem_layers) - 1, 0) if self.stem == "resnet" else math.prod(self.stem_strides)

    @property
    def _embed_parameters(self) -> int:
        return self._stem_cost.parameters + super()._embed_parameters

    @property
    def _embed_macs(self) -> int:
        return self._stem_cost.macs + super()._embed_macs

    @property
    def _stem_cost(self) -> CostCounter:
        counter = CostCounter(self.channels, self.resolution)
        if self.stem == "resnet":
            counter.add_convolution(self.stem_base, kernel=7, stride=2)
            counter.add_norm()
            counter.apply_stride(2)  # max pooling
            counter.add_bottlenecks(self.stem_base, self.stem_layers, pre_activation=False)
        else:
            for channels, stride in zip(self.stem_layers, self.stem_strides, strict=True):
                counter.add_convolution(channels, kernel=3, stride=stride)
                counter.add_norm()
        return counter

    def _check_grid(self) -> None:
        self._check_stem()
        super()._check_grid()

    def _check_stem(self) -> None:
        """Convert the lists of the stem to tuples, and raise UsageError for impossible settings of the stem."""
        for name in ("stem_layers", "stem_strides"):
            numbers = getattr(self, name)
            if not isinstance(numbers, list | tuple) or len(numbers) > 8:
                raise UsageError(f"Stem layers and strides must be up to 8 integers, got {numbers!r}.")
            # The units in a stage have the limit of ResNetConfig; all other numbers are channels or strides.
            high = 200 if name == "stem_layers" and self.stem == "resnet" else 4096
            integers = tuple(check_integer(name, number, low=1, high=high) for number in numbers)
            object.__setattr__(self, name, integers)
        if self.stem == "resnet" and self.stem_base % 32:
            raise UsageError(f"Stem base must be a multiple of the 32 groups of GroupNorm, got {self.stem_base}.")
        if self.stem == "resnet" and self.stem_strides:
            raise UsageError(f"Stem strides must not be set for stem resnet, got {self.stem_strides!r}.")
        if self.stem == "light" and self.stem_base != 64:
            raise UsageError(f"Stem base must not be set for stem light, got {self.stem_base}.")
        if self.wrap:
            raise UsageError("Wrap must be false in a hybrid: its convolutions are not shift-invariant at the edges.")
        if self.stem == "light" and (not self.stem_layers or len(self.stem_strides) != len(self.stem_layers)):
            raise UsageError(
                f"Stem strides must be one for each of the stem's convolutions, got {self.stem_strides!r} for"
                f" {self.stem_layers!r}."
            )
