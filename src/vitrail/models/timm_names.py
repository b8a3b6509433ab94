"""timm's names of our models: only of those whose tensors are the same, which a test compares with timm's own."""

from typing import NamedTuple


class Alias(NamedTuple):
    """What another library's name means here."""

    name: str
    """The model's name in `vitrail models`."""
    resolution: int


_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "giant": "g", "gigantic": "G"}

# Patch and resolution.
_VITS = {
    "tiny": ((16, 224), (16, 384)),
    "small": ((8, 224), (16, 224), (16, 384), (32, 224), (32, 384)),
    "base": ((8, 224), (16, 224), (16, 384), (32, 224), (32, 384)),
    "large": ((14, 224), (16, 224), (16, 384), (32, 224), (32, 384)),
    "huge": ((14, 224),),
    "giant": ((14, 224),),
    "gigantic": ((14, 224),),
}

_HYBRIDS = {
    "vit_tiny_r_s16_p8": ("R+ViT-Ti/16", (224, 384)),
    "vit_small_r26_s32": ("R26+ViT-S/32", (224, 384)),
    "vit_base_r26_s32": ("R26+ViT-B/32", (224,)),
    "vit_base_r50_s16": ("R50+ViT-B/16", (224, 384)),
    "vit_large_r50_s32": ("R50+ViT-L/32", (224, 384)),
}

TIMM: dict[str, Alias] = {
    **{
        f"vit_{word}_patch{patch}_{side}": Alias(f"ViT-{_SIZES[word]}/{patch}", side)
        for word, shapes in _VITS.items()
        for patch, side in shapes
    },
    **{
        f"deit_{word}_patch16_{side}": Alias(f"ViT-{_SIZES[word]}/16", side)
        for word, side in (("tiny", 224), ("small", 224), ("base", 224), ("base", 384))
    },
    **{f"{stem}_{side}": Alias(name, side) for stem, (name, sides) in _HYBRIDS.items() for side in sides},
    **{f"mixer_{size.lower()}{patch}_224": Alias(f"Mixer-{size}/{patch}", 224) for size in "SBL" for patch in (16, 32)},
    **{
        f"resnetv2_{depth}x{factor}_bit": Alias(f"BiT-R{depth}x{factor}", 224)
        for depth, factor in ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))
    },
}
