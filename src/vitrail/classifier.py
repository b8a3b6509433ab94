"""The shortest way from a bundle to answers."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitrail.errors import UsageError
from vitrail.images.preprocess import Picture
from vitrail.settings import check_whole
from vitrail.weights.bundle import Bundle, load


class Classifier:
    """`Classifier("path/to/bundle").predict(["a.jpg", "b.jpg"])`, or with a `Bundle` that is already loaded."""

    def __init__(self, bundle: Bundle | str | Path) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
        self.bundle.model.eval()
        if getattr(self.bundle.model.config, "output", "classes") == "pixels":
            raise UsageError("Classifier must have a model that predicts classes, got one that predicts pixels.")
        classes = range(self.bundle.model.config.classes)
        self.labels = self.bundle.labels or tuple(map(str, classes))

    @torch.inference_mode()
    def predict(
        self, pictures: Iterable[Picture], *, top_k: int = 5, batch_size: int = 16
    ) -> list[list[dict[str, str | float]]]:
        """For each picture, the `top_k` most probable classes, best first: `[{"label": "cat", "score": 0.93}, ...]`."""
        check_whole("top_k", top_k, low=1, high=10_000_000)
        check_whole("batch_size", batch_size, low=1, high=1_000_000)
        is_one = isinstance(pictures, np.ndarray) and pictures.ndim < 3
        if is_one or isinstance(pictures, str | Path | Image.Image) or not isinstance(pictures, Iterable):
            raise UsageError(f"Pictures must be a list, got one {type(pictures).__name__}. Put it in brackets.")
        answers = []
        weight = next(self.bundle.model.parameters())
        waiting = iter(pictures)
        while batch := list(islice(waiting, batch_size)):
            logits = self.bundle.model(self.bundle.preprocess(batch).to(weight.device, weight.dtype))
            scores, classes = logits.float().softmax(-1).topk(min(top_k, len(self.labels)))
            answers += [
                [{"label": self.labels[index], "score": score} for score, index in zip(*row, strict=True)]
                for row in zip(scores.tolist(), classes.tolist(), strict=True)
            ]
        return answers
