"""Residual convolutional networks: locality and translation equivariance built in.

Shapes: B images, C channels, H x W feature map, D features, K classes.

    x_0 = conv(image)                        and, in BiT, max pooling
    x_u = x_(u-1) + F_u(x_(u-1))             each unit mixes 3x3 neighbours
    y   = mean over positions of x_U            makes the equivariant map invariant
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from vitrail.models.activations import Activations
from vitrail.models.base import Model
from vitrail.models.convolutions import (
    BasicUnit,
    ConvNormReLU,
    GroupNormReLU,
    PreActivationUnit,
    Root,
    Stage,
    bottleneck_stages,
)
from vitrail.models.families.resnet.config import ResNetConfig
from vitrail.models.initialise import lecun_normal_


class ResNet(Model[ResNetConfig]):
    """BiT (arXiv 1912.11370), or a plain network of basic units for small images."""

    stages: list[Stage]  # an nn.ModuleList, which has no element type

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        c = config
        if c.kind == "bit":
            self.stem = Root(c.channels, c.base, hybrid=False)
            self.stages = bottleneck_stages(PreActivationUnit, c.base, c.layers)
            self.norm = GroupNormReLU(c.width)
        else:
            self.stem = ConvNormReLU(c.channels, c.base, 1, c.edges)
            self.stages = cast(list[Stage], nn.ModuleList(self._plain_stages()))
            self.norm = nn.Identity()
        self.head = self.make_head(c.width)
        self.initialise()

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        self._check_images(images_BCHW)
        x_BCHW = self.stem(images_BCHW)
        if activations is not None:
            activations.steps["stem"] = x_BCHW
        for layer, unit in enumerate(unit for stage in self.stages for unit in stage.blocks):
            x_BCHW = self.run_block(unit, x_BCHW)
            if activations is not None:
                activations.record_output(layer, x_BCHW)
        x_BCHW = self.norm(x_BCHW)
        return self._classify(self.pool(x_BCHW), activations)

    def pool(self, output: Tensor) -> Tensor:
        return output.mean(dim=(2, 3))

    def normalise_layer(self, output: Tensor) -> Tensor:
        """Apply the norm before the head to an output of the last stage. Return other outputs as they are: they have
        fewer channels than the norm."""
        return self.norm(output) if output.shape[1] == self.config.width else output

    def _plain_stages(self) -> Iterator[Stage]:
        c = self.config
        inputs = c.base
        for stage, (units, stride) in enumerate(zip(c.layers, c.stage_strides, strict=True)):
            channels = c.base * 2**stage
            first = BasicUnit(inputs, channels, stride, c.edges)
            yield Stage([first, *(BasicUnit(channels, channels, 1, c.edges) for _ in range(units - 1))])
            inputs = channels

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise convolutions by flax's default, as BiT's code does, and the head with zeros."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                lecun_normal_(module)
        self.zero_head()
