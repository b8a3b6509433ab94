"""How much data does each family need? Accuracy and train-test gap against the number of training images.

All families are compared at equal multiply-accumulates. ViT and CNN are also compared at equal parameters (the CNN is
widened or narrowed) and at equal training time (the depth of ViT is changed), and with the most images they are trained
until more training no longer helps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.message_files import Messages, load_messages
from vitrail.core.optional import import_extra
from vitrail.lab.images import Images
from vitrail.lab.question import (
    COLOURS,
    Score,
    Verdict,
    difference_text,
    percent_interval,
    points_text,
)
from vitrail.lab.questions.data_trials import AXES, MIN_GAIN, PAIR, DataTrials
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
from vitrail.lab.trial import Outcome, pack
from vitrail.lab.variant_question import Key
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

_MIN_FITTED_SIZES = 4  # smallest number of sizes for a fitted curve
_AXIS_STYLES = {"macs": 0, "parameters": 8, "time": 16}  # solid, dashed and dotted lines


def _with_endings(messages: Messages) -> Messages:
    """Add the endings of the results of C1 and C2: how long models were trained, and whether other axes agree."""
    endings = {"C1": ("",), "C2": ("", "-longer", "-unconverged")}
    results = {name: text for name, text in messages.items() if name.startswith("C2-") and name != "C2-rule"}
    results["C1-result"] = {"en": "", "ko": ""}
    combined = {}
    for name, text in results.items():
        for training in endings[name[:2]]:
            for agreement in ("", "-agree", "-differ"):
                parts = [text, *(messages[f"ending{ending}"] for ending in (training, agreement) if ending)]
                combined[f"{name}{training}{agreement}"] = {
                    language: "; ".join(part[language] for part in parts if part[language]) for language in text
                }
    return messages | combined


class DataQuestion(DataTrials):
    """Compares families trained on nested, class-balanced subsets with equal numbers of images seen."""

    messages = _with_endings(load_messages(__file__))
    claims = ("C1", "C2", "C3", "C7", "C8", "C34b", "C37", "C44", "C45")

    # Verdicts

    def verdicts(self) -> Iterator[Verdict]:
        yield self._little_data_verdict()
        yield self._overtaking_verdict()
        yield Verdict("C3", "trained", self._lead_decrease(), is_share=False)
        yield Verdict("C7", "trained", smallest([self._gap_decrease(family) for family in self.lab.families]))
        yield from self.classical.verdicts()
        if "mixer" in self.lab.families:
            counts = self._shared_sizes("vit", "mixer")
            leads = [self.lead("vit", "mixer", count) for count in counts]
            has_ends = {self.counts[0], self.counts[-1]} <= set(counts)
            yield Verdict("C34b", "trained", smallest(leads) if has_ends else None)
        yield Verdict("C37", "trained", self._smallest_lead("lstm", "vit"))

    def _smallest_lead(self, name: str, other: str) -> Estimate | None:
        """Return the smaller lead at the two smallest sizes."""
        return smallest([self.lead(name, other, count) for count in self.counts[:2]])

    def _little_data_verdict(self) -> Verdict:
        """Return the verdict on C1 with the leads on the other axes."""
        leads = {axis: self._smallest_lead(cnn, vit) for axis, (vit, cnn) in AXES.items()}
        agreement, fields = self._compare_axes(leads["macs"], leads)
        return Verdict("C1", "trained", leads["macs"], fields=fields, message=f"result{agreement}")

    def _compare_axes(
        self, deciding: Estimate | None, leads: Mapping[str, Estimate | None]
    ) -> tuple[str, dict[str, str]]:
        """Return whether the leads on all axes have the sign of the deciding one, as an ending of a message.

        The second result is the fields of the message. Both are empty if a lead is missing.
        """
        texts = {axis: difference_text(lead) for axis, lead in leads.items() if lead is not None}
        if len(texts) < len(AXES):
            return "", {}
        signs = {lead.value > 0 for lead in (deciding, *leads.values()) if lead is not None}
        return "-agree" if len(signs) == 1 else "-differ", texts | {"seen": f"{self.lab.seen:,}"}

    def _shared_sizes(self, family: str, other_family: str) -> list[int]:
        """Return the sizes at which both families were run."""
        return [count for count in self.finished_sizes(family) if (other_family, count) in self.accuracies]

    def _right_end(self) -> tuple[list[Key], str, dict[str, str]]:
        """Return ViT and CNN at the largest size, trained longest, with the ending and fields of the message of C2."""
        doublings = {family: max(self.doublings(family), default=0) for family in PAIR}
        if not all(doublings.values()):
            return [self.longer_key(family, 0) for family in PAIR], "", {}
        gains = [self.validation_gains[family, number] for family, number in doublings.items()]
        is_converged = all(gain is not None and gain < MIN_GAIN for gain in gains)
        fields = {f"{family}_seen": f"{self.lab.seen << number:,}" for family, number in doublings.items()}
        keys = [self.longer_key(family, number) for family, number in doublings.items()]
        return keys, "-longer" if is_converged else "-unconverged", fields

    def _overtaking_verdict(self) -> Verdict:
        """Return the verdict on C2 with the size at which the curves cross, extrapolated if necessary."""
        ends, training, fields = self._right_end()
        lead = self.accuracies.difference(*ends)
        if lead is None or math.isnan(lead.error):
            return Verdict("C2", "trained", lead, is_one_sided=True)
        leads = {axis: self.lead(*names, self.counts[-1]) for axis, names in AXES.items()}
        agreement, axis_fields = self._compare_axes(lead, leads)
        state, crossing_fields = self._describe_crossing(lead, ends)
        fields |= {"largest": f"{self.counts[-1]:,}"} | crossing_fields | axis_fields
        message = f"{state}{training}{agreement}"
        return Verdict("C2", "trained", lead, is_one_sided=True, fields=fields, message=message)

    def _describe_crossing(self, lead: Estimate, ends: Sequence[Key]) -> tuple[str, dict[str, str]]:
        """Return the state of C2, and where the curves of ViT and CNN cross. `ends` are their last points."""
        shared = self._shared_sizes(*PAIR)
        counts = [count for count in shared if min(len(self.accuracies.right[name, count]) for name in PAIR) > 1]
        low, high = lead.interval()
        state = "crossed" if low > 0 else "not-crossed" if high < 0 else "level"

        def find_crossover(accuracies: Sequence[float]) -> float:
            """Return the crossover for the accuracies of the ViT followed by those of the CNN."""
            vit, cnn = accuracies[: len(counts)], accuracies[len(counts) :]
            measured = crossover(counts, vit, cnn) if vit[-1] > cnn[-1] else None
            return extrapolated_crossover(counts, vit, cnn) if measured is None else measured

        names = [
            end if count == self.counts[-1] else (family, count)
            for family, end in zip(PAIR, ends, strict=True)
            for count in counts
        ]
        values = [self.accuracies.estimate(name).value for name in names]
        if state == "crossed" and crossover(counts, values[: len(counts)], values[len(counts) :]) is None:
            return "ahead", {}
        if state != "crossed" and len(counts) < _MIN_FITTED_SIZES:
            return f"{state}-few", {}
        interval = central_interval([find_crossover(draw) for draw in self.accuracies.draws(names).tolist()])
        return state, dict(
            zip(("at", "low", "high"), map(_count_text, (find_crossover(values), *interval)), strict=True)
        )

    def _lead_decrease(self) -> Estimate | None:
        """Return the CNN's lead in log error at the smallest size minus that at the largest."""
        if len(self.counts) < 2:
            return None
        ends = ((self.counts[0], 1.0), (self.counts[-1], -1.0))
        return self.accuracies.log_errors(
            *(
                (sign * lead, (family, count))
                for count, sign in ends
                for family, lead in (("vit", 1.0), ("resnet", -1.0))
            )
        )

    def _gap_decrease(self, family: str) -> Estimate | None:
        """Return the train-test gap at the smallest size minus that at the largest."""
        few, many = ((family, count) for count in (self.counts[0], self.counts[-1]))
        test_difference = self.accuracies.difference(few, many)
        if test_difference is None or few == many:
            return None
        # The seeds draw the training images, so their variance contains the sampling of training accuracies.
        decreases = [gap - self.gaps[many][seed] for seed, gap in self.gaps[few].items() if seed in self.gaps[many]]
        estimate = mean_of(decreases, test_difference.image_error)
        return estimate._replace(is_cut_off=test_difference.is_cut_off, trainings=test_difference.trainings)

    def scores(self) -> Iterator[Score]:
        few, many = self.counts[0], self.counts[-1]
        for family in self.lab.families:
            if (family, few) in self.accuracies and (family, many) in self.accuracies and few < many:
                lost = self.accuracies.lost_skill((family, many), (family, few), 1 / len(self.lab.images.labels))
                if lost is not None:
                    yield Score("few", family, complement(lost))

    # The page

    def figures(self) -> Iterator[tuple[str, str]]:
        families = [family for family in self.lab.families if self.finished_sizes(family)]
        images, accuracy = self.t("images", "tspan"), self.t("accuracy", "tspan")
        curves = [
            self._estimates_line(
                family_label(family),
                {count: self.accuracies.estimate((family, count)) for count in self.finished_sizes(family)},
                COLOURS.get(family, 7),
            )
            for family in families
        ]
        gaps = [
            Line(
                family_label(family),
                counts,
                [100 * float(np.mean(list(self.gaps[family, count].values()))) for count in counts],
                COLOURS.get(family, 7),
            )
            for family in families
            if (counts := self.finished_sizes(family))
        ]
        times = [
            Line(family_label(family), seconds, [100 * share for share in right], COLOURS.get(family, 7))
            for family, (seconds, right) in self.training_curves.items()
        ]
        updates = [
            Line(self.t(name, "tspan"), counts, shares, 7, joined=name == "refit")
            for name, counts, shares in self.classical.update_curves()
        ]
        charts = {
            "data-accuracy": (curves, images, accuracy),
            "data-gap": (gaps, images, self.t("gap", "tspan")),
            "data-axes": (self._axis_lines(), images, self.t("lead", "tspan")),
            "data-convergence": (self._convergence_lines(), self.t("seen", "tspan"), accuracy),
            "data-seconds": (times, self.t("seconds", "tspan"), self.t("validation", "tspan")),
            "data-bayes": (updates, images, accuracy),
        }
        for name, (lines, x_label, y_label) in charts.items():
            if lines:
                yield name, line_chart(lines, x_label, y_label, log_x=True, dots=True)

    def _estimates_line(self, name: str, estimates: Mapping[int, Estimate], colour: int) -> Line:
        """Return a line of shares in per cent with their intervals."""
        values = [100 * estimate.value for estimate in estimates.values()]
        bars = [percent_interval(estimate) for estimate in estimates.values()]
        return Line(name, list(estimates), values, colour, bars=bars)

    def _axis_leads(self, axis: str) -> dict[int, Estimate]:
        """Return the lead of the CNN over ViT on an axis by number of images."""
        vit, cnn = AXES[axis]
        leads = {count: self.lead(cnn, vit, count) for count in self.counts}
        return {count: lead for count, lead in leads.items() if lead is not None}

    def _axis_lines(self) -> list[Line]:
        if not any(self._axis_leads(axis) for axis in ("parameters", "time")):
            return []
        return [
            self._estimates_line(self.t(f"axis-{axis}", "tspan"), leads, COLOURS["resnet"] + style)
            for axis, style in _AXIS_STYLES.items()
            if (leads := self._axis_leads(axis))
        ]

    def _convergence_lines(self) -> list[Line]:
        lines = []
        for family in self.lab.selected(PAIR):
            numbers = self.doublings(family)
            if len(numbers) > 1:
                estimates = {
                    self.lab.seen << number: self.accuracies.estimate(self.longer_key(family, number))
                    for number in numbers
                }
                lines.append(self._estimates_line(family_label(family), estimates, COLOURS[family]))
        return lines

    def panes(self, figures: dict[str, str]) -> Iterator[str]:
        fields = {"count": f"{self.counts[-1]:,}", "seeds": self.accuracies.seeds}
        for name, svg in figures.items():
            yield figure(self.t(f"{name}-title"), self.t(f"{name}-note", **fields), svg)

    def variant_table(self) -> str:
        """Return the table of families by size. Sizes may differ, because other questions share some trials."""
        counts = [count for count in self.counts if any((name, count) in self.accuracies for name in self.lab.families)]
        rows = []
        for name in self.lab.families:
            values = {count: self.accuracies.estimate((name, count)).value for count in self.finished_sizes(name)}
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

    def details(self) -> str:
        """Return the tables of axes and of longer training, and the sentence about classical learners."""
        fields = self.classical.fields()
        floors = self.t("floors", "p", **fields) if fields else ""
        return f"{self._axis_table()}{self._convergence_table()}{floors}"

    def _axis_table(self) -> str:
        """Return the table of the lead of the CNN on each axis, with what both models cost."""
        rows = []
        for axis, names in AXES.items():
            if leads := self._axis_leads(axis):
                configs = [
                    self.lab.images.matched_config(self.variants[name].family, **self.variants[name].changes)
                    for name in names
                ]
                seconds = [self.seconds.get(name) for name in names]
                texts = [difference_text(leads[count]) if count in leads else "-" for count in self.counts]
                rows.append(
                    (
                        self.t(f"axis-{axis}"),
                        " / ".join(f"{config.parameters:,}" for config in configs),
                        " / ".join(f"{config.macs / 1e6:.1f} M" for config in configs),
                        " / ".join("-" if value is None else f"{value:.2f}" for value in seconds),
                        *texts,
                    )
                )
        heads = ["", *(self.t(name) for name in ("parameters", "macs", "time"))]
        heads += [f"n = {count:,}" for count in self.counts]
        return f"{self.t('axes', 'p')}{table(heads, rows, frozenset(range(1, len(heads))))}" if len(rows) > 1 else ""

    def _convergence_table(self) -> str:
        """Return the table of accuracy against images seen at the largest size."""
        rows = []
        for family in self.lab.selected(PAIR):
            for number in self.doublings(family):
                gain = self.validation_gains.get((family, number))
                accuracy = self.accuracies.estimate(self.longer_key(family, number)).value
                gain_text = "-" if gain is None else points_text(gain)
                rows.append((family_label(family), f"{self.lab.seen << number:,}", f"{accuracy:.1%}", gain_text))
        heads = ("", self.t("seen"), self.t("accuracy"), self.t("validation-gain"))
        has_longer = any(len(self.doublings(family)) > 1 for family in self.lab.selected(PAIR))
        return f"{self.t('convergence', 'p')}{table(heads, rows, frozenset((1, 2, 3)))}" if has_longer else ""

    def numbers(self) -> dict[str, Any]:
        axes = {f"{axis} {count}": list(lead[:2]) for axis in AXES for count, lead in self._axis_leads(axis).items()}
        gains = {f"{family} {number}": gain for (family, number), gain in self.validation_gains.items()}
        return {
            "accuracy": {
                f"{name} {count}": list(self.accuracies.estimate((name, count))[:2]) for name, count in self.finished
            },
            "cnn_lead": axes,
            "validation_gain": gains,
            "seconds_per_1000_images": self.seconds,
            "floors": {f"{name} {count}": value for (name, count), value in self.classical.accuracies.items()},
        }


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
