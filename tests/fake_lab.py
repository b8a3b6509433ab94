"""Labs whose results are made up, to see whether questions read them rightly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.sources.registry import open_data
from vitrail.lab.images import Images, prepare
from vitrail.lab.question import Lab, Question
from vitrail.lab.results import Results, needs_rate
from vitrail.lab.statistics import LEVEL
from vitrail.lab.trial import Cell, pack

FAMILIES = ("vit", "hybrid", "resnet", "mixer", "lstm", "mlp")


def digits_lab(sizes: tuple[int, ...] = (100, 300), seeds: int = 2) -> Lab:
    """A lab on the embedded digits."""
    return Lab(_images(), FAMILIES, sizes, seeds, 1000)


def _images(found: list[Images] = []) -> Images:  # noqa: B006 - kept from test to test
    if not found:
        found.append(prepare(open_data("digits")))
    return found[0]


def answer(
    question: Question,
    folder: Path,
    accuracy: Callable[[dict[str, Any]], float],
    *,
    count: int = 2000,
    finds: Callable[[Cell], tuple[dict[str, Any], dict[str, Any]]] | None = None,
) -> dict[str, str]:
    """The verdicts of a question if every trained model has the accuracy that follows from its settings; `finds` tells
    what the other cells find and measure."""
    results = Results(folder / "results.jsonl", "images", question.lab.sizes[0])
    for cell in (cell for some in question.rounds() for cell in some):
        for part in (*cell.of, cell):
            if needs_rate(part):
                for trial in results.trials(part):
                    _train(results, trial, accuracy, count)
                resolved = results.resolve(part)
                assert resolved is not None
                _train(results, resolved, accuracy, count)
        if not needs_rate(cell) and finds is not None:
            resolved = results.resolve(cell)
            assert resolved is not None
            result, measured = finds(cell)
            _add(results, resolved, result, measured)
    return read(question, results)


def read(question: Question, results: Results) -> dict[str, str]:
    """The verdicts of a question from such results."""
    question.read(results)
    figures = dict(question.figures())
    assert question.html(figures)
    return told(question)


def told(question: Question, level: float = LEVEL) -> dict[str, str]:
    """The verdicts of a question, whose sentences are there in both languages, and whose scores can be drawn."""
    verdicts = list(question.verdicts())
    for one in verdicts:
        for language in ("en", "ko") if one.words else ():
            assert question.words[f"{one.claim}-{one.sentence}"][language].format(**one.words)
    for score in question.scores():
        assert question.words[f"score-{score.bias}"].keys() == question.words[f"score-{score.bias}-note"].keys()
        assert -0.5 < score.trained.value < 1.5
    return {one.claim: one.state(level) for one in verdicts}


def nothing(question: Question, folder: Path) -> dict[str, str]:
    """The verdicts of a question for which nothing was run."""
    return read(question, Results(folder / "nothing.jsonl", "images", question.lab.sizes[0]))


def _train(results: Results, cell: Cell, accuracy: Callable[[dict[str, Any]], float], count: int) -> None:
    if results.has(cell):
        return
    share = accuracy(cell.settings)
    generator = np.random.default_rng(len(results))
    right = generator.permutation(np.arange(count) < round(count * (share + generator.normal(0, 0.001))))
    found = {"accuracy": float(right.mean()), "right": pack(right), "count": count, "training_accuracy": 1.0}
    _add(results, cell, {**found, "validation_accuracy": 0.5}, {"seconds": 1.0})


def _add(results: Results, cell: Cell, result: dict[str, Any], measured: dict[str, Any]) -> None:
    if not results.has(cell):
        results.add({"key": cell.key("images"), "cell": cell.to_json(), "result": result, "measured": measured})
