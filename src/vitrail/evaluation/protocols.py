"""`vitrail evaluate`: a bundle on data."""

import dataclasses
from typing import Any

from vitrail.data.loader import Loader
from vitrail.data.sources import open_data
from vitrail.evaluation.classify import Answers, answer
from vitrail.evaluation.labels import match_labels
from vitrail.evaluation.metrics import score
from vitrail.weights.bundle import Bundle


def classify(bundle: Bundle, data: str, split: str | None, *, batch: int = 64, workers: int = 2) -> dict[str, Any]:
    """Every score of the bundle's own answers on a split; each picture counts exactly once."""
    bundle.parts.check_classifies()
    dataset = open_data(data)
    chosen = dataset.for_evaluation(split)
    classes = bundle.model.config.classes
    place, how = match_labels(bundle.labels, classes, dataset.labels)
    chosen = dataclasses.replace(chosen, labels=place[chosen.labels])
    names = bundle.labels or tuple(map(str, range(classes)))
    answers: Answers = answer(
        bundle.model, Loader(chosen, bundle.preprocess, batch=batch, shuffle=False, workers=workers)
    )
    return {
        "protocol": "classify", "data": data, "split": chosen.name, "labels_matched": how,
        **score(answers.probabilities, answers.labels, names),
    }  # fmt: skip
