"""The models: one architecture per file, without training, file access or figures."""
