"""The shortest way from a bundle to answers."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch

from vitrail.images.preprocess import Picture
from vitrail.weights.bundle import Bundle, load


class Classifier:
    """`Classifier("path/to/bundle").predict(["a.jpg", "b.jpg"])`, or with a `Bundle` that is already loaded."""

    def __init__(self, bundle: Bundle | str | Path) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
        self.bundle.model.eval()
        classes = range(self.bundle.model.config.classes)
        self.labels = self.bundle.labels or tuple(map(str, classes))

    @torch.inference_mode()
    def predict(
        self, pictures: Iterable[Picture], *, top_k: int = 5, batch_size: int = 16
    ) -> list[list[dict[str, str | float]]]:
        """For each picture, the `top_k` most probable classes, best first: `[{"label": "cat", "score": 0.93}, ...]`."""
        answers = []
        device = next(self.bundle.model.parameters()).device
        waiting = iter(pictures)
        while batch := list(islice(waiting, batch_size)):
            logits = self.bundle.model(self.bundle.preprocess(batch).to(device))
            scores, classes = logits.float().softmax(-1).topk(min(top_k, len(self.labels)))
            answers += [
                [{"label": self.labels[index], "score": score} for score, index in zip(*row, strict=True)]
                for row in zip(scores.tolist(), classes.tolist(), strict=True)
            ]
        return answers
