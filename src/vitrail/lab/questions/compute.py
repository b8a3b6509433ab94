"""Do convolutions before the Transformer help? Hybrid against ViT at three widths and two training lengths."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.lab.question import COLOURS, Verdict, difference_text, percent_interval
from vitrail.lab.statistics import Estimate
from vitrail.lab.variant_question import Key, Variant, VariantQuestion
from vitrail.models.config import ModelConfig
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure

REFERENCE = "vit"
FAMILIES = (REFERENCE, "hybrid", "resnet")
FACTORS = (0.5, 1, 2)
"""Widths relative to the lab's model."""
SHARES = (5, 1)
"""Divisors of the lab's number of images seen: a short and a full training."""
_TOLERANCE = 0.02  # relative difference in multiply-accumulates at equal width


class ComputeQuestion(VariantQuestion):
    """Compares hybrid and ViT at equal cost on all images. The CNN is reported."""

    messages = load_messages(__file__)
    claims = ("C29",)

    @functools.cached_property
    def variants(self) -> Mapping[str, Variant]:
        variants = {}
        for factor in FACTORS:
            for share in SHARES:
                reference = _name(REFERENCE, factor, share)
                changes = {family: self.changes(family, factor) for family in self.lab.selected(FAMILIES)}
                variants |= {
                    _name(family, factor, share): Variant(
                        family=family, against=reference, changes=changes[family], share=share
                    )
                    for family in changes
                }
                if reference in variants:
                    variants[reference] = dataclasses.replace(variants[reference], against=None)
        return variants

    @property
    def counts(self) -> tuple[int, ...]:
        return (self.lab.sizes[-1],)

    def changes(self, family: str, factor: float) -> dict[str, Any]:
        """Return the changes that give a family's model a width at the cost of the ViT."""
        config = self.lab.images.matched_config(family)
        if factor == 1:
            return {}
        changes, target = config.wider(factor), self.lab.images.matched_config("vit")
        target = target.replace(**target.wider(factor)).macs
        larger = config.replace(**changes)
        if abs(larger.macs / target - 1) > _TOLERANCE:
            changes[config.scaled_by] = getattr(larger.with_macs(target), config.scaled_by)
        return changes

    def config(self, family: str, factor: float) -> ModelConfig:
        """Return the model config of a family at a width."""
        return self.lab.images.matched_config(family, **self.changes(family, factor))

    def stages(self) -> Sequence[Sequence[Key]]:
        def select(families: Sequence[str], factors: Sequence[float]) -> list[Key]:
            names = {_name(family, factor, share) for family in families for factor in factors for share in SHARES}
            return [key for key in self.keys if key[0] in names]

        pair = FAMILIES[:2]
        widths = [FACTORS[:count] for count in range(1, len(FACTORS) + 1)]
        return (*(select(pair, factors) for factors in widths), select(FAMILIES, FACTORS))

    def hybrid_lead(self, factor: float, share: int) -> Estimate | None:
        """Return the lead of the hybrid over the ViT."""
        return self.gain(_name("hybrid", factor, share), self.counts[0]) if self.lab.selected(["hybrid"]) else None

    def shrinking(self) -> Estimate | None:
        """Return the hybrid's lead at the smallest compute minus its lead at the largest."""
        ends = ((1.0, FACTORS[0], SHARES[0]), (-1.0, FACTORS[-1], SHARES[-1]))
        return self.accuracies.contrast(
            *(
                (sign * family_sign, (_name(family, factor, share), self.counts[0]))
                for sign, factor, share in ends
                for family, family_sign in (("hybrid", 1.0), ("vit", -1.0))
            )
        )

    def verdicts(self) -> Iterator[Verdict]:
        shrinking = self.shrinking()
        fields = {} if shrinking is None else {"shrinking": difference_text(shrinking)}
        yield Verdict("C29", "trained", self.hybrid_lead(FACTORS[0], SHARES[0]), fields=fields)

    def label(self, name: str, tag: str = "span") -> Html:
        family, factor, share = _point(name)
        seen, macs = f"{self.lab.seen // share:,}", f"{self.config('vit', factor).macs / 1e6:.2f}"
        return self.t("point", tag, family=family_label(family), macs=macs, seen=seen)

    def figures(self) -> Iterator[tuple[str, str]]:
        for share in SHARES:
            lines = []
            for family in self.lab.selected(FAMILIES):
                keys = {factor: (_name(family, factor, share), self.counts[0]) for factor in FACTORS}
                estimates = {
                    factor: self.accuracies.estimate(key) for factor, key in keys.items() if key in self.accuracies
                }
                if estimates:
                    macs = [
                        self.config("vit", factor).macs / 1e6 for factor in estimates
                    ]  # all families have this cost
                    values = [100 * estimate.value for estimate in estimates.values()]
                    bars = [percent_interval(estimate) for estimate in estimates.values()]
                    lines.append(Line(family_label(family), macs, values, COLOURS[family], bars=bars))
            if lines:
                labels = self.t("macs", "tspan"), self.t("accuracy", "tspan")
                yield f"compute-{share}", line_chart(lines, *labels, log_x=True, dots=True)

    def panes(self, figures: dict[str, str]) -> Iterator[str]:
        note = self.t("figure-note", count=f"{self.counts[0]:,}", seeds=self.accuracies.seeds)
        for share in SHARES:
            if (name := f"compute-{share}") in figures:
                yield figure(self.t("figure-title", seen=f"{self.lab.seen // share:,}"), note, figures[name])


def _name(family: str, factor: float, share: int) -> str:
    """Return the name of a family's variant at one width and one training length."""
    return f"{family} x{factor:g} 1/{share}"


def _point(name: str) -> tuple[str, float, int]:
    """Return the family, width and training length in the name of a variant."""
    family, factor, share = name.split(" ")
    return family, float(factor[1:]), int(share[2:])
