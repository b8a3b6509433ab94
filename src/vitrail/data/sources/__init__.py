"""Data sources: one module for each format."""
