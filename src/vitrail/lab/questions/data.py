"""How much data does each family need? Accuracy and train-test gap against the number of training images."""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.message_files import load_messages
from vitrail.core.optional import import_extra
from vitrail.lab.images import Images
from vitrail.lab.question import (
    COLOURS,
    FIRST_SEEDS,
    Accuracies,
    Question,
    Score,
    Verdict,
    mean_training_accuracies,
    percent_interval,
)
from vitrail.lab.statistics import (
    Estimate,
    central_interval,
    complement,
    crossover,
    extrapolated_crossover,
    fit_power_law,
    mean_of,
    sample_efficiency,
    smallest,
)
from vitrail.lab.trial import Outcome, Trial, pack
from vitrail.lab.trial_results import Results
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

CLASSICAL_LEARNERS = ("neighbours", "linear", "tree", "bayes")
_MIN_FITTED_SIZES = 4  # smallest number of sizes for a fitted curve
_MAX_CLASSICAL_IMAGES = 3000  # with more, trees and neighbours on raw pixels are slower than the models


class DataQuestion(Question):
    """Compares families trained on nested, class-balanced subsets, at equal cost and equal numbers of images seen."""

    messages = load_messages(__file__)
    claims = ("C1", "C2", "C3", "C7", "C8", "C34b")

    @functools.cached_property
    def trials(self) -> dict[tuple[str, int], list[Trial]]:
        """Trials by family and size, one per seed."""
        return {
            (family, count): [self.lab.train(family, count=count, seed=seed) for seed in range(self.lab.seeds)]
            for family in self.lab.families
            for count in self.lab.sizes
        }

    @functools.cached_property
    def classical_trials(self) -> dict[tuple[str, int], Trial]:
        """Trials of classical learners on raw pixels."""
        sizes = [count for count in self.lab.sizes if count <= _MAX_CLASSICAL_IMAGES] or self.lab.sizes[:1]
        return {
            (name, count): Trial("vitrail.lab.questions.data:floor", {"learner": name, "count": count}, work=5e9)
            for name in CLASSICAL_LEARNERS
            for count in sizes
        }

    def rounds(self) -> Sequence[Sequence[Trial]]:
        decisive_sizes = {*self.lab.sizes[:2], self.lab.sizes[-1]}
        decisive = [key for key in self.trials if key[1] in decisive_sizes]
        leading = [key for key in decisive if key[0] in ("vit", "resnet")]
        return (
            [trial for key in leading for trial in self.trials[key][:FIRST_SEEDS]],
            [trial for key in decisive for trial in self.trials[key][:FIRST_SEEDS]]
            + list(self.classical_trials.values()),
            [trial for key in self.trials for trial in self.trials[key][:FIRST_SEEDS]],
            [trial for key in self.trials for trial in self.trials[key]],
        )

    def read(self, results: Results) -> None:
        self.accuracies = Accuracies(results, self.trials)
        self.gaps: dict[tuple[str, int], list[float]] = {}
        self.training_accuracy = mean_training_accuracies(results, self.trials)
        self.training_curves: dict[str, tuple[list[float], ...]] = {}
        """Seconds of training and validation accuracy at that time, by family, at the largest size."""
        for key, trials in self.trials.items():
            available = [result for trial in trials if (result := results.get(trial)) is not None]
            if available:
                self.gaps[key] = [result["training_accuracy"] - result["accuracy"] for result in available]
        largest_trials = {family: self.trials[family, self.lab.sizes[-1]] for family in self.lab.families}
        machine = _most_used_machine(results, largest_trials)
        for family in self.lab.families:
            available = [trial for trial in largest_trials[family] if results.get(trial) is not None]
            trials = [trial for trial in available if results.machine(trial) == machine]
            seconds = [(results.measured(trial) or {}).get("curve_seconds") for trial in trials]
            accuracies = [(results.get(trial) or {})["curve"] for trial in trials]
            if trials and all(seconds):
                self.training_curves[family] = tuple(
                    np.asarray(curve, float).mean(axis=0)[:, 1].tolist() for curve in (seconds, accuracies)
                )
        self.classical_accuracies = {
            key: result["accuracy"]
            for key, trial in self.classical_trials.items()
            if (result := results.get(trial)) is not None
        }

    def _finished_sizes(self, family: str) -> list[int]:
        return [count for count in self.lab.sizes if (family, count) in self.accuracies]

    def _lead(self, family: str, other_family: str, count: int) -> Estimate | None:
        return self.accuracies.difference((family, count), (other_family, count))

    def verdicts(self) -> Iterator[Verdict]:
        sizes = self.lab.sizes
        yield Verdict("C1", "trained", smallest([self._lead("resnet", "vit", count) for count in sizes[:2]]))
        yield self._overtaking_verdict()
        yield Verdict("C3", "trained", self._lead_decrease(), is_share=False)
        yield Verdict("C7", "trained", smallest([self._gap_decrease(family) for family in self.lab.families]))
        yield Verdict("C8", "reported", fields=self._classical_fields())
        if "mixer" in self.lab.families:
            counts = self._shared_sizes("vit", "mixer")
            leads = [self._lead("vit", "mixer", count) for count in counts]
            has_ends = {sizes[0], sizes[-1]} <= set(counts)
            yield Verdict("C34b", "trained", smallest(leads) if has_ends else None)

    def _shared_sizes(self, family: str, other_family: str) -> list[int]:
        """Return the sizes at which both families were run."""
        return [count for count in self._finished_sizes(family) if (other_family, count) in self.accuracies]

    def _overtaking_verdict(self) -> Verdict:
        """Return the verdict on C2 with the size at which the curves cross, extrapolated if necessary."""
        shared = self._shared_sizes("vit", "resnet")
        counts = [count for count in shared if min(map(self._seed_count, (("vit", count), ("resnet", count)))) > 1]
        largest = self.lab.sizes[-1]
        lead = self._lead("vit", "resnet", largest)
        if lead is None or math.isnan(lead.error):
            return Verdict("C2", "trained", lead, is_one_sided=True)
        low, high = lead.interval()
        state = "crossed" if low > 0 else "not-crossed" if high < 0 else "level"

        def find_crossover(accuracies: Sequence[float]) -> float:
            """Return the crossover for the accuracies of the ViT followed by those of the CNN."""
            vit, cnn = accuracies[: len(counts)], accuracies[len(counts) :]
            measured = crossover(counts, vit, cnn) if vit[-1] > cnn[-1] else None
            return extrapolated_crossover(counts, vit, cnn) if measured is None else measured

        names = [(family, count) for family in ("vit", "resnet") for count in counts]
        values = [self.accuracies.estimate(name).value for name in names]
        fields = {"largest": f"{largest:,}"}
        if state == "crossed" and crossover(counts, values[: len(counts)], values[len(counts) :]) is None:
            state = "ahead"
        elif state != "crossed" and len(counts) < _MIN_FITTED_SIZES:
            state += "-few"
        else:
            ends = central_interval([find_crossover(draw) for draw in self.accuracies.draws(names).tolist()])
            fields |= dict(zip(("at", "low", "high"), map(_count_text, (find_crossover(values), *ends)), strict=True))
        return Verdict("C2", "trained", lead, is_one_sided=True, fields=fields, message=state)

    def _lead_decrease(self) -> Estimate | None:
        """Return the CNN's lead in log error at the smallest size minus that at the largest."""
        if len(self.lab.sizes) < 2:
            return None
        ends = ((self.lab.sizes[0], 1.0), (self.lab.sizes[-1], -1.0))
        return self.accuracies.log_errors(
            *(
                (sign * lead, (family, count))
                for count, sign in ends
                for family, lead in (("vit", 1.0), ("resnet", -1.0))
            )
        )

    def _gap_decrease(self, family: str) -> Estimate | None:
        """Return the train-test gap at the smallest size minus that at the largest."""
        few, many = ((family, count) for count in (self.lab.sizes[0], self.lab.sizes[-1]))
        test_difference = self.accuracies.difference(few, many)
        if test_difference is None or few == many:
            return None
        # The seeds draw the training images, so their variance contains the sampling of training accuracies.
        pairs = zip(self.gaps[few], self.gaps[many], strict=False)
        estimate = mean_of([gap - other_gap for gap, other_gap in pairs], test_difference.image_error)
        return estimate._replace(is_cut_off=test_difference.is_cut_off)

    def _seed_count(self, key: tuple[str, int]) -> int:
        return len(self.accuracies.right[key])

    def _classical_fields(self) -> dict[str, str]:
        """Return the accuracies of the classical learners at their largest size, formatted."""
        largest = max((count for _, count in self.classical_accuracies), default=0)
        shares = {name: self.classical_accuracies.get((name, largest)) for name in CLASSICAL_LEARNERS}
        texts = {name: "-" if share is None else f"{share:.1%}" for name, share in shares.items()}
        return texts | {"count": f"{largest:,}"} if self.classical_accuracies else {}

    def scores(self) -> Iterator[Score]:
        few, many = self.lab.sizes[0], self.lab.sizes[-1]
        for family in self.lab.families:
            if (family, few) in self.accuracies and (family, many) in self.accuracies and few < many:
                lost = self.accuracies.lost_skill((family, many), (family, few), 1 / len(self.lab.images.labels))
                if lost is not None:
                    yield Score("few", family, complement(lost))

    def figures(self) -> Iterator[tuple[str, str]]:
        lines, gaps = [], []
        for family in self.lab.families:
            if counts := self._finished_sizes(family):
                estimates = [self.accuracies.estimate((family, count)) for count in counts]
                colour = COLOURS.get(family, 7)
                lines.append(
                    Line(
                        family_label(family),
                        counts,
                        [100 * estimate.value for estimate in estimates],
                        colour,
                        bars=[percent_interval(estimate) for estimate in estimates],
                    )
                )
                gaps.append(
                    Line(
                        family_label(family),
                        counts,
                        [100 * float(np.mean(self.gaps[family, count])) for count in counts],
                        colour,
                    )
                )
        if lines:
            yield (
                "data-accuracy",
                line_chart(lines, self.t("images", "tspan"), self.t("accuracy", "tspan"), log_x=True, dots=True),
            )
            yield (
                "data-gap",
                line_chart(gaps, self.t("images", "tspan"), self.t("gap", "tspan"), log_x=True, dots=True),
            )
        curves = [
            Line(family_label(family), seconds, [100 * share for share in right], COLOURS.get(family, 7))
            for family, (seconds, right) in self.training_curves.items()
        ]
        if curves:
            labels = self.t("seconds", "tspan"), self.t("validation", "tspan")
            yield "data-seconds", line_chart(curves, *labels, log_x=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if "data-accuracy" not in figures:
            return str(self.t("nothing", "p"))
        panes = "".join(
            figure(
                self.t(f"{name}-title"),
                self.t(f"{name}-note", count=f"{self.lab.sizes[-1]:,}", seeds=self.accuracies.seeds),
                svg,
            )
            for name, svg in figures.items()
        )
        return f'<div class="panes">{panes}</div>{self._table()}{self._classical_sentence()}'

    def _table(self) -> str:
        """Return the table of families by size. Sizes may differ, because other questions share some trials."""
        counts = [
            count for count in self.lab.sizes if any((name, count) in self.accuracies for name in self.lab.families)
        ]
        rows = []
        for name in self.lab.families:
            values = {count: self.accuracies.estimate((name, count)).value for count in self._finished_sizes(name)}
            if not values:
                continue
            law = fit_power_law(list(values), [1 - value for value in values.values()])
            shared = [count for count in values if ("vit", count) in self.accuracies and name != "vit"]
            vit_values = [self.accuracies.estimate(("vit", count)).value for count in shared]
            ratio = sample_efficiency(shared, [values[count] for count in shared], vit_values) if shared else None
            law_text = "-" if law is None else f"{law.floor:.3f} + {law.scale:.2f} n^-{law.exponent:.2f}"
            shares = [f"{values[count]:.1%}" if count in values else "-" for count in counts]
            rows.append([name, *shares, law_text, "-" if ratio is None else f"{ratio:.1f}x"])
        heads = ["", *(f"n = {count:,}" for count in counts), self.t("fit"), self.t("ratio")]
        return table(heads, rows, frozenset(range(1, len(heads))))

    def _classical_sentence(self) -> str:
        fields = self._classical_fields()
        return self.t("floors", "p", **fields) if fields else ""

    def numbers(self) -> dict[str, Any]:
        return {
            "accuracy": {
                f"{family} {count}": list(self.accuracies.estimate((family, count))[:2])
                for family, count in self.accuracies.right
            },
            "floors": {f"{name} {count}": value for (name, count), value in self.classical_accuracies.items()},
        }


def _most_used_machine(results: Results, groups: Mapping[str, Sequence[Trial]]) -> str | None:
    """Return the machine that trained most families. Seconds of different machines are not comparable."""
    counts = Counter(machine for trials in groups.values() for machine in set(map(results.machine, trials)))
    del counts[None]
    return max(counts, key=counts.__getitem__, default=None)


def _count_text(number: float) -> str:
    """Format a number of images to two digits."""
    return "∞" if math.isinf(number) else f"{float(f'{number:.2g}'):,.0f}"


def floor(settings: dict[str, Any], images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: train and evaluate a scikit-learn classifier on raw pixels."""
    import_extra("sklearn", extra="lab", subject="vitrail compare")
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.tree import DecisionTreeClassifier

    learners = {
        "neighbours": lambda: KNeighborsClassifier(5),
        "linear": lambda: LogisticRegression(C=0.01, max_iter=1000, tol=1e-3),
        "tree": lambda: DecisionTreeClassifier(random_state=0),
        "bayes": lambda: GaussianNB(var_smoothing=0.01),
    }
    split = images.subset(settings["count"], 0)
    features = [np.asarray(part.images, np.float32).reshape(len(part), -1) / 255 for part in (split, images.test)]
    learner = learners[settings["learner"]]().fit(features[0], split.labels)
    right = learner.predict(features[1]) == images.test.labels
    return Outcome({"accuracy": float(right.mean()), "right": pack(right), "count": len(right)}, {})
