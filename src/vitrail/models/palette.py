"""Palettes: pixels rounded to one of P colours, for models whose tokens are pixels.

Shapes: B images, N pixels in raster order, C channels, P colours, M pixels of many images. Colours are in preprocessed
units.
"""

import contextlib

import numpy as np
import torch
from torch import Tensor

from vitrail.core import rng
from vitrail.core.settings import Pair

_KMEANS_ITERATIONS = 25


def nearest_colours(images_BCHW: Tensor, palette_PC: Tensor) -> Tensor:
    """Return the index of the nearest palette colour of every pixel (B, N)."""
    pixels_BNC = images_BCHW.flatten(2).transpose(1, 2).float()
    palette_PC = palette_PC.float()
    # In full precision even under autocast: a rounded distance selects another token.
    device = images_BCHW.device.type
    with contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        # |p - c|^2 without |p|^2, which is the same for every colour c of the palette.
        return (palette_PC.square().sum(1) - 2 * pixels_BNC @ palette_PC.T).argmin(dim=-1)


def paint(colours_BN: Tensor, palette_PC: Tensor, resolution: Pair) -> Tensor:
    """Return preprocessed images (B, C, H, W) from palette indices: the inverse of `nearest_colours`."""
    return palette_PC[colours_BN].movedim(-1, 1).unflatten(2, resolution)


def cluster(pixels_MC: Tensor, colours: int, seed: int) -> Tensor:
    """Return the centres (P, C) of `colours` clusters of pixels by k-means, from dark to bright."""
    # Start from distinct colours: the flat background of an image would fill the palette with copies of one colour.
    distinct = torch.unique(pixels_MC, dim=0)
    order = rng.permutation(len(distinct), seed, stream="palette start")
    centres = distinct[torch.from_numpy(order[np.arange(colours) % len(order)])].clone()
    for _ in range(_KMEANS_ITERATIONS):
        nearest = (centres.square().sum(1) - 2 * pixels_MC @ centres.T).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, pixels_MC)
        counts = torch.bincount(nearest, minlength=colours)[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres[torch.argsort(centres.sum(1))]
