"""`VariantQuestion`: a question that trains variants of models with some numbers of images and compares them."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.lab.question import (
    COLOURS,
    FIRST_SEEDS,
    Accuracies,
    Lab,
    Question,
    difference_text,
    mean_training_accuracies,
    percent_interval,
    points_text,
)
from vitrail.lab.statistics import Estimate
from vitrail.lab.trial import Trial
from vitrail.lab.trial_results import Results
from vitrail.reports.charts import Interval, interval_chart
from vitrail.reports.page_kit import figure, table
from vitrail.reports.translations import translator

COMMON_MESSAGES = load_messages(__file__)

common_t = translator(COMMON_MESSAGES)
"""Return a message that all these questions share, in both languages."""

Key = tuple[str, int]
"""Name of a variant and number of training images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A model and its training."""

    family: str = "vit"
    against: str | None = None
    """Name of the variant that it is compared with. None for a reference."""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Changed settings of the model."""
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Changed settings of the protocol."""
    augment: bool = False
    share: int = 1
    """Divisor of the lab's number of images seen."""
    doublings: int = 0
    """How many times the lab's number of images seen is doubled."""
    slowdown: float = 1.0
    """Training time relative to what its multiply-accumulates suggest."""


class VariantQuestion(Question):
    """Compares variants, each with the same seeds, and each with its own learning rate at every number of images.

    A subclass defines `variants`, `verdicts`, and usually `stages`. The messages must hold the name of each variant.
    """

    def __init__(self, name: str, lab: Lab) -> None:
        super().__init__(name, lab)
        self.accuracies: Accuracies
        self.training_accuracy: dict[Key, float] = {}
        self.rates: dict[Key, float | None] = {}

    @functools.cached_property
    def variants(self) -> Mapping[str, Variant]:
        """Variants by name, references first."""
        raise NotImplementedError

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of training images."""
        return (self.lab.default_size,)

    @functools.cached_property
    def keys(self) -> tuple[Key, ...]:
        """All variants and numbers of images, for the families of the lab."""
        names = [name for name, variant in self.variants.items() if self.lab.selected([variant.family])]
        return tuple((name, count) for count in self.counts for name in names)

    def stages(self) -> Sequence[Sequence[Key]]:
        """Return what each round trains, the most informative first. By default, everything in one round."""
        return (self.keys,)

    @property
    def proof_trials(self) -> Sequence[Trial]:
        """Trials that train nothing. They come first."""
        return ()

    def measurement_trials(self, key: Key) -> Mapping[str, Sequence[Trial]]:
        """Return the measurements of a variant by name, one per seed."""
        return {}

    # Trials

    @functools.cached_property
    def trials(self) -> dict[Key, list[Trial]]:
        """Trials by variant and number of images, one per seed."""
        alone = {key: [self._train(*key, seed) for seed in range(self.lab.seeds)] for key in self.keys}
        return {
            key: [
                dataclasses.replace(trial, peers=tuple(alone[peer][0] for peer in self._peers(key))) for trial in trials
            ]
            for key, trials in alone.items()
        }

    def _train(self, name: str, count: int, seed: int) -> Trial:
        variant = self.variants[name]
        trial = self.lab.train(
            variant.family,
            count=count,
            seed=seed,
            seen=(self.lab.seen << variant.doublings) // variant.share,
            changes=variant.changes,
            recipe=variant.recipe,
            augment=variant.augment,
        )
        return dataclasses.replace(trial, work=variant.slowdown * trial.work)

    def _peers(self, key: Key) -> list[Key]:
        """Return the variants whose learning rate is shared in a tie: its reference, and those compared with it.

        Variants of later rounds are left out, because the rates of a round must be known without them.
        """
        reference = self.variants[key[0]].against or key[0]
        stage = next(stage for stage in self.stages() if key in stage)
        others = [
            (name, count) for name, count in stage if count == key[1] and self.variants[name].against == reference
        ]
        group = [(reference, key[1]), *others]
        return [other for other in dict.fromkeys(group) if other != key and other in self.keys]

    def rounds(self) -> Sequence[Sequence[Trial]]:
        proofs = [list(self.proof_trials)] if self.proof_trials else []
        stages = [[key for key in stage if key in self.keys] for stage in self.stages()]
        first = [[trial for key in stage for trial in self._all_trials(key, FIRST_SEEDS)] for stage in stages if stage]
        rest = [trial for key in self.keys for trial in self._all_trials(key, None)]
        return (*proofs, *first, *([rest] if rest else []))

    def _all_trials(self, key: Key, seeds: int | None) -> list[Trial]:
        """Return the trainings and measurements of a variant with the first `seeds`."""
        groups = (self.trials[key], *self.measurement_trials(key).values())
        return [trial for trials in groups for trial in trials[:seeds]]

    # Results

    def read(self, results: Results) -> None:
        self.accuracies = Accuracies(results, self.trials)
        self.training_accuracy = mean_training_accuracies(results, self.trials)
        self.rates = {key: results.rate(trials[0]) for key, trials in self.trials.items()}
        self.measurements = {
            key: {
                name: [result for trial in trials if (result := results.get(trial)) is not None]
                for name, trials in self.measurement_trials(key).items()
            }
            for key in self.keys
        }

    def lead(self, name: str, other: str, count: int | None = None) -> Estimate | None:
        """Return the accuracy of a variant minus that of another. None if either was not run."""
        count = self.counts[0] if count is None else count
        return self.accuracies.difference((name, count), (other, count))

    def gain(self, name: str, count: int) -> Estimate | None:
        """Return the accuracy of a variant minus that of its reference. None if either was not run."""
        against = self.variants[name].against
        return None if against is None else self.lead(name, against, count)

    @property
    def finished(self) -> list[Key]:
        """The variants that were run."""
        return [key for key in self.keys if key in self.accuracies]

    # The page

    def label(self, name: str, tag: str = "span") -> Html:
        """Return the name of a variant in both languages."""
        return self.t(name, tag)

    def figures(self) -> Iterator[tuple[str, str]]:
        """Yield, for each number of images, the gain of each variant over its reference."""
        for count in self.counts:
            rows = []
            for name, variant in self.variants.items():
                gain = self.gain(name, count)
                if gain is not None:
                    colour = COLOURS.get(variant.family, 7)
                    label = self.label(name, "tspan")
                    rows.append(Interval(label, 100 * gain.value, *percent_interval(gain), colour))
            if rows:
                yield self.figure_name(count), interval_chart(rows, common_t("gain", "tspan"), zero=0.0)

    def figure_name(self, count: int) -> str:
        """Return the file name of the figure of gains."""
        return f"{self.name}-gains-{count}"

    def html(self, figures: dict[str, str]) -> str:
        if not self.finished:
            return str(common_t("nothing", "p"))
        panes = "".join(self.panes(figures))
        return f'<div class="panes">{panes}</div>{self.variant_table()}{self.details()}'

    def panes(self, figures: dict[str, str]) -> Iterator[str]:
        """Yield the figures with their titles and notes."""
        for count in self.counts:
            if (name := self.figure_name(count)) in figures:
                fields = {"count": f"{count:,}", "seeds": self.accuracies.seeds}
                yield figure(self.t("gains-title", **fields), common_t("gains-note", **fields), figures[name])

    def details(self) -> str:
        """Return what the page shows below the table of variants."""
        return ""

    def variant_table(self) -> str:
        """Return the table of all variants with their learning rates, accuracies and gains."""
        rows = []
        for name, count in self.finished:
            gain, rate = self.gain(name, count), self.rates[name, count]
            against = self.variants[name].against
            rows.append(
                (
                    self.label(name),
                    f"{count:,}",
                    "-" if rate is None else f"{rate:g}",
                    f"{self.training_accuracy[name, count]:.1%}",
                    f"{self.accuracies.estimate((name, count)).value:.1%}",
                    "-" if against is None else self.label(against),
                    "-" if gain is None else f"{points_text(gain.value)} ({difference_text(gain)})",
                    "-" if gain is None or gain.rates is None else " … ".join(map(points_text, gain.rates)),
                )
            )
        names = ("variant", "images", "rate", "training", "accuracy", "against", "gain-interval", "rates")
        return table([common_t(name) for name in names], rows, frozenset((1, 2, 3, 4, 6, 7)))

    def numbers(self) -> dict[str, Any]:
        return {
            f"{name} {count}": {
                "accuracy": list(self.accuracies.estimate((name, count))[:2]),
                "training_accuracy": self.training_accuracy[name, count],
                "rate": self.rates[name, count],
            }
            for name, count in self.finished
        }
