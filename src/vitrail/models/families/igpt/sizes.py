"""Sizes of iGPT: the sizes of the paper, and a preset for small images."""

from vitrail.models.families.igpt.config import IGPTConfig
from vitrail.models.sizes import Sizes

# Width, depth, heads: Chen et al. 2020, section 3.3, on 32 x 32 pixels.
_PUBLISHED = {"S": (512, 24, 8), "M": (1024, 36, 8), "L": (1536, 48, 16)}

SIZES = Sizes(
    published=tuple(
        IGPTConfig(
            name=f"iGPT-{size}", classes=512, resolution=(32, 32), width=width, depth=depth, heads=heads, mlp=4 * width
        )
        for size, (width, depth, heads) in _PUBLISHED.items()
    ),
    # One token per pixel is expensive (196 tokens at 14 x 14), so there is only a preset of the larger size.
    small=(
        IGPTConfig(
            name="iGPT-Micro", classes=10, channels=1, resolution=(14, 14), palette=16, width=32, depth=3, heads=4,
            mlp=64, causal=False, output="classes",
        ),
    ),
)  # fmt: skip
