"""Engines that run a model: torch, or ONNX Runtime without torch."""
