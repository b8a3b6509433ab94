"""Learning-rate schedules: cosine, linear, rsqrt and constant, with a linear warm-up."""

import math

from vitrail.training.recipe import Recipe


def schedule(recipe: Recipe, step: int, total: int) -> float:
    """Return the learning rate of a step as a share of the peak learning rate."""
    warmup = round(recipe.warmup * total) if recipe.warmup < 1 else int(recipe.warmup)
    if step < warmup:
        return (step + 1) / warmup
    decay_steps = max(total - warmup, 1)
    progress = min((step - warmup) / decay_steps, 1.0)
    match recipe.schedule:
        case "constant":
            return 1.0
        case "linear":
            factor = 1 - progress
        case "cosine":
            factor = 0.5 + 0.5 * math.cos(math.pi * progress)
        case "rsqrt":
            # 1 / sqrt(step) (arXiv 2106.04560), multiplied by a linear decay in the last steps (the cooldown).
            inverse_root = math.sqrt(max(warmup, 1) / max(step, warmup, 1))
            factor = inverse_root * min((total - step) / max(recipe.cooldown * total, 1), 1.0)
    return recipe.final + (1 - recipe.final) * factor
