"""The colours of the data: iGPT reads and writes pixels in a palette made by k-means (section 3.1 of its paper)."""

import numpy as np
import torch
from torch import Tensor

from vitrail import chance
from vitrail.data.dataset import Split
from vitrail.data.loader import Loader
from vitrail.images.preprocess import Preprocess

_PICTURES, _PIXELS, _ROUNDS = 512, 65_536, 25


def make_palette(split: Split, preprocess: Preprocess, colours: int, seed: int) -> Tensor:
    """The centres of `colours` clusters of pixels of the training pictures, (P, C), in preprocessed units."""
    chosen = chance.permutation(len(split), seed, draw="palette pictures")[:_PICTURES]
    loader = Loader(split.take(np.sort(chosen)), preprocess, batch=64, shuffle=False, on_damage="substitute")
    images = torch.cat([preprocess.scale(batch.pixels) for batch in loader.epoch()])
    pixels = images.movedim(1, -1).reshape(-1, preprocess.channels)
    some = chance.permutation(len(pixels), seed, draw="palette pixels")[:_PIXELS]
    pixels = pixels[torch.from_numpy(some)]
    # Distinct colours first: a picture's flat background would otherwise fill the palette with copies of one.
    distinct = torch.unique(pixels, dim=0)
    order = chance.permutation(len(distinct), seed, draw="palette start")
    centres = distinct[torch.from_numpy(order[np.arange(colours) % len(order)])].clone()
    for _ in range(_ROUNDS):
        nearest = (centres.square().sum(1) - 2 * pixels @ centres.T).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, pixels)
        counts = torch.bincount(nearest, minlength=colours)[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres[torch.argsort(centres.sum(1))]
