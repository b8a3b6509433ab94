"""The interface of weight formats: one class recognises, reads, writes and verifies the weights of one library.

The state-dict mapping of a model's family lists which tensors of the library correspond to which of ours. Reading joins
the library's tensors into ours, writing splits ours into the library's. A checkpoint with missing or unknown tensors is
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
    """The tensors of a checkpoint, with the JSON documents in its folder."""

    path: Path
    """The file of tensors."""
    tensors: dict[str, Tensor]
    documents: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """JSON documents by file name: config.json, preprocessor_config.json, vitrail.json."""
    notes: tuple[str, ...] = ()
    """Notes on choices made while reading the file."""
    raw: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """The tensors under their names in the file."""
    licence: str | None = None
    """The licence that the files state."""

    def renamed(self, tensors: dict[str, Tensor]) -> "LibraryCheckpoint":
        """Return a copy with renamed tensors. Raise CorruptFileError if two tensors have the same new name."""
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
        """Return a JSON document by its file name; empty if it is missing."""
        document = self.documents.get(name, {})
        if not isinstance(document, dict):
            raise CorruptFileError(
                f"{name} beside {str(self.path)!r} must be a JSON object, got {type(document).__name__}.",
                path=self.path.parent / name,
            )
        return document


@dataclasses.dataclass(frozen=True)
class InferredModel:
    """The model of a checkpoint, with notes on what was assumed."""

    config: ModelConfig
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    """Notes on settings that the files do not state, and the values that were assumed."""
    about_pixels: str | None = None
    """Note on assumed preprocessing. Not shown if the user states the preprocessing."""
    left_out: frozenset[str] = frozenset()
    """Names of tensors that the model does not use. They are ignored and listed in the report."""
    answer: DecisionRule = SINGLE_LABEL
    """Decision rule: how logits become labels."""


class WeightFormat(abc.ABC):
    """The files and conventions of one library, registered under `name` in bundles/formats/registry.py.

    `recognises` and `read` are required for reading, `check` for writing, and `open_source` and `open_written` for the
    proof that the library's own model gives the same outputs. Tensor names come from the family's `weights.py`. The
    format of another package defines its own in `entries`.
    """

    library: ClassVar[str] = ""
    """Name of the library in messages, if it differs from `name`."""
    file: ClassVar[str] = "model.safetensors"
    """Name of the file of tensors that is written."""
    verifier: ClassVar[str] = ""
    """Name of the library whose model is used for the proof, if it is not this one."""

    def __init__(self, name: str) -> None:
        self.name = name

    # Reading

    @abc.abstractmethod
    def recognises(self, names: Collection[str]) -> bool:
        """Return whether a checkpoint with these tensor names belongs to this library."""

    def prepare(self, checkpoint: LibraryCheckpoint) -> LibraryCheckpoint:
        """Return the checkpoint without name prefixes and with separate tensors for each layer."""
        return checkpoint

    @abc.abstractmethod
    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        """Infer the model of a checkpoint. `user_config` is the configuration that the user stated, if any."""

    def mapping(self, config: ModelConfig) -> StateDictMapping[Any]:
        """Return the state-dict mapping of the model's family. Raise UsageError if the library has no such family."""
        mapping = mapping_of(config, self.name)
        if mapping is None:
            raise unsupported_model_error(self.library or self.name, f"family {config.family}")
        return mapping

    def entries(self, config: ModelConfig, names: Collection[str] | None = None) -> Iterable[Entry]:
        """Return the entries of a model's state-dict mapping.

        `names` are the tensor names of a file, for libraries with several naming schemes.
        """
        return self.mapping(config).entries(config, names)

    def open_source(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> Forward:
        """Return the library's own model with the tensors of a checkpoint. Raise `Unverified` if there is none.

        Only tensors and settings are passed on: no pickle is opened again, and no code of the checkpoint is run.
        """
        raise Unverified(f"no library is known that opens the format {self.name}")

    # Writing

    def check(self, bundle: Bundle) -> list[str]:
        """Raise UsageError for a model that the library cannot compute.

        Return notes on slight differences in how the library computes the model.
        """
        raise UsageError(f"Format must be one that can be written, got {self.name}, which can only be read.")

    def write(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Write the file of tensors."""
        # transformers requires this entry in the metadata of the file.
        save_tensors(tensors, path, metadata={"format": "pt"})

    def documents(self, bundle: Bundle) -> dict[str, Any]:
        """Return the JSON files that the library reads in addition to the tensors, by file name."""
        return {}

    def card(self, bundle: Bundle) -> str | None:
        """Return the model card to write. None if model hubs do not know the library."""
        return None

    def open_written(self, config: ModelConfig, folder: Path) -> Forward:
        """Return the library's own model, opened from the written folder. Raise `Unverified` if there is none."""
        raise Unverified(f"no library is known that opens the format {self.name}")


def join_tensors(
    entries: Iterable[Entry], checkpoint: LibraryCheckpoint, left_out: Collection[str]
) -> dict[str, Tensor]:
    """Join the tensors of a library's checkpoint into those of our model.

    Raise UsageError that names missing and unknown tensors, CorruptFileError for tensors of the wrong shape or dtype.
    """
    tensors, used, missing, model_tensors = checkpoint.tensors, set(left_out), [], {}
    for entry in entries:
        used |= set(entry.theirs)
        absent = [name for name in entry.theirs if name not in tensors]
        missing += absent
        if not absent:
            not_float = next((name for name in entry.theirs if not tensors[name].is_floating_point()), None)
            if not_float is not None:
                raise CorruptFileError(
                    path=checkpoint.path,
                    cause=f"must have weights in floating point, got {tensors[not_float].dtype} in {not_float}",
                )
            try:
                joined = entry.join([tensors[name].float() for name in entry.theirs])
            except (RuntimeError, ValueError, IndexError) as error:
                raise CorruptFileError(
                    f"{', '.join(entry.theirs)} do not fit the model ({first_line(error)})."
                ) from None
            # Copied, because kernels choose their path by alignment: logits computed from a view into the file would
            # differ in the last bits.
            model_tensors[entry.ours] = joined.clone(memory_format=torch.contiguous_format)
    unknown = sorted(tensors.keys() - used)
    if missing or unknown:
        problems = [f"{len(missing)} missing ({_join_first(missing)})"] if missing else []
        problems += [f"{len(unknown)} of unknown names ({_join_first(unknown)})"] if unknown else []
        raise UsageError(
            f"Every tensor of {str(checkpoint.path)!r} must match the model, got {' and '.join(problems)}."
            " Nothing is loaded in part."
        )
    return model_tensors


def split_tensors(entries: Iterable[Entry], model_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the tensors of our model into those of the library. Raise UsageError for a tensor without an entry."""
    library_tensors: dict[str, Tensor] = {}
    covered = set()
    for entry in entries:
        covered.add(entry.ours)
        library_tensors |= zip(
            entry.theirs, (part.contiguous() for part in entry.split(model_tensors[entry.ours])), strict=True
        )
    if uncovered := sorted(model_tensors.keys() - covered):
        raise UsageError(f"Model must have only tensors that the format knows, got {_join_first(uncovered)}.")
    return library_tensors


def _join_first(names: Sequence[str]) -> str:
    """Return the first names of a list, for an error."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
