"""Receptive fields of any family: how strongly each pixel changes the state at the centre of a layer.

The receptive field of an untrained model shows the inductive bias of its architecture: the pixels that can change a
state at all.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.core.errors import UsageError, VitrailError
from vitrail.core.settings import check_integer
from vitrail.models.activations import Activations
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig
from vitrail.models.device import evaluating


def reach(model: AnyModel, images: Tensor, layer: int, draws: int = 8) -> np.ndarray:
    """Return the receptive field (H, W) of the state at the image's centre after `layer`; the largest value is 1, or 0
    for a constant model.

    Each value is the mean absolute gradient of the state with respect to a pixel. The gradient is that of a sum of the
    state's features with random signs, drawn `draws` times, because normalisation would cancel a plain sum. iGPT rounds
    colours, so its gradient is taken with respect to the embedded tokens, one for each pixel.
    """
    return reaches(model, images, [layer], draws)[layer].influence


class Reach(NamedTuple):
    """Receptive field of the state at the centre of a layer."""

    influence: np.ndarray
    """Influence of each pixel on the state, (H, W); the largest value is 1."""
    middle: tuple[float, float]
    """Position (down, right) of the state in pixels from the top left corner: the middle of a patch or pixel."""

    def areas(self, shares: Sequence[float]) -> dict[float, float]:
        """Return the size of the receptive field by share of the influence, as a part of the image's area.

        For each share, it is the area of the smallest square around the centre that contains the share.
        """
        rows, columns = (
            np.abs(np.arange(side) + 0.5 - middle)
            for side, middle in zip(self.influence.shape, self.middle, strict=True)
        )
        distance = np.maximum(rows[:, None], columns).ravel()
        order = np.argsort(distance, kind="stable")
        cumulative = np.cumsum(self.influence.ravel()[order])
        area_by_share = {}
        for share in shares:
            last = order[min(np.searchsorted(cumulative, share * cumulative[-1] * (1 - 1e-12)), len(order) - 1)]
            area_by_share[share] = float((distance <= distance[last] + 1e-9).mean())
        return area_by_share


def reaches(model: AnyModel, images: Tensor, layers: Sequence[int], draws: int = 8) -> dict[int, Reach]:
    """Return the receptive field of the centre of each of `layers` (see `reach`), with one forward pass per image.

    Raise VitrailError for gradients that are not finite.
    """
    config = model.config
    for layer in layers:
        check_integer("layer", layer, low=0, high=config.depth - 1)
    if config.predicts == "pixels":
        raise UsageError("Reach needs an iGPT with output classes, got output pixels.")
    generator = torch.Generator().manual_seed(0)
    sums = {layer: np.zeros(config.resolution) for layer in layers}
    middles = {}
    with torch.enable_grad(), evaluating(model), _gradients_enabled(model):
        for image in images.split(1):
            activations = Activations(frozenset(layers), with_attention=False)
            pixels = image.detach().clone().requires_grad_()
            model(pixels, activations)
            # Rounding colours to a palette has no gradient: take that of the embedded tokens, one for each pixel.
            source = activations.steps["tokens"] if "colours" in activations.steps else pixels
            for layer in layers:
                output = activations.steps[f"blocks.{layer}"]
                state_1D, middles[layer] = _centre_state(output, model), _centre_position(output, config)
                for _ in range(draws):
                    signs = torch.randint(0, 2, state_1D.shape, generator=generator).to(state_1D) * 2 - 1
                    (gradient,) = torch.autograd.grad((state_1D * signs).sum(), source, retain_graph=True)
                    influence = gradient.abs().cpu().double()[0]
                    sums[layer] += (
                        influence.sum(-1).view(config.resolution).numpy()
                        if influence.ndim == 2
                        else influence.sum(0).numpy()
                    )
    if not all(np.isfinite(influence).all() for influence in sums.values()):
        raise VitrailError(
            "Gradients of a model must be finite, got NaN or infinity: its weights or pixels are too large."
        )
    # A constant model has no influence at all.
    return {layer: Reach(influence / (influence.max() or 1), middles[layer]) for layer, influence in sums.items()}


def _centre_state(output: Tensor, model: AnyModel) -> Tensor:
    """Return the state (B, D) at the centre of the image in a layer's output."""
    if output.ndim == 4:  # a feature map
        return output[:, :, output.shape[2] // 2, output.shape[3] // 2]
    if output.ndim == 2:  # one state for the whole image
        return output
    rows, columns = model.config.grid or (1, 1)
    tokens = torch.arange(rows * columns, device=output.device)[None, :, None]
    centre = int(model.in_raster_order(tokens)[0, rows // 2 * columns + columns // 2, 0])
    return output[:, model.config.prefix + centre]


@contextlib.contextmanager
def _gradients_enabled(model: AnyModel) -> Generator[None]:
    """Context in which every parameter requires a gradient, so that the tokens of a frozen model have one, too."""
    requires_grad = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_()
    try:
        yield
    finally:
        for parameter, before in requires_grad.items():
            parameter.requires_grad_(before)


def _centre_position(output: Tensor, config: ModelConfig) -> tuple[float, float]:
    """Return the position (down, right) of the state of `_centre_state`, in pixels from the top left corner."""
    height, width = config.resolution
    if output.ndim == 4:  # cell i of a feature map is centred on the pixel i strides from the edge
        rows, columns = output.shape[2:]
        return rows // 2 * height / rows + 0.5, columns // 2 * width / columns + 0.5
    rows, columns = (config.grid if output.ndim == 3 else None) or (height, width)
    return (rows // 2 + 0.5) * height / rows, (columns // 2 + 0.5) * width / columns
