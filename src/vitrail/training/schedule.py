"""Learning rate schedules."""

import math

from vitrail.training.recipe import Recipe


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
