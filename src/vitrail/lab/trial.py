"""A cell: one thing to train or to measure, known by a hash of all that it depends on."""

import base64
import dataclasses
import hashlib
import json
from typing import Any, NamedTuple

import numpy as np

from vitrail.core.settings import jsonable
from vitrail.models.families import FAMILIES

VERSION = 2
"""Of what cells compute; results of another version are not mixed in."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """`task` is the function that does it, as `module:name`; it takes `settings`, the lab's images, and the folder of
    each cell in `of`. A learning rate that is None is chosen before the cell is run."""

    task: str
    settings: dict[str, Any]
    inputs: tuple["Trial", ...] = ()
    """Trained cells that it looks at."""
    family: str = dataclasses.field(default="vit", compare=False)
    """Whose speed tells how long it takes."""
    work: float = dataclasses.field(default=0.0, compare=False)
    """Multiply-accumulates, forward and backward."""
    alone: bool = dataclasses.field(default=False, compare=False)
    """Whether nothing else may run beside it, because it measures times."""

    def to_json(self) -> dict[str, Any]:
        """All that the result depends on, besides the images."""
        return {"task": self.task, "settings": self.settings, "of": [trial.to_json() for trial in self.inputs]}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Trial":
        """The inverse of `to_json`."""
        return cls(fields["task"], fields["settings"], tuple(cls.from_json(trial) for trial in fields["of"]))

    def trial_id(self, fingerprint: str) -> str:
        """What the cell is called: equal settings on equal images have equal keys. A setting of a model that has its
        default does not count, so that a new one leaves the keys of older cells as they are."""
        document = json.dumps([VERSION, fingerprint, _without_defaults(self.to_json())], sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:20]

    def clone_with(self, **settings: Any) -> "Trial":
        """The cell with some settings changed."""
        return dataclasses.replace(self, settings={**self.settings, **settings})


class Outcome(NamedTuple):
    """What a cell found: `result` is the same whenever it is run on the same kind of machine; `measured` is not."""

    result: dict[str, Any]
    measured: dict[str, Any]


def _without_defaults(value: Any) -> Any:
    """A document without those settings of models in it that have their defaults."""
    match value:
        case {"family": family, **settings}:
            defaults = jsonable({field.name: field.default for field in dataclasses.fields(FAMILIES[family])})
            kept = {name: part for name, part in settings.items() if name not in defaults or part != defaults[name]}
            return {"family": family, **kept}
        case dict():
            return {name: _without_defaults(part) for name, part in value.items()}
        case list():
            return [_without_defaults(part) for part in value]
    return value


def pack(right: np.ndarray) -> str:
    """Which answers were right, as text."""
    return base64.b64encode(np.packbits(right.astype(bool)).tobytes()).decode()


def unpack(text: str, count: int) -> np.ndarray:
    """The inverse of `pack`: 0 or 1 for each image."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count)
