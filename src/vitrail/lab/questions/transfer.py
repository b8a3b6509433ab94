"""How much does pre-training help? Pre-train on half of the classes, then learn the other half from few images."""

import dataclasses
import functools
import math
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
from vitrail.lab.question import (
    COLOURS,
    FIRST_SEEDS,
    Question,
    Verdict,
    difference_text,
    find_cut_off,
    interval_text,
    percent_interval,
    range_text,
)
from vitrail.lab.statistics import Estimate, mean_of, smallest
from vitrail.lab.training import correct_predictions, fit, protocol, read_config, save_bundle
from vitrail.lab.trial import Outcome, Trial
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
        self.accuracies: dict[str, dict[Key, list[float]]] = {"fewshot": {}, "finetuned": {}}
        for key, trials in self.trials.items():
            finished = [result for trial in trials if (result := results.get(trial)) is not None]
            for method, values in self.accuracies.items():
                if finished:
                    values[key] = [result[method] for result in finished]
        self.cut_off = find_cut_off(results, self.trials)

    def _estimate(self, method: str, key: Key) -> Estimate | None:
        return self._contrast(method, (1.0, key))

    def _contrast(self, method: str, *terms: tuple[float, Key]) -> Estimate | None:
        """Return a weighted sum of accuracies. None if one of them was not run."""
        values = self.accuracies[method]
        if any(key not in values for _, key in terms):
            return None
        # Correctness per image is not stored, so the test images are treated as independent, which is conservative.
        images = math.hypot(*(weight * self._image_error(values[key]) for weight, key in terms))
        seeds = min(len(values[key]) for _, key in terms)
        by_seed = sum(weight * np.array(values[key][:seeds]) for weight, key in terms)
        estimate = mean_of(np.atleast_1d(by_seed), images)
        return estimate._replace(is_cut_off=not self.cut_off.isdisjoint(key for _, key in terms))

    def _image_error(self, shares: Sequence[float]) -> float:
        """Return the standard error of an accuracy from the test images of the new classes."""
        share = float(np.mean(shares))
        return math.sqrt(share * (1 - share) / self.test_count)

    @functools.cached_property
    def test_count(self) -> int:
        """Number of test images of the new classes."""
        return len(halves(self.lab.images)[1].test)

    def _gain(self, family: str) -> Estimate | None:
        """Return few-shot accuracy after the largest pre-training set minus that after the smallest."""
        few, many = ((family, "linear", count) for count in (self.lab.sizes[0], self.lab.sizes[-1]))
        return self._contrast("fewshot", (1.0, many), (-1.0, few))

    def verdicts(self) -> Iterator[Verdict]:
        yield Verdict("C6", "trained", smallest([self._gain(name) for name in FAMILIES if name in self.lab.families]))
        ends = [("vit", head, self.lab.sizes[-1]) for head in ("hidden", "linear")]
        lead = self._contrast("finetuned", (1.0, ends[0]), (-1.0, ends[1]))
        yield Verdict("C28", "reported", fields={} if lead is None else {"hidden": difference_text(lead)})

    def figures(self) -> Iterator[tuple[str, str]]:
        for method, values in self.accuracies.items():
            lines = []
            for family, head in dict.fromkeys((family, head) for family, head, _ in values):
                counts = [count for count in self.lab.sizes if (family, head, count) in values]
                estimates = [
                    estimate
                    for count in counts
                    if (estimate := self._estimate(method, (family, head, count))) is not None
                ]
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
        seeds = range_text(map(len, self.accuracies["fewshot"].values()))
        panes = "".join(
            figure(self.t(f"{method}-title"), self.t(f"{method}-note", seeds=seeds), figures[f"transfer-{method}"])
            for method in self.accuracies
            if f"transfer-{method}" in figures
        )
        rows = []
        for family, head, count in self.accuracies["fewshot"]:
            estimates = [self._estimate(method, (family, head, count)) for method in self.accuracies]
            texts = ["-" if estimate is None else interval_text(estimate) for estimate in estimates]
            rows.append((family, self.t(head), f"{count:,}", *texts))
        heads = ("", self.t("head"), "n", self.t("fewshot"), self.t("finetuned"))
        return f'<div class="panes">{panes}</div>{table(heads, rows)}'

    def numbers(self) -> dict[str, Any]:
        return {
            method: {
                f"{family} {head} {count}": float(np.mean(accuracies))
                for (family, head, count), accuracies in values.items()
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
        "finetuned": float(finetuned_right.mean()),
        "validation_accuracy": curves.curve[-1][1],
        "validation_count": len(first.validation),
    }
    return Outcome(result, {"seconds": curves.seconds[-1][1]})


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


def _few_shots(model: Any, images: Images, seed: int) -> float:
    """Return the test accuracy of least squares on the features of a few images per class."""
    few = images.training.select(sample_per_class(images.training.labels, SHOTS, seed, stream="lab shots"))
    features = [extract_features(model, images.preprocess, split, workers=0, batch=500) for split in (few, images.test)]
    linear, _ = fit_ridge(features[0], few.labels, classes=len(images.labels))
    return float((linear(features[1]).argmax(axis=1) == images.test.labels).mean())
