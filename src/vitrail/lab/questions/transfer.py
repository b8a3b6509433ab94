"""How much does pre-training help? Pre-train on half of the classes, then learn the other half from few images."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.core import rng
from vitrail.core.message_files import load_messages
from vitrail.data.dataset import Split, sample_per_class
from vitrail.evaluation.feature_classifiers import fit_ridge
from vitrail.evaluation.features import extract_features
from vitrail.lab.images import Images
from vitrail.lab.measurements import MeasuredValues
from vitrail.lab.question import (
    COLOURS,
    FIRST_SEEDS,
    Question,
    Verdict,
    difference_text,
    interval_text,
    percent_interval,
    points_text,
)
from vitrail.lab.statistics import Estimate, smallest
from vitrail.lab.training import correct_predictions, fit, protocol, read_config, save_bundle
from vitrail.lab.trial import Outcome, Trial, pack, unpack
from vitrail.lab.trial_results import Results
from vitrail.models.create import build
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

FAMILIES = ("vit", "resnet")
HEADS = {"linear": {}, "hidden": {"representation": "tanh"}}
SHOTS, DRAWS = 5, 5  # images per new class, and number of random draws of these images
_FINETUNING_IMAGES = 30  # per new class

Key = tuple[str, str, int]


class TransferQuestion(Question):
    """Compares ViT and CNN by the size of their pre-training sets, and ViT heads with and without a hidden layer."""

    messages = load_messages(__file__)
    claims = ("C6", "C28")

    @functools.cached_property
    def trials(self) -> dict[Key, list[Trial]]:
        """Trials by family, head and number of images, one per seed. Each half needs at least two classes."""
        if len(self.lab.images.labels) < 4:
            return {}
        families = [name for name in FAMILIES if name in self.lab.families]
        variants = [(family, "linear") for family in families] + [("vit", "hidden")] * ("vit" in families)
        return {
            (family, head, count): [self._trial(family, head, count, seed) for seed in range(self.lab.seeds)]
            for family, head in variants
            for count in self.lab.sizes
        }

    def _trial(self, family: str, head: str, count: int, seed: int) -> Trial:
        images = self.lab.images
        config = images.matched_config(family, **HEADS[head]).replace(classes=len(images.labels) // 2)
        settings = {
            "model": config.to_document(),
            "count": count,
            "seed": seed,
            "seen": self.lab.seen,
            "learning_rate": None,
        }
        work = config.macs * (3.3 * self.lab.seen + 2 * len(images.test))
        return Trial("vitrail.lab.questions.transfer:transfer", settings, family=family, work=work)

    def rounds(self) -> Sequence[Sequence[Trial]]:
        ends = {self.lab.sizes[0], self.lab.sizes[-1]}
        leading = [key for key in self.trials if key[2] in ends and key[1] == "linear"]
        return (
            [trial for key in leading for trial in self.trials[key][:FIRST_SEEDS]],
            [trial for key in self.trials if key[2] in ends for trial in self.trials[key][:FIRST_SEEDS]],
            [trial for trials in self.trials.values() for trial in trials],
        )

    def read(self, results: Results) -> None:
        self.accuracies = {method: MeasuredValues(results, self.trials, read) for method, read in METHODS.items()}

    def _gain(self, family: str) -> Estimate | None:
        """Return few-shot accuracy after the largest pre-training set minus that after the smallest."""
        few, many = ((family, "linear", count) for count in (self.lab.sizes[0], self.lab.sizes[-1]))
        return self.accuracies["fewshot"].difference(many, few)

    def verdicts(self) -> Iterator[Verdict]:
        yield Verdict("C6", "trained", smallest([self._gain(name) for name in FAMILIES if name in self.lab.families]))
        yield Verdict("C28", "reported", fields=self._hidden_layer_fields())

    def _hidden_layer_fields(self) -> dict[str, Any]:
        """Return fine-tuned accuracies by the head at pre-training, and their difference with its interval."""
        finetuned, heads = self.accuracies["finetuned"], ("hidden", "linear")
        keys = [("vit", head, self.lab.sizes[-1]) for head in heads]
        lead = finetuned.difference(*keys)
        if lead is None:
            return {}
        texts = {head: f"{finetuned.estimate(key).value:.1%}" for head, key in zip(heads, keys, strict=True)}
        difference = f"{points_text(lead.value)} ({difference_text(lead)})"
        return {**texts, "difference": difference, "seeds": finetuned.seeds}

    def figures(self) -> Iterator[tuple[str, str]]:
        for method, values in self.accuracies.items():
            lines = []
            for family, head in dict.fromkeys((family, head) for family, head, _ in values.right):
                counts = [count for count in self.lab.sizes if (family, head, count) in values]
                estimates = [values.estimate((family, head, count)) for count in counts]
                name, colour = (family, COLOURS[family]) if head == "linear" else (f"{family}, {head}", 6)
                values_in_percent = [100 * estimate.value for estimate in estimates]
                lines.append(
                    Line(
                        family_label(name),
                        counts,
                        values_in_percent,
                        colour,
                        bars=[percent_interval(estimate) for estimate in estimates],
                    )
                )
            if lines:
                labels = self.t("images", "tspan"), self.t("accuracy", "tspan")
                yield f"transfer-{method}", line_chart(lines, *labels, log_x=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if not self.trials:
            return str(self.t("too-few-classes", "p"))
        if not figures:
            return str(self.t("nothing", "p"))
        seeds = self.accuracies["fewshot"].seeds
        panes = "".join(
            figure(self.t(f"{method}-title"), self.t(f"{method}-note", seeds=seeds), figures[f"transfer-{method}"])
            for method in self.accuracies
            if f"transfer-{method}" in figures
        )
        rows = []
        for key in self.accuracies["fewshot"].right:
            family, head, count = key
            texts = [interval_text(values.estimate(key)) for values in self.accuracies.values()]
            rows.append((family, self.t(head), f"{count:,}", *texts))
        heads = ("", self.t("head"), "n", self.t("fewshot"), self.t("finetuned"))
        return f'<div class="panes">{panes}</div>{table(heads, rows)}'

    def numbers(self) -> dict[str, Any]:
        return {
            method: {
                f"{family} {head} {count}": list(values.estimate((family, head, count))[:2])
                for family, head, count in values.right
            }
            for method, values in self.accuracies.items()
        }


def transfer(settings: dict[str, Any], images: Images, _bundles: list[Path], folder: Path) -> Outcome:
    """Trial function: pre-train on one half of the classes, then learn the other half and save the bundle.

    The other half is learned from few images by least squares on frozen features, and from more by fine-tuning.
    """
    first, second = halves(images)
    split = first.subset(settings["count"] // len(images.labels) * len(first.labels), settings["seed"])
    torch.manual_seed(settings["seed"])
    model = build(read_config(settings))
    curves = fit(model, first, split, protocol(settings, first), settings["seed"])
    save_bundle(model, first, settings, folder)
    shots = [_few_shots(model, second, seed) for seed in range(DRAWS)]
    finetuned = model.clone_with()
    finetuned.reset_classifier(len(second.labels))
    few = second.training.select(sample_per_class(second.training.labels, _FINETUNING_IMAGES, settings["seed"]))
    shorter = {**settings, "seen": settings["seen"] // 10, "learning_rate": 0.3 * settings["learning_rate"]}
    fit(finetuned, second, few, protocol(shorter, second), settings["seed"])
    finetuned_right = correct_predictions(finetuned, second, second.test)
    result = {
        "fewshot": float(np.mean(shots)),
        "fewshot_right": [pack(right) for right in shots],
        "finetuned": float(finetuned_right.mean()),
        "finetuned_right": pack(finetuned_right),
        "count": len(finetuned_right),
        "validation_accuracy": curves.curve[-1][1],
        "validation_count": len(first.validation),
    }
    return Outcome(result, {"seconds": curves.seconds[-1][1]})


def fewshot_correctness(result: dict[str, Any]) -> np.ndarray:
    """Return, for each test image, the share of the draws of few images with a correct prediction."""
    return np.mean([unpack(right, result["count"]) for right in result["fewshot_right"]], axis=0)


def finetuned_correctness(result: dict[str, Any]) -> np.ndarray:
    """Return the correctness of each test image after fine-tuning."""
    return unpack(result["finetuned_right"], result["count"])


METHODS = {"fewshot": fewshot_correctness, "finetuned": finetuned_correctness}
"""Ways to learn the new classes, with the functions that read their correctness from a result."""


def halves(images: Images) -> tuple[Images, Images]:
    """Split the images into two halves by class."""
    order = rng.permutation(len(images.labels), 0, stream="lab halves")
    middle = len(order) // 2
    return _select_classes(images, order[:middle]), _select_classes(images, order[middle:])


def _select_classes(images: Images, classes: np.ndarray) -> Images:
    classes = np.sort(classes)
    parts = {
        name: _select_classes_of_split(getattr(images, name), classes) for name in ("training", "validation", "test")
    }
    return dataclasses.replace(images, labels=tuple(images.labels[index] for index in classes), **parts)


def _select_classes_of_split(split: Split, classes: np.ndarray) -> Split:
    subset = split.select(np.flatnonzero(np.isin(split.labels, classes)))
    return dataclasses.replace(subset, labels=np.searchsorted(classes, subset.labels))


def _few_shots(model: Any, images: Images, seed: int) -> np.ndarray:
    """Return the correctness of test predictions by least squares on the features of a few images per class."""
    few = images.training.select(sample_per_class(images.training.labels, SHOTS, seed, stream="lab shots"))
    features = [extract_features(model, images.preprocess, split, workers=0, batch=500) for split in (few, images.test)]
    linear, _ = fit_ridge(features[0], few.labels, classes=len(images.labels))
    return linear(features[1]).argmax(axis=1) == images.test.labels
