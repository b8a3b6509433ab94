"""Batches of images in an order that is a pure function of (seed, epoch).

Every sample comes exactly once in an epoch, whatever the batch size and the number of workers and ranks; the last batch
is smaller. Each rank takes its part of the global batch (complete pairs of neighbours, if images are mixed), so that
one rank or many see the same samples in the same step, with the same pixels.

Workers are threads (decoding and resizing run outside Python's lock): nothing is pickled or copied between processes,
and their number affects only speed.
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

_CHUNK = 8  # images that a worker decodes at a time
_SMALL = 64 * 64  # pixels up to which images in memory are treated as one batch


@dataclasses.dataclass(frozen=True)
class Batch:
    """One rank's part of a step."""

    pixels: Tensor
    """Augmented images, uint8 (B, H, W, C); `Preprocess.scale` normalises them."""
    labels: Tensor
    """Class indices (B)."""
    indices: np.ndarray
    """Indices of the samples in the split."""
    weights: Tensor
    """1, or 0 for a damaged image that is skipped (B)."""
    mixture: Mixture | None
    """How to mix the images in pairs (see `data.augment.pipeline.mix`)."""
    global_size: int
    """Number of samples in the step over all ranks."""


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of samples in one epoch."""
    return rng.permutation(count, seed, epoch, stream="order")


def rank_share(count: int, rank: int, ranks: int, unit: int = 1) -> slice:
    """The slice of a batch of `count` that one rank computes. Parts are as equal as possible, the first ones larger;
    they consist of complete pairs if `unit` is 2."""
    units = -(-count // unit)
    first, last = (min(unit * -(-units * place // ranks), count) for place in (rank, rank + 1))
    return slice(first, last)


class Loader:
    """`for batch in loader.epoch(3, start=17)` begins with the eighteenth step of the fourth epoch."""

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
        """Images that could not be read so far, and why."""
        self.settings.check_channels(preprocess.channels)
        if preprocess.channels not in (1, 3) and split.in_memory is None:
            raise UsageError(f"Image files have 1 or 3 channels, got {preprocess.channels}. Use an .npz file.")

    @property
    def steps(self) -> int:
        """Number of steps in an epoch."""
        return -(-len(self.split) // self.batch)

    def order(self, epoch: int) -> np.ndarray:
        """Indices of all samples in the order of the epoch."""
        count = len(self.split)
        return epoch_order(count, self.seed, epoch) if self.shuffle else np.arange(count)

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Generator[Batch]:
        """This rank's part of each batch, from step `start` on."""
        check_integer("start", start, low=0, high=self.steps)
        order = self.order(epoch)
        shares, unit = [], 2 if self.settings.mixes else 1
        for step in range(start, self.steps):
            together = order[step * self.batch : (step + 1) * self.batch]
            shares.append((together[rank_share(len(together), self.rank, self.ranks, unit)], len(together)))
        pixels = self.split.in_memory
        is_small = pixels is not None and max(np.prod(pixels.shape[1:3]), np.prod(self.preprocess.resolution)) <= _SMALL
        chunk = self.batch if is_small else _CHUNK
        pieces = [
            [indices[at : at + chunk] for at in range(0, len(indices), chunk)] or [indices] for indices, _ in shares
        ]
        jobs = (lambda piece=piece: self._prepare(piece, epoch) for group in pieces for piece in group)
        # Small images are held up by Python's lock: more than one thread would wait for the other.
        workers = min(self.workers, 1) if is_small else self.workers
        good = 0
        prepared = prefetch(jobs, workers, ahead=2 * max(map(len, pieces), default=1))
        try:
            for (indices, global_size), group in zip(shares, pieces, strict=True):
                batch = self._assemble(indices, global_size, epoch, [next(prepared) for _ in group])
                good += int(batch.weights.sum())
                yield batch
            # A part of an epoch, or of its images, may be damaged altogether: then other ranks know better.
            if not good and shares and start == 0 and self.ranks == 1:
                raise CorruptFileError(
                    f"No image of {self.split.name} can be read: {next(iter(self.damaged.values()))}"
                )
        finally:
            prepared.close()

    def _prepare(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels of some samples and the index each comes from: another one for a substitute, -1 for a skipped one."""
        stream = Stream(self.seed, epoch, indices)
        memory = self.split.in_memory
        if memory is not None and len(indices):
            return augment(memory[indices], stream, self.settings, self.preprocess), indices
        found = [self._read(int(index)) for index in indices]
        owners = np.array([owner for _, owner in found], np.int64)
        pixels = np.zeros((len(indices), *self.preprocess.resolution, self.preprocess.channels), np.uint8)
        is_good = owners >= 0
        if is_good.any():
            images = [image for image, _ in found if image is not None]
            pixels[is_good] = augment(images, stream.take(is_good), self.settings, self.preprocess)
        return pixels, owners

    def _read(self, index: int) -> tuple[Image.Image | np.ndarray | None, int]:
        """A decoded image and its index; damaged images are handled as `on_damage` says."""
        count = len(self.split)
        for place in range(index, index + count):
            path = self.split.images[place % count]
            try:
                with watchdog.step(lambda path=path: f"decoding {str(path)!r}"):
                    if self.cache is None:
                        return self.preprocess.read(path), place % count
                    return self.cache.read(path, self.preprocess), place % count
            except VitrailError as error:
                if self.on_damage == "error":
                    raise CorruptImageError(str(error), path=path) from None
                self.damaged[str(path)] = str(error)
                if self.on_damage == "skip":
                    return None, -1
        raise CorruptFileError(f"No image of {self.split.name} can be read: {next(iter(self.damaged.values()))}")

    def _assemble(
        self, indices: np.ndarray, global_size: int, epoch: int, done: list[tuple[np.ndarray, np.ndarray]]
    ) -> Batch:
        pixels = done[0][0] if len(done) == 1 else np.concatenate([part for part, _ in done])
        owners = np.concatenate([part for _, part in done])
        is_skipped = owners < 0
        stream = Stream(self.seed, epoch, indices)
        return Batch(
            pixels=torch.from_numpy(pixels),
            labels=torch.from_numpy(self.split.labels[np.where(is_skipped, indices, owners)]),
            indices=indices,
            weights=torch.from_numpy((~is_skipped).astype(np.float32)),
            mixture=self.settings.mixture(stream, self.preprocess.resolution, is_skipped),
            global_size=global_size,
        )
