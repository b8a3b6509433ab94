"""The registry of model families. Each family has a folder of this package and a line below.

A line names the family's configuration class, which names its module (`model`), its sizes (`sizes`) and its tensor
names in other libraries (`weights`).
"""

from typing import TYPE_CHECKING

from vitrail.core.registry import Registry

if TYPE_CHECKING:
    from vitrail.models.config import ModelConfig

FAMILIES: "Registry[type[ModelConfig]]" = Registry(
    "family",
    {
        "vit": "vitrail.models.families.vit.config:ViTConfig",
        "hybrid": "vitrail.models.families.hybrid.config:HybridConfig",
        "resnet": "vitrail.models.families.resnet.config:ResNetConfig",
        "mixer": "vitrail.models.families.mixer.config:MixerConfig",
        "lstm": "vitrail.models.families.lstm.config:LSTMConfig",
        "igpt": "vitrail.models.families.igpt.config:IGPTConfig",
        "mlp": "vitrail.models.families.mlp.config:MLPConfig",
    },
    base="vitrail.models.config:ModelConfig",
    name_attribute="family",
)
