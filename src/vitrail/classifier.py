"""The shortest way from a bundle to answers."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from vitrail.data.ahead import in_order
from vitrail.engines.base import Engine, EngineName, Run, batch_for, cores
from vitrail.errors import DamagedError, UsageError, VitrailError
from vitrail.images.preprocess import Picture
from vitrail.settings import check_whole
from vitrail.storage import check_output, refuse_existing, whole_file
from vitrail.weights.parts import OVERFLOWS

if TYPE_CHECKING:
    from vitrail.weights.bundle import Bundle

Named = list[dict[str, str | float]]


class Classifier:
    """`Classifier("path/to/bundle").predict(["a.jpg", "b.jpg"])`, or with a `Bundle` that is already loaded.

    Engine `onnx` runs a bundle on disk by ONNX Runtime: its ONNX file is made and checked when first asked for; from
    then on torch is not even imported. `threads` may compute (default: every core); `jpeg` overrides how the bundle's
    preprocessing decodes JPEG files.
    """

    def __init__(
        self,
        bundle: "Bundle | str | Path",
        *,
        engine: EngineName = "torch",
        threads: int | None = None,
        jpeg: Literal["exact", "double"] | None = None,
    ) -> None:
        if threads is not None:
            check_whole("threads", threads, low=1, high=4096)
        self.threads = threads
        self._engine = _open_engine(bundle, engine)
        parts = self._engine.parts
        parts.check_classifies()
        self.config = parts.config
        self.preprocess = parts.preprocess if jpeg is None else parts.preprocess.replace(jpeg=jpeg)
        self.labels = parts.labels or tuple(map(str, range(parts.config.classes)))

    def predict(self, pictures: Iterable[Picture], *, top_k: int = 5, batch_size: int = 16) -> list[Named]:
        """For each picture, the `top_k` most probable classes, best first: `[{"label": "cat", "score": 0.93}, ...]`."""
        check_whole("top_k", top_k, low=1, high=10_000_000)
        check_whole("batch_size", batch_size, low=1, high=1_000_000)
        is_one = isinstance(pictures, np.ndarray) and pictures.ndim < 3
        if is_one or isinstance(pictures, str | Path | Image.Image) or not isinstance(pictures, Iterable):
            raise UsageError(f"Pictures must be a list, got one {type(pictures).__name__}. Put it in brackets.")
        answers = []
        waiting = iter(pictures)
        with self._engine.running(self.threads) as run:
            while batch := list(islice(waiting, batch_size)):
                logits_BK = run(self.preprocess.crop_all(batch, first=len(answers))).logits
                if not np.isfinite(logits_BK).all():
                    raise DamagedError(OVERFLOWS)
                answers += self._name(logits_BK, top_k)
        return answers

    def stream(
        self, files: Sequence[str], *, top_k: int = 5, batch_size: int | None = None, features: bool = False
    ) -> Iterator[dict[str, Any]]:
        """For each picture file, in order, as soon as it is known: `{"file", "predictions"}`, with `features` also what
        the head read; or `{"file", "error"}`.

        Every thread takes some files, decodes them and computes their answers alone, so that no core ever waits for
        another; one that has a single file to itself is helped by the others in computing.
        """
        check_whole("top_k", top_k, low=1, high=10_000_000)
        size = batch_for(self.config) if batch_size is None else batch_size
        check_whole("batch_size", size, low=1, high=1_000_000)
        if not files:
            return
        threads = self.threads or cores()
        workers = min(threads, len(files))
        # The first answers come soonest if each thread begins with one picture.
        starts = [*range(workers), *range(workers, len(files), size)]
        pieces = [files[at:end] for at, end in zip(starts, [*starts[1:], len(files)], strict=True)]
        with self._engine.running(threads // workers) as run:
            jobs = (partial(self._answer, piece, run, top_k, features) for piece in pieces)
            with contextlib.closing(in_order(jobs, workers, ahead=2 * workers)) as done:
                for answers in done:
                    yield from answers

    def _answer(self, files: Sequence[str], run: Run, top_k: int, features: bool) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        crops = []
        for file in files:
            answer: dict[str, Any] = {"file": file}
            try:
                crops.append(self.preprocess.crop(file))
            except VitrailError as error:
                answer["error"] = str(error)
            answers.append(answer)
        if crops:
            outputs = run(np.stack(crops))
            good = [answer for answer in answers if "error" not in answer]
            for answer, logits_K, row in zip(good, outputs.logits, outputs.features, strict=True):
                if not np.isfinite(logits_K).all():
                    answer["error"] = OVERFLOWS
                    continue
                answer["predictions"] = self._name(logits_K[None], top_k)[0]
                if features:
                    answer["features"] = row
        return answers

    def _name(self, logits_BK: np.ndarray, top_k: int) -> list[Named]:
        shares_BK = np.exp(logits_BK - logits_BK.max(axis=1, keepdims=True))
        scores_BK = shares_BK / shares_BK.sum(axis=1, keepdims=True)
        best = np.argsort(-logits_BK, axis=1, kind="stable")[:, :top_k]
        return [
            [{"label": self.labels[index], "score": float(scores[index])} for index in row]
            for scores, row in zip(scores_BK, best, strict=True)
        ]


def _open_engine(bundle: "Bundle | str | Path", name: str) -> Engine:
    match name:
        case "torch":
            from vitrail.engines.eager import TorchEngine
            from vitrail.weights.bundle import load

            return TorchEngine(load(bundle) if isinstance(bundle, str | Path) else bundle)
        case "onnx" if isinstance(bundle, str | Path):
            from vitrail.engines.runtime import open_onnx

            return open_onnx(bundle)
        case "onnx":
            raise UsageError("Engine onnx must be given the path of a bundle, got one in memory. Save it first.")
    raise UsageError(f"Engine must be torch or onnx, got {name!r}.")


def check_features_file(path: Path, *, force: bool) -> None:
    """Refuse what `write_features` could not write, before any work is done for it."""
    if path.suffix != ".npz" or path.is_dir():
        raise UsageError(f"Features must go to a file that ends in .npz, got {str(path)!r}.")
    refuse_existing(path, force=force)
    check_output(path.parent, force=True)


def write_features(path: Path, rows: list[tuple[str, np.ndarray]], *, force: bool = False) -> None:
    """Write names of files and their features, (n) and (n, D), to one .npz, whole or not at all."""
    if not rows:
        raise DamagedError(f"No picture could be read, so {str(path)!r} is not written.")
    files, features = zip(*rows, strict=True)
    with whole_file(path, force=force) as file:
        np.savez(file, files=np.array(files), features=np.stack(features))
