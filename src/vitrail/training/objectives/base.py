"""What every objective answers: to the loop its loss and score, to the run its final evaluation, to the report what it
shows.

A new objective is a subclass of `Objective` and a line in `configs.recipe.OBJECTIVES`, or an entry point
`objective.NAME` of another package.

Shapes: B images, C channels, H and W pixels.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.configs.base import Output
from vitrail.configs.recipe import OBJECTIVES, Recipe
from vitrail.data.loader import Loader
from vitrail.images.preprocess import Preprocess
from vitrail.models.base import AnyModel, Role, decays
from vitrail.training.ranks import Ranks


class Task(NamedTuple):
    """What an objective may know of the run that it is made for."""

    recipe: Recipe
    preprocess: Preprocess
    labels: tuple[str, ...]
    """Names of the classes of DATA."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the final evaluation found."""

    scores: dict[str, Any]
    """Numbers that `metrics.jsonl` and the bundle keep."""
    sentence: str
    """What is printed at the end of the run."""
    summary: tuple[tuple[str, str], ...]
    """The first numbers of the report, each with its name."""

    def sections(self) -> str:
        """What the report shows of it, as HTML."""
        return ""


class Illustration(NamedTuple):
    """Rows of images for the report."""

    title: str
    rows: tuple[tuple[str, Tensor], ...]
    """A caption and preprocessed images (B, C, H, W) for each row."""


class Objective(nn.Module):
    """A module around the model, whose forward gives the loss of each image.

    A subclass must have `forward` and `score`, and may have parameters of its own.
    """

    model: AnyModel
    output: ClassVar[Output] = "classes"
    """What the model must predict: DATA's classes, pixels, or features, without a head."""
    classifies: ClassVar[bool] = False
    """Whether the model's output is logits of DATA's classes: then the bundle keeps their names and answers by them."""
    watched: ClassVar[str] = "accuracy"
    """Which number of `evaluate` is shown while training, a share of 1."""
    watched_name: ClassVar[str] = "accuracy"
    """What people call it."""
    head: ClassVar[tuple[str, ...]] = ("model.head.",)
    """How the names of parameters begin that a recipe with `freeze` still trains."""
    illustrated: ClassVar[int] = 0
    """How many images the report shows through `illustrate`."""

    def __init__(self, model: AnyModel, task: Task) -> None:
        """Refuse a model or a task that does not suit, by UsageError."""
        super().__init__()
        self.model = model

    # For the loop

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        """The loss of each image (B). `others_B` are the labels of images that were mixed in by Mixup or CutMix, and
        `share_B` is how much of each label stays its own."""
        raise NotImplementedError

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        """Named numbers of each held-out image (B), without chance in them: `loss`, what is `watched`, and others."""
        raise NotImplementedError

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor, Tensor]], ranks: Ranks) -> dict[str, Any]:
        """Numbers of all held-out images over all ranks: `loss`, `count`, what is `watched`, and others.

        Batches are images, labels and weights (1, or 0 for an image that could not be read). The default is the mean of
        each number of `score`; an objective overrides this for numbers that are no means.
        """
        sums: dict[str, float] = {}
        for images, labels, weights in batches:
            numbers = {name: (each.cpu() * weights).sum() for name, each in self.score(images, labels).items()}
            for name, number in {**numbers, "count": weights.sum()}.items():
                sums[name] = sums.get(name, 0.0) + number.item()
        parts = ranks.gather(sums)
        totals = {name: sum(part.get(name, 0.0) for part in parts) for part in parts for name in part}
        count = totals.pop("count", 0.0)
        return {**{name: total / max(count, 1) for name, total in totals.items()}, "count": int(count)}

    def goodness(self, found: dict[str, Any]) -> float:
        """How good an evaluation is: the checkpoint with the highest is kept."""
        return -found["loss"]

    def describe(self, found: dict[str, Any]) -> str:
        """An evaluation in a few words."""
        return f"{self.watched_name} {found[self.watched]:.1%}"

    def freeze(self) -> None:
        """Train the head alone."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(self.head))

    # For the optimiser

    def roles(self) -> dict[str, Role]:
        """The role of every parameter, by name. The objective's own work on what leaves the last block."""
        found = {f"model.{name}": role for name, role in self.model.roles().items()}
        for name, parameter in self.named_parameters():
            if name not in found:
                found[name] = Role(decays(name, parameter), False, self.model.config.depth + 1, 1)
        return found

    @property
    def has_ordered_blocks(self) -> bool:
        """Whether the layers are one row of blocks, so that a learning rate can decay from the last to the first."""
        return self.model.has_ordered_blocks

    # For the end of a run

    def judge(self, loader: Loader, ranks: Ranks) -> Judgement | None:
        """The final evaluation on the loader's images, in which all ranks take part; the first one returns it."""
        return None

    def illustrate(self, images_BCHW: Tensor) -> Illustration:
        """What the model makes of `illustrated` images."""
        raise NotImplementedError


def make_objective(model: AnyModel, task: Task) -> Objective:
    """The objective that the recipe names, around the model."""
    return OBJECTIVES[task.recipe.objective](model, task)


def at_least_single(x: Tensor) -> Tensor:
    """Losses are computed in single precision or better, whatever the model is computed in."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
