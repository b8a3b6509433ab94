"""What computes: torch, or ONNX Runtime without torch."""
