"""Proof that an engine predicts the same as torch: both run on the same images, and their outputs are compared."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitrail.bundles.decision import DecisionRule
from vitrail.core.errors import UnprovedError
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.inference.engine import Engine, EngineOutputs
from vitrail.models.config import ModelConfig

TOLERANCE = 1e-4
"""Largest logit difference in float32, as a share of the largest logit: what a different order of sums can cause."""
_REDUCED_TOLERANCE = 0.25  # mean logit difference, in standard deviations of the logits: above what 8-bit weights cause
_PROOF_MACS = 10**11  # multiply-accumulates of a proof


def compare_outputs(
    outputs: EngineOutputs, expected: EngineOutputs, decision_rule: DecisionRule, precision: str = "float32"
) -> dict[str, Any]:
    """Return how an engine's outputs differ from torch's on the same images, as in proof.json.

    Raises UnprovedError if they differ too much: in float32 by more than rounding or in any prediction, in a reduced
    precision by a mean logit difference that 8-bit weights do not explain.
    """
    count = len(expected.logits)
    differences = np.abs(outputs.logits - expected.logits)
    gap, mean = float(differences.max()), float(differences.mean())
    same = int((decision_rule.decide(outputs.logits) == decision_rule.decide(expected.logits)).all(axis=1).sum())
    if precision == "float32":
        is_close = gap <= TOLERANCE * max(float(np.abs(expected.logits).max()), 1.0) and same == count
    else:
        is_close = mean <= _REDUCED_TOLERANCE * float(expected.logits.std())
    if not is_close:
        raise UnprovedError(
            f"The model in {precision} predicts {count - same} of {count} images differently from torch, with logits up"
            f" to {gap:.1e} apart. It is not used. Use {'engine torch' if precision == 'float32' else 'float32'}."
        )
    return {
        "pictures": count,
        "same_answers": same,
        "max_logit_difference": gap,
        "mean_logit_difference": mean,
        "max_feature_difference": float(np.abs(outputs.features - expected.features).max()),
    }


def crop_embedded_images(preprocess: Preprocess, count: int) -> np.ndarray:
    """Return up to 40 embedded images, cropped for a model, uint8 (B, H, W, C).

    For numbers of channels other than 1 and 3, the grey channel is repeated.
    """
    images = open_data("fashion-40").first_split.images[:count]
    bands = preprocess.channels if preprocess.channels not in (1, 3) else 1
    return np.stack([preprocess.crop(np.repeat(image, bands, axis=2)) for image in np.asarray(images)])


def crop_images_for_proof(config: ModelConfig, preprocess: Preprocess) -> np.ndarray:
    """Return the embedded images on which an engine is compared with torch: 40, for large models at least 8."""
    return crop_embedded_images(preprocess, min(max(_PROOF_MACS // config.macs, 8), 40))


def run_engine(engine: Engine, pixels: np.ndarray, batch: int | None = None) -> EngineOutputs:
    """Return an engine's outputs for all images.

    Without a `batch`, batches have different sizes. With a fixed `batch`, images of an incomplete last batch are left
    out, and fewer images than a batch are repeated to fill it.
    """
    count = len(pixels) if batch is None or len(pixels) < batch else len(pixels) // batch * batch
    if batch is not None:
        pixels = np.resize(pixels, (-(-count // batch) * batch, *pixels.shape[1:]))
    with engine.running(None) as run:
        outputs = [run(batch_pixels) for batch_pixels in _split_batches(pixels, batch)]
    return EngineOutputs(*(np.concatenate(arrays)[:count] for arrays in zip(*outputs, strict=True)))


def _split_batches(pixels: np.ndarray, batch: int | None) -> Iterator[np.ndarray]:
    """Yield batches of images: of size `batch`, otherwise of 1, 2, 3, 7 and then 8 images."""
    first_sizes = (1, 2, 3, 7) if batch is None else ()
    for start, size in zip(np.cumsum((0, *first_sizes)), first_sizes, strict=False):  # the last sum is only an end
        if start < len(pixels):
            yield pixels[start : start + size]
    step = batch or 8
    for start in range(sum(first_sizes), len(pixels), step):
        yield pixels[start : start + step]
