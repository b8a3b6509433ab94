"""The interface of weight formats: one class recognises, reads, writes and verifies the weights of one library.

Which of the library's tensors make up which of ours is in the state-dict mapping of the model's family. Reading joins
their tensors into ours, writing splits ours into theirs. A checkpoint with tensors that are missing or in no entry is
refused.
"""

import abc
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.bundles.bundle import Bundle, save_tensors
from vitrail.bundles.decision import SINGLE_LABEL, DecisionRule
from vitrail.bundles.parity import Forward, Unverified
from vitrail.core.errors import CorruptFileError, UsageError, first_line
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.library_limits import unsupported_model_error
from vitrail.models.state_dict_mapping import Entry, StateDictMapping, mapping_of


@dataclasses.dataclass(frozen=True)
class LibraryCheckpoint:
    """Tensors on disk, with the JSON documents beside them."""

    path: Path
    """The file of tensors."""
    tensors: dict[str, Tensor]
    documents: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By file name: config.json, preprocessor_config.json."""
    notes: tuple[str, ...] = ()
    """Notes on choices made while reading the file."""
    raw: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """The tensors under their names in the file."""
    licence: str | None = None
    """The licence that the files state."""

    def renamed(self, tensors: dict[str, Tensor]) -> "LibraryCheckpoint":
        """A copy with renamed tensors. None may be lost because another has its name now."""
        if len(tensors) < len(self.tensors):
            raise CorruptFileError(
                path=self.path,
                cause=f"has {len(self.tensors):,} tensors, but only {len(tensors):,} that differ in more than a prefix",
            )
        return dataclasses.replace(self, tensors=tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def document(self, name: str) -> dict[str, Any]:
        """A document by name; empty if it is missing."""
        found = self.documents.get(name, {})
        if not isinstance(found, dict):
            raise CorruptFileError(
                f"{name} beside {str(self.path)!r} must be a JSON object, got {type(found).__name__}.",
                path=self.path.parent / name,
            )
        return found


@dataclasses.dataclass(frozen=True)
class InferredModel:
    """The model of a checkpoint, and what was assumed."""

    config: ModelConfig
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    """What the files did not state, and what was assumed instead."""
    about_pixels: str | None = None
    """The same for the preprocessing, unless the user states it."""
    left_out: frozenset[str] = frozenset()
    """Tensors that the model does not use: they are listed and ignored."""
    answer: DecisionRule = SINGLE_LABEL
    """What the logits answer."""


class WeightFormat(abc.ABC):
    """The files and conventions of one library. `FORMATS` in bundles/formats/registry.py knows it under `name`.

    `recognises` and `read` are required for reading, `check` for writing, and `open_source` and `open_written` for the
    proof that the library's own model gives the same outputs. Tensor names come from the family's `weights.py`; the
    format of another package has its own in `entries`.
    """

    library: ClassVar[str] = ""
    """What messages call the library, if it is not `name`."""
    file: ClassVar[str] = "model.safetensors"
    """Name of the file of tensors that is written."""
    verifier: ClassVar[str] = ""
    """Whose model the proof compares with, if another library opens the files."""

    def __init__(self, name: str) -> None:
        self.name = name

    # Reading

    @abc.abstractmethod
    def recognises(self, names: Collection[str]) -> bool:
        """Whether these tensor names are of this library."""

    def prepare(self, checkpoint: LibraryCheckpoint) -> LibraryCheckpoint:
        """The checkpoint without name prefixes and with one tensor per layer."""
        return checkpoint

    @abc.abstractmethod
    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        """Infer the model. `user_config` is the configuration that the user stated, if any."""

    def mapping(self, config: ModelConfig) -> StateDictMapping[Any]:
        """The mapping of the model's family; raises if the library has no such family."""
        mapping = mapping_of(config, self.name)
        if mapping is None:
            raise unsupported_model_error(self.library or self.name, f"family {config.family}")
        return mapping

    def entries(self, config: ModelConfig, names: Collection[str] | None = None) -> Iterable[Entry]:
        """The entries of a model; `names` are the tensor names of a file, if a library has several naming schemes."""
        return self.mapping(config).entries(config, names)

    def open_source(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> Forward:
        """The library's own model with the tensors of a checkpoint; raises `Unverified` if there is none.

        Only tensors and settings are passed on: no pickle is opened again, and no code beside it is run.
        """
        raise Unverified(f"there is no other model to read {self.name} with")

    # Writing

    def check(self, bundle: Bundle) -> list[str]:
        """Refuse a model that the library cannot compute; returns notes on what it computes slightly differently."""
        raise UsageError(f"Format {self.name} is read, but not written.")

    def write(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Write the file of tensors."""
        # transformers asks for this word in the file's metadata.
        save_tensors(tensors, path, metadata={"format": "pt"})

    def documents(self, bundle: Bundle) -> dict[str, Any]:
        """JSON files that the library reads beside the tensors."""
        return {}

    def card(self, bundle: Bundle) -> str | None:
        """The model card that goes beside the tensors; None if model hubs do not know the library."""
        return None

    def open_written(self, config: ModelConfig, folder: Path) -> Forward:
        """The library's own model, opened from the written folder; raises `Unverified` if there is none."""
        raise Unverified(f"there is no other model to read {self.name} with")


def join_tensors(
    entries: Iterable[Entry], checkpoint: LibraryCheckpoint, left_out: Collection[str]
) -> dict[str, Tensor]:
    """Our tensors from theirs. Raises if any is missing or left over, and names it."""
    tensors, used, missing, ours = checkpoint.tensors, set(left_out), [], {}
    for entry in entries:
        used |= set(entry.theirs)
        absent = [name for name in entry.theirs if name not in tensors]
        missing += absent
        if not absent:
            if strange := next((name for name in entry.theirs if not tensors[name].is_floating_point()), None):
                raise CorruptFileError(
                    path=checkpoint.path,
                    cause=f"must have weights in floating point, got {tensors[strange].dtype} in {strange}",
                )
            try:
                joined = entry.join([tensors[name].float() for name in entry.theirs])
            except (RuntimeError, ValueError, IndexError) as error:
                raise CorruptFileError(
                    f"{', '.join(entry.theirs)} do not fit the model ({first_line(error)})."
                ) from None
            # The only copy, into memory of its own: kernels choose their path by alignment, so logits computed from a
            # view into a file would differ in the last bits.
            ours[entry.ours] = joined.clone(memory_format=torch.contiguous_format)
    unknown = sorted(tensors.keys() - used)
    if missing or unknown:
        problems = [f"{len(missing)} missing ({_some(missing)})"] if missing else []
        problems += [f"{len(unknown)} of unknown names ({_some(unknown)})"] if unknown else []
        raise UsageError(
            f"Every tensor of {str(checkpoint.path)!r} must match the model, got {' and '.join(problems)}."
            " Nothing is loaded in part."
        )
    return ours


def split_tensors(entries: Iterable[Entry], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors from ours, all of them."""
    theirs: dict[str, Tensor] = {}
    covered = set()
    for entry in entries:
        covered.add(entry.ours)
        theirs |= zip(entry.theirs, (part.contiguous() for part in entry.split(ours[entry.ours])), strict=True)
    if uncovered := sorted(ours.keys() - covered):
        raise UsageError(f"Model must have only tensors that the format knows, got {_some(uncovered)}, too.")
    return theirs


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
