"""Weight format of DINO and DINOv2, with the names of facebookresearch or Hugging Face. Without a head, read only."""

import dataclasses
import re
from collections.abc import Collection

import torch
from torch import Tensor

from vitrail.bundles.formats.base import InferredModel, LibraryCheckpoint, WeightFormat, split_tensors
from vitrail.bundles.formats.huggingface import (
    open_with_transformers,
    read_activation,
    read_heads,
    read_processor,
)
from vitrail.bundles.infer_config import (
    count_layers,
    drop_empty_notes,
    infer_resolution,
    mae_decoder_names,
    with_published_name,
)
from vitrail.bundles.parity import Forward, Unverified
from vitrail.core.errors import UsageError
from vitrail.models.config import ModelConfig
from vitrail.models.families.vit.config import ViTConfig


class Dino(WeightFormat):
    """DINOv2 with and without registers. Checkpoints of DINO (v1) have the tensor names of timm or Hugging Face."""

    verifier = "transformers (reading DINO's tensors)"

    def recognises(self, names: Collection[str]) -> bool:
        bare = {_strip_prefixes(name) for name in names}
        if mae_decoder_names(bare):
            return False
        return "mask_token" in bare or "register_tokens" in bare or "encoder.layer.0.layer_scale1.lambda1" in bare

    def prepare(self, checkpoint: LibraryCheckpoint) -> LibraryCheckpoint:
        tensors = {_strip_prefixes(name): tensor for name, tensor in checkpoint.tensors.items()}
        return checkpoint.renamed(tensors)

    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        names, document = checkpoint.tensors, checkpoint.document("config.json")
        shapes = checkpoint.shapes
        is_facebook = _has_facebook_names(names)
        if any(".mlp.w12." in name or ".mlp.weights_in." in name for name in names):
            raise UsageError("MLP must have two layers, got the gated MLP (SwiGLU) of DINOv2's largest model.")
        if any(name.startswith("classifier.") for name in names):
            raise UsageError("DINOv2 must come without its linear head, which reads [CLS] and the mean together.")
        projection = "patch_embed.proj" if is_facebook else "embeddings.patch_embeddings.projection"
        width, channels, *patch = shapes[f"{projection}.weight"]
        layers = "blocks." if is_facebook else "encoder.layer."
        heads, heads_note = read_heads(document, width, user_config)
        table = "pos_embed" if is_facebook else "embeddings.position_embeddings"
        registers = "register_tokens" if is_facebook else "embeddings.register_tokens"
        count = (
            shapes[registers][1] if registers in shapes else 0
        )  # models with registers are resized with antialiasing
        config = ViTConfig(
            width=width,
            channels=channels,
            patch=(patch[0], patch[1]),
            depth=count_layers(names, layers),
            heads=heads,
            mlp=shapes[f"{layers}0.mlp.fc1.weight"][0],
            resolution=infer_resolution(shapes[table][1] - 1, patch, user_config),
            registers=count,
            resize_rule="timm" if count else "huggingface",
            classes=0,
            layer_scale=1e-5,
            norm_epsilon=document.get("layer_norm_eps", 1e-6),
            activation=read_activation(document),
        )
        preprocess, preprocess_note = read_processor(checkpoint, config)
        # Used only in self-supervised training: the token of masked patches, and the projection heads.
        left_out = frozenset(
            name for name in names if name.endswith("mask_token") or name.startswith(("dino_head.", "ibot_head."))
        )
        return InferredModel(
            with_published_name(config), preprocess, None, drop_empty_notes([heads_note]), preprocess_note, left_out
        )

    def open_source(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> Forward:
        mapping = self.mapping(config)
        if (reason := mapping.why_unverified(config)) is not None:
            raise Unverified(reason)
        settings = mapping.settings(config)
        model_type = "dinov2_with_registers" if settings["num_register_tokens"] else "dinov2"
        if _has_facebook_names(checkpoint.tensors):
            checkpoint = dataclasses.replace(checkpoint, raw=self._as_huggingface(config, checkpoint))
        return open_with_transformers(config, checkpoint, {"model_type": model_type, **settings})

    def _as_huggingface(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> dict[str, Tensor]:
        """Return facebookresearch's tensors under Hugging Face's names."""
        library_tensors = checkpoint.tensors
        model_tensors = {
            entry.ours: entry.join([library_tensors[name] for name in entry.theirs])
            for entry in self.entries(config, library_tensors)
        }
        tensors = split_tensors(self.entries(config, ()), model_tensors)
        return tensors | {"embeddings.mask_token": torch.zeros(1, model_tensors["cls_token"].shape[-1])}


def _strip_prefixes(name: str) -> str:
    """Return a tensor name without the prefixes of training checkpoints and without the groups of sharded blocks
    (`blocks.0.3.` is the fourth layer)."""
    name = name.removeprefix("teacher.").removeprefix("backbone.").removeprefix("dinov2.")
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)


def _has_facebook_names(names: Collection[str]) -> bool:
    return "patch_embed.proj.weight" in names
