"""What a checkpoint does not state: inferred from the shapes of its tensors, or the usual value with a note."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.settings import Pair
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.families.vit.sizes import HEADS
from vitrail.models.zoo import MODELS


def count_layers(names: Iterable[str], prefix: str, ending: str = ".") -> int:
    """Number of layers that have tensors: `blocks.0.`, `blocks.1.`, ..."""
    found = {name.removeprefix(prefix).partition(ending)[0] for name in names if name.startswith(prefix)}
    numbers = {int(number) for number in found if number.isdecimal()}
    if not numbers or numbers != set(range(len(numbers))):
        raise CorruptFileError(f"Layers {prefix}0, 1, ... must be there without gaps, got {sorted(numbers)}.")
    return len(numbers)


def square_grid(patches: int) -> tuple[int, int]:
    """The square grid of this number of patches."""
    side = math.isqrt(patches)
    if side < 1 or side * side != patches:
        raise UsageError(
            f"Positions of {patches} patches are not a square: state the size with --model and --resolution."
        )
    return side, side


def infer_heads(width: int, told: ModelConfig | None) -> tuple[int, str | None]:
    """Number of heads, which a state dict does not contain: as the user states; otherwise that of the published model
    of this width, or width / 64 with a note."""
    if told is not None and told.heads is not None:
        if told.width != width:
            raise UsageError(f"Model must be what the file holds, got {told.name} of width {told.width} for {width}.")
        return told.heads, None
    if (heads := HEADS.get(width)) is not None:
        return (
            heads,
            f"the file does not state the number of heads; {heads} are taken, as in published models of width {width}",
        )
    if width % 64:
        raise UsageError(f"Heads must be stated with --model for width {width}: the file does not state them.")
    return width // 64, f"the file does not state the number of heads; {width // 64} are taken ({width} / 64)"


def infer_positions(
    settings: dict[str, Any],
    rows: int,
    told: ModelConfig | None,
    size: Iterable[int] | None,
) -> dict[str, Any]:
    """Set the resolution and whether [CLS] has a position, from the number of rows of the table and the size that the
    file states, if any."""
    scale = 4 * 2 ** max(len(settings["stem_layers"]) - 1, 0) if "stem_layers" in settings else 1
    steps = [patch * scale for patch in settings["patch"]]
    has_class = settings["pool"] == "cls"
    if size is not None:
        resolution = tuple(size)
        count = (resolution[0] // steps[0]) * (resolution[1] // steps[1])
        if rows - count in (0, int(has_class)):
            return {"resolution": resolution, "class_position": bool(rows - count) or not has_class}
    if told is not None and told.grid is not None and rows - math.prod(told.grid) in (0, int(has_class)):
        return {"resolution": told.resolution, "class_position": bool(rows - math.prod(told.grid)) or not has_class}
    side = round(rows**0.5)
    class_row = int(has_class and side * side != rows)
    grid = square_grid(rows - class_row)
    resolution = (grid[0] * steps[0], grid[1] * steps[1])
    return {"resolution": resolution, "class_position": bool(class_row) or not has_class}


def infer_resolution(patches: int, patch: Sequence[int], told: ModelConfig | None) -> Pair:
    """The resolution for this number of patches: as the user states, if it fits; otherwise a square."""
    if told is not None:
        rows, columns = (side // one for side, one in zip(told.resolution, patch, strict=True))
        if rows * columns == patches:
            return rows * patch[0], columns * patch[1]
    rows, columns = square_grid(patches)
    return rows * patch[0], columns * patch[1]


def default_preprocess(config: ModelConfig) -> tuple[Preprocess, str]:
    """The usual preprocessing, and a note that it was assumed."""
    if config.channels == 3:
        note = "the files do not state mean and std; ImageNet's are taken"
        return Preprocess(resolution=config.resolution), note
    half = (0.5,) * config.channels
    note = "the files do not state mean and std; 0.5 is taken"
    return Preprocess(resolution=config.resolution, mean=half, std=half), note


def with_published_name(config: ModelConfig) -> ModelConfig:
    """The configuration with the name of the published model it equals, if there is one."""

    def shape(config: ModelConfig) -> dict[str, Any]:
        return {key: value for key, value in config.to_document().items() if key not in _NOT_IN_A_NAME}

    for name, published in MODELS.items():
        if shape(published) == shape(config):
            return config.replace(name=name)
    return config


# Settings that models of one name may differ in.
_NOT_IN_A_NAME = frozenset(
    [
        "name",
        "classes",
        "channels",
        "resolution",
        "resize_rule",
        "activation",
        "norm_epsilon",
        "pool",
        "representation",
        "class_position",
        "dropout",
        "drop_path",
    ]
)


def make_unique(labels: Iterable[object]) -> tuple[tuple[str, ...], str | None]:
    """Unique labels, and a note: repeated ones (ImageNet has two cranes) get their index."""
    seen: set[str] = set()
    found, repeated = [], []
    for index, label in enumerate(labels):
        text = str(label) or f"class {index}"
        if text in seen:
            repeated.append(text)
            text = f"{text} ({index})"
        seen.add(text)
        found.append(text)
    note = f"repeated labels got their index: {', '.join(repeated[:5])}" if repeated else None
    return tuple(found), note


def drop_empty_notes(notes: Iterable[str | None]) -> tuple[str, ...]:
    """The notes that are not empty."""
    return tuple(note for note in notes if note)
