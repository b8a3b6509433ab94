"""Training: from a recipe to weights, and back again after anything that kills the process."""
