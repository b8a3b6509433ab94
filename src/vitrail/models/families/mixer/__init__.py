"""MLP-Mixer."""
