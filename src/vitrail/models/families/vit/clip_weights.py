"""Tensor names of CLIP's image tower, a Vision Transformer: those of OpenAI and OpenCLIP, and Hugging Face's."""

from collections.abc import Collection, Iterator
from typing import Any

from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.huggingface_settings import shape_settings
from vitrail.models.state_dict_mapping import (
    Entry,
    StateDictMapping,
    parameter_names,
    renamed_entry,
    reshaped_entry,
    stacked_entry,
)

# Ours, OpenAI's and Hugging Face's. Single rows have one dimension there.
_ROWS = (
    ("cls_token", "class_embedding", "embeddings.class_embedding"),
    ("pos_embed", "positional_embedding", "embeddings.position_embedding.weight"),
)
_MODULES = (
    ("patch_embed.proj.", "conv1.", "embeddings.patch_embedding."),
    ("norm_pre.", "ln_pre.", "pre_layrnorm."),
    ("norm.", "ln_post.", "post_layernorm."),
)
_LAYER_MODULES = (
    ("norm1.", "ln_1.", "layer_norm1."),
    ("norm2.", "ln_2.", "layer_norm2."),
    ("attn.proj.", "attn.out_proj.", "self_attn.out_proj."),
    ("mlp.fc1.", "mlp.c_fc.", "mlp.fc1."),
    ("mlp.fc2.", "mlp.c_proj.", "mlp.fc2."),
)


def has_openai_names(names: Collection[str]) -> bool:
    """Whether the tensors have OpenAI's names."""
    return "class_embedding" in names


def _settings(config: ViTConfig) -> dict[str, Any]:
    """Settings of a config.json of the image tower."""
    return {**shape_settings(config), "intermediate_size": config.mlp}


def _entries(config: ViTConfig, names: Collection[str] | None) -> Iterator[Entry]:
    is_openai = names is not None and has_openai_names(names)
    column = 1 if is_openai else 2
    for name in parameter_names(config):
        if name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            at = f"transformer.resblocks.{layer}." if is_openai else f"encoder.layers.{layer}."
            yield _layer_entry(name, at, rest, column)
        elif row := next((row for row in _ROWS if row[0] == name), None):
            yield _row_entry(name, row[column])
        else:
            module = next(module for module in _MODULES if name.startswith(module[0]))
            yield renamed_entry(name, name.replace(module[0], module[column]))


def _row_entry(ours: str, theirs: str) -> Entry:
    if ours == "cls_token":
        return reshaped_entry(ours, theirs, lambda row: row.view(1, 1, -1), lambda token: token.flatten())
    return reshaped_entry(ours, theirs, lambda table: table[None], lambda table: table[0])


def _layer_entry(ours: str, at: str, rest: str, column: int) -> Entry:
    if rest.startswith("attn.qkv."):
        leaf = rest.rpartition(".")[2]
        if column == 1:
            return renamed_entry(ours, f"{at}attn.in_proj_{leaf}")
        return stacked_entry(ours, (f"{at}self_attn.{part}_proj.{leaf}" for part in "qkv"))
    module = next(module for module in _LAYER_MODULES if rest.startswith(module[0]))
    return renamed_entry(ours, at + rest.replace(module[0], module[column]))


CLIP_MAPPING: StateDictMapping[ViTConfig] = StateDictMapping(entries=_entries, settings=_settings)
