"""The interface of optimisers, and the optimisers of a run.

A new optimiser is a subclass of `Optimiser` and a line in `training.recipe.OPTIMISERS`, or an entry point
`optimiser.NAME` of another package.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from vitrail.core.errors import UsageError
from vitrail.models.roles import Role, has_ordered_blocks
from vitrail.training.recipe import OPTIMISERS, Recipe

Groups = list[dict[str, Any]]
"""Groups of parameters with their learning rate, decay and `parts`, as torch's optimisers take them."""


class Optimiser:
    """An optimiser that a recipe can name. Its state must consist of tensors, so that a checkpoint can keep it."""

    rest: ClassVar[str] = "adamw"
    """Name of the optimiser for the parameters that this one does not take."""

    def takes(self, role: Role) -> bool:
        """Whether it updates a parameter of this role."""
        return True

    def make(self, groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
        """Make torch's optimiser of these parameters."""
        raise NotImplementedError


class Trained(Protocol):
    """Something with parameters and roles: a model, or an objective that wraps one."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...

    def roles(self) -> dict[str, Role]: ...


def make_optimisers(trained: Trained, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """The recipe's optimiser for the parameters that it updates, and another one for the rest.

    Each parameter group has `share`, the factor of its learning rate.
    """
    chosen: Optimiser = OPTIMISERS[recipe.optimiser]()
    shares = _layer_shares(trained, recipe.layer_decay)
    roles = trained.roles()
    groups: dict[tuple[bool, bool, float, int], list[Tensor]] = {}
    for name, parameter in trained.named_parameters():
        if parameter.requires_grad:
            role = roles[name]
            key = (chosen.takes(role), role.decays, shares[name], role.parts)
            groups.setdefault(key, []).append(parameter)
    optimisers: list[torch.optim.Optimizer] = []
    for is_taken, optimiser in ((True, chosen), (False, OPTIMISERS[chosen.rest]())):
        settings: Groups = [
            {
                "params": parameters,
                "share": share,
                "lr": recipe.learning_rate * share,
                "weight_decay": recipe.weight_decay if decays else 0.0,
                "parts": parts,
            }
            for (taken, decays, share, parts), parameters in groups.items()
            if taken == is_taken
        ]
        if settings:
            optimisers.append(optimiser.make(settings, recipe))
    return optimisers


def _layer_shares(trained: Trained, decay: float) -> dict[str, float]:
    """Factor of each parameter's learning rate: 1 for the head, multiplied by `decay` for each block below it."""
    roles = trained.roles()
    if decay != 1 and not has_ordered_blocks(roles):
        raise UsageError(f"Layer decay must be 1 for models that are not one sequence of blocks, got {decay:g}.")
    top = max(role.layer for role in roles.values())
    return {name: decay ** (top - role.layer) for name, role in roles.items()}


def set_learning_rate(optimisers: list[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of every group to its share of `rate`."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate * group["share"]
