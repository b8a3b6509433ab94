"""What another library calls our tensors, said once for both directions.

A vocabulary is a list of entries for a model's configuration. Reading joins their tensors into ours, writing splits
ours into theirs; whatever no entry speaks of is left over, and a checkpoint with left-overs or gaps is refused.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vitrail.configs.base import ModelConfig
from vitrail.configs.hybrid import HybridConfig
from vitrail.configs.vit import ViTConfig
from vitrail.configs.zoo import MODELS
from vitrail.errors import DamagedError, UsageError, first_line
from vitrail.images.preprocess import Preprocess
from vitrail.models.create import build
from vitrail.settings import Pair
from vitrail.weights.bundle import Bundle


class Entry(NamedTuple):
    """One of our tensors, and the tensors of another library that make it up."""

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


def renamed(ours: str, theirs: str) -> Entry:
    """The same tensor under another name."""
    return Entry(ours, (theirs,), lambda parts: parts[0], lambda tensor: [tensor])


def shaped(ours: str, theirs: str, inward: Callable[[Tensor], Tensor], outward: Callable[[Tensor], Tensor]) -> Entry:
    """The same numbers in another order or shape."""
    return Entry(ours, (theirs,), lambda parts: inward(parts[0]), lambda tensor: [outward(tensor)])


def stacked(ours: str, theirs: Iterable[str]) -> Entry:
    """Some tensors that we keep one below the other: queries, keys and values."""
    theirs = tuple(theirs)
    return Entry(ours, theirs, lambda parts: torch.cat(list(parts)), lambda tensor: tensor.chunk(len(theirs)))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What was found on disk: tensors, and the JSON documents that lay beside them."""

    path: Path
    """The file of tensors."""
    tensors: dict[str, Tensor]
    documents: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By file name: config.json, preprocessor_config.json."""
    notes: tuple[str, ...] = ()
    """What reading the file had to choose."""
    raw: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """The tensors under the very names of the file."""
    licence: str | None = None
    """What the files say of it."""

    def renamed(self, tensors: dict[str, Tensor]) -> "Checkpoint":
        """The same with other names."""
        return dataclasses.replace(self, tensors=tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def document(self, name: str) -> dict[str, Any]:
        """One of the documents; empty if it is not there."""
        found = self.documents.get(name, {})
        if not isinstance(found, dict):
            raise DamagedError(
                f"{name} beside {str(self.path)!r} must be a JSON object, got {type(found).__name__}.",
                path=self.path.parent / name,
            )
        return found


@dataclasses.dataclass(frozen=True)
class Reading:
    """A checkpoint understood: the model that it is, and what had to be assumed."""

    config: ModelConfig
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    has_head: bool = True
    notes: tuple[str, ...] = ()
    """What the files did not say, and what was taken instead."""
    about_pixels: str | None = None
    """The same of the preprocessing, unless the user says it."""
    left_out: frozenset[str] = frozenset()
    """Tensors that the model does not compute with: they are listed and not read."""


class Vocabulary(abc.ABC):
    """One library's names. `entries` serves both directions; the rest says what a file means and what to write."""

    name: ClassVar[str]
    file: ClassVar[str] = "model.safetensors"
    """The file of tensors that we write."""

    @abc.abstractmethod
    def recognises(self, names: Collection[str]) -> bool:
        """Whether tensors of these names are of this library."""

    def prepare(self, checkpoint: Checkpoint) -> Checkpoint:
        """The same checkpoint without wrappings: prefixes, stacked layers."""
        return checkpoint

    @abc.abstractmethod
    def read(self, checkpoint: Checkpoint, told: ModelConfig | None) -> Reading:
        """Which model it is. `told` is what the user says it is, where the file alone cannot tell."""

    @abc.abstractmethod
    def entries(self, config: ModelConfig, names: Collection[str] | None = None) -> Iterable[Entry]:
        """The dictionary for a model; `names` are those found, where a library has two spellings."""

    def check(self, bundle: Bundle) -> list[str]:
        """Refuse to write what the library cannot express; returns what it will compute a little otherwise."""
        raise UsageError(f"{self.name} is read, but not written.")

    def documents(self, bundle: Bundle) -> dict[str, Any]:
        """JSON files that the library reads beside the tensors."""
        return {}


def parameter_names(config: ModelConfig) -> list[str]:
    """Names of all tensors of a model of ours."""
    with torch.device("meta"):
        return list(build(config).state_dict())


def count_layers(names: Iterable[str], prefix: str, ending: str = ".") -> int:
    """How many numbered layers have tensors: `blocks.0.`, `blocks.1.`, ..."""
    found = {name.removeprefix(prefix).partition(ending)[0] for name in names if name.startswith(prefix)}
    numbers = {int(number) for number in found if number.isdecimal()}
    if not numbers or numbers != set(range(len(numbers))):
        raise DamagedError(f"Layers {prefix}0, 1, ... must be there without gaps, got {sorted(numbers)}.")
    return len(numbers)


def square_grid(patches: int) -> tuple[int, int]:
    """The grid of so many patches, if nothing says that it is another than a square."""
    side = math.isqrt(patches)
    if side < 1 or side * side != patches:
        raise UsageError(f"Positions of {patches} patches are no square: say the size with --model and --resolution.")
    return side, side


def usual_heads(width: int, told: ModelConfig | None) -> tuple[int, str | None]:
    """Heads cannot be seen in a state dict: what the user says; else those of the published model of this width, or 64
    features for each, which is said."""
    if isinstance(told, ViTConfig):
        if told.width != width:
            raise UsageError(f"Model must be what the file holds, got {told.name} of width {told.width} for {width}.")
        return told.heads, None
    if (heads := _PUBLISHED_HEADS.get(width)) is not None:
        return (
            heads,
            f"the file does not say the number of heads; {heads} are taken, as published models of width {width} have",
        )
    if width % 64:
        raise UsageError(f"Heads must be said with --model for width {width}: the file does not say them.")
    return width // 64, f"the file does not say the number of heads; {width // 64} are taken ({width} / 64)"


# Of the models that have a name; and SoViT-400m (arXiv 2305.13035).
_PUBLISHED_HEADS = {
    **{known.width: known.heads for known in MODELS.values() if isinstance(known, ViTConfig) and known.width >= 192},
    1152: 16,
}


def refuse_strange_vit(config: ModelConfig, library: str, *, hybrids: bool) -> None:
    """What only we have cannot be written for others."""
    if not isinstance(config, ViTConfig):
        return
    if isinstance(config, HybridConfig) and (not hybrids or config.stem != "resnet"):
        raise UsageError(f"{library} must have the model to write it, got a hybrid with stem {config.stem}.")
    plain = {
        "position": "learned-1d", "placement": "once", "attention": "global", "norm": "layer", "norm_order": "pre",
        "stride": None, "padding": (0, 0),
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(config, name) != value:
            spoken = name.replace("_", " ")
            raise UsageError(f"{library} must have the model to write it, got {spoken} {getattr(config, name)!r}.")
    if config.patch[0] != config.patch[1]:
        raise UsageError(f"{library} must have the model to write it, got patches of {config.patch}.")


def place_positions(
    settings: dict[str, Any],
    rows: int,
    told: ModelConfig | None,
    size: Iterable[int] | None,
    plan: type[ViTConfig],
) -> dict[str, Any]:
    """Resolution and whether [CLS] has a row, from the number of rows and the size that the file states, if any."""
    scale = 1 if plan is ViTConfig else 4 * 2 ** max(len(settings["stem_layers"]) - 1, 0)
    steps = [patch * scale for patch in settings["patch"]]
    has_class = settings["pool"] == "cls"
    if size is not None:
        resolution = tuple(size)
        count = (resolution[0] // steps[0]) * (resolution[1] // steps[1])
        if rows - count in (0, int(has_class)):
            return {"resolution": resolution, "class_position": bool(rows - count) or not has_class}
    if isinstance(told, ViTConfig) and rows - told.patches in (0, int(has_class)):
        return {"resolution": told.resolution, "class_position": bool(rows - told.patches) or not has_class}
    side = round(rows**0.5)
    class_row = int(has_class and side * side != rows)
    grid = square_grid(rows - class_row)
    resolution = (grid[0] * steps[0], grid[1] * steps[1])
    return {"resolution": resolution, "class_position": bool(class_row) or not has_class}


def usual_preprocess(config: ModelConfig) -> tuple[Preprocess, str]:
    """What most models expect, and that it was assumed."""
    if config.channels == 3:
        note = "the files do not say mean and std; ImageNet's are taken"
        return Preprocess(resolution=config.resolution), note
    half = (0.5,) * config.channels
    return Preprocess(
        resolution=config.resolution, mean=half, std=half
    ), "the files do not say mean and std; 0.5 is taken"


def grid_of(patches: int, patch: Sequence[int], told: ModelConfig | None) -> Pair:
    """The resolution of so many patches: what the user says, if it fits; else a square."""
    if told is not None:
        rows, columns = (side // one for side, one in zip(told.resolution, patch, strict=True))
        if rows * columns == patches:
            return rows * patch[0], columns * patch[1]
    rows, columns = square_grid(patches)
    return rows * patch[0], columns * patch[1]


def require_plain_vit(config: ModelConfig, library: str, **fixed: Any) -> None:
    """Refuse what a library with nothing but the paper's ViT cannot express; `fixed` are its own limits."""
    refuse_strange_vit(config, library, hybrids=False)
    if not isinstance(config, ViTConfig) or isinstance(config, HybridConfig):
        raise UsageError(f"{library} must have the family to write it, got {config.family}.")
    require(config, library, pool="cls", registers=0, class_position=True, layer_scale=None, **fixed)
    if config.resolution[0] != config.resolution[1]:
        raise UsageError(f"{library} must be square, got {config.resolution}.")


def require(config: ModelConfig, library: str, **fixed: Any) -> None:
    """Refuse to write a model with other settings than a library's code has."""
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise UsageError(f"{library} must have {name.replace('_', ' ')} {value!r}, got {getattr(config, name)!r}.")


def other_epsilon(config: ModelConfig, library: str) -> list[str]:
    """A word, if a library that cannot be told computes with another epsilon."""
    epsilon = getattr(config, "norm_epsilon", 1e-6)
    return [f"{library} computes with epsilon 1e-06, this model with {epsilon:g}"] if epsilon != 1e-6 else []


def named(config: ModelConfig) -> ModelConfig:
    """The same configuration under the name of the model that it is, if it is one of ours."""
    ignored = {
        "name", "classes", "channels", "resolution", "resize_rule", "activation", "norm_epsilon", "pool",
        "representation", "class_position", "dropout", "drop_path",
    }  # fmt: skip

    def shape(one: ModelConfig) -> dict[str, Any]:
        return {key: value for key, value in one.to_json().items() if key not in ignored}

    for name, known in MODELS.items():
        if known.family == config.family and shape(known) == shape(config):
            return config.replace(name=name)
    return config


def distinct(labels: Iterable[object]) -> tuple[tuple[str, ...], str | None]:
    """Labels that differ from each other: ImageNet has two cranes. Later ones get their number, which is said."""
    seen: set[str] = set()
    found, repeated = [], []
    for index, label in enumerate(labels):
        text = str(label) or f"class {index}"
        if text in seen:
            repeated.append(text)
            text = f"{text} ({index})"
        seen.add(text)
        found.append(text)
    note = f"labels that came twice got their number: {', '.join(repeated[:5])}" if repeated else None
    return tuple(found), note


def notes_of(notes: Iterable[str | None]) -> tuple[str, ...]:
    """The notes that there are."""
    return tuple(note for note in notes if note)


def join_tensors(entries: Iterable[Entry], checkpoint: Checkpoint, left_out: Collection[str]) -> dict[str, Tensor]:
    """Our tensors from theirs. Anything missing or left over is a refusal that names it."""
    tensors, used, missing, ours = checkpoint.tensors, set(left_out), [], {}
    for entry in entries:
        used |= set(entry.theirs)
        absent = [name for name in entry.theirs if name not in tensors]
        missing += absent
        if not absent:
            try:
                joined = entry.join([tensors[name].float() for name in entry.theirs])
            except (RuntimeError, ValueError, IndexError) as error:
                raise DamagedError(f"{', '.join(entry.theirs)} do not fit the model ({first_line(error)}).") from None
            # The only copy, into memory of its own: kernels choose their path by alignment, and a view into a file
            # would answer with other last bits.
            ours[entry.ours] = joined.clone(memory_format=torch.contiguous_format)
    unknown = sorted(tensors.keys() - used)
    if missing or unknown:
        problems = [f"{len(missing)} missing ({_some(missing)})"] if missing else []
        problems += [f"{len(unknown)} of unknown meaning ({_some(unknown)})"] if unknown else []
        raise UsageError(
            f"Every tensor of {str(checkpoint.path)!r} must have its place, got {' and '.join(problems)}."
            " Nothing is loaded in part."
        )
    return ours


def split_tensors(entries: Iterable[Entry], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors from ours, all of them."""
    theirs: dict[str, Tensor] = {}
    spoken_of = set()
    for entry in entries:
        spoken_of.add(entry.ours)
        theirs |= zip(entry.theirs, (part.contiguous() for part in entry.split(ours[entry.ours])), strict=True)
    if unspoken := sorted(ours.keys() - spoken_of):
        raise UsageError(f"Model must have only tensors that the format knows, got {_some(unspoken)}, too.")
    return theirs


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
