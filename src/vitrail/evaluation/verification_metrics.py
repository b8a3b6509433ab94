"""Error rates of embeddings in verification: do two images show the same person?

A score is the cosine of two embeddings. A pair is genuine if both images show the same person, otherwise it is an
impostor pair. A threshold accepts the pairs whose score is at least the threshold.

FAR   false-accept rate: the share of impostor pairs that are accepted
TAR   true-accept rate: the share of genuine pairs that are accepted
EER   equal error rate: the least e for which a threshold has both FAR <= e and 1 - TAR <= e

TAR changes only at scores of genuine pairs, and no other threshold matters. Impostor pairs are therefore only counted
between these scores, block by block in bounded memory, and the result is exact.

Suffixes of shapes: N images, D features.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from vitrail.core import rng
from vitrail.core.errors import UsageError
from vitrail.evaluation.metrics import mean_interval

FARS = (1e-1, 1e-2, 1e-3)
"""False-accept rates in every report."""
SUPPORT = 10
"""Least expected number of errors at a reported rate. FAR 1e-3 needs 10,000 impostor pairs."""
FOLDS, DRAWS, WORST = 10, 1000, 12
BLOCK_PAIRS = 2**21
"""Pairs in a block."""
MIN_PEOPLE = 3
"""Fewest people for an interval. With two, every draw but one consists of a single person, and its width is zero."""
BINS = np.linspace(-1, 1, 51)
"""Edges of the histograms of scores."""

_TABLE = 2**23  # numbers in the table of the bootstrap
_UNITS = 128  # largest number of units that are resampled


class PairBlock(NamedTuple):
    """Pairs of images and their scores."""

    first: np.ndarray
    """Indices of the first images (n)."""
    second: np.ndarray
    """Indices of the second images (n)."""
    scores: np.ndarray
    """Float32 (n)."""


_EMPTY_BLOCK = PairBlock(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))

PairBlocks = Callable[[], Iterable[PairBlock]]
"""A function that yields all pairs in blocks. It is called several times."""


class OperatingPoint(NamedTuple):
    """Error rates at a threshold."""

    threshold: float
    tar: float
    far: float


class RocCurve(NamedTuple):
    """The exact receiver operating characteristic, at infinity and at all scores of genuine pairs in descending order.

    In a bootstrap, `tar` and `far` have a row for each draw.
    """

    thresholds: np.ndarray
    tar: np.ndarray
    far: np.ndarray
    genuine: int
    """Number of genuine pairs."""
    impostor: int
    """Number of impostor pairs."""

    def at_far(self, far: float) -> OperatingPoint:
        """Return the threshold with the highest TAR among those with at most this FAR."""
        return self._point(np.flatnonzero(self.far <= far)[-1])

    def at_equal_errors(self) -> tuple[float, OperatingPoint]:
        """Return the EER and its threshold."""
        errors = np.maximum(self.far, 1 - self.tar)
        return float(errors.min()), self._point(errors.argmin())

    def supports(self, far: float) -> bool:
        """Return whether there are enough impostor pairs to measure this rate."""
        return self.impostor * far >= SUPPORT * (1 - 1e-9)

    def _point(self, index: np.integer) -> OperatingPoint:
        return OperatingPoint(float(self.thresholds[index]), float(self.tar[index]), float(self.far[index]))


class Verification(NamedTuple):
    """Result of verifying all pairs of a data set."""

    curve: RocCurve
    draws: RocCurve | None
    """The curve of each bootstrap draw, (draws, thresholds), at fewer thresholds. None without intervals."""
    units: int
    """Number of people, or of groups of them, that are resampled."""
    histograms: tuple[np.ndarray, np.ndarray]
    """Numbers of genuine and of impostor pairs in BINS."""
    worst: tuple[PairBlock, PairBlock]
    """The genuine pairs with the lowest scores and the impostor pairs with the highest."""

    def report(self) -> dict[str, Any]:
        """Return the EER and the TAR at each of FARS, with 95 % intervals, as JSON.

        A rate or an interval that the data cannot support is None.
        """
        eer, point = self.curve.at_equal_errors()
        eer_draws = None if self.draws is None else np.maximum(self.draws.far, 1 - self.draws.tar).min(axis=1)
        rows: list[dict[str, Any]] = []
        for far in FARS:
            row: dict[str, Any] = {"far": far, "tar": None, "interval": None, "threshold": None}
            if self.curve.supports(far):
                at_far = self.curve.at_far(far)
                row |= {"tar": at_far.tar, "threshold": _finite_or_none(at_far.threshold)}
                if self.draws is not None:
                    tar_draws = np.where(self.draws.far <= far, self.draws.tar, 0.0).max(axis=1)
                    row["interval"] = percentile_interval(tar_draws)
            rows.append(row)
        return {
            "genuine": self.curve.genuine,
            "impostor": self.curve.impostor,
            "eer": eer,
            "eer_interval": None if eer_draws is None else percentile_interval(eer_draws),
            "eer_threshold": _finite_or_none(point.threshold),
            "tar": rows,
            "resampled": self.units,
        }


def _finite_or_none(threshold: float) -> float | None:
    """Replace infinity, which JSON does not have, by None."""
    return threshold if np.isfinite(threshold) else None


def score_all_pairs(vectors_ND: np.ndarray) -> Iterator[PairBlock]:
    """Yield every pair of images once, in blocks of bounded size. Vectors have length 1."""
    count = len(vectors_ND)
    rows = max(BLOCK_PAIRS // max(count, 1), 1)
    for start in range(0, count, rows):
        row_vectors, column_vectors = vectors_ND[start : start + rows], vectors_ND[start:]
        first, second = np.nonzero(np.arange(len(row_vectors))[:, None] < np.arange(len(column_vectors)))
        yield PairBlock(first + start, second + start, (row_vectors @ column_vectors.T)[first, second])


def score_listed_pairs(vectors_ND: np.ndarray, first: np.ndarray, second: np.ndarray) -> Iterator[PairBlock]:
    """Yield the pairs of a list in blocks of bounded size. Vectors have length 1."""
    for start in range(0, len(first), BLOCK_PAIRS // 16):
        block = slice(start, start + BLOCK_PAIRS // 16)
        scores = np.einsum("nd,nd->n", vectors_ND[first[block]], vectors_ND[second[block]])
        yield PairBlock(first[block], second[block], scores)


def verify_pairs(
    blocks: PairBlocks,
    people: np.ndarray,
    *,
    seed: int = 0,
    extra_thresholds: Sequence[float] = (),
    intervals: bool = True,
) -> Verification:
    """Compute the error rates of pairs of images. `people` (N) holds the person of each image, counted from 0.

    The thresholds of the curve are the scores of genuine pairs and `extra_thresholds`.

    Intervals come from resampling people instead of pairs, because pairs of one person are similar. A person who is
    drawn twice counts twice in genuine pairs. An impostor pair counts as often as the product of both people's counts.
    More than 128 people are resampled in 128 random groups. There are no intervals for two people or without
    `intervals`.

    Raises UsageError without genuine pairs or without impostor pairs.
    """
    genuine, lowest_genuine = _collect_genuine(blocks, people)
    if not len(genuine.scores):
        raise UsageError("Data must have a person with two images, got one image of each person.")
    thresholds = np.union1d(genuine.scores, np.asarray(extra_thresholds, np.float32)).astype(np.float32)
    person_count = int(people.max()) + 1
    has_intervals = intervals and person_count >= MIN_PEOPLE
    units = _ResamplingUnits.assign(person_count, len(thresholds), seed) if has_intervals else _NO_UNITS
    impostors = _count_impostors(blocks, people, thresholds, units)
    impostor_count = int(impostors.passed.sum())
    if not impostor_count:
        raise UsageError("Data must have at least two people, got one.")
    genuine_count = len(genuine.scores)
    rejected = np.searchsorted(np.sort(genuine.scores), thresholds, side="left")
    curve = RocCurve(
        np.append(np.float32(np.inf), thresholds[::-1]),
        np.append(0.0, (genuine_count - rejected[::-1]) / genuine_count),
        np.append(0.0, impostors.passed[::-1].cumsum()[:-1] / impostor_count),
        genuine_count,
        impostor_count,
    )
    draws = None
    if units.count:
        tar, far = _bootstrap(genuine, people, thresholds, units, impostors.table, seed)
        draws = RocCurve(thresholds[units.threshold_indices][::-1], tar, far, genuine_count, impostor_count)
    histograms = (_histogram(genuine.scores), impostors.histogram)
    return Verification(curve, draws, units.count, histograms, (lowest_genuine, impostors.worst))


class _ResamplingUnits(NamedTuple):
    """Units of the bootstrap, which are people or groups of people, and the thresholds that it uses."""

    count: int
    of_person: np.ndarray
    """Unit of each person."""
    threshold_indices: np.ndarray
    """Indices of the thresholds, evenly spaced if all of them would need too much memory."""

    @classmethod
    def assign(cls, people: int, thresholds: int, seed: int) -> Self:
        """Assign a number of people to at most 128 random units."""
        count = min(people, _UNITS)
        limit = _TABLE // max(count**2, DRAWS)  # bounds the table as well as the draws
        spaced = np.linspace(0, thresholds - 1, min(thresholds, limit)).round().astype(np.int64)
        return cls(count, rng.permutation(people, seed, stream="units of people") % count, np.unique(spaced))


_NO_UNITS = _ResamplingUnits(0, np.empty(0, np.int64), np.empty(0, np.int64))


class _ImpostorCounts(NamedTuple):
    """Counts of impostor pairs."""

    passed: np.ndarray
    """Number of pairs that pass 0, 1, ... all thresholds."""
    table: np.ndarray
    """Number of pairs of two units that pass 0, 1, ... all thresholds of the bootstrap, (units, units, K + 1)."""
    histogram: np.ndarray
    worst: PairBlock


def _count_impostors(
    blocks: PairBlocks, people: np.ndarray, thresholds: np.ndarray, units: _ResamplingUnits
) -> _ImpostorCounts:
    """Count the impostor pairs that pass each threshold, by block, because all pairs would not fit into memory."""
    width = len(units.threshold_indices) + 1
    counts, table = np.zeros(len(thresholds) + 1, np.int64), np.zeros(units.count**2 * width, np.int64)
    histogram, worst = np.zeros(len(BINS) - 1, np.int64), _EMPTY_BLOCK
    for block in blocks():
        impostors = _select(block, people[block.first] != people[block.second])
        passed = np.searchsorted(thresholds, impostors.scores, side="right")
        counts += np.bincount(passed, minlength=len(counts))
        if units.count:
            first, second = (units.of_person[people[images]] for images in (impostors.first, impostors.second))
            passed_used = np.searchsorted(units.threshold_indices, passed - 1, side="right")
            table += np.bincount((first * units.count + second) * width + passed_used, minlength=len(table))
        histogram += _histogram(impostors.scores)
        worst = _select_extreme(_concatenate(worst, impostors), sign=-1)
    return _ImpostorCounts(counts, table.reshape(units.count, units.count, width), histogram, worst)


def _bootstrap(
    genuine: PairBlock,
    people: np.ndarray,
    thresholds: np.ndarray,
    units: _ResamplingUnits,
    table: np.ndarray,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return TAR and FAR of each draw at its thresholds in descending order, (draws, K)."""
    weights = draw_weights(units.count, seed)
    genuine_table = np.zeros((units.count, len(units.threshold_indices)))
    passed = np.searchsorted(thresholds[units.threshold_indices], genuine.scores, side="right") - 1
    np.add.at(genuine_table, (units.of_person[people[genuine.first]], passed), 1.0)
    accepted_genuine = weights @ genuine_table[:, ::-1].cumsum(axis=1)
    accepted_impostor = _weight_tables(weights, table[..., ::-1].cumsum(axis=2))
    # A draw of few people may have genuine pairs only, or impostor pairs only.
    has_both = (accepted_genuine[:, -1] > 0) & (accepted_impostor[:, -1] > 0)
    accepted_genuine, accepted_impostor = accepted_genuine[has_both], accepted_impostor[has_both]
    return accepted_genuine / accepted_genuine[:, -1:], accepted_impostor[:, :-1] / accepted_impostor[:, -1:]


def _collect_genuine(blocks: PairBlocks, people: np.ndarray) -> tuple[PairBlock, PairBlock]:
    """Return all genuine pairs, and those with the lowest scores."""
    parts = [_select(block, people[block.first] == people[block.second]) for block in blocks()]
    if not parts:
        raise UsageError("Pairs must be given, got none.")
    genuine = _concatenate(*parts)
    return genuine, _select_extreme(genuine, sign=1)


def _weight_tables(weights: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Return the sum of tables (units, units, K), each times the weights (draws, units) of both units, (draws, K)."""
    units, _, width = tables.shape
    tables, sums = tables.astype(np.float32), []
    for batch in np.array_split(weights.astype(np.float32), max(len(weights) // 50, 1)):
        weighted_once = (batch @ tables.reshape(units, -1)).reshape(len(batch), units, width)
        sums.append(np.einsum("bu,buk->bk", batch, weighted_once))
    return np.concatenate(sums).astype(np.float64)


def _select(block: PairBlock, mask: np.ndarray) -> PairBlock:
    return PairBlock(*(array[mask] for array in block))


def _concatenate(*blocks: PairBlock) -> PairBlock:
    return PairBlock(*(np.concatenate(arrays) for arrays in zip(*blocks, strict=True)))


def _select_extreme(block: PairBlock, *, sign: int) -> PairBlock:
    """Return the WORST pairs with the lowest scores (sign 1) or the highest (sign -1), most extreme first."""
    scores = sign * block.scores
    if len(scores) > WORST:
        block = _select(block, np.argpartition(scores, WORST - 1)[:WORST])
    return _select(block, np.argsort(sign * block.scores, kind="stable"))


def _histogram(scores: np.ndarray) -> np.ndarray:
    return np.histogram(np.clip(scores, -1, 1), BINS)[0]


def draw_weights(count: int, seed: int) -> np.ndarray:
    """Return how often each of `count` people is in each bootstrap draw, (draws, count)."""
    drawn = rng.integers(count, seed, np.arange(DRAWS)[:, None], np.arange(count), stream="bootstrap of people")
    return np.apply_along_axis(np.bincount, 1, drawn, minlength=count).astype(np.float64)


def percentile_interval(values: np.ndarray) -> list[float] | None:
    """Return the middle 95 % of bootstrap values, or None if all are equal.

    Draws from people without an error cannot tell how rare errors are.
    """
    low, high = np.quantile(values, (0.025, 0.975))
    return None if low == high else [float(low), float(high)]


def fold_accuracy(scores: np.ndarray, is_genuine: np.ndarray, folds: np.ndarray) -> dict[str, Any]:
    """Return the accuracy of each fold at the threshold that is best on all other folds, as JSON.

    Accuracy is the mean of the share of accepted genuine pairs and the share of rejected impostor pairs. It equals
    plain accuracy if there are as many genuine as impostor pairs.
    """
    accuracies, thresholds = [], []
    for fold in np.unique(folds):
        inside = folds == fold
        thresholds.append(_best_threshold(scores[~inside], is_genuine[~inside]))
        right = (scores[inside] >= thresholds[-1]) == is_genuine[inside]
        shares = [part.mean() for part in (right[is_genuine[inside]], right[~is_genuine[inside]]) if len(part)]
        accuracies.append(float(np.mean(shares)))
    interval = mean_interval(accuracies)
    has_width = interval is not None and interval[0] != interval[1]
    return {
        "accuracy": float(np.mean(accuracies)),
        "accuracy_std": float(np.std(accuracies)),
        "accuracy_interval": np.clip(interval, 0, 1).tolist() if interval is not None and has_width else None,
        "accuracy_folds": accuracies,
        "accuracy_threshold": float(np.mean(thresholds)),
    }


def _best_threshold(scores: np.ndarray, is_genuine: np.ndarray) -> float:
    """Return the middle between the two scores where accuracy is best, the highest one if several are equally good."""
    order = np.argsort(-scores, kind="stable")
    ranked, truth = scores[order].astype(np.float64), is_genuine[order]
    tar, far = (np.cumsum(labels) / max(labels.sum(), 1) for labels in (truth, ~truth))
    last = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)  # last of equal scores
    best = last[np.argmax(tar[last] - far[last])]
    return float((ranked[best] + ranked[min(best + 1, len(ranked) - 1)]) / 2)


def cross_validate_people(vectors_ND: np.ndarray, people: np.ndarray, *, seed: int = 0) -> dict[str, Any] | None:
    """Return `fold_accuracy` over folds of people, with all pairs within a fold.

    There are ten folds, or fewer for less than 20 people with two images. None if less than four people have two.
    """
    with_pairs = np.flatnonzero(np.bincount(people) > 1)
    folds = min(FOLDS, len(with_pairs) // 2)
    if folds < 2:
        return None
    shuffled = with_pairs[rng.permutation(len(with_pairs), seed, stream="folds of people")]
    scores, truth, fold_numbers = [], [], []
    for fold in range(folds):
        members = np.flatnonzero(np.isin(people, shuffled[fold::folds]))
        for block in score_all_pairs(vectors_ND[members]):
            scores.append(block.scores)
            truth.append(people[members[block.first]] == people[members[block.second]])
            fold_numbers.append(np.full(len(block.scores), fold))
    return fold_accuracy(np.concatenate(scores), np.concatenate(truth), np.concatenate(fold_numbers))


def verify_groups(
    blocks: PairBlocks, people: np.ndarray, group_of: Sequence[str | None], total: Verification, *, seed: int = 0
) -> list[dict[str, Any]]:
    """Return FAR and TAR of each group of people at the thresholds of the `total`, and the group's own EER, as JSON.

    Only pairs within a group count. `group_of` holds the group of each person, or None.
    """
    threshold_at = {far: total.curve.at_far(far).threshold for far in FARS if total.curve.supports(far)}
    rows: list[dict[str, Any]] = []
    for group in sorted({name for name in group_of if name is not None}):
        inside = np.array([name == group for name in group_of])[people]
        members = np.unique(people[inside])
        row: dict[str, Any] = {"group": group, "people": len(members), "images": int(inside.sum())}
        try:
            # Number the members from 0. Other people get an arbitrary number, as their pairs are left out. Without the
            # last member in the search, every number is below len(members).
            member_of = np.searchsorted(members[:-1], people)
            verification = verify_pairs(
                lambda inside=inside: _pairs_within(blocks, inside),
                member_of,
                seed=seed,
                extra_thresholds=[*threshold_at.values()],
            )
        except UsageError:  # one person, or one image of each
            rows.append(row | {"genuine": 0, "impostor": 0, "eer": None, "eer_interval": None, "at": []})
            continue
        report, rates_at = verification.report(), []
        for far, threshold in threshold_at.items():
            index = int(np.flatnonzero(verification.curve.thresholds == np.float32(threshold))[0])
            rates = {"tar": float(verification.curve.tar[index]), "group_far": float(verification.curve.far[index])}
            rates_at.append({"far": far, "threshold": _finite_or_none(threshold), **rates})
        own = {key: report[key] for key in ("genuine", "impostor", "eer", "eer_interval")}
        rows.append(row | own | {"at": rates_at})
    return rows


def _pairs_within(blocks: PairBlocks, inside: np.ndarray) -> Iterator[PairBlock]:
    return (_select(block, inside[block.first] & inside[block.second]) for block in blocks())
