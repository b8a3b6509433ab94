"""How much data does each architecture need? Accuracy and train-test gap against the number of training images."""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.optional import need
from vitrail.lab.images import Images
from vitrail.lab.question import COLOURS, Accuracies, Question, Score, Verdict, bar, training_accuracies
from vitrail.lab.results import Results
from vitrail.lab.statistics import (
    Estimate,
    complement,
    crossover,
    ends_of,
    extrapolated_crossover,
    fit_power_law,
    pool,
    sample_efficiency,
    smallest,
    sum_of_means,
)
from vitrail.lab.training import JUDGED
from vitrail.lab.trial import Cell, Outcome, pack
from vitrail.reports.families import in_figure
from vitrail.reports.messages import words_beside
from vitrail.reports.page import Line, chart, figure, table

FLOORS = ("neighbours", "linear", "tree", "bayes")
_LEAST_SIZES = 4  # that a curve is fitted to
_FLOOR_IMAGES = 3000  # beyond, trees and neighbours on raw pixels take longer than the models


class Data(Question):
    """Nested, class-balanced subsets; every family at equal cost and equal images seen."""

    words = words_beside(__file__)
    claims = ("C1", "C2", "C3", "C7", "C8", "C34b")

    @functools.cached_property
    def cells(self) -> dict[tuple[str, int], list[Cell]]:
        """The cells of every family and size, a seed each."""
        return {
            (family, count): [self.lab.train(family, count=count, seed=seed) for seed in self.lab.seeds_for(count)]
            for family in self.lab.families
            for count in self.lab.sizes
        }

    @functools.cached_property
    def floors(self) -> dict[tuple[str, int], Cell]:
        """Classical learners on raw pixels."""
        sizes = [count for count in self.lab.sizes if count <= _FLOOR_IMAGES] or self.lab.sizes[:1]
        return {
            (name, count): Cell("vitrail.lab.questions.data:floor", {"learner": name, "count": count}, work=5e9)
            for name in FLOORS
            for count in sizes
        }

    def rounds(self) -> Sequence[Sequence[Cell]]:
        first, ends = ("vit", "resnet"), {*self.lab.sizes[:2], self.lab.sizes[-1]}
        at_ends = [key for key in self.cells if key[1] in ends]
        leading = [key for key in at_ends if key[0] in first]
        return (
            [cell for key in leading for cell in self.cells[key][:2]],
            [cell for key in at_ends for cell in self.cells[key][:2]] + list(self.floors.values()),
            [cell for key in self.cells for cell in self.cells[key][:2]],
            [cell for key in self.cells for cell in self.cells[key]],
        )

    def read(self, results: Results) -> None:
        self.found = Accuracies(results, self.cells, alike=_size)
        self.gaps: dict[tuple[str, int], list[float]] = {}
        self.fitted = training_accuracies(results, self.cells)
        self.courses: dict[str, tuple[list[float], ...]] = {}
        """For each family with the most images: seconds of training, and the accuracy on validation images then."""
        for key, cells in self.cells.items():
            known = [one for cell in cells if (one := results.get(cell)) is not None]
            if known:
                self.gaps[key] = [one["training_accuracy"] - one["accuracy"] for one in known]
        at_most = {family: self.cells[family, self.lab.sizes[-1]] for family in self.lab.families}
        usual = _usual_machine(results, at_most)
        for family in self.lab.families:
            known = [cell for cell in at_most[family] if results.get(cell) is not None]
            cells = [cell for cell in known if results.machine(cell) == usual]
            seconds = [(results.measured(cell) or {}).get("curve_seconds") for cell in cells]
            right = [(results.get(cell) or {})["curve"] for cell in cells]
            if cells and all(seconds):
                self.courses[family] = tuple(
                    np.asarray(curve, float).mean(axis=0)[:, 1].tolist() for curve in (seconds, right)
                )
        self.floor = {
            key: found["accuracy"] for key, cell in self.floors.items() if (found := results.get(cell)) is not None
        }

    def _known(self, family: str) -> list[int]:
        return [count for count in self.lab.sizes if (family, count) in self.found]

    def _lead(self, one: str, other: str, count: int) -> Estimate | None:
        return self.found.difference((one, count), (other, count))

    def verdicts(self) -> Iterator[Verdict]:
        sizes = self.lab.sizes
        yield Verdict("C1", "trained", smallest([self._lead("resnet", "vit", count) for count in sizes[:2]]))
        yield self._overtakes()
        yield Verdict("C3", "trained", self._narrowing(), is_share=False)
        yield Verdict("C7", "trained", smallest([self._gap_shrinks(family) for family in self.lab.families]))
        yield Verdict("C8", "reported", words=self._floor_words())
        if "mixer" in self.lab.families:
            counts = self._shared("vit", "mixer")
            leads = [self._lead("vit", "mixer", count) for count in counts]
            is_known = {sizes[0], sizes[-1]} <= set(counts)
            yield Verdict("C34b", "trained", smallest(leads) if is_known else None)

    def _shared(self, one: str, other: str) -> list[int]:
        """Sizes at which both families were run."""
        return [count for count in self._known(one) if (other, count) in self.found]

    def _overtakes(self) -> Verdict:
        """Where the curves cross, or where they would if they went on as they were fitted."""
        counts = [count for count in self._shared("vit", "resnet") if self.found.noise_of(("vit", count)).freedom]
        largest = self.lab.sizes[-1]
        lead = self._lead("vit", "resnet", largest)
        if lead is None or math.isnan(lead.error):
            return Verdict("C2", "trained", lead, is_one_sided=True)
        low, high = lead.interval()
        state = "crossed" if low > 0 else "not-crossed" if high < 0 else "level"

        def find(accuracies: Sequence[float]) -> float:
            """From the accuracies of the ViT, then those of the CNN."""
            vit, cnn = accuracies[: len(counts)], accuracies[len(counts) :]
            within = crossover(counts, vit, cnn) if vit[-1] > cnn[-1] else None
            return extrapolated_crossover(counts, vit, cnn) if within is None else within

        names = [(family, count) for family in ("vit", "resnet") for count in counts]
        values = [self.found.estimate(name).value for name in names]
        words = {"largest": f"{largest:,}"}
        if state == "crossed" and crossover(counts, values[: len(counts)], values[len(counts) :]) is None:
            state = "ahead"
        elif state != "crossed" and len(counts) < _LEAST_SIZES:
            state += "-few"
        else:
            ends = ends_of([find(draw) for draw in self.found.draws(names).tolist()])
            words |= dict(zip(("at", "low", "high"), map(_count, (find(values), *ends)), strict=True))
        return Verdict("C2", "trained", lead, is_one_sided=True, words=words, sentence=state)

    def _narrowing(self) -> Estimate | None:
        """Lead of the CNN in log error at the smallest less at the largest size."""
        if len(self.lab.sizes) < 2:
            return None
        ends = ((self.lab.sizes[0], 1.0), (self.lab.sizes[-1], -1.0))
        return self.found.log_errors(
            *(
                (sign * lead, (family, count))
                for count, sign in ends
                for family, lead in (("vit", 1.0), ("resnet", -1.0))
            )
        )

    def _gap_shrinks(self, family: str) -> Estimate | None:
        """Train-test gap at the smallest less at the largest size."""
        few, many = ((family, count) for count in (self.lab.sizes[0], self.lab.sizes[-1]))
        tested = self.found.difference(few, many)
        if tested is None or few == many:
            return None
        noises = {
            key: pool(gaps for other, gaps in self.gaps.items() if _size(other) == _size(key)) for key in (few, many)
        }
        error = math.hypot(tested.lasting, *(self._sampled(key) for key in (few, many)))
        found = sum_of_means([(sign, self.gaps[key], noises[key]) for key, sign in ((few, 1.0), (many, -1.0))], error)
        return found._replace(is_cut_off=tested.is_cut_off)

    def _sampled(self, key: tuple[str, int]) -> float:
        """The standard error of a training accuracy: that of a sample, where not all training images were judged."""
        share, left_out = self.fitted[key], max(1 - JUDGED / key[1], 0.0)
        return math.sqrt(share * (1 - share) / JUDGED * left_out)

    def _floor_words(self) -> dict[str, str]:
        """Accuracies of the classical learners at their largest number of images."""
        largest = max((count for _, count in self.floor), default=0)
        shares = {name: self.floor.get((name, largest)) for name in FLOORS}
        said = {name: "-" if share is None else f"{share:.1%}" for name, share in shares.items()}
        return said | {"count": f"{largest:,}"} if self.floor else {}

    def scores(self) -> Iterator[Score]:
        few, many = self.lab.sizes[0], self.lab.sizes[-1]
        for family in self.lab.families:
            if (family, few) in self.found and (family, many) in self.found and few < many:
                lost = self.found.lost_skill((family, many), (family, few), 1 / len(self.lab.images.labels))
                yield Score("few", family, complement(lost))

    def figures(self) -> Iterator[tuple[str, str]]:
        lines, gaps = [], []
        for family in self.lab.families:
            if counts := self._known(family):
                estimates = [self.found.estimate((family, count)) for count in counts]
                colour = COLOURS.get(family, 7)
                lines.append(
                    Line(
                        in_figure(family),
                        counts,
                        [100 * one.value for one in estimates],
                        colour,
                        bars=[bar(one) for one in estimates],
                    )
                )
                gaps.append(
                    Line(
                        in_figure(family),
                        counts,
                        [100 * float(np.mean(self.gaps[family, count])) for count in counts],
                        colour,
                    )
                )
        if lines:
            yield (
                "data-accuracy",
                chart(lines, self.word("images", "tspan"), self.word("accuracy", "tspan"), log_x=True, dots=True),
            )
            yield (
                "data-gap",
                chart(gaps, self.word("images", "tspan"), self.word("gap", "tspan"), log_x=True, dots=True),
            )
        courses = [
            Line(in_figure(family), seconds, [100 * share for share in right], COLOURS.get(family, 7))
            for family, (seconds, right) in self.courses.items()
        ]
        if courses:
            labels = self.word("seconds", "tspan"), self.word("validation", "tspan")
            yield "data-seconds", chart(courses, *labels, log_x=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if "data-accuracy" not in figures:
            return str(self.word("nothing", "p"))
        panes = "".join(
            figure(
                self.word(f"{name}-title"),
                self.word(f"{name}-note", count=f"{self.lab.sizes[-1]:,}", seeds=self.found.seeds),
                svg,
            )
            for name, svg in figures.items()
        )
        return f'<div class="panes">{panes}</div>{self._table()}{self._floor_sentence()}'

    def _table(self) -> str:
        """Every family by the numbers of images that one of them was trained on; other questions share some cells."""
        shown = [count for count in self.lab.sizes if any((name, count) in self.found for name in self.lab.families)]
        rows = []
        for name in self.lab.families:
            values = {count: self.found.estimate((name, count)).value for count in self._known(name)}
            if not values:
                continue
            law = fit_power_law(list(values), [1 - value for value in values.values()])
            shared = [count for count in values if ("vit", count) in self.found and name != "vit"]
            base = [self.found.estimate(("vit", count)).value for count in shared]
            ratio = sample_efficiency(shared, [values[count] for count in shared], base) if shared else None
            fitted = "-" if law is None else f"{law.floor:.3f} + {law.scale:.2f} n^-{law.exponent:.2f}"
            shares = [f"{values[count]:.1%}" if count in values else "-" for count in shown]
            rows.append([name, *shares, fitted, "-" if ratio is None else f"{ratio:.1f}x"])
        heads = ["", *(f"n = {count:,}" for count in shown), self.word("fit"), self.word("ratio")]
        return table(heads, rows, frozenset(range(1, len(heads))))

    def _floor_sentence(self) -> str:
        words = self._floor_words()
        return self.word("floors", "p", **words) if words else ""

    def numbers(self) -> dict[str, Any]:
        return {
            "accuracy": {
                f"{family} {count}": list(self.found.estimate((family, count))[:2])
                for family, count in self.found.right
            },
            "floors": {f"{name} {count}": value for (name, count), value in self.floor.items()},
        }


def _size(key: tuple[str, int]) -> int:
    """Training sets of a size share their seed noise: small ones have more of it."""
    return key[1]


def _usual_machine(results: Results, groups: Mapping[str, Sequence[Cell]]) -> str | None:
    """The machine that most families were trained on: seconds of different machines are not compared."""
    found = Counter(machine for cells in groups.values() for machine in set(map(results.machine, cells)))
    del found[None]
    return max(found, key=found.__getitem__, default=None)


def _count(number: float) -> str:
    """A number of images, to two digits."""
    return "∞" if math.isinf(number) else f"{float(f'{number:.2g}'):,.0f}"


def floor(settings: dict[str, Any], images: Images, _of: list[Path], _folder: Path) -> Outcome:
    """A classical learner on raw pixels, as scikit-learn has it."""
    need("sklearn", extra="lab", subject="vitrail compare")
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
    split = images.subset(settings["count"])
    flat = [np.asarray(part.images, np.float32).reshape(len(part), -1) / 255 for part in (split, images.test)]
    learner = learners[settings["learner"]]().fit(flat[0], split.labels)
    right = learner.predict(flat[1]) == images.test.labels
    return Outcome({"accuracy": float(right.mean()), "right": pack(right), "count": len(right)}, {})
