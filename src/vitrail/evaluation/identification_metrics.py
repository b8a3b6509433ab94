"""Error rates of embeddings in identification: which person of a gallery does an image show?

rank-1  share of images whose best match is the right person
DIR     detection and identification rate: the share of images of enrolled people that are identified correctly and
        accepted, at a threshold that accepts a share FAR of the images of people who are not enrolled

Suffixes of shapes: N images, D features, P people.
"""

from typing import Any, NamedTuple

import numpy as np

from vitrail.core import rng
from vitrail.evaluation.verification_metrics import (
    BLOCK_PAIRS,
    DRAWS,
    FARS,
    MIN_PEOPLE,
    SUPPORT,
    draw_weights,
    percentile_interval,
)


def mean_templates(vectors_ND: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the template of each person, (P, D): the mean of the person's vectors, scaled to length 1.

    Vectors are sorted by person. `starts` (P) holds the index of each person's first vector.
    """
    if not len(starts):
        return np.empty((0, vectors_ND.shape[1]), np.float32)
    sums = np.add.reduceat(vectors_ND, starts, axis=0)
    sums /= np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return sums


class ProbeMatches(NamedTuple):
    """Best match of each probe in a gallery."""

    people: np.ndarray
    """Person that the probe shows (n)."""
    scores: np.ndarray
    """Score with the best match (n)."""
    is_right: np.ndarray
    """Whether the best match is the person that the probe shows (n)."""


def _choose_enrolled(people: np.ndarray) -> np.ndarray:
    """Return whether each image is enrolled (N): the first half of each person's images, at least one."""
    order = np.argsort(people, kind="stable")
    counts = np.bincount(people)
    rank = np.arange(len(people)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_enrolled = np.empty(len(people), bool)
    is_enrolled[order] = rank < np.maximum(counts // 2, 1)[people[order]]
    return is_enrolled


def _match_probes(vectors_ND: np.ndarray, people: np.ndarray, enrolled: np.ndarray, probes: np.ndarray) -> ProbeMatches:
    """Find the best match of the images `probes` in a gallery of the images `enrolled`."""
    order = enrolled[np.argsort(people[enrolled], kind="stable")]
    gallery_people, starts = np.unique(people[order], return_index=True)
    gallery = mean_templates(vectors_ND[order], starts)
    best, best_scores = np.empty(len(probes), np.int64), np.empty(len(probes), np.float32)
    for start in range(0, len(probes), rows := max(BLOCK_PAIRS // len(gallery_people), 1)):
        scores = vectors_ND[probes[start : start + rows]] @ gallery.T
        best[start : start + rows] = scores.argmax(axis=1)
        best_scores[start : start + rows] = scores.max(axis=1)
    return ProbeMatches(people[probes], best_scores, gallery_people[best] == people[probes])


def measure_identification(vectors_ND: np.ndarray, people: np.ndarray, *, seed: int = 0) -> dict[str, Any]:
    """Return rank-1 identification, and DIR at each of FARS with half of the people not enrolled, as JSON.

    The first half of each person's images is enrolled as one template, their mean. The other images are probes. For
    DIR, people are divided into two random halves. Each half is enrolled once while all images of the other half are
    unknown, and both results are averaged. 95 % intervals come from resampling the people of the probes. They are None
    for less than three people.
    """
    is_enrolled = _choose_enrolled(people)
    weights = draw_weights(int(people.max()) + 1, seed)
    probes = np.flatnonzero(~is_enrolled)
    report: dict[str, Any] = {"rank1": None, "rank1_interval": None, "probes": len(probes), "dir": []}
    if len(probes):
        matches = _match_probes(vectors_ND, people, np.flatnonzero(is_enrolled), probes)
        counts = np.bincount(matches.people, minlength=len(weights[0]))
        right = np.bincount(matches.people, matches.is_right, len(weights[0]))
        shares = (weights @ right) / np.maximum(weights @ counts, 1)
        report["rank1"] = float(matches.is_right.mean())
        report["rank1_interval"] = percentile_interval(shares) if np.count_nonzero(counts) >= MIN_PEOPLE else None
    in_first_half = rng.permutation(int(people.max()) + 1, seed, stream="unknown people")[people] % 2 == 0
    halves = []
    for in_gallery in (in_first_half, ~in_first_half):
        enrolled, own_probes = np.flatnonzero(in_gallery & is_enrolled), np.flatnonzero(in_gallery & ~is_enrolled)
        unknown_probes = np.flatnonzero(~in_gallery)
        if len(enrolled) and len(own_probes) and len(unknown_probes):
            own, unknown = (_match_probes(vectors_ND, people, enrolled, half) for half in (own_probes, unknown_probes))
            halves.append((own, unknown))
    unknown_count = min((len(unknown.people) for _, unknown in halves), default=0)
    for far in FARS:
        row: dict[str, Any] = {"far": far, "dir": None, "interval": None}
        if len(halves) == 2 and unknown_count * far >= SUPPORT * (1 - 1e-9):
            # The first row counts each person once. A batch of draws is as wide as there are images.
            batches = np.array_split(np.vstack([np.ones_like(weights[:1]), weights]), DRAWS // 50)
            rates = np.mean(
                [np.concatenate([_identification_rate(*half, far, batch) for batch in batches]) for half in halves],
                axis=0,
            )
            interval = percentile_interval(rates[1:]) if len(weights[0]) >= MIN_PEOPLE else None
            row |= {"dir": float(rates[0]), "interval": interval}
        report["dir"].append(row)
    return report | {"unknown": unknown_count}


def _identification_rate(own: ProbeMatches, unknown: ProbeMatches, far: float, weights: np.ndarray) -> np.ndarray:
    """Return the DIR for each row of weights of people (draws).

    The threshold is the highest score of an unknown person's image whose acceptance would exceed the FAR. Only scores
    above it are accepted.
    """
    order = np.argsort(-unknown.scores, kind="stable")
    accepted = weights[:, unknown.people[order]].cumsum(axis=1)
    too_many = accepted > far * accepted[:, -1:] + 1e-9
    threshold = unknown.scores[order][np.where(too_many.any(axis=1), too_many.argmax(axis=1), 0)]
    own_weights = weights[:, own.people]
    right = own.is_right[None] & (own.scores[None] > threshold[:, None])
    return (own_weights * right).sum(axis=1) / np.maximum(own_weights.sum(axis=1), 1)
