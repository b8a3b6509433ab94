"""Looking at a model while it works. The model runs its usual way; what it shows is written down beside it."""

import contextlib
import operator
from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.models.base import AnyModel, Seen


@torch.no_grad()
def look(model: AnyModel, images: Tensor, layers: Iterable[int] | None = None, *, attention: bool = True) -> Seen:
    """Run `model` on a batch of preprocessed `images` and return what passed by.

    `layers` are the blocks to watch, from 0 (negative: from the last); default all. Attention is recomputed for them
    from the same tokens that the fused kernel got, so the kernel stays on, the logits are bit-identical, and memory
    grows only with the layers asked for; `attention=False` leaves it out. The model is looked at in evaluation mode and
    left as it was.
    """
    depth = model.config.depth
    try:
        chosen = range(depth) if layers is None else [operator.index(layer) for layer in layers]
    except TypeError:
        raise UsageError(f"Layers must be a list of integers, got {layers!r}.") from None
    seen = Seen(frozenset(count_from("Layer", layer, depth) for layer in chosen), weighs=attention)
    with evaluating(model):
        model(images, seen)
    return seen


def count_from(what: str, number: int, count: int) -> int:
    """The number of a layer (or head) from the first, where it may have been counted from the last (-1)."""
    if not -count <= number < count:
        raise UsageError(f"{what} must be from 0 to {count - 1} (or -1 to {-count} from the end), got {number}.")
    return number % count


@contextlib.contextmanager
def evaluating(model: AnyModel) -> Generator[None]:
    """Evaluation mode for a while; then every module is again in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
