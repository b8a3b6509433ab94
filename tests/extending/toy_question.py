"""A question of the lab in another package: do the classes differ in brightness?"""

from typing import ClassVar

import numpy as np

from vitrail.lab.question import Question, Verdict
from vitrail.lab.statistics import Estimate
from vitrail.lab.trial import Outcome, Trial


class Contrast(Question):
    messages: ClassVar = {
        "title": {"en": "Brightness of classes", "ko": "클래스의 밝기"},
        "about": {"en": "The brightest class less the darkest.", "ko": "가장 밝은 클래스 - 가장 어두운 클래스."},
        "T1": {"en": "Classes differ in brightness.", "ko": "클래스마다 밝기가 다르다."},
        "T1-rule": {"en": "mean grey, brightest - darkest", "ko": "평균 밝기, 가장 밝은 것 - 가장 어두운 것"},
    }
    claims = ("T1",)
    cell = Trial("toy_question:measure", {"part": "test"})

    def rounds(self):
        return [[self.cell]]

    def read(self, results):
        self.accuracies = results.get(self.cell)

    def verdicts(self):
        yield Verdict("T1", "trained", None if self.accuracies is None else Estimate(*self.accuracies["difference"]))

    def numbers(self):
        return self.accuracies or {}


def measure(settings, images, of, folder):
    split = getattr(images, settings["part"])
    greys = np.asarray(split.images).mean(axis=(1, 2, 3)) / 255
    classes = [greys[split.labels == label] for label in range(len(images.labels))]
    high, low = max(classes, key=np.mean), min(classes, key=np.mean)
    error = np.sqrt(high.var(ddof=1) / len(high) + low.var(ddof=1) / len(low))
    return Outcome({"difference": [float(high.mean() - low.mean()), float(error)]}, {})
