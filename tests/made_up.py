"""Results of a lab that were never measured, to see what questions make of them."""

import numpy as np

from tests.fake_lab import told
from vitrail.lab.results import Results
from vitrail.lab.training import RATES
from vitrail.lab.trial import pack


class Filled:
    """Results of a lab, made up."""

    def __init__(self, folder, question, count=2000):
        self.results = Results(folder / "results.jsonl", "x", question.lab.sizes[0])
        self.count = count
        self.generator = np.random.default_rng(0)

    def put(self, cell, **result):
        self.results.add({"key": cell.key("x"), "cell": cell.to_json(), "result": result, "measured": {}})

    def train(self, cell, accuracy, **more):
        """A trained cell that names so many images rightly, and the trials before it."""
        for rate in RATES:
            for trial in self.results.trials(cell):
                if not self.results.has(trial):
                    self.put(trial, **self.answers(accuracy), validation_accuracy=accuracy - rate)
        done = self.results.resolve(cell)
        if not self.results.has(done):
            self.put(done, **self.answers(accuracy), **more)

    def answers(self, accuracy):
        """Always the same images are hard, but for a few."""
        right = (np.arange(self.count) + 0.5) / self.count < accuracy
        flipped = self.generator.choice(self.count, 4, replace=False)
        right[flipped[:2]], right[flipped[2:]] = True, False
        told = {"right": pack(right), "count": self.count, "accuracy": float(right.mean())}
        return {"training_accuracy": 1.0, "curve": [], **told}


def states(question, filled, level=0.05):
    question.read(filled.results)
    return told(question, level)
