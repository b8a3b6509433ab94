"""How local are models? Receptive areas and attention distances against the number of training images."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.pretrained import create
from vitrail.core.message_files import load_messages
from vitrail.lab import internals
from vitrail.lab.exact import random_images, redraw
from vitrail.lab.images import Images
from vitrail.lab.measurements import MeasuredValues, measurement_trial, open_model, read_test_images
from vitrail.lab.question import COLOURS, FIRST_SEEDS, Question, Score, Verdict, interval_text, percent_interval
from vitrail.lab.statistics import complement
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.models.families.vit.model import ViT
from vitrail.models.layers import patchify
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

_TASK = "vitrail.lab.questions.locality"
_FAMILIES = ("vit", "resnet", "hybrid", "mixer")
_PASSES = 3000  # cost of a measurement in forward passes of one image
_ATTENTION_IMAGES, _GRADIENT_IMAGES = 64, 24  # numbers of test images


class LocalityQuestion(Question):
    """Measures receptive areas and attention distances of models with a grid of 7 x 7 patches or more."""

    messages = load_messages(__file__)
    claims = ("C10", "C12a", "C15", "C41")

    @property
    def families(self) -> list[str]:
        """Compared families with spatial layers, ViT and CNN first."""
        return [name for name in _FAMILIES if name in self.lab.families]

    @property
    def counts(self) -> list[int]:
        """Largest, smallest and a medium number of training images."""
        sizes = self.lab.sizes
        return list(dict.fromkeys((sizes[-1], sizes[0], sizes[len(sizes) // 2])))

    def _train(self, family: str, count: int, seed: int) -> Trial:
        """Return a trial of a larger model that sees half as many images. Images of 8 px get one patch per pixel."""
        if self.lab.images.size != "Pico":
            return self.lab.train(family, count=count, seed=seed, size="Micro", seen=self.lab.seen // 2)
        patch = self.lab.images.matched_config(family).patch
        changes = {"patch": 1} if patch and max(patch) > 1 else None
        return self.lab.train(family, count=count, seed=seed, changes=changes, seen=self.lab.seen // 2)

    @functools.cached_property
    def trials(self) -> dict[tuple[str, int], list[Trial]]:
        """Measurements of trained models by family and size, one per seed."""
        return {
            (family, count): [
                measurement_trial(f"{_TASK}:measure", self._train(family, count, seed), _PASSES)
                for seed in range(self.lab.seeds)
            ]
            for family in self.families
            for count in self.counts
        }

    @functools.cached_property
    def untrained(self) -> dict[str, list[Trial]]:
        """Measurements of the same models before training."""
        return {
            family: [
                measurement_trial(
                    f"{_TASK}:measure", self._train(family, self.counts[0], seed), _PASSES, untrained=True
                )
                for seed in range(self.lab.seeds)
            ]
            for family in self.families
        }

    @functools.cached_property
    def proof_trial(self) -> Trial:
        """Trial that checks the exact statements."""
        return Trial(f"{_TASK}:prove", {})

    def rounds(self) -> Sequence[Sequence[Trial]]:
        largest = self.counts[0]
        first = [("vit", largest), ("resnet", largest)]
        smaller_sets = [("vit", count) for count in self.counts[1:]]
        return (
            [self.proof_trial, *self._first_seeds(first, FIRST_SEEDS)],
            self._first_seeds([("vit", self.counts[-1])] if len(self.counts) < 2 else smaller_sets[:1], FIRST_SEEDS),
            self._first_seeds([*smaller_sets, *((family, largest) for family in self.families)], FIRST_SEEDS),
            self._first_seeds(list(self.trials), None),
        )

    def _first_seeds(self, keys: Sequence[tuple[str, int]], seeds: int | None) -> list[Trial]:
        keys = [key for key in keys if key in self.trials]
        before = [trial for family in dict.fromkeys(key[0] for key in keys) for trial in self.untrained[family][:seeds]]
        return before + [trial for key in keys for trial in self.trials[key][:seeds]]

    def read(self, results: Results) -> None:
        before = {(family, 0): trials for family, trials in self.untrained.items()}
        groups = {**self.trials, **before}
        self.area = MeasuredValues(results, groups, lambda measured: measured["areas"][str(measured["third"])])
        with_heads = {key: trials for key, trials in groups.items() if key[0] in ("vit", "hybrid")}
        self.nearest = MeasuredValues(results, with_heads, lambda measured: measured["nearest"])
        self.head_difference = MeasuredValues(results, with_heads, lambda measured: [measured["head_difference"]])
        self.areas, self.heads = {}, {}
        for key, trials in groups.items():
            measured = [result for trial in trials if (result := results.get(trial)) is not None]
            if measured:
                layers = range(len(measured[0]["areas"]))
                self.areas[key] = [
                    float(np.mean([result["areas"][str(layer)] for result in measured])) for layer in layers
                ]
                if measured[0]["heads"]:
                    self.heads[key] = {int(layer): measured[0]["heads"][layer] for layer in measured[0]["heads"]}
        self.proof = results.get(self.proof_trial)

    def verdicts(self) -> Iterator[Verdict]:
        largest = self.counts[0]
        yield Verdict("C10", "trained", self.area.difference(("vit", largest), ("resnet", largest)))
        yield self._head_verdict()
        if self.proof is None:
            yield from (Verdict("C12a", "exact"), Verdict("C15", "exact"))
            return
        per_token, tokens = max(self.proof[name] for name in ("embedding", "norm", "mlp")), self.proof["tokens"]
        attention = self.proof["attention"]
        yield Verdict(
            "C12a",
            "exact",
            holds=per_token == 1 and attention == tokens,
            fields={"attention": attention, "tokens": tokens},
        )
        fields = {}
        if (key := ("vit", largest)) in self.heads:
            before = self.heads.get(("vit", 0))
            fields = {
                "trained": _percent_range(self.heads[key][0]),
                "untrained": "-" if before is None else _percent_range(before[0]),
            }
        yield Verdict("C15", "exact", holds=self.proof["first-layer"] == tokens, fields=fields)

    def _head_verdict(self) -> Verdict:
        """Return the verdict on C41: trained heads differ more from each other than untrained ones."""
        trained, untrained = ("vit", self.counts[0]), ("vit", 0)
        growth = self.head_difference.difference(trained, untrained)
        if growth is None:
            return Verdict("C41", "trained", is_share=False)
        keys = {"trained": trained, "untrained": untrained}
        fields = {name: f"{self.head_difference.estimate(key).value:.2f}" for name, key in keys.items()}
        return Verdict("C41", "trained", growth, is_share=False, fields=fields)

    def scores(self) -> Iterator[Score]:
        largest = self.counts[0]
        for family in self.families:
            if (family, largest) in self.area:
                before = self.area.estimate((family, 0)) if (family, 0) in self.area else None
                after = complement(self.area.estimate((family, largest)), upper=1.0)
                yield Score("near", family, after, None if before is None else complement(before, upper=1.0))

    def figures(self) -> Iterator[tuple[str, str]]:
        largest = self.counts[0]
        areas = []
        for family in self.families:
            for key, name in (((family, largest), family), ((family, 0), f"{family} 0")):
                if key in self.areas:
                    depth = len(self.areas[key])
                    xs = [100 * (layer + 1) / depth for layer in range(depth)]
                    values = [100 * value for value in self.areas[key]]
                    areas.append(Line(family_label(name), xs, values, COLOURS.get(family, 7), joined=key[1] > 0))
        if areas:
            yield "locality-area", line_chart(areas, self.t("depth", "tspan"), self.t("area", "tspan"), dots=True)
        nearest_lines = []
        for family in ("vit", "hybrid"):
            counts = sorted(count for count in self.counts if (family, count) in self.nearest)
            if counts:
                estimates = [self.nearest.estimate((family, count)) for count in counts]
                colour, values = COLOURS[family], [100 * estimate.value for estimate in estimates]
                nearest_lines.append(
                    Line(
                        family_label(family),
                        counts,
                        values,
                        colour,
                        bars=[percent_interval(estimate) for estimate in estimates],
                    )
                )
                if (family, 0) in self.nearest:
                    untrained_value = 100 * self.nearest.estimate((family, 0)).value
                    nearest_lines.append(
                        Line(family_label(f"{family} 0"), counts, [untrained_value] * len(counts), colour, joined=False)
                    )
        if nearest_lines:
            x_label, y_label = self.t("images", "tspan"), self.t("nearest", "tspan")
            yield "locality-dose", line_chart(nearest_lines, x_label, y_label, dots=True, log_x=True)
        heads = []
        for key, name, colour in ((("vit", largest), "vit", 0), (("vit", 0), "vit 0", 7)):
            if key in self.heads:
                points = [(layer + 1, 100 * value) for layer, values in self.heads[key].items() for value in values]
                heads.append(
                    Line(family_label(name), [x for x, _ in points], [y for _, y in points], colour, joined=False)
                )
        if heads:
            yield "locality-heads", line_chart(heads, self.t("layer", "tspan"), self.t("distance", "tspan"))

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.t("nothing", "p"))
        fields = {"count": f"{self.counts[0]:,}", "seeds": self.area.seeds}
        panes = "".join(
            figure(self.t(f"{name}-title"), self.t(f"{name}-note", **fields), svg) for name, svg in figures.items()
        )
        rows = []
        for family, count in sorted(self.areas, key=lambda key: (self.families.index(key[0]), key[1])):
            key = (family, count)
            nearest = interval_text(self.nearest.estimate(key), math.inf) if key in self.nearest else "-"
            first = _percent_range(self.heads[key][0]) if key in self.heads else "-"
            difference = f"{self.head_difference.estimate(key).value:.2f}" if key in self.head_difference else "-"
            size = f"{count:,}" if count else self.t("untrained")
            rows.append([family, size, interval_text(self.area.estimate(key)), nearest, first, difference])
        heads = ["", "n", *(self.t(name) for name in ("area-third", "nearest-head", "first-heads", "head-difference"))]
        distance_table = table(heads, rows, frozenset(range(1, 6)))
        return f'<div class="panes">{panes}</div>{distance_table}{self._proofs()}'

    def _proofs(self) -> str:
        if self.proof is None:
            return ""
        rows = [
            [self.t(f"exact-{name}"), f"{value} / {self.proof['tokens']}"]
            for name, value in self.proof.items()
            if name != "tokens"
        ]
        return f"{self.t('exact', 'p')}{table((self.t('part'), self.t('reached')), rows, frozenset({1}))}"

    def numbers(self) -> dict[str, Any]:
        return {
            "area": {
                f"{family} {count}": list(self.area.estimate((family, count))[:2]) for family, count in self.area.right
            },
            "nearest": {
                f"{family} {count}": list(self.nearest.estimate((family, count))[:2])
                for family, count in self.nearest.right
            },
            "heads": {f"{family} {count}": values for (family, count), values in self.heads.items()},
            "head difference": {
                f"{family} {count}": list(self.head_difference.estimate((family, count))[:2])
                for family, count in self.head_difference.right
            },
            "exact": self.proof,
        }


def _percent_range(values: Sequence[float]) -> str:
    return f"{min(values):.0%} … {max(values):.0%}"


def measure(settings: dict[str, Any], images: Images, bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure receptive areas of every layer, and attention distances for families with heads."""
    model = open_model(settings, bundles)
    pixels, _ = read_test_images(images, _ATTENTION_IMAGES)
    depth = model.config.depth
    areas = internals.receptive_areas(
        model, pixels[:: max(len(pixels) // _GRADIENT_IMAGES, 1)][:_GRADIENT_IMAGES], range(depth)
    )
    distances = internals.head_distances(model, pixels)
    result: dict[str, Any] = {
        "third": internals.third_layer(depth),
        "areas": {str(layer): internals.round_values(values) for layer, values in areas.items()},
        "heads": {str(layer): internals.round_values(values.mean(axis=0)) for layer, values in distances.items()},
    }
    if distances:
        first = distances[0]
        result["nearest"] = internals.round_values(first[:, first.mean(axis=0).argmin()])
        by_layer = internals.head_differences(model, pixels)
        result["head_differences"] = {str(layer): value for layer, value in by_layer.items()}
        result["head_difference"] = float(np.mean(list(by_layer.values())))
    return Outcome(result, {})


def prove(_settings: dict[str, Any], _images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: count the tokens that the gradient of one token's output reaches, in each type of layer."""
    model = redraw(cast(ViT, create("ViT-Micro/4", classes=5)).double(), std=0.3)
    images = random_images(model, 1)
    block, prefix = model.blocks[0], model.config.prefix
    patch = model.config.patch
    z_1ND = model.patch_embed(images).detach()

    def first_layer(pixels: Tensor) -> Tensor:
        return block(model.embed(pixels))[:, prefix:]

    layers: dict[str, Callable[[Tensor], Tensor]] = {"norm": block.norm1, "mlp": block.mlp, "attention": block.attn}
    reach = {name: reached_tokens(layer, z_1ND, lambda gradient: gradient) for name, layer in layers.items()}
    reach["embedding"] = reached_tokens(model.patch_embed, images, lambda gradient: patchify(gradient, patch))
    counts = {name: int(matrix.sum(dim=1).max()) for name, matrix in reach.items()}
    counts["first-layer"] = int(
        reached_tokens(first_layer, images, lambda gradient: patchify(gradient, patch)).sum(dim=1).min()
    )
    return Outcome({**counts, "tokens": z_1ND.shape[1]}, {})


def reached_tokens(layer: Callable[[Tensor], Tensor], source: Tensor, by_token: Callable[[Tensor], Tensor]) -> Tensor:
    """Return whether the gradient of each output token (rows) is nonzero at each input token, (N, N)."""
    source = source.detach().clone().requires_grad_()
    with torch.enable_grad():
        output_1ND = layer(source)
        # Random signs, because a norm removes the plain sum of features.
        signs = torch.randn(output_1ND.shape[-1], generator=torch.Generator().manual_seed(0), dtype=output_1ND.dtype)
        rows = []
        for token in range(output_1ND.shape[1]):
            (gradient,) = torch.autograd.grad(output_1ND[0, token] @ signs, source, retain_graph=True)
            rows.append(by_token(gradient)[0].abs().amax(dim=-1) > 0)
    return torch.stack(rows)
