"""`look`: recording the intermediate results of a model. The model runs as usual, with fused kernels."""

import contextlib
from collections.abc import Generator, Iterable

import torch
from torch import Tensor, nn

from vitrail.models.base import AnyModel, Seen


def look(
    model: AnyModel,
    images: Tensor,
    layers: Iterable[int] | None = None,
    *,
    attention: bool = True,
    inside: Iterable[int] | None = (),
    gradients: bool = False,
) -> Seen:
    """Run `model` on a batch of preprocessed `images` and return its intermediate results.

    `layers` are the blocks to record, from 0 (negative: from the last); default all. Their attention weights are
    recomputed from the input of the fused kernel, so the kernel stays in use, the logits are bit-identical, and memory
    grows only with the recorded layers; `attention=False` omits them. `inside` are layers of a Transformer whose every
    step is recorded, from LayerNorm to the MLP (see `Seen.steps`); None means all. The model runs in evaluation mode,
    and its mode is restored. `gradients=True` keeps what is needed to differentiate any of the results.

        >>> model = vitrail.create("ViT-Nano/7")
        >>> seen = vitrail.look(model, torch.zeros(1, 1, 28, 28), layers=[0, -1])
        >>> list(seen.steps)
        ['patches', 'projected', 'tokens', 'blocks.0', 'blocks.3', 'pooled']
        >>> seen.attention[3].shape
        torch.Size([1, 4, 17, 17])
        >>> vitrail.look(model, torch.zeros(1, 1, 28, 28), inside=[0]).steps["blocks.0.q"].shape
        torch.Size([1, 4, 17, 16])
    """
    with torch.set_grad_enabled(gradients), evaluating(model):
        return model.observe(images, layers, attention=attention, inside=inside)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Context in which the model is in evaluation mode; afterwards every module has its previous mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
