"""Changes to the weights of MLP-Mixer."""

import torch
from torch import Tensor

from vitrail.models.families.mixer.model import Mixer
from vitrail.models.surgery import Surgery, permute_kernels, split_order


class MixerSurgery(Surgery[Mixer]):
    """Changes to an MLP-Mixer, which has separate weights for every position."""

    @torch.no_grad()
    def permute_input_weights(self, order: Tensor) -> bool:
        """Permute the projection and the MLPs over patches. `order` may move patches, and pixels within patches the
        same way in every patch."""
        model, c = self.model, self.model.config
        orders = split_order(order, c.resolution, c.patch) if model.stem.is_plain else None
        if orders is None:
            return False
        patches, inside = orders
        permute_kernels(model.stem, inside)
        for block in model.blocks:
            mlp = block.mlp_tokens
            index = patches.to(mlp.fc1.weight.device)
            mlp.fc1.weight.copy_(mlp.fc1.weight[:, index])
            mlp.fc2.weight.copy_(mlp.fc2.weight[index])
            mlp.fc2.bias.copy_(mlp.fc2.bias[index])
        return True
