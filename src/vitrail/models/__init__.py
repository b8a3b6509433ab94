"""Models: layers, position embeddings and model families, without training, file access or figures."""
