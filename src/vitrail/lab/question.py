"""What a question of the lab is: one class that says what to run, reads the results, and answers claims.

A question lives in one file, with its sentences in the TOML file beside it, and has one line in `QUESTIONS`
(or one entry point `question.NAME` in another package).
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from vitrail.core.html import Html
from vitrail.lab.images import Images
from vitrail.lab.results import Results
from vitrail.lab.statistics import (
    Estimate,
    SeedNoise,
    accuracy,
    contrast,
    draw_accuracies,
    log_errors,
    lost_skill,
    pool,
)
from vitrail.lab.training import training_trial
from vitrail.lab.trial import Trial
from vitrail.reports.families import COLOURS as COLOURS
from vitrail.reports.messages import Words, word

State = Literal["true", "false", "supported", "contradicted", "cannot tell", "reported"]

_MOST_AT_DEFAULT = 10_000


@dataclasses.dataclass(frozen=True)
class Lab:
    """What every question may know of the lab it is asked in."""

    images: Images
    families: tuple[str, ...]
    sizes: tuple[int, ...]
    """Numbers of training images, ascending."""
    seeds: int
    seen: int
    """Images that every trained model sees."""

    @property
    def default_size(self) -> int:
        """Training images of comparisons at one size: as many as there are, up to 10,000."""
        return max((count for count in self.sizes if count <= _MOST_AT_DEFAULT), default=self.sizes[0])

    def train(self, family: str, *, count: int, seed: int, **settings: Any) -> Trial:
        """A trained cell by the lab's protocol."""
        settings.setdefault("seen", self.seen)
        return training_trial(self.images, family, count=count, seed=seed, **settings)

    def selected(self, names: Iterable[str]) -> list[str]:
        """Those of some families that are compared."""
        return [name for name in names if name in self.families]

    def seeds_for(self, count: int) -> range:
        """Large training sets get one seed less: their accuracies differ less."""
        return range(self.seeds if count <= 10_000 else max(self.seeds - 1, 1))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the lab says of a claim. `estimate` is the deciding quantity, above zero if the claim is right."""

    claim: str
    kind: Literal["exact", "trained", "reported"]
    estimate: Estimate | None = None
    holds: bool | None = None
    """Of an exact claim: whether it was proved."""
    margin: float | None = None
    """Of a claim that two things are equal: how far `estimate`, their difference, may be from zero. Two one-sided tests
    decide (TOST): supported if the interval lies within the margin, whether or not it includes zero; contradicted if it
    lies beyond the margin."""
    is_share: bool = True
    """Whether the estimate is of shares, told in percentage points; else it is a plain number."""
    is_one_sided: bool = False
    """Whether it can be supported, but never contradicted: what it says may lie beyond the range."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What fills in the sentence of its result; without any, nothing is said but the number."""
    message: str = "result"
    """Which sentence that is: `claim-sentence` in the question's words."""

    @property
    def deciding(self) -> Estimate | None:
        """What must be above zero, with its interval: the estimate, or its distance from the nearer end of the margin,
        which is the harder of the two one-sided tests."""
        if self.estimate is None or math.isnan(self.estimate.error):
            return None
        if self.margin is None:
            return self.estimate
        value, *halves = (self.margin - abs(number) for number in (self.estimate.value, *self.estimate.halves))
        return self.estimate._replace(value=value, halves=tuple(halves))

    def state(self, level: float) -> State:
        """The verdict, at the level that Holm's rule leaves for it."""
        if self.kind == "reported":
            return "reported" if self.fields else "cannot tell"
        if self.kind == "exact":
            return "cannot tell" if self.holds is None else ("true" if self.holds else "false")
        if self.deciding is None or self.doubt is not None:
            return "cannot tell"
        low, high = self.deciding.interval(level)
        if low > 0:
            return "supported"
        return "contradicted" if high < 0 and not self.is_one_sided else "cannot tell"

    @property
    def doubt(self) -> Literal["unsteady", "cut-off"] | None:
        """Why a number does not decide even if its interval excludes zero: one half of the seeds says otherwise, or the
        best learning rate of a model may lie beyond those that were tried."""
        if self.deciding is None:
            return None
        if not self.deciding.is_steady:
            return "unsteady"
        return "cut-off" if self.deciding.is_cut_off else None


class Score(NamedTuple):
    """How much a family has of a bias: 0 for nothing, 1 for all that the measure can show."""

    bias: str
    """Its sentences in the question's words are `score-BIAS` and `score-BIAS-note`."""
    family: str
    trained: Estimate
    untrained: Estimate | None = None
    """The same before training, where that has a meaning."""


class Question:
    """One question. Whatever a subclass leaves out is empty."""

    messages: ClassVar[Words] = {}
    """Its sentences: `title`, `about`, for each claim `C1` (what the notes say) and `C1-rule` (what decides)."""
    claims: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, lab: Lab) -> None:
        self.name, self.lab = name, lab

    def rounds(self) -> Sequence[Sequence[Trial]]:
        """Cells to run, the most informative round first; each round makes sense with those before it."""
        return ()

    def read(self, results: Results) -> None:
        """Take what is needed from the results; some cells may be missing."""

    def verdicts(self) -> Iterator[Verdict]:
        """What it says of each of its claims."""
        yield from ()

    def scores(self) -> Iterator[Score]:
        """What it says of how strongly each family is biased."""
        yield from ()

    def figures(self) -> Iterator[tuple[str, str]]:
        """Its figures, SVG, by the names of their files."""
        yield from ()

    def html(self, figures: dict[str, str]) -> str:
        """Its section below the heading."""
        return ""

    def numbers(self) -> dict[str, Any]:
        """Its numbers, for `claims.json`."""
        return {}

    # What questions build from

    def t(self, name: str, tag: str = "span", **fields: Any) -> Html:
        """One of its sentences, in both languages."""
        return word(name, tag, words=self.messages, **fields)


class Accuracies:
    """Right answers of many variants under several seeds, to the same test images, and their seed noise.

    Variants that are `alike` (the function says the same of their names) share their seed noise, pooled over them:
    models trained on few images differ more than those trained on many.
    """

    def __init__(
        self, results: Results, groups: dict[Any, list[Trial]], noise_group: Callable[[Any], Any] = lambda _name: None
    ) -> None:
        self.right = self._read(results, groups)
        self._noise_group = noise_group
        self.cut_off = cut_off(results, groups)

    def _read(self, results: Results, groups: dict[Any, list[Trial]]) -> dict[Any, np.ndarray]:
        by_name = {name: results.right(trials) for name, trials in groups.items()}
        return {name: right for name, right in by_name.items() if right is not None}

    @functools.cached_property
    def _noise_by_group(self) -> dict[Any, SeedNoise]:
        by_kind: dict[Any, list[list[float]]] = {}
        for name, right in self.right.items():
            by_kind.setdefault(self._noise_group(name), []).append(right.mean(axis=1).tolist())
        return {kind: pool(groups) for kind, groups in by_kind.items()}

    def noise_of(self, name: Any) -> SeedNoise:
        """The seed noise of a variant, pooled over those that are alike."""
        return self._noise_by_group[self._noise_group(name)]

    def by_part(self, parts: Mapping[Any, np.ndarray]) -> "Accuracies":
        """The same variants, each judged on parts of the test images: named (variant, part). Each part has its own
        seed noise: those of one model rise and fall together."""
        judged = copy.copy(self)
        judged.__dict__.pop("_noises", None)
        judged.right = {
            (name, part): right[:, is_chosen] for name, right in self.right.items() for part, is_chosen in parts.items()
        }
        judged._noise_group = lambda name: name[1]
        judged.cut_off = {key for key in judged.right if key[0] in self.cut_off}
        return judged

    def __contains__(self, name: Any) -> bool:
        return name in self.right

    @property
    def seeds(self) -> str:
        """How many seeds variants were run with: 2, or 2-3."""
        return range_text(map(len, self.right.values()))

    def estimate(self, name: Any) -> Estimate:
        """The accuracy of a variant."""
        estimate = accuracy(*self._sample(name))
        return self._mark_cut_off(estimate._replace(bounds=self.bounds), name)

    def difference(self, first: Any, second: Any) -> Estimate | None:
        """Of two variants, on the same images; None if one of them was not run."""
        return self.contrast((1.0, first), (-1.0, second))

    def contrast(self, *terms: tuple[float, Any]) -> Estimate | None:
        """A weighted sum of the accuracies of variants, on the same images; None if one of them was not run."""
        return self._weigh(contrast, terms)

    def log_errors(self, *terms: tuple[float, Any]) -> Estimate | None:
        """The same of the logarithms of their error rates."""
        return self._weigh(log_errors, terms)

    def _weigh(
        self,
        combine: Callable[[Sequence[tuple[float, np.ndarray, SeedNoise]]], Estimate],
        terms: Sequence[tuple[float, Any]],
    ) -> Estimate | None:
        names = [name for _, name in terms]
        if any(name not in self.right for name in names):
            return None
        return self._mark_cut_off(combine([(weight, *self._sample(name)) for weight, name in terms]), *names)

    def lost_skill(self, original: Any, changed: Any, chance: float) -> Estimate:
        """The share of what the original knows beyond chance that the changed variant does not."""
        estimate = lost_skill(self._sample(original), self._sample(changed), chance)
        return self._mark_cut_off(estimate, original, changed)

    def draws(self, names: Sequence[Any]) -> np.ndarray:
        """Accuracies (draws, variants) that other seeds and other test images might have given."""
        return draw_accuracies([self._sample(name) for name in names])

    def _sample(self, name: Any) -> tuple[np.ndarray, SeedNoise]:
        return self.right[name], self.noise_of(name)

    def _mark_cut_off(self, estimate: Estimate, *names: Any) -> Estimate:
        return estimate._replace(is_cut_off=not self.cut_off.isdisjoint(names))

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which all numbers lie."""
        return 0.0, 1.0


def cut_off(results: Results, groups: Mapping[Any, Sequence[Trial]]) -> set[Any]:
    """Variants for which the range of learning rates was too narrow."""
    return {name for name, trials in groups.items() if any(map(results.is_cut_off, trials))}


def mean_training_accuracies(results: Results, groups: Mapping[Any, Sequence[Trial]]) -> dict[Any, float]:
    """The mean accuracy of each variant on images that it was trained on, of those that were run."""
    accuracies = {}
    for name, trials in groups.items():
        values = [result["training_accuracy"] for trial in trials if (result := results.get(trial)) is not None]
        if values:
            accuracies[name] = sum(values) / len(values)
    return accuracies


def range_text(counts: Iterable[int]) -> str:
    """The smallest and the largest of some numbers: 2, or 2-3."""
    distinct = sorted(set(counts))
    return "-".join(map(str, dict.fromkeys((distinct[0], distinct[-1])))) if distinct else "0"


def points_text(value: float) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * value:+.1f}"


def percent_interval(estimate: Estimate) -> tuple[float, float]:
    """The ends of an interval in per cent, for a figure; a point where it is not known."""
    low, high = (estimate.value, estimate.value) if math.isnan(estimate.error) else estimate.interval()
    return 100 * low, 100 * high


def difference_text(estimate: Estimate) -> str:
    """The interval of a difference of shares, in percentage points."""
    low, high = percent_interval(estimate)
    return points_text(estimate.value) if low == high else f"{points_text(low / 100)} … {points_text(high / 100)}"


def interval_text(estimate: Estimate, upper: float = 100.0) -> str:
    """A share in per cent with its interval, where it is known; no end of it is below 0 or above `most`."""
    low, high = percent_interval(estimate)
    ends = f"({max(low, 0):.1f} … {min(high, upper):.1f})"
    return f"{estimate.value:.1%}" if low == high else f"{estimate.value:.1%} {ends}"
