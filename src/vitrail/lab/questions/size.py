"""When do larger models help? The model with double width or double depth, with few and with many images."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitrail.core.message_files import load_messages
from vitrail.lab.question import COLOURS, Verdict, difference_text, percent_interval, points_text
from vitrail.lab.statistics import Estimate, smallest
from vitrail.lab.variant_question import Key, Variant, VariantQuestion
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

FAMILIES = ("vit", "resnet")
DOUBLED = ("deeper", "wider")


class SizeQuestion(VariantQuestion):
    """Compares models of double width or depth with the standard model. ViT decides; the CNN is reported."""

    messages = load_messages(__file__)
    claims = ("C5", "C9")

    @functools.cached_property
    def variants(self) -> Mapping[str, Variant]:
        variants = {}
        for family in self.lab.selected(FAMILIES):
            config = self.lab.images.matched_config(family)
            variants[f"{family}-base"] = Variant(family=family)
            for name, changes in (("deeper", config.deeper(2)), ("wider", config.wider(2))):
                variants[f"{family}-{name}"] = Variant(family=family, against=f"{family}-base", changes=changes)
        return variants

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.lab.sizes[0], self.lab.sizes[-1])))

    def stages(self) -> Sequence[Sequence[Key]]:
        return [[key for key in self.keys if key[0].startswith(family)] for family in FAMILIES]

    def growth(self, family: str, variant: str) -> Estimate | None:
        """Return the gain of doubling with many images minus its gain with few."""
        few, many = self.counts[0], self.counts[-1]
        doubled, base = f"{family}-{variant}", f"{family}-base"
        return self.accuracies.contrast(
            (1.0, (doubled, many)), (-1.0, (base, many)), (-1.0, (doubled, few)), (1.0, (base, few))
        )

    def verdicts(self) -> Iterator[Verdict]:
        growth = smallest([self.growth("vit", variant) for variant in DOUBLED]) if len(self.counts) > 1 else None
        yield Verdict("C5", "trained", growth, fields=self._gain_fields())
        yield Verdict("C9", "reported", fields=self._gap_fields())

    def _gain_fields(self) -> dict[str, str]:
        """Return the gain of the larger models at the largest size, formatted."""
        gains = {
            variant: self.gain(f"vit-{variant}", self.counts[-1]) for variant in DOUBLED if self.lab.selected(["vit"])
        }
        texts = {variant: difference_text(gain) for variant, gain in gains.items() if gain is not None}
        return texts | {"count": f"{self.counts[-1]:,}"} if len(texts) == len(DOUBLED) else {}

    def _gap_fields(self) -> dict[str, str]:
        """Return the train-test gap of the ViT variants at the smallest size, formatted."""
        few, names = self.counts[0], ("base", *DOUBLED)
        texts = {
            name: points_text(self.gap((f"vit-{name}", few))) for name in names if (f"vit-{name}", few) in self.finished
        }
        return texts | {"count": f"{few:,}"} if len(texts) == len(names) else {}

    def gap(self, key: Key) -> float:
        """Return training accuracy minus test accuracy."""
        return self.training_accuracy[key] - self.accuracies.estimate(key).value

    def figures(self) -> Iterator[tuple[str, str]]:
        for variant in DOUBLED:
            lines = []
            for family in self.lab.selected(FAMILIES):
                gains = {count: self.gain(f"{family}-{variant}", count) for count in self.counts}
                available = {count: gain for count, gain in gains.items() if gain is not None}
                if available:
                    values = [100 * gain.value for gain in available.values()]
                    bars = [percent_interval(gain) for gain in available.values()]
                    lines.append(Line(family_label(family), list(available), values, COLOURS[family], bars=bars))
            if lines:
                labels = self.t("images", "tspan"), self.t("gain", "tspan")
                yield f"size-{variant}", line_chart(lines, *labels, log_x=True, dots=True)

    def panes(self, figures: dict[str, str]) -> Iterator[str]:
        for variant in DOUBLED:
            if (name := f"size-{variant}") in figures:
                note = self.t("figure-note", seeds=self.accuracies.seeds)
                yield figure(self.t(f"{variant}-title"), note, figures[name])

    def details(self) -> str:
        """Return the table of costs and train-test gaps."""
        rows: list[tuple[Any, ...]] = []
        for name, count in self.finished:
            config = self.lab.images.matched_config(self.variants[name].family, **self.variants[name].changes)
            gap = points_text(self.gap((name, count)))
            rows.append((self.label(name), f"{count:,}", f"{config.parameters:,}", f"{config.macs / 1e6:.1f} M", gap))
        heads = ("", "n", *(self.t(name) for name in ("parameters", "macs", "gap")))
        return table(heads, rows, frozenset(range(1, 5)))
