"""Generated sequences of marks for the order question: running parity, and recall of the first token.

A sequence is an image of one row of patches of one pixel. A token is a mark (white) or blank (black).

parity      The class is whether the number of marks is odd. Marks are in one stretch of random length and position, so
            that short stretches teach what to do with long ones. Stretches of the test are longer than all sequences
            of training, in sequences of twice the length.
recall      The class is whether the first token is a mark. All other tokens are random.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.bundles.bundle import load
from vitrail.data.dataset import Split
from vitrail.lab.images import Images
from vitrail.lab.training import correct_predictions, train
from vitrail.lab.trial import Outcome, Trial, pack
from vitrail.models import zoo
from vitrail.models.config import ModelConfig

FAMILIES = ("lstm", "vit")
PARITY_LENGTH = 16
"""Tokens of the sequences that parity is trained on. The test has twice as many."""
RECALL_LENGTHS = (16, 32, 64, 128)
"""Tokens from the first one to the end, in training and in the test."""
_SEEN = {"parity": 200_000, "recall": 30_000}
_PARTS = {"training": 60_000, "validation": 1200, "test": 3000}
_COUNT = 50_000  # training sequences of a trial, drawn by its seed


def sequence_trials(task: str, family: str, length: int, seeds: int) -> list[Trial]:
    """Return trials that train a model on sequences, one per seed."""
    config, seen = sequence_configs(length)[family], _SEEN[task]
    work = config.macs * (3.0 * seen + 20 * _PARTS["test"])
    settings = {"model": config.to_document(), "task": task, "learning_rate": None, "seen": seen}
    name = "vitrail.lab.questions.order_sequences:train_on_sequences"
    return [Trial(name, {**settings, "seed": seed}, family=family, work=work) for seed in range(seeds)]


def sequence_configs(length: int) -> dict[str, ModelConfig]:
    """Return a ViT with sinusoidal positions, and an LSTM with as many parameters within a few per cent."""
    sequence = {"classes": 2, "resolution": (1, length), "patch": 1, "width": 32}
    vit = zoo.small("Nano", "vit").replace(depth=2, mlp=64, position="sincos-1d", **sequence)
    lstm = zoo.small("Nano", "lstm").replace(**sequence)
    candidates = (lstm.replace(hidden=hidden) for hidden in range(1, 257))
    return {"lstm": min(candidates, key=lambda config: abs(config.parameters - vit.parameters)), "vit": vit}


def parity_sequences(count: int, length: int, seed: int, *, shortest: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Draw marks (count, length) in a stretch of at least `shortest` tokens, and whether their number is odd."""
    generator = np.random.default_rng(seed)
    stretches = generator.integers(shortest, length + 1, count)
    starts = generator.integers(0, length - stretches + 1)
    after_start = np.arange(length) - starts[:, None]
    marks = (generator.random((count, length)) < 0.5) & (after_start >= 0) & (after_start < stretches[:, None])
    return marks, marks.sum(axis=1) % 2


def recall_sequences(count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw random marks (count, length) and whether the first token is one."""
    marks = np.random.default_rng(seed).random((count, length)) < 0.5
    return marks, marks[:, 0]


@functools.lru_cache(2)
def sequence_images(task: str, length: int) -> Images:
    """Return the generated sequences in the form of a lab's images."""
    draw = parity_sequences if task == "parity" else recall_sequences
    splits = [_make_split(name, *draw(count, length, seed)) for seed, (name, count) in enumerate(_PARTS.items())]
    return Images(task, ("no", "yes"), "Nano", *splits, fingerprint=task)


def _make_split(name: str, marks: np.ndarray, classes: np.ndarray) -> Split:
    return Split(name, (255 * marks[:, None, :, None]).astype(np.uint8), classes.astype(np.int64))


def train_on_sequences(settings: dict[str, Any], _images: Images, bundles: list[Path], folder: Path) -> Outcome:
    """Trial function: train one model by the lab's protocol. Parity is then tested at twice the length."""
    task, length = settings["task"], settings["model"]["resolution"][1]
    images = sequence_images(task, length)
    defaults = {"count": _COUNT, "recipe": {}, "augment": False, "permutation": None}
    outcome = train({**defaults, **settings}, images, bundles, folder)
    if task == "recall":
        return outcome
    model = load(folder).model.resize((1, 2 * length))
    longer = _make_split("test", *parity_sequences(_PARTS["test"], 2 * length, len(_PARTS), shortest=length + 1))
    right = correct_predictions(model, dataclasses.replace(images, test=longer), longer)
    doubled = {"accuracy": float(right.mean()), "right": pack(right), "same_length": outcome.result["accuracy"]}
    return outcome._replace(result={**outcome.result, **doubled})
