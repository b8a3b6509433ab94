"""Can a model learn relations of two distant points? Images with two marks, equal or different.

An image is noise with two marks on a grid of 7 x 7 cells of 4 x 4 pixels. A mark is horizontal or vertical stripes. The
class is whether the marks are equal. One mark carries no information, so a model that sees one mark at a time is
correct half of the time.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.data.dataset import Split
from vitrail.lab.images import Images
from vitrail.lab.question import COLOURS, FIRST_SEEDS, Accuracies, Question, Verdict, percent_interval
from vitrail.lab.statistics import log2_count_needed, mean_of
from vitrail.lab.training import train
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.models import zoo
from vitrail.models.config import ModelConfig
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.page_kit import figure, image, table

CELL, GRID = 4, 7  # side of a cell in pixels; cells per row
DISTANCES = tuple(range(1, GRID))
_TRAINING, _VALIDATION, _TEST = 30_000, 1200, 3000
_SEEN = 50_000
_NOISE, _MARK = 128, 96  # levels of the noise; added brightness of a mark
_FAINT_MARK = 24
NEAR_COUNTS = tuple(250 * 2**power for power in range(8))
"""Numbers of training images of the task with faint marks one cell apart: 250 to 32,000."""
NEEDED = 0.9
"""Accuracy that counts as having learned the task."""
_UNLEARNED = 0.6  # accuracy below which a model has not learned the task; chance is 0.5
LABELS = ("different", "same")

MODELS = ("vit", "resnet", "wide", "lstm", "mixer")
"""`wide` is a CNN of the same cost with a receptive field of the whole image."""


class RangeQuestion(Question):
    """Compares models of equal cost on generated images. The images of the lab are not used."""

    messages = load_messages(__file__)
    claims = ("C16a", "C16b")

    @functools.cached_property
    def trials(self) -> dict[str, list[Trial]]:
        """Trials by model, one per seed."""
        return {
            name: [
                Trial(
                    "vitrail.lab.questions.range:train_on_marks",
                    {"model": config.to_document(), "seed": seed, "learning_rate": None, "seen": _SEEN},
                    family=config.family,
                    work=config.macs * (3.0 * _SEEN + 6 * _TEST),
                )
                for seed in range(self.lab.seeds)
            ]
            for name in MODELS
            for config in (config_of(name),)
            if self.lab.selected([config.family])
        }

    @functools.cached_property
    def near_trials(self) -> dict[tuple[str, int], list[Trial]]:
        """Trials with faint marks one cell apart, by model and number of training images, one per seed."""
        near = {"mark": _FAINT_MARK, "distances": [1]}
        return {
            (name, count): [trial.clone_with(count=count, **near) for trial in trials]
            for name, trials in self.trials.items()
            for count in NEAR_COUNTS
        }

    def rounds(self) -> Sequence[Sequence[Trial]]:
        def select_near(names: Sequence[str], seeds: int | None) -> list[Trial]:
            return [trial for key, trials in self.near_trials.items() if key[0] in names for trial in trials[:seeds]]

        def select(names: Sequence[str], seeds: int | None) -> list[Trial]:
            return [trial for name in names if name in self.trials for trial in self.trials[name][:seeds]]

        return (
            select(MODELS[:2], FIRST_SEEDS),
            select(MODELS[:3], FIRST_SEEDS),
            select_near(MODELS[:2], FIRST_SEEDS),
            select(MODELS, FIRST_SEEDS),
            [*select(MODELS, None), *select_near(MODELS[:2], None)],
            select_near(MODELS, FIRST_SEEDS),
        )

    def read(self, results: Results) -> None:
        test_distances = distances(_TEST)
        self.accuracies = Accuracies(results, self.trials).by_part(
            {distance: test_distances == distance for distance in DISTANCES}
        )
        self.near_accuracies = Accuracies(results, self.near_trials)

    def verdicts(self) -> Iterator[Verdict]:
        far = DISTANCES[-1]
        yield self._near_verdict()
        fields = {}
        if ("wide", far) in self.accuracies:
            fields["wide"] = f"{self.accuracies.estimate(('wide', far)).value:.1%}"
        yield Verdict("C16b", "trained", self.accuracies.difference(("vit", far), ("resnet", far)), fields=fields)

    def _near_verdict(self) -> Verdict:
        """Return the verdict on C16a: how many doublings of the training images the ViT needs more than the CNN."""
        vit, cnn = (self.log2_needed(name) for name in ("vit", "resnet"))
        if vit is None or cnn is None:
            return Verdict("C16a", "trained", is_share=False)
        lows, highs = zip(*(self._needed_range(name) for name in ("vit", "resnet")), strict=True)
        estimate = mean_of([a - b for a, b in zip(vit, cnn, strict=False)])
        trainings = self.near_accuracies.trainings
        estimate = estimate._replace(
            rates=(lows[0] - highs[1], highs[0] - lows[1]),
            trainings=frozenset(trainings[name, count] for name in ("vit", "resnet") for count in NEAR_COUNTS),
        )
        texts = {"vit": self._needed_text("vit"), "resnet": self._needed_text("resnet")}
        return Verdict("C16a", "trained", estimate, is_share=False, fields=texts)

    def log2_needed(self, name: str) -> list[float] | None:
        """Return, for each seed, log2 of the number of training images a model needs. None if a size is missing."""
        keys = [(name, count) for count in NEAR_COUNTS]
        if any(key not in self.near_accuracies for key in keys):
            return None
        by_size = [self.near_accuracies.right[key].mean(axis=1) for key in keys]
        return [log2_count_needed(NEAR_COUNTS, curve, NEEDED) for curve in zip(*by_size, strict=False)]

    def _needed_range(self, name: str) -> tuple[float, float]:
        """Return the range of `log2_needed` over the learning rates that may be the best ones."""
        lows, highs = zip(*(self.near_accuracies.rate_range((name, count)) for count in NEAR_COUNTS), strict=True)
        return log2_count_needed(NEAR_COUNTS, highs, NEEDED), log2_count_needed(NEAR_COUNTS, lows, NEEDED)

    def _needed_text(self, name: str) -> str:
        """Return the number of training images that a model needs as text: 1,400, or > 32,000."""
        mean = float(np.mean(self.log2_needed(name) or [math.nan]))
        ends = math.log2(NEAR_COUNTS[0]), math.log2(NEAR_COUNTS[-1])
        sign = "> " if mean >= ends[1] else "< " if mean <= ends[0] else ""
        return f"{sign}{float(f'{2**mean:.2g}'):,.0f}"

    def figures(self) -> Iterator[tuple[str, str]]:
        near_lines = []
        for name in MODELS:
            counts = [count for count in NEAR_COUNTS if (name, count) in self.near_accuracies]
            if counts:
                estimates = [self.near_accuracies.estimate((name, count)) for count in counts]
                values, bars = [100 * estimate.value for estimate in estimates], list(map(percent_interval, estimates))
                near_lines.append(Line(self.t(name, "tspan"), counts, values, COLOURS.get(name, 7), bars=bars))
        if near_lines:
            labels = self.t("images", "tspan"), self.t("accuracy", "tspan")
            yield "range-near", line_chart(near_lines, *labels, log_x=True, dots=True)
        lines = []
        for name in MODELS:
            if (name, DISTANCES[0]) in self.accuracies:
                estimates = [self.accuracies.estimate((name, distance)) for distance in DISTANCES]
                values, bars = (
                    [100 * estimate.value for estimate in estimates],
                    [percent_interval(estimate) for estimate in estimates],
                )
                pixels = [CELL * distance for distance in DISTANCES]
                lines.append(Line(self.t(name, "tspan"), pixels, values, COLOURS.get(name, 7), bars=bars))
        if lines:
            labels = self.t("distance", "tspan"), self.t("accuracy", "tspan")
            yield "range-distance", line_chart(lines, *labels, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.t("nothing", "p"))
        unlearned = Html(", ".join(map(self.t, self._unlearned())) or "-")
        notes = {
            "range-distance": self.t("figure-note", seeds=self.accuracies.seeds, unlearned=unlearned),
            "range-near": self.t("near-note", seeds=self.near_accuracies.seeds),
        }
        panes = "".join(figure(self.t(f"{name}-title"), notes[name], svg) for name, svg in figures.items())
        rows = []
        for name in MODELS:
            if (name, DISTANCES[0]) in self.accuracies:
                config = config_of(name)
                shares = [self.accuracies.estimate((name, distance)).value for distance in DISTANCES]
                cost = f"{config.macs / 1e6:.2f} M"
                field = config.receptive_field
                rows.append(
                    (self.t(name), cost, "-" if field is None else field, *(f"{share:.1%}" for share in shares))
                )
        ends = (f"{CELL * distance} px" for distance in DISTANCES)
        heads = ("", self.t("macs"), self.t("field"), *ends)
        accuracy_table = table(heads, rows, frozenset(range(1, len(heads))))
        return f'<div class="panes">{panes}{self._examples()}</div>{accuracy_table}'

    def _unlearned(self) -> list[str]:
        """Return the models that did not learn the task at any distance."""
        return [
            name
            for name in MODELS
            if (name, DISTANCES[0]) in self.accuracies
            and max(self.accuracies.estimate((name, distance)).value for distance in DISTANCES) < _UNLEARNED
        ]

    def _examples(self) -> str:
        """Return a figure with two images of the task."""
        pixels, same = make_marks(2 * len(DISTANCES), seed=0)
        farthest = (len(DISTANCES) - 1, 2 * len(DISTANCES) - 1)
        pictures = "".join(image(pixels[index], LABELS[same[index]]) for index in farthest)
        return figure(self.t("examples-title"), self.t("examples-note"), f'<div class="images">{pictures}</div>')

    def numbers(self) -> dict[str, Any]:
        return {
            f"{name} {CELL * far} px": list(self.accuracies.estimate((name, far))[:2])
            for name, far in self.accuracies.right
        }


def config_of(name: str) -> ModelConfig:
    """Return the config of a model, at the cost of the ViT with one patch per cell within a few per cent."""
    vit = zoo.small("Nano", "vit").replace(classes=2, patch=CELL, width=32, mlp=64)
    match name:
        case "vit":
            return vit
        case "resnet" | "wide":
            changes = {"layers": [1, 2, 2]} if name == "wide" else {}
            return zoo.small("Nano", "resnet").replace(classes=2, **changes).with_macs(vit.macs)
    return zoo.small("Nano", name).replace(classes=2, patch=CELL, width=32).with_macs(vit.macs)


# The task


def distances(count: int) -> np.ndarray:
    """Return the Chebyshev distance of the marks of each test image in cells. All are equally frequent."""
    return np.arange(count) % len(DISTANCES) + 1


def make_marks(
    count: int, seed: int, *, mark: int = _MARK, mark_distances: Sequence[int] = DISTANCES
) -> tuple[np.ndarray, np.ndarray]:
    """Draw images (count, 28, 28, 1) and whether their marks are equal, half of them at every distance."""
    test_distances = np.asarray(mark_distances)[np.arange(count) % len(mark_distances)]
    generator = np.random.default_rng(seed)
    cells = list(itertools.product(range(GRID), repeat=2))
    pairs: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {distance: [] for distance in DISTANCES}
    for cell, other_cell in itertools.permutations(cells, 2):
        pairs[max(abs(cell[0] - other_cell[0]), abs(cell[1] - other_cell[1]))].append((cell, other_cell))
    horizontal = np.repeat([[1, 0, 1, 0]], CELL, axis=0).T
    marks = (mark * np.stack([horizontal, horizontal.T])).astype(np.uint8)
    same = np.arange(count) // len(mark_distances) % 2
    first_marks = generator.integers(2, size=count)
    pixels = generator.integers(0, _NOISE, (count, GRID * CELL, GRID * CELL, 1), np.uint8)
    for index, distance in enumerate(test_distances):
        cell_pair = pairs[distance][generator.integers(len(pairs[distance]))]
        mark_pair = (first_marks[index], first_marks[index] ^ 1 ^ same[index])
        for (row, column), mark in zip(cell_pair, mark_pair, strict=True):
            region = np.s_[index, row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL, 0]
            pixels[region] += marks[mark]
    return pixels, same.astype(np.int64)


@functools.lru_cache(2)
def mark_images(mark: int = _MARK, mark_distances: tuple[int, ...] = DISTANCES) -> Images:
    """Return the generated images in the form of a lab's images."""
    parts = {"training": max(_TRAINING, NEAR_COUNTS[-1]), "validation": _VALIDATION, "test": _TEST}
    splits = [
        Split(name, *make_marks(count, seed, mark=mark, mark_distances=mark_distances))
        for seed, (name, count) in enumerate(parts.items())
    ]
    return Images("marks", LABELS, "Nano", *splits, fingerprint="marks")


def train_on_marks(settings: dict[str, Any], _images: Images, bundles: list[Path], folder: Path) -> Outcome:
    """Trial function: train one model on the generated images by the lab's protocol."""
    defaults = {"count": _TRAINING, "recipe": {}, "augment": False, "permutation": None}
    images = mark_images(settings.get("mark", _MARK), tuple(settings.get("distances", DISTANCES)))
    return train({**defaults, **settings}, images, bundles, folder)
