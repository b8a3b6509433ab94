"""Weight format of torchvision: vit_b_16 and the other ViTs."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from vitrail.bundles.bundle import Bundle
from vitrail.bundles.formats.base import InferredModel, LibraryCheckpoint, WeightFormat
from vitrail.bundles.infer_config import (
    count_layers,
    drop_empty_notes,
    infer_heads,
    infer_resolution,
    with_published_name,
)
from vitrail.bundles.parity import Forward, Unverified, import_peer
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.library_limits import epsilon_notes, require_head

_LAYERS = "encoder.layers.encoder_layer_"
# torchvision's function for a width and a patch.
_FUNCTIONS = {
    (768, 16): "vit_b_16",
    (768, 32): "vit_b_32",
    (1024, 16): "vit_l_16",
    (1024, 32): "vit_l_32",
    (1280, 14): "vit_h_14",
}


class Torchvision(WeightFormat):
    """State dicts of torchvision's VisionTransformer, which come without settings."""

    def recognises(self, names: Collection[str]) -> bool:
        return "conv_proj.weight" in names and "encoder.pos_embedding" in names

    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        shapes = checkpoint.shapes
        width, channels, *patch = shapes["conv_proj.weight"]
        heads, heads_note = infer_heads(width, user_config)
        resolution = infer_resolution(shapes["encoder.pos_embedding"][1] - 1, patch, user_config)
        # Older checkpoints (before torchvision 0.14) use another name for this layer.
        hidden = "mlp.0.weight" if f"{_LAYERS}0.mlp.0.weight" in shapes else "mlp.linear_1.weight"
        config = ViTConfig(
            width=width,
            channels=channels,
            patch=(patch[0], patch[1]),
            depth=count_layers(shapes, _LAYERS),
            heads=heads,
            mlp=shapes[f"{_LAYERS}0.{hidden}"][0],
            resolution=resolution,
            resize_rule="torchvision",
            representation="tanh" if "heads.pre_logits.weight" in shapes else "none",
            classes=shapes["heads.head.weight"][0] if "heads.head.weight" in shapes else 0,
        )
        crop = (
            0.875 if resolution == (224, 224) else 1.0
        )  # torchvision resizes to 256 for 224, and crops no margin at higher resolutions
        preprocess = Preprocess(
            resolution=resolution, crop_fraction=crop, interpolation="bilinear" if crop < 1 else "bicubic"
        )
        preprocess_note = "a state dict does not state its preprocessing; torchvision's is used (mean of ImageNet)"
        return InferredModel(
            with_published_name(config), preprocess, notes=drop_empty_notes([heads_note]), about_pixels=preprocess_note
        )

    def open_source(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> Forward:
        return _open_with_torchvision(self.mapping(config).settings(config), checkpoint.raw)

    def check(self, bundle: Bundle) -> list[str]:
        config = bundle.model.config
        require_head(config, "torchvision")
        self.mapping(config).check(config)
        return epsilon_notes(config, "torchvision")

    def open_written(self, config: ModelConfig, folder: Path) -> Forward:
        return _open_with_torchvision(self.mapping(config).settings(config), load_file(folder / self.file))


def _open_with_torchvision(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Forward:
    """Build torchvision's model with these tensors.

    Its function for this width and patch is used if there is one, which also verifies the number of heads.
    """
    if not settings["num_classes"]:
        raise Unverified("torchvision has no ViT without a head")
    models = import_peer("torchvision").models
    name = _FUNCTIONS.get((settings["hidden_dim"], settings["patch_size"]))
    if name is not None and settings["representation_size"] is None:
        model = getattr(models, name)(image_size=settings["image_size"], num_classes=settings["num_classes"])
    else:
        model = models.VisionTransformer(**settings)
    model.load_state_dict(tensors, strict=True)
    return model.eval()
