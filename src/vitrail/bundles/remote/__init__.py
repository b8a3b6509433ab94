"""Remote sources of weights."""
