"""Fixed permutations of pixels, the same for all images, at three levels.

within      the pixels of each patch, all patches alike
patches     the order of patches
pixels      all pixels of the image
"""

from typing import Any

import torch

from vitrail import chance
from vitrail.errors import UsageError
from vitrail.models.base import AnyModel
from vitrail.settings import Pair

LEVELS = ("within", "patches", "pixels")


def permutation(level: str, resolution: Pair, patch: Pair, seed: int) -> torch.Tensor:
    """Which pixel of the image, in raster order, goes to each place (H * W)."""
    height, width = resolution
    places = torch.arange(height * width).view(resolution)
    if level == "pixels":
        return places.flatten()[_order(height * width, seed)]
    rows, columns = height // patch[0], width // patch[1]
    cells = places.view(rows, patch[0], columns, patch[1]).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    if level == "within":
        cells = cells[:, _order(patch[0] * patch[1], seed)]
    elif level == "patches":
        cells = cells[_order(rows * columns, seed)]
    else:
        raise UsageError(f"Level must be one of {', '.join(LEVELS)}, got {level!r}.")
    return cells.view(rows, columns, *patch).permute(0, 2, 1, 3).flatten()


def permute_input(model: AnyModel, level: str, patch: Pair, seed: int) -> None:
    """Let the model see every image with its pixels permuted from now on: in training, after augmentation."""
    order = permutation(level, model.config.resolution, tuple(patch), seed)

    def hook(_model: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        images, *rest = arguments
        moved = images.flatten(2)[..., order.to(images.device)].view(images.shape)
        return moved, *rest

    model.register_forward_pre_hook(hook)


def _order(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(chance.permutation(count, seed, stream="lab permutation"))
