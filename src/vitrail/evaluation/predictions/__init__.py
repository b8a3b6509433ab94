"""Saved predictions and tables of predictions."""
