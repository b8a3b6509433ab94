"""How well embeddings tell people apart: verification of pairs, identification, and their intervals.

A score is the cosine of two embeddings. A pair is genuine if both images show one person, and an impostor pair if they
show two. A threshold accepts the pairs whose score is at least as high:

FAR   false-accept rate: the share of impostor pairs that are accepted
TAR   true-accept rate: the share of genuine pairs that are accepted
EER   equal error rate: the least e for which a threshold has both FAR <= e and 1 - TAR <= e
DIR   detection and identification rate: the share of images of known people that are named right and accepted, at a
      threshold that accepts a share FAR of the images of unknown people

TAR can only change at the score of a genuine pair, so these scores are the only thresholds that matter, and impostor
pairs need only be counted: block by block, in bounded memory, and the result is exact.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from vitrail.core import rng
from vitrail.core.errors import UsageError
from vitrail.evaluation.metrics import mean_interval

FARS = (1e-1, 1e-2, 1e-3)
"""The false-accept rates of every report."""
SUPPORT = 10
"""A rate is supported if at least this many errors are expected at it: 1e-3 needs 10,000 impostor pairs."""
FOLDS, DRAWS, WORST = 10, 1000, 12
BINS = np.linspace(-1, 1, 51)
"""Edges of the histograms of scores."""

_BLOCK = 2**21  # pairs at a time
_TABLE = 2**23  # numbers of the bootstrap's table
_UNITS = 128  # most units that are resampled
_FEWEST = 3  # two units have one draw that is not one of them alone, and so an interval of width zero


class PairBlock(NamedTuple):
    """Some pairs of images."""

    one: np.ndarray
    """Indices of images (n)."""
    other: np.ndarray
    scores: np.ndarray
    """Float32 (n)."""


_NONE = PairBlock(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))

PairBlocks = Callable[[], Iterable[PairBlock]]
"""Yields all pairs, block by block, each time that it is called."""


class OperatingPoint(NamedTuple):
    """What a threshold does."""

    threshold: float
    tar: float
    far: float


class RocCurve(NamedTuple):
    """The receiver operating characteristic, exactly: at infinity, and then down the scores of genuine pairs."""

    thresholds: np.ndarray
    tar: np.ndarray
    far: np.ndarray
    genuine: int
    """Number of genuine pairs."""
    impostor: int

    def at_far(self, far: float) -> OperatingPoint:
        """The threshold with the highest TAR whose FAR is at most this."""
        return self._point(np.flatnonzero(self.far <= far)[-1])

    def at_equal_errors(self) -> tuple[float, OperatingPoint]:
        """The EER, and its threshold."""
        errors = np.maximum(self.far, 1 - self.tar)
        return float(errors.min()), self._point(errors.argmin())

    def supports(self, far: float) -> bool:
        """Whether there are enough impostor pairs to measure this rate."""
        return self.impostor * far >= SUPPORT * (1 - 1e-9)

    def _point(self, at: np.integer) -> OperatingPoint:
        return OperatingPoint(float(self.thresholds[at]), float(self.tar[at]), float(self.far[at]))


class Verification(NamedTuple):
    """Everything about the pairs of a data set."""

    curve: RocCurve
    draws: RocCurve | None
    """The same for each resampling of people: TAR and FAR are (draws, thresholds), at fewer thresholds. None without
    intervals."""
    units: int
    """How many people, or groups of them, are resampled."""
    histograms: tuple[np.ndarray, np.ndarray]
    """Numbers of genuine and of impostor pairs between BINS."""
    worst: tuple[PairBlock, PairBlock]
    """The genuine pairs that are least alike, and the impostor pairs that are most alike."""

    def report(self) -> dict[str, Any]:
        """EER, and TAR at each of FARS, with 95 % intervals; null where the data cannot support a rate or an
        interval."""
        eer, point = self.curve.at_equal_errors()
        errors = None if self.draws is None else np.maximum(self.draws.far, 1 - self.draws.tar).min(axis=1)
        rows: list[dict[str, Any]] = []
        for far in FARS:
            row: dict[str, Any] = {"far": far, "tar": None, "interval": None, "threshold": None}
            if self.curve.supports(far):
                found = self.curve.at_far(far)
                row |= {"tar": found.tar, "threshold": _finite(found.threshold)}
                if self.draws is not None:
                    row["interval"] = percentile_interval(
                        np.where(self.draws.far <= far, self.draws.tar, 0.0).max(axis=1)
                    )
            rows.append(row)
        return {
            "genuine": self.curve.genuine,
            "impostor": self.curve.impostor,
            "eer": eer,
            "eer_interval": None if errors is None else percentile_interval(errors),
            "eer_threshold": _finite(point.threshold),
            "tar": rows,
            "resampled": self.units,
        }


def _finite(threshold: float) -> float | None:
    """None for a threshold that nothing reaches: JSON has no infinity."""
    return threshold if np.isfinite(threshold) else None


def score_all_pairs(vectors_ND: np.ndarray) -> Iterator[PairBlock]:
    """Every pair of images once, in bounded memory."""
    count = len(vectors_ND)
    rows = max(_BLOCK // max(count, 1), 1)
    for start in range(0, count, rows):
        some, rest = vectors_ND[start : start + rows], vectors_ND[start:]
        one, other = np.nonzero(np.arange(len(some))[:, None] < np.arange(len(rest)))
        yield PairBlock(one + start, other + start, (some @ rest.T)[one, other])


def score_listed_pairs(vectors_ND: np.ndarray, one: np.ndarray, other: np.ndarray) -> Iterator[PairBlock]:
    """The pairs of a list."""
    for start in range(0, len(one), _BLOCK // 16):
        a, b = one[start : start + _BLOCK // 16], other[start : start + _BLOCK // 16]
        yield PairBlock(a, b, np.einsum("nd,nd->n", vectors_ND[a], vectors_ND[b]))


def verify_pairs(
    blocks: PairBlocks, people: np.ndarray, *, seed: int = 0, also: Sequence[float] = (), intervals: bool = True
) -> Verification:
    """Judge pairs of images, whose `people` (N) are numbers from 0. The curve has the thresholds `also`, too.

    Intervals come from resampling people, not pairs, because the pairs of a person are alike: a person drawn twice
    counts twice in genuine pairs, and every impostor pair as often as the product of both people. More than 128 people
    are resampled in 128 random groups. Without `intervals`, or with two people, all this is left out.
    """
    genuine, low = _genuine(blocks, people)
    if not len(genuine.scores):
        raise UsageError("Data must have a person with two images, got one image of each: nothing to verify.")
    known = np.union1d(genuine.scores, np.asarray(also, np.float32)).astype(np.float32)
    everybody = int(people.max()) + 1
    units = _Units.deal(everybody, len(known), seed) if intervals and everybody >= _FEWEST else _NO_UNITS
    impostors = _count_impostors(blocks, people, known, units)
    impostor = int(impostors.passed.sum())
    if not impostor:
        raise UsageError("Data must have two people at least, got one: nobody to tell apart.")
    count, refused = len(genuine.scores), np.searchsorted(np.sort(genuine.scores), known, side="left")
    curve = RocCurve(
        np.append(np.float32(np.inf), known[::-1]),
        np.append(0.0, (count - refused[::-1]) / count),
        np.append(0.0, impostors.passed[::-1].cumsum()[:-1] / impostor),
        count,
        impostor,
    )
    draws = None
    if units.count:
        tar, far = _bootstrap(genuine, people, known, units, impostors.table, seed)
        draws = RocCurve(known[units.kept][::-1], tar, far, count, impostor)
    histograms = (_histogram(genuine.scores), impostors.histogram)
    return Verification(curve, draws, units.count, histograms, (low, impostors.worst))


class _Units(NamedTuple):
    """What is resampled: people, or groups of them; at which thresholds."""

    count: int
    of: np.ndarray
    """The unit of each person."""
    kept: np.ndarray
    """Indices of thresholds: all of them, or so many, evenly spaced, that table and draws are of bounded size."""

    @classmethod
    def deal(cls, people: int, thresholds: int, seed: int) -> Self:
        count = min(people, _UNITS)
        most = _TABLE // max(count**2, DRAWS)  # for the table as for the draws
        spaced = np.linspace(0, thresholds - 1, min(thresholds, most)).round().astype(np.int64)
        return cls(count, rng.permutation(people, seed, stream="units of people") % count, np.unique(spaced))


_NO_UNITS = _Units(0, np.empty(0, np.int64), np.empty(0, np.int64))


class _Impostors(NamedTuple):
    """The impostor pairs, counted."""

    passed: np.ndarray
    """How many pass 0, 1, ... all thresholds."""
    table: np.ndarray
    """How many pairs of two units pass 0, 1, ... all kept thresholds (units, units, K + 1)."""
    histogram: np.ndarray
    worst: PairBlock


def _count_impostors(blocks: PairBlocks, people: np.ndarray, known: np.ndarray, units: _Units) -> _Impostors:
    width = len(units.kept) + 1
    counts, table = np.zeros(len(known) + 1, np.int64), np.zeros(units.count**2 * width, np.int64)
    histogram, worst = np.zeros(len(BINS) - 1, np.int64), _NONE
    for block in blocks():
        block = _take(block, people[block.one] != people[block.other])
        passed = np.searchsorted(known, block.scores, side="right")
        counts += np.bincount(passed, minlength=len(counts))
        if units.count:
            place = units.of[people[block.one]] * units.count + units.of[people[block.other]]
            passed_kept = np.searchsorted(units.kept, passed - 1, side="right")
            table += np.bincount(place * width + passed_kept, minlength=len(table))
        histogram += _histogram(block.scores)
        worst = _keep(_join(worst, block), sign=-1)
    return _Impostors(counts, table.reshape(units.count, units.count, width), histogram, worst)


def _bootstrap(
    genuine: PairBlock, people: np.ndarray, known: np.ndarray, units: _Units, table: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """TAR and FAR at the kept thresholds, from the highest, for each draw of units (draws, K)."""
    weights = _resample(units.count, seed)
    own = np.zeros((units.count, len(units.kept)))
    place = np.searchsorted(known[units.kept], genuine.scores, side="right") - 1
    np.add.at(own, (units.of[people[genuine.one]], place), 1.0)
    true = weights @ own[:, ::-1].cumsum(axis=1)
    false = _weigh(weights, table[..., ::-1].cumsum(axis=2))
    is_whole = (true[:, -1] > 0) & (false[:, -1] > 0)  # a draw of few people may have pairs of one kind alone
    true, false = true[is_whole], false[is_whole]
    return true / true[:, -1:], false[:, :-1] / false[:, -1:]


def _genuine(blocks: PairBlocks, people: np.ndarray) -> tuple[PairBlock, PairBlock]:
    """All genuine pairs, and the least alike of them."""
    parts = [_take(block, people[block.one] == people[block.other]) for block in blocks()]
    if not parts:
        raise UsageError("Pairs must be given, got none.")
    found = PairBlock(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return found, _keep(found, sign=1)


def _weigh(weights: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """The sum of tables (units, units, K), each times the weights (draws, units) of its two units: (draws, K)."""
    units, _, width = tables.shape
    tables, found = tables.astype(np.float32), []
    for some in np.array_split(weights.astype(np.float32), max(len(weights) // 50, 1)):
        half = (some @ tables.reshape(units, -1)).reshape(len(some), units, width)
        found.append(np.einsum("bu,buk->bk", some, half))
    return np.concatenate(found).astype(np.float64)


def _take(block: PairBlock, chosen: np.ndarray) -> PairBlock:
    return PairBlock(*(array[chosen] for array in block))


def _join(one: PairBlock, other: PairBlock) -> PairBlock:
    return PairBlock(*(np.concatenate(arrays) for arrays in zip(one, other, strict=True)))


def _keep(block: PairBlock, *, sign: int) -> PairBlock:
    """The WORST pairs with the lowest scores, or with the highest if the sign is negative, in order."""
    scores = sign * block.scores
    if len(scores) > WORST:
        block = _take(block, np.argpartition(scores, WORST - 1)[:WORST])
    return _take(block, np.argsort(sign * block.scores, kind="stable"))


def _histogram(scores: np.ndarray) -> np.ndarray:
    return np.histogram(np.clip(scores, -1, 1), BINS)[0]


def _resample(count: int, seed: int) -> np.ndarray:
    """How often each of `count` people is in each draw with replacement (draws, count)."""
    drawn = rng.integers(count, seed, np.arange(DRAWS)[:, None], np.arange(count), stream="bootstrap of people")
    return np.apply_along_axis(np.bincount, 1, drawn, minlength=count).astype(np.float64)


def percentile_interval(values: np.ndarray) -> list[float] | None:
    """The middle 95 % of resampled values; None where all are equal: draws of people without an error cannot tell how
    rare errors are."""
    low, high = np.quantile(values, (0.025, 0.975))
    return None if low == high else [float(low), float(high)]


def fold_accuracy(scores: np.ndarray, is_genuine: np.ndarray, folds: np.ndarray) -> dict[str, Any]:
    """Accuracy of each fold at the threshold that is best on all others: the mean of the share of genuine pairs that
    are accepted and the share of impostor pairs that are not, which is the plain accuracy where both are equally
    many."""
    found, thresholds = [], []
    for fold in np.unique(folds):
        inside = folds == fold
        thresholds.append(_best_threshold(scores[~inside], is_genuine[~inside]))
        right = (scores[inside] >= thresholds[-1]) == is_genuine[inside]
        parts = [right[is_genuine[inside]], right[~is_genuine[inside]]]
        found.append(float(np.mean([part.mean() for part in parts if len(part)])))
    around = mean_interval(found)
    return {
        "accuracy": float(np.mean(found)),
        "accuracy_std": float(np.std(found)),
        "accuracy_interval": None if around is None or around[0] == around[1] else np.clip(around, 0, 1).tolist(),
        "accuracy_folds": found,
        "accuracy_threshold": float(np.mean(thresholds)),
    }


def _best_threshold(scores: np.ndarray, is_genuine: np.ndarray) -> float:
    """The middle between the two scores where accuracy is best; of equally good places, the highest."""
    order = np.argsort(-scores, kind="stable")
    ranked, truth = scores[order].astype(np.float64), is_genuine[order]
    tar, far = (np.cumsum(some) / max(some.sum(), 1) for some in (truth, ~truth))
    last = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)  # of equal scores
    best = last[np.argmax(tar[last] - far[last])]
    return float((ranked[best] + ranked[min(best + 1, len(ranked) - 1)]) / 2)


def cross_validate_people(vectors_ND: np.ndarray, people: np.ndarray, *, seed: int = 0) -> dict[str, Any] | None:
    """`fold_accuracy` where people are dealt to ten folds (fewer for less than 20) and pairs are those within a fold;
    None for less than four people with two images."""
    several = np.flatnonzero(np.bincount(people) > 1)
    folds = min(FOLDS, len(several) // 2)
    if folds < 2:
        return None
    dealt = several[rng.permutation(len(several), seed, stream="folds of people")]
    scores, truth, numbers = [], [], []
    for fold in range(folds):
        members = np.flatnonzero(np.isin(people, dealt[fold::folds]))
        for block in score_all_pairs(vectors_ND[members]):
            scores.append(block.scores)
            truth.append(people[members[block.one]] == people[members[block.other]])
            numbers.append(np.full(len(block.scores), fold))
    return fold_accuracy(np.concatenate(scores), np.concatenate(truth), np.concatenate(numbers))


def mean_templates(vectors_ND: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The mean of each run of vectors, which begin at `starts`, as a unit vector: a person's template (P, D)."""
    if not len(starts):
        return np.empty((0, vectors_ND.shape[1]), np.float32)
    sums = np.add.reduceat(vectors_ND, starts, axis=0)
    sums /= np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return sums


class ProbeMatches(NamedTuple):
    """The best match of each probe in a gallery."""

    people: np.ndarray
    """Who the probe shows (n)."""
    scores: np.ndarray
    """Its score with the best match (n)."""
    is_right: np.ndarray
    """Whether that is the person it shows (n)."""


def _enrolled(people: np.ndarray) -> np.ndarray:
    """Whether each image is enrolled (N): the first half of each person's, at least one; the others are probes."""
    order = np.argsort(people, kind="stable")
    counts = np.bincount(people)
    place = np.arange(len(people)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.empty(len(people), bool)
    found[order] = place < np.maximum(counts // 2, 1)[people[order]]
    return found


def _search(vectors_ND: np.ndarray, people: np.ndarray, enrolled: np.ndarray, probes: np.ndarray) -> ProbeMatches:
    order = enrolled[np.argsort(people[enrolled], kind="stable")]
    names, starts = np.unique(people[order], return_index=True)
    gallery = mean_templates(vectors_ND[order], starts)
    best, scores = np.empty(len(probes), np.int64), np.empty(len(probes), np.float32)
    for start in range(0, len(probes), rows := max(_BLOCK // len(names), 1)):
        found = vectors_ND[probes[start : start + rows]] @ gallery.T
        best[start : start + rows] = found.argmax(axis=1)
        scores[start : start + rows] = found.max(axis=1)
    return ProbeMatches(people[probes], scores, names[best] == people[probes])


def measure_identification(vectors_ND: np.ndarray, people: np.ndarray, *, seed: int = 0) -> dict[str, Any]:
    """Rank-1 identification and, with half of the people unknown, DIR at each of FARS; 95 % intervals by resampling
    the people of the probes, null for less than three.

    The first half of each person's images is enrolled as one template, their mean; the other images are probes. For
    DIR, people are dealt to two halves; each is enrolled once while all images of the other are unknown, and both
    results are averaged.
    """
    enrolled = _enrolled(people)
    weights = _resample(int(people.max()) + 1, seed)
    probes = np.flatnonzero(~enrolled)
    result: dict[str, Any] = {"rank1": None, "rank1_interval": None, "probes": len(probes), "dir": []}
    if len(probes):
        answers = _search(vectors_ND, people, np.flatnonzero(enrolled), probes)
        counts, right = (np.bincount(answers.people, some, len(weights[0])) for some in (None, answers.is_right))
        shares = (weights @ right) / np.maximum(weights @ counts, 1)
        result["rank1"] = float(answers.is_right.mean())
        result["rank1_interval"] = percentile_interval(shares) if np.count_nonzero(counts) >= _FEWEST else None
    is_first = rng.permutation(int(people.max()) + 1, seed, stream="unknown people")[people] % 2 == 0
    halves = []
    for is_known in (is_first, ~is_first):
        gallery, own, others = (np.flatnonzero(some) for some in (is_known & enrolled, is_known & ~enrolled, ~is_known))
        if len(gallery) and len(own) and len(others):
            halves.append(tuple(_search(vectors_ND, people, gallery, some) for some in (own, others)))
    unknown = min((len(others.people) for _, others in halves), default=0)
    for far in FARS:
        row: dict[str, Any] = {"far": far, "dir": None, "interval": None}
        if len(halves) == 2 and unknown * far >= SUPPORT * (1 - 1e-9):
            # The first row counts everybody once. Some draws at a time: they are as wide as there are images.
            every = np.array_split(np.vstack([np.ones_like(weights[:1]), weights]), DRAWS // 50)
            rates = np.mean([np.concatenate([_dir(*half, far, some) for some in every]) for half in halves], axis=0)
            row |= {
                "dir": float(rates[0]),
                "interval": percentile_interval(rates[1:]) if len(weights[0]) >= _FEWEST else None,
            }
        result["dir"].append(row)
    return result | {"unknown": unknown}


def _dir(known: ProbeMatches, unknown: ProbeMatches, far: float, weights: np.ndarray) -> np.ndarray:
    """DIR for each row of weights of people (draws): the threshold is just above the highest score of an unknown
    person's image that would make one accepted too many."""
    order = np.argsort(-unknown.scores, kind="stable")
    heavy = weights[:, unknown.people[order]]
    accepted = heavy.cumsum(axis=1)
    too_many = accepted > far * accepted[:, -1:] + 1e-9
    least = unknown.scores[order][np.where(too_many.any(axis=1), too_many.argmax(axis=1), 0)]
    own = weights[:, known.people]
    right = known.is_right[None] & (known.scores[None] > least[:, None])
    return (own * right).sum(axis=1) / np.maximum(own.sum(axis=1), 1)


def verify_groups(
    blocks: PairBlocks, people: np.ndarray, group_of: Sequence[str | None], found: Verification, *, seed: int = 0
) -> list[dict[str, Any]]:
    """FAR and TAR of each group of people at the thresholds that all people together have at FARS, and its own EER.
    Pairs are those within the group; `group_of` names the group of each person, or None."""
    thresholds = [found.curve.at_far(far).threshold for far in FARS if found.curve.supports(far)]
    rows: list[dict[str, Any]] = []
    for group in sorted({name for name in group_of if name is not None}):
        inside = np.array([name == group for name in group_of])[people]
        row: dict[str, Any] = {"group": group, "people": len(np.unique(people[inside])), "images": int(inside.sum())}
        try:
            members = np.unique(people[inside])
            own = np.searchsorted(members[:-1], people)  # numbers from 0 within the group, and some of it for others
            one = verify_pairs(lambda inside=inside: _within(blocks, inside), own, seed=seed, also=thresholds)
        except UsageError:  # one person, or one image of each
            rows.append(row | {"genuine": 0, "impostor": 0, "eer": None, "eer_interval": None, "at": []})
            continue
        report, at = one.report(), []
        for far, threshold in zip(FARS, thresholds, strict=False):
            place = int(np.flatnonzero(one.curve.thresholds == np.float32(threshold))[0])
            rates = {"tar": float(one.curve.tar[place]), "group_far": float(one.curve.far[place])}
            at.append({"far": far, "threshold": _finite(threshold), **rates})
        rows.append(row | {key: report[key] for key in ("genuine", "impostor", "eer", "eer_interval")} | {"at": at})
    return rows


def _within(blocks: PairBlocks, inside: np.ndarray) -> Iterator[PairBlock]:
    return (_take(block, inside[block.one] & inside[block.other]) for block in blocks())
