"""How a model is trained, in numbers. A recipe is a short TOML file of these settings; flags override it.

A file's keys are the fields below; `[augment]`, `[preprocess]` and `[model]` are tables with settings of
`configs.augment`, of `Preprocess` and of the model's family.
"""

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from vitrail.configs.augment import Augment
from vitrail.configs.vit import ViTConfig
from vitrail.errors import DamagedError, UsageError, did_you_mean
from vitrail.extensions import Registry
from vitrail.settings import Settings, check_integer, check_number, spoken
from vitrail.storage import read_document, writable

OBJECTIVES: Registry[Any] = Registry(
    "objective",
    {
        "classify": "vitrail.training.objectives.classify:Classify",
        "masked": "vitrail.training.objectives.masked:MaskedPatches",
        "next-pixel": "vitrail.training.objectives.next_pixel:NextPixel",
    },
)
"""What a model can be trained to do: names, and the classes behind them (see `training.objectives.base`)."""

OPTIMISERS: Registry[Any] = Registry(
    "optimiser",
    {
        "adamw": "vitrail.training.optimise:ADAMW",
        "sgd": "vitrail.training.optimise:SGD",
        "muon": "vitrail.training.optimise:MUON",
    },
)
"""How weights are updated: names, and the `Optimiser` behind them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """What happens to a model between its first weights and its last. Exactly one of epochs, steps, minutes is set."""

    title: ClassVar[str] = "Recipe"

    objective: str = "classify"
    """Classes; or the paper's masked patches (ViT); or the next pixel (iGPT); or what another package adds."""
    epochs: int | None = None
    """How often every training image is seen."""
    steps: int | None = None
    """Number of updates."""
    minutes: float | None = None
    """Time to spend: measured once, then a fixed number of steps."""
    batch: int = 128
    """Images of one update, over all ranks."""
    accumulate: int = 1
    """Parts that each rank computes one after the other, to save memory."""
    optimiser: str = "adamw"
    """Muon turns momentum of the blocks' matrices into steps of equal size in all directions; AdamW does the rest."""
    learning_rate: float = 1e-3
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Memory of AdamW's two averages."""
    momentum: float = 0.9
    """Of SGD; of Muon, with Nesterov's correction."""
    weight_decay: float = 0.05
    """Pull of weight matrices towards 0; biases, norms, tokens and positions feel none. Times the learning rate."""
    schedule: Literal["cosine", "linear", "rsqrt", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup: float = 0.05
    """Steps in which the learning rate rises from 0; below 1, the share of all steps."""
    cooldown: float = 0.1
    """Share of all steps in which an rsqrt schedule falls to its end in a line."""
    final: float = 0.0
    """The last learning rate as a share of the highest."""
    clip: float = 0.0
    """Longest gradient (norm over all parameters); 0 is off."""
    average: float = 0.0
    """Decay of a running average of the weights, which is then what is evaluated and kept; 0 is off."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Cross-entropy over classes, or one yes or no for each (arXiv 2006.07159, AugReg)."""
    label_smoothing: float = 0.0
    """Share of the label that is spread over all classes."""
    head_bias: float = 0.0
    """First bias of the head; about -log(classes) suits the sigmoid loss."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each block to the one before it."""
    freeze: bool = False
    """Train the head alone."""
    head: Literal["zero", "probe"] = "zero"
    """In fine-tuning, a head for new classes begins at zero, or with what least squares makes of the frozen model's
    features; after that, no step at all may be enough."""
    least_steps: int = 0
    """If fewer steps than these fit into the minutes, a head by least squares stays alone and no step is made; but 20
    steps are enough if they are 5 epochs."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass instead of remembering it: less memory, more time."""
    holdout: float = 0.1
    """Share of the training images held out to watch progress, if DATA has no val split; 0 is off."""
    evaluate_every: int = 1
    """Epochs between evaluations on the held-out images; the last epoch is always evaluated."""
    on_damage: Literal["error", "skip", "substitute"] = "error"
    """An image that cannot be read stops the run, is left out, or is replaced by the next one."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not a number stops the run, or its step is left out."""
    augment: Augment = dataclasses.field(default_factory=Augment)
    """What happens to images in training."""
    preprocess: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of `Preprocess` that differ from its defaults."""
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the model that differ from its name's."""

    def __post_init__(self) -> None:
        OBJECTIVES.check(self.objective)
        OPTIMISERS.check(self.optimiser)
        self._check_choices(("schedule", "loss", "head", "on_damage", "on_nonfinite"))
        self._check_flags(("freeze", "activation_checkpointing"))
        if not isinstance(self.augment, Augment):
            object.__setattr__(self, "augment", Augment.from_json(self.augment))
        if self.epochs is not None:
            check_integer("epochs", self.epochs, low=1, high=10**9)
        if self.steps is not None:
            check_integer("steps", self.steps, low=0 if self.head == "probe" else 1, high=10**9)
        if self.minutes is not None:
            check_number("minutes", self.minutes, low=0.01, below=10**6)
        check_integer("batch", self.batch, low=1, high=1_000_000)
        check_integer("accumulate", self.accumulate, low=1, high=100_000)
        check_integer("least_steps", self.least_steps, low=0, high=10**9)
        check_integer("evaluate_every", self.evaluate_every, low=1, high=10**6)
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise UsageError(f"Betas must be two numbers, got {self.betas!r}.")
        object.__setattr__(self, "betas", tuple(self.betas))
        for beta in self.betas:
            check_number("betas", beta, low=0, below=1)
        for name in ("momentum", "average", "label_smoothing", "holdout"):
            check_number(name, getattr(self, name), low=0, below=1)
        for name in ("learning_rate", "weight_decay", "clip", "warmup"):
            check_number(name, getattr(self, name), low=0, below=1e9)
        for name in ("cooldown", "final"):
            check_number(name, getattr(self, name), low=0, below=1.0001)
        check_number("layer_decay", self.layer_decay, low=0.01, below=1.0001)
        check_number("head_bias", self.head_bias, low=-1e3, below=1e3)
        if self.learning_rate == 0:
            raise UsageError("Learning rate must be above 0, got 0.")
        for name in ("preprocess", "model"):
            if not isinstance(getattr(self, name), dict):
                raise UsageError(f"{spoken(name)} must be a table of settings, got {getattr(self, name)!r}.")

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each setting means; of those that a registry knows, with their names before it."""
        found = super().meanings()
        for registry in (OBJECTIVES, OPTIMISERS):
            found[registry.sort] = f"{', '.join(registry)}. {found[registry.sort]}"
        return found

    def with_length(self, *, epochs: int | None, steps: int | None, minutes: float | None) -> Self:
        """The same recipe for another length; the given one of three replaces the recipe's."""
        given = {"epochs": epochs, "steps": steps, "minutes": minutes}
        if sum(value is not None for value in given.values()) > 1:
            raise UsageError("Length must be one of --epochs, --steps and --minutes, got more than one.")
        if all(value is None for value in given.values()):
            given = {name: getattr(self, name) for name in given}
        if sum(value is not None for value in given.values()) != 1:
            raise UsageError("Length must be given: --epochs, --steps or --minutes.")
        return self.replace(**given)

    def to_json(self) -> dict[str, Any]:
        """Every field, in JSON's types."""
        return {**super().to_json(), "augment": self.augment.to_json()}


def find_recipe(name: str) -> Recipe:
    """A recipe that ships with the package, by its name, or else a TOML file."""
    return read_recipe(recipe_text(name), name)


def recipe_text(name: str) -> str:
    """The TOML document of a recipe, with the comments that explain it."""
    known = recipe_names()
    if name in known:
        return resources.files("vitrail").joinpath("recipes", f"{name}.toml").read_text(encoding="utf-8")
    path = Path(name)
    if path.suffix != ".toml" or not path.is_file():
        raise UsageError(
            f"Recipe must be one of {', '.join(known)} or a .toml file that exists, got {name!r}."
            f"{did_you_mean(name, known)}"
        )
    try:
        return read_document(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise DamagedError(path=name, cause=f"cannot be read ({reason})") from None


def purpose(text: str) -> str:
    """What a recipe is for: the first sentence of the comment that its document begins with."""
    comment = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    return re.split(r"(?<=\.)\s", " ".join(line[2:].strip() for line in comment), maxsplit=1)[0]


def change_recipe(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """The recipe with settings changed: `batch=64`, `augment.mixup=0.2`, `model.pool="gap"` (or `model.pool=gap`)."""
    fields = recipe.to_json()
    changed: set[str] = set()
    for change in changes:
        key, equals, text = change.partition("=")
        table, _, name = key.rpartition(".")
        if not equals or not name or table not in ("", "augment", "preprocess", "model"):
            raise UsageError(f"Setting must be KEY=VALUE with a key of the recipe, got {change!r}.")
        if key in changed:
            raise UsageError(f"Setting {key!r} must be given once, got it twice.")
        changed.add(key)
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        known = fields[table] if table else fields
        if table != "model" and table != "preprocess" and name not in known:
            raise UsageError(f"Setting {key!r} is not one of a recipe's.{did_you_mean(name, _keys(fields))}")
        if not table and name in _LENGTHS:  # one of them replaces the others
            fields |= dict.fromkeys(_LENGTHS)
        known[name] = value
    return Recipe.from_json(fields)


_LENGTHS = ("epochs", "steps", "minutes")
# What other libraries call some settings, where the words are not alike.
_OTHER_WORDS = {"lr": "learning_rate", "wd": "weight_decay", "bs": "batch", "ema": "average"}


def _keys(fields: dict[str, Any]) -> dict[str, str]:
    """The key of every setting that may be meant, by its name without the table."""
    in_model = {field.name: f"model.{field.name}" for field in dataclasses.fields(ViTConfig)}
    in_augment = {name: f"augment.{name}" for name in fields["augment"]}
    return in_model | in_augment | {name: name for name in fields} | _OTHER_WORDS


def recipe_names() -> list[str]:
    """Recipes that ship with the package."""
    folder = resources.files("vitrail").joinpath("recipes")
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def read_recipe(text: str, name: str) -> Recipe:
    """The recipe in a TOML document."""
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DamagedError(path=name, cause=f"is not a TOML document ({error})") from None
    try:
        return Recipe.from_json(fields)
    except UsageError as error:
        raise UsageError(f"{error} (in recipe {name!r})") from None


def write_toml(fields: dict[str, Any]) -> str:
    """A TOML document of plain values and tables, for the settings that a run leaves behind; none is left out."""
    tables = {key: value for key, value in fields.items() if isinstance(value, dict)}
    lines = [
        f"{key} = {_toml_value(value)}" for key, value in fields.items() if key not in tables and value is not None
    ]
    for key, table in tables.items():
        lines += [
            "",
            f"[{key}]",
            *(f"{name} = {_toml_value(value)}" for name, value in table.items() if value is not None),
        ]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            escaped = "".join(
                f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c
                for c in writable(value).replace("\\", "\\\\").replace('"', '\\"')
            )
            return f'"{escaped}"'
        case list() | tuple():
            return f"[{', '.join(map(_toml_value, value))}]"
        case int() | float():
            return repr(value)
    raise TypeError(f"no TOML for {type(value).__name__}")
