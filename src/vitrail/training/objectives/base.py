"""The interface of training objectives: loss, metrics, final evaluation and illustrations for the report.

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
    """Facts about a run that an objective may use."""

    recipe: Recipe
    preprocess: Preprocess
    labels: tuple[str, ...]
    """Names of the classes of DATA."""


class Illustration(NamedTuple):
    """Rows of images that illustrate the model in the report."""

    title: str
    rows: tuple[tuple[str, Tensor], ...]
    """A caption and preprocessed images (B, C, H, W) for each row."""


class Objective(nn.Module):
    """A module that wraps the model; its forward returns the loss of each image.

    A subclass must define `forward` and `score`, and may have parameters of its own.
    """

    model: AnyModel
    output: ClassVar[Output] = "classes"
    """Required output of the model: the classes of DATA, pixels, or features (no head)."""
    classifies: ClassVar[bool] = False
    """Whether the model gives logits of the classes of DATA. The bundle then has their names and can classify."""
    is_multilabel: ClassVar[bool] = False
    """Whether each image has several labels instead of one class."""
    watched: ClassVar[str] = "accuracy"
    """Metric of `evaluate`, between 0 and 1, that is shown during training."""
    watched_name: ClassVar[str] = "accuracy"
    """Name of the metric `watched` in messages."""
    next_command: ClassVar[str] = ""
    """Command that trains the bundle of a finished run further. `{bundle}` and `{data}` are replaced by paths. Empty if
    there is no such command."""
    head: ClassVar[tuple[str, ...]] = ("model.head",)
    """Name prefixes of the parameters that are trained with the setting `freeze` of the recipe."""
    illustrated: ClassVar[int] = 0
    """Number of images that the report shows with `illustrate`."""
    korean: ClassVar[Mapping[str, str]] = {"accuracy": "정확도"}
    """Korean translations of `watched_name` and of the texts of `illustrate`; others are shown in English."""

    def __init__(self, model: AnyModel, task: Task) -> None:
        """Wrap the model. Raise UsageError for an unsuitable model or task."""
        super().__init__()
        self.model, self.labels = model, task.labels

    # For the loop

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        """Return the loss of each image (B).

        With Mixup or CutMix, `others_B` are the labels of the images that were mixed in, and `share_B` is the weight of
        the own label; otherwise both are None.
        """
        raise NotImplementedError

    def set_progress(self, done: float) -> None:
        """Set the share of all steps that is done. Called before each step, for losses that change over the run."""

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        """Return deterministic metrics of each held-out image (B) by name: `loss`, the metric `watched`, and others."""
        raise NotImplementedError

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor, Tensor]], ranks: Ranks) -> dict[str, Any]:
        """Return metrics over all held-out images and ranks: `loss`, `count`, the metric `watched`, and others.

        Batches are images, labels and weights (1, or 0 for an image that could not be read). The default returns
        the mean of each metric of `score`. Override this method for metrics that are not means.
        """
        sums: dict[str, float] = {}
        for images, labels, weights in batches:
            batch_sums = {name: (values.cpu() * weights).sum() for name, values in self.score(images, labels).items()}
            for name, number in {**batch_sums, "count": weights.sum()}.items():
                sums[name] = sums.get(name, 0.0) + number.item()
        parts = ranks.gather(sums)
        totals = {name: sum(part.get(name, 0.0) for part in parts) for part in parts for name in part}
        count = totals.pop("count", 0.0)
        return {**{name: total / max(count, 1) for name, total in totals.items()}, "count": int(count)}

    def goodness(self, metrics: dict[str, Any]) -> float:
        """Return the value by which evaluations are compared; the checkpoint with the highest value is the best."""
        return -metrics["loss"]

    def describe(self, metrics: dict[str, Any]) -> str:
        """Return a short description of an evaluation, such as "accuracy 93.4%"."""
        return f"{self.watched_name} {metrics[self.watched]:.1%}"

    def freeze(self) -> None:
        """Freeze all parameters except those of the head."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(self.head))

    # For the optimiser

    def roles(self) -> dict[str, Role]:
        """Return the role of every parameter by name. Parameters of the objective are layers after the last block."""
        roles = {f"model.{name}": role for name, role in self.model.roles().items()}
        for name, parameter in self.named_parameters():
            if name not in roles:
                roles[name] = Role(decays(name, parameter), False, self.model.config.depth + 1, 1)
        return roles

    # For the end of a run

    def judge(self, loader: Loader, ranks: Ranks) -> Judgement | None:
        """Return the final evaluation on the images of the loader. All ranks take part; only the first returns it.

        The default evaluates a classifier, and returns None for other models and for images with several labels.
        """
        if not self.classifies or loader.split.labels.ndim != 1:
            return None
        return judge_classifier(self.model, self.labels, loader, ranks)

    def decision_rule(self, loader: Loader | None, ranks: Ranks) -> DecisionRule:
        """Return the decision rule of the bundle. It may depend on held-out images, if any; all ranks take part."""
        return SINGLE_LABEL

    def illustrate(self, images_BCHW: Tensor) -> Illustration:
        """Return rows of images that show the output of the model for the given images."""
        raise NotImplementedError


def make_objective(model: AnyModel, task: Task) -> Objective:
    """Create the objective of the recipe for the model."""
    return OBJECTIVES[task.recipe.objective](model, task)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert to float32 unless it is already float32 or float64, for computing losses."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@contextlib.contextmanager
def preserve_state(objective: Objective, device: torch.device) -> Generator[None]:
    """Context manager for passes in training mode that leave the objective unchanged.

    At the end, gradients are dropped, and running statistics, the training mode and random states are restored.
    """
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
            for buffer, copy in buffers:
                buffer.copy_(copy)
        objective.train(was_training)
