"""Configuration of residual networks: BiT (arXiv 1912.11370), and a plain one for small images."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, Pair, check_integer
from vitrail.models.config import ModelConfig
from vitrail.models.convolution_cost import Tally


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
    """BiT: pre-activation bottlenecks, weight-standardised convolutions, GroupNorm. Plain: two 3x3 convolutions a unit,
    BatchNorm, full resolution in the first stage."""
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
            whole = tuple(check_integer(name, number, low=1, high=200) for number in numbers)
            object.__setattr__(self, name, whole)
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
        """Of the plain kind: each layer adds (k - 1) times the strides so far."""
        if self.kind != "plain":
            return None
        field, step = 3, 1
        for units, stride in zip(self.layers, self.stage_strides, strict=True):
            field += 2 * step  # the first convolution strides after it has looked
            step *= stride
            field += 2 * step * (2 * units - 1)
        return field

    def deeper(self, factor: int) -> dict[str, Any]:
        """More units in every stage."""
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
        return self._tally.side

    @property
    def parameters(self) -> int:
        return self._tally.parameters + self._head_parameters(self.width)

    @property
    def macs(self) -> int:
        return self._tally.macs + self._head_macs(self.width)

    @property
    def _tally(self) -> Tally:
        tally = Tally(self.channels, self.resolution)
        if self.kind == "bit":
            tally.convolve(self.base, kernel=7, stride=2)
            tally.shrink(2)  # max pooling
            tally.bottlenecks(self.base, self.layers, pre_activation=True)
            tally.norm()
            return tally
        tally.convolve(self.base, kernel=3)
        tally.norm()
        for stage, (units, stride) in enumerate(zip(self.layers, self.stage_strides, strict=True)):
            channels = self.base * 2**stage
            for unit in range(units):
                first_stride = stride if unit == 0 else 1
                if first_stride != 1 or tally.channels != channels:
                    tally.shortcut(channels, first_stride, norm=True)
                for one in (first_stride, 1):
                    tally.convolve(channels, kernel=3, stride=one)
                    tally.norm()
        return tally
