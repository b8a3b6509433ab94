"""Accuracy of ViT with local, strided and global attention, at equal training time (C42).

Local and strided attention take less time per token than global attention, so their models are wider.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from vitrail.core.html import Html
from vitrail.lab.question import (
    FIRST_SEEDS,
    Accuracies,
    Lab,
    Question,
    Verdict,
    difference_text,
    interval_text,
    points_text,
)
from vitrail.lab.statistics import Estimate
from vitrail.lab.trial import Trial, compare_variants
from vitrail.lab.trial_results import Results
from vitrail.models.families.vit.config import ViTConfig
from vitrail.reports.page_kit import table

PATTERNS = ("global", "local", "strided")


class Grid(NamedTuple):
    """A size of patches, and the models that are compared on it."""

    patch: int
    share: int
    """Divisor of the lab's number of images seen."""
    widths: Mapping[str, int]
    """Width of the model with each pattern of attention."""


GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "Pico": (Grid(1, 2, {"global": 24, "local": 24, "strided": 24}),),
    "Nano": (
        Grid(2, 2, {"global": 32, "local": 48, "strided": 32}),
        Grid(1, 8, {"global": 32, "local": 128, "strided": 112}),
    ),
    "Nano/8": (
        Grid(2, 2, {"global": 32, "local": 56, "strided": 32}),
        Grid(1, 8, {"global": 32, "local": 160, "strided": 144}),
    ),
}
"""Grids by size of the presets: 14 x 14 and 28 x 28 patches for images of 28 px.

With these widths, a training step takes at most as long as with global attention, within 3 % (strided attention on 64
patches 12 %). They were measured with one thread on a processor with AVX-512. They are fixed, so that a lab trains the
same models on every machine. The report shows the seconds that were measured.
"""

Key = tuple[int, str]
"""Index of the grid and pattern of attention."""


class AttentionComparison:
    """Trials of ViT with the patterns of attention, and their results. The first grid decides."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.grids = GRIDS[lab.images.size] if "vit" in lab.families else ()

    @functools.cached_property
    def trials(self) -> dict[Key, list[Trial]]:
        """Trials by grid and pattern, one per seed."""
        trials: dict[Key, list[Trial]] = {}
        for index, grid in enumerate(self.grids):
            trials |= compare_variants({(index, name): self._train(grid, name) for name in PATTERNS[:2]})
            trials[index, "strided"] = self._train(grid, "strided")
        return trials

    def _train(self, grid: Grid, pattern: str) -> list[Trial]:
        vit, width = cast(ViTConfig, self.lab.images.matched_config("vit")), grid.widths[pattern]
        changes = {"patch": grid.patch, "depth": vit.depth // 2, "width": width, "mlp": 2 * width, "attention": pattern}
        count, seen = self.lab.default_size, self.lab.seen // grid.share
        seeds = range(self.lab.seeds)
        return [self.lab.train("vit", count=count, seed=seed, changes=changes, seen=seen) for seed in seeds]

    def rounds(self) -> Sequence[Sequence[Trial]]:
        def select(index: int, patterns: Sequence[str], seeds: int | None = FIRST_SEEDS) -> list[Trial]:
            return [trial for name in patterns for trial in self.trials[index, name][:seeds]]

        if not self.grids:
            return ()
        larger = [select(index, PATTERNS) for index in range(1, len(self.grids))]
        return select(0, PATTERNS[:2]), select(0, PATTERNS), select(0, PATTERNS, None), *larger

    def read(self, results: Results) -> None:
        self.accuracies = Accuracies(results, self.trials)
        self.seconds: dict[Key, float] = {}
        """Seconds of training for 1,000 images, on one machine: those of different machines are not comparable."""
        machine = results.machine(self.trials[0, "global"][0]) if self.grids else None
        for key, trials in self.trials.items():
            measured = [results.measured(trial) or {} for trial in trials if results.machine(trial) == machine]
            seconds = [entry["seconds"] for entry in measured if "seconds" in entry]
            if seconds:
                self.seconds[key] = 1000 * float(np.mean(seconds)) / trials[0].settings["seen"]

    def lead(self, index: int, pattern: str) -> Estimate | None:
        """Return the accuracy with a pattern minus that of global attention. None if either was not run."""
        return self.accuracies.difference((index, pattern), (index, "global"))

    def verdict(self) -> Verdict:
        """Return the verdict on C42, which the first grid decides. The other leads over global attention are shown."""
        lead = self.lead(0, "local") if self.grids else None
        if lead is None:
            return Verdict("C42", "trained")
        keys = [(0, name) for name in ("local", "global")]
        local, full = (self.seconds.get(key) for key in keys)
        fields = {
            "tokens": self.tokens(0),
            "time": f"{local / full:.2f}" if local and full else "-",
            "strided": self._lead_text(0, "strided"),
        }
        if all((1, pattern) in self.accuracies for pattern in PATTERNS):
            larger = {f"more_{pattern}": self._lead_text(1, pattern) for pattern in PATTERNS[1:]}
            return Verdict(
                "C42", "trained", lead, fields={**fields, **larger, "more": self.tokens(1)}, message="larger"
            )
        return Verdict("C42", "trained", lead, fields=fields)

    def _lead_text(self, index: int, pattern: str) -> str:
        """Return the lead of a pattern over global attention as text."""
        lead = self.lead(index, pattern)
        return "-" if lead is None else f"{points_text(lead.value)} ({difference_text(lead)})"

    def tokens(self, index: int) -> int:
        """Return the number of patches of a grid."""
        height, width = self.lab.images.resolution
        return height * width // self.grids[index].patch ** 2

    def table(self, question: Question) -> str:
        """Return the table of accuracies and training times. Empty if nothing was run."""
        rows = list(self._rows(question))
        names = ("tokens", "pattern", "width", "accuracy", "lead", "seconds")
        heads = tuple(map(question.t, names))
        return f"{question.t('patterns', 'p')}{table(heads, rows, frozenset((0, 2, 3, 4, 5)))}" if rows else ""

    def _rows(self, question: Question) -> Iterator[tuple[str | Html, ...]]:
        for key in self.trials:
            if key in self.accuracies:
                index, pattern = key
                yield (
                    str(self.tokens(index)),
                    question.t(pattern),
                    str(self.grids[index].widths[pattern]),
                    interval_text(self.accuracies.estimate(key)),
                    self._lead_text(index, pattern) if pattern != "global" else "-",
                    f"{self.seconds[key]:.2f}" if key in self.seconds else "-",
                )

    def numbers(self) -> dict[str, Any]:
        """Return accuracies and training times for `claims.json`."""
        return {
            f"{self.tokens(index)} {pattern}": {
                "accuracy": list(self.accuracies.estimate((index, pattern))[:2]),
                "seconds": self.seconds.get((index, pattern)),
            }
            for index, pattern in self.accuracies.right
        }
