"""Evaluation: metrics with intervals, and protocols on features."""
