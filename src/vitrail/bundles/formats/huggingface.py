"""Weight format of Hugging Face transformers: ViT and DeiT, with both naming schemes of attention."""

import dataclasses
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
    mae_decoder_names,
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

ACTIVATIONS: dict[str, Literal["gelu", "gelu-tanh", "quick-gelu", "relu"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "quick_gelu": "quick-gelu",
    "relu": "relu",
}
_RESAMPLE = {2: "bilinear", 3: "bicubic"}

_POSITIONS, _DISTILLATION = "embeddings.position_embeddings", "embeddings.distillation_token"
_POOLER = "pooler.dense.weight"
_HEADS = ("classifier.weight", "cls_classifier.weight")
_SECOND_HEAD = "distillation_classifier.weight"


class HuggingFace(WeightFormat):
    """ViTForImageClassification, ViTModel and DeiT, with their config.json and preprocessor_config.json."""

    library = "transformers"

    def recognises(self, names: Collection[str]) -> bool:
        bare = {_strip_prefix(name) for name in names}
        return "embeddings.patch_embeddings.projection.weight" in bare and any(
            ending in bare
            for ending in ("encoder.layer.0.intermediate.dense.weight", "layers.0.attention.q_proj.weight")
        )

    def prepare(self, checkpoint: LibraryCheckpoint) -> LibraryCheckpoint:
        tensors = {_strip_prefix(name): tensor for name, tensor in checkpoint.tensors.items()}
        return checkpoint.renamed(tensors)

    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        names, document = checkpoint.tensors, checkpoint.document("config.json")
        shapes = checkpoint.shapes
        width, channels, *patch = shapes["embeddings.patch_embeddings.projection.weight"]
        if (hidden_size := document.get("hidden_size", width)) != width:
            raise UsageError(
                f"config.json must state the width of the weights ({width}), got hidden_size {hidden_size}."
            )
        layers = "encoder.layer." if _has_old_names(names) else "layers."
        hidden = "intermediate.dense.weight" if _has_old_names(names) else "mlp.fc1.weight"
        query = "attention.attention.query.bias" if _has_old_names(names) else "attention.q_proj.bias"
        heads, heads_note = read_heads(document, width, user_config)
        is_distilled = _DISTILLATION in names
        patches = shapes[_POSITIONS][1] - 1 - is_distilled
        size = document.get("image_size", user_config.resolution if user_config is not None else None)
        if size is None:
            rows, columns = square_grid(patches)
            size = (rows * patch[0], columns * patch[1])
        config = ViTConfig(
            width=width,
            channels=channels,
            patch=(patch[0], patch[1]),
            depth=count_layers(names, layers),
            heads=heads,
            mlp=shapes[f"{layers}0.{hidden}"][0],
            qkv_bias=f"{layers}0.{query}" in names,
            registers=int(is_distilled),
            distilled=_SECOND_HEAD in names,
            resolution=tuple(size) if isinstance(size, list | tuple) else (size, size),
            norm_epsilon=document.get("layer_norm_eps", 1e-12),
            activation=read_activation(document),
            representation="tanh" if _POOLER in names else "none",
            resize_rule="huggingface",
            classes=next((shapes[name][0] for name in _HEADS if name in names), 0),
        )
        preprocess, preprocess_note = read_processor(checkpoint, config)
        config_note = None if document else "config.json is missing: epsilon 1e-12 and exact GELU are used"
        if is_distilled and not config.distilled:
            config_note = "the distillation token became a register: the head does not read it"
        labels, labels_note = read_class_names(document, config.classes) if config.classes else (None, None)
        decoder = mae_decoder_names(names)
        decoder_note = "the decoder of MAE is left out" if decoder else None
        notes = drop_empty_notes([heads_note, config_note, labels_note, decoder_note])
        return InferredModel(with_published_name(config), preprocess, labels, notes, preprocess_note, decoder)

    def open_source(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> Forward:
        # Only DeiT has a distillation token.
        model_type = "deit" if _DISTILLATION in checkpoint.tensors else "vit"
        classes = {"id2label": {str(index): f"LABEL_{index}" for index in range(config.classes)}}
        document = {"model_type": model_type, **self.mapping(config).settings(config), **classes}
        if decoder := mae_decoder_names(checkpoint.tensors):  # transformers' MAE drops patches at random
            document |= checkpoint.document("config.json") | {"model_type": "vit"}
            encoder = {name: tensor for name, tensor in checkpoint.raw.items() if name not in decoder}
            checkpoint = dataclasses.replace(checkpoint, raw=encoder, documents={"config.json": document})
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
        return {"config.json": model, "preprocessor_config.json": _processor_document(preprocess)}

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
        return _open_transformers_folder(config, folder, "vit", has_pooler=_POOLER in names)


_CLASSES = {
    "vit": "ViT",
    "deit": "DeiT",
    "clip_vision_model": "CLIPVision",
    "dinov2": "Dinov2",
    "dinov2_with_registers": "Dinov2WithRegisters",
}


def open_with_transformers(
    config: ModelConfig, checkpoint: LibraryCheckpoint, inferred_document: dict[str, Any]
) -> Forward:
    """Open a checkpoint in transformers from its tensors and its config.json.

    Code that config.json refers to is not run. If there is no config.json, `inferred_document` is used instead.
    """
    document = {key: value for key, value in checkpoint.document("config.json").items() if key != "auto_map"}
    document = document or inferred_document
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", document)
        tensors = {name: tensor.contiguous() for name, tensor in checkpoint.raw.items()}
        save_file(tensors, Path(folder) / HuggingFace.file)
        has_pooler = _POOLER in checkpoint.tensors or document.get("model_type") == "clip_vision_model"
        return _open_transformers_folder(
            config,
            Path(folder),
            document.get("model_type"),
            has_pooler=has_pooler,
            has_two_heads=_SECOND_HEAD in checkpoint.tensors,
        )


def _open_transformers_folder(
    config: ModelConfig, folder: Path, model_type: Any, *, has_pooler: bool, has_two_heads: bool = False
) -> Forward:
    """Open a folder with transformers, by its class for `model_type`. Raise `Unverified` for an unsupported type."""
    if model_type not in _CLASSES:
        raise Unverified(f"config.json has model_type {model_type!r}, which is not supported")
    logging = import_peer("transformers").logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    task = ("ForImageClassification" + "WithTeacher" * has_two_heads) if config.classes else "Model"
    class_name = _CLASSES[model_type] + task
    model, loading_info = import_peer("transformers", class_name).from_pretrained(
        folder,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
    )
    if missing := [name for name in loading_info["missing_keys"] if not name.startswith("pooler.")]:
        raise RuntimeError(f"tensor {sorted(missing)[0]} is missing")
    model.eval()
    if config.classes:
        return lambda images: model(images).logits
    if has_pooler:
        return lambda images: model(images).pooler_output
    return lambda images: model(images).last_hidden_state[:, 0]


def read_heads(document: dict[str, Any], width: int, user_config: ModelConfig | None) -> tuple[int, str | None]:
    """Return the number of attention heads in a config.json, or else the inferred one with a note."""
    heads = document.get("num_attention_heads")
    return infer_heads(width, user_config) if heads is None else (heads, None)


def read_activation(document: dict[str, Any]) -> Literal["gelu", "gelu-tanh", "quick-gelu", "relu"]:
    """Return our name for the activation in a config.json. The default is exact GELU."""
    activation = document.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise UsageError(f"Activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    return ACTIVATIONS[activation]


def read_class_names(document: dict[str, Any], classes: int) -> tuple[tuple[str, ...] | None, str | None]:
    """Return the class names in a config.json and a note. Placeholders (`LABEL_0`) give None as the names."""
    table = document.get("id2label") or {}
    labels = [table.get(str(index)) for index in range(classes)]
    if any(label is None for label in labels) or labels == [f"LABEL_{index}" for index in range(classes)]:
        return None, "the files do not name the classes"
    return make_unique(labels)


def _strip_prefix(name: str) -> str:
    return name.removeprefix("vit.").removeprefix("deit.")


def _has_old_names(names: Collection[str]) -> bool:
    """Return whether the tensor names are those of transformers before version 5."""
    return any(name.startswith("encoder.layer.") for name in names)


def read_processor(checkpoint: LibraryCheckpoint, config: ViTConfig) -> tuple[Preprocess, str | None]:
    """Read the preprocessing in preprocessor_config.json, or else the usual one. Return it with a note, if any."""
    document = checkpoint.document("preprocessor_config.json")
    if not document:
        return default_preprocess(config)
    size, crop = _height_and_width(document.get("size") or config.resolution), None
    if document.get("do_center_crop"):
        crop = _height_and_width(document.get("crop_size") or config.resolution)
    shorter = size.get("shortest_edge")
    resized_height = shorter or size.get("height", config.resolution[0])
    crop_height = crop.get("height", config.resolution[0]) if crop else resized_height
    note = None
    if crop_height != config.resolution[0]:
        height = config.resolution[0]
        note = f"the processor crops to {crop_height} px, the model reads {height} px: the model's size is used"
    half = [0.5] * config.channels
    settings = {
        "resolution": config.resolution,
        "resize": "shorter" if shorter else "squash",
        "crop_fraction": min(crop_height / resized_height, 1.0),
        "interpolation": _RESAMPLE.get(document.get("resample", 2), "bilinear"),
        "mean": tuple(document.get("image_mean") or half),
        "std": tuple(document.get("image_std") or half),
    }
    if document.get("do_normalize") is False:
        settings |= {"mean": (0.0,) * config.channels, "std": (1.0,) * config.channels}
    return Preprocess.from_json(settings), note


def _height_and_width(size: Any) -> dict[str, int]:
    """Return height and width from a number, a pair or a dictionary, as different versions of transformers write
    them."""
    if isinstance(size, int):
        return {"height": size, "width": size}
    return size if isinstance(size, dict) else {"height": size[0], "width": size[1]}


def _processor_document(preprocess: Preprocess) -> dict[str, Any]:
    """Return the preprocessor_config.json for a preprocessing."""
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
    resized_width, resized_height = (int(side / preprocess.crop_fraction) for side in (width, height))
    if preprocess.resize == "squash" and preprocess.crop_fraction == 1:
        return document | {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}}
    # transformers' DeiT processor crops; its ViT processor does not.
    size = {"height": resized_height, "width": resized_width}
    if preprocess.resize == "shorter":
        size = {"shortest_edge": min(resized_width, resized_height)}
    crop = {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    return document | crop | {"image_processor_type": "DeiTImageProcessor", "size": size}
