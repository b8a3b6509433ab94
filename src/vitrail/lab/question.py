"""Base class of the lab's questions. A question lists trials, reads their results, and gives verdicts on claims.

Each question has its own module, a TOML file of the same name with its messages, and one line in `QUESTIONS` (in
another package, an entry point `question.NAME`).
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from vitrail.core.html import Html
from vitrail.core.message_files import Messages
from vitrail.lab.images import Images
from vitrail.lab.statistics import (
    Estimate,
    Training,
    accuracy,
    contrast,
    draw_accuracies,
    log_error_range,
    log_errors,
    lost_skill,
    sum_ranges,
    within_margin,
)
from vitrail.lab.training import training_trial
from vitrail.lab.trial import Trial, unpack
from vitrail.lab.trial_results import Results
from vitrail.reports.families import COLOURS as COLOURS
from vitrail.reports.translations import translate

State = Literal["true", "false", "supported", "contradicted", "cannot tell", "not run", "reported"]

FIRST_SEEDS = 3
"""Number of seeds in the first rounds of a question. Later rounds add the others."""

_MAX_DEFAULT_SIZE = 10_000


@dataclasses.dataclass(frozen=True)
class Lab:
    """Settings of a lab that its questions share."""

    images: Images
    families: tuple[str, ...]
    sizes: tuple[int, ...]
    """Numbers of training images, ascending."""
    seeds: int
    seen: int
    """Training images seen by every model, with repetition."""

    @property
    def default_size(self) -> int:
        """Number of training images for comparisons at one size: the largest up to 10,000."""
        return max((count for count in self.sizes if count <= _MAX_DEFAULT_SIZE), default=self.sizes[0])

    def train(self, family: str, *, count: int, seed: int, **settings: Any) -> Trial:
        """Return a trial that trains a model of a family by the lab's protocol, with settings of `training_trial`."""
        settings.setdefault("seen", self.seen)
        return training_trial(self.images, family, count=count, seed=seed, **settings)

    def selected(self, names: Iterable[str]) -> list[str]:
        """Return the families that this lab compares, out of `names`."""
        return [name for name in names if name in self.families]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome for a claim. `estimate` is the deciding quantity, above zero if the claim is right."""

    claim: str
    kind: Literal["exact", "trained", "reported"]
    estimate: Estimate | None = None
    holds: bool | None = None
    """For an exact claim, whether it is true. None if it was not checked."""
    margin: float | None = None
    """For a claim of equality, the largest difference that counts as equal. Two one-sided tests (TOST) decide.

    Supported if the interval of the difference lies within the margin, whether or not it includes zero. Contradicted if
    it lies beyond the margin.
    """
    is_share: bool = True
    """Whether the estimate is a difference of shares, shown in percentage points, or a plain number."""
    is_one_sided: bool = False
    """One-sided claim: it may hold outside the measured range, so it can be supported but not contradicted."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Values of the placeholders of its result message. If empty, only the number is shown."""
    message: str = "result"
    """Name of the result message: `CLAIM-MESSAGE` in the question's messages."""

    @property
    def deciding(self) -> Estimate | None:
        """The estimate that must be above zero.

        For a claim of equality, it is the distance from the nearer end of the margin, the harder of the two one-sided
        tests.
        """
        if self.estimate is None or math.isnan(self.estimate.error):
            return None
        if self.margin is None:
            return self.estimate
        return within_margin(self.estimate, self.margin)

    def state(self, level: float) -> State:
        """Return the verdict at the level given by Holm's correction. Not run: trials that it needs are missing."""
        if self.kind == "reported":
            return "reported" if self.fields else "not run"
        if self.kind == "exact":
            return "not run" if self.holds is None else ("true" if self.holds else "false")
        if self.estimate is None:
            return "not run"
        if self.deciding is None or self.doubt is not None:
            return "cannot tell"
        low, high = self.deciding.interval(level)
        if low > 0:
            return "supported"
        return "contradicted" if high < 0 and not self.is_one_sided else "cannot tell"

    @property
    def doubt(self) -> Literal["rate-dependent", "cut-off"] | None:
        """Reason not to decide even if the interval excludes zero.

        `rate-dependent`: other learning rates that may be the best ones would change the sign. `cut-off`: the best
        learning rate of a model may lie outside the range that was tried.
        """
        if self.deciding is None:
            return None
        if self.deciding.is_cut_off:
            return "cut-off"
        return "rate-dependent" if self.deciding.depends_on_rates else None


class Score(NamedTuple):
    """Strength of a bias in a family, from 0 (none) to 1 (the most that the measure can show)."""

    bias: str
    """Name of the bias. Its messages are `score-BIAS` and `score-BIAS-note`."""
    family: str
    trained: Estimate
    untrained: Estimate | None = None
    """Score before training, where that is meaningful."""


class Question:
    """Base class of questions. Every method has an empty default."""

    messages: ClassVar[Messages] = {}
    """Messages: `title`, `about`, and for each claim `C1` (its statement) and `C1-rule` (how it is decided)."""
    claims: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, lab: Lab) -> None:
        self.name, self.lab = name, lab

    def rounds(self) -> Sequence[Sequence[Trial]]:
        """Return rounds of trials, the most informative first. A round may need the rounds before it."""
        return ()

    def is_needed(self, trial: Trial, results: Results) -> bool | None:
        """Return whether the results so far call for a trial of a round. None while that is not known.

        It may depend on the results that choose learning rates. A plan counts all trials that may be needed.
        """
        return True

    def read(self, results: Results) -> None:
        """Read the results. Trials may be missing."""

    def verdicts(self) -> Iterator[Verdict]:
        """Yield a verdict for each claim."""
        yield from ()

    def scores(self) -> Iterator[Score]:
        """Yield the scores of each family."""
        yield from ()

    def figures(self) -> Iterator[tuple[str, str]]:
        """Yield figures as (file name, SVG)."""
        yield from ()

    def html(self, figures: dict[str, str]) -> str:
        """Return the section of the report below its heading."""
        return ""

    def numbers(self) -> dict[str, Any]:
        """Return numbers for `claims.json`."""
        return {}

    # Helpers for subclasses

    def t(self, name: str, tag: str = "span", **fields: Any) -> Html:
        """Return a message in both languages."""
        return translate(name, tag, messages=self.messages, **fields)


class Accuracies:
    """Correct predictions of variants under several seeds on the same test images."""

    def __init__(self, results: Results, groups: Mapping[Any, Sequence[Trial]]) -> None:
        self._by_seed: dict[Any, dict[int, np.ndarray]] = {}
        """Correctness (images) by variant and index of the trial. Equal indices of variants have the same seed."""
        for name, trials in groups.items():
            outcomes = enumerate(map(results.get, trials))
            finished = {index: self._read(result) for index, result in outcomes if result is not None}
            if finished:
                self._by_seed[name] = finished
        self.cut_off = find_cut_off(results, groups)
        self.trainings = find_trainings(results, groups)
        self._plausible = {
            name: {rate: np.stack(list(map(self._read, finished))) for rate, finished in by_rate.items()}
            for name, trials in groups.items()
            if trials and (by_rate := results.plausible_rates(trials[0]))
        }
        """Test correctness (seeds, images) of each learning rate that may be the best, the chosen rate first."""

    def _read(self, result: dict[str, Any]) -> np.ndarray:
        """Return the correctness (images) in the result of a trial."""
        return unpack(result["right"], result["count"])

    @functools.cached_property
    def right(self) -> dict[Any, np.ndarray]:
        """Correctness (seeds, images) of each variant that was run."""
        return {name: np.stack(list(by_seed.values())) for name, by_seed in self._by_seed.items()}

    def _aligned(self, names: Sequence[Any]) -> list[np.ndarray] | None:
        """Return the correctness of variants under the seeds that all of them were run with. None without any."""
        if any(name not in self._by_seed for name in names):
            return None
        shared = [index for index in self._by_seed[names[0]] if all(index in self._by_seed[name] for name in names)]
        return [np.stack([self._by_seed[name][index] for index in shared]) for name in names] if shared else None

    def by_part(self, parts: Mapping[Any, np.ndarray]) -> "Accuracies":
        """Return accuracies on parts of the test images, named (variant, part)."""
        part_accuracies = copy.copy(self)
        part_accuracies.__dict__.pop("right", None)
        part_accuracies._by_seed = {
            (name, part): {index: right[is_in_part] for index, right in by_seed.items()}
            for name, by_seed in self._by_seed.items()
            for part, is_in_part in parts.items()
        }
        part_accuracies._plausible = {
            (name, part): {rate: right[:, is_in_part] for rate, right in by_rate.items()}
            for name, by_rate in self._plausible.items()
            for part, is_in_part in parts.items()
        }
        part_accuracies.cut_off = {key for key in part_accuracies._by_seed if key[0] in self.cut_off}
        part_accuracies.trainings = {key: self.trainings[key[0]] for key in part_accuracies._by_seed}
        return part_accuracies

    def __contains__(self, name: Any) -> bool:
        return name in self._by_seed

    @property
    def seeds(self) -> str:
        """Number of seeds per variant as text: 2, or 2-3."""
        return range_text(map(len, self._by_seed.values()))

    def estimate(self, name: Any) -> Estimate:
        """Return the accuracy of a variant."""
        estimate = accuracy(self.right[name])
        return self._mark_rates(estimate._replace(bounds=self.bounds), [name], self.rate_range(name))

    def difference(self, first: Any, second: Any) -> Estimate | None:
        """Return the difference of two variants on the same images. None if either was not run."""
        return self.contrast((1.0, first), (-1.0, second))

    def contrast(self, *terms: tuple[float, Any]) -> Estimate | None:
        """Return a weighted sum of accuracies on the same images. None if a variant was not run."""
        names = [name for _, name in terms]
        if (rights := self._aligned(names)) is None:
            return None
        estimate = contrast([(weight, right) for (weight, _), right in zip(terms, rights, strict=True)])
        return self._mark_rates(
            estimate, names, sum_ranges([(weight, self.rate_range(name)) for weight, name in terms])
        )

    def log_errors(self, *terms: tuple[float, Any]) -> Estimate | None:
        """Return a weighted sum of log error rates on the same images. None if a variant was not run."""
        names = [name for _, name in terms]
        if (rights := self._aligned(names)) is None:
            return None
        estimate = log_errors([(weight, right) for (weight, _), right in zip(terms, rights, strict=True)])
        ranges = [(weight, log_error_range(*self.rate_range(name))) for weight, name in terms]
        return self._mark_rates(estimate, names, sum_ranges(ranges))

    def lost_skill(self, original: Any, changed: Any, chance: float) -> Estimate | None:
        """Return the share of the original's accuracy above chance that the changed variant loses.

        None if either was not run.
        """
        if (rights := self._aligned((original, changed))) is None:
            return None
        (before_low, before_high), (after_low, after_high) = self.rate_range(original), self.rate_range(changed)
        skills = [max(value - chance, 1e-6) for value in (before_low, before_high)]
        rates = 1 - (after_high - chance) / skills[0], 1 - (after_low - chance) / skills[1]
        return self._mark_rates(lost_skill(*rights, chance), [original, changed], rates)

    def draws(self, names: Sequence[Any]) -> np.ndarray:
        """Draw accuracies (draws, variants) as other seeds and other test images would give them."""
        return draw_accuracies([self.right[name] for name in names])

    def rate_range(self, name: Any) -> tuple[float, float]:
        """Return the smallest and the largest accuracy of a variant over the learning rates that may be the best.

        The seeds of the choice give the difference of each rate from the chosen one.
        """
        value = float(self.right[name].mean())
        shares = [float(right.mean()) for right in self._plausible.get(name, {}).values()] or [0.0]
        return value + min(shares) - shares[0], value + max(shares) - shares[0]

    def _mark_rates(self, estimate: Estimate, names: Sequence[Any], rates: tuple[float, float]) -> Estimate:
        has_rates = any(self._plausible.get(name) for name in names)
        return estimate._replace(
            is_cut_off=not self.cut_off.isdisjoint(names),
            rates=rates if has_rates else None,
            trainings=frozenset(self.trainings[name] for name in names),
        )

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest possible value."""
        return 0.0, 1.0


def find_cut_off(results: Results, groups: Mapping[Any, Sequence[Trial]]) -> set[Any]:
    """Return the variants whose best learning rate may lie outside the range that was tried."""
    return {name for name, trials in groups.items() if any(map(results.is_cut_off, trials))}


def find_trainings(results: Results, groups: Mapping[Any, Sequence[Trial]]) -> dict[Any, Training]:
    """Return what one more seed of each variant that was run would cost."""
    trainings = {}
    for name, trials in groups.items():
        finished = [trial for trial in trials if results.get(trial) is not None]
        if finished:
            seconds = [value for trial in finished if (value := results.seconds(trial)) is not None]
            mean = sum(seconds) / len(seconds) if seconds else math.nan
            trainings[name] = Training(trials[0].trial_id(""), len(finished), mean)
    return trainings


def mean_training_accuracies(results: Results, groups: Mapping[Any, Sequence[Trial]]) -> dict[Any, float]:
    """Return the mean accuracy on training images of each variant that was run."""
    accuracies = {}
    for name, trials in groups.items():
        values = [result["training_accuracy"] for trial in trials if (result := results.get(trial)) is not None]
        if values:
            accuracies[name] = sum(values) / len(values)
    return accuracies


def range_text(counts: Iterable[int]) -> str:
    """Return the range of numbers as text: 2, or 2-3."""
    distinct = sorted(set(counts))
    return "-".join(map(str, dict.fromkeys((distinct[0], distinct[-1])))) if distinct else "0"


def points_text(value: float) -> str:
    """Format a difference of shares in percentage points."""
    return f"{100 * value:+.1f}"


def percent_interval(estimate: Estimate) -> tuple[float, float]:
    """Return the interval in per cent for a figure. Both ends are the value if the error is unknown."""
    low, high = (estimate.value, estimate.value) if math.isnan(estimate.error) else estimate.interval()
    return 100 * low, 100 * high


def difference_text(estimate: Estimate) -> str:
    """Format the interval of a difference of shares in percentage points."""
    low, high = percent_interval(estimate)
    return points_text(estimate.value) if low == high else f"{points_text(low / 100)} … {points_text(high / 100)}"


def interval_text(estimate: Estimate, upper: float = 100.0) -> str:
    """Format a share in per cent with its interval, if known, clipped to 0 and `upper`."""
    low, high = percent_interval(estimate)
    ends = f"({max(low, 0):.1f} … {min(high, upper):.1f})"
    return f"{estimate.value:.1%}" if low == high else f"{estimate.value:.1%} {ends}"
