"""Proof of a conversion: both models answer the same pictures, and their logits are compared.

The other library is imported only here and only by name: vitrail does not depend on it. Whatever its import or its
model raises means "not verified", with the reason.
"""

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitrail.configs.base import ModelConfig
from vitrail.configs.hybrid import HybridConfig
from vitrail.configs.mixer import MixerConfig
from vitrail.configs.vit import ViTConfig
from vitrail.errors import UsageError, VitrailError, first_line
from vitrail.images.preprocess import Picture, Preprocess
from vitrail.models.base import AnyModel
from vitrail.models.look import look
from vitrail.storage import write_json
from vitrail.telemetry import import_quietly
from vitrail.weights.bundle import Bundle
from vitrail.weights.google import needs_big_vision
from vitrail.weights.timm import architecture, model_arguments, vit_arguments
from vitrail.weights.vocabulary import Checkpoint

TOLERANCE = 1e-4
"""Largest difference of two logits, where they are of the size of 10 or less; above, in proportion."""

Forward = Callable[[Tensor], Tensor]


class Unverified(Exception):
    """There is nobody to compare with, and this is why."""


@torch.inference_mode()
def prove(
    model: AnyModel, preprocess: Preprocess, peer: Forward, library: str, pictures: list[Picture], *, has_head: bool
) -> dict[str, Any]:
    """Both on pictures: the largest difference, and how often they say the same. More than rounding raises."""
    ours, theirs = [], []
    for start in range(0, len(pictures), 8):
        images = preprocess(pictures[start : start + 8])
        seen = look(model, images)
        ours.append(seen.logits if has_head else seen.steps["pooled"])
        theirs.append(peer(images))
    one, other = torch.cat(ours), torch.cat(theirs)
    largest = float((one - other).abs().max())
    size = max(float(other.abs().max()), 10.0)
    proof: dict[str, Any] = {
        "library": library, "pictures": len(one), "compared": "logits" if has_head else "features",
        "largest_difference": largest, "largest_value": float(other.abs().max()),
    }  # fmt: skip
    if has_head:
        proof["equal_answers"] = int((one.argmax(-1) == other.argmax(-1)).sum())
    if not largest <= TOLERANCE * size / 10:
        raise VitrailError(
            f"{library} answers otherwise: the largest difference of {proof['compared']} is {largest:.2g}. Nothing is"
            " written. If it is meant, convert with --no-verify."
        )
    return proof


def attempt(
    library: str, make: Callable[[], Forward], bundle: Bundle, pictures: list[Picture], *, has_head: bool, ours: bool
) -> dict[str, Any]:
    """The proof against the model that `make` makes, or why there is none. That a library does not take files that are
    `ours` is no excuse but an error."""
    try:
        return prove(bundle.model, bundle.preprocess, make(), library, pictures, has_head=has_head)
    except Unverified as reason:
        return {"library": library, "not_verified": str(reason)}
    except VitrailError:
        raise
    except Exception as error:  # any failure of theirs
        reason = f"{library} does not take the model ({first_line(error)[:200]})"
        if ours:
            raise VitrailError(f"{reason}. Nothing is written. If it is meant, convert with --no-verify.") from None
        return {"library": library, "not_verified": reason}


def import_peer(name: str, member: str | None = None) -> Any:
    """Another library, or a member of it (transformers imports its models when they are asked for); or the reason why
    not: the first of the errors, which are raised one from another."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library = import_quietly(name)
            return library if member is None else getattr(library, member)
    except Exception as error:  # any failure of theirs
        first: BaseException = error
        while (cause := first.__cause__ or first.__context__) is not None:
            first = cause
        raise Unverified(f"{member or name} cannot be imported ({first_line(first)})") from None


def read_by_peer(library: str, config: ModelConfig, checkpoint: Checkpoint, *, has_head: bool) -> Forward:
    """A stranger's checkpoint in the library that it is of. Tensors and settings are handed over; no pickle is opened
    again, and no code that came with it is run."""
    match library:
        case "timm":
            model = _timm_model(config, config.classes if has_head else 0, checkpoint.document("config.json"))
            model.load_state_dict(checkpoint.raw, strict=True)
            return model.eval()
        case "google":
            return _timm_from_npz(config, checkpoint.path, config.classes if has_head else 0)
        case "torchvision":
            return _torchvision(config, checkpoint.raw)
    document = {key: value for key, value in checkpoint.document("config.json").items() if key != "auto_map"}
    if not document:
        raise Unverified("there is no config.json for transformers to read")
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", document)
        save_file({name: tensor.contiguous() for name, tensor in checkpoint.raw.items()}, Path(folder) / _FILE)
        return _transformers(Path(folder), document.get("model_type"), has_head=has_head)


def written_for_peer(library: str, config: ModelConfig, folder: Path) -> Forward:
    """What we wrote, opened by the library itself."""
    match library:
        case "timm":
            model = import_peer("timm").create_model(f"local-dir:{folder}", pretrained=True)
            return model.eval()
        case "google":
            return _timm_from_npz(config, folder / "model.npz", config.classes)
        case "torchvision":
            return _torchvision(config, load_file(folder / _FILE))
    return _transformers(folder, "vit", has_head=True)


_FILE = "model.safetensors"


def _timm_model(config: ModelConfig, classes: int, document: dict[str, Any]) -> Any:
    """By timm's own function, if the checkpoint names it: then what we assume of it is proved, too."""
    timm = import_peer("timm")
    if name := document.get("architecture"):
        own = model_arguments(config)
        sized = {key: own[key] for key in ("img_size", "in_chans") if key in own}
        arguments = {**sized, **(document.get("model_args") or {}), "num_classes": classes}
        return timm.create_model(name, pretrained=False, **arguments)
    if type(config) is ViTConfig:
        return timm.models.VisionTransformer(**vit_arguments(config) | {"num_classes": classes})
    try:
        function = architecture(config)
    except UsageError:
        raise Unverified(f"timm has no {config.name or config.family}") from None
    return timm.create_model(function, **model_arguments(config), num_classes=classes)


def _timm_from_npz(config: ModelConfig, file: Path, classes: int) -> Forward:
    """timm reads Google's npz files itself."""
    if isinstance(config, MixerConfig):
        raise Unverified("no library here reads Google's Mixer files")
    if isinstance(config, ViTConfig) and config.representation != "none":
        raise Unverified("timm has no representation layer")
    if isinstance(config, ViTConfig) and needs_big_vision(config) and config.pool == "cls":
        raise Unverified("timm does not read a [CLS] without position")
    if isinstance(config, HybridConfig) and config.activation != "gelu":
        raise Unverified("timm's hybrids have exact GELU")
    model = _timm_model(config, classes, {})
    model.load_pretrained(str(file))
    return model.eval()


def _transformers(folder: Path, model_type: Any, *, has_head: bool) -> Forward:
    names = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
    if model_type not in names:
        raise Unverified(f"config.json says model_type {model_type!r}, which we do not open")
    import_peer("transformers").logging.set_verbosity_error()
    kind = import_peer("transformers", names[model_type] + ("ForImageClassification" if has_head else "Model"))
    model, found = kind.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype=torch.float32,
        output_loading_info=True,
    )  # fmt: skip
    if missing := [name for name in found["missing_keys"] if not name.startswith("pooler.")]:
        raise RuntimeError(f"it misses {sorted(missing)[0]}")
    model.eval()
    if has_head:
        return lambda images: model(images).logits
    return lambda images: model(images).last_hidden_state[:, 0]


def _torchvision(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Forward:
    """By torchvision's own function, if it has one for this width and patch: then the heads are proved, too."""
    assert isinstance(config, ViTConfig)
    models = import_peer("torchvision").models
    representation = None if config.representation == "none" else config.width
    known = {(768, 16): "vit_b_16", (768, 32): "vit_b_32", (1024, 16): "vit_l_16", (1024, 32): "vit_l_32"}
    known[1280, 14] = "vit_h_14"
    name = known.get((config.width, config.patch[0]))
    if name is not None and representation is None:
        model = getattr(models, name)(image_size=config.resolution[0], num_classes=config.classes)
    else:
        model = models.VisionTransformer(
            config.resolution[0], config.patch[0], config.depth, config.heads, config.width, config.mlp,
            num_classes=config.classes, representation_size=representation,
        )  # fmt: skip
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def some_pictures(config: ModelConfig, pictures: Sequence[Picture]) -> list[Picture]:
    """Up to 64 pictures; fewer for models that take long; with as many bands as the model reads."""
    most = 64 if config.macs < 2e9 else 16 if config.macs < 2e10 else 4
    chosen = list(pictures[:: max(-(-len(pictures) // most), 1)])
    if config.channels in (1, 3):
        return chosen
    if any(not isinstance(picture, np.ndarray) for picture in chosen):
        raise UsageError(f"Pictures of {config.channels} bands must be arrays, got files: leave --pictures out.")
    return [np.repeat(np.asarray(picture)[..., :1], config.channels, axis=2) for picture in chosen]
