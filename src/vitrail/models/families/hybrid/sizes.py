"""Sizes of the hybrid: the sizes of the paper and of AugReg (arXiv 2106.10270), presets for small images, timm's
names."""

from vitrail.models.families.hybrid.config import HybridConfig
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.sizes import MICRO, NANO, NANO_32, PICO
from vitrail.models.families.vit.sizes import PUBLISHED as VIT
from vitrail.models.sizes import Alias, Sizes

# Units in the stages of the trunk, patch on its feature map, ViT size: vision_transformer, configs/models.py.
_PUBLISHED = {
    "R+ViT-Ti/16": ((), 8, "Ti"),
    "R26+ViT-S/32": ((2, 2, 2, 2), 1, "S"),
    "R26+ViT-B/32": ((2, 2, 2, 2), 1, "B"),
    "R50+ViT-B/16": ((3, 4, 9), 1, "B"),
    "R50+ViT-L/32": ((3, 4, 6, 3), 1, "L"),
}

# timm's name without the resolution, and the resolutions for which timm has a model.
_TIMM = {
    "R+ViT-Ti/16": ("vit_tiny_r_s16_p8", (224, 384)),
    "R26+ViT-S/32": ("vit_small_r26_s32", (224, 384)),
    "R26+ViT-B/32": ("vit_base_r26_s32", (224,)),
    "R50+ViT-B/16": ("vit_base_r50_s16", (224, 384)),
    "R50+ViT-L/32": ("vit_large_r50_s32", (224, 384)),
}


def _published_config(name: str, layers: tuple[int, ...], patch: int, size: str) -> HybridConfig:
    width, depth, heads, mlp = VIT[size]
    return HybridConfig(
        name=name, stem_layers=layers, patch=(patch, patch), width=width, depth=depth, heads=heads, mlp=mlp
    )


def _small_preset(name: str, vit: ViTConfig, layers: tuple[int, ...], strides: tuple[int, ...]) -> HybridConfig:
    """Return a preset with the grid of the preset `vit`. The stem costs about as much as one block, so the hybrid has
    one block less, as in "Early Convolutions"."""
    return HybridConfig(
        name=name, classes=10, channels=vit.channels, resolution=vit.resolution, patch=(1, 1), width=vit.width,
        depth=vit.depth - 1, heads=vit.heads, mlp=vit.mlp, stem="light", stem_layers=layers, stem_strides=strides,
    )  # fmt: skip


SIZES = Sizes(
    published=tuple(_published_config(name, *settings) for name, settings in _PUBLISHED.items()),
    small=(
        _small_preset("Hybrid-Pico", PICO, (24, 72), (1, 2)),
        _small_preset("Hybrid-Nano", NANO, (16, 32, 64), (2, 2, 2)),
        _small_preset("Hybrid-Nano/8", NANO_32, (16, 32, 64), (2, 2, 2)),
        _small_preset("Hybrid-Micro", MICRO, (32, 96), (2, 2)),
    ),
    timm={f"{stem}_{side}": Alias(name, side) for name, (stem, sides) in _TIMM.items() for side in sides},
)
