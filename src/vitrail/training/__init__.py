"""Training: from a recipe to a bundle, with checkpoints to resume from."""
