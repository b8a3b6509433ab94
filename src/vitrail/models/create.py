"""Building a model from a name or a configuration."""

from collections.abc import Sequence
from typing import Any, Literal, Never

import torch

from vitrail.core.errors import UsageError
from vitrail.core.memory import check_room
from vitrail.core.registry import load_object
from vitrail.core.settings import Pair
from vitrail.models import zoo
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig
from vitrail.models.families.vit.config import ResizeRule
from vitrail.models.positions.base import Placement


class _AsNamed:
    """The default of every setting of `create`: as in the model of that name."""

    def __repr__(self) -> str:
        return "as named"


_AS_NAMED: Any = _AsNamed()


# Every setting of the built-in families, so that editors complete them and type checkers flag others;
# tests/test_public_interface.py holds them equal to the configurations.
def create(
    name: str,
    /,
    *,
    classes: int = _AS_NAMED,
    embedding: int = _AS_NAMED,
    channels: int = _AS_NAMED,
    resolution: int | Pair = _AS_NAMED,
    patch: int | Pair = _AS_NAMED,
    stride: int | Pair | None = _AS_NAMED,
    padding: int | Pair = _AS_NAMED,
    width: int = _AS_NAMED,
    depth: int = _AS_NAMED,
    heads: int = _AS_NAMED,
    mlp: int = _AS_NAMED,
    registers: int = _AS_NAMED,
    pool: Literal["cls", "gap", "map"] = _AS_NAMED,
    representation: Literal["none", "tanh", "gelu"] = _AS_NAMED,
    position: str = _AS_NAMED,
    position_at: Placement | None = _AS_NAMED,
    class_position: bool = _AS_NAMED,
    wrap: bool = _AS_NAMED,
    resize_rule: ResizeRule = _AS_NAMED,
    attention: Literal["global", "local", "strided"] = _AS_NAMED,
    attention_span: int | None = _AS_NAMED,
    attention_scale: float | None = _AS_NAMED,
    residual: bool = _AS_NAMED,
    norm: Literal["layer", "batch"] = _AS_NAMED,
    norm_order: Literal["pre", "post"] = _AS_NAMED,
    norm_epsilon: float = _AS_NAMED,
    activation: Literal["gelu", "gelu-tanh", "relu", "tanh"] = _AS_NAMED,
    qkv_bias: bool = _AS_NAMED,
    layer_scale: float | None = _AS_NAMED,
    dropout: float = _AS_NAMED,
    token_drop: float = _AS_NAMED,
    drop_path: float = _AS_NAMED,
    merge: int | Sequence[int] = _AS_NAMED,
    stem: Literal["resnet", "light"] = _AS_NAMED,
    stem_layers: Sequence[int] = _AS_NAMED,
    stem_strides: Sequence[int] = _AS_NAMED,
    stem_base: int = _AS_NAMED,
    kind: Literal["bit", "plain"] = _AS_NAMED,
    layers: Sequence[int] = _AS_NAMED,
    base: int = _AS_NAMED,
    strides: Sequence[int] | None = _AS_NAMED,
    edges: Literal["zeros", "circular"] = _AS_NAMED,
    token_mlp: int = _AS_NAMED,
    channel_mlp: int = _AS_NAMED,
    hidden: int = _AS_NAMED,
    bidirectional: bool = _AS_NAMED,
    order: Literal["raster", "reversed", "column", "snake", "random"] = _AS_NAMED,
    order_seed: int = _AS_NAMED,
    palette: int = _AS_NAMED,
    causal: bool = _AS_NAMED,
    output: Literal["pixels", "classes"] = _AS_NAMED,
    bias: bool = _AS_NAMED,
    **others: Never,
) -> AnyModel:
    """A newly initialised model by its name, with settings changed. timm's names are known, too.

    The settings are those of the model's family (`vitrail.models.families` explains them), and a setting that the
    family does not have is refused. Families of other packages may have `others`. Weights are initialised with
    torch's random generator: seed it to repeat them.

        >>> model = vitrail.create("ViT-Ti/16", classes=10, resolution=96)
        >>> model(torch.zeros(1, 3, 96, 96)).shape
        torch.Size([1, 10])
        >>> vitrail.create("deit_tiny_patch16_224").config.name
        'ViT-Ti/16'
    """
    given = dict(locals())  # the parameters and nothing else, as this is the first line
    del given["name"], given["others"]
    settings = {key: value for key, value in given.items() if value is not _AS_NAMED} | others
    if "pretrained" in settings:
        raise UsageError(
            "Pretrained must be left out: create initialises new weights. Load a bundle with vitrail.load, or make one"
            " of other weights by `vitrail convert`."
        )
    return build(zoo.find(name).replace(**settings))


def build(config: ModelConfig) -> AnyModel:
    """A newly initialised model of this configuration."""
    if torch.get_default_device().type != "meta":
        check_room(4 * config.parameters, f"Model {config.name or config.family}")
    return load_object(config.model)(config)
