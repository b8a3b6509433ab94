"""How good a model is, with intervals."""
