"""An optimiser: Lion, whose update is the sign of a momentum (arXiv 2302.06675)."""

import torch

from vitrail.models.roles import Role
from vitrail.training.optimisers.base import Groups, Optimiser
from vitrail.training.recipe import Recipe


class ForDecayed(Optimiser):
    """Lion for parameters with weight decay; AdamW updates biases, norms and tokens."""

    def takes(self, role: Role) -> bool:
        return role.decays

    def make(self, groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
        return Lion(groups, recipe.betas)


class Lion(torch.optim.Optimizer):
    def __init__(self, groups: Groups, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"betas": betas})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(parameter)
                    update = state["momentum"].lerp(parameter.grad, 1 - fast).sign_()
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                    state["momentum"].lerp_(parameter.grad, 1 - slow)
