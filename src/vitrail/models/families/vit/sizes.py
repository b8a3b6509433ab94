"""Sizes of the Vision Transformer: the sizes of papers, presets for small images and for faces, and timm's names."""

from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.sizes import Alias, Sizes

# Width, depth, heads, MLP width. B, L, H: the paper's Table 1; Ti, S: arXiv 2012.12877 (DeiT) and 2106.10270 (AugReg);
# g, G: arXiv 2106.04560, Table 2.
PUBLISHED = {
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
    "G": (1664, 48, 16, 8192),
}

# Patch sizes for which weights were published.
_PATCHES = {
    "Ti": (16,),
    "S": (8, 14, 16, 32),
    "B": (8, 14, 16, 32),
    "L": (14, 16, 32),
    "H": (14,),
    "g": (14,),
    "G": (14,),
}

# timm's word for a size, and the patch sizes and resolutions for which timm has a model.
_TIMM = {
    "Ti": ("tiny", ((16, 224), (16, 384))),
    "S": ("small", ((8, 224), (16, 224), (16, 384), (32, 224), (32, 384))),
    "B": ("base", ((8, 224), (16, 224), (16, 384), (32, 224), (32, 384))),
    "L": ("large", ((14, 224), (16, 224), (16, 384), (32, 224), (32, 384))),
    "H": ("huge", ((14, 224),)),
    "g": ("giant", ((14, 224),)),
    "G": ("gigantic", ((14, 224),)),
}
_TIMM_DEIT = {"Ti": ("tiny", (224,)), "S": ("small", (224,)), "B": ("base", (224, 384))}

HEADS = {**{width: heads for width, _, heads, _ in PUBLISHED.values()}, 1152: 16}
"""Attention heads of the published models by their width, also of SoViT-400m (arXiv 2305.13035)."""


def _published_config(size: str, patch: int) -> ViTConfig:
    width, depth, heads, mlp = PUBLISHED[size]
    return ViTConfig(name=f"ViT-{size}/{patch}", patch=(patch, patch), width=width, depth=depth, heads=heads, mlp=mlp)


def _face_preset(size: str, width: int, depth: int, heads: int, mlp: int) -> ViTConfig:
    """Return a preset for faces: 112 pixels, with a grid of 14 x 14 overlapping patches that cover every pixel."""
    return ViTConfig(
        name=f"FaceViT-{size}", classes=0, embedding=512, resolution=(112, 112), patch=(12, 12), stride=(8, 8),
        padding=(2, 2), width=width, depth=depth, heads=heads, mlp=mlp,
    )  # fmt: skip


_SMALL = ViTConfig(classes=10, channels=1, resolution=(28, 28), patch=(7, 7), width=64, depth=4, heads=4, mlp=128)
PICO = _SMALL.replace(name="ViT-Pico/2", resolution=8, patch=2, width=48, heads=3, mlp=96)
NANO = _SMALL.replace(name="ViT-Nano/7")
NANO_32 = NANO.replace(name="ViT-Nano/8", patch=8, channels=3, resolution=32)
MICRO = NANO.replace(name="ViT-Micro/4", patch=4, depth=6)

SIZES = Sizes(
    published=tuple(_published_config(size, patch) for size in PUBLISHED for patch in _PATCHES[size]),
    small=(PICO, NANO, NANO_32, MICRO),
    faces=(
        _face_preset("Nano", width=96, depth=6, heads=3, mlp=384),
        *(_face_preset(size, *PUBLISHED[size]) for size in ("Ti", "S", "B")),
    ),
    timm={
        f"vit_{word}_patch{patch}_{side}": Alias(f"ViT-{size}/{patch}", side)
        for size, (word, shapes) in _TIMM.items()
        for patch, side in shapes
    }
    | {
        f"deit_{word}_patch16_{side}": Alias(f"ViT-{size}/16", side)
        for size, (word, sides) in _TIMM_DEIT.items()
        for side in sides
    },
)
