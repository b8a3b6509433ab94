"""Fixed permutations of pixels at three levels. The same permutation applies to all images.

within      the pixels of each patch, in the same way for all patches
patches     the order of patches
pixels      all pixels of the image
"""

from typing import Any

import torch

from vitrail.core import rng
from vitrail.core.errors import UsageError
from vitrail.core.settings import Pair
from vitrail.models.base import AnyModel
from vitrail.models.layers import patchify, unpatchify
from vitrail.models.surgery import surgery_of

LEVELS = ("within", "patches", "pixels")


def permutation(level: str, resolution: Pair, patch: Pair, seed: int) -> torch.Tensor:
    """Return a random permutation of pixels at a level: the source pixel of each position in raster order (H * W)."""
    height, width = resolution
    indices = torch.arange(height * width).view(resolution)
    if level == "pixels":
        return indices.flatten()[_draw_order(height * width, seed)]
    grid = height // patch[0], width // patch[1]
    if level == "patches":
        return patch_order(_draw_order(grid[0] * grid[1], seed), resolution, patch)
    if level == "within":
        patches = patchify(indices[None, None], patch)[..., _draw_order(patch[0] * patch[1], seed)]
        return unpatchify(patches, grid, patch).flatten()
    raise UsageError(f"Level must be one of {', '.join(LEVELS)}, got {level!r}.")


def patch_order(order_N: torch.Tensor, resolution: Pair, patch: Pair) -> torch.Tensor:
    """Return the source pixel of each position (H * W) if patches are put in this order."""
    indices = torch.arange(resolution[0] * resolution[1]).view(1, 1, *resolution)
    grid = resolution[0] // patch[0], resolution[1] // patch[1]
    return unpatchify(patchify(indices, patch)[:, order_N], grid, patch).flatten()


def move(images_BCHW: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return images with their pixels in this order."""
    return images_BCHW.flatten(2)[..., order.to(images_BCHW.device)].view(images_BCHW.shape)


def permute_input_weights(model: AnyModel, order: torch.Tensor) -> bool:
    """Permute input weights, in place, so that the model gives the same logits on images permuted by `order`.

    Return False, and change nothing, if the architecture cannot.
    """
    return surgery_of(model).permute_input_weights(order)


def permute_input(model: AnyModel, level: str, patch: Pair, seed: int) -> None:
    """Add a hook that permutes the pixels of every input. In training it runs after augmentation."""
    order = permutation(level, model.config.resolution, tuple(patch), seed)

    def hook(_model: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        images, *rest = arguments
        return move(images, order), *rest

    model.register_forward_pre_hook(hook)


def _draw_order(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(rng.permutation(count, seed, stream="lab permutation"))
