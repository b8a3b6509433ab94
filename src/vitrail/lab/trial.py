"""A trial: one training or measurement, identified by a hash of everything that its result depends on."""

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vitrail.core.settings import jsonable
from vitrail.models.families import FAMILIES

Name = TypeVar("Name")

VERSION = 3
"""Version of the results of trials. Results of different versions are never mixed."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training or measurement of the lab.

    `task` names its function as `module:function`. The function takes `settings`, the lab's images, the bundle
    folder of each input, and the folder to write to. A learning rate of None is chosen before the trial is run.
    """

    task: str
    settings: dict[str, Any]
    inputs: tuple["Trial", ...] = ()
    """Training trials whose models are measured."""
    family: str = dataclasses.field(default="vit", compare=False)
    """Family whose training speed gives the estimated time."""
    work: float = dataclasses.field(default=0.0, compare=False)
    """Multiply-accumulates, forward and backward."""
    alone: bool = dataclasses.field(default=False, compare=False)
    """Whether it must run alone because it measures times."""
    peers: tuple["Trial", ...] = dataclasses.field(default=(), compare=False, repr=False)
    """For a training: one trial of each variant in its comparison. Variants whose best rates are a tie share a rate."""

    def to_json(self) -> dict[str, Any]:
        """Return everything that the result depends on besides the images."""
        return {"task": self.task, "settings": self.settings, "of": [trial.to_json() for trial in self.inputs]}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Trial":
        """Return the trial in a document of `to_json`."""
        return cls(fields["task"], fields["settings"], tuple(cls.from_json(trial) for trial in fields["of"]))

    def trial_id(self, fingerprint: str) -> str:
        """Return the id: equal settings on equal images have equal ids.

        Settings of a model that have their default value are ignored, so that a new setting does not change the ids of
        older trials.
        """
        document = json.dumps([VERSION, fingerprint, _without_defaults(self.to_json())], sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:20]

    def clone_with(self, **settings: Any) -> "Trial":
        """Return a copy with changed settings."""
        return dataclasses.replace(self, settings={**self.settings, **settings})


def compare_variants(trials: Mapping[Name, Sequence[Trial]]) -> dict[Name, list[Trial]]:
    """Return the trials of each variant with the other variants as peers."""
    by_variant = {}
    for name, variant_trials in trials.items():
        peers = tuple(others[0] for other, others in trials.items() if other != name)
        by_variant[name] = [dataclasses.replace(trial, peers=peers) for trial in variant_trials]
    return by_variant


class Outcome(NamedTuple):
    """Outcome of a trial. `result` is reproducible on the same type of machine; `measured` (times, memory) is not."""

    result: dict[str, Any]
    measured: dict[str, Any]


def _without_defaults(value: Any) -> Any:
    """Return a JSON document without the model settings that have their default value."""
    match value:
        case {"family": family, **settings}:
            defaults = jsonable({field.name: field.default for field in dataclasses.fields(FAMILIES[family])})
            changed = {name: part for name, part in settings.items() if name not in defaults or part != defaults[name]}
            return {"family": family, **changed}
        case dict():
            return {name: _without_defaults(part) for name, part in value.items()}
        case list():
            return [_without_defaults(part) for part in value]
    return value


def pack(right: np.ndarray) -> str:
    """Pack the correctness of predictions, one bit per image, into text."""
    return base64.b64encode(np.packbits(right.astype(bool)).tobytes()).decode()


def unpack(text: str, count: int) -> np.ndarray:
    """Unpack the text of `pack` into the correctness of predictions, 0 or 1 for each image."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count)
