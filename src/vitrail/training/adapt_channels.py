"""Models for images with another number of channels, made of their own kernels."""

import torch

from vitrail.core.errors import UsageError
from vitrail.core.settings import pluralise
from vitrail.models.base import AnyModel

Levels = tuple[float, ...]
"""One number for each channel."""


def adapt_channels(model: AnyModel, channels: int, mean: Levels, std: Levels) -> tuple[AnyModel, Levels, Levels, str]:
    """The model for images with another number of channels, their mean and std, and a note about the change.

    For grey images the output of a colour model stays exactly the same. For other numbers of channels the kernels are
    repeated.
    """
    c = model.config
    if channels == 1 and c.channels == 3 and model.projection and c.padding == (0, 0):
        note = "the kernels of three colours were merged into one for grey images, with the same output"
        return _to_grey(model, mean, std), (0.5,), (0.5,), note
    if channels in (1, 3) and c.channels in (1, 3):
        return model, mean, std, f"images with {pluralise(channels, 'channel')} are read with the model's {c.channels}"
    if not model.projection:
        raise UsageError(f"Images of {channels} bands need a family with a patch embedding, got family {c.family}.")
    bands = [band % c.channels for band in range(channels)]
    tensors, name = model.state_dict(), f"{model.projection}.weight"
    tensors[name] = tensors[name][:, bands] * (c.channels / channels)
    mean, std = (tuple(values[band] for band in bands) for values in (mean, std))
    note = f"the kernels of {c.channels} bands are repeated for {channels}, times {c.channels}/{channels}"
    return model.clone_with(tensors, channels=channels), mean, std, note


def _to_grey(model: AnyModel, mean: Levels, std: Levels) -> AnyModel:
    """W' g' + b' = b + sum over colours of W_c (g - mean_c) / std_c for every grey level g = 0.5 + 0.5 g'."""
    mean_C11, std_C11 = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    tensors, weight, bias = model.state_dict(), f"{model.projection}.weight", f"{model.projection}.bias"
    kernel, offset = tensors[weight].double(), tensors[bias].double()
    tensors[weight] = (0.5 * kernel / std_C11).sum(dim=1, keepdim=True).float()
    tensors[bias] = (offset + (kernel * (0.5 - mean_C11) / std_C11).sum(dim=(1, 2, 3))).float()
    return model.clone_with(tensors, channels=1)
