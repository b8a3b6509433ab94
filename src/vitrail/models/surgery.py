"""Surgery: changes to a model's weights for other packages.

Each family has a subclass of `Surgery` in `families/<name>/surgery.py`, named by its configuration.
"""

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vitrail.core.registry import load_object
from vitrail.core.settings import Pair
from vitrail.models.base import AnyModel
from vitrail.models.layers import PatchEmbed, patchify

M = TypeVar("M", bound=AnyModel)


class Surgery(Generic[M]):
    """Changes to a model's weights. The defaults support none of them."""

    def __init__(self, model: M) -> None:
        self.model = model

    def permute_input_weights(self, order: Tensor) -> bool:
        """Permute input weights so that the model gives the same logits on images whose pixels are permuted by `order`
        (H * W). Return False, and change nothing, if the architecture does not allow it."""
        return False

    def with_mean_pooling(self) -> tuple[M, str | None]:
        """Return a model whose head reads the mean of all patches instead of [CLS], and a note about the change.

        Without a [CLS] token, return the model itself and None.
        """
        return self.model, None

    def with_new_head(self, classes: int, *, embedding: int = 0) -> tuple[M, list[str]]:
        """Return a copy with a zero head for `classes` classes, and notes about dropped modules. With 0 classes, the
        new head may be an embedding of this width."""
        copy = self.model.clone_with()
        copy.replace_head(classes, embedding=embedding)
        return copy, self.new_head_notes

    @property
    def new_head_notes(self) -> list[str]:
        """Notes about the modules that `replace_head` drops, for the user."""
        embedding = self.model.config.embedding
        if self.model.config.head_layers:
            return ["the hidden layers of the head are dropped"]
        return [f"the embedding of {embedding} is dropped"] if embedding else []

    @property
    def resize_note(self) -> str:
        """Note about the change of learned position embeddings by `resize`, for the user; empty without a change."""
        return ""


def surgery_of(model: AnyModel) -> Surgery[Any]:
    """Return the surgery of the model's family."""
    return load_object(model.config.surgery)(model)


def share_weights(model: M, **settings: Any) -> M:
    """Return a model with changed settings that shares the weights of `model`."""
    return model.rebuild(model.config.replace(**settings), model.state_dict())


def split_order(order: Tensor, resolution: Pair, patch: Pair) -> tuple[Tensor, Tensor] | None:
    """Split an order of pixels (H * W) into an order of patches (N) and an order of the pixels within each patch (P *
    P).

    Return None if the order moves pixels from one patch to several, or differently in each patch.
    """
    raster = torch.arange(order.numel()).view(1, 1, *resolution)
    raster_NF, order_NF = (patchify(pixels.view(1, 1, *resolution), patch)[0] for pixels in (raster, order.cpu()))
    index = torch.empty(order.numel(), dtype=torch.long)
    index[raster_NF.flatten()] = torch.arange(order.numel())
    patch_NF, pixel_NF = index[order_NF] // raster_NF.shape[1], index[order_NF] % raster_NF.shape[1]
    can_split = (patch_NF == patch_NF[:, :1]).all() and (pixel_NF == pixel_NF[:1]).all()
    return (patch_NF[:, 0], pixel_NF[0]) if can_split else None


@torch.no_grad()
def permute_kernels(patch_embed: PatchEmbed, inside: Tensor) -> None:
    """Permute the projection, in place, for patches whose pixels are permuted by `inside` (P * P)."""
    weight = patch_embed.proj.weight
    weight.copy_(weight.flatten(2)[..., inside.to(weight.device)].view_as(weight))
