"""Position embeddings: their rules, and their modules."""
