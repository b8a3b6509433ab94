"""Labs with invented results, to test the verdicts of questions."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.sources.registry import open_data
from vitrail.lab.images import Images, prepare
from vitrail.lab.question import Lab, Question
from vitrail.lab.statistics import LEVEL
from vitrail.lab.trial import Trial, pack
from vitrail.lab.trial_results import Results, needs_rate

FAMILIES = ("vit", "hybrid", "resnet", "mixer", "lstm", "mlp")


def digits_lab(sizes: tuple[int, ...] = (100, 300), seeds: int = 2) -> Lab:
    """Return a lab on the embedded digits."""
    return Lab(_images(), FAMILIES, sizes, seeds, 1000)


def _images(cache: list[Images] = []) -> Images:  # noqa: B006 - kept from test to test
    if not cache:
        cache.append(prepare(open_data("digits")))
    return cache[0]


def states_with_results(
    question: Question,
    folder: Path,
    accuracy: Callable[[dict[str, Any]], float],
    *,
    count: int = 2000,
    measure: Callable[[Trial], tuple[dict[str, Any], dict[str, Any]]] | None = None,
) -> dict[str, str]:
    """Return the verdicts of a question for invented results.

    `accuracy` gives the accuracy of a trained model from its settings, `measure` the outcome of other trials.
    """
    results = Results(folder / "results.jsonl", "images")
    for trial in (trial for question_round in question.rounds() for trial in question_round):
        for part in (*trial.inputs, trial):
            if needs_rate(part):
                for rate_trial in results.rate_trials(part):
                    _train(results, rate_trial, accuracy, count)
                resolved = results.resolve(part)
                assert resolved is not None
                _train(results, resolved, accuracy, count)
        if not needs_rate(trial) and measure is not None:
            resolved = results.resolve(trial)
            assert resolved is not None
            result, measured = measure(trial)
            _add(results, resolved, result, measured)
    return read(question, results)


def read(question: Question, results: Results) -> dict[str, str]:
    """Return the verdicts of a question for these results."""
    question.read(results)
    figures = dict(question.figures())
    assert question.html(figures)
    return verdict_states(question)


def verdict_states(question: Question, level: float = LEVEL) -> dict[str, str]:
    """Return the verdicts of a question, after checking its messages and scores."""
    verdicts = list(question.verdicts())
    for verdict in verdicts:
        for language in ("en", "ko") if verdict.fields else ():
            assert question.messages[f"{verdict.claim}-{verdict.message}"][language].format(**verdict.fields)
    for score in question.scores():
        assert question.messages[f"score-{score.bias}"].keys() == question.messages[f"score-{score.bias}-note"].keys()
        assert -0.5 < score.trained.value < 1.5
    return {verdict.claim: verdict.state(level) for verdict in verdicts}


def states_without_results(question: Question, folder: Path) -> dict[str, str]:
    """Return the verdicts of a question without any result."""
    return read(question, Results(folder / "nothing.jsonl", "images"))


def _train(results: Results, trial: Trial, accuracy: Callable[[dict[str, Any]], float], count: int) -> None:
    if results.has(trial):
        return
    share = accuracy(trial.settings)
    generator = np.random.default_rng(len(results))
    right = generator.permutation(np.arange(count) < round(count * (share + generator.normal(0, 0.001))))
    result = {"accuracy": float(right.mean()), "right": pack(right), "count": count, "training_accuracy": 1.0}
    validation = validation_accuracy(trial.settings["learning_rate"])
    _add(results, trial, {**result, "validation_accuracy": validation}, {"seconds": 1.0})


def validation_accuracy(rate: float | None) -> float:
    """Return an accuracy on validation images that is best for the learning rate 0.001."""
    return 0.5 - 0.01 * abs(math.log10((rate or 1e-3) / 1e-3))


def _add(results: Results, trial: Trial, result: dict[str, Any], measured: dict[str, Any]) -> None:
    if not results.has(trial):
        results.add({"key": trial.trial_id("images"), "cell": trial.to_json(), "result": result, "measured": measured})
