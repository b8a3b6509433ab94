"""Face recognition with any bundle: embeddings, verification, a gallery of people, and calibrated thresholds.

    vitrail.faces.train(data, model="FaceViT-Ti", epochs=20, output="run")
    vitrail.faces.evaluate(bundle, data)
    vitrail.faces.enroll(bundle, gallery, name, images)      also remove, verify, identify, calibrate

The functions are imported at first use, so that `import vitrail.faces` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.api.faces import calibrate, enroll, evaluate, identify, remove, train, verify

__all__ = ["calibrate", "enroll", "evaluate", "identify", "remove", "train", "verify"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vitrail.faces' has no attribute {name!r}")
    return getattr(importlib.import_module("vitrail.api.faces"), name)


def __dir__() -> list[str]:
    return __all__
