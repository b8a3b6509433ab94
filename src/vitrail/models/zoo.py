"""Every model by its published name. `vitrail models` prints this file; nothing here needs torch."""

import fnmatch
from collections.abc import Iterator
from itertools import chain

from vitrail.core.errors import UsageError, did_you_mean
from vitrail.models.config import FAMILIES, ModelConfig
from vitrail.models.families.hybrid.config import HybridConfig
from vitrail.models.families.igpt.config import IGPTConfig
from vitrail.models.families.lstm.config import LSTMConfig
from vitrail.models.families.mixer.config import MixerConfig
from vitrail.models.families.mlp.config import MLPConfig
from vitrail.models.families.resnet.config import ResNetConfig
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.timm_names import TIMM, Alias

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

# Units in the stages of the trunk, patch on its feature map, ViT size: vision_transformer, configs/models.py.
_HYBRIDS = {
    "R+ViT-Ti/16": ((), 8, "Ti"),
    "R26+ViT-S/32": ((2, 2, 2, 2), 1, "S"),
    "R26+ViT-B/32": ((2, 2, 2, 2), 1, "B"),
    "R50+ViT-B/16": ((3, 4, 9), 1, "B"),
    "R50+ViT-L/32": ((3, 4, 6, 3), 1, "L"),
}

# Units in the stages, and the widths for which weights were published: arXiv 1912.11370.
_BITS = {50: ((3, 4, 6, 3), (1, 3)), 101: ((3, 4, 23, 3), (1, 3)), 152: ((3, 8, 36, 3), (1, 2, 4))}

# Width, depth, hidden widths over patches and over features, patches: arXiv 2105.01601, Table 1.
_MIXERS = {
    "S": (512, 8, 256, 2048, (16, 32)),
    "B": (768, 12, 384, 3072, (16, 32)),
    "L": (1024, 24, 512, 4096, (16, 32)),
    "H": (1280, 32, 640, 5120, (14,)),
}

# Width, depth, heads: Chen et al. 2020, section 3.3, on 32 x 32 pixels.
_IGPTS = {"S": (512, 24, 8), "M": (1024, 36, 8), "L": (1536, 48, 16)}


def _published() -> Iterator[ModelConfig]:
    for size, (width, depth, heads, mlp) in _VIT_SIZES.items():
        for patch in _VIT_PATCHES[size]:
            yield ViTConfig(
                name=f"ViT-{size}/{patch}", patch=(patch, patch), width=width, depth=depth, heads=heads, mlp=mlp
            )
    for name, (layers, patch, size) in _HYBRIDS.items():
        width, depth, heads, mlp = _VIT_SIZES[size]
        yield HybridConfig(
            name=name, stem_layers=layers, patch=(patch, patch), width=width, depth=depth, heads=heads, mlp=mlp
        )
    for number, (layers, factors) in _BITS.items():
        for factor in factors:
            yield ResNetConfig(name=f"BiT-R{number}x{factor}", layers=layers, base=64 * factor)
    for size, (width, depth, token_mlp, channel_mlp, patches) in _MIXERS.items():
        for patch in patches:
            yield MixerConfig(
                name=f"Mixer-{size}/{patch}", patch=(patch, patch), width=width, depth=depth, token_mlp=token_mlp,
                channel_mlp=channel_mlp,
            )  # fmt: skip
    for size, (width, depth, heads) in _IGPTS.items():
        yield IGPTConfig(
            name=f"iGPT-{size}", classes=512, resolution=(32, 32), width=width, depth=depth, heads=heads, mlp=4 * width
        )


def _small() -> Iterator[ModelConfig]:
    """Models for images of 8 to 32 pixels that train in minutes on two cores.

    All of one size cost the same multiply-accumulates within a few per cent, so that a comparison between families is
    fair: 1.4 M for Pico (8 px), 2.4 M for Nano (28 px), 2.6 M for Nano/8 (32 px in colour), 11.8 M for Micro (28 px).
    """
    vit = ViTConfig(classes=10, channels=1, resolution=(28, 28), patch=(7, 7), width=64, depth=4, heads=4, mlp=128)
    pico = vit.replace(name="ViT-Pico/2", resolution=8, patch=2, width=48, heads=3, mlp=96)
    nano = vit.replace(name="ViT-Nano/7")
    micro = vit.replace(name="ViT-Micro/4", patch=4, depth=6)
    colour = {"channels": 3, "resolution": 32}
    nano_32 = nano.replace(name="ViT-Nano/8", patch=8, **colour)
    yield from (pico, nano, nano_32, micro)

    # The early-convolutions rule: the stem costs about one block, so one block goes. Same grid as the ViT beside it.
    for like, name, layers, strides in (
        (pico, "Hybrid-Pico", (24, 72), (1, 2)),
        (nano, "Hybrid-Nano", (16, 32, 64), (2, 2, 2)),
        (nano_32, "Hybrid-Nano/8", (16, 32, 64), (2, 2, 2)),
        (micro, "Hybrid-Micro", (32, 96), (2, 2)),
    ):
        yield HybridConfig(
            name=name, classes=10, channels=like.channels, resolution=like.resolution, patch=(1, 1), width=like.width,
            depth=like.depth - 1, heads=like.heads, mlp=like.mlp, stem="light", stem_layers=layers,
            stem_strides=strides,
        )  # fmt: skip
    resnet = ResNetConfig(kind="plain", classes=10, channels=1, resolution=(28, 28), layers=(1, 1, 1))
    yield resnet.replace(name="ResNet-Pico", resolution=8, base=21)
    yield resnet.replace(name="ResNet-Nano", base=8)
    yield resnet.replace(name="ResNet-Nano/8", base=7, **colour)
    yield resnet.replace(name="ResNet-Micro", base=18)
    mixer = MixerConfig(classes=10, channels=1, resolution=(28, 28), patch=(7, 7), width=64, depth=4)
    yield mixer.replace(name="Mixer-Pico/2", resolution=8, patch=2, width=48, token_mlp=30, channel_mlp=192)
    yield mixer.replace(name="Mixer-Nano/7", token_mlp=32, channel_mlp=256)
    yield mixer.replace(name="Mixer-Nano/8", patch=8, token_mlp=32, channel_mlp=256, **colour)
    yield mixer.replace(name="Mixer-Micro/4", patch=4, depth=6, token_mlp=56, channel_mlp=256)
    lstm = LSTMConfig(classes=10, channels=1, resolution=(28, 28), patch=(7, 7), width=64)
    yield lstm.replace(name="LSTM-Pico/2", resolution=8, patch=2, width=48, hidden=76)
    yield lstm.replace(name="LSTM-Nano/7", hidden=100)
    yield lstm.replace(name="LSTM-Nano/8", patch=8, hidden=101, **colour)
    yield lstm.replace(name="LSTM-Micro/4", patch=4, hidden=130)
    # A token for each of 14 x 14 pixels is dear: only the larger size exists.
    yield IGPTConfig(
        name="iGPT-Micro", classes=10, channels=1, resolution=(14, 14), palette=16, width=32, depth=3, heads=4, mlp=64,
        causal=False, output="classes",
    )  # fmt: skip
    mlp = MLPConfig(classes=10, channels=1, resolution=(28, 28))
    yield mlp.replace(name="MLP-Pico", resolution=8, width=1132)
    yield mlp.replace(name="MLP-Nano", width=1200)
    yield mlp.replace(name="MLP-Nano/8", width=684, **colour)
    yield mlp.replace(name="MLP-Micro", width=2240, depth=3)


def _faces() -> Iterator[ModelConfig]:
    """For face recognition at 112 pixels: overlapping patches (14 x 14) that cover every pixel, and an embedding."""
    sizes = {"Nano": (96, 6, 3, 384), **{size: _VIT_SIZES[size] for size in ("Ti", "S", "B")}}
    for size, (width, depth, heads, mlp) in sizes.items():
        yield ViTConfig(
            name=f"FaceViT-{size}", classes=0, embedding=512, resolution=(112, 112), patch=(12, 12), stride=(8, 8),
            padding=(2, 2), width=width, depth=depth, heads=heads, mlp=mlp,
        )  # fmt: skip


MODELS: dict[str, ModelConfig] = {config.name: config for config in chain(_published(), _small(), _faces())}


def list_models(pattern: str = "*") -> list[str]:
    """The names of all models, or of those that match a pattern with `*` and `?`, in upper or lower case: the built-in
    ones, and one for each family of another package.

        >>> vitrail.list_models("ViT-B/*")
        ['ViT-B/8', 'ViT-B/14', 'ViT-B/16', 'ViT-B/32']
    """
    if not isinstance(pattern, str):
        raise UsageError(f"Pattern must be a text such as 'ViT*', got {pattern!r}.")
    return [name for name in (*MODELS, *FAMILIES.added) if fnmatch.fnmatchcase(name.lower(), pattern.lower())]


def find(name: str) -> ModelConfig:
    """The configuration of a model name, ours or timm's, which may have a tag of weights ("vit_base_patch16_224.mae"):
    these are not loaded. A family of another package has a single model of its own
    name, with its defaults."""
    if name in MODELS:
        return MODELS[name]
    if alias := _alias(name):
        return MODELS[alias.name].replace(resolution=alias.resolution)
    if name in FAMILIES.added:
        return FAMILIES[name](name=name)
    raise UsageError(f"Model must be a name that `vitrail models` lists, got {name!r}.{like_model(str(name))}")


def like_model(name: str) -> str:
    """`" Did you mean 'ViT-B/16'?"`: a model of a similar name. A ResNet that is called by its depth is a published
    one."""
    published = {f"resnet{depth}": f"BiT-R{depth}x1" for depth in (50, 101, 152)}
    return did_you_mean(name, list_models(), published)


def is_model(name: str) -> bool:
    """Whether a model has this name, ours or timm's, without a tag."""
    return name in MODELS or name in TIMM or name in FAMILIES.added


def _alias(name: str) -> Alias | None:
    return TIMM.get(str(name).partition(".")[0])


def alias_notes(name: str) -> tuple[str, ...]:
    """What to tell the user who called a model by timm's name."""
    alias = _alias(name)
    if alias is None:
        return ()
    ours, resolution = alias
    return (f"{name} is timm's name for {ours} at {resolution} px; timm's weights are not loaded",)


def small(size: str, family: str) -> ModelConfig:
    """The preset of a family that is called by this size: `small("Nano/8", "resnet")`, `small("Nano", "vit")`."""
    size, _, patch = size.partition("/")
    of_size = [config for config in MODELS.values() if config.family == family and f"-{size}" in config.name]
    fitting = [config for config in of_size if config.name.endswith(f"/{patch}")] if patch == "8" else of_size
    if not fitting:
        raise UsageError(f"Family must have a preset of size {size!r}, got {family!r}.")
    return fitting[0]
