"""Optimisers, learning rate schedules and weight averaging."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vitrail.core.errors import UsageError
from vitrail.models.base import Role
from vitrail.training.recipe import OPTIMISERS, Recipe

Groups = list[dict[str, Any]]
"""Groups of parameters with their learning rate, decay and `parts`, as torch's optimisers take them."""


class Optimiser(NamedTuple):
    """A kind of optimiser, registered by its name in `training.recipe.OPTIMISERS`."""

    make: Callable[[Groups, Recipe], torch.optim.Optimizer]
    takes: Callable[[Role], bool] = lambda _: True
    """Selects the parameters that it updates."""
    rest: str = "adamw"
    """Name of the optimiser for the other parameters."""


ADAMW = Optimiser(lambda groups, recipe: torch.optim.AdamW(groups, betas=recipe.betas, fused=True))
SGD = Optimiser(lambda groups, recipe: torch.optim.SGD(groups, momentum=recipe.momentum, fused=True))
MUON = Optimiser(lambda groups, recipe: Muon(groups, momentum=recipe.momentum), takes=lambda role: role.is_matrix)


class Trained(Protocol):
    """Something with parameters and roles: a model, or an objective that wraps one."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...

    def roles(self) -> dict[str, Role]: ...

    @property
    def has_ordered_blocks(self) -> bool: ...


def make_optimisers(trained: Trained, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """The recipe's optimiser for the parameters that it updates, and another one for the rest.

    Each parameter group has `share`, the factor of its learning rate.
    """
    chosen = OPTIMISERS[recipe.optimiser]
    shares = _layer_shares(trained, recipe.layer_decay)
    roles = trained.roles()
    groups: dict[tuple[bool, bool, float, int], list[Tensor]] = {}
    for name, parameter in trained.named_parameters():
        if parameter.requires_grad:
            role = roles[name]
            key = (chosen.takes(role), role.decays, shares[name], role.parts)
            groups.setdefault(key, []).append(parameter)
    made: list[torch.optim.Optimizer] = []
    for is_taken, kind in ((True, chosen), (False, OPTIMISERS[chosen.rest])):
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
            made.append(kind.make(settings, recipe))
    return made


def _layer_shares(trained: Trained, decay: float) -> dict[str, float]:
    """Factor of each parameter's learning rate: 1 for the head, multiplied by `decay` for each block below it."""
    roles = trained.roles()
    if decay != 1 and not trained.has_ordered_blocks:
        raise UsageError(f"Layer decay must be 1 for models that are not one sequence of blocks, got {decay:g}.")
    top = max(role.layer for role in roles.values())
    return {name: decay ** (top - role.layer) for name, role in roles.items()}


class Muon(torch.optim.Optimizer):
    """Muon: orthogonalised momentum (K. Jordan 2024), scaled to the usual update size of AdamW (arXiv 2502.16982).

    Torch's own Muon works in bfloat16, which CPUs without it emulate 40 times slower; this one uses the dtype of the
    weights. Queries, keys and values share one matrix but are orthogonalised separately.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum, "parts": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # ty: ignore[incompatible-method-override]
        """One update."""
        if closure is not None:
            raise UsageError("Muon must be given no closure.")
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            # Equal shapes go through the iteration together: many small products cost more than one batch of them.
            stacks: dict[tuple[int, int], list[Tensor]] = {}
            for parameter in trained:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                moving = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(moving, group["momentum"])
                for part in direction.chunk(group["parts"]):
                    stacks.setdefault((part.shape[0], part.shape[1]), []).append(part)
            updates = {shape: iter(orthogonal(torch.stack(parts))) for shape, parts in stacks.items()}
            for parameter in trained:
                rows, columns = parameter.shape[0] // group["parts"], parameter.shape[1]
                update = torch.cat([next(updates[rows, columns]) for _ in range(group["parts"])])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(rows, columns)))
        return


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Approximately the nearest orthogonal matrices, by a quintic Newton-Schulz iteration: singular values become about
    1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


def schedule(recipe: Recipe, step: int, total: int) -> float:
    """The learning rate of a step as a share of the peak."""
    warmup = round(recipe.warmup * total) if recipe.warmup < 1 else int(recipe.warmup)
    if step < warmup:
        return (step + 1) / warmup
    rest = max(total - warmup, 1)
    progress = min((step - warmup) / rest, 1.0)
    match recipe.schedule:
        case "constant":
            return 1.0
        case "linear":
            height = 1 - progress
        case "cosine":
            height = 0.5 + 0.5 * math.cos(math.pi * progress)
        case "rsqrt":
            # 1 / sqrt of the step (arXiv 2106.04560), with a line to the end in place of the last part.
            falling = math.sqrt(max(warmup, 1) / max(step, warmup, 1))
            height = falling * min((total - step) / max(recipe.cooldown * total, 1), 1.0)
    return recipe.final + (1 - recipe.final) * height


def set_learning_rate(optimisers: list[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of every group to its share of `rate`."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate * group["share"]


class Average:
    """Exponential moving average of a model's weights, with decay min(d, (1 + t) / (10 + t)) at step t."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        weights = dict(self.model.named_parameters())
        self._statistics = [name for name in self.model.state_dict() if name not in weights]

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Update the average with the model's weights after `step` updates; running statistics are copied."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - decay)
        for name in self._statistics:
            self.model.get_buffer(name).copy_(model.get_buffer(name))
