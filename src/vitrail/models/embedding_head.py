"""The head of a model that returns embeddings, as face recognition has them."""

from typing import cast

import torch
from torch import Tensor, nn

from vitrail.models.device import evaluating


class EmbeddingHead(nn.Sequential):
    """A linear layer to the width of the embedding and BatchNorm, which removes what all images have in common (the
    last two layers of arXiv 1801.07698)."""

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__(nn.Linear(width, embedding, bias=False), nn.BatchNorm1d(embedding))

    @property
    def parts(self) -> tuple[nn.Linear, nn.BatchNorm1d]:
        """The linear layer and the norm."""
        return cast(tuple[nn.Linear, nn.BatchNorm1d], tuple(self))

    def forward(self, input: Tensor) -> Tensor:
        """A single image has no statistics of its own: in training, too, it is normalised by the running ones."""
        linear, norm = self.parts
        if not self.training or len(input) > 1:
            return norm(linear(input))
        with evaluating(norm):
            return norm(linear(input))

    @torch.no_grad()
    def initialise(self) -> None:
        """Keep the scale of the features; the norm begins as the identity."""
        linear, norm = self.parts
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        norm.reset_parameters()
