"""Tensor names of Google: npz files of vision_transformer and big_vision (ViT, hybrids, Mixer) and of big_transfer
(BiT).

Kernels are stored input first; attention has a dimension for heads. big_vision numbers layers differently, may put
everything under `params/` and may stack all layers in one array.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.bundle import Bundle
from vitrail.bundles.compat import other_epsilon, refuse_strange_vit, require, unknown_to
from vitrail.bundles.formats.base import Checkpoint, Entry, Reading, Vocabulary, parameter_names, renamed, shaped
from vitrail.bundles.formats.timm import build_by_timm
from vitrail.bundles.infer_config import count_layers, grid_of, named, place_positions
from vitrail.bundles.parity import Forward, Unverified
from vitrail.core.errors import UsageError
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.families.hybrid.config import HybridConfig
from vitrail.models.families.mixer.config import MixerConfig
from vitrail.models.families.resnet.config import ResNetConfig
from vitrail.models.families.vit.config import ViTConfig

_PREFIXES = ("opt/target/", "params/img/", "params/")
_POSITIONS = "Transformer/posembed_input/pos_embedding"


class _Numbers(NamedTuple):
    """Names of the parts of a layer, which differ between code bases."""

    attention: str
    mlp: str
    second_norm: str
    positions: str


_VISION_TRANSFORMER = _Numbers("MultiHeadDotProductAttention_1", "MlpBlock_3", "LayerNorm_2", _POSITIONS)
_BIG_VISION = _Numbers("MultiHeadDotProductAttention_0", "MlpBlock_0", "LayerNorm_1", "pos_embedding")


class Google(Vocabulary):
    """npz files of Google's JAX code, and of big_transfer's TensorFlow code."""

    file = "model.npz"
    verifier = "timm (reading Google's file)"

    def recognises(self, names: Collection[str]) -> bool:
        bare = {_bare(name) for name in names}
        return bool(bare & {"embedding/kernel", "stem/kernel", "resnet/root_block/standardized_conv2d/kernel"})

    def prepare(self, checkpoint: Checkpoint) -> Checkpoint:
        tensors: dict[str, Tensor] = {}
        stack = "Transformer/encoderblock/"
        for name, tensor in checkpoint.tensors.items():
            bare = _bare(name)
            if bare.startswith(stack):
                for layer, part in enumerate(tensor):
                    tensors[bare.replace(stack, f"Transformer/encoderblock_{layer}/")] = part
            else:
                tensors[bare] = tensor
        return checkpoint.renamed(tensors)

    def read(self, checkpoint: Checkpoint, told: ModelConfig | None) -> Reading:
        shape = checkpoint.shapes
        if "stem/kernel" in shape:
            config: ModelConfig = _read_mixer(shape, told)
        elif "embedding/kernel" in shape:
            config = _read_vit(shape, told)
        else:
            config = _read_bit(shape, told)
        half = (0.5,) * config.channels
        preprocess = Preprocess(
            resolution=config.resolution,
            mean=half,
            std=half,
            resize="squash",
            crop_fraction=1.0,
            interpolation="bilinear",
        )
        about = "an npz file does not state its preprocessing: -1 to 1, stretched to a square, as in Google's code"
        # Two towers: the one of words, the temperature and the bias between them.
        left_out = frozenset(name for name in shape if name.startswith("txt/") or name in ("t", "b"))
        return Reading(named(config), preprocess, about_pixels=about, left_out=left_out)

    def entries(self, config: ModelConfig, names: Collection[str] | None = None) -> Iterable[Entry]:
        if isinstance(config, MixerConfig):
            return map(_mixer_entry, parameter_names(config))
        if isinstance(config, ResNetConfig):
            return map(_bit_entry, parameter_names(config))
        if not isinstance(config, ViTConfig):
            raise unknown_to("Google's code", f"family {config.family}")
        is_big_vision = needs_big_vision(config) if names is None else _POSITIONS not in names
        prefix = "params/" if names is None and is_big_vision else ""
        return _vit_entries(config, prefix, _BIG_VISION if is_big_vision else _VISION_TRANSFORMER)

    def open_source(self, config: ModelConfig, checkpoint: Checkpoint) -> Forward:
        return _open_by_timm(config, checkpoint.path)

    def check(self, bundle: Bundle) -> list[str]:
        config = bundle.model.config
        refuse_strange_vit(config, "Google's code", hybrids=True)
        if isinstance(config, ViTConfig):
            require(config, "Google's code", registers=0, layer_scale=None, qkv_bias=True)
            if config.activation == "relu" or config.representation == "gelu":
                raise unknown_to(
                    "Google's code", "another activation in the MLP than GELU, or before the head than tanh"
                )
        if isinstance(config, ResNetConfig):
            require(config, "Google's code", kind="bit")
        notes = other_epsilon(config, "Google's code")
        if getattr(config, "activation", None) == "gelu":
            notes.append("Google's code computes GELU in its tanh form, this model the exact one")
        return notes

    def write(self, tensors: dict[str, Tensor], path: Path) -> None:
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})

    def open_written(self, config: ModelConfig, folder: Path) -> Forward:
        return _open_by_timm(config, folder / self.file)


def _open_by_timm(config: ModelConfig, file: Path) -> Forward:
    """timm reads Google's npz files itself."""
    if isinstance(config, MixerConfig):
        raise Unverified("no library here reads Google's Mixer files")
    if isinstance(config, ViTConfig) and config.representation != "none":
        raise Unverified("timm has no representation layer")
    if isinstance(config, ViTConfig) and needs_big_vision(config) and config.pool == "cls":
        raise Unverified("timm does not read a [CLS] without position")
    if isinstance(config, HybridConfig) and config.activation != "gelu":
        raise Unverified("timm's hybrids have exact GELU")
    model = build_by_timm(config, {})
    model.load_pretrained(str(file))
    return model.eval()


def needs_big_vision(config: ViTConfig) -> bool:
    """Whether only big_vision has this model: attention pooling, or [CLS] without a position."""
    return config.pool == "map" or not config.class_position


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _read_vit(shape: dict[str, tuple[int, ...]], told: ModelConfig | None) -> ViTConfig:
    tall, wide, channels, width = shape["embedding/kernel"]
    numbers = _VISION_TRANSFORMER if _POSITIONS in shape else _BIG_VISION
    if numbers.positions not in shape:
        raise UsageError("Model must have learned positions, got one without.")
    first = "Transformer/encoderblock_0/"
    settings: dict[str, Any] = {
        "width": width,
        "patch": (tall, wide),
        "depth": count_layers(shape, "Transformer/encoderblock_", "/"),
        "heads": shape[f"{first}{numbers.attention}/query/kernel"][1],
        "mlp": shape[f"{first}{numbers.mlp}/Dense_0/kernel"][1],
        "pool": "cls" if "cls" in shape else "map" if "MAPHead_0/probe" in shape else "gap",
        "representation": "tanh" if "pre_logits/kernel" in shape else "none",
        "activation": "gelu-tanh",
        "resize_rule": "google",
        "classes": shape["head/kernel"][1] if "head/kernel" in shape else 0,
    }
    plan: type[ViTConfig] = ViTConfig
    if "conv_root/kernel" in shape:
        plan, channels = HybridConfig, shape["conv_root/kernel"][2]
        stages = sum(f"block{stage}/unit1/conv1/kernel" in shape for stage in range(1, 9))
        settings["stem_layers"] = tuple(
            sum(f"block{stage}/unit{unit}/conv1/kernel" in shape for unit in range(1, 100))
            for stage in range(1, stages + 1)
        )
        settings["stem_base"] = shape["conv_root/kernel"][3]
    rows = shape[numbers.positions][1]
    return plan(channels=channels, **settings, **place_positions(settings, rows, told, None, plan))


def _read_mixer(shape: dict[str, tuple[int, ...]], told: ModelConfig | None) -> MixerConfig:
    tall, wide, channels, width = shape["stem/kernel"]
    patches, hidden = shape["MixerBlock_0/token_mixing/Dense_0/kernel"]
    return MixerConfig(
        width=width,
        channels=channels,
        patch=(tall, wide),
        resolution=grid_of(patches, (tall, wide), told),
        token_mlp=hidden,
        channel_mlp=shape["MixerBlock_0/channel_mixing/Dense_0/kernel"][1],
        activation="gelu-tanh",
        depth=count_layers(shape, "MixerBlock_", "/"),
        classes=shape["head/kernel"][1] if "head/kernel" in shape else 0,
    )


def _read_bit(shape: dict[str, tuple[int, ...]], told: ModelConfig | None) -> ResNetConfig:
    *_, channels, base = shape["resnet/root_block/standardized_conv2d/kernel"]
    unit = "resnet/block{}/unit{:02}/a/standardized_conv2d/kernel"
    stages = sum(unit.format(stage, 1) in shape for stage in range(1, 9))
    layers = [sum(unit.format(stage, number) in shape for number in range(1, 100)) for stage in range(1, stages + 1)]
    head = shape.get("resnet/head/conv2d/kernel")
    return ResNetConfig(
        base=base,
        channels=channels,
        layers=tuple(layers),
        classes=head[-1] if head else 0,
        resolution=told.resolution if told is not None else (224, 224),
    )


# Shapes of kernels: theirs to ours, ours to theirs.


def _matrix(ours: str, theirs: str) -> Entry:
    return shaped(ours, theirs, lambda kernel: kernel.T, lambda matrix: matrix.T)


def _kernel(ours: str, theirs: str) -> Entry:
    return shaped(ours, theirs, lambda hwio: hwio.permute(3, 2, 0, 1), lambda oihw: oihw.permute(2, 3, 1, 0))


def _flat(ours: str, theirs: str) -> Entry:
    """Norms in older files have three leading dimensions of size 1."""
    return shaped(ours, theirs, lambda tensor: tensor.flatten(), lambda tensor: tensor)


def _vector_or_matrix(ours: str, theirs: str) -> Entry:
    """Entry for a linear layer's weight or bias, or a norm's scale or bias."""
    name, _, leaf = ours.rpartition(".")
    is_norm = "norm" in name.rpartition(".")[2]
    if leaf == "bias":
        return _flat(ours, f"{theirs}/bias")
    return _flat(ours, f"{theirs}/scale") if is_norm else _matrix(ours, f"{theirs}/kernel")


def _vit_entries(config: ViTConfig, prefix: str, numbers: _Numbers) -> Iterator[Entry]:
    for name in parameter_names(config):
        if name == "cls_token":
            yield renamed(name, f"{prefix}cls")
        elif name == "pos_embed":
            yield renamed(name, prefix + numbers.positions)
        elif name == "patch_embed.proj.weight":
            yield _kernel(name, f"{prefix}embedding/kernel")
        elif name == "patch_embed.proj.bias":
            yield renamed(name, f"{prefix}embedding/bias")
        elif name.startswith("patch_embed.backbone."):
            yield _stem_entry(name, prefix)
        elif name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            yield _layer_entry(name, rest, f"{prefix}Transformer/encoderblock_{layer}/", config.heads, numbers)
        elif name.startswith("attn_pool."):
            yield _pool_entry(name, f"{prefix}MAPHead_0/", config.heads)
        else:
            part = {"norm": "Transformer/encoder_norm", "pre_logits": "pre_logits", "head": "head"}[name.split(".")[0]]
            yield _vector_or_matrix(name, prefix + part)


def _layer_entry(ours: str, rest: str, at: str, heads: int, numbers: _Numbers) -> Entry:
    part, leaf = rest.rpartition(".")[0], rest.rpartition(".")[2]
    match part:
        case "attn.qkv":
            return _heads_entry(
                ours, [f"{at}{numbers.attention}/{one}" for one in ("query", "key", "value")], heads, leaf
            )
        case "attn.proj":
            return _out_entry(ours, f"{at}{numbers.attention}/out", heads, leaf)
        case "mlp.fc1" | "mlp.fc2":
            return _vector_or_matrix(ours, f"{at}{numbers.mlp}/Dense_{int(part[-1]) - 1}")
    return _vector_or_matrix(ours, at + {"norm1": "LayerNorm_0", "norm2": numbers.second_norm}[part])


def _pool_entry(ours: str, at: str, heads: int) -> Entry:
    part, leaf = ours.removeprefix("attn_pool.").rpartition(".")[0], ours.rpartition(".")[2]
    attention = f"{at}MultiHeadDotProductAttention_0"
    match part:
        case "":
            return renamed(ours, f"{at}probe")
        case "q":
            return _heads_entry(ours, [f"{attention}/query"], heads, leaf)
        case "kv":
            return _heads_entry(ours, [f"{attention}/key", f"{attention}/value"], heads, leaf)
        case "proj":
            return _out_entry(ours, f"{attention}/out", heads, leaf)
        case "norm":
            return _vector_or_matrix(ours, f"{at}LayerNorm_0")
    return _vector_or_matrix(ours, f"{at}MlpBlock_0/Dense_{int(part[-1]) - 1}")


def _heads_entry(ours: str, theirs: list[str], heads: int, leaf: str) -> Entry:
    """Entry for projections into heads: kernels (D, heads, K) and biases (heads, K), which are stacked in our
    tensors."""
    if leaf == "bias":
        return Entry(
            ours,
            tuple(f"{one}/bias" for one in theirs),
            lambda parts: torch.cat([part.flatten() for part in parts]),
            lambda bias: [part.reshape(heads, -1) for part in bias.chunk(len(theirs))],
        )
    return Entry(
        ours,
        tuple(f"{one}/kernel" for one in theirs),
        lambda parts: torch.cat([part.flatten(1).T for part in parts]),
        lambda weight: [part.T.reshape(part.shape[1], heads, -1) for part in weight.chunk(len(theirs))],
    )


def _out_entry(ours: str, theirs: str, heads: int, leaf: str) -> Entry:
    """Entry for the projection out of heads: a kernel (heads, K, D)."""
    if leaf == "bias":
        return renamed(ours, f"{theirs}/bias")
    return shaped(
        ours, f"{theirs}/kernel", lambda kernel: kernel.flatten(0, 1).T, lambda w: w.T.reshape(heads, -1, w.shape[0])
    )


def _stem_entry(ours: str, prefix: str) -> Entry:
    _, _, place, *rest = ours.split(".")
    if place == "stem":
        part, leaf = rest
        at = f"{prefix}conv_root" if part == "conv" else f"{prefix}gn_root"
    else:
        stage, _, unit, *inner, leaf = rest
        at = f"{prefix}block{int(stage) + 1}/unit{int(unit) + 1}/"
        part = inner[-1]
        is_shortcut = inner[0] == "downsample"
        at += ("conv" if part.startswith("conv") else "gn") + ("_proj" if is_shortcut else part[-1])
    if part.startswith("conv"):
        return _kernel(ours, f"{at}/kernel")
    return _flat(ours, f"{at}/{'scale' if leaf == 'weight' else 'bias'}")


def _mixer_entry(ours: str) -> Entry:
    if ours == "stem.proj.weight":
        return _kernel(ours, "stem/kernel")
    if ours == "stem.proj.bias":
        return renamed(ours, "stem/bias")
    if not ours.startswith("blocks."):
        return _vector_or_matrix(ours, "pre_head_layer_norm" if ours.startswith("norm.") else "head")
    _, layer, part, *_ = ours.split(".")
    at = f"MixerBlock_{layer}/"
    if part.startswith("norm"):
        return _vector_or_matrix(ours, f"{at}LayerNorm_{int(part[-1]) - 1}")
    dense = int(ours.split(".")[3][-1]) - 1
    return _vector_or_matrix(ours, f"{at}{'token' if part == 'mlp_tokens' else 'channel'}_mixing/Dense_{dense}")


def _bit_entry(ours: str) -> Entry:
    root = "resnet/"
    if ours.startswith("head."):
        if ours == "head.bias":
            return renamed(ours, f"{root}head/conv2d/bias")
        return shaped(
            ours, f"{root}head/conv2d/kernel", lambda kernel: kernel[0, 0].T, lambda matrix: matrix.T[None, None]
        )
    if ours == "stem.conv.weight":
        return _kernel(ours, f"{root}root_block/standardized_conv2d/kernel")
    leaf = {"weight": "gamma", "bias": "beta"}[ours.rpartition(".")[2]]
    if ours.startswith("norm."):
        return _flat(ours, f"{root}group_norm/{leaf}")
    _, stage, _, unit, part, *_ = ours.split(".")
    at = f"{root}block{int(stage) + 1}/unit{int(unit) + 1:02}/"
    if part == "downsample":
        return _kernel(ours, f"{at}a/proj/standardized_conv2d/kernel")
    letter = "abc"[int(part[-1]) - 1]
    if part.startswith("conv"):
        return _kernel(ours, f"{at}{letter}/standardized_conv2d/kernel")
    return _flat(ours, f"{at}{letter}/group_norm/{leaf}")
