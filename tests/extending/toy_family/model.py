"""The module of the family `coarse`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toy_family.config import CoarseConfig
from vitrail.models.activations import Activations
from vitrail.models.base import Model
from vitrail.models.initialise import lecun_normal_


class Coarse(Model[CoarseConfig]):
    """features = GELU(W means + b), logits = head(features)."""

    def __init__(self, config: CoarseConfig) -> None:
        super().__init__(config)
        self.hidden = nn.Linear(config.cells**2 * config.channels, config.width)
        self.head = self.make_head(config.width)
        self.initialise()

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        self._check_images(images_BCHW)
        means_BF = F.adaptive_avg_pool2d(images_BCHW, self.config.cells).flatten(1)
        features_BD = F.gelu(self.hidden(means_BF))
        if activations is not None:
            activations.record_output(0, features_BD)
        return self._classify(features_BD, activations)

    @torch.no_grad()
    def init_weights(self) -> None:
        lecun_normal_(self.hidden)
        self.zero_head()
