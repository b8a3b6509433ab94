"""Data sets: sources, `doctor`, the loader."""
