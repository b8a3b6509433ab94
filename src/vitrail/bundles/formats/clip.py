"""Weight format of CLIP's image tower, with the names of OpenAI and OpenCLIP or of Hugging Face. Read only."""

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

from torch import Tensor

from vitrail.bundles.formats.base import InferredModel, LibraryCheckpoint, WeightFormat, split_tensors
from vitrail.bundles.formats.huggingface import open_with_transformers, read_activation, read_processor
from vitrail.bundles.infer_config import (
    count_layers,
    drop_empty_notes,
    infer_heads,
    infer_resolution,
    with_published_name,
)
from vitrail.bundles.parity import Forward
from vitrail.core.errors import UsageError
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.families.vit.clip_weights import has_openai_names
from vitrail.models.families.vit.config import ViTConfig

_TOWERS = ("visual.", "vision_model.")
"""Prefixes of the image tower in files that have the text tower, too."""
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class Clip(WeightFormat):
    """CLIP's Vision Transformers: features of images, without the text tower and the projection into its space."""

    verifier = "transformers (reading CLIP's image tower)"

    def recognises(self, names: Collection[str]) -> bool:
        bare = {_strip_prefix(name) for name in names}
        return "ln_pre.weight" in bare or "pre_layrnorm.weight" in bare

    def prepare(self, checkpoint: LibraryCheckpoint) -> LibraryCheckpoint:
        """Keep only the image tower, without its prefix."""
        names = checkpoint.tensors
        prefix = next((prefix for prefix in _TOWERS if any(name.startswith(prefix) for name in names)), "")
        tower = {name.removeprefix(prefix): tensor for name, tensor in names.items() if name.startswith(prefix)}
        return dataclasses.replace(checkpoint, tensors=tower)

    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        names, shapes, document = checkpoint.tensors, checkpoint.shapes, _vision_document(checkpoint)
        is_openai = has_openai_names(names)
        if any(name.startswith("attn_pool.") or name.startswith("trunk.") for name in names):
            raise UsageError("Model must be CLIP's own Vision Transformer, got an image tower of another design.")
        layers = "transformer.resblocks." if is_openai else "encoder.layers."
        projection = "conv1.weight" if is_openai else "embeddings.patch_embedding.weight"
        width, channels, *patch = shapes[projection]
        table = "positional_embedding" if is_openai else "embeddings.position_embedding.weight"
        hidden = "mlp.c_fc.weight" if is_openai else "mlp.fc1.weight"
        heads, heads_note = document.get("num_attention_heads"), None
        if heads is None:
            heads, heads_note = infer_heads(width, user_config)
        activation, activation_note = _read_activation(checkpoint, document)
        config = ViTConfig(
            width=width,
            channels=channels,
            patch=(patch[0], patch[1]),
            depth=count_layers(names, layers),
            heads=heads,
            mlp=shapes[f"{layers}0.{hidden}"][0],
            resolution=infer_resolution(shapes[table][0] - 1, patch, user_config),
            embedding_norm=True,
            patch_bias=False,
            activation=activation,
            norm_epsilon=document.get("layer_norm_eps", 1e-5),
            resize_rule="timm",
            classes=0,
        )
        preprocess, preprocess_note = _read_preprocess(checkpoint, config)
        left_out = frozenset(name for name in names if name == "proj" or name.endswith("position_ids"))
        notes = [heads_note, activation_note, "the projection into the space of CLIP's texts is left out"]
        return InferredModel(
            with_published_name(config), preprocess, None, drop_empty_notes(notes), preprocess_note, left_out
        )

    def open_source(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> Forward:
        document = {"model_type": "clip_vision_model", **self.mapping(config).settings(config)}
        tensors = checkpoint.tensors
        if has_openai_names(tensors):
            tensors = self._as_huggingface(config, tensors)
        raw = {f"vision_model.{name}": tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        source = dataclasses.replace(checkpoint, raw=raw, documents={"config.json": document})
        return open_with_transformers(config, source, document)

    def _as_huggingface(self, config: ModelConfig, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename OpenAI's tensors to Hugging Face's names."""
        ours = {
            entry.ours: entry.join([theirs[name].float() for name in entry.theirs])
            for entry in self.entries(config, theirs)
        }
        return split_tensors(self.entries(config, ()), ours)


def _strip_prefix(name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in _TOWERS if name.startswith(prefix)), name)


def _vision_document(checkpoint: LibraryCheckpoint) -> dict[str, Any]:
    """The settings of the image tower in a config.json, which may be of the tower or of both towers."""
    document = checkpoint.document("config.json")
    vision = document.get("vision_config", document)
    return vision if isinstance(vision, dict) else {}


def _read_activation(
    checkpoint: LibraryCheckpoint, document: dict[str, Any]
) -> tuple[Literal["gelu", "gelu-tanh", "quick-gelu", "relu"], str | None]:
    """Our name for the activation of CLIP, and a note if it is assumed. OpenCLIP's file states only whether it is the
    one of OpenAI's models."""
    if "hidden_act" in document:
        return read_activation(document), None
    open_clip = checkpoint.document("open_clip_config.json").get("model_cfg")
    if isinstance(open_clip, dict):
        return "quick-gelu" if open_clip.get("quick_gelu") else "gelu", None
    return "quick-gelu", "the file does not state the activation; OpenAI's, quick GELU, is used"


def _read_preprocess(checkpoint: LibraryCheckpoint, config: ViTConfig) -> tuple[Preprocess, str | None]:
    if checkpoint.document("preprocessor_config.json"):
        return read_processor(checkpoint, config)
    settings = {"resolution": config.resolution, "crop_fraction": 1.0, "mean": _MEAN, "std": _STD}
    return Preprocess.from_json(settings), "the files do not state mean and std; those of CLIP are used"
