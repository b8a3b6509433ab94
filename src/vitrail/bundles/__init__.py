"""The bundle of a model, its metadata, weight formats and remote sources."""
