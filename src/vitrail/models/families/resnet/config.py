"""Configuration of residual networks: BiT (arXiv 1912.11370), and a plain one for small images."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, Pair, check_integer
from vitrail.models.config import ModelConfig
from vitrail.models.convolution_cost import CostCounter


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig(ModelConfig):
    """A residual network: a first convolution, stages of units, global average pooling, a linear head."""

    family: ClassVar[str] = "resnet"
    model: ClassVar[str] = "vitrail.models.families.resnet.model:ResNet"
    sizes: ClassVar[str] = "vitrail.models.families.resnet.sizes:SIZES"
    weights: ClassVar[str] = "vitrail.models.families.resnet.weights:MAPPINGS"
    walkthrough: ClassVar[str] = "vitrail.models.families.resnet.walkthrough:ResNetWalkthrough"
    scaled_by: ClassVar[str] = "base"

    kind: Literal["bit", "plain"] = "bit"
    """BiT: pre-activation bottlenecks, weight-standardised convolutions, GroupNorm. Plain: units of two 3x3
    convolutions, BatchNorm, full resolution in the first stage."""
    layers: tuple[int, ...] = (3, 4, 6, 3)
    """Units in each stage; each stage after the first has twice the channels."""
    base: Annotated[int, Bounds(1, 4096)] = 64
    """Channels after the first convolution."""
    strides: tuple[int, ...] | None = None
    """Stride of each stage of a plain network; none means 1, then 2 for each later stage."""
    edges: Literal["zeros", "circular"] = "zeros"
    """Padding of a plain network's convolutions: zeros, or circular, which makes them exactly shift-equivariant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "strides"):
            numbers = getattr(self, name)
            if name == "strides" and numbers is None:
                continue
            if not isinstance(numbers, list | tuple) or not 1 <= len(numbers) <= 8:
                raise UsageError(f"{name.capitalize()} must be 1 to 8 integers, got {numbers!r}.")
            integers = tuple(check_integer(name, number, low=1, high=200) for number in numbers)
            object.__setattr__(self, name, integers)
        if self.kind == "bit":
            if self.base % 32:
                raise UsageError(
                    f"Base must be a multiple of the 32 groups of GroupNorm for kind bit, got {self.base}."
                )
            if self.strides is not None or self.edges != "zeros":
                raise UsageError("Strides and edges must not be set for kind bit; they are settings of kind plain.")
        elif self.strides is not None and len(self.strides) != len(self.layers):
            raise UsageError(f"Strides must be one for each of the {len(self.layers)} stages, got {self.strides!r}.")

    @property
    def receptive_field(self) -> int | None:
        """Side in pixels of the receptive field of a plain network: each layer adds (k - 1) times the product of the
        strides before it. None for BiT."""
        if self.kind != "plain":
            return None
        field, step = 3, 1
        for units, stride in zip(self.layers, self.stage_strides, strict=True):
            field += 2 * step  # the stride of the first convolution enlarges the field of later layers only
            step *= stride
            field += 2 * step * (2 * units - 1)
        return field

    def deeper(self, factor: int) -> dict[str, Any]:
        """Return the settings that multiply the units of every stage by `factor`."""
        return {"layers": [factor * units for units in self.layers]}

    @property
    def stage_strides(self) -> tuple[int, ...]:
        """`strides`, with the default filled in."""
        return self.strides or (1, *(2 for _ in self.layers[1:]))

    @property
    def width(self) -> int:
        """Width of the input of the head."""
        return self.base * 2 ** (len(self.layers) - 1) * (4 if self.kind == "bit" else 1)

    @property
    def depth(self) -> int:
        """Number of residual units."""
        return sum(self.layers)

    @property
    def grid(self) -> Pair:
        """Size of the last feature map."""
        return self._cost.size

    @property
    def parameters(self) -> int:
        return self._cost.parameters + self._head_parameters(self.width)

    @property
    def macs(self) -> int:
        return self._cost.macs + self._head_macs(self.width)

    @property
    def _cost(self) -> CostCounter:
        """Parameters and multiply-accumulates of all layers before the head."""
        counter = CostCounter(self.channels, self.resolution)
        if self.kind == "bit":
            counter.add_convolution(self.base, kernel=7, stride=2)
            counter.apply_stride(2)  # max pooling
            counter.add_bottlenecks(self.base, self.layers, pre_activation=True)
            counter.add_norm()
            return counter
        counter.add_convolution(self.base, kernel=3)
        counter.add_norm()
        for stage, (units, stride) in enumerate(zip(self.layers, self.stage_strides, strict=True)):
            channels = self.base * 2**stage
            for unit in range(units):
                first_stride = stride if unit == 0 else 1
                if first_stride != 1 or counter.channels != channels:
                    counter.add_shortcut(channels, first_stride, norm=True)
                for convolution_stride in (first_stride, 1):
                    counter.add_convolution(channels, kernel=3, stride=convolution_stride)
                    counter.add_norm()
        return counter
