"""What is pre-training worth? On half of the classes, with more and more images; then the other half from a few."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.core import rng
from vitrail.data.dataset import Split, sample_per_class
from vitrail.evaluation.features import extract
from vitrail.evaluation.transfer import ridge
from vitrail.lab.images import Images
from vitrail.lab.question import COLOURS, Question, Verdict, bar, between, cut_off, interval_text, range_text
from vitrail.lab.results import Results
from vitrail.lab.statistics import Estimate, pool, smallest, sum_of_means
from vitrail.lab.training import fit, keep, protocol, read_config, right_answers
from vitrail.lab.trial import Cell, Outcome
from vitrail.models.create import build
from vitrail.reports.families import in_figure
from vitrail.reports.messages import words_beside
from vitrail.reports.page import Line, chart, figure, table

FAMILIES = ("vit", "resnet")
HEADS = {"linear": {}, "hidden": {"representation": "tanh"}}
SHOTS, DRAWS = 5, 5  # images of each new class, and how often they are chosen
_TUNED = 30  # images of each new class for fine-tuning

Key = tuple[str, str, int]


class Transfer(Question):
    """ViT and the CNN; ViT with a linear head and with a hidden layer, which goes after pre-training."""

    words = words_beside(__file__)
    claims = ("C6", "C28")

    @functools.cached_property
    def cells(self) -> dict[Key, list[Cell]]:
        """By family, head and number of images; a seed each. Two classes on each side are the least."""
        if len(self.lab.images.labels) < 4:
            return {}
        known = [name for name in FAMILIES if name in self.lab.families]
        variants = [(family, "linear") for family in known] + [("vit", "hidden")] * ("vit" in known)
        return {
            (family, head, count): [self._cell(family, head, count, seed) for seed in self.lab.seeds_for(count)]
            for family, head in variants
            for count in self.lab.sizes
        }

    def _cell(self, family: str, head: str, count: int, seed: int) -> Cell:
        images = self.lab.images
        config = images.matched(family, **HEADS[head]).replace(classes=len(images.labels) // 2)
        settings = {
            "model": config.to_document(),
            "count": count,
            "seed": seed,
            "seen": self.lab.seen,
            "learning_rate": None,
        }
        work = config.macs * (3.3 * self.lab.seen + 2 * len(images.test))
        return Cell("vitrail.lab.questions.transfer:transfer", settings, family=family, work=work)

    def rounds(self) -> Sequence[Sequence[Cell]]:
        ends = {self.lab.sizes[0], self.lab.sizes[-1]}
        leading = [key for key in self.cells if key[2] in ends and key[1] == "linear"]
        return (
            [cell for key in leading for cell in self.cells[key][:2]],
            [cell for key in self.cells if key[2] in ends for cell in self.cells[key][:2]],
            [cell for cells in self.cells.values() for cell in cells],
        )

    def read(self, results: Results) -> None:
        self.found: dict[str, dict[Key, list[float]]] = {"fewshot": {}, "finetuned": {}}
        for key, cells in self.cells.items():
            known = [one for cell in cells if (one := results.get(cell)) is not None]
            for way, values in self.found.items():
                if known:
                    values[key] = [one[way] for one in known]
        self.noises = {
            (way, count): pool(some for key, some in values.items() if key[2] == count)
            for way, values in self.found.items()
            for count in self.lab.sizes
        }
        self.cut_off = cut_off(results, self.cells)

    def _estimate(self, way: str, key: Key) -> Estimate | None:
        return self._contrast(way, (1.0, key))

    def _contrast(self, way: str, *terms: tuple[float, Key]) -> Estimate | None:
        """A weighted sum of accuracies; None if one of them was not run."""
        values = self.found[way]
        if any(key not in values for _, key in terms):
            return None
        # Which answers were right is not kept: as if each accuracy had test images of its own, which is more noise.
        images = math.hypot(*(weight * self._sampled(values[key]) for weight, key in terms))
        found = sum_of_means([(weight, values[key], self.noises[way, key[2]]) for weight, key in terms], images)
        return found._replace(is_cut_off=not self.cut_off.isdisjoint(key for _, key in terms))

    def _sampled(self, shares: Sequence[float]) -> float:
        """The standard error that the test images of the new classes leave in an accuracy."""
        share = float(np.mean(shares))
        return math.sqrt(share * (1 - share) / self.tested)

    @functools.cached_property
    def tested(self) -> int:
        """Test images of the new classes."""
        return len(halves(self.lab.images)[1].test)

    def _gain(self, family: str) -> Estimate | None:
        """Few-shot accuracy after the largest less after the smallest pre-training set."""
        few, many = ((family, "linear", count) for count in (self.lab.sizes[0], self.lab.sizes[-1]))
        return self._contrast("fewshot", (1.0, many), (-1.0, few))

    def verdicts(self) -> Iterator[Verdict]:
        yield Verdict("C6", "trained", smallest([self._gain(name) for name in FAMILIES if name in self.lab.families]))
        ends = [("vit", head, self.lab.sizes[-1]) for head in ("hidden", "linear")]
        lead = self._contrast("finetuned", (1.0, ends[0]), (-1.0, ends[1]))
        yield Verdict("C28", "reported", words={} if lead is None else {"hidden": between(lead)})

    def figures(self) -> Iterator[tuple[str, str]]:
        for way, values in self.found.items():
            lines = []
            for family, head in dict.fromkeys((family, head) for family, head, _ in values):
                counts = [count for count in self.lab.sizes if (family, head, count) in values]
                found = [self._estimate(way, (family, head, count)) for count in counts]
                estimates = [one for one in found if one is not None]
                name, colour = (family, COLOURS[family]) if head == "linear" else (f"{family}, {head}", 6)
                heights = [100 * one.value for one in estimates]
                lines.append(Line(in_figure(name), counts, heights, colour, bars=[bar(one) for one in estimates]))
            if lines:
                labels = self.word("images", "tspan"), self.word("accuracy", "tspan")
                yield f"transfer-{way}", chart(lines, *labels, log_x=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if not self.cells:
            return str(self.word("too-few-classes", "p"))
        if not figures:
            return str(self.word("nothing", "p"))
        tried = range_text(map(len, self.found["fewshot"].values()))
        panes = "".join(
            figure(self.word(f"{way}-title"), self.word(f"{way}-note", seeds=tried), figures[f"transfer-{way}"])
            for way in self.found
            if f"transfer-{way}" in figures
        )
        rows = []
        for family, head, count in self.found["fewshot"]:
            found = [self._estimate(way, (family, head, count)) for way in self.found]
            texts = ["-" if one is None else interval_text(one) for one in found]
            rows.append((family, self.word(head), f"{count:,}", *texts))
        heads = ("", self.word("head"), "n", self.word("fewshot"), self.word("finetuned"))
        return f'<div class="panes">{panes}</div>{table(heads, rows)}'

    def numbers(self) -> dict[str, Any]:
        return {
            way: {f"{family} {head} {count}": float(np.mean(some)) for (family, head, count), some in values.items()}
            for way, values in self.found.items()
        }


def transfer(settings: dict[str, Any], images: Images, _of: list[Path], folder: Path) -> Outcome:
    """Pre-train on one half of the classes, then learn the other half: from few images by least squares on frozen
    features, and by fine-tuning from some more."""
    first, second = halves(images)
    split = first.subset(settings["count"] // len(images.labels) * len(first.labels))
    torch.manual_seed(settings["seed"])
    model = build(read_config(settings))
    fitted = fit(model, first, split, protocol(settings, first), settings["seed"])
    keep(model, first, settings, folder)
    shots = [_few_shots(model, second, seed) for seed in range(DRAWS)]
    fresh, _ = model.with_new_head(len(second.labels))
    few = second.training.take(sample_per_class(second.training.labels, _TUNED, settings["seed"]))
    shorter = {**settings, "seen": settings["seen"] // 10, "learning_rate": 0.3 * settings["learning_rate"]}
    fit(fresh, second, few, protocol(shorter, second), settings["seed"])
    tuned = right_answers(fresh, second, second.test)
    result = {
        "fewshot": float(np.mean(shots)),
        "finetuned": float(tuned.mean()),
        "validation_accuracy": fitted.curve[-1][1],
        "validation_count": len(first.validation),
    }
    return Outcome(result, {"seconds": fitted.seconds[-1][1]})


def halves(images: Images) -> tuple[Images, Images]:
    """The images of one half of the classes, and of the other."""
    order = rng.permutation(len(images.labels), 0, stream="lab halves")
    middle = len(order) // 2
    return _only(images, order[:middle]), _only(images, order[middle:])


def _only(images: Images, classes: np.ndarray) -> Images:
    classes = np.sort(classes)
    parts = {name: _of_classes(getattr(images, name), classes) for name in ("training", "validation", "test")}
    return dataclasses.replace(images, labels=tuple(images.labels[index] for index in classes), **parts)


def _of_classes(split: Split, classes: np.ndarray) -> Split:
    chosen = np.flatnonzero(np.isin(split.labels, classes))
    some = split.take(chosen)
    return dataclasses.replace(some, labels=np.searchsorted(classes, some.labels))


def _few_shots(model: Any, images: Images, seed: int) -> float:
    """Accuracy on the test images of least squares on the features of a few images of each class."""
    few = images.training.take(sample_per_class(images.training.labels, SHOTS, seed, stream="lab shots"))
    features = [extract(model, images.preprocess, split, workers=0, batch=500) for split in (few, images.test)]
    linear, _ = ridge(features[0], few.labels, classes=len(images.labels))
    return float((linear(features[1]).argmax(axis=1) == images.test.labels).mean())
