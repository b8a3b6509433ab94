"""Fully connected layers on pixels, without any assumption about images.

Shapes: B images, D width, K classes.

    h_1 = act(W_1 flatten(image) + b_1),  h_l = act(W_l h_(l-1) + b_l),  logits = W h_L + b
"""

import torch
from torch import Tensor, nn

from vitrail.models.activations import Activations
from vitrail.models.base import Model
from vitrail.models.families.mlp.config import MLPConfig
from vitrail.models.initialise import lecun_normal_
from vitrail.models.layers import activate, drop, is_plain


class PixelMLP(Model[MLPConfig]):
    """An MLP on the flattened image: the baseline without inductive bias."""

    has_positional_weights = True
    reads_layers = True

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        pixels = config.channels * config.resolution[0] * config.resolution[1]
        inputs = [pixels, *(config.width for _ in range(config.depth - 1))]
        self.layers = nn.ModuleList(nn.Linear(size, config.width) for size in inputs)
        self.head = self.make_head(config.width)
        self.initialise()

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        self._check_images(images_BCHW)
        x_BD = images_BCHW.flatten(1)
        for layer, linear in enumerate(self.layers):
            x_BD = activate(linear(x_BD), self.config.activation, fresh=is_plain(linear))
            x_BD = drop(x_BD, self.config.dropout, self.training)
            if activations is not None:
                activations.record_output(layer, x_BD)
        return self.read(x_BD, activations)

    def read(self, z_BTD: Tensor, activations: Activations | None = None) -> Tensor:
        """Compute logits from the features (B, D) of any layer."""
        return self._classify(z_BTD, activations)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise by lecun_normal as in the other families, and the head with zeros."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                lecun_normal_(module)
        self.zero_head()
