"""Norms of gradients by layer."""

import math

from vitrail.training.objectives.base import Objective


def layer_gradient_norms(objective: Objective) -> list[float]:
    """Return the gradient norm of the embedding, of each block, and of the layers after the blocks."""
    squares: dict[int, float] = {}
    roles = objective.roles()
    for name, parameter in objective.named_parameters():
        if parameter.grad is not None:
            layer = roles[name].layer
            squares[layer] = squares.get(layer, 0.0) + float(parameter.grad.square().sum())
    return [round(math.sqrt(squares[layer]), 6) for layer in sorted(squares)]
