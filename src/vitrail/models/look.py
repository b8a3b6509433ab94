"""`look`: recording the intermediate results of a model. The model runs as usual, with fused kernels."""

import contextlib
import operator
from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.models.base import AnyModel, Seen


@torch.no_grad()
def look(model: AnyModel, images: Tensor, layers: Iterable[int] | None = None, *, attention: bool = True) -> Seen:
    """Run `model` on a batch of preprocessed `images` and return its intermediate results.

    `layers` are the blocks to record, from 0 (negative: from the last); default all. Their attention weights are
    recomputed from the input of the fused kernel, so the kernel stays in use, the logits are bit-identical, and memory
    grows only with the recorded layers; `attention=False` omits them. The model runs in evaluation mode, and its mode
    is restored.
    """
    depth = model.config.depth
    try:
        chosen = range(depth) if layers is None else [operator.index(layer) for layer in layers]
    except TypeError:
        raise UsageError(f"Layers must be a list of integers, got {layers!r}.") from None
    seen = Seen(frozenset(count_from("Layer", layer, depth) for layer in chosen), with_attention=attention)
    with evaluating(model):
        model(images, seen)
    return seen


def count_from(what: str, number: int, count: int) -> int:
    """The index of a layer (or head) from 0, where a negative one counts from the last (-1)."""
    if not -count <= number < count:
        raise UsageError(f"{what} must be from 0 to {count - 1} (or -1 to {-count} from the end), got {number}.")
    return number % count


@contextlib.contextmanager
def evaluating(model: AnyModel) -> Generator[None]:
    """Context in which the model is in evaluation mode; afterwards every module has its previous mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
