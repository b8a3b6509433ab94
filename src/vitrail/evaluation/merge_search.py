"""How many tokens a model may merge in which layer: a search on images, which need no labels.

What counts are the model's own answers without merging. The search is greedy: it merges more where the probabilities
move least for the multiply-accumulates that it saves, as long as the share of changed answers is within a tolerance.
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
_STEPS = 12  # to merge all patches
_FAST = 8  # attention with a multiple of so many tokens is up to a fifth faster on CPUs with AVX2
_MATCH = 0.1  # of a layer's time: what a match takes besides its product (ONNX Runtime; with torch, half of that)


class MergeCost(NamedTuple):
    """What a setting of `merge` saves, and what it changes."""

    merge: tuple[int, ...]
    macs: int
    """Multiply-accumulates for one image."""
    changed: int
    """Images with another answer than without merging."""
    count: int
    """Number of images."""
    distance: float
    """How far the probabilities move, mean over images: half of the sum over classes, from 0 to 1."""

    @property
    def share(self) -> float:
        """Share of changed answers."""
        return self.changed / self.count

    def to_json(self) -> dict[str, Any]:
        """All fields in JSON types, with the share of changed answers and its 95 % interval (Wilson)."""
        interval = list(wilson_interval(self.changed, self.count))
        return {**self._asdict(), "merge": list(self.merge), "share": self.share, "interval": interval}


def with_merge(model: AnyModel, merge: int | Sequence[int]) -> AnyModel:
    """The model with another setting `merge`. The two share their weights."""
    return share_weights(model, merge=merge)


class MergeEvaluator:
    """Compares a bundle's model with and without merging on images, which are preprocessed once."""

    def __init__(self, bundle: Bundle, images: Sequence[ImageLike] | np.ndarray) -> None:
        check_can_merge(bundle.model.config)
        bundle.info.check_single_label("Merging")
        if not len(images):
            raise UsageError("Images to search on must be at least one, got none.")
        self.model, self._preprocess = with_merge(bundle.model, 0), bundle.preprocess
        self._pixels = np.stack([bundle.preprocess.crop(image) for image in images])
        self.count = len(self._pixels)
        self._expected = self._probabilities(self.model)

    def price(self, merge: Sequence[int]) -> MergeCost:
        """What this setting saves and changes."""
        model = with_merge(self.model, merge)
        found = self._probabilities(model)
        moved = (found - self._expected).abs().sum(dim=1).div(2).mean()
        changed = int((found.argmax(1) != self._expected.argmax(1)).sum())
        return MergeCost(tuple(merge), count_macs(model.config), changed, self.count, float(moved))

    def answers(self, merge: Sequence[int]) -> np.ndarray:
        """The class that each image gets with this setting."""
        return self._probabilities(with_merge(self.model, merge)).argmax(dim=1).cpu().numpy()

    @torch.inference_mode()
    def _probabilities(self, model: AnyModel) -> Tensor:
        weight = next(model.parameters())
        with evaluating(model):
            logits = [
                model(self._preprocess.scale(torch.from_numpy(piece).to(weight.device)).to(weight.dtype))
                for piece in np.array_split(self._pixels, -(-self.count // _BATCH))
            ]
        return torch.cat(logits).double().softmax(dim=1)


def check_can_merge(config: ModelConfig) -> None:
    """Refuse a model that cannot merge tokens."""
    if not config.can_merge:
        raise UsageError(
            "Merging must have a ViT or hybrid with global attention, LayerNorm and positions that are added once,"
            f" got {config.name or config.family}."
        )


def count_macs(config: ViTConfig) -> int:
    """Multiply-accumulates of a forward pass. `config.macs` also counts what the last block spares."""
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
    """The settings of `merge` that the search went through: the first merges nothing, each saves more than the one
    before, and the last is what was found: of those tried, it saves most with a share of changed answers of at most
    `tolerance`. `tell` is told about each."""
    Bounds(0, 1).check("tolerance", tolerance)
    judge = MergeEvaluator(bundle, images)
    config = judge.model.config
    curve = [MergeCost((0,) * config.depth, count_macs(config), 0, judge.count, 0.0)]
    # Each layer's next step, cheapest first; its price may be that of an earlier round.
    steps = [(0.0, layer, -1, curve[0]) for layer in range(config.depth)]
    while steps:
        _, layer, tried_at, step = heapq.heappop(steps)
        if tried_at == len(curve) and step.share <= tolerance:
            curve.append(step)
            tell(_spoken(step, curve[0]))
        elif tried_at == len(curve):
            continue  # this layer merges no more
        if (raised := _merge_more(config, curve[-1].merge, layer)) is None:
            continue
        step = judge.price(raised)
        if (saved := _saved(config, curve[-1], step, layer)) > 0:
            heapq.heappush(steps, ((step.distance - curve[-1].distance) / saved, layer, len(curve), step))
    return curve


def _merge_more(config: ViTConfig, counts: Sequence[int], layer: int) -> tuple[int, ...] | None:
    """The counts with one step more in a layer, so that the sequences have fast lengths; None if the layer cannot
    merge more."""
    multiple = _FAST if config.patches >= _FAST * _STEPS else 1
    least = max(config.patches // _STEPS, 1)
    tokens, found = config.tokens, []
    for number, count in enumerate(counts):
        after = tokens - count
        if number == layer:
            after = (after - least) // multiple * multiple
            if tokens - after > (tokens - config.prefix) // 2:
                return None
        elif count:
            after = min(-(-after // multiple) * multiple, tokens)
        found.append(tokens - after)
        tokens = after
    return tuple(found)


def _saved(config: ViTConfig, before: MergeCost, after: MergeCost, layer: int) -> float:
    """Multiply-accumulates saved, less the time of a match where there was none before."""
    matches = _MATCH * config.macs / config.depth if not before.merge[layer] else 0
    return before.macs - after.macs - matches


def _spoken(step: MergeCost, plain: MergeCost) -> str:
    low, high = wilson_interval(step.changed, step.count)
    return (
        f"merge {list(step.merge)}: {plain.macs / step.macs:.2f}x fewer multiply-accumulates, {step.changed} of"
        f" {step.count} answers changed ({step.share:.1%}, interval {low:.1%} to {high:.1%})"
    )


_IMAGES = 500  # of DATA, at most: the search runs the model on each of them some forty times


@contextlib.contextmanager
def merged_bundle(
    path: str, merge: str, data: AnyData | None, tolerance: float, *, split: str | None = None
) -> Generator[tuple[str, dict[str, Any]]]:
    """A copy of a bundle that merges tokens, for as long as the context lasts, and what merging saves and changes.

    `merge` is auto, a number for every layer, or one for each, separated by commas. For auto, DATA must be given;
    otherwise the changed answers are counted where it is.
    """
    counts, images = None if merge == "auto" else _parse(merge), None
    bundle = load(path)
    check_can_merge(bundle.model.config)
    if data is not None:
        dataset = open_images(data)
        for note in dataset.notes:
            say(f"note: {note}")
        images = dataset.for_evaluation(split).sample_evenly(_IMAGES).images
    about: dict[str, Any] = {"bundle": fingerprint(check_folder(path)), "data": data}
    if counts is None:
        if images is None:
            raise UsageError("Merge auto must have images to search on, got none. Give --data DATA.")
        say(f"searching what to merge on {len(images):,} images")
        curve = find_merge(bundle, images, tolerance, tell=say)
        counts = curve[-1].merge
        about |= {"tolerance": tolerance, "curve": [price.to_json() for price in curve]}
        if not any(counts):
            raise UsageError(
                f"Tolerance must be one that some merging meets, got {tolerance:g}: every step that was tried changes"
                f" more of the {len(images):,} answers."
            )
    model = with_merge(bundle.model, counts[0] if len(counts) == 1 else counts)
    if images is not None and "curve" not in about:
        about["curve"] = [MergeEvaluator(bundle, images).price(model.config.merge).to_json()]
    lengths = (model.config.tokens, *model.config.layer_tokens)
    about["merge"] = [before - after for before, after in itertools.pairwise(lengths)]
    with tempfile.TemporaryDirectory(prefix="vitrail-") as aside:
        folder = Path(aside, "bundle")
        save(dataclasses.replace(bundle, model=model, provenance={**bundle.provenance, "merge": about}), folder)
        yield str(folder), about


def _parse(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(f"Merge must be auto, a number, or one for each layer such as 0,0,16,0, got {text!r}.")
    return tuple(int(part) for part in parts)
