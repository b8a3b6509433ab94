"""Changes to the weights of the MLP on pixels."""

import torch
from torch import Tensor

from vitrail.models.families.mlp.model import PixelMLP
from vitrail.models.surgery import Surgery


class MLPSurgery(Surgery[PixelMLP]):
    """Pixels have no neighbours: every order is possible."""

    @torch.no_grad()
    def permute_input_weights(self, order: Tensor) -> bool:
        first = self.model.get_parameter("layers.0.weight")
        first.copy_(first.unflatten(1, (-1, len(order)))[..., order.to(first.device)].flatten(1))
        return True
