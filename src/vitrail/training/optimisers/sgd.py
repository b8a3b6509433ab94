"""SGD: stochastic gradient descent with momentum."""

import torch

from vitrail.training.optimisers.base import Groups, Optimiser
from vitrail.training.recipe import Recipe


class SGD(Optimiser):
    """The fused SGD of torch, with the `momentum` of the recipe."""

    def make(self, groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, momentum=recipe.momentum, fused=True)
