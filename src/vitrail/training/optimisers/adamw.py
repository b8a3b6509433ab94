"""AdamW: Adam with decoupled weight decay (arXiv 1711.05101)."""

import torch

from vitrail.training.optimisers.base import Groups, Optimiser
from vitrail.training.recipe import Recipe


class AdamW(Optimiser):
    """The fused AdamW of torch, with the `betas` of the recipe."""

    def make(self, groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=recipe.betas, fused=True)
