"""Models on disk: our own bundle, and one file for each foreign vocabulary."""
