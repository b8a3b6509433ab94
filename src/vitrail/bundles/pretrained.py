"""`vitrail.load` and `vitrail.create`: bundles and models by a path, a name or an address.

Public checkpoints are fetched, verified and cached as by `vitrail convert`. The network is used only for sources that
the user named.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Never

from vitrail.bundles import bundle as bundles
from vitrail.bundles.bundle import Bundle
from vitrail.bundles.catalogue import catalogue, suggest_published
from vitrail.bundles.folder import EMBEDDED
from vitrail.bundles.remote.registry import remote_prefix
from vitrail.bundles.timm_names import timm_preprocess
from vitrail.core.errors import UsageError
from vitrail.core.settings import Pair
from vitrail.models import zoo
from vitrail.models.base import AnyModel
from vitrail.models.create import build
from vitrail.models.device import find_device
from vitrail.models.families.vit.config import ResizeRule
from vitrail.models.positions.base import Placement


def load(source: str | Path, *, device: str = "cpu") -> Bundle:
    """Load a bundle, with its model on a device: a folder, an embedded bundle by its name ("fashion"), or a public
    checkpoint, which is fetched once: a name of `vitrail weights`, `hf:owner/repository` or an https:// address.

    Every file is checked against the manifest, every tensor against the model. The header of the weights is compared
    with the model's shapes before memory is allocated for them.

        >>> bundle = vitrail.load("fashion")
        >>> bundle.model.config.name, bundle.preprocess.resolution
        ('ViT-Fashion/4', (28, 28))
    """
    if not _is_remote(source):
        return bundles.load(source, device=device)
    from vitrail.bundles.convert import UserHints, import_weights

    torch_device = find_device(device)
    bundle = import_weights(str(source), UserHints()).bundle
    bundle.model.to(torch_device)
    return bundle


def _is_remote(source: str | Path) -> bool:
    """Return whether a source is the name or address of a public checkpoint. A path that exists is never fetched."""
    if not isinstance(source, str) or source in EMBEDDED or os.path.exists(source):  # noqa: PTH110 - as in `check_folder`
        return False
    return source in catalogue() or remote_prefix(source) is not None


def _pretrained_source(name: str) -> str:
    """Return the source of pretrained weights for a name: the name itself, or the only public checkpoint of a model.

    Names of models in timm are accepted, too. Raise UsageError if a model has none or several checkpoints.
    """
    if name in EMBEDDED or os.path.exists(name) or _is_remote(name):  # noqa: PTH110
        return name
    names = [
        published.name
        for published in catalogue().values()
        if name in (published.model, published.hub.partition("/")[2])
    ]
    if len(names) == 1:
        return names[0]
    if names:
        raise UsageError(f"Name must be that of one public checkpoint, got {name!r}, which has {', '.join(names)}.")
    raise UsageError(
        f"Name must be that of a public checkpoint (see `vitrail weights`), an address or a bundle, got {name!r}."
        f"{suggest_published(name)}"
    )


def _change_pretrained(model: AnyModel, settings: dict[str, Any]) -> AnyModel:
    """Return a pretrained model with changed settings, which must keep the shapes of its weights.

    A new number of classes gives it a new head, and a new resolution resizes it. The model may be changed in place.
    """
    changes, preprocess = dict(settings), model.preprocess
    resolution, classes = changes.pop("resolution", None), changes.pop("classes", model.config.classes)
    if changes:
        try:
            model = model.clone_with(**changes)
        except RuntimeError:
            changes_text = ", ".join(f"{key}={value!r}" for key, value in changes.items())
            raise UsageError(f"Settings must keep the shapes of pretrained weights, got {changes_text}.") from None
    if resolution is not None:
        model = model.resize(resolution)
    if classes != model.config.classes:
        model.reset_classifier(classes)
    if preprocess is not None and model.config.channels == preprocess.channels:
        model.preprocess = preprocess
    return model


class _AsNamed:
    """Default of every parameter of `create`: the setting of the named model."""

    def __repr__(self) -> str:
        return "as named"


_AS_NAMED: Any = _AsNamed()


# The parameters are all settings of the built-in families, so that editors complete them and type checkers reject
# others. tests/test_public_interface.py compares them with the configurations.
def create(
    name: str,
    /,
    *,
    classes: int = _AS_NAMED,
    embedding: int = _AS_NAMED,
    head_layers: str = _AS_NAMED,
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
    distilled: bool = _AS_NAMED,
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
    norm: Literal["layer", "batch", "none"] = _AS_NAMED,
    norm_order: Literal["pre", "post"] = _AS_NAMED,
    norm_epsilon: float = _AS_NAMED,
    activation: Literal["gelu", "gelu-tanh", "quick-gelu", "relu", "tanh", "none"] = _AS_NAMED,
    qkv_bias: bool = _AS_NAMED,
    patch_bias: bool = _AS_NAMED,
    embedding_norm: bool = _AS_NAMED,
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
    order: Literal["raster", "reversed", "column", "snake", "random", "random-reversed"] = _AS_NAMED,
    order_seed: int = _AS_NAMED,
    palette: int = _AS_NAMED,
    causal: bool = _AS_NAMED,
    output: Literal["pixels", "classes"] = _AS_NAMED,
    bias: bool = _AS_NAMED,
    pretrained: bool = False,
    **others: Never,
) -> AnyModel:
    """Create a newly initialised model by its name, with changed settings. Names of timm are accepted, too.

    The settings are those of the model's family (see `vitrail.models.families`). A setting that the family does not
    have is refused. Families of other packages may have `others`. Weights are initialised with torch's random
    generator: seed it to reproduce them.

    With `pretrained`, `name` is a public checkpoint (`vitrail weights`), an address or a path, as for `vitrail.load`,
    or a model that has exactly one checkpoint. `classes` then gives it a new head, `resolution` resizes it, and other
    settings must keep the shapes of its weights.

        >>> model = vitrail.create("ViT-Ti/16", classes=10, resolution=96)
        >>> model(torch.zeros(1, 3, 96, 96)).shape
        torch.Size([1, 10])
        >>> vitrail.create("deit_tiny_patch16_224").config.name
        'ViT-Ti/16'
        >>> vitrail.create("fashion", pretrained=True, classes=2).config.classes
        2
    """
    parameters = dict(locals())  # only the parameters, because this is the first line
    del parameters["name"], parameters["others"], parameters["pretrained"]
    settings = {key: value for key, value in parameters.items() if value is not _AS_NAMED} | others
    if pretrained:
        return _change_pretrained(load(_pretrained_source(name)).model, settings).train()
    model = build(zoo.find(name).replace(**settings))
    model.preprocess = timm_preprocess(name, model.config)
    return model
