"""Every model by its published name. `vitrail models` prints this file; nothing here needs torch."""

from collections.abc import Iterator
from itertools import chain

from vitrail.configs.base import ModelConfig
from vitrail.configs.vit import ViTConfig
from vitrail.errors import UsageError, did_you_mean

# width, depth, heads, MLP width. B, L, H: the paper's Table 1; Ti, S: arXiv 2012.12877 (DeiT) and 2106.10270 (AugReg);
# g, G: arXiv 2106.04560, Table 2.
_VIT_SIZES = {
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
    "G": (1664, 48, 16, 8192),
}

# The patch sizes for which weights of that size were published.
_VIT_PATCHES = {
    "Ti": (16,),
    "S": (8, 14, 16, 32),
    "B": (8, 14, 16, 32),
    "L": (14, 16, 32),
    "H": (14,),
    "g": (14,),
    "G": (14,),
}

FAMILIES: dict[str, type[ModelConfig]] = {config.family: config for config in (ViTConfig,)}


def _published_vits() -> Iterator[ModelConfig]:
    for size, (width, depth, heads, mlp) in _VIT_SIZES.items():
        for patch in _VIT_PATCHES[size]:
            yield ViTConfig(
                name=f"ViT-{size}/{patch}", patch=(patch, patch), width=width, depth=depth, heads=heads, mlp=mlp
            )


def _small_vits() -> Iterator[ModelConfig]:
    """Models for pictures of 8 to 32 pixels that train in minutes on two cores."""
    grey = ViTConfig(classes=10, channels=1)
    yield grey.replace(name="ViT-Pico/2", resolution=8, patch=2, width=48, depth=4, heads=3, mlp=96)
    nano = grey.replace(name="ViT-Nano/7", resolution=28, patch=7, width=64, depth=4, heads=4, mlp=128)
    yield nano
    yield nano.replace(name="ViT-Nano/8", channels=3, resolution=32, patch=8)
    yield nano.replace(name="ViT-Micro/4", patch=4, depth=6)


MODELS: dict[str, ModelConfig] = {config.name: config for config in chain(_published_vits(), _small_vits())}


def find(name: str) -> ModelConfig:
    """The configuration behind a model name."""
    if name not in MODELS:
        raise UsageError(f"Model must be a name that `vitrail models` lists, got {name!r}.{did_you_mean(name, MODELS)}")
    return MODELS[name]
