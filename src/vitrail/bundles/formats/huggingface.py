"""Weights of Hugging Face transformers: ViT and DeiT, with both naming schemes of attention."""

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from vitrail.bundles.bundle import Bundle
from vitrail.bundles.card import model_card
from vitrail.bundles.formats.base import InferredModel, LibraryCheckpoint, WeightFormat
from vitrail.bundles.infer_config import (
    count_layers,
    default_preprocess,
    drop_empty_notes,
    infer_heads,
    make_unique,
    square_grid,
    with_published_name,
)
from vitrail.bundles.parity import Forward, Unverified, import_peer
from vitrail.core.errors import UsageError
from vitrail.core.files import write_json
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.families.vit.config import ViTConfig

ACTIVATIONS: dict[str, Literal["gelu", "gelu-tanh", "relu"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
}
_RESAMPLE = {2: "bilinear", 3: "bicubic"}

_POSITIONS, _DISTILLATION = "embeddings.position_embeddings", "embeddings.distillation_token"
_POOLER = "pooler.dense.weight"


class HuggingFace(WeightFormat):
    """ViTForImageClassification, ViTModel and DeiT, by their config.json and preprocessor_config.json."""

    library = "transformers"

    def recognises(self, names: Collection[str]) -> bool:
        bare = {_without_prefix(name) for name in names}
        return "embeddings.patch_embeddings.projection.weight" in bare and any(
            ending in bare
            for ending in ("encoder.layer.0.intermediate.dense.weight", "layers.0.attention.q_proj.weight")
        )

    def prepare(self, checkpoint: LibraryCheckpoint) -> LibraryCheckpoint:
        tensors = {_without_prefix(name): tensor for name, tensor in checkpoint.tensors.items()}
        return checkpoint.renamed(tensors)

    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        names, stated = checkpoint.tensors, checkpoint.document("config.json")
        if any(name.startswith("distillation_classifier.") for name in names):
            raise UsageError("Model must have one head, got a distilled DeiT, which averages two.")
        shape = checkpoint.shapes
        width, channels, *patch = shape["embeddings.patch_embeddings.projection.weight"]
        if stated.get("hidden_size", width) != width:
            raise UsageError(f"config.json must be of this model, got hidden_size {stated['hidden_size']} for {width}.")
        layers = "encoder.layer." if _is_old(names) else "layers."
        hidden = "intermediate.dense.weight" if _is_old(names) else "mlp.fc1.weight"
        query = "attention.attention.query.bias" if _is_old(names) else "attention.q_proj.bias"
        heads, about_heads = read_heads(stated, width, user_config)
        is_distilled = _DISTILLATION in names
        patches = shape[_POSITIONS][1] - 1 - is_distilled
        size = stated.get("image_size", user_config.resolution if user_config is not None else None)
        if size is None:
            rows, columns = square_grid(patches)
            size = (rows * patch[0], columns * patch[1])
        config = ViTConfig(
            width=width,
            channels=channels,
            patch=(patch[0], patch[1]),
            depth=count_layers(names, layers),
            heads=heads,
            mlp=shape[f"{layers}0.{hidden}"][0],
            qkv_bias=f"{layers}0.{query}" in names,
            registers=int(is_distilled),
            resolution=tuple(size) if isinstance(size, list | tuple) else (size, size),
            norm_epsilon=stated.get("layer_norm_eps", 1e-12),
            activation=read_activation(stated),
            representation="tanh" if _POOLER in names else "none",
            resize_rule="huggingface",
            classes=shape["classifier.weight"][0] if "classifier.weight" in names else 0,
        )
        preprocess, about_pixels = read_processor(checkpoint, config)
        about = None if stated else "there is no config.json: epsilon 1e-12 and exact GELU are taken"
        if is_distilled:
            about = "the distillation token became a register: the head does not read it"
        labels, about_labels = read_class_names(stated, config.classes) if config.classes else (None, None)
        notes = drop_empty_notes([about_heads, about, about_labels])
        return InferredModel(with_published_name(config), preprocess, labels, notes, about_pixels)

    def open_source(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> Forward:
        # A distillation token, which became a register, is DeiT's.
        model_type = "deit" if _DISTILLATION in checkpoint.tensors else "vit"
        classes = {"id2label": {str(index): f"LABEL_{index}" for index in range(config.classes)}}
        document = {"model_type": model_type, **self.mapping(config).settings(config), **classes}
        return open_with_transformers(config, checkpoint, document)

    def check(self, bundle: Bundle) -> list[str]:
        config = bundle.model.config
        self.mapping(config).check(config)
        if bundle.preprocess.resize == "pad":
            raise UsageError("Preprocessing for transformers must not pad, got resize pad.")
        return []

    def documents(self, bundle: Bundle) -> dict[str, Any]:
        config, preprocess = bundle.model.config, bundle.preprocess
        labels = bundle.labels or tuple(f"LABEL_{index}" for index in range(config.classes))
        model = {
            "architectures": ["ViTForImageClassification" if config.classes else "ViTModel"],
            "model_type": "vit",
            **self.mapping(config).settings(config),
            "torch_dtype": "float32",
            "id2label": {str(index): label for index, label in enumerate(labels)},
            "label2id": {label: index for index, label in enumerate(labels)},
        }
        return {"config.json": model, "preprocessor_config.json": _write_preprocess(preprocess)}

    def card(self, bundle: Bundle) -> str:
        config = bundle.model.config
        use = ["from transformers import AutoModel", 'model = AutoModel.from_pretrained("path/to/this/folder")']
        if config.classes:
            use = [
                "from transformers import pipeline",
                'print(pipeline("image-classification", model="path/to/this/folder")("image.png"))',
            ]
        return model_card(config, bundle.provenance, library="transformers", use=use)

    def open_written(self, config: ModelConfig, folder: Path) -> Forward:
        names = {name for entry in self.entries(config) for name in entry.theirs}
        return _open_folder(config, folder, "vit", has_pooler=_POOLER in names)


_CLASSES = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}


def open_with_transformers(config: ModelConfig, checkpoint: LibraryCheckpoint, otherwise: dict[str, Any]) -> Forward:
    """Open a checkpoint in transformers from its tensors and its config.json, without code that this may refer to. If
    there is none, `otherwise` stands in for it: what the shapes of the tensors say."""
    document = {key: value for key, value in checkpoint.document("config.json").items() if key != "auto_map"}
    document = document or otherwise
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", document)
        tensors = {name: tensor.contiguous() for name, tensor in checkpoint.raw.items()}
        save_file(tensors, Path(folder) / HuggingFace.file)
        has_pooler = _POOLER in checkpoint.tensors
        return _open_folder(config, Path(folder), document.get("model_type"), has_pooler=has_pooler)


def _open_folder(config: ModelConfig, folder: Path, model_type: Any, *, has_pooler: bool) -> Forward:
    if model_type not in _CLASSES:
        raise Unverified(f"config.json has model_type {model_type!r}, which is not supported")
    messages = import_peer("transformers").logging
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    kind = import_peer("transformers", _CLASSES[model_type] + ("ForImageClassification" if config.classes else "Model"))
    model, found = kind.from_pretrained(
        folder,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
    )
    if missing := [name for name in found["missing_keys"] if not name.startswith("pooler.")]:
        raise RuntimeError(f"it misses {sorted(missing)[0]}")
    model.eval()
    if config.classes:
        return lambda images: model(images).logits
    if has_pooler:
        return lambda images: model(images).pooler_output
    return lambda images: model(images).last_hidden_state[:, 0]


def read_heads(stated: dict[str, Any], width: int, user_config: ModelConfig | None) -> tuple[int, str | None]:
    """Number of attention heads in a config.json; the usual one of this width, with a note, if it states none."""
    heads = stated.get("num_attention_heads")
    return infer_heads(width, user_config) if heads is None else (heads, None)


def read_activation(stated: dict[str, Any]) -> Literal["gelu", "gelu-tanh", "relu"]:
    """Our name for the activation in a config.json; exact GELU if it states none."""
    activation = stated.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise UsageError(f"Activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    return ACTIVATIONS[activation]


def read_class_names(stated: dict[str, Any], classes: int) -> tuple[tuple[str, ...] | None, str | None]:
    """Class names; None for the placeholder names of Hugging Face."""
    table = stated.get("id2label") or {}
    found = [table.get(str(index)) for index in range(classes)]
    if any(label is None for label in found) or found == [f"LABEL_{index}" for index in range(classes)]:
        return None, "the files do not name the classes"
    return make_unique(found)


def _without_prefix(name: str) -> str:
    return name.removeprefix("vit.").removeprefix("deit.")


def _is_old(names: Collection[str]) -> bool:
    return any(name.startswith("encoder.layer.") for name in names)


def read_processor(checkpoint: LibraryCheckpoint, config: ViTConfig) -> tuple[Preprocess, str | None]:
    stated = checkpoint.document("preprocessor_config.json")
    if not stated:
        return default_preprocess(config)
    size, crop = _sides(stated.get("size") or config.resolution), None
    if stated.get("do_center_crop"):
        crop = _sides(stated.get("crop_size") or config.resolution)
    shorter = size.get("shortest_edge")
    resized = shorter or size.get("height", config.resolution[0])
    kept = crop.get("height", config.resolution[0]) if crop else resized
    note = None
    if kept != config.resolution[0]:
        note = f"the processor cuts {kept} px, the model reads {config.resolution[0]}: the model's size is taken"
    half = [0.5] * config.channels
    settings = {
        "resolution": config.resolution,
        "resize": "shorter" if shorter else "squash",
        "crop_fraction": min(kept / resized, 1.0),
        "interpolation": _RESAMPLE.get(stated.get("resample", 2), "bilinear"),
        "mean": tuple(stated.get("image_mean") or half),
        "std": tuple(stated.get("image_std") or half),
    }
    if stated.get("do_normalize") is False:
        settings |= {"mean": (0.0,) * config.channels, "std": (1.0,) * config.channels}
    return Preprocess.from_json(settings), note


def _sides(size: Any) -> dict[str, int]:
    """Height and width from a number, a pair or a dictionary, as different versions write them."""
    if isinstance(size, int):
        return {"height": size, "width": size}
    return size if isinstance(size, dict) else {"height": size[0], "width": size[1]}


def _write_preprocess(preprocess: Preprocess) -> dict[str, Any]:
    height, width = preprocess.resolution
    document: dict[str, Any] = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": {"bilinear": 2, "bicubic": 3}[preprocess.interpolation],
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    wide, high = (int(side / preprocess.crop_fraction) for side in (width, height))
    if preprocess.resize == "squash" and preprocess.crop_fraction == 1:
        return document | {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}}
    # transformers' DeiT processor crops; its ViT processor does not.
    size = {"shortest_edge": min(wide, high)} if preprocess.resize == "shorter" else {"height": high, "width": wide}
    crop = {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    return document | crop | {"image_processor_type": "DeiTImageProcessor", "size": size}
