"""Learners of the data question that are not models of the lab: floors on raw pixels, Bayesian updating, and XOR."""

import functools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.core.optional import import_extra
from vitrail.data.dataset import Split
from vitrail.lab.exact import DIFFERENT, EQUAL
from vitrail.lab.images import Images
from vitrail.lab.question import Lab, Verdict
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results

CLASSICAL_LEARNERS = ("neighbours", "linear", "tree", "bayes")
_MAX_IMAGES = 3000  # with more, trees and neighbours on raw pixels are slower than the models
_SAMPLE = 2000  # test images on which the Bayesian learner is evaluated after each number of updates
_BACKGROUNDS = 200  # images into which the patterns of XOR are drawn


class ClassicalLearners:
    """Trials of classical learners with their verdicts: C8, C44 and C45."""

    def __init__(self, lab: Lab) -> None:
        self.sizes = [count for count in lab.sizes if count <= _MAX_IMAGES] or list(lab.sizes[:1])
        self.accuracies: dict[tuple[str, int], float] = {}
        self.updates: dict[str, Any] | None = None
        self.patterns: dict[str, Any] | None = None

    @functools.cached_property
    def floors(self) -> dict[tuple[str, int], Trial]:
        """Trials of learners on raw pixels, by learner and number of images."""
        return {
            (name, count): Trial("vitrail.lab.questions.data:floor", {"learner": name, "count": count}, work=5e9)
            for name in CLASSICAL_LEARNERS
            for count in self.sizes
        }

    @functools.cached_property
    def _updating(self) -> Trial:
        settings = {"count": self.sizes[-1]}
        return Trial("vitrail.lab.questions.data_classical:update_posterior", settings, work=1e10)

    @functools.cached_property
    def _xor(self) -> Trial:
        return Trial("vitrail.lab.questions.data_classical:learn_xor", {"count": _BACKGROUNDS}, work=5e9)

    @property
    def trials(self) -> list[Trial]:
        """All trials. None of them trains a model of the lab."""
        return [*self.floors.values(), self._updating, self._xor]

    def read(self, results: Results) -> None:
        """Read the results. Trials may be missing."""
        outcomes = {key: results.get(trial) for key, trial in self.floors.items()}
        self.accuracies = {key: result["accuracy"] for key, result in outcomes.items() if result is not None}
        self.updates = results.get(self._updating)
        self.patterns = results.get(self._xor)

    def fields(self) -> dict[str, str]:
        """Return the accuracies of the learners on raw pixels at their largest size, formatted."""
        largest = max((count for _, count in self.accuracies), default=0)
        shares = {name: self.accuracies.get((name, largest)) for name in CLASSICAL_LEARNERS}
        texts = {name: "-" if share is None else f"{share:.1%}" for name, share in shares.items()}
        return texts | {"count": f"{largest:,}"} if self.accuracies else {}

    def update_curves(self) -> Iterator[tuple[str, list[int], list[float]]]:
        """Yield the accuracy of the Bayesian learner as (name, numbers of images, per cent)."""
        if self.updates is not None:
            for name in ("sequential", "refit"):
                yield name, self.updates["counts"], [100 * share for share in self.updates[name]]

    def verdicts(self) -> Iterator[Verdict]:
        """Yield the verdicts on what classical learners assume."""
        yield Verdict("C8", "reported", fields=self.fields())
        if self.updates is None:
            yield Verdict("C44", "exact")
        else:
            holds = self.updates["bayes"] < EQUAL and self.updates["gradient"] > DIFFERENT
            fields = {name: f"{self.updates[name]:.1g}" for name in ("bayes", "gradient")}
            yield Verdict("C44", "exact", holds=holds, fields=fields)
        if self.patterns is None:
            yield Verdict("C45", "exact")
        else:
            fields = {name: f"{self.patterns[name]:.1%}" for name in ("linear", "mlp", "conjunction")}
            yield Verdict("C45", "exact", holds=self.patterns["difference"] == 0, fields=fields)


class Posterior(NamedTuple):
    """Posterior of a naive Bayes classifier with a normal distribution of unknown mean and variance per pixel.

    The conjugate prior is a normal-inverse-gamma distribution for each class and pixel, and a uniform Dirichlet
    distribution for the frequencies of the classes. C classes, P pixels.
    """

    strength_C: np.ndarray
    """Number of images that the mean stands for, the prior included."""
    shape_C: np.ndarray
    mean_CP: np.ndarray
    scale_CP: np.ndarray

    @classmethod
    def prior(cls, classes: int, pixels: int) -> "Posterior":
        """Return the prior: a mean around 0.5 and a variance around 0.1, worth one image."""
        ones, shape = np.ones(classes), (classes, pixels)
        return cls(ones, ones.copy(), np.full(shape, 0.5), np.full(shape, 0.1))

    def update(self, pixels_P: np.ndarray, label: int) -> None:
        """Update with one image, in place. The previous posterior is the prior of the image."""
        strength = self.strength_C[label]
        deviation_P = pixels_P - self.mean_CP[label]
        self.scale_CP[label] += strength * np.square(deviation_P) / (2 * (strength + 1))
        self.mean_CP[label] += deviation_P / (strength + 1)
        self.strength_C[label] += 1
        self.shape_C[label] += 0.5

    def refit(self, pixels_NP: np.ndarray, labels_N: np.ndarray) -> "Posterior":
        """Return the posterior of all images at once with this one as the prior."""
        posterior = Posterior(*(array.copy() for array in self))
        for label in np.unique(labels_N):
            class_pixels_NP = pixels_NP[labels_N == label]
            count, mean_P = len(class_pixels_NP), class_pixels_NP.mean(axis=0)
            prior_strength, prior_mean_P = self.strength_C[label], self.mean_CP[label]
            strength = prior_strength + count
            within_P = np.square(class_pixels_NP - mean_P).sum(axis=0)
            between_P = prior_strength * count * np.square(mean_P - prior_mean_P) / strength
            posterior.mean_CP[label] = (prior_strength * prior_mean_P + count * mean_P) / strength
            posterior.scale_CP[label] += (within_P + between_P) / 2
            posterior.strength_C[label], posterior.shape_C[label] = strength, self.shape_C[label] + count / 2
        return posterior

    def log_joint(self, pixels_NP: np.ndarray) -> np.ndarray:
        """Return the log of the predictive probability of images with each class, up to a constant (N, C).

        A pixel has a Student distribution, because its mean and variance are uncertain.
        """
        columns = []
        for strength, shape, mean_P, scale_P in zip(*self, strict=True):
            spread_P = 2 * scale_P * (strength + 1) / strength  # squared scale times the degrees of freedom
            constant = math.lgamma(shape + 0.5) - math.lgamma(shape)
            log_likelihood_N = -(shape + 0.5) * np.log1p(np.square(pixels_NP - mean_P) / spread_P).sum(axis=1)
            columns.append(
                math.log(strength) + len(mean_P) * constant - 0.5 * np.log(spread_P).sum() + log_likelihood_N
            )
        return np.stack(columns, axis=1)

    def difference(self, other: "Posterior") -> float:
        """Return the largest difference of two posteriors relative to the values."""
        return max(float((np.abs(a - b) / np.abs(b)).max()) for a, b in zip(self, other, strict=True))


# Trial functions


def update_posterior(settings: dict[str, Any], images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: update a Bayesian classifier image by image, and refit it on all images so far.

    The counterexample is a linear classifier after one gradient step per image: its weights depend on the order.
    """
    split = images.subset(settings["count"], 0)
    order = np.random.default_rng(0).permutation(len(split))
    pixels_NP, labels_N = _pixels(split)[order], np.asarray(split.labels)[order]
    test = images.test.sample_evenly(_SAMPLE)
    test_pixels_NP, test_labels_N = _pixels(test), np.asarray(test.labels)

    def accuracy(posterior: Posterior) -> float:
        return float((posterior.log_joint(test_pixels_NP).argmax(axis=1) == test_labels_N).mean())

    counts = np.unique(np.geomspace(10, len(split), 9).round().astype(int)).tolist()
    prior = Posterior.prior(len(images.labels), pixels_NP.shape[1])
    sequential, start, accuracies, refit_accuracies, differences = (
        prior.refit(pixels_NP[:0], labels_N[:0]),
        0,
        [],
        [],
        [],
    )
    for count in counts:
        for index in range(start, count):
            sequential.update(pixels_NP[index], labels_N[index])
        start = count
        refit = prior.refit(pixels_NP[:count], labels_N[:count])
        accuracies.append(accuracy(sequential))
        refit_accuracies.append(accuracy(refit))
        differences.append(sequential.difference(refit))
    weights, other_weights = (
        _gradient_steps(pixels_NP[::step], labels_N[::step], len(images.labels)) for step in (1, -1)
    )
    gradient = float(np.abs(weights - other_weights).max() / np.abs(weights).max())
    return Outcome(
        {
            "counts": counts,
            "sequential": accuracies,
            "refit": refit_accuracies,
            "bayes": max(differences),
            "gradient": gradient,
        },
        {},
    )


def _gradient_steps(pixels_NP: np.ndarray, labels_N: np.ndarray, classes: int) -> np.ndarray:
    """Return the weights (C, P) of softmax regression after one gradient step for each image."""
    weights_CP = np.zeros((classes, pixels_NP.shape[1]))
    for pixels_P, label in zip(pixels_NP, labels_N, strict=True):
        logits_C = weights_CP @ pixels_P
        probabilities_C = np.exp(logits_C - logits_C.max())
        probabilities_C /= probabilities_C.sum()
        probabilities_C[label] -= 1
        weights_CP -= 0.1 * probabilities_C[:, None] * pixels_P
    return weights_CP


def learn_xor(settings: dict[str, Any], images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: learn whether exactly one of two regions is light, with logistic regression and with an MLP.

    Each image is shown with all four patterns of the two regions: x00, x01, x10, x11. If x00 + x11 = x01 + x10, a
    linear rule gives both pairs the same sum of scores, so it is wrong on at least one pattern. At zero weights, the
    gradient of logistic regression is zero. As a control, logistic regression learns whether both regions are light.
    """
    import_extra("sklearn", extra="lab", subject="vitrail compare")
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    training, test = (
        _draw_patterns(split.sample_evenly(settings["count"])) for split in (images.training, images.test)
    )
    xor, conjunction = (np.array([0, 1, 1, 0]), np.array([0, 0, 0, 1]))

    def accuracy(learner: Any, labels: np.ndarray) -> float:
        targets, test_targets = (np.repeat(labels, patterns.shape[1]) for patterns in (training, test))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            learner.fit(np.concatenate(training), targets)
        return float((learner.predict(np.concatenate(test)) == test_targets).mean())

    return Outcome(
        {
            "difference": float(np.abs(training[0] + training[3] - training[1] - training[2]).max()),
            "linear": accuracy(LogisticRegression(), xor),
            "conjunction": accuracy(LogisticRegression(), conjunction),
            "mlp": accuracy(MLPClassifier((64,), random_state=0), xor),
        },
        {},
    )


def _draw_patterns(split: Split) -> np.ndarray:
    """Return the images with dark and light regions at the top left and the bottom right (4 patterns, N, P)."""
    pixels = _pixels(split).reshape(np.asarray(split.images).shape)
    side = max(1, min(pixels.shape[1:3]) // 4)
    patterns = []
    for first, second in ((0, 0), (0, 1), (1, 0), (1, 1)):
        pattern = pixels.copy()
        pattern[:, :side, :side], pattern[:, -side:, -side:] = first, second
        patterns.append(pattern.reshape(len(split), -1))
    return np.stack(patterns)


def _pixels(split: Split) -> np.ndarray:
    """Return pixels from 0 to 1 (N, P)."""
    return np.asarray(split.images, np.float64).reshape(len(split), -1) / 255
