"""Are models invariant to shifts? Predictions and features under shifts, before and after training."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from vitrail.bundles.pretrained import create
from vitrail.core.message_files import load_messages
from vitrail.lab import internals, perturbations
from vitrail.lab.exact import DIFFERENT, EQUAL, random_images, redraw, relative_difference
from vitrail.lab.images import Images
from vitrail.lab.measurements import MeasuredValues, measurement_trial, open_model, read_test_images
from vitrail.lab.perturbations import PerturbedPredictions
from vitrail.lab.question import COLOURS, FIRST_SEEDS, Question, Score, Verdict, interval_text, percent_interval
from vitrail.lab.statistics import Estimate, complement
from vitrail.lab.trial import Outcome, Trial, pack, unpack
from vitrail.lab.trial_results import Results
from vitrail.models.activations import look
from vitrail.models.families.vit.model import ViT
from vitrail.models.layers import patchify, unpatchify
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

_TASK = "vitrail.lab.questions.translation"
_MAX_IMAGES, _FEATURE_IMAGES = 2000, 64  # numbers of test images for predictions and for features


class TranslationQuestion(Question):
    """Measures shift consistency of correct predictions, accuracy against shift, and equivariance errors."""

    messages = load_messages(__file__)
    claims = ("C11", "C12b")

    @functools.cached_property
    def trials(self) -> dict[tuple[str, int], list[Trial]]:
        """Measurements of trained models by family, at the largest and the smallest size, one per seed."""
        ends = dict.fromkeys((self.lab.sizes[-1], self.lab.sizes[0]))
        passes = 10 * min(_MAX_IMAGES, len(self.lab.images.test))
        return {
            (family, count): [
                measurement_trial(f"{_TASK}:measure", self.lab.train(family, count=count, seed=seed), passes)
                for seed in range(self.lab.seeds)
            ]
            for count in ends
            for family in self.lab.families
        }

    @functools.cached_property
    def untrained(self) -> dict[str, list[Trial]]:
        """Measurements of the same models before training."""
        count = self.lab.sizes[-1]
        return {
            family: [
                measurement_trial(
                    f"{_TASK}:measure",
                    self.lab.train(family, count=count, seed=seed),
                    10 * _FEATURE_IMAGES,
                    untrained=True,
                )
                for seed in range(self.lab.seeds)
            ]
            for family in self.lab.families
        }

    @functools.cached_property
    def proof_trial(self) -> Trial:
        """Trial that checks the exact statements."""
        return Trial(f"{_TASK}:prove", {})

    def rounds(self) -> Sequence[Sequence[Trial]]:
        largest = [key for key in self.trials if key[1] == self.lab.sizes[-1]]
        first = [key for key in largest if key[0] in ("vit", "resnet")]
        return (
            [self.proof_trial, *self._first_seeds(first, FIRST_SEEDS)],
            self._first_seeds(largest, FIRST_SEEDS),
            self._first_seeds(list(self.trials), FIRST_SEEDS),
            self._first_seeds(list(self.trials), None),
        )

    def _first_seeds(self, keys: Sequence[tuple[str, int]], seeds: int | None) -> list[Trial]:
        before = [trial for family in dict.fromkeys(key[0] for key in keys) for trial in self.untrained[family][:seeds]]
        return before + [trial for key in keys for trial in self.trials[key][:seeds]]

    def read(self, results: Results) -> None:
        self.distances = perturbations.shift_distances(self.lab.images.resolution[1])

        def measured_values(read_value: Callable[[dict[str, Any]], Any]) -> MeasuredValues:
            """Read one value. Each size has its own seed noise, because small training sets have more."""
            return MeasuredValues(results, self.trials, read_value)

        self.accuracy = {0: measured_values(_read_right)}
        self.consistency = {}
        for distance in (None, *self.distances):
            self.consistency[distance] = measured_values(functools.partial(_read_shifted, distance, "consistency"))
            if distance is not None:
                self.accuracy[distance] = measured_values(functools.partial(_read_shifted, distance, "accuracy"))
        self.errors: dict[tuple[str, bool], dict[str, dict[int, MeasuredValues]]] = {}
        for family in self.lab.families:
            for trained in (False, True):
                trials = self.trials[family, self.lab.sizes[-1]] if trained else self.untrained[family]
                first = next((result for trial in trials if (result := results.get(trial)) is not None), None)
                if first is not None:
                    self.errors[family, trained] = {
                        layer: {
                            int(distance): MeasuredValues(
                                results, {family: trials}, functools.partial(_read_error, layer, distance)
                            )
                            for distance in by_distance
                        }
                        for layer, by_distance in first["errors"].items()
                    }
        self.proof = results.get(self.proof_trial)

    def _finished_families(self, count: int) -> list[str]:
        return [family for family in self.lab.families if (family, count) in self.accuracy[0]]

    def verdicts(self) -> Iterator[Verdict]:
        largest = self.lab.sizes[-1]
        names = {"circular": "cnn", "strides": "cnn-strides"}
        exact_fields = {} if self.proof is None else {name: f"{self.proof[key]:.1g}" for name, key in names.items()}
        yield Verdict(
            "C11",
            "trained",
            self.consistency[None].difference(("resnet", largest), ("vit", largest)),
            fields=exact_fields,
        )
        if self.proof is None:
            yield Verdict("C12b", "exact")
            return
        per_token = max(self.proof[name] for name in ("embedding", "mlp", "norm"))
        attention = self.proof["attention"]
        is_decided = per_token < EQUAL and (attention < EQUAL or attention > DIFFERENT)
        yield Verdict(
            "C12b",
            "exact",
            holds=attention > DIFFERENT if is_decided else None,
            fields={"attention": f"{attention:.1g}", "positions": f"{self.proof['positions']:.1g}"},
        )

    def scores(self) -> Iterator[Score]:
        largest = self.lab.sizes[-1]
        for family in self._finished_families(largest):
            yield Score("shift", family, self.consistency[None].estimate((family, largest)))
        for family in self.lab.families:
            before, after = (self._pooled_error(family, trained) for trained in (False, True))
            if after is not None:
                yield Score(
                    "features",
                    family,
                    complement(after, upper=1.0),
                    None if before is None else complement(before, upper=1.0),
                )

    def _pooled_error(self, family: str, trained: bool) -> Estimate | None:
        """Return the error of the pooled features under a shift by one pixel."""
        values = self.errors.get((family, trained), {}).get("pooled", {}).get(1)
        return None if values is None else values.estimate(family)

    def figures(self) -> Iterator[tuple[str, str]]:
        largest = self.lab.sizes[-1]
        accuracy, consistency, errors = [], [], []
        for family in self._finished_families(largest):
            colour, key = COLOURS.get(family, 7), (family, largest)
            estimates = [self.accuracy[far].estimate(key) for far in (0, *self.distances)]
            accuracy.append(
                Line(
                    family_label(family),
                    (0, *self.distances),
                    [100 * estimate.value for estimate in estimates],
                    colour,
                    bars=[percent_interval(estimate) for estimate in estimates],
                )
            )
            estimates = [self.consistency[far].estimate(key) for far in self.distances]
            consistency.append(
                Line(
                    family_label(family),
                    self.distances,
                    [100 * estimate.value for estimate in estimates],
                    colour,
                    bars=[percent_interval(estimate) for estimate in estimates],
                )
            )
            by_layer = [
                (number, by_distance[1].estimate(family).value)
                for number, by_distance in self._layers(family)
                if 1 in by_distance
            ]
            if by_layer:
                errors.append(
                    Line(
                        family_label(family),
                        [number for number, _ in by_layer],
                        [estimate for _, estimate in by_layer],
                        colour,
                    )
                )
        if not accuracy:
            return
        pixels = self.t("pixels", "tspan")
        yield "translation-accuracy", line_chart(accuracy, pixels, self.t("accuracy", "tspan"), dots=True)
        yield "translation-consistency", line_chart(consistency, pixels, self.t("consistency", "tspan"), dots=True)
        if errors:
            layer, error = self.t("layer", "tspan"), self.t("error", "tspan")
            yield "translation-features", line_chart(errors, layer, error, dots=True)

    def _layers(self, family: str) -> list[tuple[int, dict[int, MeasuredValues]]]:
        layers = self.errors.get((family, True), {})
        return [
            (int(name.partition(".")[2]) + 1, by_distance) for name, by_distance in layers.items() if name != "pooled"
        ]

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.t("nothing", "p"))
        fields = {"count": f"{self.lab.sizes[-1]:,}", "seeds": self.accuracy[0].seeds}
        panes = "".join(
            figure(self.t(f"{name}-title"), self.t(f"{name}-note", **fields), svg) for name, svg in figures.items()
        )
        return f'<div class="panes">{panes}</div>{self._table()}{self._proofs()}'

    def _table(self) -> str:
        rows = []
        for count in dict.fromkeys(count for _, count in self.trials):
            for family in self._finished_families(count):
                key = (family, count)
                texts = [
                    interval_text(self.accuracy[0].estimate(key)),
                    interval_text(self.consistency[None].estimate(key)),
                ]
                if count == self.lab.sizes[-1]:
                    texts += [self._error_text(family, trained) for trained in (False, True)]
                rows.append([family, f"{count:,}", *texts, *[""] * (4 - len(texts))])
        heads = ["", "n", *(self.t(name) for name in ("right-here", "stays", "before", "after"))]
        return table(heads, rows, frozenset(range(1, 6)))

    def _error_text(self, family: str, trained: bool) -> str:
        estimate = self._pooled_error(family, trained)
        return "-" if estimate is None else f"{estimate.value:.3f}"

    def _proofs(self) -> str:
        if self.proof is None:
            return ""
        rows = [[self.t(f"exact-{name}"), f"{value:.1e}"] for name, value in self.proof.items()]
        return f"{self.t('exact', 'p')}{table((self.t('statement'), self.t('moved')), rows, frozenset({1}))}"

    def numbers(self) -> dict[str, Any]:
        largest = self.lab.sizes[-1]
        return {
            "accuracy": {
                f"{family} {count} {far}": list(values.estimate((family, count))[:2])
                for far, values in self.accuracy.items()
                for family, count in values.right
            },
            "consistency": {
                f"{family} {count}": list(self.consistency[None].estimate((family, count))[:2])
                for family, count in self.consistency[None].right
            },
            "errors": {
                f"{family} {'trained' if trained else 'untrained'} {largest} {layer} {far}": values.estimate(
                    family
                ).value
                for (family, trained), layers in self.errors.items()
                for layer, by_distance in layers.items()
                for far, values in by_distance.items()
            },
            "exact": self.proof,
        }


def _read_right(result: dict[str, Any]) -> np.ndarray:
    return unpack(result["right"], result["count"])


def _read_shifted(distance: int | None, measure: str, result: dict[str, Any]) -> np.ndarray:
    """Read accuracy or consistency of each image, averaged over shifts of one distance, or of all if it is None."""
    predictions = {
        name: PerturbedPredictions.from_json(fields, result["count"]) for name, fields in result["asked"].items()
    }
    return perturbations.shift_values(predictions, _read_right(result), distance)[measure]


def _read_error(layer: str, distance: str, result: dict[str, Any]) -> list[float]:
    return result["errors"][layer][distance]


def measure(settings: dict[str, Any], images: Images, bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure equivariance errors and, for trained models, record predictions for shifted images."""
    model = open_model(settings, bundles)
    pixels, labels = read_test_images(images, _MAX_IMAGES)
    patch = images.config(images.size, "vit").patch
    distances = sorted({1, max(patch[0] // 2, 1), patch[0]}) if patch else [1]
    feature_images = pixels[:: max(len(pixels) // _FEATURE_IMAGES, 1)][:_FEATURE_IMAGES]
    errors = internals.equivariance_errors(model, feature_images, distances)
    result: dict[str, Any] = {
        "errors": {
            layer: {str(distance): internals.round_values(values) for distance, values in by_distance.items()}
            for layer, by_distance in errors.items()
        }
    }
    if bundles:
        plain = perturbations.predict_probabilities(model, pixels).argmax(axis=1)
        predictions = perturbations.predict_perturbed(
            model,
            pixels,
            labels,
            perturbations.shift_perturbations(perturbations.shift_distances(images.resolution[1])),
            plain=plain,
        )
        result |= {
            "count": len(labels),
            "right": pack(plain == labels),
            "accuracy": float((plain == labels).mean()),
            "asked": {name: prediction.to_json() for name, prediction in predictions},
        }
    return Outcome(result, {})


@torch.no_grad()
def prove(_settings: dict[str, Any], _images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure by how much shifts and permuted tokens change outputs of models with random weights.

    A change is relative to the spread of the outputs over images.
    """

    def shift_change(pixels: int, **settings: Any) -> float:
        model = redraw(create("ResNet-Nano", classes=5, **settings).double(), std=0.3)
        images = random_images(model)
        return relative_difference(model(images), model(images.roll((pixels, pixels), (2, 3))))

    circular = {"edges": "circular"}
    changes = {
        "cnn": max(shift_change(pixels, strides=(1, 1, 1), **circular) for pixels in (1, 5)),
        "cnn-stride-4": shift_change(4, **circular),
        "cnn-strides": shift_change(1, **circular),
        "cnn-rim": shift_change(5, strides=(1, 1, 1)),
    }
    model = redraw(cast(ViT, create("ViT-Nano/7", classes=5)).double(), std=0.3)
    images = random_images(model)
    patch, grid = model.config.patch, model.config.grid
    order = torch.randperm(grid[0] * grid[1], generator=torch.Generator().manual_seed(0))
    shuffled = unpatchify(patchify(images, patch)[:, order], grid, patch)
    block = model.blocks[0]
    z_BND = model.patch_embed(images)
    changes["embedding"] = relative_difference(z_BND[:, order], model.patch_embed(shuffled))
    layers = {"mlp": block.mlp, "norm": block.norm1, "attention": block.attn, "block": block}
    for name, layer in layers.items():
        changes[name] = relative_difference(layer(z_BND)[:, order], layer(z_BND[:, order]))
    tokens = [look(model, pixels).steps["blocks.0"][:, model.config.prefix :] for pixels in (images, shuffled)]
    changes["positions"] = relative_difference(tokens[0][:, order], tokens[1])
    changes["pixel"] = relative_difference(z_BND, model.patch_embed(images.roll(1, 3)))
    return Outcome({name: value if math.isfinite(value) else 1.0 for name, value in changes.items()}, {})
