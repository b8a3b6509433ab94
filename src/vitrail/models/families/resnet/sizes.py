"""Sizes of the ResNet: BiT (arXiv 1912.11370), presets for small images, and timm's names."""

from vitrail.models.families.resnet.config import ResNetConfig
from vitrail.models.sizes import Alias, Sizes

# By depth: units in the stages, and the width factors for which weights were published.
_BITS = {50: ((3, 4, 6, 3), (1, 3)), 101: ((3, 4, 23, 3), (1, 3)), 152: ((3, 8, 36, 3), (1, 2, 4))}
# Depths and width factors for which timm has a name.
_TIMM = ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))

_SMALL = ResNetConfig(kind="plain", classes=10, channels=1, resolution=(28, 28), layers=(1, 1, 1))

SIZES = Sizes(
    published=tuple(
        ResNetConfig(name=f"BiT-R{depth}x{factor}", layers=layers, base=64 * factor)
        for depth, (layers, factors) in _BITS.items()
        for factor in factors
    ),
    small=(
        _SMALL.replace(name="ResNet-Pico", resolution=8, base=21),
        _SMALL.replace(name="ResNet-Nano", base=8),
        _SMALL.replace(name="ResNet-Nano/8", base=7, channels=3, resolution=32),
        _SMALL.replace(name="ResNet-Micro", base=18),
    ),
    timm={f"resnetv2_{depth}x{factor}_bit": Alias(f"BiT-R{depth}x{factor}", 224) for depth, factor in _TIMM},
    aliases={f"resnet{depth}": f"BiT-R{depth}x1" for depth in _BITS},
)
