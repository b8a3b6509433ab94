"""Is a shifted object the same object? Answers and features under shifts, before and after training."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from vitrail.lab import internals, perturbations
from vitrail.lab.exact import DIFFERENT, EQUAL, difference, random_images, redraw
from vitrail.lab.images import Images
from vitrail.lab.measurements import Readings, looking_cell, open_model, read_test_images
from vitrail.lab.perturbations import Asked
from vitrail.lab.question import COLOURS, Question, Score, Verdict, bar, interval_text
from vitrail.lab.results import Results
from vitrail.lab.statistics import Estimate, complement
from vitrail.lab.trial import Cell, Outcome, pack, unpack
from vitrail.models.activations import look
from vitrail.models.create import create
from vitrail.models.families.vit.model import ViT
from vitrail.models.layers import patchify, unpatchify
from vitrail.reports.families import in_figure
from vitrail.reports.messages import words_beside
from vitrail.reports.page import Line, chart, figure, table

_TASK = "vitrail.lab.questions.translation"
_ASKED, _WATCHED = 2000, 64  # test images for answers, and for features


class Translation(Question):
    """Shift consistency among right answers, accuracy against shift, and how far features are from equivariant."""

    words = words_beside(__file__)
    claims = ("C11", "C12b")

    @functools.cached_property
    def cells(self) -> dict[tuple[str, int], list[Cell]]:
        """What looks at trained models, for every family at the largest and the smallest size."""
        ends = dict.fromkeys((self.lab.sizes[-1], self.lab.sizes[0]))
        passes = 10 * min(_ASKED, len(self.lab.images.test))
        return {
            (family, count): [
                looking_cell(f"{_TASK}:measure", self.lab.train(family, count=count, seed=seed), passes)
                for seed in self.lab.seeds_for(count)
            ]
            for count in ends
            for family in self.lab.families
        }

    @functools.cached_property
    def untrained(self) -> dict[str, list[Cell]]:
        """What looks at the same models before training."""
        count = self.lab.sizes[-1]
        return {
            family: [
                looking_cell(
                    f"{_TASK}:measure", self.lab.train(family, count=count, seed=seed), 10 * _WATCHED, untrained=True
                )
                for seed in self.lab.seeds_for(count)
            ]
            for family in self.lab.families
        }

    @functools.cached_property
    def proof(self) -> Cell:
        """What is exact."""
        return Cell(f"{_TASK}:prove", {})

    def rounds(self) -> Sequence[Sequence[Cell]]:
        largest = [key for key in self.cells if key[1] == self.lab.sizes[-1]]
        first = [key for key in largest if key[0] in ("vit", "resnet")]
        return (
            [self.proof, *self._some(first, 2)],
            self._some(largest, 2),
            self._some(list(self.cells), 2),
            self._some(list(self.cells), None),
        )

    def _some(self, keys: Sequence[tuple[str, int]], seeds: int | None) -> list[Cell]:
        before = [cell for family in dict.fromkeys(key[0] for key in keys) for cell in self.untrained[family][:seeds]]
        return before + [cell for key in keys for cell in self.cells[key][:seeds]]

    def read(self, results: Results) -> None:
        self.far = perturbations.shifts(self.lab.images.resolution[1])

        def read(what: Callable[[dict[str, Any]], Any]) -> Readings:
            """Each size has its own seed noise: small training sets have more."""
            return Readings(results, self.cells, what, lambda key: key[1])

        self.accuracy = {0: read(_right)}
        self.consistency = {}
        for far in (None, *self.far):
            self.consistency[far] = read(functools.partial(_shifted, far, "consistency"))
            if far is not None:
                self.accuracy[far] = read(functools.partial(_shifted, far, "accuracy"))
        self.errors: dict[tuple[str, bool], dict[str, dict[int, Readings]]] = {}
        for family in self.lab.families:
            for trained in (False, True):
                cells = self.cells[family, self.lab.sizes[-1]] if trained else self.untrained[family]
                first = next((one for cell in cells if (one := results.get(cell)) is not None), None)
                if first is not None:
                    self.errors[family, trained] = {
                        layer: {
                            int(far): Readings(results, {family: cells}, functools.partial(_error, layer, far))
                            for far in some
                        }
                        for layer, some in first["errors"].items()
                    }
        self.proved = results.get(self.proof)

    def _known(self, count: int) -> list[str]:
        return [family for family in self.lab.families if (family, count) in self.accuracy[0]]

    def verdicts(self) -> Iterator[Verdict]:
        largest = self.lab.sizes[-1]
        names = {"circular": "cnn", "strides": "cnn-strides"}
        exact = {} if self.proved is None else {name: f"{self.proved[key]:.1g}" for name, key in names.items()}
        yield Verdict(
            "C11",
            "trained",
            self.consistency[None].difference(("resnet", largest), ("vit", largest)),
            words=exact,
        )
        if self.proved is None:
            yield Verdict("C12b", "exact")
            return
        alone = max(self.proved[name] for name in ("embedding", "mlp", "norm"))
        attention = self.proved["attention"]
        decided = alone < EQUAL and (attention < EQUAL or attention > DIFFERENT)
        yield Verdict(
            "C12b",
            "exact",
            holds=attention > DIFFERENT if decided else None,
            words={"attention": f"{attention:.1g}", "positions": f"{self.proved['positions']:.1g}"},
        )

    def scores(self) -> Iterator[Score]:
        largest = self.lab.sizes[-1]
        for family in self._known(largest):
            yield Score("shift", family, self.consistency[None].estimate((family, largest)))
        for family in self.lab.families:
            before, after = (self._pooled_error(family, trained) for trained in (False, True))
            if after is not None:
                yield Score(
                    "features",
                    family,
                    complement(after, most=1.0),
                    None if before is None else complement(before, most=1.0),
                )

    def _pooled_error(self, family: str, trained: bool) -> Estimate | None:
        """How far pooled features are from the same after a shift by one pixel."""
        found = self.errors.get((family, trained), {}).get("pooled", {}).get(1)
        return None if found is None else found.estimate(family)

    def figures(self) -> Iterator[tuple[str, str]]:
        largest = self.lab.sizes[-1]
        accuracy, consistency, errors = [], [], []
        for family in self._known(largest):
            colour, key = COLOURS.get(family, 7), (family, largest)
            some = [self.accuracy[far].estimate(key) for far in (0, *self.far)]
            accuracy.append(
                Line(
                    in_figure(family),
                    (0, *self.far),
                    [100 * one.value for one in some],
                    colour,
                    bars=[bar(one) for one in some],
                )
            )
            some = [self.consistency[far].estimate(key) for far in self.far]
            consistency.append(
                Line(
                    in_figure(family),
                    self.far,
                    [100 * one.value for one in some],
                    colour,
                    bars=[bar(one) for one in some],
                )
            )
            by_layer = [
                (number, found[1].estimate(family).value) for number, found in self._layers(family) if 1 in found
            ]
            if by_layer:
                errors.append(Line(in_figure(family), [at for at, _ in by_layer], [one for _, one in by_layer], colour))
        if not accuracy:
            return
        pixels = self.word("pixels", "tspan")
        yield "translation-accuracy", chart(accuracy, pixels, self.word("accuracy", "tspan"), dots=True)
        yield "translation-consistency", chart(consistency, pixels, self.word("consistency", "tspan"), dots=True)
        if errors:
            layer, error = self.word("layer", "tspan"), self.word("error", "tspan")
            yield "translation-features", chart(errors, layer, error, dots=True)

    def _layers(self, family: str) -> list[tuple[int, dict[int, Readings]]]:
        layers = self.errors.get((family, True), {})
        return [(int(name.partition(".")[2]) + 1, found) for name, found in layers.items() if name != "pooled"]

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.word("nothing", "p"))
        told = {"count": f"{self.lab.sizes[-1]:,}", "seeds": self.accuracy[0].seeds}
        panes = "".join(
            figure(self.word(f"{name}-title"), self.word(f"{name}-note", **told), svg) for name, svg in figures.items()
        )
        return f'<div class="panes">{panes}</div>{self._table()}{self._proofs()}'

    def _table(self) -> str:
        rows = []
        for count in dict.fromkeys(count for _, count in self.cells):
            for family in self._known(count):
                key = (family, count)
                shown = [
                    interval_text(self.accuracy[0].estimate(key)),
                    interval_text(self.consistency[None].estimate(key)),
                ]
                if count == self.lab.sizes[-1]:
                    shown += [self._error_text(family, trained) for trained in (False, True)]
                rows.append([family, f"{count:,}", *shown, *[""] * (4 - len(shown))])
        heads = ["", "n", *(self.word(name) for name in ("right-here", "stays", "before", "after"))]
        return table(heads, rows, frozenset(range(1, 6)))

    def _error_text(self, family: str, trained: bool) -> str:
        found = self._pooled_error(family, trained)
        return "-" if found is None else f"{found.value:.3f}"

    def _proofs(self) -> str:
        if self.proved is None:
            return ""
        rows = [[self.word(f"exact-{name}"), f"{value:.1e}"] for name, value in self.proved.items()]
        return f"{self.word('exact', 'p')}{table((self.word('statement'), self.word('moved')), rows, frozenset({1}))}"

    def numbers(self) -> dict[str, Any]:
        largest = self.lab.sizes[-1]
        return {
            "accuracy": {
                f"{family} {count} {far}": list(found.estimate((family, count))[:2])
                for far, found in self.accuracy.items()
                for family, count in found.right
            },
            "consistency": {
                f"{family} {count}": list(self.consistency[None].estimate((family, count))[:2])
                for family, count in self.consistency[None].right
            },
            "errors": {
                f"{family} {'trained' if trained else 'untrained'} {largest} {layer} {far}": found.estimate(
                    family
                ).value
                for (family, trained), layers in self.errors.items()
                for layer, some in layers.items()
                for far, found in some.items()
            },
            "exact": self.proved,
        }


def _right(found: dict[str, Any]) -> np.ndarray:
    return unpack(found["right"], found["count"])


def _shifted(far: int | None, which: str, found: dict[str, Any]) -> np.ndarray:
    asked = {name: Asked.from_json(one, found["count"]) for name, one in found["asked"].items()}
    return perturbations.shift_values(asked, _right(found), far)[which]


def _error(layer: str, far: str, found: dict[str, Any]) -> list[float]:
    return found["errors"][layer][far]


def measure(settings: dict[str, Any], images: Images, of: list[Path], _folder: Path) -> Outcome:
    """Answers to shifted test images (of a trained model), and how far features are from equivariant."""
    model = open_model(settings, of)
    pixels, labels = read_test_images(images, _ASKED)
    patch = images.config(images.size, "vit").patch
    far = sorted({1, max(patch[0] // 2, 1), patch[0]}) if patch else [1]
    errors = internals.equivariance_errors(model, pixels[:: max(len(pixels) // _WATCHED, 1)][:_WATCHED], far)
    result: dict[str, Any] = {
        "errors": {
            layer: {str(by): internals.rounded(values) for by, values in some.items()} for layer, some in errors.items()
        }
    }
    if of:
        plain = perturbations.probabilities(model, pixels).argmax(axis=1)
        asked = perturbations.ask(
            model, pixels, labels, perturbations.shift_changes(perturbations.shifts(images.resolution[1])), plain=plain
        )
        result |= {
            "count": len(labels),
            "right": pack(plain == labels),
            "accuracy": float((plain == labels).mean()),
            "asked": {name: one.to_json() for name, one in asked},
        }
    return Outcome(result, {})


@torch.no_grad()
def prove(_settings: dict[str, Any], _images: Images, _of: list[Path], _folder: Path) -> Outcome:
    """What is exact: the largest change of an output, as a share of how much outputs of different images differ."""

    def moved(by: int, **perturbations: Any) -> float:
        model = redraw(create("ResNet-Nano", classes=5, **perturbations).double(), std=0.3)
        images = random_images(model)
        return difference(model(images), model(images.roll((by, by), (2, 3))))

    circular = {"edges": "circular"}
    found = {
        "cnn": max(moved(by, strides=(1, 1, 1), **circular) for by in (1, 5)),
        "cnn-stride-4": moved(4, **circular),
        "cnn-strides": moved(1, **circular),
        "cnn-rim": moved(5, strides=(1, 1, 1)),
    }
    model = redraw(cast(ViT, create("ViT-Nano/7", classes=5)).double(), std=0.3)
    images = random_images(model)
    patch, grid = model.config.patch, model.config.grid
    order = torch.randperm(grid[0] * grid[1], generator=torch.Generator().manual_seed(0))
    shuffled = unpatchify(patchify(images, patch)[:, order], grid, patch)
    block = model.blocks[0]
    z_BND = model.patch_embed(images)
    found["embedding"] = difference(z_BND[:, order], model.patch_embed(shuffled))
    layers = {"mlp": block.mlp, "norm": block.norm1, "attention": block.attn, "block": block}
    for name, layer in layers.items():
        found[name] = difference(layer(z_BND)[:, order], layer(z_BND[:, order]))
    tokens = [look(model, some).steps["blocks.0"][:, model.config.prefix :] for some in (images, shuffled)]
    found["positions"] = difference(tokens[0][:, order], tokens[1])
    found["pixel"] = difference(z_BND, model.patch_embed(images.roll(1, 3)))
    return Outcome({name: value if math.isfinite(value) else 1.0 for name, value in found.items()}, {})
