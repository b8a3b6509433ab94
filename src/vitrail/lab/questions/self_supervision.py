"""What do models learn without labels? Next-pixel prediction and masked patches, then linear probes."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.core.message_files import load_messages
from vitrail.data.dataset import Split
from vitrail.evaluation.feature_classifiers import fit_ridge
from vitrail.evaluation.features import extract_features
from vitrail.lab.images import Images
from vitrail.lab.question import FIRST_SEEDS, Accuracies, Question, Verdict, interval_text
from vitrail.lab.statistics import smallest
from vitrail.lab.training import fit, protocol, save_bundle
from vitrail.lab.trial import Outcome, Trial, pack
from vitrail.lab.trial_results import Results
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig, read_model
from vitrail.models.create import build
from vitrail.reports.page_kit import table

_SEEN = {"igpt": 0.1, "vit": 1.0}  # share of the lab's images seen: one token per pixel is expensive
_MAX_PROBE_IMAGES = 3000  # labelled images

PIXELS = ("pixels", False)
"""Name of the probe on raw pixels, like those of the variants."""

VARIANTS = {
    "iGPT": ("igpt", {}, "next-pixel"),
    "iGPT, wider": ("igpt", {"width": 48, "mlp": 96}, "next-pixel"),
    "ViT": ("vit", {}, "masked"),
}


class SelfSupervisionQuestion(Question):
    """Compares linear probes on features of models trained without labels, of untrained models, and on raw pixels."""

    messages = load_messages(__file__)
    claims = ("C35",)

    @functools.cached_property
    def trials(self) -> dict[tuple[str, bool], list[Trial]]:
        """Trials by (variant, is trained), one per seed."""
        seeds = range(self.lab.seeds)
        return {
            (name, is_trained): [self._trial(name, seed, is_trained=is_trained) for seed in seeds]
            for name in VARIANTS
            for is_trained in (True, False)
        }

    def _trial(self, name: str, seed: int, *, is_trained: bool) -> Trial:
        family, changes, objective = VARIANTS[name]
        images = self.lab.images
        is_small = objective == "next-pixel"
        changes = {**_small_resolution(images), **changes} if is_small else changes
        config = images.config("Micro" if is_small else images.size, family, **changes)
        seen = int(self.lab.seen * _SEEN[family])
        settings = {
            "model": config.predicting("pixels" if objective == "next-pixel" else "classes").to_document(),
            "objective": objective if is_trained else None,
            "count": self.lab.sizes[-1],
            "seed": seed,
            "seen": seen,
            "learning_rate": None if is_trained else 0.0,
        }
        work = config.macs * ((3.0 * seen if is_trained else 0) + 2 * (len(images.test) + 2 * _MAX_PROBE_IMAGES))
        return Trial("vitrail.lab.questions.self_supervision:learn", settings, family=family, work=work)

    @functools.cached_property
    def pixel_trials(self) -> list[Trial]:
        """Trials of a probe on raw pixels, one per seed, with the training images of that seed."""
        task, count = "vitrail.lab.questions.self_supervision:probe_pixels", self.lab.sizes[-1]
        return [Trial(task, {"count": count, "seed": seed}, work=5e9) for seed in range(self.lab.seeds)]

    def rounds(self) -> Sequence[Sequence[Trial]]:
        def select(names: tuple[str, ...], seeds: int | None) -> list[Trial]:
            return [trial for (name, _), trials in self.trials.items() if name in names for trial in trials[:seeds]]

        return (
            [*select(("iGPT",), FIRST_SEEDS), *self.pixel_trials[:FIRST_SEEDS]],
            select(("iGPT", "ViT"), FIRST_SEEDS),
            [*select(tuple(VARIANTS), None), *self.pixel_trials],
        )

    def read(self, results: Results) -> None:
        self.accuracies = Accuracies(results, {**self.trials, PIXELS: self.pixel_trials})

    def verdicts(self) -> Iterator[Verdict]:
        leads = [self.accuracies.difference(("iGPT", True), other) for other in (("iGPT", False), PIXELS)]
        fields = {}
        if all(lead is not None for lead in leads):
            untrained, pixels = (self.accuracies.estimate(other).value for other in (("iGPT", False), PIXELS))
            fields = {"untrained": f"{untrained:.1%}", "pixels": f"{pixels:.1%}"}
        yield Verdict("C35", "trained", smallest(leads), fields=fields)

    def html(self, figures: dict[str, str]) -> str:
        if not self.accuracies.right:
            return str(self.t("nothing", "p"))
        rows = []
        for name in VARIANTS:
            keys = [(name, is_trained) for is_trained in (True, False)]
            rows.append(
                (
                    name,
                    *(interval_text(self.accuracies.estimate(key)) if key in self.accuracies else "-" for key in keys),
                )
            )
        if PIXELS in self.accuracies:
            rows.append((self.t("pixels"), interval_text(self.accuracies.estimate(PIXELS)), ""))
        return table(("", self.t("trained"), self.t("untrained")), rows)

    def numbers(self) -> dict[str, Any]:
        return {
            f"{name} {'trained' if is_trained else 'untrained'}": self.accuracies.estimate((name, is_trained)).value
            for name, is_trained in self.accuracies.right
        }


def _small_resolution(images: Images) -> dict[str, Any]:
    """Return a small resolution for iGPT, which has one token per pixel."""
    side = min(14, images.resolution[0])
    return {"resolution": [side, side]}


def learn(settings: dict[str, Any], images: Images, _bundles: list[Path], folder: Path) -> Outcome:
    """Trial function: train without labels (or not at all), then probe the layer with the best validation accuracy."""
    config = read_model(settings["model"])
    images = _resize(images, config)
    torch.manual_seed(settings["seed"])
    model = build(config)
    split = images.subset(settings["count"], settings["seed"])
    few = split.sample_evenly(_MAX_PROBE_IMAGES)
    scale = images.preprocess.scale
    model.prepare(
        lambda count: scale(torch.from_numpy(np.asarray(split.sample_evenly(count).images))), settings["seed"]
    )
    measured = {}
    if settings["objective"] is not None:
        changes = {"objective": settings["objective"], "label_smoothing": 0.0}
        recipe = protocol({**settings, "recipe": changes}, images)
        curves = fit(model, images, split, recipe, settings["seed"], validate=lambda: 0.0)
        measured["seconds"] = curves.seconds[-1][1]
    save_bundle(model, images, settings, folder, objective=settings["objective"])
    probes = [_probe(model, images, few, layer) for layer in range(config.depth)]
    best_layer = max(range(config.depth), key=lambda layer: probes[layer][0])
    right = probes[best_layer][1]
    result = {
        "accuracy": float(right.mean()),
        "right": pack(right),
        "count": len(right),
        "layer": best_layer,
        "validation_accuracy": probes[best_layer][0],
    }
    return Outcome(result, measured)


def _resize(images: Images, config: ModelConfig) -> Images:
    """Resize the images to the resolution of a model."""
    preprocess = images.preprocess.replace(resolution=config.resolution)
    parts: dict[str, Any] = {}
    for name in ("training", "validation", "test"):
        split: Split = getattr(images, name)
        parts[name] = dataclasses.replace(split, images=preprocess.crop_all(np.asarray(split.images)))
    return dataclasses.replace(images, **parts) if images.resolution != config.resolution else images


def _probe(model: AnyModel, images: Images, few: Split, layer: int) -> tuple[float, np.ndarray]:
    """Return validation accuracy and test correctness of least squares on the features of a layer."""
    splits = (few, images.validation, images.test)
    features = [
        extract_features(model, images.preprocess, split, layer=layer, workers=0, batch=250) for split in splits
    ]
    linear, _ = fit_ridge(features[0], few.labels, classes=len(images.labels))
    right = [
        linear(layer_features).argmax(axis=1) == split.labels
        for layer_features, split in zip(features[1:], splits[1:], strict=True)
    ]
    return float(right[0].mean()), right[1]


def probe_pixels(settings: dict[str, Any], images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: fit and evaluate a linear probe on raw pixels."""
    few = images.subset(settings["count"], settings["seed"]).sample_evenly(_MAX_PROBE_IMAGES)
    pixels = [np.asarray(split.images, np.float32).reshape(len(split), -1) / 255 for split in (few, images.test)]
    linear, _ = fit_ridge(pixels[0], few.labels, classes=len(images.labels))
    right = linear(pixels[1]).argmax(axis=1) == images.test.labels
    return Outcome({"accuracy": float(right.mean()), "right": pack(right), "count": len(right)}, {})
