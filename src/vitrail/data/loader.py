"""Batches of images in an order that is a pure function of (seed, epoch).

Every sample comes exactly once per epoch, for any batch size and any number of workers and ranks; the last batch may be
smaller. Each rank takes its part of the global batch (complete pairs of neighbours if images are mixed). So any number
of ranks see the same samples in the same step, with the same pixels.

Workers are threads, because decoding and resizing release the GIL. Nothing is pickled or copied between processes, and
the number of workers affects only speed.
"""

import dataclasses
from collections.abc import Generator
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.core import rng, watchdog
from vitrail.core.errors import CorruptFileError, CorruptImageError, UsageError, VitrailError
from vitrail.core.rng import Stream
from vitrail.core.settings import check_integer
from vitrail.data.augment.config import Augment
from vitrail.data.augment.mixing import Mixture
from vitrail.data.augment.pipeline import augment
from vitrail.data.cache import ImageCache
from vitrail.data.dataset import Split
from vitrail.data.prefetch import prefetch
from vitrail.data.preprocess import Preprocess

OnDamage = Literal["error", "skip", "substitute"]

_PIECE_SIZE = 8  # images per job of a worker
_SMALL = 64 * 64  # pixels; images in memory up to this size are augmented in batches


@dataclasses.dataclass(frozen=True)
class Batch:
    """One rank's part of a step."""

    pixels: Tensor
    """Augmented images, uint8 (B, H, W, C). `Preprocess.scale` normalises them."""
    labels: Tensor
    """Class indices (B)."""
    indices: np.ndarray
    """Indices of the samples in the split (B)."""
    weights: Tensor
    """1, or 0 for a corrupt image that is skipped (B)."""
    mixture: Mixture | None
    """How to mix the images in pairs (see `data.augment.pipeline.mix`)."""
    global_size: int
    """Number of samples in the step over all ranks."""


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the samples in an epoch."""
    return rng.permutation(count, seed, epoch, stream="order")


def rank_share(count: int, rank: int, ranks: int, unit: int = 1) -> slice:
    """Return the slice of a batch of `count` samples that one rank computes.

    Slices are as equal as possible, the first ones larger. They start at multiples of `unit`: 2 keeps pairs together.
    """
    units = -(-count // unit)
    first, last = (min(unit * -(-units * boundary // ranks), count) for boundary in (rank, rank + 1))
    return slice(first, last)


class Loader:
    """Load the batches of a split in a reproducible order.

    `for batch in loader.epoch(3, start=17)` starts at step 17 of epoch 3; both count from 0.
    """

    def __init__(
        self,
        split: Split,
        preprocess: Preprocess,
        *,
        batch: int,
        seed: int = 0,
        shuffle: bool = True,
        settings: Augment | None = None,
        workers: int = 2,
        rank: int = 0,
        ranks: int = 1,
        cache: ImageCache | None = None,
        on_damage: OnDamage = "error",
    ) -> None:
        batch = check_integer("batch", batch, low=1, high=1_000_000)
        workers = check_integer("workers", workers, low=0, high=256)
        seed = check_integer("seed", seed, low=0, high=2**63 - 1)
        check_integer("ranks", ranks, low=1, high=1_000_000)
        check_integer("rank", rank, low=0, high=ranks - 1)
        if on_damage not in get_args(OnDamage):
            raise UsageError(f"On damage must be one of {', '.join(get_args(OnDamage))}, got {on_damage!r}.")
        if not len(split):
            raise UsageError(f"Split must have images, got an empty {split.name}.")
        self.split, self.preprocess, self.batch, self.seed, self.shuffle = split, preprocess, batch, seed, shuffle
        self.settings = settings or Augment()
        self.workers, self.rank, self.ranks, self.cache, self.on_damage = workers, rank, ranks, cache, on_damage
        self.damaged: dict[str, str] = {}
        """Error message of each image that could not be read so far, by path."""
        self.settings.check_channels(preprocess.channels)
        if preprocess.channels not in (1, 3) and split.in_memory is None:
            raise UsageError(f"Image files have 1 or 3 channels, got {preprocess.channels}. Use an .npz file.")

    @property
    def steps(self) -> int:
        """Number of steps in an epoch."""
        return -(-len(self.split) // self.batch)

    def order(self, epoch: int) -> np.ndarray:
        """Return the indices of all samples in the order of an epoch."""
        count = len(self.split)
        return epoch_order(count, self.seed, epoch) if self.shuffle else np.arange(count)

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Generator[Batch]:
        """Yield this rank's part of each batch, starting at step `start`."""
        check_integer("start", start, low=0, high=self.steps)
        order = self.order(epoch)
        shares, unit = [], 2 if self.settings.mixes else 1
        for step in range(start, self.steps):
            batch_indices = order[step * self.batch : (step + 1) * self.batch]
            share = rank_share(len(batch_indices), self.rank, self.ranks, unit)
            shares.append((batch_indices[share], len(batch_indices)))
        pixels = self.split.in_memory
        is_small = pixels is not None and max(np.prod(pixels.shape[1:3]), np.prod(self.preprocess.resolution)) <= _SMALL
        piece_size = self.batch if is_small else _PIECE_SIZE
        pieces = [
            [indices[begin : begin + piece_size] for begin in range(0, len(indices), piece_size)] or [indices]
            for indices, _ in shares
        ]
        jobs = (lambda piece=piece: self._prepare_piece(piece, epoch) for group in pieces for piece in group)
        # Work on small images is dominated by Python code under the GIL: a second thread would not help.
        workers = min(self.workers, 1) if is_small else self.workers
        readable = 0
        prepared = prefetch(jobs, workers, ahead=2 * max(map(len, pieces), default=1))
        try:
            for (indices, global_size), group in zip(shares, pieces, strict=True):
                batch = self._assemble_batch(indices, global_size, epoch, [next(prepared) for _ in group])
                readable += int(batch.weights.sum())
                yield batch
            # A part of an epoch, or the part of one rank, may be unreadable although other images are readable.
            if not readable and shares and start == 0 and self.ranks == 1:
                raise CorruptFileError(
                    f"No image of {self.split.name} can be read: {next(iter(self.damaged.values()))}"
                )
        finally:
            prepared.close()

    def _prepare_piece(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels of these samples and the index that each image came from.

        The index differs from the sample's if another image replaces a corrupt one; it is -1 for a skipped image.
        """
        stream = Stream(self.seed, epoch, indices)
        memory = self.split.in_memory
        if memory is not None and len(indices):
            return augment(memory[indices], stream, self.settings, self.preprocess), indices
        decoded = [self._read_image(int(index)) for index in indices]
        origins = np.array([origin for _, origin in decoded], np.int64)
        pixels = np.zeros((len(indices), *self.preprocess.resolution, self.preprocess.channels), np.uint8)
        is_readable = origins >= 0
        if is_readable.any():
            images = [image for image, _ in decoded if image is not None]
            pixels[is_readable] = augment(images, stream.take(is_readable), self.settings, self.preprocess)
        return pixels, origins

    def _read_image(self, index: int) -> tuple[Image.Image | np.ndarray | None, int]:
        """Return a decoded image and the index that it came from, or (None, -1) for a skipped image.

        `on_damage` decides about a corrupt image: raise an error, skip it, or take the next readable image.
        """
        count = len(self.split)
        for origin in (number % count for number in range(index, index + count)):
            path = self.split.images[origin]
            try:
                with watchdog.watch_step(lambda path=path: f"decoding {str(path)!r}"):
                    if self.cache is None:
                        return self.preprocess.read(path), origin
                    return self.cache.read(path, self.preprocess), origin
            except VitrailError as error:
                if self.on_damage == "error":
                    raise CorruptImageError(str(error), path=path) from None
                self.damaged[str(path)] = str(error)
                if self.on_damage == "skip":
                    return None, -1
        raise CorruptFileError(f"No image of {self.split.name} can be read: {next(iter(self.damaged.values()))}")

    def _assemble_batch(
        self, indices: np.ndarray, global_size: int, epoch: int, pieces: list[tuple[np.ndarray, np.ndarray]]
    ) -> Batch:
        """Join the pieces of a batch that `_prepare_piece` returned."""
        pixels = pieces[0][0] if len(pieces) == 1 else np.concatenate([part for part, _ in pieces])
        origins = np.concatenate([part for _, part in pieces])
        is_skipped = origins < 0
        stream = Stream(self.seed, epoch, indices)
        return Batch(
            pixels=torch.from_numpy(pixels),
            labels=torch.from_numpy(self.split.labels[np.where(is_skipped, indices, origins)]),
            indices=indices,
            weights=torch.from_numpy((~is_skipped).astype(np.float32)),
            mixture=self.settings.mixture(stream, self.preprocess.resolution, is_skipped),
            global_size=global_size,
        )
