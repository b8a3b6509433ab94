"""Weight format of timm (huggingface/pytorch-image-models)."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from vitrail.bundles.bundle import Bundle
from vitrail.bundles.card import model_card
from vitrail.bundles.formats.base import InferredModel, LibraryCheckpoint, WeightFormat
from vitrail.bundles.infer_config import (
    count_layers,
    default_preprocess,
    drop_empty_notes,
    infer_heads,
    infer_positions,
    infer_resolution,
    mae_decoder_names,
    make_unique,
    with_published_name,
)
from vitrail.bundles.parity import Forward, Unverified, import_peer
from vitrail.core.errors import UsageError
from vitrail.core.settings import jsonable
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.families.hybrid.config import HybridConfig
from vitrail.models.families.mixer.config import MixerConfig
from vitrail.models.families.resnet.config import ResNetConfig
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.library_limits import epsilon_notes, gelu_notes
from vitrail.models.timm_interface import timm_data_config
from vitrail.models.zoo import MODELS, TIMM

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu-tanh", "quick_gelu": "quick-gelu", "relu": "relu"}

# timm's function for each model, at the usual resolution.
ARCHITECTURES = {alias.name: function for function, alias in TIMM.items() if alias.resolution == 224}

# Settings in which a model may differ from the published one of its name.
_FREE_SETTINGS = (
    "classes",
    "channels",
    "resolution",
    "dropout",
    "drop_path",
    "resize_rule",
    "activation",
    "norm_epsilon",
)


class Timm(WeightFormat):
    """State dicts of timm's VisionTransformer, hybrids, MlpMixer and ResNetV2, with or without its config.json."""

    def recognises(self, names: Collection[str]) -> bool:
        attention = ("blocks.0.attn.qkv.weight", "blocks.0.attn.q_proj.weight")  # q_proj: EVA-02, which `read` rejects
        is_vit = "patch_embed.proj.weight" in names and any(name in names for name in attention)
        is_mixer = "stem.proj.weight" in names and "blocks.0.mlp_tokens.fc1.weight" in names
        is_bit = "stem.conv.weight" in names and "stages.0.blocks.0.conv1.weight" in names
        is_dino = "register_tokens" in names or ("mask_token" in names and not mae_decoder_names(names))
        return (is_vit or is_mixer or is_bit) and not is_dino

    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        names = checkpoint.tensors
        if "blocks.0.mlp_tokens.fc1.weight" in names:
            config, notes = _infer_mixer(checkpoint, user_config), []
        elif "stages.0.blocks.0.conv1.weight" in names:
            config, notes = _infer_bit(checkpoint, user_config), []
        else:
            config, notes = _infer_vit(checkpoint, user_config)
        preprocess, preprocess_note = _read_preprocess(checkpoint, config)
        labels, labels_note = None, None
        if label_names := checkpoint.document("config.json").get("label_names"):
            labels, labels_note = make_unique(label_names)
        decoder = mae_decoder_names(names)
        notes += [labels_note, "the decoder of MAE is left out" if decoder else None]
        return InferredModel(
            with_published_name(config), preprocess, labels, drop_empty_notes(notes), preprocess_note, decoder
        )

    def open_source(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> Forward:
        model = build_with_timm(config, checkpoint.document("config.json"))
        decoder = mae_decoder_names(checkpoint.raw)
        encoder = {name: tensor for name, tensor in checkpoint.raw.items() if name not in decoder}
        model.load_state_dict(encoder, strict=True)
        return model.eval()

    def check(self, bundle: Bundle) -> list[str]:
        config = bundle.model.config
        mapping = self.mapping(config)
        mapping.check(config)
        architecture(config)
        notes = epsilon_notes(config, "timm")
        if bundle.preprocess.resize == "pad":
            notes.append("timm pads with the mean colour, this bundle with its background")
        if "act_layer" not in mapping.settings(config):
            notes += gelu_notes(config, "timm", exact=True)
        return notes

    def documents(self, bundle: Bundle) -> dict[str, Any]:
        config, preprocess = bundle.model.config, bundle.preprocess
        document: dict[str, Any] = {
            "architecture": architecture(config),
            "num_classes": config.classes,
            "model_args": self.mapping(config).settings(config),
            "pretrained_cfg": {**jsonable(timm_data_config(preprocess)), "num_classes": config.classes},
        }
        if bundle.labels is not None:
            document["label_names"] = list(bundle.labels)
        if "licence" in bundle.provenance:
            document["pretrained_cfg"]["license"] = str(bundle.provenance["licence"])
        return {"config.json": document}

    def card(self, bundle: Bundle) -> str:
        use = ["import timm", 'model = timm.create_model("local-dir:path/to/this/folder", pretrained=True).eval()']
        return model_card(bundle.model.config, bundle.provenance, library="timm", use=use)

    def open_written(self, config: ModelConfig, folder: Path) -> Forward:
        return import_peer("timm").create_model(f"local-dir:{folder}", pretrained=True).eval()


def build_with_timm(config: ModelConfig, document: dict[str, Any]) -> Any:
    """Build timm's model without weights, from the function that config.json names or else from our configuration.

    The function that config.json names also verifies our assumptions. config.json is untrusted: it may name a model of
    timm, but no repository and no file (timm reads `hf-hub:...`, `local-dir:...` and `checkpoint_path`), and its
    settings may not make the model larger. Raise `Unverified` otherwise.
    """
    timm = import_peer("timm")
    try:
        arguments = Timm("timm").mapping(config).settings(config)
        function = document.get("architecture") or architecture(config)
    except UsageError:
        raise Unverified(f"timm has no {config.name or config.family}") from None
    if document.get("architecture"):
        if not timm.is_model(function):
            raise Unverified(f"timm has no model {function!r}, which config.json names")
        model_args = {name: arg for name, arg in (document.get("model_args") or {}).items() if name != "num_classes"}
        for name, value in model_args.items():
            # 1 % larger is allowed, because values such as mlp_ratio are rounded.
            if name in _FACTORY_ARGUMENTS or _largest_number(value) > 1.01 * _largest_number(arguments.get(name)):
                raise Unverified(f"config.json sets {name} to {str(value)[:40]}, which does not fit the tensors")
        arguments = {**{name: arguments[name] for name in _FROM_TENSORS if name in arguments}, **model_args}
    return timm.create_model(function, pretrained=False, **{**arguments, "num_classes": config.classes})


# Arguments of `timm.create_model` itself, which load files. All others are passed to the model.
_FACTORY_ARGUMENTS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")

# Arguments that follow from the shapes of the tensors, so that the defaults of timm's function need no verification.
_FROM_TENSORS = ("img_size", "in_chans")


def _largest_number(value: object) -> float:
    """Return the largest number in a JSON value, at least 1."""
    values = value if isinstance(value, list) else [value]
    return max([1.0, *(float(number) for number in values if isinstance(number, int | float))])


def architecture(config: ModelConfig) -> str:
    """Return the name of timm's function for this model.

    Some families have one function with arguments. In the others, raise UsageError unless the model equals a published
    model that timm has.
    """
    if (function := Timm("timm").mapping(config).function(config)) is not None:
        return function
    published = MODELS.get(config.name)
    free_settings = {name: value for name, value in config.to_json().items() if name in _FREE_SETTINGS}
    if published is None or config.name not in ARCHITECTURES or published.replace(**free_settings) != config:
        raise UsageError(f"Model must be one that timm has by name, got {config.name or config.family}.")
    return ARCHITECTURES[config.name]


def _infer_vit(checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> tuple[ModelConfig, list[str | None]]:
    """Infer a ViT or a hybrid from tensor names and shapes, with the settings that only timm's config.json states.

    The second result are notes about settings that neither states. Raises UsageError for a variant that Vitrail lacks.
    """
    names, shapes = checkpoint.tensors, checkpoint.shapes
    document = checkpoint.document("config.json")
    arguments = document.get("model_args") or {}
    default_activation = "quick_gelu" if "quickgelu" in document.get("architecture", "") else "gelu"
    activation = arguments.get("act_layer") or default_activation
    if activation not in _ACTIVATIONS:
        raise UsageError(f"Activation must be GELU, its tanh or sigmoid form, or ReLU, got {activation!r}.")
    _check_plain_layers(shapes)
    width, depth = shapes["patch_embed.proj.weight"][0], count_layers(names, "blocks.")
    if document.get("num_features", width) != width or arguments.get("embed_dim", width) != width:
        raise UsageError(f"config.json must state the width of the weights ({width}), got another width.")
    heads, heads_note = arguments.get("num_heads"), None
    if heads is None:
        heads, heads_note = infer_heads(width, user_config)
    pool = "cls" if "cls_token" in names else "map" if "attn_pool.latent" in names else "gap"
    is_distilled = "dist_token" in names
    # DeiT's distillation token becomes a register, and its row of the position table is added to it.
    registers = shapes["reg_token"][1] if "reg_token" in names else 1 if is_distilled else 0
    settings: dict[str, Any] = {
        "width": width,
        "depth": depth,
        "heads": heads,
        "mlp": shapes["blocks.0.mlp.fc1.weight"][0],
        "patch": shapes["patch_embed.proj.weight"][2:],
        "pool": pool,
        "registers": registers,
        "distilled": is_distilled,
        "embedding_norm": "norm_pre.weight" in names,
        "patch_bias": "patch_embed.proj.bias" in names,
        "qkv_bias": "blocks.0.attn.qkv.bias" in names,
        "resize_rule": "timm",
        "activation": _ACTIVATIONS[activation],
        "norm_epsilon": 1e-5 if "norm_pre.weight" in names else 1e-6,
        "representation": "tanh" if "pre_logits.fc.weight" in names else "none",
        "classes": shapes["head.weight"][0] if "head.weight" in names else 0,
    }
    if "blocks.0.ls1.gamma" in names:
        settings["layer_scale"] = 1e-5
    rows = shapes["pos_embed"][1] - (1 if is_distilled else 0) if "pos_embed" in names else 0
    if not rows:
        raise UsageError("Model must have learned positions (pos_embed), got none.")
    size = (document.get("pretrained_cfg") or {}).get("input_size")
    config_class: type[ViTConfig] = ViTConfig
    if any(name.startswith("patch_embed.backbone.") for name in names):
        config_class = HybridConfig
        settings |= _infer_stem(names)
    settings |= infer_positions(settings, rows, user_config, size[1:] if size else None)
    stem_kernels = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")
    first_kernel = next((name for name in stem_kernels if name in shapes), "patch_embed.proj.weight")
    settings["channels"] = shapes[first_kernel][1]
    return config_class(**settings), [heads_note]


def _check_plain_layers(shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise UsageError for layers that the ViT does not have: those of EVA, EVA-02 and BEiT, and a norm after pooling.

    The files of EVA do not state whether its norms are before or after attention and MLP, so that even a model without
    a norm after pooling could be read wrongly.
    """
    has_separate_bias = "blocks.0.attn.q_bias" in shapes or "blocks.0.attn.q_proj.weight" in shapes
    first, second = shapes.get("blocks.0.mlp.fc1.weight"), shapes.get("blocks.0.mlp.fc2.weight")
    is_gated = first is None or (second is not None and first[0] == 2 * second[1])
    if has_separate_bias and is_gated:
        raise UsageError(
            "Model must have an MLP without a gate and learned positions only, got EVA-02, which has SwiGLU and rotary"
            " positions. Use it with timm."
        )
    if any(name.startswith("fc_norm.") for name in shapes):
        raise UsageError(
            "Model must normalise before it pools, got one that normalises after pooling (timm's fc_norm)."
        )
    if has_separate_bias:
        raise UsageError(
            "Model must have one bias for queries, keys and values, got separate ones without keys, as in EVA and BEiT."
            " Use it with timm."
        )


def _infer_stem(names: Collection[str]) -> dict[str, Any]:
    prefix = "patch_embed.backbone.stages."
    if not any(name.startswith(prefix) for name in names):
        return {"stem_layers": ()}
    stages = count_layers(names, prefix)
    return {"stem_layers": tuple(count_layers(names, f"{prefix}{stage}.blocks.") for stage in range(stages))}


def _infer_mixer(checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> ModelConfig:
    shapes = checkpoint.shapes
    width, channels, *patch = shapes["stem.proj.weight"]
    hidden, patches = shapes["blocks.0.mlp_tokens.fc1.weight"]
    return MixerConfig(
        width=width,
        channels=channels,
        patch=(patch[0], patch[1]),
        resolution=infer_resolution(patches, patch, user_config),
        depth=count_layers(shapes, "blocks."),
        token_mlp=hidden,
        channel_mlp=shapes["blocks.0.mlp_channels.fc1.weight"][0],
        classes=shapes["head.weight"][0] if "head.weight" in shapes else 0,
    )


def _infer_bit(checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> ModelConfig:
    shapes = checkpoint.shapes
    base, channels, *_ = shapes["stem.conv.weight"]
    size = (checkpoint.document("config.json").get("pretrained_cfg") or {}).get("input_size")
    resolution = tuple(size[1:]) if size else user_config.resolution if user_config is not None else (224, 224)
    stages = count_layers(shapes, "stages.")
    return ResNetConfig(
        base=base,
        channels=channels,
        resolution=resolution,
        layers=tuple(count_layers(shapes, f"stages.{stage}.blocks.") for stage in range(stages)),
        classes=shapes["head.fc.weight"][0] if "head.fc.weight" in shapes else 0,
    )


def _read_preprocess(checkpoint: LibraryCheckpoint, config: ModelConfig) -> tuple[Preprocess, str | None]:
    """Return the preprocessing in config.json (`pretrained_cfg`), or else the usual one with a note."""
    pretrained_cfg = checkpoint.document("config.json").get("pretrained_cfg") or {}
    if not pretrained_cfg:
        return default_preprocess(config)
    interpolation = pretrained_cfg.get("interpolation", "bicubic")
    modes = {"center": "shorter", "squash": "squash", "border": "pad"}
    settings = {
        "resolution": config.resolution,
        "mean": tuple(pretrained_cfg.get("mean", IMAGENET_MEAN)),
        "std": tuple(pretrained_cfg.get("std", IMAGENET_STD)),
        "crop_fraction": pretrained_cfg.get("crop_pct", 0.875),
        "interpolation": interpolation if interpolation in ("bilinear", "bicubic") else "bicubic",
        "resize": modes.get(pretrained_cfg.get("crop_mode", "center"), "shorter"),
    }
    return Preprocess.from_json(settings), None
