"""Answers of models: tables of them, pages to look them over, files that keep them, and comparisons of two models."""
