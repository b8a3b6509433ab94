"""Tensor names and settings of the ViT in other libraries, and the variants that each library supports."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.core.errors import UsageError
from vitrail.models.families.vit.clip_weights import CLIP_MAPPING
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.huggingface_settings import shape_settings
from vitrail.models.library_limits import require_settings, unsupported_model_error
from vitrail.models.state_dict_mapping import (
    Entry,
    StateDictMapping,
    jax_kernel_entry,
    jax_layer_entry,
    parameter_names,
    renamed_entry,
    reshaped_entry,
    stacked_entry,
)

# Settings that are fixed in every other library.
_PLAIN = {
    "position": "learned-1d",
    "placement": "once",
    "attention": "global",
    "attention_scale": None,
    "residual": True,
    "norm": "layer",
    "norm_order": "pre",
    "stride": None,
    "padding": (0, 0),
    "merge": (),
    "head_layers": "",
}
# Settings of later models, which timm has.
_OF_THE_PAPER = {"embedding_norm": False, "patch_bias": True, "distilled": False}


def check_plain(config: ViTConfig, library: str, *, only_paper: bool = True) -> None:
    """Raise `UsageError` for a variant that only Vitrail has, and with `only_paper` for those of later models."""
    if config.activation == "none":
        raise unsupported_model_error(library, "an MLP without activation")
    for name, value in (_PLAIN | _OF_THE_PAPER if only_paper else _PLAIN).items():
        if getattr(config, name) != value:
            raise unsupported_model_error(library, f"{name.replace('_', ' ')} {getattr(config, name)!r}")
    if config.patch[0] != config.patch[1]:
        raise unsupported_model_error(library, f"patches of {config.patch}")


def _check_original_vit(config: ViTConfig, library: str, **fixed: Any) -> None:
    """Raise `UsageError` for a variant that is not in "An Image is Worth 16x16 Words" (Dosovitskiy et al.), for a
    library with only the ViT of this paper. `fixed` are further fixed settings of that library."""
    check_plain(config, library)
    require_settings(config, library, pool="cls", registers=0, class_position=True, layer_scale=None, **fixed)
    if config.resolution[0] != config.resolution[1]:
        raise UsageError(f"Resolution must be square for {library}, got {config.resolution}.")


# timm, which has the same names as Vitrail


def timm_entries(config: ViTConfig, names: Collection[str] | None) -> Iterable[Entry]:
    """Return the entries of a model for timm's checkpoints."""
    for name in parameter_names(config):
        if config.distilled and name in ("reg_token", "pos_embed"):
            yield distillation_entry(name, "dist_token", "pos_embed")
        else:
            yield renamed_entry(name, name)


def distillation_entry(name: str, their_token: str, their_table: str) -> Entry:
    """Entry for DeiT's distillation token: it becomes a register, with its row of the position table added. Written,
    its row is zero. The table's own entry writes the table, so the token's entry need not."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        token, table = parts
        return token + table[:, 1:2]

    def drop_row(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([parts[0][:, :1], parts[0][:, 2:]], dim=1)

    def insert_row(table: Tensor) -> list[Tensor]:
        return [torch.cat([table[:, :1], torch.zeros_like(table[:, :1]), table[:, 1:]], dim=1)]

    if name == "reg_token":
        return Entry(name, (their_token, their_table), join, lambda token: [token, token])
    return Entry(name, (their_table,), drop_row, insert_row)


def check_timm(config: ViTConfig) -> None:
    """Raise `UsageError` for a ViT that timm cannot compute."""
    check_plain(config, "timm", only_paper=False)
    if config.embedding_norm == config.patch_bias:
        raise unsupported_model_error(
            "timm", f"embedding norm {config.embedding_norm} with patch bias {config.patch_bias}"
        )
    if config.distilled and (config.registers != 1 or not config.class_position):
        raise unsupported_model_error("timm", "two heads with more registers, or with a [CLS] without position")
    if config.representation != "none":
        raise UsageError("timm has no representation layer. Fine-tune the model first: this drops the layer.")


def _timm_function(config: ViTConfig) -> str:
    return "deit_base_distilled_patch16_224" if config.distilled else "vit_base_patch16_224"


def _timm_settings(config: ViTConfig) -> dict[str, Any]:
    """Arguments of timm's VisionTransformer."""
    return {
        "img_size": list(config.resolution),
        "patch_size": config.patch[0],
        "in_chans": config.channels,
        "num_classes": config.classes,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp / config.width,
        "qkv_bias": config.qkv_bias,
        "init_values": config.layer_scale,
        "class_token": config.pool == "cls",
        "no_embed_class": not config.class_position,
        "pre_norm": config.embedding_norm,
        "reg_tokens": 0 if config.distilled else config.registers,
        "global_pool": {"cls": "token", "gap": "avg", "map": "map"}[config.pool],
        "fc_norm": False,
        "act_layer": config.activation.replace("-", "_"),
    }


# Google: vision_transformer and big_vision. Attention has a dimension for heads.


class GoogleNames(NamedTuple):
    """Names of the parts of a layer, which differ between code bases."""

    attention: str
    mlp: str
    second_norm: str
    positions: str
    prefix: str = ""


_VISION_TRANSFORMER = GoogleNames(
    "MultiHeadDotProductAttention_1", "MlpBlock_3", "LayerNorm_2", "Transformer/posembed_input/pos_embedding"
)
_BIG_VISION = GoogleNames("MultiHeadDotProductAttention_0", "MlpBlock_0", "LayerNorm_1", "pos_embedding")


def google_names_in(names: Collection[str]) -> GoogleNames:
    """Return the naming scheme of a file with these tensor names."""
    return _VISION_TRANSFORMER if _VISION_TRANSFORMER.positions in names else _BIG_VISION


def google_names(config: ViTConfig, names: Collection[str] | None) -> GoogleNames:
    """Return the naming scheme of a file with these tensor names, or the scheme for writing: files of big_vision have
    all tensors under `params/`."""
    if names is not None:
        return google_names_in(names)
    return _BIG_VISION._replace(prefix="params/") if _needs_big_vision(config) else _VISION_TRANSFORMER


def _needs_big_vision(config: ViTConfig) -> bool:
    """Return whether only big_vision has this model: attention pooling, or [CLS] without a position."""
    return config.pool == "map" or not config.class_position


def check_google(config: ViTConfig) -> None:
    """Raise `UsageError` for a ViT that Google's code cannot compute."""
    check_plain(config, "Google's code")
    require_settings(config, "Google's code", registers=0, layer_scale=None, qkv_bias=True)
    if config.activation not in ("gelu", "gelu-tanh") or config.representation == "gelu":
        raise unsupported_model_error("Google's code", "an MLP without GELU, or a layer before the head without tanh")


def google_unverified(config: ViTConfig) -> str | None:
    """Return the reason why timm, which reads Google's npz files, cannot check this model; None if it can."""
    if config.representation != "none":
        return "timm has no representation layer"
    if _needs_big_vision(config) and config.pool == "cls":
        return "timm does not read [CLS] without a position"
    return None


def _google_entries(config: ViTConfig, names: Collection[str] | None) -> Iterator[Entry]:
    theirs = google_names(config, names)
    return (google_entry(name, config.heads, theirs) for name in parameter_names(config))


def google_entry(ours: str, heads: int, names: GoogleNames) -> Entry:
    """Return the entry for a tensor of a ViT, or of a hybrid without its stem."""
    if ours == "cls_token":
        return renamed_entry(ours, f"{names.prefix}cls")
    if ours == "pos_embed":
        return renamed_entry(ours, names.prefix + names.positions)
    if ours == "patch_embed.proj.weight":
        return jax_kernel_entry(ours, f"{names.prefix}embedding/kernel")
    if ours == "patch_embed.proj.bias":
        return renamed_entry(ours, f"{names.prefix}embedding/bias")
    if ours.startswith("blocks."):
        return _google_layer_entry(ours, heads, names)
    if ours.startswith("attn_pool."):
        return _google_pool_entry(ours, f"{names.prefix}MAPHead_0/", heads)
    part = {"norm": "Transformer/encoder_norm", "pre_logits": "pre_logits", "head": "head"}[ours.split(".")[0]]
    return jax_layer_entry(ours, names.prefix + part)


def _google_layer_entry(ours: str, heads: int, names: GoogleNames) -> Entry:
    _, layer, *parts, leaf = ours.split(".")
    part, at = ".".join(parts), f"{names.prefix}Transformer/encoderblock_{layer}/"
    match part:
        case "attn.qkv":
            theirs = [f"{at}{names.attention}/{projection}" for projection in ("query", "key", "value")]
            return _google_heads_entry(ours, theirs, heads, leaf)
        case "attn.proj":
            return _google_out_entry(ours, f"{at}{names.attention}/out", heads, leaf)
        case "mlp.fc1" | "mlp.fc2":
            return jax_layer_entry(ours, f"{at}{names.mlp}/Dense_{int(part[-1]) - 1}")
    return jax_layer_entry(ours, at + {"norm1": "LayerNorm_0", "norm2": names.second_norm}[part])


def _google_pool_entry(ours: str, at: str, heads: int) -> Entry:
    """Return the entry of a parameter of the pooling by attention (`pool="map"`)."""
    part, leaf = ours.removeprefix("attn_pool.").rpartition(".")[0], ours.rpartition(".")[2]
    attention = f"{at}MultiHeadDotProductAttention_0"
    match part:
        case "":
            return renamed_entry(ours, f"{at}probe")
        case "q":
            return _google_heads_entry(ours, [f"{attention}/query"], heads, leaf)
        case "kv":
            return _google_heads_entry(ours, [f"{attention}/key", f"{attention}/value"], heads, leaf)
        case "proj":
            return _google_out_entry(ours, f"{attention}/out", heads, leaf)
        case "norm":
            return jax_layer_entry(ours, f"{at}LayerNorm_0")
    return jax_layer_entry(ours, f"{at}MlpBlock_0/Dense_{int(part[-1]) - 1}")


def _google_heads_entry(ours: str, theirs: list[str], heads: int, leaf: str) -> Entry:
    """Return the entry for projections into heads: kernels (D, heads, K) and biases (heads, K), which are stacked in
    our tensors."""
    if leaf == "bias":
        return Entry(
            ours,
            tuple(f"{name}/bias" for name in theirs),
            lambda parts: torch.cat([part.flatten() for part in parts]),
            lambda bias: [part.reshape(heads, -1) for part in bias.chunk(len(theirs))],
        )
    return Entry(
        ours,
        tuple(f"{name}/kernel" for name in theirs),
        lambda parts: torch.cat([part.flatten(1).T for part in parts]),
        lambda weight: [part.T.reshape(part.shape[1], heads, -1) for part in weight.chunk(len(theirs))],
    )


def _google_out_entry(ours: str, theirs: str, heads: int, leaf: str) -> Entry:
    """Return the entry for the projection out of heads: a kernel (heads, K, D)."""
    if leaf == "bias":
        return renamed_entry(ours, f"{theirs}/bias")
    return reshaped_entry(
        ours, f"{theirs}/kernel", lambda kernel: kernel.flatten(0, 1).T, lambda w: w.T.reshape(heads, -1, w.shape[0])
    )


# Hugging Face transformers: ViT and DeiT. Files have the names of the models of 2021; modules of version 5 have new
# names. Each row: our name, the name in a file, the name in a module.
_HUGGING_FACE_LAYER = (
    ("attn.proj", "attention.output.dense", "attention.o_proj"),
    ("mlp.fc1", "intermediate.dense", "mlp.fc1"),
    ("mlp.fc2", "output.dense", "mlp.fc2"),
    ("norm1", "layernorm_before", "layernorm_before"),
    ("norm2", "layernorm_after", "layernorm_after"),
)
_HUGGING_FACE = (
    ("cls_token", "embeddings.cls_token"),
    ("pos_embed", "embeddings.position_embeddings"),
    ("patch_embed.proj", "embeddings.patch_embeddings.projection"),
    ("norm", "layernorm"),
    ("pre_logits.fc", "pooler.dense"),
)


def _check_huggingface(config: ViTConfig) -> None:
    """Raise `UsageError` for a ViT that transformers cannot compute."""
    # Only ViTModel has a layer after [CLS]. ViTForImageClassification, which has a head, omits it.
    fixed = {"representation": "none"} if config.classes else {}
    _check_original_vit(config, "transformers", **fixed)
    if config.representation == "gelu":
        raise unsupported_model_error(
            "transformers", "a layer with gelu after [CLS] (ViTModel has a layer with tanh, or none)"
        )


def _huggingface_settings(config: ViTConfig) -> dict[str, Any]:
    """Settings of a config.json."""
    return {
        **shape_settings(config),
        "intermediate_size": config.mlp,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "qkv_bias": config.qkv_bias,
    }


def _huggingface_entries(config: ViTConfig, names: Collection[str] | None) -> Iterator[Entry]:
    """Return the entries for files of transformers. Without `names`, a model is written under the old names."""
    # Files with a head have a prefix before the names of the encoder. It is removed before this function reads a file.
    prefix = "vit." if names is None and config.classes else ""
    is_old = names is None or any(name.startswith("encoder.layer.") for name in names)
    for name in parameter_names(config):
        if config.registers and name in ("reg_token", "pos_embed"):
            yield distillation_entry(name, "embeddings.distillation_token", "embeddings.position_embeddings")
        elif name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            at = f"{prefix}encoder.layer.{layer}." if is_old else f"{prefix}layers.{layer}."
            yield _huggingface_layer_entry(name, at, rest, is_old)
        elif name.startswith(("head.", "head_dist.")):
            theirs = {"head": "cls_classifier" if config.distilled else "classifier"}
            part, leaf = name.split(".")
            yield renamed_entry(name, f"{theirs.get(part, 'distillation_classifier')}.{leaf}")
        else:
            ours, theirs = next(pair for pair in _HUGGING_FACE if name.startswith(pair[0]))
            yield renamed_entry(name, prefix + name.replace(ours, theirs))


def _huggingface_layer_entry(ours: str, at: str, rest: str, is_old: bool) -> Entry:
    """Return the entry of a parameter in a layer: `at` is their prefix of the layer, `rest` our name in the layer."""
    if rest.startswith("attn.qkv."):
        leaf = rest.rpartition(".")[2]
        parts = ("attention.query", "attention.key", "attention.value") if is_old else ("q_proj", "k_proj", "v_proj")
        return stacked_entry(ours, (f"{at}attention.{part}.{leaf}" for part in parts))
    our_part, old, new = next(names for names in _HUGGING_FACE_LAYER if rest.startswith(names[0]))
    return renamed_entry(ours, at + rest.replace(our_part, old if is_old else new))


# torchvision
_TORCHVISION = (
    ("attn.qkv.", "self_attention.in_proj_"),
    ("attn.proj.", "self_attention.out_proj."),
    ("norm1.", "ln_1."),
    ("norm2.", "ln_2."),
    ("mlp.fc1.", "mlp.0."),
    ("mlp.fc2.", "mlp.3."),
    ("cls_token", "class_token"),
    ("pos_embed", "encoder.pos_embedding"),
    ("patch_embed.proj.", "conv_proj."),
    ("norm.", "encoder.ln."),
    ("pre_logits.fc.", "heads.pre_logits."),
    ("head.", "heads.head."),
)


def _check_torchvision(config: ViTConfig) -> None:
    _check_original_vit(config, "torchvision", qkv_bias=True, activation="gelu", channels=3)
    if config.representation == "gelu":
        raise unsupported_model_error(
            "torchvision", "a layer with gelu before the head (its ViT has a layer with tanh, or none)"
        )


def _torchvision_settings(config: ViTConfig) -> dict[str, Any]:
    """Arguments of torchvision's VisionTransformer."""
    return {
        "image_size": config.resolution[0],
        "patch_size": config.patch[0],
        "num_layers": config.depth,
        "num_heads": config.heads,
        "hidden_dim": config.width,
        "mlp_dim": config.mlp,
        "num_classes": config.classes,
        "representation_size": None if config.representation == "none" else config.width,
    }


def _torchvision_entries(config: ViTConfig, names: Collection[str] | None) -> Iterator[Entry]:
    # Checkpoints before version 0.14 have other names for the layers of the MLP.
    is_old = names is not None and any(".mlp.linear_1." in name for name in names)
    for name in parameter_names(config):
        inner, prefix = name, ""
        if name.startswith("blocks."):
            _, layer, inner = name.split(".", 2)
            prefix = f"encoder.layers.encoder_layer_{layer}."
        ours, theirs = next(pair for pair in _TORCHVISION if inner.startswith(pair[0]))
        if is_old:
            theirs = {"mlp.0.": "mlp.linear_1.", "mlp.3.": "mlp.linear_2."}.get(theirs, theirs)
        yield renamed_entry(name, prefix + theirs + inner.removeprefix(ours))


# DINOv2. facebookresearch has our names except for the registers. Each row: our name, Hugging Face's name.
_DINO = (
    ("cls_token", "embeddings.cls_token"),
    ("reg_token", "embeddings.register_tokens"),
    ("pos_embed", "embeddings.position_embeddings"),
    ("patch_embed.proj.", "embeddings.patch_embeddings.projection."),
    ("norm.", "layernorm."),
)
_DINO_LAYER = (
    ("attn.proj.", "attention.output.dense."),
    ("ls1.gamma", "layer_scale1.lambda1"),
    ("ls2.gamma", "layer_scale2.lambda1"),
)


def _dino_settings(config: ViTConfig) -> dict[str, Any]:
    """Settings of a config.json."""
    ratio = config.mlp // config.width
    return {**shape_settings(config), "mlp_ratio": ratio, "num_register_tokens": config.registers}


def _dino_unverified(config: ViTConfig) -> str | None:
    if config.mlp % config.width:
        return f"transformers' DINOv2 has no MLP of {config.mlp} for width {config.width}"
    return None


def _dino_entries(config: ViTConfig, names: Collection[str] | None) -> Iterator[Entry]:
    is_facebook = names is None or "patch_embed.proj.weight" in names
    for name in parameter_names(config):
        if is_facebook:
            yield renamed_entry(name, "register_tokens" if name == "reg_token" else name)
        elif name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            yield _dino_layer_entry(name, f"encoder.layer.{layer}.", rest)
        else:
            ours, theirs = next(pair for pair in _DINO if name.startswith(pair[0]))
            yield renamed_entry(name, name.replace(ours, theirs))


def _dino_layer_entry(ours: str, at: str, rest: str) -> Entry:
    if rest.startswith("attn.qkv."):
        leaf = rest.rpartition(".")[2]
        return stacked_entry(ours, (f"{at}attention.attention.{part}.{leaf}" for part in ("query", "key", "value")))
    for our_part, their_part in _DINO_LAYER:
        if rest.startswith(our_part):
            return renamed_entry(ours, at + rest.replace(our_part, their_part))
    return renamed_entry(ours, at + rest)


MAPPINGS: dict[str, StateDictMapping[ViTConfig]] = {
    "timm": StateDictMapping(entries=timm_entries, check=check_timm, settings=_timm_settings, function=_timm_function),
    "google": StateDictMapping(entries=_google_entries, check=check_google, why_unverified=google_unverified),
    "huggingface": StateDictMapping(
        entries=_huggingface_entries, check=_check_huggingface, settings=_huggingface_settings
    ),
    "torchvision": StateDictMapping(
        entries=_torchvision_entries, check=_check_torchvision, settings=_torchvision_settings
    ),
    "dino": StateDictMapping(entries=_dino_entries, settings=_dino_settings, why_unverified=_dino_unverified),
    "clip": CLIP_MAPPING,
}
