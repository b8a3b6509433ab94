"""The interface of training objectives: loss, scores, final evaluation, and parts of the report.

A new objective is a subclass of `Objective` and a line in `training.recipe.OBJECTIVES`, or an entry point
`objective.NAME` of another package.

Shapes: B images, C channels, H and W pixels.
"""

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.bundles.decision import SINGLE_LABEL, DecisionRule
from vitrail.data.loader import Loader
from vitrail.data.preprocess import Preprocess
from vitrail.models.base import AnyModel
from vitrail.models.config import Output
from vitrail.models.roles import Role, decays
from vitrail.training.objectives.judgement import Judgement, judge_classifier
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import OBJECTIVES, Recipe


class Task(NamedTuple):
    """What an objective may know about its run."""

    recipe: Recipe
    preprocess: Preprocess
    labels: tuple[str, ...]
    """Names of the classes of DATA."""


class Illustration(NamedTuple):
    """Rows of images for the report."""

    title: str
    rows: tuple[tuple[str, Tensor], ...]
    """A caption and preprocessed images (B, C, H, W) for each row."""


class Objective(nn.Module):
    """A module that wraps the model; its forward returns the loss of each image.

    A subclass must define `forward` and `score`, and may have parameters of its own.
    """

    model: AnyModel
    output: ClassVar[Output] = "classes"
    """Required output of the model: DATA's classes, pixels, or features (no head)."""
    classifies: ClassVar[bool] = False
    """Whether the model's output is logits of DATA's classes: then the bundle has their names and can classify."""
    is_multilabel: ClassVar[bool] = False
    """Whether each image has several labels instead of one class."""
    watched: ClassVar[str] = "accuracy"
    """The metric of `evaluate`, between 0 and 1, that is shown during training."""
    watched_name: ClassVar[str] = "accuracy"
    """Its name in messages."""
    head: ClassVar[tuple[str, ...]] = ("model.head.",)
    """Prefixes of the names of parameters that a recipe with `freeze` still trains."""
    illustrated: ClassVar[int] = 0
    """Number of images that the report shows with `illustrate`."""
    korean: ClassVar[Mapping[str, str]] = {"accuracy": "정확도"}
    """The Korean of `watched_name` and of the words of `illustrate`, for the report; without it they stay English."""

    def __init__(self, model: AnyModel, task: Task) -> None:
        """Refuse an unsuitable model or task with UsageError."""
        super().__init__()
        self.model, self.labels = model, task.labels

    # For the loop

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        """The loss of each image (B). With Mixup or CutMix, `others_B` are the labels of the other images, and
        `share_B` is the weight of the own label."""
        raise NotImplementedError

    def set_progress(self, done: float) -> None:
        """Before each step, the share of all steps that is done, for a loss that changes over the run."""

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        """Deterministic metrics of each held-out image (B) by name: `loss`, the `watched` one, and others."""
        raise NotImplementedError

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor, Tensor]], ranks: Ranks) -> dict[str, Any]:
        """Metrics over all held-out images and ranks: `loss`, `count`, the `watched` one, and others.

        Batches are images, labels and weights (1, or 0 for an image that could not be read). The default is the mean of
        each metric of `score`; an objective overrides this for metrics that are not means.
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
        """Value by which evaluations are compared: the checkpoint with the highest is kept as the best."""
        return -found["loss"]

    def describe(self, found: dict[str, Any]) -> str:
        """An evaluation in a few words."""
        return f"{self.watched_name} {found[self.watched]:.1%}"

    def freeze(self) -> None:
        """Freeze everything but the head."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(self.head))

    # For the optimiser

    def roles(self) -> dict[str, Role]:
        """The role of every parameter, by name. The objective's own parameters follow the last block."""
        found = {f"model.{name}": role for name, role in self.model.roles().items()}
        for name, parameter in self.named_parameters():
            if name not in found:
                found[name] = Role(decays(name, parameter), False, self.model.config.depth + 1, 1)
        return found

    # For the end of a run

    def judge(self, loader: Loader, ranks: Ranks) -> Judgement | None:
        """The final evaluation on the loader's images. All ranks take part; the first one returns the result. The
        default is that of a classifier, and None if the model is none or images have several labels."""
        if not self.classifies or loader.split.labels.ndim != 1:
            return None
        return judge_classifier(self.model, self.labels, loader, ranks)

    def decision_rule(self, loader: Loader | None, ranks: Ranks) -> DecisionRule:
        """What the logits of the bundle answer. It may depend on held-out images, if there are any; all ranks take
        part."""
        return SINGLE_LABEL

    def illustrate(self, images_BCHW: Tensor) -> Illustration:
        """Rows of images that show the model's output for some images."""
        raise NotImplementedError


def make_objective(model: AnyModel, task: Task) -> Objective:
    """The recipe's objective for the model."""
    return OBJECTIVES[task.recipe.objective](model, task)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert to float32 unless it is already float32 or float64, for computing losses."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@contextlib.contextmanager
def preserve_state(objective: Objective, device: torch.device) -> Generator[None]:
    """Context for passes in training mode that leave the objective as it is: gradients are dropped, and statistics of
    BatchNorm and random numbers are put back."""
    buffers = [(buffer, buffer.clone()) for buffer in objective.buffers()]
    was_training = objective.training
    objective.train()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for parameter in objective.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        objective.train(was_training)
