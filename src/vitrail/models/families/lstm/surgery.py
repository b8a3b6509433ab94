"""Changes to the weights of the LSTM over patches."""

import torch
from torch import Tensor

from vitrail.models.families.lstm.model import LSTM
from vitrail.models.surgery import Surgery, permute_kernels, split_order


class LSTMSurgery(Surgery[LSTM]):
    """Changes to an LSTM, whose order of patches is fixed."""

    def permute_input_weights(self, order: Tensor) -> bool:
        """Permute the projection. `order` may move pixels within patches, the same way in every patch, but not
        patches."""
        model, c = self.model, self.model.config
        orders = split_order(order, c.resolution, c.patch) if model.patch_embed.is_plain else None
        if orders is None or not torch.equal(orders[0], torch.arange(c.patches)):
            return False
        permute_kernels(model.patch_embed, orders[1])
        return True
