"""`vitrail.load` and `vitrail.create`: bundles and models by a path, a name or an address.

Public checkpoints are fetched as `vitrail convert` fetches them: verified, and kept in the user's cache. There is no
access to a network unless the user names such a source.
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

    place = find_device(device)
    loaded = import_weights(str(source), UserHints()).bundle
    loaded.model.to(place)
    return loaded


def _is_remote(source: str | Path) -> bool:
    """Whether a source is the name or the address of a public checkpoint. A path that exists is never fetched."""
    if not isinstance(source, str) or source in EMBEDDED or os.path.exists(source):  # noqa: PTH110 - as in `check_folder`
        return False
    return source in catalogue() or remote_prefix(source) is not None


def _source_of(name: str) -> str:
    """What to load for a name: itself, or the one public checkpoint of a model, of ours or of timm's name."""
    if name in EMBEDDED or os.path.exists(name) or _is_remote(name):  # noqa: PTH110
        return name
    names = [one.name for one in catalogue().values() if name in (one.model, one.hub.partition("/")[2])]
    if len(names) == 1:
        return names[0]
    if names:
        raise UsageError(f"Name must be that of one public checkpoint, got {name!r}, which has {', '.join(names)}.")
    raise UsageError(
        f"Name must be that of a public checkpoint (see `vitrail weights`), an address or a bundle, got {name!r}."
        f"{suggest_published(name)}"
    )


def _with_weights(model: AnyModel, settings: dict[str, Any]) -> AnyModel:
    """A pretrained model with a new head, for another resolution, or with settings that keep the shapes of weights."""
    changes = dict(settings)
    resolution, classes = changes.pop("resolution", None), changes.pop("classes", model.config.classes)
    if changes:
        try:
            model = model.clone_with(**changes)
        except RuntimeError:
            listed = ", ".join(f"{key}={value!r}" for key, value in changes.items())
            raise UsageError(f"Settings must keep the shapes of pretrained weights, got {listed}.") from None
    if resolution is not None:
        model = model.resize(resolution)
    if classes != model.config.classes:
        model.reset_classifier(classes)
    return model


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
    pretrained: bool = False,
    **others: Never,
) -> AnyModel:
    """A newly initialised model by its name, with settings changed. timm's names are known, too.

    The settings are those of the model's family (`vitrail.models.families` explains them), and a setting that the
    family does not have is refused. Families of other packages may have `others`. Weights are initialised with
    torch's random generator: seed it to repeat them.

    With `pretrained`, the name is that of a public checkpoint (`vitrail weights`), an address or a path, as for
    `vitrail.load`; or of a model that has one checkpoint. `classes` then gives it a new head, `resolution` resizes it,
    and other settings must keep the shapes of its weights.

        >>> model = vitrail.create("ViT-Ti/16", classes=10, resolution=96)
        >>> model(torch.zeros(1, 3, 96, 96)).shape
        torch.Size([1, 10])
        >>> vitrail.create("deit_tiny_patch16_224").config.name
        'ViT-Ti/16'
        >>> vitrail.create("fashion", pretrained=True, classes=2).config.classes
        2
    """
    given = dict(locals())  # the parameters and nothing else, as this is the first line
    del given["name"], given["others"], given["pretrained"]
    settings = {key: value for key, value in given.items() if value is not _AS_NAMED} | others
    if pretrained:
        return _with_weights(load(_source_of(name)).model, settings).train()
    return build(zoo.find(name).replace(**settings))
