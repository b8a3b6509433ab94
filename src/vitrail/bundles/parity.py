"""Proof of a conversion: both models are run on the same images, and their logits are compared.

The other library is imported through `import_peer`; vitrail does not depend on it. If its import or its model fails,
the conversion is "not verified", with the reason.
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
"""Largest allowed difference of two logits up to 10; for larger logits, in proportion."""

Forward = Callable[[Tensor], Tensor]


class Unverified(Exception):
    """There is no other model to compare with; the message is the reason."""


@torch.inference_mode()
def prove(
    model: AnyModel, preprocess: Preprocess, peer: Forward, library: str, images: Sequence[ImageLike]
) -> dict[str, Any]:
    """The largest difference of both models' logits on `images`, and the number of equal predictions. Raises if it is
    more than rounding."""
    ours, theirs = [], []
    with evaluating(model):
        for start in range(0, len(images), 8):
            batch = preprocess(images[start : start + 8])
            ours.append(model(batch))
            theirs.append(peer(batch))
    one, other = torch.cat(ours), torch.cat(theirs)
    largest = float((one - other).abs().max())
    largest_value = float(other.abs().max())
    has_head = model.config.classes > 0
    proof: dict[str, Any] = {
        "library": library,
        "pictures": len(one),
        "compared": "logits" if has_head else "features",
        "largest_difference": largest,
        "largest_value": largest_value,
    }
    if has_head:
        proof["equal_answers"] = int((one.argmax(-1) == other.argmax(-1)).sum())
    if not largest <= TOLERANCE * max(largest_value, 10.0) / 10:
        raise VitrailError(
            f"{library} gives other outputs: the largest difference of {proof['compared']} is {largest:.2g}. Nothing is"
            " written. To convert anyway, use --no-verify."
        )
    return proof


def try_to_prove(
    library: str, make: Callable[[], Forward], bundle: Bundle, images: Sequence[ImageLike], *, ours: bool
) -> dict[str, Any]:
    """The proof against the model that `make` returns, or why there is none. If a library cannot open files that we
    wrote (`ours`), that is an error."""
    try:
        return prove(bundle.model, bundle.preprocess, make(), library, images)
    except Unverified as reason:
        return {"library": library, "not_verified": str(reason)}
    except VitrailError:
        raise
    except Exception as error:  # any failure of theirs
        reason = f"{library} does not take the model ({first_line(error)[:200]})"
        if ours:
            raise VitrailError(f"{reason}. Nothing is written. To convert anyway, use --no-verify.") from None
        return {"library": library, "not_verified": reason}


def import_peer(name: str, member: str | None = None) -> Any:
    """Import another library, or a member of it (transformers imports its models lazily). Raises `Unverified` with the
    first error of the chain."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library = import_without_telemetry(name)
            return library if member is None else getattr(library, member)
    except Exception as error:  # any failure of theirs
        first: BaseException = error
        while (cause := first.__cause__ or first.__context__) is not None:
            first = cause
        raise Unverified(f"{member or name} cannot be imported ({first_line(first)})") from None


def select_images(config: ModelConfig, images: Sequence[ImageLike]) -> list[ImageLike]:
    """Up to 64 images, fewer for large models, with the number of channels of the model."""
    most = 64 if config.macs < 2e9 else 16 if config.macs < 2e10 else 4
    chosen = list(images[:: max(-(-len(images) // most), 1)])
    if config.channels in (1, 3):
        return chosen
    if any(not isinstance(image, np.ndarray) for image in chosen):
        raise UsageError(f"Images of {config.channels} channels must be arrays, got files: leave --images out.")
    return [np.repeat(np.asarray(image)[..., :1], config.channels, axis=2) for image in chosen]
