"""Everything that `vitrail inspect` finds out about a bundle and some pictures, as plain arrays and JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.evaluation.metrics import mean_interval
from vitrail.images.preprocess import Picture
from vitrail.inspection.evidence import Faith, evidence_grid, faith, occlusion, patch_drop, to_cells
from vitrail.inspection.layers import cka_table, outliers, token_norms
from vitrail.inspection.places import Structure, filters, position_table, similarity, structure
from vitrail.inspection.reach import reach
from vitrail.inspection.walk import Panel, class_path, walk
from vitrail.inspection.weights import Heads, Layout, entropy, layout, measure_heads, relevance, rollout
from vitrail.inspection.words import english
from vitrail.models.base import AnyModel, Seen
from vitrail.models.look import count_from, look
from vitrail.models.vit import ViT
from vitrail.weights.bundle import Bundle

SHARES = (0.2, 0.5, 0.8)
"""Of the gradient, whose squares are reported for the reach; of the cells, that are dropped."""
MOST = 32
"""Pictures of one page."""
_FEW = 4  # pictures at least for CKA
_PROBED = 4  # pictures at most for gradients


@dataclasses.dataclass(frozen=True)
class View:
    """One picture: what was answered, and why, as far as maps can say."""

    name: str
    pixels: np.ndarray
    """uint8 (H, W, C), as the model sees it."""
    answers: list[dict[str, Any]]
    panels: list[Panel]
    path: list[dict[str, float]]
    attention: dict[int, np.ndarray]
    """(H, T, T) of each layer and head that is shown, 32-bit."""
    maps: dict[str, np.ndarray]
    """By method, (h, w), non-negative."""
    followed: int = 0
    """The patch whose numbers the walk shows."""
    evidence: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Examination:
    """The whole."""

    bundle: Bundle
    name: str
    views: list[View]
    where: Layout | None
    """Where tokens stand, of a model with attention between places."""
    heads: dict[int, Heads]
    """Of each layer, (pictures, H)."""
    shown_heads: list[int]
    """Whose attention the views hold."""
    norms: dict[str, list[float]]
    """Of each layer: median and largest length of tokens, share of outliers."""
    positions: np.ndarray | None
    """Similarities (N, N) of the embeddings of places."""
    structure: Structure | None
    filters: tuple[np.ndarray, np.ndarray] | None
    reach: dict[int, np.ndarray]
    cka: np.ndarray | None
    layers: tuple[list[str], list[str]]
    """What the rows and columns of the CKA table are."""
    compared: int
    """Pictures that the CKA table is of."""
    against: str | None
    absent: list[tuple[str, str]]
    """Panels that this page does not have, and why, by the names of `words.toml`."""

    @property
    def is_trained(self) -> bool:
        """Whether anything is known to have taught this model."""
        known = {"data", "steps", "converted_from"} & self.bundle.provenance.keys()
        return bool(known) and bool(self.bundle.model.head.weight.any())

    @property
    def fields(self) -> dict[str, str]:
        """What fills in the reasons of `absent`."""
        config = self.bundle.model.config
        return {"family": config.family, "position": getattr(config, "position", "")}

    def to_json(self) -> dict[str, Any]:
        """Every number."""
        config = self.bundle.model.config
        layers = []
        for layer in range(config.depth):
            row: dict[str, Any] = {"layer": layer}
            if layer in self.heads:
                found = self.heads[layer]
                row["heads"] = [
                    {
                        "attention_distance": float(found.distance[:, head].mean()),
                        "attention_distance_interval": _interval(found.distance[:, head]),
                        "attention_distance_of_uniform": float(found.of_uniform[:, head].mean()),
                        "entropy": float(found.entropy[:, head].mean()),
                        "prefix_mass": float(found.prefix_mass[:, head].mean()),
                    }
                    for head in range(found.distance.shape[1])
                ]
            if f"blocks.{layer}" in self.norms:
                row["norms"] = dict(zip(("median", "largest", "outliers"), self.norms[f"blocks.{layer}"], strict=True))
            if layer in self.reach:
                row["reach"] = {
                    "pixels": float((self.reach[layer] > 0).mean()),
                    **{f"area_{share:g}": area for share, area in areas(self.reach[layer]).items()},
                }
            layers.append(row)
        return {
            "bundle": self.name, "model": {"family": config.family, **config.to_json()}, "trained": self.is_trained,
            "measured_on": len(next(iter(self.heads.values())).distance) if self.heads else len(self.views),
            "layers": layers, "pictures": [self._view(view) for view in self.views],
            "positions": None if self.structure is None else self.structure._asdict(),
            "filters": None if self.filters is None else {"variance": [float(share) for share in self.filters[1]]},
            "cka": None if self.cka is None else {
                "against": self.against, "pictures": self.compared, "rows": self.layers[0], "columns": self.layers[1],
                "table": [[round(float(cell), 6) for cell in row] for row in self.cka],
            },
            "absent": [{"panel": panel, "reason": english(why, **self.fields)} for panel, why in self.absent],
        }  # fmt: skip

    @staticmethod
    def _view(view: View) -> dict[str, Any]:
        return {
            "file": view.name, "predictions": view.answers, "walk": [panel.to_json() for panel in view.panels],
            "path": view.path, "evidence": view.evidence,
            "maps": {
                name: {"entropy": entropy(values), "values": [[round(float(v), 6) for v in row] for row in values]}
                for name, values in view.maps.items()
            },
        }  # fmt: skip


def examine(
    bundle: Bundle,
    name: str,
    pictures: Sequence[tuple[str, Picture]],
    *,
    evidence: bool = False,
    others: Sequence[Picture] = (),
    against: tuple[str, Bundle] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    seed: int = 0,
) -> Examination:
    """Look at a bundle on some pictures. `others` are more of them for what needs many (CKA, distances).

    The views hold the attention of these `layers` and `heads`, from 0 or from the end (-1), default all. Numbers are of
    all of them.
    """
    if not 1 <= len(pictures) <= MOST:
        raise UsageError(
            f"Pictures on one page must be 1 to {MOST}, got {len(pictures)}."
            + (" Name some of them, and give the folder as data." if pictures else "")
        )
    model, preprocess = bundle.model, bundle.preprocess
    where = layout(model)
    shown_layers, shown_heads = _choose(model, where, layers, heads)
    device = next(model.parameters()).device
    images = preprocess([picture for _, picture in pictures]).to(device)
    more = preprocess(list(others)).to(device) if others else images[:0]
    many = torch.cat([images, more])
    views, measured, lengths = [], {}, {}
    for index, (title, picture) in enumerate(pictures):
        view, seen = _view(bundle, where, title, picture, images[index : index + 1])
        if evidence:
            view = dataclasses.replace(view, evidence=_weigh(model, images[index], view, seed))
        kept = {layer: view.attention[layer][shown_heads] for layer in shown_layers}
        views.append(dataclasses.replace(view, attention=kept))
        _count_heads(measured, seen, where)
        for step, tensor in seen.steps.items():
            if step.startswith("blocks.") and tensor.ndim == 3:
                lengths.setdefault(step, []).append(token_norms(tensor))
    if where is not None:
        for index in range(len(more)):
            _count_heads(measured, look(model, more[index : index + 1]), where)
    table = position_table(model) if isinstance(model, ViT) else None
    probed = sorted({0, model.config.depth // 2, model.config.depth - 1})
    can_reach = getattr(model.config, "output", "classes") == "classes"
    cka, names = None, ([], [])
    if len(many) >= _FEW:
        every = [*(picture for _, picture in pictures), *others]
        cka, names = _compare(model, many, bundle if against is None else against[1], every)
    return Examination(
        bundle=bundle, name=name, views=views, where=where,
        heads={layer: Heads(*map(np.concatenate, zip(*found, strict=True))) for layer, found in measured.items()},
        shown_heads=shown_heads,
        norms={step: _lengths(np.concatenate(found)) for step, found in lengths.items()},
        positions=None if table is None else similarity(table),
        structure=None if table is None else structure(table, model.config.grid),
        filters=filters(model) if isinstance(model, ViT) and model.config.family == "vit" else None,
        reach={layer: reach(model, images[:_PROBED], layer, draws=4) for layer in probed} if can_reach else {},
        cka=cka, layers=names, compared=len(many), against=None if against is None else against[0],
        absent=_absent(model, len(many), evidence=evidence),
    )  # fmt: skip


def _choose(
    model: AnyModel, where: Layout | None, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Layers and heads to show, counted from 0 and in order."""
    if where is None:
        return [], []
    depth, count = model.config.depth, model.config.heads
    return (
        sorted({count_from("Layer", layer, depth) for layer in (range(depth) if layers is None else layers)}),
        sorted({count_from("Head", head, count) for head in (range(count) if heads is None else heads)}),
    )


def _count_heads(heads: dict[int, list[Heads]], seen: Seen, where: Layout | None) -> None:
    if where is not None:
        for layer, weights in seen.attention.items():
            heads.setdefault(layer, []).append(measure_heads(weights.float().cpu(), where))


def _view(bundle: Bundle, where: Layout | None, title: str, picture: Picture, image: Tensor) -> tuple[View, Seen]:
    model = bundle.model
    seen = look(model, image)
    shares = seen.logits.float().softmax(-1)
    answers: list[dict[str, Any]] = []
    if shares.ndim == 2:  # a model that predicts pixels has no answer
        labels = bundle.labels or tuple(map(str, range(shares.shape[-1])))
        best = shares[0].sort(descending=True)
        top = zip(best.values[:5].tolist(), best.indices[:5].tolist(), strict=True)
        answers = [{"label": labels[index], "score": score} for score, index in top]
    view = View(title, bundle.preprocess.crop(picture), answers, [], [], {}, {})
    if where is None:
        return view, seen
    attention = {layer: weights[0].float().cpu().numpy() for layer, weights in sorted(seen.attention.items())}
    flow = rollout([seen.attention[layer] for layer in sorted(seen.attention)])[0]
    maps = {
        "rollout": where.read(flow.cpu().numpy()),
        "last attention": where.read(attention[model.config.depth - 1].mean(axis=0)),
    }
    if answers:
        maps["relevance"] = relevance(model, image)[0][0].cpu().numpy().reshape(where.grid)
    panels, path, followed = [], [], where.grid[0] // 2 * where.grid[1] + where.grid[1] // 2
    if isinstance(model, ViT):
        panels, path = walk(model, seen, followed), class_path(model, seen)
    found = dataclasses.replace(view, attention=attention, maps=maps, panels=panels, path=path, followed=followed)
    return found, seen


def _weigh(model: AnyModel, image: Tensor, view: View, seed: int) -> dict[str, Any] | None:
    """Occlusion, the patch-drop curve, and the deletion and insertion of every map and of a random one."""
    with torch.inference_mode():
        logits = model.eval()(image[None])
    if logits.ndim != 2:
        return None
    label, grid = int(logits.argmax()), evidence_grid(model)
    worth = occlusion(model, image, label, grid)
    maps = {name: to_cells(values, grid) for name, values in view.maps.items()}
    maps["occlusion"] = worth
    maps["random"] = np.random.default_rng(seed).random(grid)
    found: dict[str, Faith] = {name: faith(model, image, label, values, grid) for name, values in maps.items()}
    dropped = patch_drop(model, image, label, grid, shares=SHARES, seed=seed)
    return {
        "class": label, "grid": list(grid), "occlusion": [[round(float(v), 6) for v in row] for row in worth],
        "faith": {name: one._asdict() for name, one in found.items()},
        "patch_drop": [
            {"share": share, "probability": float(row.mean()), "interval": _interval(row)}
            for share, row in zip(SHARES, dropped, strict=True)
        ],
    }  # fmt: skip


@torch.inference_mode()
def _compare(
    model: AnyModel, images: Tensor, other: Bundle, pictures: Sequence[Picture]
) -> tuple[np.ndarray, tuple[list[str], list[str]]]:
    one = _layers_of(model, images)
    two = one
    if other.model is not model:
        two = _layers_of(other.model, other.preprocess(pictures).to(images.device))
    return cka_table(one, two), (list(one), list(two))


def _layers_of(model: AnyModel, images: Tensor, batch: int = 16) -> Mapping[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {}
    pieces = [part for part in images.split(batch) if len(part) >= _FEW]
    for part in pieces:
        seen = look(model, part, attention=False)
        for name, tensor in seen.steps.items():
            if name.startswith("blocks."):
                found.setdefault(name, []).append(tensor.float().flatten(1).cpu().numpy())
    return found


def _interval(values: np.ndarray) -> list[float] | None:
    ends = mean_interval(values.tolist())
    return None if ends is None else list(ends)


def _lengths(norms_BT: np.ndarray) -> list[float]:
    return [float(np.median(norms_BT)), float(norms_BT.max()), float(outliers(norms_BT).mean())]


def areas(heard: np.ndarray, shares: Sequence[float] = SHARES) -> dict[float, float]:
    """The part of the picture that the smallest centred square takes which holds each share of the whole."""
    height, width = heard.shape
    top, left = height // 2, width // 2
    whole = heard.sum()
    found: dict[float, float] = {}
    for half in range(max(height, width)):
        rows = slice(max(top - half, 0), top + half + 1)
        columns = slice(max(left - half, 0), left + half + 1)
        inside = heard[rows, columns]
        for share in shares:
            if share not in found and inside.sum() >= share * whole:
                found[share] = inside.size / heard.size
    return found


def _absent(model: AnyModel, count: int, *, evidence: bool) -> list[tuple[str, str]]:
    c = model.config
    reasons = []
    if layout(model) is None:
        reasons += [(panel, "no-attention") for panel in ("walk", "attention", "distances", "positions", "filters")]
    elif not isinstance(model, ViT):
        reasons += [(panel, "no-patches") for panel in ("walk", "positions", "filters")]
    else:
        if position_table(model) is None:
            reasons.append(("positions", "no-table"))
        if c.family != "vit":
            reasons.append(("filters", "no-pixels"))
    if getattr(c, "output", "classes") != "classes":
        reasons += [(panel, "no-answer") for panel in ("reach", "evidence")]
    elif not evidence:
        reasons.append(("evidence", "not-asked"))
    if count < _FEW:
        reasons.append(("cka", "few"))
    return reasons
