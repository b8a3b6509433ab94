"""Sizes of the fully connected network: presets for small images."""

from vitrail.models.families.mlp.config import MLPConfig
from vitrail.models.sizes import Sizes

_SMALL = MLPConfig(classes=10, channels=1, resolution=(28, 28))

SIZES = Sizes(
    small=(
        _SMALL.replace(name="MLP-Pico", resolution=8, width=1132),
        _SMALL.replace(name="MLP-Nano", width=1200),
        _SMALL.replace(name="MLP-Nano/8", width=684, channels=3, resolution=32),
        _SMALL.replace(name="MLP-Micro", width=2240, depth=3),
    )
)
