"""Search for the number of tokens that each layer of a model can merge. It needs images but no labels.

The model without merging is the reference. The search is greedy: in each step, it merges more tokens in the layer where
the probabilities change least relative to the saved multiply-accumulates, as long as the share of changed predictions
is within a tolerance.
"""

import contextlib
import dataclasses
import heapq
import itertools
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitrail.bundles.bundle import Bundle, load, save
from vitrail.bundles.folder import check_folder
from vitrail.core.errors import UsageError
from vitrail.core.intervals import wilson_interval
from vitrail.core.settings import Bounds
from vitrail.core.terminal import say, say_nothing
from vitrail.data.preprocess import ImageLike
from vitrail.data.sources.registry import AnyData, open_images
from vitrail.inference.model_files import fingerprint
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig
from vitrail.models.create import build
from vitrail.models.device import evaluating
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.surgery import share_weights

_BATCH = 16
_STEPS = 12  # number of steps in which all patches would be merged
_FAST_MULTIPLE = 8  # attention over a multiple of 8 tokens is up to 20 % faster on CPUs with AVX2
_MATCHING_SHARE = 0.1  # of a layer's time, for matching tokens besides its product (ONNX Runtime; torch: half of that)


class MergeCost(NamedTuple):
    """Multiply-accumulates and changed predictions of a setting `merge`."""

    merge: tuple[int, ...]
    macs: int
    """Multiply-accumulates for one image."""
    changed: int
    """Number of images with another prediction than without merging."""
    count: int
    """Number of images."""
    distance: float
    """Mean distance of the probabilities from those without merging: half of the sum over classes, from 0 to 1."""

    @property
    def share(self) -> float:
        """Share of images with a changed prediction."""
        return self.changed / self.count

    def to_json(self) -> dict[str, Any]:
        """Return all fields in JSON types, with the share of changed predictions and its 95 % interval (Wilson)."""
        interval = list(wilson_interval(self.changed, self.count))
        return {**self._asdict(), "merge": list(self.merge), "share": self.share, "interval": interval}


def with_merge(model: AnyModel, merge: int | Sequence[int]) -> AnyModel:
    """Return a model with another setting `merge` that shares the weights of this model."""
    return share_weights(model, merge=merge)


class MergeEvaluator:
    """Compares the predictions of a model with and without merging. The images are preprocessed once."""

    def __init__(self, bundle: Bundle, images: Sequence[ImageLike] | np.ndarray) -> None:
        check_can_merge(bundle.model.config)
        bundle.info.check_single_label("Merging")
        if not len(images):
            raise UsageError("Images to search on must be at least one, got none.")
        self.model, self._preprocess = with_merge(bundle.model, 0), bundle.preprocess
        self._pixels = np.stack([bundle.preprocess.crop(image) for image in images])
        self.count = len(self._pixels)
        self._expected = self._probabilities(self.model)

    def measure(self, merge: Sequence[int]) -> MergeCost:
        """Return the multiply-accumulates and the changed predictions with this setting."""
        model = with_merge(self.model, merge)
        probabilities = self._probabilities(model)
        distance = (probabilities - self._expected).abs().sum(dim=1).div(2).mean()
        changed = int((probabilities.argmax(1) != self._expected.argmax(1)).sum())
        return MergeCost(tuple(merge), count_macs(model.config), changed, self.count, float(distance))

    def predict(self, merge: Sequence[int]) -> np.ndarray:
        """Return the predicted class of each image with this setting (n)."""
        return self._probabilities(with_merge(self.model, merge)).argmax(dim=1).cpu().numpy()

    @torch.inference_mode()
    def _probabilities(self, model: AnyModel) -> Tensor:
        weight = next(model.parameters())
        with evaluating(model):
            logits = [
                model(self._preprocess.scale(torch.from_numpy(batch).to(weight.device)).to(weight.dtype))
                for batch in np.array_split(self._pixels, -(-self.count // _BATCH))
            ]
        return torch.cat(logits).double().softmax(dim=1)


def check_can_merge(config: ModelConfig) -> None:
    """Raise UsageError if a model with this configuration cannot merge tokens."""
    if not config.can_merge:
        raise UsageError(
            "Merging must have a ViT or hybrid with global attention, LayerNorm and positions that are added once,"
            f" got {config.name or config.family}."
        )


def count_macs(config: ViTConfig) -> int:
    """Count the multiply-accumulates of a forward pass. `config.macs` also counts those that the last block skips."""
    with torch.device("meta"):
        model = build(config).eval()
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.empty(1, config.channels, *config.resolution, device="meta"))
    return counter.get_total_flops() // 2


def find_merge(
    bundle: Bundle,
    images: Sequence[ImageLike] | np.ndarray,
    tolerance: float = 0.02,
    *,
    tell: Callable[[str], None] = say_nothing,
) -> list[MergeCost]:
    """Search for the settings `merge` with at most a share `tolerance` of changed predictions.

    Returns the accepted settings in the order of the search. The first merges no tokens, each one saves more
    multiply-accumulates than the one before, and the last is the result. `tell` is called with a line about each.
    """
    Bounds(0, 1).check("tolerance", tolerance)
    evaluator = MergeEvaluator(bundle, images)
    config = evaluator.model.config
    curve = [MergeCost((0,) * config.depth, count_macs(config), 0, evaluator.count, 0.0)]
    # The next step of each layer, cheapest first. Its cost may have been measured in an earlier round.
    steps = [(0.0, layer, -1, curve[0]) for layer in range(config.depth)]
    while steps:
        _, layer, measured_at, step = heapq.heappop(steps)
        if measured_at == len(curve) and step.share <= tolerance:
            curve.append(step)
            tell(_describe_step(step, curve[0]))
        elif measured_at == len(curve):
            continue  # this layer cannot merge more tokens within the tolerance
        if (next_merge := _merge_more(config, curve[-1].merge, layer)) is None:
            continue
        step = evaluator.measure(next_merge)
        if (saved := _count_saved_macs(config, curve[-1], step, layer)) > 0:
            heapq.heappush(steps, ((step.distance - curve[-1].distance) / saved, layer, len(curve), step))
    return curve


def _merge_more(config: ViTConfig, counts: Sequence[int], layer: int) -> tuple[int, ...] | None:
    """Return the numbers of merged tokens per layer with one step more in a layer.

    The numbers are rounded so that sequences have fast lengths. None if the layer cannot merge more tokens.
    """
    multiple = _FAST_MULTIPLE if config.patches >= _FAST_MULTIPLE * _STEPS else 1
    min_step = max(config.patches // _STEPS, 1)
    tokens, new_counts = config.tokens, []
    for index, count in enumerate(counts):
        tokens_after = tokens - count
        if index == layer:
            tokens_after = (tokens_after - min_step) // multiple * multiple
            if tokens - tokens_after > (tokens - config.prefix) // 2:
                return None
        elif count:
            tokens_after = min(-(-tokens_after // multiple) * multiple, tokens)
        new_counts.append(tokens - tokens_after)
        tokens = tokens_after
    return tuple(new_counts)


def _count_saved_macs(config: ViTConfig, before: MergeCost, after: MergeCost, layer: int) -> float:
    """Return the saved multiply-accumulates, minus the cost of matching tokens if the layer did not merge before."""
    matching = _MATCHING_SHARE * config.macs / config.depth if not before.merge[layer] else 0
    return before.macs - after.macs - matching


def _describe_step(step: MergeCost, unmerged: MergeCost) -> str:
    """Return a line about a step of the search, relative to the model without merging."""
    low, high = wilson_interval(step.changed, step.count)
    return (
        f"merge {list(step.merge)}: {unmerged.macs / step.macs:.2f}x fewer multiply-accumulates, {step.changed} of"
        f" {step.count} predictions changed ({step.share:.1%}, interval {low:.1%} to {high:.1%})"
    )


_MAX_IMAGES = 500  # of DATA: the search runs the model about forty times on each image


@contextlib.contextmanager
def merged_bundle(
    path: str, merge: str, data: AnyData | None, tolerance: float, *, split: str | None = None
) -> Generator[tuple[str, dict[str, Any]]]:
    """Yield the path of a temporary copy of a bundle that merges tokens, and a report of the cost of merging.

    `merge` is auto, a number for all layers, or a number for each layer, separated by commas. auto needs `data` to
    search on. Otherwise, with `data`, the changed predictions are counted. The copy is deleted at the end of the
    context.
    """
    counts, images = None if merge == "auto" else _parse_merge(merge), None
    bundle = load(path)
    check_can_merge(bundle.model.config)
    if data is not None:
        dataset = open_images(data)
        for note in dataset.notes:
            say(f"note: {note}")
        images = dataset.for_evaluation(split).sample_evenly(_MAX_IMAGES).images
    report: dict[str, Any] = {"bundle": fingerprint(check_folder(path)), "data": data}
    if counts is None:
        if images is None:
            raise UsageError("Merge auto must have images to search on, got none. Give --data DATA.")
        say(f"searching the numbers of merged tokens on {len(images):,} images")
        curve = find_merge(bundle, images, tolerance, tell=say)
        counts = curve[-1].merge
        report |= {"tolerance": tolerance, "curve": [cost.to_json() for cost in curve]}
        if not any(counts):
            raise UsageError(
                f"Tolerance must be large enough for a first step, got {tolerance:g}: merging any tokens changes more"
                f" of the {len(images):,} predictions."
            )
    model = with_merge(bundle.model, counts[0] if len(counts) == 1 else counts)
    if images is not None and "curve" not in report:
        report["curve"] = [MergeEvaluator(bundle, images).measure(model.config.merge).to_json()]
    lengths = (model.config.tokens, *model.config.layer_tokens)
    report["merge"] = [before - after for before, after in itertools.pairwise(lengths)]
    with tempfile.TemporaryDirectory(prefix="vitrail-") as scratch:
        folder = Path(scratch, "bundle")
        save(dataclasses.replace(bundle, model=model, provenance={**bundle.provenance, "merge": report}), folder)
        yield str(folder), report


def _parse_merge(text: str) -> tuple[int, ...]:
    """Convert the flag --merge to the number of merged tokens of all layers or of each layer."""
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(f"Merge must be auto, a number, or a number for each layer such as 0,0,16,0, got {text!r}.")
    return tuple(int(part) for part in parts)
