"""The preprocessing of timm's models, by their names: what `create` gives a model that it creates by timm's name."""

from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.models import zoo
from vitrail.models.config import ModelConfig

# Models and tags of weights that were trained with ImageNet's mean and std; the others with 0.5.
_IMAGENET_NAMES = ("deit_", "vit_small_patch8_224")
_IMAGENET_TAGS = ("dino", "mae")
# Weights of BiT differ in crop, interpolation and resolution; these tags of other models, in their mean.
_OTHERS = ("resnetv2_",)
_OTHER_TAGS = ("bamboo", "miil_in21k", "miil_in21k_ft_in1k")


def timm_preprocess(name: str, config: ModelConfig) -> Preprocess | None:
    """Return the preprocessing that timm states for a model of this name, at the resolution of `config`.

    None for other names, for names whose weights in timm have several preprocessings, and for images that are not in
    colour.
    """
    architecture, _, tag = name.partition(".")
    alias = zoo.TIMM.get(architecture)
    if alias is None or architecture.startswith(_OTHERS) or tag in _OTHER_TAGS or config.channels != 3:
        return None
    crop_fraction = 0.875 if architecture.startswith("mixer_") else 0.9 if alias.resolution == 224 else 1.0
    is_imagenet = architecture.startswith(_IMAGENET_NAMES) or tag in _IMAGENET_TAGS
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if is_imagenet else ((0.5,) * 3, (0.5,) * 3)
    return Preprocess(resolution=config.resolution, mean=mean, std=std, crop_fraction=crop_fraction)
