"""Building blocks of residual networks.

Shapes: B images, C channels, H x W feature map. State-dict names are timm's.
"""

from collections.abc import Iterable
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Edges = Literal["zeros", "circular"]

GROUPS = 32  # groups of GroupNorm in BiT and in the trunk of hybrids
_AVX2_FLOATS = 8  # float32 numbers in an AVX2 register


class StdConv2d(nn.Conv2d):
    """A convolution whose kernels are standardised to mean 0 and variance 1 before use (arXiv 1903.10520).

    `same` pads as TensorFlow does, with the odd zero at the end; published hybrids were trained with this padding.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, same: bool = False) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=0 if same else kernel // 2, bias=False)
        self.same, self.is_baked = same, False

    def forward(self, input: Tensor) -> Tensor:
        if self.same:
            input = pad_same(input, self.kernel_size[0], self.stride[0])
        return F.conv2d(input, self.standardised(), None, self.stride, self.padding)

    def standardised(self) -> Tensor:
        """Return the standardised kernels, computed in one pass by batch norm over the weights of each kernel."""
        if self.is_baked:
            return self.weight
        flat_1OW = self.weight.reshape(1, self.out_channels, -1)
        return F.batch_norm(flat_1OW, None, None, training=True, eps=1e-8).reshape_as(self.weight)


@torch.no_grad()
def bake_(model: nn.Module) -> None:
    """Replace all kernels by their standardised values in place, for inference: the output is the same, without
    standardising in each forward pass."""
    for module in model.modules():
        if isinstance(module, StdConv2d):
            module.weight.copy_(module.standardised())
            module.is_baked = True


def pad_same(x_BCHW: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad so that a convolution returns ceil(size / stride) rows and columns: half on each side, the odd row and column
    at the end."""
    pads = []
    for size in reversed(x_BCHW.shape[2:]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x_BCHW, pads, value=value) if any(pads) else x_BCHW


class GroupNormReLU(nn.GroupNorm):
    """GroupNorm, then ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__(GROUPS, channels)

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input), inplace=True)


class PreActivationUnit(nn.Module):
    """BiT's bottleneck: norm and ReLU before each convolution, nothing after the residual sum."""

    def __init__(self, inputs: int, middle: int, stride: int, *, project: bool) -> None:
        super().__init__()
        self.norm1 = GroupNormReLU(inputs)
        self.downsample = nn.ModuleDict({"conv": StdConv2d(inputs, 4 * middle, 1, stride)}) if project else None
        self.conv1 = StdConv2d(inputs, middle, 1)
        self.norm2 = GroupNormReLU(middle)
        self.conv2 = StdConv2d(middle, middle, 3, stride)
        self.norm3 = GroupNormReLU(middle)
        self.conv3 = StdConv2d(middle, 4 * middle, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = self.norm1(x_BCHW)
        shortcut = x_BCHW if self.downsample is None else self.downsample["conv"](y)
        return shortcut + self.conv3(self.norm3(self.conv2(self.norm2(self.conv1(y)))))


class PostNormUnit(nn.Module):
    """The bottleneck in the trunk of hybrids: a norm after each convolution, ReLU after the residual sum."""

    def __init__(self, inputs: int, middle: int, stride: int, *, project: bool) -> None:
        super().__init__()
        self.downsample = None
        if project:
            self.downsample = nn.ModuleDict(
                {
                    "conv": StdConv2d(inputs, 4 * middle, 1, stride, same=True),
                    "norm": nn.GroupNorm(GROUPS, 4 * middle),
                }
            )
        self.conv1 = StdConv2d(inputs, middle, 1, same=True)
        self.norm1 = GroupNormReLU(middle)
        self.conv2 = StdConv2d(middle, middle, 3, stride, same=True)
        self.norm2 = GroupNormReLU(middle)
        self.conv3 = StdConv2d(middle, 4 * middle, 1, same=True)
        self.norm3 = nn.GroupNorm(GROUPS, 4 * middle)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        shortcut = x_BCHW
        if self.downsample is not None:
            shortcut = self.downsample["norm"](self.downsample["conv"](x_BCHW))
        y = self.norm3(self.conv3(self.norm2(self.conv2(self.norm1(self.conv1(x_BCHW))))))
        return F.relu(shortcut + y, inplace=True)


class BasicUnit(nn.Module):
    """Two 3x3 convolutions with BatchNorm (arXiv 1512.03385, figure 2): the unit of small residual networks."""

    def __init__(self, inputs: int, outputs: int, stride: int, edges: Edges) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, stride, edges)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs, 1, edges)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.ModuleDict(
                {"conv": Projection(inputs, outputs, stride), "norm": nn.BatchNorm2d(outputs)}
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        shortcut = x_BCHW
        if self.downsample is not None:
            shortcut = self.downsample["norm"](self.downsample["conv"](x_BCHW))
        y = F.relu(self.norm1(self.conv1(x_BCHW)))
        return F.relu(shortcut + self.norm2(self.conv2(y)), inplace=True)


class Projection(nn.Conv2d):
    """A 1x1 convolution for shortcuts.

    With fewer than 8 input channels, pixels are selected by the stride before the convolution: oneDNN's AVX2 kernel for
    the weight gradient in channels-last format (torch 2.13) writes beyond the end of its buffer.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, 1, stride, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        if self.in_channels >= _AVX2_FLOATS:
            return super().forward(input)
        return F.conv2d(input[:, :, :: self.stride[0], :: self.stride[1]], self.weight)


class ConvNormReLU(nn.Module):
    """A 3x3 convolution, BatchNorm, ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, edges: Edges = "zeros") -> None:
        super().__init__()
        self.conv = convolution(inputs, outputs, stride, edges)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x_BCHW)))


class Root(nn.Module):
    """The first layers of large residual networks: a 7x7 convolution and max pooling, each of stride 2.

    Hybrids have a norm between the two and pad as TensorFlow does. BiT has no norm and pads with zeros.
    """

    def __init__(self, inputs: int, outputs: int, *, hybrid: bool) -> None:
        super().__init__()
        self.conv = StdConv2d(inputs, outputs, 7, 2, same=hybrid)
        self.norm = GroupNormReLU(outputs) if hybrid else None

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = self.conv(images_BCHW)
        if self.norm is None:
            return F.max_pool2d(F.pad(x_BCHW, (1, 1, 1, 1)), 3, 2)
        return F.max_pool2d(pad_same(self.norm(x_BCHW), 3, 2, -torch.inf), 3, 2)


class Stage(nn.Module):
    """The residual units of one stage, which have the same size of feature map."""

    blocks: list[nn.Module]  # an nn.ModuleList, which has no element type

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = cast(list[nn.Module], nn.ModuleList(blocks))


def bottleneck_stages(
    unit: type[PreActivationUnit] | type[PostNormUnit], base: int, layers: tuple[int, ...]
) -> list[Stage]:
    """Create an nn.ModuleList of stages of bottleneck units. The first unit of each stage projects its shortcut and,
    from the second stage on, halves the feature map."""
    stages = []
    inputs = base
    for stage, units in enumerate(layers):
        middle, stride = base * 2**stage, 2 if stage else 1
        first = unit(inputs, middle, stride, project=True)
        inputs = 4 * middle
        stages.append(Stage([first, *(unit(inputs, middle, 1, project=False) for _ in range(units - 1))]))
    return cast(list[Stage], nn.ModuleList(stages))


def convolution(inputs: int, outputs: int, stride: int, edges: Edges) -> nn.Conv2d:
    """Create a 3x3 convolution without bias; `edges` is its padding mode."""
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, padding_mode=edges, bias=False)
