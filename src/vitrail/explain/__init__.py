"""The walk-through: a page that runs a small ViT and shows every step of it."""
