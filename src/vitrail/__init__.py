"""Vitrail: the complete Vision Transformer.

    vitrail.list_models("ViT*")                 names of models
    vitrail.create("ViT-B/16", classes=10)      a model by its published name
    vitrail.load(source)                        a bundle: a model with labels and preprocessing, from a folder or by a
                                                name of `vitrail weights`
    vitrail.save(bundle, path)                  write a bundle
    vitrail.Classifier(path).predict(images)    predictions of a bundle
    vitrail.look(model, images)                 record activations and attention
    vitrail.train(data, "ViT-S/16", epochs=20)  the commands as functions: also finetune, evaluate, predict, inspect,
                                                explain, runs, doctor, compare, weights, convert, rename, export,
                                                bench
    vitrail.faces.enroll(...)                   face recognition: the commands of `vitrail faces`

`import vitrail` is fast: torch is imported at the first use of one of these names.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail import faces as faces
    from vitrail.api.delivery import bench, convert, export, rename, weights
    from vitrail.api.insights import compare, explain, inspect
    from vitrail.api.predictions import evaluate, predict
    from vitrail.api.training_commands import doctor, finetune, runs, train
    from vitrail.bundles.bundle import Bundle, save
    from vitrail.bundles.pretrained import create, load
    from vitrail.core.errors import VitrailError
    from vitrail.data.preprocess import Preprocess
    from vitrail.inference.classifier import Classifier
    from vitrail.models.activations import look
    from vitrail.models.zoo import list_models

__version__ = "0.1.0.dev0"

__all__ = [
    "Bundle",
    "Classifier",
    "Preprocess",
    "VitrailError",
    "bench",
    "compare",
    "convert",
    "create",
    "doctor",
    "evaluate",
    "explain",
    "export",
    "finetune",
    "inspect",
    "list_models",
    "load",
    "look",
    "predict",
    "rename",
    "runs",
    "save",
    "train",
    "weights",
]

_MODULES = {
    "vitrail.api.delivery": ("bench", "convert", "export", "rename", "weights"),
    "vitrail.api.insights": ("compare", "explain", "inspect"),
    "vitrail.api.predictions": ("evaluate", "predict"),
    "vitrail.api.training_commands": ("doctor", "finetune", "runs", "train"),
    "vitrail.bundles.bundle": ("Bundle", "save"),
    "vitrail.bundles.pretrained": ("create", "load"),
    "vitrail.core.errors": ("VitrailError",),
    "vitrail.data.preprocess": ("Preprocess",),
    "vitrail.inference.classifier": ("Classifier",),
    "vitrail.models.activations": ("look",),
    "vitrail.models.zoo": ("list_models",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "faces":
        return importlib.import_module("vitrail.faces")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "faces"])
