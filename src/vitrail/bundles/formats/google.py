"""Weights of Google: npz files of vision_transformer and big_vision (ViT, hybrids, Mixer) and of big_transfer
(BiT).

Kernels are stored input first; attention has a dimension for heads. big_vision names layers differently, may
put everything under `params/` and may stack all layers in one array.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.bundles.bundle import Bundle
from vitrail.bundles.formats.base import InferredModel, LibraryCheckpoint, WeightFormat
from vitrail.bundles.formats.timm import build_with_timm
from vitrail.bundles.infer_config import count_layers, infer_positions, infer_resolution, with_published_name
from vitrail.bundles.parity import Forward, Unverified
from vitrail.core.errors import UsageError
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.families.hybrid.config import HybridConfig
from vitrail.models.families.mixer.config import MixerConfig
from vitrail.models.families.resnet.config import ResNetConfig
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.weights import google_names_in
from vitrail.models.library_limits import epsilon_notes, gelu_notes

_PREFIXES = ("opt/target/", "params/img/", "params/")


class Google(WeightFormat):
    """npz files of Google's JAX code, and of big_transfer's TensorFlow code."""

    library = "Google's code"
    file = "model.npz"
    verifier = "timm (reading Google's file)"

    def recognises(self, names: Collection[str]) -> bool:
        bare = {_bare(name) for name in names}
        return bool(bare & {"embedding/kernel", "stem/kernel", "resnet/root_block/standardized_conv2d/kernel"})

    def prepare(self, checkpoint: LibraryCheckpoint) -> LibraryCheckpoint:
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

    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        shape = checkpoint.shapes
        if "stem/kernel" in shape:
            config: ModelConfig = _read_mixer(shape, user_config)
        elif "embedding/kernel" in shape:
            config = _read_vit(shape, user_config)
        else:
            config = _read_bit(shape, user_config)
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
        return InferredModel(with_published_name(config), preprocess, about_pixels=about, left_out=left_out)

    def open_source(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> Forward:
        return self._open_by_timm(config, checkpoint.path)

    def check(self, bundle: Bundle) -> list[str]:
        config = bundle.model.config
        self.mapping(config).check(config)
        return epsilon_notes(config, self.library) + gelu_notes(config, self.library, exact=False)

    def write(self, tensors: dict[str, Tensor], path: Path) -> None:
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})

    def open_written(self, config: ModelConfig, folder: Path) -> Forward:
        return self._open_by_timm(config, folder / self.file)

    def _open_by_timm(self, config: ModelConfig, file: Path) -> Forward:
        """timm reads Google's npz files itself."""
        if (reason := self.mapping(config).why_unverified(config)) is not None:
            raise Unverified(reason)
        model = build_with_timm(config, {})
        model.load_pretrained(str(file))
        return model.eval()


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _read_vit(shape: dict[str, tuple[int, ...]], user_config: ModelConfig | None) -> ViTConfig:
    tall, wide, channels, width = shape["embedding/kernel"]
    theirs = google_names_in(shape)
    if theirs.positions not in shape:
        raise UsageError("Model must have learned positions, got one without.")
    first = "Transformer/encoderblock_0/"
    settings: dict[str, Any] = {
        "width": width,
        "patch": (tall, wide),
        "depth": count_layers(shape, "Transformer/encoderblock_", "/"),
        "heads": shape[f"{first}{theirs.attention}/query/kernel"][1],
        "mlp": shape[f"{first}{theirs.mlp}/Dense_0/kernel"][1],
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
    rows = shape[theirs.positions][1]
    return plan(channels=channels, **settings, **infer_positions(settings, rows, user_config, None))


def _read_mixer(shape: dict[str, tuple[int, ...]], user_config: ModelConfig | None) -> MixerConfig:
    tall, wide, channels, width = shape["stem/kernel"]
    patches, hidden = shape["MixerBlock_0/token_mixing/Dense_0/kernel"]
    return MixerConfig(
        width=width,
        channels=channels,
        patch=(tall, wide),
        resolution=infer_resolution(patches, (tall, wide), user_config),
        token_mlp=hidden,
        channel_mlp=shape["MixerBlock_0/channel_mixing/Dense_0/kernel"][1],
        activation="gelu-tanh",
        depth=count_layers(shape, "MixerBlock_", "/"),
        classes=shape["head/kernel"][1] if "head/kernel" in shape else 0,
    )


def _read_bit(shape: dict[str, tuple[int, ...]], user_config: ModelConfig | None) -> ResNetConfig:
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
        resolution=user_config.resolution if user_config is not None else (224, 224),
    )
