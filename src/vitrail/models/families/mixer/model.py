"""MLP-Mixer (arXiv 2105.01601): one MLP mixes patches, another MLP mixes features.

Shapes: B images, N patches, D width, K classes.

    U = X + MLP_tokens(LN(X)^T)^T            eq. 1: the same weights for every feature, separate weights for every patch
    Y = U + MLP_channels(LN(U))              eq. 1: the same weights for every patch
"""

from typing import cast

import torch
from torch import Tensor, nn

from vitrail.models.activations import Activations
from vitrail.models.base import Model
from vitrail.models.families.mixer.config import MixerConfig
from vitrail.models.initialise import lecun_normal_
from vitrail.models.layers import MLP, PatchEmbed, drop_path


class MixerBlock(nn.Module):
    """An MLP over patches, then an MLP over features."""

    def __init__(self, config: MixerConfig, drop_path: float) -> None:
        super().__init__()
        c = config
        self.drop_path = drop_path
        self.norm1 = nn.LayerNorm(c.width, eps=c.norm_epsilon)
        self.mlp_tokens = MLP(width=c.patches, hidden=c.token_mlp, activation=c.activation, dropout=c.dropout)
        self.norm2 = nn.LayerNorm(c.width, eps=c.norm_epsilon)
        self.mlp_channels = MLP(width=c.width, hidden=c.channel_mlp, activation=c.activation, dropout=c.dropout)

    def forward(self, x_BND: Tensor) -> Tensor:
        u_BND = self.mix_tokens(x_BND)
        return u_BND + drop_path(self.mlp_channels(self.norm2(u_BND)), self.drop_path, self.training)

    def mix_tokens(self, x_BND: Tensor) -> Tensor:
        """Return U, the first half of the block."""
        mixed_BND = self.mlp_tokens(self.norm1(x_BND).transpose(1, 2)).transpose(1, 2)
        return x_BND + drop_path(mixed_BND, self.drop_path, self.training)


class Mixer(Model[MixerConfig]):
    """MLP-Mixer with mean pooling over all patches."""

    blocks: list[MixerBlock]  # an nn.ModuleList, which has no element type
    has_positional_weights = True
    projection = "stem.proj"
    reads_layers = True

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        c = config
        self.stem = PatchEmbed(channels=c.channels, width=c.width, patch=c.patch, stride=c.step, padding=c.padding)
        rates = [c.drop_path * layer / max(c.depth - 1, 1) for layer in range(c.depth)]
        self.blocks = cast(list[MixerBlock], nn.ModuleList(MixerBlock(c, rate) for rate in rates))
        self.norm = nn.LayerNorm(c.width, eps=c.norm_epsilon)
        self.head = self.make_head(c.width)
        self.initialise()

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        self._check_images(images_BCHW)
        x_BND = self.stem(images_BCHW, activations)
        for layer, block in enumerate(self.blocks):
            x_BND = self.run_block(block, x_BND)
            if activations is not None:
                activations.record_output(layer, x_BND)
        return self.read(x_BND, activations)

    def read(self, z_BTD: Tensor, activations: Activations | None = None) -> Tensor:
        return self._classify(self.pool(self.norm(z_BTD)), activations)

    def pool(self, output: Tensor) -> Tensor:
        return output.mean(dim=1)

    def normalise_layer(self, output: Tensor) -> Tensor:
        return self.norm(output)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise by flax's default (vision_transformer, models_mixer.py), and the head with zeros."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                lecun_normal_(module)
        self.zero_head()
