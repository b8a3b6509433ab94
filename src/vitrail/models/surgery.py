"""Changes to the weights of a model that other packages ask for, whatever its family.

The surgery of a family is a subclass in `families/<name>/surgery.py`, which its configuration names.
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
    """Changes to the weights of a model. The default supports none of them."""

    def __init__(self, model: M) -> None:
        self.model = model

    def permute_input_weights(self, order: Tensor) -> bool:
        """Permute input weights so that the model gives the same logits on images whose pixels are permuted by `order`
        (H * W). Return False, and change nothing, if the architecture cannot."""
        return False

    def with_mean_pooling(self) -> tuple[M, str | None]:
        """The model with a head that reads the mean of all patches instead of [CLS], and a note about the change; the
        model itself and None if there is no [CLS] token."""
        return self.model, None

    def with_new_head(self, classes: int, *, embedding: int = 0) -> tuple[M, list[str]]:
        """A copy with a zero head for `classes` classes, or for none with an embedding of this width; and notes about
        the parts that it drops."""
        copy = self.model.clone_with()
        copy.replace_head(classes, embedding=embedding)
        return copy, self.new_head_notes

    @property
    def new_head_notes(self) -> list[str]:
        """The parts that `replace_head` drops, in a few words each."""
        embedding = self.model.config.embedding
        return [f"the embedding of {embedding} is dropped"] if embedding else []

    @property
    def resize_note(self) -> str:
        """How `resize` changes learned position embeddings, in a few words; empty if it does not."""
        return ""


def surgery_of(model: AnyModel) -> Surgery[Any]:
    """The surgery that the model's configuration names."""
    return load_object(model.config.surgery)(model)


def share_weights(model: M, **settings: Any) -> M:
    """A model with some settings changed that shares the weights of this one."""
    return model.rebuild(model.config.replace(**settings), model.state_dict())


def split_order(order: Tensor, resolution: Pair, patch: Pair) -> tuple[Tensor, Tensor] | None:
    """An order of pixels (H * W) as one of patches (N) and one of the pixels in each, the same for all patches; None
    for an order that is not of that form."""
    raster = torch.arange(order.numel()).view(1, 1, *resolution)
    cells_NF, moved_NF = (patchify(pixels.view(1, 1, *resolution), patch)[0] for pixels in (raster, order.cpu()))
    index = torch.empty(order.numel(), dtype=torch.long)
    index[cells_NF.flatten()] = torch.arange(order.numel())
    number_NF, inside_NF = index[moved_NF] // cells_NF.shape[1], index[moved_NF] % cells_NF.shape[1]
    is_of_patches = (number_NF == number_NF[:, :1]).all() and (inside_NF == inside_NF[:1]).all()
    return (number_NF[:, 0], inside_NF[0]) if is_of_patches else None


@torch.no_grad()
def permute_kernels(patch_embed: PatchEmbed, inside: Tensor) -> None:
    """Permute the kernels for patches whose pixels are permuted by `inside` (P * P)."""
    weight = patch_embed.proj.weight
    weight.copy_(weight.flatten(2)[..., inside.to(weight.device)].view_as(weight))
