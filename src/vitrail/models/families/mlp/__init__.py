"""Multilayer perceptron on pixels."""
