"""Cells that train: one model, by the protocol that is the same for all.

AdamW, a cosine schedule after a warm-up of a tenth, clipped gradients, smoothed labels, equal images seen. The model
reads the test images once, at the end; its course is told by validation images.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.analysis.position_structure import position_table, structure
from vitrail.bundles.bundle import Bundle, save
from vitrail.core.settings import Pair
from vitrail.data.dataset import Split
from vitrail.data.loader import Loader
from vitrail.evaluation.classify import answer
from vitrail.lab.images import Images
from vitrail.lab.permute import permute_input
from vitrail.lab.trial import Cell, Outcome, pack
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig, read_model
from vitrail.models.create import build
from vitrail.models.device import use_channels_last
from vitrail.models.walkthrough import walkthrough_of
from vitrail.training.loop import Trainer
from vitrail.training.options import Options
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import Recipe

BATCH = 128
RATES = (3e-4, 1e-3, 3e-3)
BEYOND = {RATES[0]: (1e-4, 3e-5), RATES[-1]: (1e-2, 3e-2)}
"""The rates beyond each end of the usual ones, outward."""
JUDGED = 2000
"""Training images, at most, whose answers are compared with those of the test images."""
_LOOKS = 8  # evaluations on validation images, at log-spaced steps


def training_cell(
    images: Images,
    family: str,
    *,
    count: int,
    seed: int,
    seen: int,
    size: str | None = None,
    changes: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    augment: bool = False,
    permutation: tuple[str, Pair, int] | None = None,
    learning_rate: float | None = None,
) -> Cell:
    """A model of a family, trained on `count` images until it has seen `seen`.

    `changes` are of the model, `recipe` of the protocol; `permutation` is a level, a patch and a seed (see `permute`).
    """
    config = images.matched(family, size, **(changes or {}))
    settings = {
        "model": config.to_document(),
        "count": count,
        "seed": seed,
        "seen": seen,
        "recipe": recipe or {},
        "augment": augment,
        "permutation": list(permutation) if permutation else None,
        "learning_rate": learning_rate,
    }
    judged = len(images.test) + min(count, JUDGED) + _LOOKS * len(images.validation)
    work = config.macs * (3.0 * seen + judged)
    return Cell("vitrail.lab.training:train", settings, family=family, work=work)


def train(settings: dict[str, Any], images: Images, of: list[Path], folder: Path) -> Outcome:
    """Train one model. Its bundle is left in `folder`."""
    split = images.subset(settings["count"])
    torch.manual_seed(settings["seed"])
    model = build(read_config(settings))
    if settings["permutation"]:
        permute_input(model, *settings["permutation"])
    fitted = fit(model, images, split, protocol(settings, images), settings["seed"])
    right = right_answers(model, images, images.test)
    learned = right_answers(model, images, split.spread(JUDGED))
    keep(model, images, settings, folder)
    result = {
        "accuracy": float(right.mean()),
        "right": pack(right),
        "count": len(right),
        "training_accuracy": float(learned.mean()),
        "validation_accuracy": fitted.curve[-1][1],
        "validation_count": len(images.validation),
        "curve": fitted.curve,
        "places": fitted.places,
        "loss": fitted.loss,
    }
    return Outcome(result, {"seconds": round(fitted.seconds[-1][1], 2), "curve_seconds": fitted.seconds})


def protocol(settings: dict[str, Any], images: Images) -> Recipe:
    """The recipe that is the same for all, with the changes of a cell."""
    changes = settings.get("recipe", {})
    return Recipe.from_json(
        {
            "steps": math.ceil(settings["seen"] / changes.get("batch", BATCH)),
            "batch": BATCH,
            "learning_rate": settings["learning_rate"],
            "warmup": 0.1,
            "clip": 1.0,
            "label_smoothing": 0.1,
            "on_nonfinite": "skip",
            "augment": shifts(images.resolution) if settings.get("augment") else {},
            **changes,
        }
    )


def shifts(resolution: Pair) -> dict[str, Any]:
    """The lab's augmentation: random shifts by up to a fourteenth of the image, 2 of 28 pixels."""
    return {"crop": "pad", "padding": max(1, min(resolution) // 14)}


class Fit(NamedTuple):
    """The course of a training."""

    curve: list[list[float]]
    """Steps and the accuracy on validation images."""
    seconds: list[list[float]]
    """Steps and the processor's seconds of training up to them."""
    places: list[list[float]]
    """Steps and what learned positions know of rows and columns."""
    loss: float
    """Mean of the last steps."""


def fit(
    model: AnyModel,
    images: Images,
    split: Split,
    recipe: Recipe,
    seed: int,
    judge: Callable[[], float] | None = None,
) -> Fit:
    """Train a model. `judge` tells how good it is meanwhile; by default, the accuracy on validation images does.

    Seconds are the processor's: what else the machine does meanwhile does not count.
    """
    use_channels_last(model)
    began = time.process_time()
    options = Options(seed=seed, workers=0, device="cpu")
    trainer = Trainer(model, images.preprocess, split, None, recipe, options, Ranks(), labels=images.labels)
    trainer.total = recipe.steps or 0
    looks = set(np.unique(np.geomspace(1, trainer.total, _LOOKS).round().astype(int)).tolist())
    curve, seconds, losses, places = [], [], [], [_places(model, 0)]
    for _, batch in trainer.batches():
        losses.append(trainer.update(batch).loss)
        trainer.step += 1
        if trainer.step in looks:
            spent = time.process_time() - began
            good = float(right_answers(model, images, images.validation).mean()) if judge is None else judge()
            curve.append([trainer.step, good])
            seconds.append([trainer.step, round(spent, 3)])
            places.append(_places(model, trainer.step))
            began = time.process_time() - spent  # evaluations do not count as training
    return Fit(curve, seconds, [one for one in places if one is not None], float(np.mean(losses[-50:])))


def keep(
    model: AnyModel, images: Images, settings: dict[str, Any], folder: Path, *, objective: str | None = "classify"
) -> None:
    """Leave the model as a bundle, for cells that look at it and for people. `objective` is what it was trained for;
    None if it was not trained."""
    labels = images.labels if objective == "classify" and model.config.classifies else None
    provenance: dict[str, Any] = {"data": images.name, "lab": settings}
    if objective is not None:
        steps = protocol(settings, images).steps
        provenance |= {"objective": objective, "steps": steps, "seed": settings["seed"]}
    save(
        Bundle(model=model.eval(), preprocess=images.preprocess, labels=labels, provenance=provenance),
        folder,
        force=True,
    )


def read_config(settings: dict[str, Any]) -> ModelConfig:
    """The configuration of a trained cell's model."""
    return read_model(settings["model"])


def _places(model: AnyModel, step: int) -> list[float] | None:
    """What learned positions know of rows and columns after a step: [step, additive, row, column]."""
    table = position_table(model)
    if table is None or walkthrough_of(model).position_origin == "fixed" or model.config.grid is None:
        return None
    found = structure(table, model.config.grid)
    return [step, found.additive, found.row, found.column]


def right_answers(model: AnyModel, images: Images, split: Split) -> np.ndarray:
    """Whether each image of a split is named rightly."""
    loader = Loader(split, images.preprocess, batch=500, shuffle=False, workers=0)
    answers = answer(model, loader)
    return answers.probabilities.argmax(axis=1) == answers.labels
