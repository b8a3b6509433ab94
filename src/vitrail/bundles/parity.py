"""Proof of a conversion: both models are run on the same images, and their logits are compared.

Vitrail does not depend on the other library, which is imported by `import_peer`. If its import or its model fails, the
conversion is "not verified", with the reason.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.bundle import Bundle
from vitrail.core.errors import UsageError, VitrailError, first_line
from vitrail.core.optional import import_without_telemetry
from vitrail.data.preprocess import ImageLike, Preprocess
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig
from vitrail.models.device import evaluating

TOLERANCE = 1e-4
"""Largest allowed difference of two logits. Grows in proportion if the largest logit exceeds 10."""

Forward = Callable[[Tensor], Tensor]


class Unverified(Exception):
    """A conversion cannot be verified, because the library has no such model. The message is the reason."""


@torch.inference_mode()
def prove(
    model: AnyModel, preprocess: Preprocess, peer: Forward, library: str, images: Sequence[ImageLike]
) -> dict[str, Any]:
    """Compare the logits of `model` and of another library's model on `images`.

    Return the proof for the report: the largest difference and the number of equal predictions. Raise VitrailError if
    the difference is larger than `TOLERANCE`.
    """
    batches, peer_batches = [], []
    with evaluating(model):
        for start in range(0, len(images), 8):
            batch = preprocess(images[start : start + 8])
            batches.append(model(batch))
            peer_batches.append(peer(batch))
    outputs, peer_outputs = torch.cat(batches), torch.cat(peer_batches)
    largest_difference = float((outputs - peer_outputs).abs().max())
    largest_value = float(peer_outputs.abs().max())
    has_head = model.config.classes > 0
    proof: dict[str, Any] = {
        "library": library,
        "pictures": len(outputs),
        "compared": "logits" if has_head else "features",
        "largest_difference": largest_difference,
        "largest_value": largest_value,
    }
    if has_head:
        proof["equal_answers"] = int((outputs.argmax(-1) == peer_outputs.argmax(-1)).sum())
    if not largest_difference <= TOLERANCE * max(largest_value, 10.0) / 10:
        raise VitrailError(
            f"{library} gives other outputs: the largest difference of {proof['compared']} is"
            f" {largest_difference:.2g}. Nothing is written. To convert anyway, use --no-verify."
        )
    return proof


def try_to_prove(
    library: str, open_peer: Callable[[], Forward], bundle: Bundle, images: Sequence[ImageLike], *, is_output: bool
) -> dict[str, Any]:
    """Return the proof against the model that `open_peer` returns, or the reason why there is none.

    `is_output` says that the library opens files that vitrail wrote. Raise VitrailError if it cannot open them.
    """
    try:
        return prove(bundle.model, bundle.preprocess, open_peer(), library, images)
    except Unverified as reason:
        return {"library": library, "not_verified": str(reason)}
    except VitrailError:
        raise
    except Exception as error:  # any failure of the other library
        reason = f"{library} does not take the model ({first_line(error)[:200]})"
        if is_output:
            raise VitrailError(f"{reason}. Nothing is written. To convert anyway, use --no-verify.") from None
        return {"library": library, "not_verified": reason}


def import_peer(name: str, member: str | None = None) -> Any:
    """Import another library, or a member of it (transformers imports its models lazily).

    Raise `Unverified` if the import fails, with the first error of the chain.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library = import_without_telemetry(name)
            return library if member is None else getattr(library, member)
    except Exception as error:  # any failure of the other library
        first_error: BaseException = error
        while (cause := first_error.__cause__ or first_error.__context__) is not None:
            first_error = cause
        raise Unverified(f"{member or name} cannot be imported ({first_line(first_error)})") from None


def select_images(config: ModelConfig, images: Sequence[ImageLike]) -> list[ImageLike]:
    """Select up to 64 images, fewer for large models, and give them the model's number of channels."""
    limit = 64 if config.macs < 2e9 else 16 if config.macs < 2e10 else 4
    selected = list(images[:: max(-(-len(images) // limit), 1)])
    if config.channels in (1, 3):
        return selected
    if any(not isinstance(image, np.ndarray) for image in selected):
        raise UsageError(f"Images of {config.channels} channels must be arrays, got files: leave --images out.")
    return [np.repeat(np.asarray(image)[..., :1], config.channels, axis=2) for image in selected]
