"""From a name or a configuration to a model."""

from typing import Any

from vitrail.configs import zoo
from vitrail.configs.base import ModelConfig
from vitrail.configs.hybrid import HybridConfig
from vitrail.configs.igpt import IGPTConfig
from vitrail.configs.lstm import LSTMConfig
from vitrail.configs.mixer import MixerConfig
from vitrail.configs.mlp import MLPConfig
from vitrail.configs.resnet import ResNetConfig
from vitrail.configs.vit import ViTConfig
from vitrail.models.base import AnyModel
from vitrail.models.hybrid import Hybrid
from vitrail.models.igpt import IGPT
from vitrail.models.lstm import LSTM
from vitrail.models.mixer import Mixer
from vitrail.models.mlp import PixelMLP
from vitrail.models.resnet import ResNet
from vitrail.models.vit import ViT


def create(name: str, /, **overrides: Any) -> AnyModel:
    """A freshly initialised model by its name, with settings changed: `create("ViT-B/16", classes=10, resolution=384)`.

    `vitrail.configs` lists every setting of every family. Randomness is torch's: seed it for the same weights.
    """
    return build(zoo.find(name).replace(**overrides))


_CLASSES: dict[type[ModelConfig], type[AnyModel]] = {
    ViTConfig: ViT,
    HybridConfig: Hybrid,
    ResNetConfig: ResNet,
    MixerConfig: Mixer,
    LSTMConfig: LSTM,
    IGPTConfig: IGPT,
    MLPConfig: PixelMLP,
}


def build(config: ModelConfig) -> AnyModel:
    """A freshly initialised model of this configuration."""
    return _CLASSES[type(config)](config)
