"""Hybrids of a ResNet and a ViT."""
