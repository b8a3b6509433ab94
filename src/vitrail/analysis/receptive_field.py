"""Receptive fields: how strongly each pixel changes the state at the centre of a layer, for any family.

The inductive bias of an architecture is visible before training: which pixels *can* change a state at all.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.core.errors import UsageError
from vitrail.core.settings import check_integer
from vitrail.models.activations import Activations
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig
from vitrail.models.device import evaluating


def reach(model: AnyModel, images: Tensor, layer: int, draws: int = 8) -> np.ndarray:
    """Mean |gradient| of the centre's state after `layer` with respect to each pixel: (H, W), largest value 1.

    The gradient is of a sum of the state's features with random signs, `draws` times: norms would cancel a plain sum.
    iGPT rounds colours, so there the gradient is of the embedded tokens, one for each pixel.
    """
    return reaches(model, images, [layer], draws)[layer].influence


class Reach(NamedTuple):
    """The receptive field of the centre of a layer."""

    influence: np.ndarray
    """(H, W), largest value 1."""
    middle: tuple[float, float]
    """Position of the centre's state, in pixels from the top left corner: the middle of a patch or pixel."""

    def areas(self, shares: Sequence[float]) -> dict[float, float]:
        """For each share of the sum, the part of the image covered by the smallest square around the centre that
        contains it."""
        rows, columns = (
            np.abs(np.arange(side) + 0.5 - at) for side, at in zip(self.influence.shape, self.middle, strict=True)
        )
        distance = np.maximum(rows[:, None], columns).ravel()
        order = np.argsort(distance, kind="stable")
        held = np.cumsum(self.influence.ravel()[order])
        found = {}
        for share in shares:
            last = order[min(np.searchsorted(held, share * held[-1] * (1 - 1e-12)), len(order) - 1)]
            found[share] = float((distance <= distance[last] + 1e-9).mean())
        return found


def reaches(model: AnyModel, images: Tensor, layers: Sequence[int], draws: int = 8) -> dict[int, Reach]:
    """`reach` of several layers, with one forward pass per image."""
    config = model.config
    for layer in layers:
        check_integer("layer", layer, low=0, high=config.depth - 1)
    if config.predicts == "pixels":
        raise UsageError("Reach needs an iGPT with output classes, got output pixels.")
    generator = torch.Generator().manual_seed(0)
    sums = {layer: np.zeros(config.resolution) for layer in layers}
    middles = {}
    with torch.enable_grad(), evaluating(model), _with_gradients(model):
        for image in images.split(1):
            activations = Activations(frozenset(layers), with_attention=False)
            pixels = image.detach().clone().requires_grad_()
            model(pixels, activations)
            # Rounding colours to a palette has no gradient: take that of the embedded tokens, one for each pixel.
            source = activations.steps["tokens"] if "colours" in activations.steps else pixels
            for layer in layers:
                output = activations.steps[f"blocks.{layer}"]
                state_1D, middles[layer] = _centre(output, model), _middle(output, config)
                for _ in range(draws):
                    signs = torch.randint(0, 2, state_1D.shape, generator=generator).to(state_1D) * 2 - 1
                    (gradient,) = torch.autograd.grad((state_1D * signs).sum(), source, retain_graph=True)
                    influence = gradient.abs().cpu().double()[0]
                    sums[layer] += (
                        influence.sum(-1).view(config.resolution).numpy()
                        if influence.ndim == 2
                        else influence.sum(0).numpy()
                    )
    return {layer: Reach(influence / influence.max(), middles[layer]) for layer, influence in sums.items()}


def _centre(output: Tensor, model: AnyModel) -> Tensor:
    """The state (B, D) at the centre of the image in a layer's output."""
    if output.ndim == 4:  # a feature map
        return output[:, :, output.shape[2] // 2, output.shape[3] // 2]
    if output.ndim == 2:  # no places at all
        return output
    rows, columns = model.config.grid or (1, 1)
    tokens = torch.arange(rows * columns, device=output.device)[None, :, None]
    centre = int(model.in_raster_order(tokens)[0, rows // 2 * columns + columns // 2, 0])
    return output[:, model.config.prefix + centre]


@contextlib.contextmanager
def _with_gradients(model: AnyModel) -> Generator[None]:
    """Context in which every parameter has a gradient, and with them the embedded tokens of a frozen model."""
    requires_grad = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_()
    try:
        yield
    finally:
        for parameter, before in requires_grad.items():
            parameter.requires_grad_(before)


def _middle(output: Tensor, config: ModelConfig) -> tuple[float, float]:
    """Position of that state, in pixels from the top left corner."""
    height, width = config.resolution
    if output.ndim == 4:  # cell i of a feature map looks at the pixel i strides from the edge
        rows, columns = output.shape[2:]
        return rows // 2 * height / rows + 0.5, columns // 2 * width / columns + 0.5
    rows, columns = (config.grid if output.ndim == 3 else None) or (height, width)
    return (rows // 2 + 0.5) * height / rows, (columns // 2 + 0.5) * width / columns
