"""Exponential moving average (EMA) of the weights during training."""

import copy

import torch
from torch import nn


class WeightAverage:
    """Exponential moving average of a model's weights, with decay min(d, (1 + t) / (10 + t)) at step t."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        weights = dict(self.model.named_parameters())
        self._buffer_names = [name for name in self.model.state_dict() if name not in weights]

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Update the average in place with the weights of `model` after `step` updates; buffers are copied."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - decay)
        for name in self._buffer_names:
            self.model.get_buffer(name).copy_(model.get_buffer(name))
