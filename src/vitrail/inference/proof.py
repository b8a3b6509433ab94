"""Proof that an engine answers as torch does: both are run on the same images."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitrail.bundles.decision import DecisionRule
from vitrail.core.errors import UnprovedError
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.inference.engine import Engine, EngineOutputs
from vitrail.models.config import ModelConfig

TOLERANCE = 1e-4  # of the largest logit: rounding in another order, and nothing else
_REDUCED = 0.25  # of the logits' standard deviation, on average: more is no rounding of weights to 8 bits
_PROOF_MACS = 10**11


def prove(
    found: EngineOutputs, expected: EngineOutputs, kind: DecisionRule, precision: str = "float32"
) -> dict[str, Any]:
    """How an engine's outputs differ from torch's. Raises if that is too much: in float32 more than rounding, or any
    other answer."""
    count = len(expected.logits)
    differences = np.abs(found.logits - expected.logits)
    gap, mean = float(differences.max()), float(differences.mean())
    same = int((kind.decide(found.logits) == kind.decide(expected.logits)).all(axis=1).sum())
    if precision == "float32":
        is_fine = gap <= TOLERANCE * max(float(np.abs(expected.logits).max()), 1.0) and same == count
    else:
        is_fine = mean <= _REDUCED * float(expected.logits.std())
    if not is_fine:
        raise UnprovedError(
            f"The model in {precision} predicts {count - same} of {count} images differently from torch, with logits up"
            f" to {gap:.1e} apart. It is not kept; use {'engine torch' if precision == 'float32' else 'float32'}."
        )
    return {
        "pictures": count,
        "same_answers": same,
        "max_logit_difference": gap,
        "mean_logit_difference": mean,
        "max_feature_difference": float(np.abs(found.features - expected.features).max()),
    }


def crop_embedded_images(preprocess: Preprocess, count: int) -> np.ndarray:
    """Up to 40 embedded images, cropped for the model; for other numbers of channels than 1 and 3, grey is repeated."""
    images = open_data("fashion-40").first_split.images[:count]
    bands = preprocess.channels if preprocess.channels not in (1, 3) else 1
    return np.stack([preprocess.crop(np.repeat(image, bands, axis=2)) for image in np.asarray(images)])


def crop_images_for_proof(config: ModelConfig, preprocess: Preprocess) -> np.ndarray:
    """The embedded images that a file is proved on: 40, for very large models at least 8."""
    return crop_embedded_images(preprocess, min(max(_PROOF_MACS // config.macs, 8), 40))


def run_engine(engine: Engine, pixels: np.ndarray, batch: int | None = None) -> EngineOutputs:
    """Outputs for all images: in batches of the given size, filled up with the same ones; or of all kinds of sizes."""
    count = len(pixels) if batch is None or len(pixels) < batch else len(pixels) // batch * batch
    if batch is not None:
        pixels = np.resize(pixels, (-(-count // batch) * batch, *pixels.shape[1:]))
    with engine.running(None) as run:
        parts = [run(piece) for piece in _pieces(pixels, batch)]
    return EngineOutputs(*(np.concatenate(part)[:count] for part in zip(*parts, strict=True)))


def _pieces(pixels: np.ndarray, batch: int | None) -> Iterator[np.ndarray]:
    sizes = (1, 2, 3, 7) if batch is None else ()
    for at, size in zip(np.cumsum((0, *sizes)), sizes, strict=False):
        if at < len(pixels):
            yield pixels[at : at + size]
    step = batch or 8
    for at in range(sum(sizes), len(pixels), step):
        yield pixels[at : at + step]
