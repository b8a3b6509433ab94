"""What are convolutions before the Transformer worth? Hybrid against patches over three sizes and two lengths."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vitrail.lab.question import COLOURS, Accuracies, Question, Verdict, bar, between
from vitrail.lab.results import Results
from vitrail.lab.statistics import Estimate
from vitrail.lab.trial import Cell
from vitrail.models.config import ModelConfig
from vitrail.reports.families import in_figure
from vitrail.reports.messages import words_beside
from vitrail.reports.page import Line, chart, figure, table

FAMILIES = ("vit", "hybrid", "resnet")
FACTORS = (0.5, 1, 2)
"""Widths, times that of the lab's model."""
SHARES = (5, 1)
"""The images seen are those of the lab over these: a short and a full training."""


_TOLERANCE = 0.02  # of multiply-accumulates: points of equal width stand at equal cost


class Point(NamedTuple):
    """One amount of compute."""

    name: str
    factor: float
    share: int


class Compute(Question):
    """ViT and hybrid at equal cost; the CNN is reported beside them."""

    words = words_beside(__file__)
    claims = ("C29",)

    def changes(self, family: str, factor: float) -> dict[str, Any] | None:
        """Width of a family's model, scaled where it would cost more or less than the ViT's."""
        config = self.lab.images.matched(family)
        if factor == 1:
            return None
        changes, wanted = config.wider(factor), self.lab.images.matched("vit")
        wanted = wanted.replace(**wanted.wider(factor)).macs
        larger = config.replace(**changes)
        if abs(larger.macs / wanted - 1) > _TOLERANCE:
            changes[config.scaled_by] = getattr(larger.with_macs(wanted), config.scaled_by)
        return changes

    def config(self, family: str, factor: float) -> ModelConfig:
        """The model of a family at a width."""
        return self.lab.images.matched(family, **(self.changes(family, factor) or {}))

    @functools.cached_property
    def cells(self) -> dict[Point, list[Cell]]:
        """All images, a seed each."""
        count = self.lab.sizes[-1]
        return {
            Point(family, factor, share): [
                self.lab.train(
                    family,
                    count=count,
                    seed=seed,
                    seen=self.lab.seen // share,
                    changes=self.changes(family, factor),
                )
                for seed in range(max(2, len(self.lab.seeds_for(count))) if self.lab.seeds > 1 else 1)
            ]
            for family in self.lab.asked_for(FAMILIES)
            for factor in FACTORS
            for share in SHARES
        }

    def rounds(self) -> Sequence[Sequence[Cell]]:
        def some(families: Sequence[str], factors: Sequence[float], seeds: int | None) -> list[Cell]:
            return [
                cell
                for point, cells in self.cells.items()
                if point.name in families and point.factor in factors
                for cell in cells[:seeds]
            ]

        pair = FAMILIES[:2]
        return (
            some(pair, FACTORS[:1], 2),
            some(pair, FACTORS[:2], 2),
            some(pair, FACTORS, 2),
            some(FAMILIES, FACTORS, 2),
            some(FAMILIES, FACTORS, None),
        )

    def read(self, results: Results) -> None:
        self.found = Accuracies(results, self.cells)

    def lead(self, factor: float, share: int) -> Estimate | None:
        """Of the hybrid over the ViT."""
        return self.found.difference(Point("hybrid", factor, share), Point("vit", factor, share))

    def shrinking(self) -> Estimate | None:
        """The lead of the hybrid at the smallest compute, less at the largest."""
        least, most = (FACTORS[0], SHARES[0]), (FACTORS[-1], SHARES[-1])
        return self.found.contrast(
            (1.0, Point("hybrid", *least)),
            (-1.0, Point("vit", *least)),
            (-1.0, Point("hybrid", *most)),
            (1.0, Point("vit", *most)),
        )

    def verdicts(self) -> Iterator[Verdict]:
        shrinks = self.shrinking()
        words = {}
        if shrinks is not None:
            words["shrinking"] = between(shrinks)
        yield Verdict("C29", "trained", self.lead(FACTORS[0], SHARES[0]), words=words)

    def figures(self) -> Iterator[tuple[str, str]]:
        for share in SHARES:
            lines = []
            for family in FAMILIES:
                known = [factor for factor in FACTORS if Point(family, factor, share) in self.found]
                estimates = [self.found.estimate(Point(family, factor, share)) for factor in known]
                if known:
                    macs = [self.config("vit", factor).macs / 1e6 for factor in known]  # the others cost as much
                    values = [100 * one.value for one in estimates]
                    lines.append(
                        Line(in_figure(family), macs, values, COLOURS[family], bars=[bar(one) for one in estimates])
                    )
            if lines:
                labels = self.word("macs", "tspan"), self.word("accuracy", "tspan")
                yield f"compute-{share}", chart(lines, *labels, log_x=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.word("nothing", "p"))
        panes = "".join(
            figure(
                self.word("figure-title", seen=f"{self.lab.seen // share:,}"),
                self.word("figure-note", count=f"{self.lab.sizes[-1]:,}", seeds=self.found.seeds),
                figures[name],
            )
            for share in SHARES
            if (name := f"compute-{share}") in figures
        )
        rows = []
        for share in SHARES:
            for factor in FACTORS:
                lead = self.lead(factor, share)
                known = [Point(family, factor, share) for family in FAMILIES]
                if not any(point in self.found for point in known):
                    continue
                rows.append(
                    (
                        f"{self.config('vit', factor).macs / 1e6:.2f} M",
                        f"{self.lab.seen // share:,}",
                        *(f"{self.found.estimate(point).value:.1%}" if point in self.found else "-" for point in known),
                        "-" if lead is None else between(lead),
                    )
                )
        heads = (self.word("cost"), self.word("seen"), *FAMILIES, self.word("lead"))
        return f'<div class="panes">{panes}</div>{table(heads, rows, frozenset(range(6)))}'

    def numbers(self) -> dict[str, Any]:
        return {
            f"{point.name} x{point.factor:g} 1/{point.share}": {
                "accuracy": self.found.estimate(point).value,
                "macs": self.config(point.name, point.factor).macs,
                "seen": self.lab.seen // point.share,
            }
            for point in self.found.right
        }
