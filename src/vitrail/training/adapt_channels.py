"""Adapt the patch embedding of a model to images with another number of channels."""

import torch

from vitrail.core.errors import UsageError
from vitrail.core.settings import pluralise
from vitrail.models.base import AnyModel

ChannelValues = tuple[float, ...]
"""One number per channel: a mean or a standard deviation."""


def adapt_channels(
    model: AnyModel, channels: int, mean: ChannelValues, std: ChannelValues
) -> tuple[AnyModel, ChannelValues, ChannelValues, str]:
    """Return a copy of the model for images of `channels` channels, their mean and std, and a note about the change.

    A colour model that is adapted to grey images gives exactly the same output. For other numbers of channels, the
    kernels are repeated. Models that accept the images as they are, for example grey images in a model of three
    channels, are returned unchanged.
    """
    config = model.config
    if channels == 1 and config.channels == 3 and model.projection and config.padding == (0, 0):
        note = "the kernels of the three colour channels were merged into one for grey images, with the same output"
        return _convert_to_grey(model, mean, std), (0.5,), (0.5,), note
    if channels in (1, 3) and config.channels in (1, 3):
        note = f"images with {pluralise(channels, 'channel')} are converted to the {config.channels} of the model"
        return model, mean, std, note
    if not model.projection:
        raise UsageError(
            f"Images of {channels} channels need a family with a patch embedding, got family {config.family}."
        )
    sources = [channel % config.channels for channel in range(channels)]
    tensors, weight = model.state_dict(), f"{model.projection}.weight"
    tensors[weight] = tensors[weight][:, sources] * (config.channels / channels)
    mean, std = (tuple(values[source] for source in sources) for values in (mean, std))
    scale = f"{config.channels}/{channels}"
    note = f"the kernels of {config.channels} channels are repeated for {channels} and scaled by {scale}"
    return model.clone_with(tensors, channels=channels), mean, std, note


def _convert_to_grey(model: AnyModel, mean: ChannelValues, std: ChannelValues) -> AnyModel:
    """Return a copy of a colour model that reads grey images.

    W' g' + b' = b + sum over colours of W_c (g - mean_c) / std_c for every grey level g = 0.5 + 0.5 g'.
    """
    mean_C11, std_C11 = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    tensors, weight, bias = model.state_dict(), f"{model.projection}.weight", f"{model.projection}.bias"
    kernel, offset = tensors[weight].double(), tensors[bias].double()
    tensors[weight] = (0.5 * kernel / std_C11).sum(dim=1, keepdim=True).float()
    tensors[bias] = (offset + (kernel * (0.5 - mean_C11) / std_C11).sum(dim=(1, 2, 3))).float()
    return model.clone_with(tensors, channels=1)
