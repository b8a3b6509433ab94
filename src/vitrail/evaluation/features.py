"""Features of images from a frozen model, computed once and cached.

By default the features are the input of the head, before a representation layer. Features of a layer are its pooled
output without normalisation: the [CLS] token if the model has one, otherwise the mean over positions.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from vitrail.bundles.bundle import Bundle, bundle_key
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.core.files import atomic_folder, read_json, user_folder, verify_checksums, write_json
from vitrail.core.terminal import Meter
from vitrail.data.dataset import Split
from vitrail.data.loader import Loader
from vitrail.data.preprocess import Preprocess
from vitrail.models.activations import look, resolve_index
from vitrail.models.base import AnyModel

_FILES = ("features.safetensors", "key.json")


def extract_features(
    model: AnyModel,
    preprocess: Preprocess,
    split: Split,
    *,
    layer: int | None = None,
    mirrored: bool = False,
    batch: int = 64,
    workers: int = 2,
    on_damage: Literal["error", "skip"] = "error",
    damaged: dict[str, str] | None = None,
    meter: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Return features (n, d), float32, of all images of a split in order, or of their mirror images.

    Works with every family and layer. With `on_damage` "skip", the features of a corrupt image are NaN, and its name
    and the reason are added to `damaged`. `meter` is called with the number of processed images. Raises VitrailError if
    features are not finite.
    """
    if layer is not None:
        layer = resolve_index("Layer", layer, model.config.depth)
    weight = next(model.parameters())
    batches, readable_batches = [], []
    loader = Loader(split, preprocess, batch=batch, shuffle=False, workers=workers, on_damage=on_damage)
    for batch_data in loader.epoch():
        images = preprocess.scale(batch_data.pixels.to(weight.device)).to(weight.dtype)
        images = images.flip(-1) if mirrored else images
        batches.append(_compute_features(model, images, layer).float().cpu().numpy())
        readable_batches.append(batch_data.weights.numpy() > 0)
        if meter is not None:
            meter(sum(map(len, batches)))
    features, is_readable = np.concatenate(batches), np.concatenate(readable_batches)
    if not np.isfinite(features[is_readable]).all():
        raise VitrailError(f"Features of {split.name} must be finite, got NaN or infinity. Did training diverge?")
    features[~is_readable] = np.nan
    if damaged is not None:
        damaged |= loader.damaged
    return features


def _compute_features(model: AnyModel, images: Tensor, layer: int | None) -> Tensor:
    """Return features (B, d) of preprocessed images, from a layer or from the input of the head."""
    activations = look(model, images, [] if layer is None else [layer], attention=False)
    output = activations.steps["pooled"] if layer is None else _pool_layer(model, activations.steps[f"blocks.{layer}"])
    # A head that predicts pixels reads every position.
    return output.mean(dim=1) if output.ndim == 3 else output


def pooling_name(model: AnyModel, layer: int | None) -> str:
    """Return how the output of a layer is pooled to the features of an image, for display."""
    if layer is None:
        return "as the head reads"
    return "[CLS] token" if _reads_cls_token(model) else "mean"


def _pool_layer(model: AnyModel, output: Tensor) -> Tensor:
    """Pool the output of a layer to one vector per image (B, D).

    The vector is the [CLS] token if the head reads it, otherwise the mean over positions without prefix tokens.
    """
    if output.ndim == 4:
        return output.mean(dim=(2, 3))
    if output.ndim == 2:
        return output
    return output[:, 0] if _reads_cls_token(model) else output[:, model.config.prefix :].mean(dim=1)


def _reads_cls_token(model: AnyModel) -> bool:
    """Return whether the head of a model reads the [CLS] token."""
    layout = model.layout()
    return layout is not None and layout.reads == "[CLS]"


class FeatureStore:
    """Features of splits, cached in a folder. `of(split)` returns what `extract_features` would compute.

    The key of an entry is a SHA-256 of the bundle's manifest, the preprocessing, the images and the layer. Entries are
    written atomically. A corrupt entry is computed again.
    """

    def __init__(
        self,
        bundle: Bundle,
        path: str | Path | Bundle,
        *,
        layer: int | None = None,
        folder: str | Path | None = None,
        workers: int = 2,
    ) -> None:
        """Open the cache of a bundle.

        `path` is the path from which `bundle` was loaded, or `bundle` itself. `folder` is by default in the user's
        cache. Raises UsageError if another folder cannot be written.
        """
        self.bundle, self.workers = bundle, workers
        self.layer = None if layer is None else resolve_index("Layer", layer, bundle.model.config.depth)
        self.folder = user_folder() / "features" if folder is None else Path(folder)
        self.hits = 0
        self.notes: list[str] = []
        """Notes for the user: cached features that were corrupt or could not be stored."""
        self._manifest = bundle_key(path)
        if folder is not None:
            _check_writable(self.folder)

    def of(self, split: Split) -> np.ndarray:
        """Return the features of a split, from the cache if possible."""
        key = self._key(split)
        entry = self.folder / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        if os.path.lexists(entry):
            try:
                features = _read_entry(entry, key)
            except CorruptFileError as error:
                self.notes.append(f"stored features cannot be used and are computed again: {error}")
            else:
                self.hits += 1
                return features
        model, preprocess = self.bundle.model, self.bundle.preprocess
        meter = Meter(len(split), "images")
        features = extract_features(model, preprocess, split, layer=self.layer, workers=self.workers, meter=meter)
        try:
            with atomic_folder(entry, force=True, owned=True) as new_entry:
                save_file({"features": features}, new_entry / "features.safetensors")
                write_json(new_entry / "key.json", key)
        except (VitrailError, SafetensorError) as error:
            self.notes.append(f"features are not cached: {error}")
        return features

    def _key(self, split: Split) -> dict[str, Any]:
        """Return everything that the features of a split depend on."""
        device = next(self.bundle.model.parameters()).device.type
        return {
            "format": 1,
            "bundle": self._manifest,
            "preprocess": self.bundle.preprocess.to_json(),
            "pictures": split.fingerprint(),
            "layer": self.layer,
            "pillow": PIL.__version__,
            "torch": str(torch.__version__),
            **({} if device == "cpu" else {"device": device}),
        }


def _read_entry(entry: Path, key: dict[str, Any]) -> np.ndarray:
    """Read the features of a cache entry. Raises CorruptFileError if a file or the key is wrong."""
    verify_checksums(entry, _FILES)
    if read_json(entry / "key.json") != key:
        raise CorruptFileError(path=entry, cause="has the key of another entry")
    try:
        return load_file(entry / "features.safetensors")["features"]
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(path=entry, cause=f"cannot be read ({error})") from None


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "permission denied"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    if reason:
        raise UsageError(f"Cache must be a folder that can be written, got {str(folder)!r} ({reason}).")
