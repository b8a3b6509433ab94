"""Which family needs augmentation and regularisation more? ViT and CNN, few and many images, with and without."""

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
)
from vitrail.lab.statistics import Estimate
from vitrail.lab.training import shift_augmentation
from vitrail.lab.trial import Trial
from vitrail.lab.trial_results import Results
from vitrail.reports.charts import Interval, interval_chart
from vitrail.reports.page_kit import figure, table

FAMILIES = ("vit", "resnet")
VARIANTS = ("plain", "augmented", "regularised")
"""Additions to the protocol: none, random shifts, or shifts with Mixup and four times the weight decay."""

Key = tuple[str, str, int]


class AugmentationQuestion(Question):
    """Compares ViT and CNN under three training variants, at the smallest and the largest number of images."""

    messages = load_messages(__file__)
    claims = ("C4",)

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Smallest and largest number of images."""
        return tuple(dict.fromkeys((self.lab.sizes[0], self.lab.sizes[-1])))

    def settings(self, variant: str) -> dict[str, Any]:
        """Return the changes of a variant to the protocol."""
        match variant:
            case "augmented":
                return {"augment": True}
            case "regularised":
                shifts = shift_augmentation(self.lab.images.resolution)
                return {"recipe": {"augment": {**shifts, "mixup": 0.2}, "weight_decay": 0.2}}
        return {}

    @functools.cached_property
    def trials(self) -> dict[Key, list[Trial]]:
        """Trials by family, variant and number of images, one per seed."""
        return {
            (family, variant, count): [
                self.lab.train(family, count=count, seed=seed, **self.settings(variant))
                for seed in range(self.lab.seeds)
            ]
            for family in self.lab.selected(FAMILIES)
            for variant in VARIANTS
            for count in self.ends
        }

    def rounds(self) -> Sequence[Sequence[Trial]]:
        def select(variants: tuple[str, ...], counts: tuple[int, ...], seeds: int | None) -> list[Trial]:
            return [
                trial
                for (_, variant, count), trials in self.trials.items()
                if variant in variants and count in counts
                for trial in trials[:seeds]
            ]

        decisive = VARIANTS[:2]
        return (
            select(decisive, self.ends[:1], FIRST_SEEDS),
            select(decisive, self.ends, FIRST_SEEDS),
            select(VARIANTS, self.ends, FIRST_SEEDS),
            select(VARIANTS, self.ends, None),
        )

    def read(self, results: Results) -> None:
        self.accuracies = Accuracies(results, self.trials)
        self.training_accuracy = mean_training_accuracies(results, self.trials)

    def gain(self, family: str, variant: str, count: int) -> Estimate | None:
        """Return the gain in accuracy of a variant over plain training."""
        return self.accuracies.difference((family, variant, count), (family, "plain", count))

    def verdicts(self) -> Iterator[Verdict]:
        fewest = self.ends[0]
        terms = [
            (family_sign * variant_sign, (family, variant, fewest))
            for family, family_sign in (("vit", 1.0), ("resnet", -1.0))
            for variant, variant_sign in (("augmented", 1.0), ("plain", -1.0))
        ]
        yield Verdict("C4", "trained", self.accuracies.contrast(*terms), fields={"count": f"{fewest:,}"})

    def figures(self) -> Iterator[tuple[str, str]]:
        gains = {
            key: gain for key in self.accuracies.right if key[1] != "plain" and (gain := self.gain(*key)) is not None
        }
        for count in self.ends:
            rows = [
                Interval(
                    self.t(f"{family}-{variant}", "tspan"), 100 * gain.value, *percent_interval(gain), COLOURS[family]
                )
                for (family, variant, n), gain in gains.items()
                if n == count
            ]
            if rows:
                yield f"augmentation-{count}", interval_chart(rows, self.t("gain", "tspan"), zero=0.0)

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.t("nothing", "p"))
        panes = "".join(
            figure(
                self.t("figure-title", count=f"{count:,}"),
                self.t("figure-note", seeds=self.accuracies.seeds),
                figures[name],
            )
            for count in self.ends
            if (name := f"augmentation-{count}") in figures
        )
        rows = []
        for family, variant, count in self.accuracies.right:
            gain = None if variant == "plain" else self.gain(family, variant, count)
            accuracy = self.accuracies.estimate((family, variant, count))
            rows.append(
                (
                    family,
                    f"{count:,}",
                    self.t(variant),
                    f"{self.training_accuracy[family, variant, count]:.1%}",
                    f"{accuracy.value:.1%}",
                    "-" if gain is None else difference_text(gain),
                )
            )
        heads = ("", "n", "", self.t("training"), self.t("accuracy"), self.t("gain"))
        return f'<div class="panes">{panes}</div>{table(heads, rows, frozenset((1, 3, 4, 5)))}'

    def numbers(self) -> dict[str, Any]:
        return {
            " ".join(map(str, key)): {
                "accuracy": self.accuracies.estimate(key).value,
                "training_accuracy": self.training_accuracy[key],
            }
            for key in self.accuracies.right
        }
