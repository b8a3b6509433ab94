"""The models: one file shows one architecture, and nothing of training, files or figures."""
