"""The steps of a model's walkthrough for one followed patch, with values, colours and feature maps; and the logit lens.

Shapes: N positions of a grid, D features, h rows and w columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.decision import SINGLE_LABEL, DecisionRule
from vitrail.core.errors import UsageError
from vitrail.core.settings import Pair
from vitrail.models.activations import Activations
from vitrail.models.base import AnyModel
from vitrail.models.device import evaluating
from vitrail.models.walkthrough import WalkthroughStep, walkthrough_of
from vitrail.reports.inspect.panel import position_in_grid

PRINTED_VALUES = 6
"""Number of values of a vector that are printed."""
MAX_FEATURES = 96
"""Number of features of a vector that a page can contain for every position."""
TOP_CLASSES = 5
"""Number of classes that are listed."""
_FEATURE_MAPS = 8


class FollowedStep(NamedTuple):
    """One step of the walkthrough, for one followed patch."""

    key: str
    equation: str
    shape: tuple[int, ...]
    """Shape of the complete result."""
    vector: np.ndarray
    """The part of the result that belongs to the followed patch, (D)."""
    colours: np.ndarray | None = None
    """The result as an image, uint8 (h, w, 3)."""
    norms: np.ndarray | None = None
    """Norms of the vectors of all positions, (h, w)."""
    message: str = ""
    """Name of its message."""
    fields: Mapping[str, Any] = {}
    """Values for the placeholders of the message."""
    features: np.ndarray | None = None
    """First features at every position of the model's grid, (N, at most 96)."""
    lengths: np.ndarray | None = None
    """Norms of the complete vectors at these positions, (N)."""
    scale: float = 1.0
    """Value of the strongest colour. Steps of the same feature space have the same scale."""
    source: WalkthroughStep | None = None
    """The step of the model's walkthrough. None for the probabilities, which the bundle computes."""
    maps: np.ndarray | None = None
    """The strongest channels as feature maps, (count, h, w)."""

    @property
    def values(self) -> list[float]:
        """The printed values of the vector."""
        return [float(f"{value:.5g}") for value in self.vector[:PRINTED_VALUES]]

    @property
    def grid(self) -> Pair | None:
        """Rows and columns of its positions."""
        return None if self.source is None else self.source.grid

    @property
    def layer(self) -> int | None:
        """Number of the layer whose output this is."""
        return None if self.source is None else self.source.layer

    @property
    def shows(self) -> str:
        """What the figure shows besides values, see `WalkthroughStep.shows`."""
        return "" if self.source is None else self.source.shows

    @property
    def extra(self) -> np.ndarray:
        """The `extra` values of its source."""
        assert self.source is not None
        assert self.source.extra is not None
        return _to_array(self.source.extra)

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `inspect.json`."""
        entry = {"key": self.key, "equation": self.equation, "shape": list(self.shape), "values": self.values}
        if self.norms is not None:
            entry["norms"] = [[round(float(norm), 5) for norm in row] for row in self.norms]
        return entry


def follow_patch(model: AnyModel, activations: Activations, patch: int) -> list[FollowedStep]:
    """Return the steps of the first image in `activations` for a patch, given by its raster index in the model's grid.

    For a model without a grid, `patch` must be 0 and every step belongs to the whole image.
    """
    sources = walkthrough_of(model).steps(activations)
    grid = model.config.grid or (1, 1)
    if not 0 <= patch < grid[0] * grid[1]:
        raise UsageError(f"Patch must be from 0 to {grid[0] * grid[1] - 1}, got {patch}.")
    arrays = [_to_array(source.values) for source in sources]
    colours = _colours_by_space(sources, arrays)
    steps = []
    for source, values, image in zip(sources, arrays, colours, strict=True):
        vector, features, lengths, norms, maps = values, None, None, None, None
        if source.grid is not None:
            indices = [position_in_grid(index, grid, source.grid) for index in range(grid[0] * grid[1])]
            norms_N = np.linalg.norm(values, axis=-1)
            vector, features, lengths = values[indices[patch]], values[indices, :MAX_FEATURES], norms_N[indices]
            norms = norms_N.reshape(source.grid)
        if source.shows == "maps" and source.grid is not None:
            strongest = np.argsort(-np.abs(values).mean(axis=0), kind="stable")[:_FEATURE_MAPS]
            maps = np.abs(values[:, np.sort(strongest)]).T.reshape(-1, *source.grid)
        if source.key == "logits":
            vector = np.sort(vector)[::-1]
        step = FollowedStep(
            key=source.key,
            equation=source.equation,
            shape=source.shape or values.shape,
            vector=vector,
            colours=image,
            norms=norms,
            message=source.sentence,
            fields=source.fields,
            features=features,
            lengths=lengths,
            scale=_colour_scale(source, sources, arrays),
            source=source._replace(values=torch.empty(0)),
            maps=maps,
        )
        steps.append(step)
    return steps


def _colours_by_space(sources: Sequence[WalkthroughStep], arrays: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """Return the colours of each step, uint8 (h, w, 3).

    Steps of one feature space are coloured by the same principal components on the same scale.
    """
    colours: list[np.ndarray | None] = [None] * len(sources)
    for space in {source.space for source in sources if source.space and source.grid is not None}:
        members = [index for index, source in enumerate(sources) if source.space == space and source.grid is not None]
        components = _shared_components([arrays[index] for index in members])
        for index, components_N3 in zip(members, components, strict=True):
            rows, columns = sources[index].grid or (1, 1)
            colours[index] = (255 * components_N3).round().astype(np.uint8).reshape(rows, columns, 3)
    for index, source in enumerate(sources):
        if source.shows == "colours" and source.grid is not None:
            channels = np.clip((arrays[index] + 1) / 2, 0, 1)
            channels = channels[:, :3] if channels.shape[1] >= 3 else np.repeat(channels[:, :1], 3, axis=1)
            colours[index] = (255 * channels).round().astype(np.uint8).reshape(*source.grid, 3)
    return colours


def _shared_components(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the first three principal components of several groups of vectors (N, D) together, (N, 3) from 0 to 1.

    Each group is first centred and scaled to the same spread. Otherwise late layers, whose tokens have large norms,
    would determine the components alone.
    """
    centred = []
    for group in groups:
        x = np.asarray(group, np.float64) - np.mean(group, axis=0, dtype=np.float64)
        centred.append(x / max(float(np.sqrt(np.square(x).sum(axis=1).mean())), 1e-12))
    vectors = np.concatenate(centred)
    if vectors.shape[1] <= len(vectors):
        components = vectors @ np.linalg.eigh(vectors.T @ vectors)[1][:, ::-1][:, :3]
    else:
        eigenvalues, eigenvectors = np.linalg.eigh(vectors @ vectors.T)
        components = (eigenvectors * np.sqrt(np.maximum(eigenvalues, 0)))[:, ::-1][:, :3]
    components = np.pad(components, ((0, 0), (0, 3 - components.shape[1])))
    largest = np.take_along_axis(components, np.abs(components).argmax(axis=0)[None], axis=0)
    components = components * np.where(largest < 0, -1, 1)
    low, high = np.percentile(components, [1, 99], axis=0)
    components = np.clip((components - low) / np.maximum(high - low, 1e-12), 0, 1)
    return np.split(components, np.cumsum([len(group) for group in centred])[:-1])


def _colour_scale(source: WalkthroughStep, sources: Sequence[WalkthroughStep], arrays: Sequence[np.ndarray]) -> float:
    """Return the 99.5th percentile of absolute values over all steps of the same feature space."""
    same_space = [
        values.ravel()
        for other, values in zip(sources, arrays, strict=True)
        if other is source or (source.space and other.space == source.space)
    ]
    magnitudes = np.abs(np.concatenate(same_space))
    return float(np.percentile(magnitudes, 99.5)) if magnitudes.size else 1.0


@torch.no_grad()
def apply_logit_lens(
    model: AnyModel, activations: Activations, rule: DecisionRule = SINGLE_LABEL, labels: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return the prediction for the first image as if each layer were the last (the "logit lens").

    Each entry has the `layer`, the `probability` of the final prediction, the most probable class (`winner`), the `top`
    classes by name, and the `cosine` similarity of the head's input with that of the last layer.
    """
    final = activations.steps["pooled"][:1].float()
    label = int(activations.logits[0].argmax())
    entries = []
    with evaluating(model):
        for layer in sorted(activations.layers):
            early = Activations(frozenset(), with_attention=False)
            logits = model.read(activations.steps[f"blocks.{layer}"][:1], early)
            probabilities = rule.probabilities(logits.float())[0]
            cosine = torch.nn.functional.cosine_similarity(early.steps["pooled"].float(), final)
            best = probabilities.sort(descending=True, stable=True)
            top = zip(best.indices[:TOP_CLASSES].tolist(), best.values[:TOP_CLASSES].tolist(), strict=True)
            entries.append(
                {
                    "layer": layer,
                    "probability": float(probabilities[label]),
                    "winner": int(probabilities.argmax()),
                    "cosine": float(cosine),
                    "top": [
                        {"class": index, "label": str(index) if labels is None else labels[index], "score": score}
                        for index, score in top
                    ],
                }
            )
    return entries


def colour_by_components(features_ND: Tensor | np.ndarray, grid: Pair) -> np.ndarray:
    """Return the first three principal components of features as red, green and blue, uint8 (h, w, 3).

    Each component is scaled from its 1st to its 99th percentile, with the sign that makes its largest value positive.
    """
    (components_N3,) = _shared_components([np.asarray(features_ND)])
    return (255 * components_N3).round().astype(np.uint8).reshape(*grid, 3)


def _to_array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
