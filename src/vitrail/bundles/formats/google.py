"""Weight format of Google: npz files of vision_transformer and big_vision (ViT, hybrids, Mixer) and of big_transfer
(BiT).

The first dimension of a kernel is the input; kernels of attention have a dimension for heads. big_vision names layers
differently, may add the prefix `params/` and may stack all layers in one array.
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
        bare = {_strip_prefix(name) for name in names}
        return bool(bare & {"embedding/kernel", "stem/kernel", "resnet/root_block/standardized_conv2d/kernel"})

    def prepare(self, checkpoint: LibraryCheckpoint) -> LibraryCheckpoint:
        """Remove the prefix of the names, and split tensors that hold all layers into one tensor per layer."""
        tensors: dict[str, Tensor] = {}
        stack = "Transformer/encoderblock/"
        for name, tensor in checkpoint.tensors.items():
            bare = _strip_prefix(name)
            if bare.startswith(stack):
                for layer, part in enumerate(tensor):
                    tensors[bare.replace(stack, f"Transformer/encoderblock_{layer}/")] = part
            else:
                tensors[bare] = tensor
        return checkpoint.renamed(tensors)

    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        shapes = checkpoint.shapes
        if "stem/kernel" in shapes:
            config: ModelConfig = _infer_mixer(shapes, user_config)
        elif "embedding/kernel" in shapes:
            config = _infer_vit(shapes, user_config)
        else:
            config = _infer_bit(shapes, user_config)
        half = (0.5,) * config.channels
        preprocess = Preprocess(
            resolution=config.resolution,
            mean=half,
            std=half,
            resize="squash",
            crop_fraction=1.0,
            interpolation="bilinear",
        )
        note = "an npz file does not state its preprocessing: -1 to 1, stretched to a square, as in Google's code"
        # Image-text models also contain a text encoder, a temperature and a bias.
        left_out = frozenset(name for name in shapes if name.startswith("txt/") or name in ("t", "b"))
        return InferredModel(with_published_name(config), preprocess, about_pixels=note, left_out=left_out)

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
        """Return timm's model, which reads Google's npz file itself."""
        if (reason := self.mapping(config).why_unverified(config)) is not None:
            raise Unverified(reason)
        model = build_with_timm(config, {})
        model.load_pretrained(str(file))
        return model.eval()


def _strip_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _infer_vit(shapes: dict[str, tuple[int, ...]], user_config: ModelConfig | None) -> ViTConfig:
    """Infer a ViT or a hybrid from the shapes of Google's tensors."""
    patch_height, patch_width, channels, width = shapes["embedding/kernel"]
    google_names = google_names_in(shapes)
    if google_names.positions not in shapes:
        raise UsageError("Model must have learned positions, got none.")
    first_block = "Transformer/encoderblock_0/"
    settings: dict[str, Any] = {
        "width": width,
        "patch": (patch_height, patch_width),
        "depth": count_layers(shapes, "Transformer/encoderblock_", "/"),
        "heads": shapes[f"{first_block}{google_names.attention}/query/kernel"][1],
        "mlp": shapes[f"{first_block}{google_names.mlp}/Dense_0/kernel"][1],
        "pool": "cls" if "cls" in shapes else "map" if "MAPHead_0/probe" in shapes else "gap",
        "representation": "tanh" if "pre_logits/kernel" in shapes else "none",
        "activation": "gelu-tanh",
        "resize_rule": "google",
        "classes": shapes["head/kernel"][1] if "head/kernel" in shapes else 0,
    }
    config_class: type[ViTConfig] = ViTConfig
    if "conv_root/kernel" in shapes:
        config_class, channels = HybridConfig, shapes["conv_root/kernel"][2]
        stages = sum(f"block{stage}/unit1/conv1/kernel" in shapes for stage in range(1, 9))
        settings["stem_layers"] = tuple(
            sum(f"block{stage}/unit{unit}/conv1/kernel" in shapes for unit in range(1, 100))
            for stage in range(1, stages + 1)
        )
        settings["stem_base"] = shapes["conv_root/kernel"][3]
    rows = shapes[google_names.positions][1]
    return config_class(channels=channels, **settings, **infer_positions(settings, rows, user_config, None))


def _infer_mixer(shapes: dict[str, tuple[int, ...]], user_config: ModelConfig | None) -> MixerConfig:
    """Infer an MLP-Mixer from the shapes of Google's tensors."""
    patch_height, patch_width, channels, width = shapes["stem/kernel"]
    patches, hidden = shapes["MixerBlock_0/token_mixing/Dense_0/kernel"]
    return MixerConfig(
        width=width,
        channels=channels,
        patch=(patch_height, patch_width),
        resolution=infer_resolution(patches, (patch_height, patch_width), user_config),
        token_mlp=hidden,
        channel_mlp=shapes["MixerBlock_0/channel_mixing/Dense_0/kernel"][1],
        activation="gelu-tanh",
        depth=count_layers(shapes, "MixerBlock_", "/"),
        classes=shapes["head/kernel"][1] if "head/kernel" in shapes else 0,
    )


def _infer_bit(shapes: dict[str, tuple[int, ...]], user_config: ModelConfig | None) -> ResNetConfig:
    """Infer a BiT ResNet from the shapes of Google's tensors. They do not depend on the resolution."""
    *_, channels, base = shapes["resnet/root_block/standardized_conv2d/kernel"]
    unit = "resnet/block{}/unit{:02}/a/standardized_conv2d/kernel"
    stages = sum(unit.format(stage, 1) in shapes for stage in range(1, 9))
    layers = [sum(unit.format(stage, number) in shapes for number in range(1, 100)) for stage in range(1, stages + 1)]
    head = shapes.get("resnet/head/conv2d/kernel")
    return ResNetConfig(
        base=base,
        channels=channels,
        layers=tuple(layers),
        classes=head[-1] if head else 0,
        resolution=user_config.resolution if user_config is not None else (224, 224),
    )
