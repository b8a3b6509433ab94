"""Recipes: the settings of training. A recipe is a short TOML file; flags take precedence over it.

The keys of a file are the fields of `Recipe`. `[augment]`, `[margin]`, `[preprocess]` and `[model]` are tables with
settings of `data.augment.config`, `training.margin_settings`, `Preprocess` and the model family.
"""

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from vitrail.core.errors import CorruptFileError, UsageError, did_you_mean
from vitrail.core.files import escape_surrogates, read_small_file
from vitrail.core.other_tools import suggest_our_name
from vitrail.core.registry import Registry
from vitrail.core.settings import Bounds, Settings, as_integer, check_integer, sentence_case
from vitrail.data.augment.config import AUGMENTATIONS, Augment
from vitrail.models.config import model_settings
from vitrail.training.margin_settings import MarginSettings

OBJECTIVES: Registry[Any] = Registry(
    "objective",
    {
        "classify": "vitrail.training.objectives.classify:Classify",
        "margin": "vitrail.training.objectives.margin:Margin",
        "masked": "vitrail.training.objectives.masked:MaskedPatches",
        "multilabel": "vitrail.training.objectives.multilabel:Multilabel",
        "next-pixel": "vitrail.training.objectives.next_pixel:NextPixel",
    },
    base="vitrail.training.objectives.base:Objective",
)
"""Training objectives by name (see `training.objectives.base`)."""

OPTIMISERS: Registry[Any] = Registry(
    "optimiser",
    {
        "adamw": "vitrail.training.optimisers.adamw:AdamW",
        "sgd": "vitrail.training.optimisers.sgd:SGD",
        "muon": "vitrail.training.optimisers.muon:MuonOptimiser",
    },
    base="vitrail.training.optimisers.base:Optimiser",
)
"""Optimisers by name (see `training.optimisers.base`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """Settings of training. Exactly one of epochs, steps and minutes is set."""

    title: ClassVar[str] = "Recipe"

    objective: str = "classify"
    """Classification into one class or (multilabel) several labels per image, an embedding of faces (margin), masked
    patch prediction (masked, for ViT), next-pixel prediction (for iGPT), or an objective of another package."""
    epochs: Annotated[int | None, Bounds(1, 10**9)] = None
    """Number of passes over the training images."""
    least_images: Annotated[int, Bounds(0, 10**12)] = 0
    """With epochs: minimum number of training images over the whole run. With few images, the number of epochs is
    increased accordingly. Ignored if a length is given by a flag."""
    steps: int | None = None
    """Number of updates."""
    minutes: Annotated[float | None, Bounds(0.01, below=10**6)] = None
    """Time limit. The number of steps is computed from the speed, which is measured at the start."""
    batch: Annotated[int, Bounds(1, 1_000_000)] = 128
    """Global batch size: images per update, over all ranks."""
    accumulate: Annotated[int, Bounds(1, 100_000)] = 1
    """Number of parts into which each rank splits its batch. They are computed one after another to save memory."""
    optimiser: str = "adamw"
    """Muon updates the matrices of the blocks with orthogonalised momentum, and AdamW the other parameters."""
    learning_rate: Annotated[float, Bounds(0, below=1e9)] = 1e-3
    """Peak learning rate."""
    rate_by_residual: bool = False
    """In fine-tuning, multiply the learning rate by the head's residual: the mean probability that the head gives to
    wrong labels on training images (see `head`). The better the frozen features are, the less they are changed.
    A learning rate that is given by a flag is not multiplied."""
    betas: Annotated[tuple[float, float], Bounds(0, below=1)] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    momentum: Annotated[float, Bounds(0, below=1)] = 0.9
    """Momentum of SGD, and of Muon (Nesterov)."""
    weight_decay: Annotated[float, Bounds(0, below=1e9)] = 0.05
    """Decay of weight matrices, multiplied by the learning rate; biases, norms, tokens and position embeddings have
    none."""
    schedule: Literal["cosine", "linear", "rsqrt", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup: Annotated[float, Bounds(0, below=1e9)] = 0.05
    """Steps in which the learning rate rises from 0; a value below 1 is a share of all steps."""
    cooldown: Annotated[float, Bounds(0, below=1.0001)] = 0.1
    """Share of all steps in which an rsqrt schedule falls linearly to its end."""
    final: Annotated[float, Bounds(0, below=1.0001)] = 0.0
    """Final learning rate as a share of the peak."""
    clip: Annotated[float, Bounds(0, below=1e9)] = 0.0
    """Maximum norm of the gradient over all parameters; 0 means no clipping."""
    average: Annotated[float, Bounds(0, below=1)] = 0.0
    """Decay of an exponential moving average of the weights, which is evaluated and saved instead of the last weights;
    0 means no average."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Cross-entropy over classes, or binary cross-entropy for each class (arXiv 2006.07159, AugReg)."""
    label_smoothing: Annotated[float, Bounds(0, below=1)] = 0.0
    """Share of the label probability that is spread over all classes."""
    head_bias: Annotated[float, Bounds(-1e3, below=1e3)] = 0.0
    """Initial bias of the head; about -log(classes) suits the sigmoid loss."""
    layer_decay: Annotated[float, Bounds(0.01, below=1.0001)] = 1.0
    """Factor of the learning rate from each block to the previous one."""
    freeze: bool = False
    """Train only the head."""
    head: Literal["zero", "probe"] = "zero"
    """In fine-tuning, the initial head for new classes: zeros, or (probe) fitted to the frozen features by least
    squares. An embedding of faces starts at random, or (probe) with the whitening of features within identities."""
    least_steps: Annotated[int, Bounds(0, 10**9)] = 0
    """Minimum number of steps with a time limit. If fewer fit, the head fitted by least squares is not trained."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of storing its activations: less memory, more time."""
    per_class: Annotated[int | None, Bounds(1, 10**9)] = None
    """Train on at most this many images of each class, chosen by the seed; a larger number contains the images of a
    smaller one. None: all images."""
    holdout: Annotated[float, Bounds(0, below=1)] = 0.1
    """Share of the training images held out for validation, if DATA has no val split; 0 means none."""
    evaluate_every: Annotated[int, Bounds(1, 10**6)] = 1
    """Epochs between evaluations on the held-out images; the last epoch is always evaluated."""
    patience: Annotated[int | None, Bounds(1, 10**9)] = None
    """End the run after this many evaluations on the held-out images without a better score, and keep the best
    weights. The schedule of the learning rate does not change. None: train to the end and keep the last weights."""
    on_damage: Literal["error", "skip", "substitute"] = "error"
    """If an image cannot be read: stop the run, skip the image, or substitute the next one."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is not finite: stop the run, or skip the step."""
    margin: MarginSettings = dataclasses.field(default_factory=MarginSettings)
    """Margin and scale of the objective `margin`."""
    augment: Augment = dataclasses.field(default_factory=Augment)
    """Augmentation of training images."""
    preprocess: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of `Preprocess` that differ from the defaults."""
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the model that differ from those of its name."""

    def __post_init__(self) -> None:
        OBJECTIVES.check(self.objective)
        OPTIMISERS.check(self.optimiser)
        super().__post_init__()
        for name, settings_class in (("augment", Augment), ("margin", MarginSettings)):
            if not isinstance(getattr(self, name), settings_class):
                object.__setattr__(self, name, settings_class.from_json(getattr(self, name)))
        if self.steps is not None:
            steps = check_integer("steps", self.steps, low=0 if self.head == "probe" else 1, high=10**9)
            object.__setattr__(self, "steps", steps)
        if self.learning_rate == 0:
            raise UsageError("Learning rate must be above 0, got 0.")
        for name in ("preprocess", "model"):
            if not isinstance(getattr(self, name), dict):
                raise UsageError(f"{sentence_case(name)} must be a table of settings, got {getattr(self, name)!r}.")

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Return the docstring of each setting, preceded by its allowed values, including names in registries."""
        meanings = super().meanings()
        for registry in (OBJECTIVES, OPTIMISERS):
            meanings[registry.category] = f"{', '.join(registry)}. {meanings[registry.category]}"
        return meanings

    def with_length(self, *, epochs: int | None, steps: int | None, minutes: float | None) -> Self:
        """Return a copy of the recipe with a new length, or the recipe itself if all arguments are None.

        Raise UsageError for more than one length, or if neither the arguments nor the recipe have one.
        """
        lengths = {"epochs": epochs, "steps": steps, "minutes": minutes}
        if sum(value is not None for value in lengths.values()) > 1:
            raise UsageError("Length must be one of epochs, steps and minutes, got more than one.")
        if any(value is not None for value in lengths.values()):
            return self.replace(**lengths, least_images=0)
        if sum(getattr(self, name) is not None for name in lengths) != 1:
            raise UsageError("Length must be given: epochs, steps or minutes.")
        return self

    def check_length(self) -> None:
        """Raise UsageError unless the recipe has exactly one length."""
        lengths = {name: getattr(self, name) for name in LENGTHS if getattr(self, name) is not None}
        if len(lengths) != 1:
            text = " and ".join(f"{name}={value}" for name, value in lengths.items())
            raise UsageError(f"Recipe must have one of epochs, steps and minutes, got {text or 'none'}.")

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON types."""
        return {**super().to_json(), "augment": self.augment.to_json(), "margin": self.margin.to_json()}


def find_recipe(name: str) -> Recipe:
    """Return the built-in recipe with this name, or the recipe in the TOML file at this path."""
    return read_recipe(recipe_text(name), name)


def recipe_text(name: str) -> str:
    """Return the TOML document of a built-in recipe or of a file, with its comments."""
    names = recipe_names()
    if name in names:
        return resources.files("vitrail").joinpath("recipes", f"{name}.toml").read_text(encoding="utf-8")
    path = Path(name)
    if path.suffix != ".toml" or not path.is_file():
        raise UsageError(
            f"Recipe must be one of {', '.join(names)} or a .toml file that exists, got {name!r}."
            f"{did_you_mean(name, names)}"
        )
    try:
        return read_small_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise CorruptFileError(path=name, cause=f"cannot be read ({reason})") from None


def recipe_purpose(text: str) -> str:
    """Return the purpose of a recipe: the first sentence of the comment at the top of its TOML document."""
    comment = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    return re.split(r"(?<=\.)\s", " ".join(line[2:].strip() for line in comment), maxsplit=1)[0]


def split_change(change: str) -> tuple[str, Any]:
    """Split a change such as `batch=64`, `augment.mixup=0.2` or `model.pool=gap` into the key and the parsed value."""
    key, equals, text = change.partition("=")
    if not equals:
        raise UsageError(f"Setting must be KEY=VALUE with a key of the recipe, got {change!r}.")
    try:
        return key, _read_toml(f"value = {text}")["value"]
    except ValueError:
        return key, text


def change_recipe(recipe: Recipe, changes: Iterable[str | tuple[str, Any]]) -> Recipe:
    """Return a copy of the recipe with changed settings.

    A change is a pair of key and value, or a text that `split_change` accepts. A new length replaces the old one.
    """
    fields = recipe.to_json()
    changed: set[str] = set()
    for change in changes:
        key, value = split_change(change) if isinstance(change, str) else change
        value = list(value) if isinstance(value, tuple) else value  # a TOML document has lists
        value = value if (number := as_integer(value)) is None else number
        table, _, name = key.rpartition(".")
        if not name or table not in ("", "augment", "margin", "preprocess", "model"):
            raise UsageError(f"Setting must be KEY=VALUE with a key of the recipe, got {key!r}.")
        if key in changed:
            raise UsageError(f"Setting {key!r} must be given once, got it twice.")
        changed.add(key)
        settings = fields[table] if table else fields
        is_known = name in settings or (table == "augment" and Augment.has(name))
        if table != "model" and table != "preprocess" and not is_known:
            keys = setting_keys()
            keys |= {other_name: keys[own_name] for other_name, own_name in suggest_our_name(name, keys).items()}
            raise UsageError(f"Setting must be a key of a recipe, got {key!r}.{did_you_mean(name, (), keys)}")
        if not table and name in LENGTHS:  # a new length replaces the others
            fields |= dict.fromkeys(LENGTHS) | ({} if "least_images" in changed else {"least_images": 0})
        settings[name] = value
    if "learning_rate" in changed and "rate_by_residual" not in changed:
        fields["rate_by_residual"] = False
    return Recipe.from_json(fields)


def adjust_recipe(
    recipe: Recipe,
    flags: Mapping[str, Any],
    settings: Mapping[str, Any] | Iterable[str],
    **lengths: Any,
) -> Recipe:
    """Return a copy of the recipe with changes from the command line.

    `flags` are settings that have a flag of their own (None: unchanged), `settings` those of `--set`, and `lengths` the
    arguments of `Recipe.with_length`. Raise UsageError for a setting that is given twice.
    """
    flags = {name: value for name, value in flags.items() if value is not None}
    if isinstance(settings, str):
        settings = (settings,)
    settings = settings if isinstance(settings, Mapping) else list(settings)
    for key in settings:
        if not isinstance(key, str):
            raise UsageError(f"Settings must have strings as keys, got {key!r}. Write them as clip=1 or {{'clip': 1}}.")
    changes = list(settings.items() if isinstance(settings, Mapping) else map(split_change, settings))
    for key, _ in changes:
        if key in flags or lengths.get(key) is not None:
            name = key.rpartition(".")[2]
            flag = "lr" if name == "learning_rate" else name
            raise UsageError(f"{sentence_case(name)} must be given once, got {flag} and the setting {key}.")
    return change_recipe(recipe, [*changes, *flags.items()]).with_length(**lengths)


LENGTHS = ("epochs", "steps", "minutes")
"""Settings of a recipe that state the length of a run. Exactly one of them is set."""


def setting_keys() -> dict[str, str]:
    """Return the full key of every setting of a recipe, by its name without the table: `augment.mixup` for `mixup`."""
    fields = Recipe().to_json()
    in_model = {name: f"model.{name}" for name in model_settings()}
    in_tables = {name: f"{table}.{name}" for table in ("augment", "margin") for name in fields[table]}
    in_tables |= {name: f"augment.{name}" for name in AUGMENTATIONS.extension_names}
    return in_model | in_tables | {name: name for name, value in fields.items() if not isinstance(value, dict)}


def recipe_names() -> list[str]:
    """Return the sorted names of the built-in recipes."""
    folder = resources.files("vitrail").joinpath("recipes")
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def read_recipe(text: str, name: str) -> Recipe:
    """Return the recipe in the TOML document `text`; errors name `name`."""
    try:
        fields = _read_toml(text)
    except ValueError as error:
        raise CorruptFileError(path=name, cause=f"is not a TOML document ({error})") from None
    try:
        return Recipe.from_json(fields)
    except UsageError as error:
        raise UsageError(f"{error} (in recipe {name!r})") from None


def _read_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document. Raise ValueError if it is invalid or has types that settings cannot have."""
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_setting_types(document)
    return document


def _check_setting_types(value: object) -> None:
    """Raise ValueError for dates, times and integers beyond 64 bits in a parsed TOML document."""
    match value:
        case dict():
            for part in value.values():
                _check_setting_types(part)
        case list():
            for part in value:
                _check_setting_types(part)
        case int() if not -(2**63) <= value < 2**63:  # the range of TOML integers, which tomllib does not check
            raise ValueError("it has an integer beyond 64 bits")
        case str() | bool() | int() | float():
            pass
        case _:
            raise ValueError("it has a date or a time")


def write_toml(fields: Mapping[str, Any]) -> str:
    """Return a TOML document of values and tables. Entries that are None are omitted, because TOML has no null."""
    import tomli_w  # imported here, because most commands do not write TOML

    return tomli_w.dumps(_to_toml_value(fields))


def _to_toml_value(value: Any) -> Any:
    """Return the value without None in it, and with text that can be encoded in UTF-8."""
    match value:
        case str():
            return escape_surrogates(value)
        case Mapping():
            return {key: _to_toml_value(part) for key, part in value.items() if part is not None}
        case list() | tuple():
            return [_to_toml_value(part) for part in value]
    return value
