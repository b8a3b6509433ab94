"""The torch engine."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Self

import numpy as np
import torch

from vitrail.engines.base import Engine, Outputs, Run
from vitrail.models.base import Seen
from vitrail.models.device import find_device
from vitrail.models.look import evaluating
from vitrail.weights.bundle import Bundle, open_bundle


class TorchEngine(Engine):
    """A bundle's model, in evaluation mode while it runs, on its device or moved to another one."""

    packages = ("torch",)
    start = "import sys; from vitrail.weights.bundle import load; load(sys.argv[1])"

    def __init__(self, bundle: Bundle, device: str | None = None) -> None:
        self.model, self.parts = bundle.model, bundle.parts
        if device is not None:
            self.model.to(find_device(device))

    @classmethod
    def open(cls, bundle: Bundle | str | Path, device: str | None = None) -> Self:
        return cls(open_bundle(bundle), device)

    @contextlib.contextmanager
    def running(self, threads: int | None) -> Generator[Run]:
        before = torch.get_num_threads()
        weight = next(self.model.parameters())

        @torch.inference_mode()
        def run(pixels_BHWC: np.ndarray) -> Outputs:
            # The number belongs to the calling thread, and to threads that begin later.
            if threads is not None and torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            images = self.parts.preprocess.scale(torch.from_numpy(pixels_BHWC).to(weight.device))
            seen = Seen(frozenset())
            logits = self.model(images.to(weight.dtype), seen)
            return Outputs(*(output.float().cpu().numpy() for output in (logits, seen.steps["pooled"])))

        try:
            with evaluating(self.model):
                yield run
        finally:
            torch.set_num_threads(before)
