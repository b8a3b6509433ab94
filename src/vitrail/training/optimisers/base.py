"""The interface of optimisers, and the creation of the optimisers of a run.

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
"""Parameter groups of torch, each with its learning rate, weight decay and `parts`."""


class Optimiser:
    """Base class of the optimisers of recipes. Their state must be tensors, so that checkpoints can store it."""

    rest: ClassVar[str] = "adamw"
    """Name of the optimiser for the parameters that this one does not take."""

    def takes(self, role: Role) -> bool:
        """Return whether this optimiser updates parameters with this role."""
        return True

    def make(self, groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
        """Return the torch optimiser of these parameter groups."""
        raise NotImplementedError


class Trainable(Protocol):
    """Module with parameters and their roles: a model, or an objective that wraps one."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...

    def roles(self) -> dict[str, Role]: ...


def make_optimisers(trainable: Trainable, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return the optimiser of the recipe for the parameters that it takes, and one for the other parameters.

    Each parameter group has `share`, the factor of its learning rate.
    """
    main_optimiser: Optimiser = OPTIMISERS[recipe.optimiser]()
    shares = _layer_shares(trainable, recipe.layer_decay)
    roles = trainable.roles()
    groups: dict[tuple[bool, bool, float, int], list[Tensor]] = {}
    for name, parameter in trainable.named_parameters():
        if parameter.requires_grad:
            role = roles[name]
            key = (main_optimiser.takes(role), role.decays, shares[name], role.parts)
            groups.setdefault(key, []).append(parameter)
    optimisers: list[torch.optim.Optimizer] = []
    for is_main, optimiser in ((True, main_optimiser), (False, OPTIMISERS[main_optimiser.rest]())):
        settings: Groups = [
            {
                "params": parameters,
                "share": share,
                "lr": recipe.learning_rate * share,
                "weight_decay": recipe.weight_decay if decays else 0.0,
                "parts": parts,
            }
            for (is_taken_by_main, decays, share, parts), parameters in groups.items()
            if is_taken_by_main == is_main
        ]
        if settings:
            optimisers.append(optimiser.make(settings, recipe))
    return optimisers


def _layer_shares(trainable: Trainable, decay: float) -> dict[str, float]:
    """Return the factor of the learning rate by parameter: 1 for the head, times `decay` for each block below it."""
    roles = trainable.roles()
    if decay != 1 and not has_ordered_blocks(roles):
        raise UsageError(f"Layer decay must be 1 for models that are not one sequence of blocks, got {decay:g}.")
    top = max(role.layer for role in roles.values())
    return {name: decay ** (top - role.layer) for name, role in roles.items()}


def set_learning_rate(optimisers: list[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of every parameter group to its share of `rate`."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate * group["share"]
