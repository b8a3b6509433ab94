"""Do convolutions before the Transformer help? Hybrid against ViT at three widths and two training lengths."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vitrail.core.message_files import load_messages
from vitrail.lab.question import COLOURS, FIRST_SEEDS, Accuracies, Question, Verdict, difference_text, percent_interval
from vitrail.lab.statistics import Estimate
from vitrail.lab.trial import Trial
from vitrail.lab.trial_results import Results
from vitrail.models.config import ModelConfig
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

FAMILIES = ("vit", "hybrid", "resnet")
FACTORS = (0.5, 1, 2)
"""Widths relative to the lab's model."""
SHARES = (5, 1)
"""Divisors of the lab's number of images seen: a short and a full training."""
_TOLERANCE = 0.02  # relative difference in multiply-accumulates at equal width


class ComputePoint(NamedTuple):
    """A family at one width and one training length."""

    name: str
    """Name of the family."""
    factor: float
    """Width relative to the lab's model."""
    share: int
    """Divisor of the lab's number of images seen."""


class ComputeQuestion(Question):
    """Compares hybrid and ViT at equal cost. The CNN is reported."""

    messages = load_messages(__file__)
    claims = ("C29",)

    def changes(self, family: str, factor: float) -> dict[str, Any] | None:
        """Return the changes that give a family's model a width at the cost of the ViT."""
        config = self.lab.images.matched_config(family)
        if factor == 1:
            return None
        changes, target = config.wider(factor), self.lab.images.matched_config("vit")
        target = target.replace(**target.wider(factor)).macs
        larger = config.replace(**changes)
        if abs(larger.macs / target - 1) > _TOLERANCE:
            changes[config.scaled_by] = getattr(larger.with_macs(target), config.scaled_by)
        return changes

    def config(self, family: str, factor: float) -> ModelConfig:
        """Return the model config of a family at a width."""
        return self.lab.images.matched_config(family, **(self.changes(family, factor) or {}))

    @functools.cached_property
    def trials(self) -> dict[ComputePoint, list[Trial]]:
        """Trials on all images, one per seed."""
        count = self.lab.sizes[-1]
        return {
            ComputePoint(family, factor, share): [
                self.lab.train(
                    family,
                    count=count,
                    seed=seed,
                    seen=self.lab.seen // share,
                    changes=self.changes(family, factor),
                )
                for seed in range(max(2, len(range(self.lab.seeds))) if self.lab.seeds > 1 else 1)
            ]
            for family in self.lab.selected(FAMILIES)
            for factor in FACTORS
            for share in SHARES
        }

    def rounds(self) -> Sequence[Sequence[Trial]]:
        def select(families: Sequence[str], factors: Sequence[float], seeds: int | None) -> list[Trial]:
            return [
                trial
                for point, trials in self.trials.items()
                if point.name in families and point.factor in factors
                for trial in trials[:seeds]
            ]

        pair = FAMILIES[:2]
        return (
            select(pair, FACTORS[:1], FIRST_SEEDS),
            select(pair, FACTORS[:2], FIRST_SEEDS),
            select(pair, FACTORS, FIRST_SEEDS),
            select(FAMILIES, FACTORS, FIRST_SEEDS),
            select(FAMILIES, FACTORS, None),
        )

    def read(self, results: Results) -> None:
        self.accuracies = Accuracies(results, self.trials)

    def lead(self, factor: float, share: int) -> Estimate | None:
        """Return the lead of the hybrid over the ViT."""
        return self.accuracies.difference(ComputePoint("hybrid", factor, share), ComputePoint("vit", factor, share))

    def shrinking(self) -> Estimate | None:
        """Return the hybrid's lead at the smallest compute minus its lead at the largest."""
        smallest, largest = (FACTORS[0], SHARES[0]), (FACTORS[-1], SHARES[-1])
        return self.accuracies.contrast(
            (1.0, ComputePoint("hybrid", *smallest)),
            (-1.0, ComputePoint("vit", *smallest)),
            (-1.0, ComputePoint("hybrid", *largest)),
            (1.0, ComputePoint("vit", *largest)),
        )

    def verdicts(self) -> Iterator[Verdict]:
        shrinking = self.shrinking()
        fields = {} if shrinking is None else {"shrinking": difference_text(shrinking)}
        yield Verdict("C29", "trained", self.lead(FACTORS[0], SHARES[0]), fields=fields)

    def figures(self) -> Iterator[tuple[str, str]]:
        for share in SHARES:
            lines = []
            for family in FAMILIES:
                factors = [factor for factor in FACTORS if ComputePoint(family, factor, share) in self.accuracies]
                estimates = [self.accuracies.estimate(ComputePoint(family, factor, share)) for factor in factors]
                if factors:
                    # All families have the cost of the ViT.
                    macs = [self.config("vit", factor).macs / 1e6 for factor in factors]
                    values = [100 * estimate.value for estimate in estimates]
                    lines.append(
                        Line(
                            family_label(family),
                            macs,
                            values,
                            COLOURS[family],
                            bars=[percent_interval(estimate) for estimate in estimates],
                        )
                    )
            if lines:
                labels = self.t("macs", "tspan"), self.t("accuracy", "tspan")
                yield f"compute-{share}", line_chart(lines, *labels, log_x=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.t("nothing", "p"))
        panes = "".join(
            figure(
                self.t("figure-title", seen=f"{self.lab.seen // share:,}"),
                self.t("figure-note", count=f"{self.lab.sizes[-1]:,}", seeds=self.accuracies.seeds),
                figures[name],
            )
            for share in SHARES
            if (name := f"compute-{share}") in figures
        )
        rows = []
        for share in SHARES:
            for factor in FACTORS:
                lead = self.lead(factor, share)
                compared = [ComputePoint(family, factor, share) for family in FAMILIES]
                if not any(point in self.accuracies for point in compared):
                    continue
                rows.append(
                    (
                        f"{self.config('vit', factor).macs / 1e6:.2f} M",
                        f"{self.lab.seen // share:,}",
                        *(
                            f"{self.accuracies.estimate(point).value:.1%}" if point in self.accuracies else "-"
                            for point in compared
                        ),
                        "-" if lead is None else difference_text(lead),
                    )
                )
        heads = (self.t("cost"), self.t("seen"), *FAMILIES, self.t("lead"))
        return f'<div class="panes">{panes}</div>{table(heads, rows, frozenset(range(6)))}'

    def numbers(self) -> dict[str, Any]:
        return {
            f"{point.name} x{point.factor:g} 1/{point.share}": {
                "accuracy": self.accuracies.estimate(point).value,
                "macs": self.config(point.name, point.factor).macs,
                "seen": self.lab.seen // point.share,
            }
            for point in self.accuracies.right
        }
