"""Infer the settings that a checkpoint does not state: from the shapes of its tensors, or defaults with a note."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.settings import Pair
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.families.vit.sizes import HEADS
from vitrail.models.zoo import MODELS


def count_layers(names: Iterable[str], prefix: str, ending: str = ".") -> int:
    """Count the layers in tensor names such as `blocks.0.`, `blocks.1.`, ... Raise CorruptFileError for gaps."""
    indices = {name.removeprefix(prefix).partition(ending)[0] for name in names if name.startswith(prefix)}
    numbers = {int(index) for index in indices if index.isdecimal()}
    if not numbers or numbers != set(range(len(numbers))):
        raise CorruptFileError(f"Layers {prefix}0, 1, ... must be numbered without gaps, got {sorted(numbers)}.")
    return len(numbers)


def mae_decoder_names(names: Collection[str]) -> frozenset[str]:
    """Return the names of the tensors of MAE's decoder, which reconstructs pixels in pre-training; empty for other
    models."""
    decoder = frozenset(name for name in names if name.startswith(("decoder_", "decoder.decoder_")))
    return decoder | ({"mask_token", "decoder.mask_token"} & set(names)) if decoder else decoder


def square_grid(patches: int) -> tuple[int, int]:
    """Return rows and columns of a square grid with this number of patches. Raise UsageError if it is not a square."""
    side = math.isqrt(patches)
    if side < 1 or side * side != patches:
        raise UsageError(
            f"Number of patches must be a square, got {patches}. State the size with --model and --resolution."
        )
    return side, side


def infer_heads(width: int, user_config: ModelConfig | None) -> tuple[int, str | None]:
    """Infer the number of attention heads, which a state dict does not contain, and a note if it is assumed.

    Without the configuration of the user, it is that of the published models of this width, or else width / 64.
    """
    if user_config is not None and user_config.heads is not None:
        if user_config.width != width:
            raise UsageError(
                f"Model must be the one in the file, got {user_config.name} of width {user_config.width} for {width}."
            )
        return user_config.heads, None
    if (heads := HEADS.get(width)) is not None:
        return (
            heads,
            f"the file does not state the number of heads; {heads} are used, as in published models of width {width}",
        )
    if width % 64:
        raise UsageError(f"Heads must be stated with --model for width {width}: the file does not state them.")
    return width // 64, f"the file does not state the number of heads; {width // 64} are used ({width} / 64)"


def infer_positions(
    settings: dict[str, Any],
    rows: int,
    user_config: ModelConfig | None,
    size: Iterable[int] | None,
) -> dict[str, Any]:
    """Infer the settings `resolution` and `class_position` from the number of rows of the table of positions.

    `size` is the resolution that the file states, if any.
    """
    scale = 4 * 2 ** max(len(settings["stem_layers"]) - 1, 0) if "stem_layers" in settings else 1
    steps = [patch * scale for patch in settings["patch"]]
    has_class = settings["pool"] == "cls"
    if size is not None:
        resolution = tuple(size)
        count = (resolution[0] // steps[0]) * (resolution[1] // steps[1])
        if rows - count in (0, int(has_class)):
            return {"resolution": resolution, "class_position": bool(rows - count) or not has_class}
    if (
        user_config is not None
        and user_config.grid is not None
        and rows - math.prod(user_config.grid) in (0, int(has_class))
    ):
        return {
            "resolution": user_config.resolution,
            "class_position": bool(rows - math.prod(user_config.grid)) or not has_class,
        }
    side = round(rows**0.5)
    class_row = int(has_class and side * side != rows)
    grid = square_grid(rows - class_row)
    resolution = (grid[0] * steps[0], grid[1] * steps[1])
    return {"resolution": resolution, "class_position": bool(class_row) or not has_class}


def infer_resolution(patches: int, patch: Sequence[int], user_config: ModelConfig | None) -> Pair:
    """Infer the resolution from the number of patches: as in the user's configuration if it fits, else a square."""
    if user_config is not None:
        rows, columns = (side // patch_side for side, patch_side in zip(user_config.resolution, patch, strict=True))
        if rows * columns == patches:
            return rows * patch[0], columns * patch[1]
    rows, columns = square_grid(patches)
    return rows * patch[0], columns * patch[1]


def default_preprocess(config: ModelConfig) -> tuple[Preprocess, str]:
    """Return the usual preprocessing for a model, and a note that it was assumed."""
    if config.channels == 3:
        note = "the files do not state mean and std; those of ImageNet are used"
        return Preprocess(resolution=config.resolution), note
    half = (0.5,) * config.channels
    note = "the files do not state mean and std; 0.5 is used"
    return Preprocess(resolution=config.resolution, mean=half, std=half), note


def with_published_name(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the name of the published model that it equals, if any."""

    def named_settings(config: ModelConfig) -> dict[str, Any]:
        return {key: value for key, value in config.to_document().items() if key not in _FREE_SETTINGS}

    for name, published in MODELS.items():
        if named_settings(published) == named_settings(config):
            return config.replace(name=name)
    return config


# Settings in which models of the same name may differ.
_FREE_SETTINGS = frozenset(
    [
        "name",
        "classes",
        "head_layers",
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
    """Append the index to repeated labels (ImageNet has two cranes). Return the labels, and a note if any changed."""
    seen: set[str] = set()
    unique, repeated = [], []
    for index, label in enumerate(labels):
        text = str(label) or f"class {index}"
        if text in seen:
            repeated.append(text)
            text = f"{text} ({index})"
        seen.add(text)
        unique.append(text)
    note = f"the index was appended to repeated labels: {', '.join(repeated[:5])}" if repeated else None
    return tuple(unique), note


def drop_empty_notes(notes: Iterable[str | None]) -> tuple[str, ...]:
    """Return the notes without those that are None or empty."""
    return tuple(note for note in notes if note)
