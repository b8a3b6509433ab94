"""The torch engine, the reference for all other engines."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from vitrail.inference.engine import Engine, EngineChoice, EngineOutputs, Run, first_call_alone, thread_count

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle


class TorchEngine(Engine):
    """A bundle's model in torch, on a CPU or an accelerator.

    `open` moves the model to the device. `running` puts it into evaluation mode as long as its context lasts. torch is
    imported when a bundle is opened.
    """

    name = "torch"
    precisions = ("float32", "bfloat16")
    packages = ("torch",)

    def __init__(self, bundle: "Bundle", precision: str = "float32") -> None:
        self.model, self.info, self.precision = bundle.model, bundle.info, precision

    @classmethod
    def open(cls, bundle: "Bundle | str | Path", device: str | None = None, precision: str = "float32") -> Self:
        from vitrail.bundles.bundle import open_to_compute

        cls.check(precision)
        return cls(open_to_compute(bundle, device=device), precision)

    @contextlib.contextmanager
    def running(self, threads: int | None, callers: int = 1) -> Generator[Run]:
        import torch

        from vitrail.models.activations import Activations
        from vitrail.models.device import evaluating

        previous_threads = torch.get_num_threads()
        call_threads = thread_count(threads or previous_threads)
        weight = next(self.model.parameters())
        is_reduced = self.precision == "bfloat16"

        @torch.inference_mode()
        def run(pixels_BHWC: np.ndarray) -> EngineOutputs:
            # torch stores the number per calling thread; threads that start later inherit it.
            if torch.get_num_threads() != call_threads:
                torch.set_num_threads(call_threads)
            images = self.info.preprocess.scale(torch.from_numpy(pixels_BHWC).to(weight.device))
            activations = Activations(frozenset())
            with torch.autocast(weight.device.type, torch.bfloat16, enabled=is_reduced):
                logits = self.model(images.to(weight.dtype), activations)
            return EngineOutputs(*(output.float().cpu().numpy() for output in (logits, activations.steps["pooled"])))

        try:
            with evaluating(self.model):
                yield first_call_alone(EngineChoice(self.name, self.precision), run)
        finally:
            torch.set_num_threads(previous_threads)
