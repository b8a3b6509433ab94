"""Changes to the weights of MLP-Mixer."""

import torch
from torch import Tensor

from vitrail.models.families.mixer.model import Mixer
from vitrail.models.surgery import Surgery, permute_kernels, split_order


class MixerSurgery(Surgery[Mixer]):
    """Every position has weights of its own."""

    @torch.no_grad()
    def permute_input_weights(self, order: Tensor) -> bool:
        """Patches may move anywhere, and pixels within patches if all patches move them alike."""
        model, c = self.model, self.model.config
        orders = split_order(order, c.resolution, c.patch) if model.stem.is_plain else None
        if orders is None:
            return False
        patches, inside = orders
        permute_kernels(model.stem, inside)
        for block in model.blocks:
            mlp = block.mlp_tokens
            place = patches.to(mlp.fc1.weight.device)
            mlp.fc1.weight.copy_(mlp.fc1.weight[:, place])
            mlp.fc2.weight.copy_(mlp.fc2.weight[place])
            mlp.fc2.bias.copy_(mlp.fc2.bias[place])
        return True
