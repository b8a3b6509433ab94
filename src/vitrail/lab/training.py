"""Training trials: train one model by the protocol that all trials share.

The protocol is AdamW, a cosine schedule with a warm-up of 10 %, gradient clipping, label smoothing, and the same number
of images seen. Test images are evaluated once, after training; validation images are used during training.
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
from vitrail.evaluation.split_predictions import predict_split
from vitrail.lab.images import Images
from vitrail.lab.permute import permute_input
from vitrail.lab.trial import Outcome, Trial, pack
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig, read_model
from vitrail.models.create import build
from vitrail.models.device import use_channels_last
from vitrail.models.walkthrough import walkthrough_of
from vitrail.training.callback import Step
from vitrail.training.loop import Trainer
from vitrail.training.options import Options
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import Recipe

BATCH = 128
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Learning rates from which the rate of a model is chosen."""
FIRST_RATES = (3e-4, 1e-3, 3e-3)
"""Learning rates that are tried first. If the best is the smallest or the largest tried, the next one is tried."""
RATE_SEEDS = (1000, 1001, 1002)
"""Seeds that choose learning rates. They take no part in verdicts."""
TRAINING_SAMPLE = 2000
"""Largest number of training images to measure training accuracy on."""
_EVALUATIONS = 8  # evaluations on validation images, at log-spaced steps


def training_trial(
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
) -> Trial:
    """Return a trial that trains a model of a family on `count` images until it has seen `seen` images.

    `changes` override settings of the model and `recipe` those of the protocol. `permutation` is a level, a patch and
    a seed (see `permute`).
    """
    config = images.matched_config(family, size, **(changes or {}))
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
    evaluated = len(images.test) + min(count, TRAINING_SAMPLE) + _EVALUATIONS * len(images.validation)
    work = config.macs * (3.0 * seen + evaluated)
    return Trial("vitrail.lab.training:train", settings, family=family, work=work)


def train(settings: dict[str, Any], images: Images, bundles: list[Path], folder: Path) -> Outcome:
    """Trial function: train one model, save its bundle to `folder`, and return its accuracies and curves."""
    split = images.subset(settings["count"], settings["seed"])
    torch.manual_seed(settings["seed"])
    model = build(read_config(settings))
    if settings["permutation"]:
        permute_input(model, *settings["permutation"])
    curves = fit(model, images, split, protocol(settings, images), settings["seed"])
    right = correct_predictions(model, images, images.test)
    training_right = correct_predictions(model, images, split.sample_evenly(TRAINING_SAMPLE))
    save_bundle(model, images, settings, folder)
    result = {
        "accuracy": float(right.mean()),
        "right": pack(right),
        "count": len(right),
        "training_accuracy": float(training_right.mean()),
        **validation_result(model, images),
        "curve": curves.curve,
        "places": curves.position_structure,
        "loss": curves.loss,
    }
    return Outcome(result, {"seconds": round(curves.seconds[-1][1], 2), "curve_seconds": curves.seconds})


def validation_result(model: AnyModel, images: Images) -> dict[str, Any]:
    """Return the entries of a result by which learning rates are chosen: predictions on validation images."""
    right = correct_predictions(model, images, images.validation)
    return {
        "validation_accuracy": float(right.mean()),
        "validation_right": pack(right),
        "validation_count": len(right),
    }


def protocol(settings: dict[str, Any], images: Images) -> Recipe:
    """Return the recipe of the protocol with the overrides of a trial."""
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
            "augment": shift_augmentation(images.resolution) if settings.get("augment") else {},
            **changes,
        }
    )


def shift_augmentation(resolution: Pair) -> dict[str, Any]:
    """Return the lab's augmentation: random shifts by up to 1/14 of the image, 2 of 28 pixels."""
    return {"crop": "pad", "padding": max(1, min(resolution) // 14)}


class TrainingCurves(NamedTuple):
    """Metrics of a training over its steps."""

    curve: list[list[float]]
    """[step, validation accuracy]."""
    seconds: list[list[float]]
    """[step, processor seconds of training so far]."""
    position_structure: list[list[float]]
    """[step, additive, row, column, nearness]: how well learned positions encode the grid."""
    loss: float
    """Mean loss of the last 50 steps."""


def fit(
    model: AnyModel,
    images: Images,
    split: Split,
    recipe: Recipe,
    seed: int,
    validate: Callable[[], float] | None = None,
) -> TrainingCurves:
    """Train a model in place by a recipe and return its curves. `validate` replaces the accuracy on validation images.

    Seconds are processor time, which other processes on the machine do not change.
    """
    use_channels_last(model)
    started = time.process_time()
    options = Options(seed=seed, workers=0, device="cpu")
    trainer = Trainer(model, images.preprocess, split, None, recipe, options, Ranks(), labels=images.labels)
    evaluation_steps = set(np.unique(np.geomspace(1, trainer.total, _EVALUATIONS).round().astype(int)).tolist())
    curve, seconds, losses, structures = [], [], [], [_position_structure(model, 0)]

    def record(event: Step) -> None:
        nonlocal started
        losses.append(event.loss)
        if event.step in evaluation_steps:
            spent = time.process_time() - started
            accuracy = (
                float(correct_predictions(model, images, images.validation).mean()) if validate is None else validate()
            )
            curve.append([event.step, accuracy])
            seconds.append([event.step, round(spent, 3)])
            structures.append(_position_structure(model, event.step))
            started = time.process_time() - spent  # exclude evaluation from training time

    trainer.fit(record)
    position_structure = [entry for entry in structures if entry is not None]
    return TrainingCurves(curve, seconds, position_structure, float(np.mean(losses[-50:])))


def save_bundle(
    model: AnyModel, images: Images, settings: dict[str, Any], folder: Path, *, objective: str | None = "classify"
) -> None:
    """Save the model as a bundle for measurements and for the user. `objective` is None for an untrained model."""
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
    """Return the model config of a training trial."""
    return read_model(settings["model"])


def _position_structure(model: AnyModel, step: int) -> list[float] | None:
    """Return [step, additive, row, column, nearness] for learned positions. None for other positions."""
    table = position_table(model)
    if table is None or walkthrough_of(model).position_origin == "fixed" or model.config.grid is None:
        return None
    scores = structure(table, model.config.grid)
    return [step, scores.additive, scores.row, scores.column, scores.nearness]


def correct_predictions(model: AnyModel, images: Images, split: Split) -> np.ndarray:
    """Return whether the prediction for each image of a split is correct."""
    loader = Loader(split, images.preprocess, batch=500, shuffle=False, workers=0)
    predictions = predict_split(model, loader)
    return predictions.probabilities.argmax(axis=1) == predictions.labels
