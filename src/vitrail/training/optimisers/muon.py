"""Muon: orthogonalised momentum for the matrices of the blocks."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail.core.errors import UsageError
from vitrail.models.roles import Role
from vitrail.training.optimisers.base import Groups, Optimiser
from vitrail.training.recipe import Recipe


class MuonOptimiser(Optimiser):
    """Muon for the matrices of the blocks; AdamW updates the other parameters."""

    def takes(self, role: Role) -> bool:
        return role.is_matrix

    def make(self, groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
        return Muon(groups, momentum=recipe.momentum)


class Muon(torch.optim.Optimizer):
    """Muon: orthogonalised momentum (K. Jordan 2024), scaled to the typical update size of AdamW (arXiv 2502.16982).

    The Muon of torch computes in bfloat16, which CPUs without hardware support emulate 40 times slower. This class uses
    the dtype of the weights. Queries, keys and values share one matrix but are orthogonalised separately (`parts`).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum, "parts": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Update the weights in place."""
        if closure is not None:
            raise UsageError("Muon must be called without a closure, got one.")
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            # Matrices of equal shape are orthogonalised in one batch, which is faster than many small products.
            stacks: dict[tuple[int, int], list[Tensor]] = {}
            for parameter in parameters:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(average, group["momentum"])
                for part in direction.chunk(group["parts"]):
                    stacks.setdefault((part.shape[0], part.shape[1]), []).append(part)
            updates = {shape: iter(orthogonalise(torch.stack(parts))) for shape, parts in stacks.items()}
            for parameter in parameters:
                rows, columns = parameter.shape[0] // group["parts"], parameter.shape[1]
                update = torch.cat([next(updates[rows, columns]) for _ in range(group["parts"])])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(rows, columns)))
        return


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Return approximately the nearest orthogonal matrices, by a quintic Newton-Schulz iteration.

    All singular values become about 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x
