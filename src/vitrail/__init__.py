"""Vitrail: the complete Vision Transformer.

    vitrail.list_models("ViT*")                 names of models
    vitrail.create("ViT-B/16", classes=10)      a model by its published name
    vitrail.load(path), vitrail.save(bundle, path)
    vitrail.Classifier(path).predict(images)
    vitrail.look(model, images)                 intermediate results and attention
    vitrail.train(data, "ViT-S/16", epochs=20)  and finetune, evaluate, predict, inspect: the commands as functions

`import vitrail` is instant: torch is imported when one of these is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.api.insights import inspect
    from vitrail.api.predictions import evaluate, predict
    from vitrail.api.training import finetune, train
    from vitrail.bundles.bundle import Bundle, load, save
    from vitrail.core.errors import VitrailError
    from vitrail.data.preprocess import Preprocess
    from vitrail.inference.classifier import Classifier
    from vitrail.models.activations import look
    from vitrail.models.create import create
    from vitrail.models.zoo import list_models

__version__ = "0.1.0.dev0"

__all__ = [
    "Bundle",
    "Classifier",
    "Preprocess",
    "VitrailError",
    "create",
    "evaluate",
    "finetune",
    "inspect",
    "list_models",
    "load",
    "look",
    "predict",
    "save",
    "train",
]

_HOMES = {
    "Bundle": "vitrail.bundles.bundle",
    "Classifier": "vitrail.inference.classifier",
    "Preprocess": "vitrail.data.preprocess",
    "VitrailError": "vitrail.core.errors",
    "create": "vitrail.models.create",
    "evaluate": "vitrail.api.predictions",
    "finetune": "vitrail.api.training",
    "inspect": "vitrail.api.insights",
    "list_models": "vitrail.models.zoo",
    "load": "vitrail.bundles.bundle",
    "look": "vitrail.models.activations",
    "predict": "vitrail.api.predictions",
    "save": "vitrail.bundles.bundle",
    "train": "vitrail.api.training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
