"""Invented results of a lab, to test what questions conclude from them."""

import numpy as np

from tests.fake_lab import validation_accuracy, verdict_states
from vitrail.lab.trial import pack
from vitrail.lab.trial_results import Results


class InventedResults:
    """Invented results of trials, in a file as a lab writes it."""

    def __init__(self, folder, question, count=2000):
        self.results = Results(folder / "results.jsonl", "x")
        self.count = count
        self.generator = np.random.default_rng(0)

    def put(self, trial, **result):
        """Add the result of a trial."""
        self.results.add({"key": trial.trial_id("x"), "cell": trial.to_json(), "result": result, "measured": {}})

    def train(self, trial, accuracy, **fields):
        """Add a trained trial of this accuracy, and the trials that choose its learning rate."""
        for rate_trial in self.results.rate_trials(trial):
            if not self.results.has(rate_trial):
                validation = validation_accuracy(rate_trial.settings["learning_rate"])
                self.put(rate_trial, **self.predictions(accuracy), validation_accuracy=validation)
        resolved = self.results.resolve(trial)
        if not self.results.has(resolved):
            self.put(resolved, **self.predictions(accuracy), **fields)

    def predictions(self, accuracy):
        """Return the result of a model with this accuracy. Nearly the same images are wrong every time."""
        right = (np.arange(self.count) + 0.5) / self.count < accuracy
        flipped = self.generator.choice(self.count, 4, replace=False)
        right[flipped[:2]], right[flipped[2:]] = True, False
        correctness = {"right": pack(right), "count": self.count, "accuracy": float(right.mean())}
        return {"training_accuracy": 1.0, "curve": [], **correctness}


def states(question, invented, level=0.05):
    question.read(invented.results)
    return verdict_states(question, level)
