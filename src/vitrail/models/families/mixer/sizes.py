"""Sizes of MLP-Mixer: the sizes of the paper (arXiv 2105.01601), presets for small images, and timm's names."""

from vitrail.models.families.mixer.config import MixerConfig
from vitrail.models.sizes import Alias, Sizes

# Width, depth, hidden widths over patches and over features, patches: Table 1.
_PUBLISHED = {
    "S": (512, 8, 256, 2048, (16, 32)),
    "B": (768, 12, 384, 3072, (16, 32)),
    "L": (1024, 24, 512, 4096, (16, 32)),
    "H": (1280, 32, 640, 5120, (14,)),
}

_SMALL = MixerConfig(classes=10, channels=1, resolution=(28, 28), patch=(7, 7), width=64, depth=4)

SIZES = Sizes(
    published=tuple(
        MixerConfig(
            name=f"Mixer-{size}/{patch}",
            patch=(patch, patch),
            width=width,
            depth=depth,
            token_mlp=token_mlp,
            channel_mlp=channel_mlp,
        )
        for size, (width, depth, token_mlp, channel_mlp, patches) in _PUBLISHED.items()
        for patch in patches
    ),
    small=(
        _SMALL.replace(name="Mixer-Pico/2", resolution=8, patch=2, width=48, token_mlp=30, channel_mlp=192),
        _SMALL.replace(name="Mixer-Nano/7", token_mlp=32, channel_mlp=256),
        _SMALL.replace(name="Mixer-Nano/8", patch=8, token_mlp=32, channel_mlp=256, channels=3, resolution=32),
        _SMALL.replace(name="Mixer-Micro/4", patch=4, depth=6, token_mlp=56, channel_mlp=256),
    ),
    timm={
        f"mixer_{size.lower()}{patch}_224": Alias(f"Mixer-{size}/{patch}", 224)
        for size in ("S", "B", "L")
        for patch in (16, 32)
    },
)
