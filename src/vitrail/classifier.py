"""The shortest way from a bundle to answers."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import Split
from vitrail.data.loader import Loader
from vitrail.data.sources import list_pictures
from vitrail.errors import UsageError
from vitrail.evaluation.protocols import refuse_untrained_head
from vitrail.images.preprocess import Picture
from vitrail.settings import check_whole
from vitrail.weights.bundle import Bundle, load


class Classifier:
    """`Classifier("path/to/bundle").predict(["a.jpg", "b.jpg"])`, or with a `Bundle` that is already loaded."""

    def __init__(self, bundle: Bundle | str | Path) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
        self.bundle.model.eval()
        refuse_untrained_head(self.bundle)
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
        waiting = iter(pictures)
        while batch := list(islice(waiting, batch_size)):
            answers += self._name(self.bundle.preprocess(batch), top_k)
        return answers

    @torch.inference_mode()
    def stream(
        self, files: Iterable[str], *, top_k: int = 5, batch_size: int = 16, workers: int = 2
    ) -> Iterator[dict[str, Any]]:
        """For each picture file, and each one in a folder: `{"file", "predictions"}`, or `{"file", "error"}`.

        Pictures are decoded by threads while the model works.
        """
        check_whole("top_k", top_k, low=1, high=10_000_000)
        paths = _expand(files)
        split = Split("pictures", paths, np.zeros(len(paths), np.int64))
        loader = Loader(
            split, self.bundle.preprocess, batch=batch_size, shuffle=False, workers=workers, on_damage="skip"
        )
        for batch in loader.epoch():
            is_good = batch.weights > 0
            named = iter(
                self._name(self.bundle.preprocess.scale(batch.pixels[is_good]), top_k) if is_good.any() else ()
            )
            for index, good in zip(batch.indices, is_good.tolist(), strict=True):
                path = paths[index]
                if good:
                    yield {"file": path, "predictions": next(named)}
                else:
                    yield {"file": path, "error": loader.damaged[path]}

    def _name(self, images: Tensor, top_k: int) -> list[list[dict[str, str | float]]]:
        weight = next(self.bundle.model.parameters())
        logits = self.bundle.model(images.to(weight.device, weight.dtype))
        scores, classes = logits.float().softmax(-1).topk(min(top_k, len(self.labels)))
        return [
            [{"label": self.labels[index], "score": score} for score, index in zip(*row, strict=True)]
            for row in zip(scores.tolist(), classes.tolist(), strict=True)
        ]


def _expand(files: Iterable[str]) -> list[str]:
    """Files as they are, folders by the pictures in them."""
    found: list[str] = []
    for name in files:
        if Path(name).is_dir():
            inside = list_pictures([name])
            if not inside:
                raise UsageError(f"Folder must have pictures in it, got {name!r} without any.")
            found += inside
        elif Path(name).is_file():
            found.append(name)
        else:
            raise UsageError(f"Picture must be a file or folder that exists, got {name!r}.")
    if not found:
        raise UsageError("Pictures must be given: files or folders.")
    return found
