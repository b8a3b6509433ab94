"""ResNet and BiT."""
