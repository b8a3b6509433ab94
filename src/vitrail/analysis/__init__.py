"""Arrays about the inside of models."""
