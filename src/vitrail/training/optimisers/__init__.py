"""Optimisers: one module each, listed in `training.recipe.OPTIMISERS`; `base` has their interface."""
