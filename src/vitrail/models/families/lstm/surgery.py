"""Changes to the weights of the LSTM over patches."""

import torch
from torch import Tensor

from vitrail.models.families.lstm.model import LSTM
from vitrail.models.surgery import Surgery, permute_kernels, split_order


class LSTMSurgery(Surgery[LSTM]):
    """The order of patches is built in."""

    def permute_input_weights(self, order: Tensor) -> bool:
        """Pixels may move within patches if all patches move them alike; patches may not move."""
        model, c = self.model, self.model.config
        orders = split_order(order, c.resolution, c.patch) if model.patch_embed.is_plain else None
        if orders is None or not torch.equal(orders[0], torch.arange(c.patches)):
            return False
        permute_kernels(model.patch_embed, orders[1])
        return True
