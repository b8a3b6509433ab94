"""Changes to the weights of the MLP on pixels."""

import torch
from torch import Tensor

from vitrail.models.families.mlp.model import PixelMLP
from vitrail.models.surgery import Surgery


class MLPSurgery(Surgery[PixelMLP]):
    """Changes to an MLP on pixels, which does not depend on neighbourhoods: every permutation is supported."""

    @torch.no_grad()
    def permute_input_weights(self, order: Tensor) -> bool:
        """Permute the weights of the first layer."""
        weight = self.model.get_parameter("layers.0.weight")
        weight.copy_(weight.unflatten(1, (-1, len(order)))[..., order.to(weight.device)].flatten(1))
        return True
