"""When do larger models help? The model with double width or double depth, with few and with many images."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from vitrail.core.message_files import load_messages
from vitrail.lab.question import (
    COLOURS,
    FIRST_SEEDS,
    Accuracies,
    Question,
    Verdict,
    difference_text,
    mean_training_accuracies,
    percent_interval,
    points_text,
)
from vitrail.lab.statistics import Estimate, smallest
from vitrail.lab.trial import Trial
from vitrail.lab.trial_results import Results
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

FAMILIES = ("vit", "resnet")
DOUBLED = ("deeper", "wider")
VARIANTS = ("base", *DOUBLED)

Key = tuple[str, str, int]


class SizeQuestion(Question):
    """Compares models of double width or depth with the standard model. ViT decides; the CNN is reported."""

    messages = load_messages(__file__)
    claims = ("C5", "C9")

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Smallest and largest number of images."""
        return tuple(dict.fromkeys((self.lab.sizes[0], self.lab.sizes[-1])))

    def changes(self, family: str, variant: str) -> dict[str, Any] | None:
        """Return the changes of a variant to the family's model."""
        config = self.lab.images.matched_config(family)
        match variant:
            case "deeper":
                return config.deeper(2)
            case "wider":
                return config.wider(2)
        return None

    @functools.cached_property
    def trials(self) -> dict[Key, list[Trial]]:
        """Trials by family, variant and number of images, one per seed."""
        return {
            (family, variant, count): [
                self.lab.train(family, count=count, seed=seed, changes=self.changes(family, variant))
                for seed in range(self.lab.seeds)
            ]
            for family in self.lab.selected(FAMILIES)
            for variant in VARIANTS
            for count in self.ends
        }

    def rounds(self) -> Sequence[Sequence[Trial]]:
        def select(families: Sequence[str], seeds: int | None) -> list[Trial]:
            groups = [trials for key, trials in self.trials.items() if key[0] in families]
            return [trial for trials in groups for trial in trials[:seeds]]

        return select(FAMILIES[:1], FIRST_SEEDS), select(FAMILIES, FIRST_SEEDS), select(FAMILIES, None)

    def read(self, results: Results) -> None:
        self.accuracies = Accuracies(results, self.trials)
        self.training_accuracy = mean_training_accuracies(results, self.trials)

    def growth(self, family: str, variant: str) -> Estimate | None:
        """Return the gain of doubling with many images minus its gain with few."""
        few, many = self.ends[0], self.ends[-1]
        return self.accuracies.contrast(
            (1.0, (family, variant, many)),
            (-1.0, (family, "base", many)),
            (-1.0, (family, variant, few)),
            (1.0, (family, "base", few)),
        )

    def verdicts(self) -> Iterator[Verdict]:
        growth = smallest([self.growth("vit", variant) for variant in DOUBLED]) if len(self.ends) > 1 else None
        yield Verdict("C5", "trained", growth, fields=self._lead_fields())
        yield Verdict("C9", "reported", fields=self._gap_fields())

    def _lead_fields(self) -> dict[str, str]:
        """Return the gain of the larger models at the largest size, formatted."""
        many = self.ends[-1]
        leads = {variant: self.gain("vit", variant, many) for variant in DOUBLED}
        texts = {variant: difference_text(lead) for variant, lead in leads.items() if lead is not None}
        return texts | {"count": f"{many:,}"} if len(texts) == len(DOUBLED) else {}

    def _gap_fields(self) -> dict[str, str]:
        """Return the train-test gap of the ViT variants at the smallest size, formatted."""
        few = self.ends[0]
        variants = [variant for variant in VARIANTS if ("vit", variant, few) in self.accuracies]
        texts = {variant: points_text(self.gap(("vit", variant, few))) for variant in variants}
        return texts | {"count": f"{few:,}"} if len(texts) == len(VARIANTS) else {}

    def gap(self, key: Key) -> float:
        """Return training accuracy minus test accuracy."""
        return self.training_accuracy[key] - self.accuracies.estimate(key).value

    def gain(self, family: str, variant: str, count: int) -> Estimate | None:
        """Return the gain in accuracy of doubling."""
        return self.accuracies.difference((family, variant, count), (family, "base", count))

    def figures(self) -> Iterator[tuple[str, str]]:
        for variant in DOUBLED:
            lines = []
            for family in FAMILIES:
                gains = {count: self.gain(family, variant, count) for count in self.ends}
                available = {count: estimate for count, estimate in gains.items() if estimate is not None}
                if available:
                    values = [100 * estimate.value for estimate in available.values()]
                    bars = [percent_interval(estimate) for estimate in available.values()]
                    lines.append(Line(family_label(family), list(available), values, COLOURS[family], bars=bars))
            if lines:
                labels = self.t("images", "tspan"), self.t("gain", "tspan")
                yield f"size-{variant}", line_chart(lines, *labels, log_x=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.t("nothing", "p"))
        panes = "".join(
            figure(self.t(f"{variant}-title"), self.t("figure-note", seeds=self.accuracies.seeds), figures[name])
            for variant in DOUBLED
            if (name := f"size-{variant}") in figures
        )
        rows = []
        for key in self.accuracies.right:
            family, variant, count = key
            config = self.lab.images.matched_config(family, **(self.changes(family, variant) or {}))
            accuracy = self.accuracies.estimate(key).value
            rows.append(
                (
                    family,
                    self.t(variant),
                    f"{count:,}",
                    f"{config.parameters:,}",
                    f"{config.macs / 1e6:.1f} M",
                    f"{self.training_accuracy[key]:.1%}",
                    f"{accuracy:.1%}",
                    points_text(self.gap(key)),
                )
            )
        names = ("parameters", "macs", "training", "accuracy", "gap")
        heads = ("", "", "n", *(self.t(name) for name in names))
        return f'<div class="panes">{panes}</div>{table(heads, rows, frozenset(range(2, 8)))}'

    def numbers(self) -> dict[str, Any]:
        return {
            " ".join(map(str, key)): {
                "accuracy": self.accuracies.estimate(key).value,
                "training_accuracy": self.training_accuracy[key],
            }
            for key in self.accuracies.right
        }
