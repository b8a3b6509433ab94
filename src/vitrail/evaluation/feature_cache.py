"""A cache of features in memory, by the content of images and bundle, for repeated fits on the same images."""

import collections
import hashlib
import threading

import numpy as np

from vitrail.bundles.bundle import Bundle
from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.data.dataset import Split
from vitrail.data.decode import read_file
from vitrail.evaluation.features import extract_features
from vitrail.models.activations import resolve_index
from vitrail.models.base import AnyModel

CAPACITY = 2**28  # bytes: the features of 300,000 images from a model of width 192, of 80,000 from one of width 768
_OVERHEAD = 300  # bytes of an entry besides its numbers: its key and the objects that hold it


class FeatureCache:
    """Features of images in at most `capacity` bytes.

    The key of an entry is a SHA-256 of the image (its pixels, or the bytes of its file), the fingerprint of the bundle
    (settings, preprocessing and weights), the modules and device of its model, and the layer. Threads may share a
    cache.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.used = 0
        """Bytes of all entries."""
        self._entries: collections.OrderedDict[bytes, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def extract(
        self, bundle: Bundle, images: Split, *, layer: int | None = None, batch: int = 64, workers: int = 2
    ) -> np.ndarray:
        """Return what `extract_features` computes (n, d), and compute only the images that the cache does not have."""
        contents = _content_keys(images)
        # A hook may change features, and has no content that could be hashed. Files that cannot be read raise an error.
        if _has_hooks(bundle.model) or b"" in contents:
            return self._compute(bundle, images, layer, batch, workers)
        model = _model_key(bundle, layer)
        keys = [model + key for key in contents]
        features = self._read(keys)
        missing: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            if key not in features:
                missing.setdefault(key, index)  # a repeated image is computed once
        if missing:
            missing_images = images.select(np.array([*missing.values()]))
            computed = self._compute(bundle, missing_images, layer, batch, workers)
            features |= {key: row.copy() for key, row in zip(missing, computed, strict=True)}
            # An image that was replaced while it was computed may have the features of another one.
            contents_after = _content_keys(missing_images)
            self._write(
                {
                    key: features[key]
                    for key, content in zip(missing, contents_after, strict=True)
                    if key == model + content
                }
            )
        return np.stack([features[key] for key in keys])

    def _compute(self, bundle: Bundle, images: Split, layer: int | None, batch: int, workers: int) -> np.ndarray:
        return extract_features(bundle.model, bundle.preprocess, images, layer=layer, batch=batch, workers=workers)

    def _read(self, keys: list[bytes]) -> dict[bytes, np.ndarray]:
        """Return the features that are in memory, and mark them as most recently used."""
        with self._lock:
            features = {key: self._entries[key] for key in keys if key in self._entries}
            for key in features:
                self._entries.move_to_end(key)
        return features

    def _write(self, features: dict[bytes, np.ndarray]) -> None:
        """Add entries, and drop the least recently used ones beyond the capacity."""
        with self._lock:
            for key, row in features.items():
                if key not in self._entries:  # another thread may have computed the same image
                    self._entries[key] = row
                    self.used += row.nbytes + _OVERHEAD
            while self.used > self.capacity:
                _, row = self._entries.popitem(last=False)
                self.used -= row.nbytes + _OVERHEAD


def _model_key(bundle: Bundle, layer: int | None) -> bytes:
    """Return a SHA-256 of everything besides the image that features depend on."""
    model = bundle.model
    if layer is not None:
        layer = resolve_index("Layer", layer, model.config.depth)
    device = next(model.parameters()).device
    return hashlib.sha256(f"{bundle.fingerprint()} {model!r} {device} {layer}".encode()).digest()


def _content_keys(images: Split) -> list[bytes]:
    """Return the SHA-256 of each image: of its pixels and their shape, or of the bytes of its file.

    A file that cannot be read has an empty key.
    """
    if (pixels := images.in_memory) is not None:
        shape = repr(pixels.shape[1:]).encode()
        return [hashlib.sha256(shape + np.ascontiguousarray(image).tobytes()).digest() for image in pixels]
    return [_hash_file(path) for path in images.images]


def _hash_file(path: str) -> bytes:
    try:
        return hashlib.sha256(read_file(path)).digest()
    except (CorruptFileError, UsageError):
        return b""


def _has_hooks(model: AnyModel) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
