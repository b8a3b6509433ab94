"""The hybrid: a Transformer on the feature map of a convolutional stem.

The stem adds the inductive bias of convolutions. Everything after the stem is `families/vit/model.py`.
"""

from typing import cast

import torch
from torch import Tensor, nn

from vitrail.models.activations import Activations
from vitrail.models.convolutions import ConvNormReLU, PostNormUnit, Root, bottleneck_stages
from vitrail.models.families.hybrid.config import HybridConfig
from vitrail.models.families.vit.model import ViT
from vitrail.models.initialise import lecun_normal_
from vitrail.models.layers import PatchEmbed


class ResNetTrunk(nn.Module):
    """The ResNet of the paper's hybrids: weight-standardised convolutions, GroupNorm, three or four stages."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.stem = Root(config.channels, config.stem_base, hybrid=True)
        self.stages = bottleneck_stages(PostNormUnit, config.stem_base, config.stem_layers)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stem(images_BCHW)
        for stage in self.stages:
            for unit in stage.blocks:
                x_BCHW = unit(x_BCHW)
        return x_BCHW


class LightStem(nn.Sequential):
    """A few 3x3 convolutions instead of the patch projection ("Early Convolutions", arXiv 2106.14881)."""

    def __init__(self, config: HybridConfig) -> None:
        channels = (config.channels, *config.stem_layers)
        super().__init__(
            *(
                ConvNormReLU(channels_in, channels_out, stride)
                for channels_in, channels_out, stride in zip(
                    channels, config.stem_layers, config.stem_strides, strict=False
                )
            )
        )


class HybridEmbed(PatchEmbed):
    """Eq. 1 on a feature map instead of the image."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(
            channels=config.canvas[0],
            width=config.width,
            patch=config.patch,
            stride=config.step,
            padding=config.padding,
            bias=config.patch_bias,
        )
        self.backbone = ResNetTrunk(config) if config.stem == "resnet" else LightStem(config)

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        return super().forward(self.backbone(images_BCHW), activations)


class Hybrid(ViT):
    """A Vision Transformer on the feature map of a convolutional stem."""

    projection = ""  # the patches have features of the stem, not pixels

    def make_patch_embed(self) -> PatchEmbed:
        return HybridEmbed(cast(HybridConfig, self.config))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise the ViT as `ViT` does, and convolutions by flax's default. Each ResNet unit starts as its
        shortcut."""
        super().init_weights()
        for module in self.patch_embed.modules():
            if isinstance(module, nn.Conv2d):
                lecun_normal_(module)
            if isinstance(module, PostNormUnit):
                nn.init.zeros_(module.norm3.weight)  # vision_transformer, models_resnet.py: gn3 scale_init zeros
