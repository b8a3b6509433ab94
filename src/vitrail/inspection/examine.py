"""Everything that `vitrail inspect` finds out about a bundle and some pictures, as plain arrays and JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import DamagedError, UsageError
from vitrail.evaluation.metrics import mean_interval
from vitrail.images.preprocess import Picture
from vitrail.inspection.evidence import evidence_grid, faith, occlusion, patch_drop, to_cells
from vitrail.inspection.layers import cka_table, gram, outliers, token_norms
from vitrail.inspection.maps import maps
from vitrail.inspection.places import Structure, filters, position_table, similarity, structure
from vitrail.inspection.reach import Reach, reaches
from vitrail.inspection.walk import Panel, class_path, walk
from vitrail.inspection.weights import Heads, Layout, entropy, layout, measure_heads, reading
from vitrail.inspection.words import english
from vitrail.models.base import AnyModel, Seen
from vitrail.models.look import count_from, evaluating, look
from vitrail.models.vit import ViT
from vitrail.weights.bundle import Bundle
from vitrail.weights.parts import OVERFLOWS

HELD = (0.2, 0.5, 0.8)
"""Shares of the gradient, whose squares are reported for the reach."""
DROPPED = (0.2, 0.5, 0.8)
"""Shares of the cells that are dropped at random."""
DRAWS = 5
"""Random draws beside which maps and dropped cells are judged."""
MOST = 32
"""Pictures of one page."""
FEW = 16
"""Pictures at least for CKA: with fewer it is noise."""
_PROBED = 4  # pictures at most for gradients
_BATCH = 32  # pictures of one batch for CKA
_ROOM = 4_000_000_000  # bytes of attention that views may hold


@dataclasses.dataclass(frozen=True)
class View:
    """One picture: what was answered, and why, as far as maps can say."""

    name: str
    pixels: np.ndarray
    """uint8 (H, W, C), as the model sees it."""
    answers: list[dict[str, Any]]
    """The first five classes; none of a model that does not classify."""
    panels: list[Panel] = dataclasses.field(default_factory=list)
    followed: int = 0
    """The patch whose numbers the walk shows."""
    path: list[dict[str, float]] = dataclasses.field(default_factory=list)
    attention: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    """(H, T, T) of each layer and head that is shown, 32-bit."""
    reading: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    """The shares in which the head reads the tokens, (T)."""
    maps: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """By method, (h, w), non-negative."""
    evidence: dict[str, Any] | None = None

    def read(self, layer: int) -> np.ndarray:
        """Where that looks, which the head reads, (H, T)."""
        return np.tensordot(self.attention[layer], self.reading, axes=(1, 0))

    def to_json(self) -> dict[str, Any]:
        """Every number of it."""
        return {
            "file": self.name, "predictions": self.answers, "walk": [panel.to_json() for panel in self.panels],
            "path": self.path, "evidence": self.evidence,
            "maps": {name: {"entropy": entropy(map_), "values": _rounded(map_)} for name, map_ in self.maps.items()},
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Comparison:
    """CKA of layers."""

    table: np.ndarray
    rows: list[str]
    columns: list[str]
    pictures: int
    against: str | None
    """The other bundle, whose layers are the columns."""


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
    norms: dict[int, list[float]]
    """Of each layer: median and largest length of patch tokens, share of outliers."""
    positions: np.ndarray | None
    """Similarities (N, N) of the embeddings of places."""
    structure: Structure | None
    filters: tuple[np.ndarray, np.ndarray] | None
    reach: dict[int, Reach]
    comparison: Comparison | None
    absent: list[tuple[str, str]]
    """Panels that this page does not have, and why, by the names of `words.toml`."""

    @property
    def is_trained(self) -> bool:
        """Whether anything is known to have taught this model."""
        return bool({"steps", "converted_from"} & self.bundle.provenance.keys())

    @property
    def fields(self) -> dict[str, str]:
        """What fills in the reasons of `absent`."""
        config = self.bundle.model.config
        objective = str(self.bundle.provenance.get("objective", ""))
        return {
            "family": config.family, "position": getattr(config, "position", ""), "objective": objective,
            "few": str(FEW),
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Every number."""
        config, compared = self.bundle.model.config, self.comparison
        return {
            "bundle": self.name, "model": {"family": config.family, **config.to_json()}, "trained": self.is_trained,
            "measured_on": len(next(iter(self.heads.values())).distance) if self.heads else len(self.views),
            "layers": [self._layer(layer) for layer in range(config.depth)],
            "pictures": [view.to_json() for view in self.views],
            "positions": None if self.structure is None else self.structure._asdict(),
            "filters": None if self.filters is None else {"variance": [float(share) for share in self.filters[1]]},
            "cka": None if compared is None else {
                "against": compared.against, "pictures": compared.pictures, "rows": compared.rows,
                "columns": compared.columns, "table": _rounded(compared.table),
            },
            "faith": self.faith(),
            "absent": [{"panel": panel, "reason": english(why, **self.fields)} for panel, why in self.absent],
        }  # fmt: skip

    def _layer(self, layer: int) -> dict[str, Any]:
        row: dict[str, Any] = {"layer": layer}
        if layer in self.heads:
            row["heads"] = [
                {
                    "attention_distance": float(distance.mean()),
                    "attention_distance_interval": _interval(distance),
                    "attention_distance_of_uniform": float(of_uniform.mean()),
                    "entropy": float(spread.mean()),
                    "prefix_mass": float(mass.mean()),
                }
                for distance, of_uniform, spread, mass in zip(*(part.T for part in self.heads[layer]), strict=True)
            ]
        if layer in self.norms:
            row["norms"] = dict(zip(("median", "largest", "outliers"), self.norms[layer], strict=True))
        if layer in self.reach:
            squares = {f"area_{share:g}": area for share, area in self.reach[layer].areas(HELD).items()}
            row["reach"] = {"pixels": float((self.reach[layer].heard > 0).mean()), **squares}
        return row

    def faith(self) -> dict[str, Any] | None:
        """Deletion and insertion of each map, means over pictures with intervals."""
        judged = [view.evidence["faith"] for view in self.views if view.evidence is not None]
        if not judged:
            return None
        return {
            name: {
                key: {"mean": float(np.mean(values)), "interval": _interval(np.array(values))}
                for key in ("deletion", "insertion")
                if (values := [one[name][key] for one in judged])
            }
            for name in judged[0]
        }


def examine(
    bundle: Bundle,
    pictures: Sequence[Picture],
    *,
    name: str = "bundle",
    names: Sequence[str] | None = None,
    evidence: bool = False,
    others: Sequence[Picture] = (),
    against: tuple[str, Bundle] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    seed: int = 0,
) -> Examination:
    """Look at a bundle, called `name`, on some pictures, called `names` (default: their paths, or numbers).

    `others` are more pictures for what needs many (CKA, distances); those that are among `pictures` do not count twice.
    The views hold the attention of these `layers` and `heads`, from 0 or from the end (-1), default all. Numbers are of
    all of them.
    """
    model, where = bundle.model, layout(bundle.model)
    if where is not None and where.grid == (1, 1):
        where = None  # one patch looks at itself
    shown_layers, shown_heads = _choose(model, where, layers, heads)
    _check_room(len(pictures), len(shown_layers) * len(shown_heads), model)
    names = [_call(picture, index) for index, picture in enumerate(pictures)] if names is None else names
    crops = [bundle.preprocess.crop(picture) for picture in pictures]
    same = {crop.tobytes() for crop in crops}
    more = [(picture, crop) for picture in others if (crop := bundle.preprocess.crop(picture)).tobytes() not in same]
    crops += [crop for _, crop in more]
    images = _prepare(bundle, crops)
    answers = getattr(model.config, "output", "classes") == "classes"
    classifies = answers and bundle.provenance.get("objective", "classify") == "classify"
    with evaluating(model):
        views, measured, norms = [], {}, {}
        for index, image in enumerate(images):
            if index >= len(pictures) and where is None:
                break
            seen = look(model, image[None])
            if not seen.logits.isfinite().all():
                raise DamagedError(OVERFLOWS)
            if where is not None:
                for layer, weights in seen.attention.items():
                    measured.setdefault(layer, []).append(measure_heads(weights.float().cpu(), where))
            if index < len(pictures):
                view = _view(bundle, where, names[index], crops[index], image, seen, classifies=classifies)
                if evidence and classifies:
                    view = dataclasses.replace(view, evidence=_weigh(model, image, view, seen, seed + index))
                kept = {layer: view.attention[layer][shown_heads] for layer in shown_layers}
                views.append(dataclasses.replace(view, attention=kept))
                _count_norms(norms, seen, 0 if where is None else where.prefix)
        table, components = None if where is None else position_table(model), filters(model)
        probed = sorted({0, model.config.depth // 2, model.config.depth - 1})
        comparison = None
        if len(images) >= FEW:
            comparison = _compare(model, images, against, [*pictures, *(picture for picture, _ in more)])
        absent = _absent(model, where, len(images), answers=answers, classifies=classifies, evidence=evidence)
        if table is None:
            absent.append(("positions", "one-patch" if where is None and layout(model) is not None else "no-table"))
        if components is None:
            absent.append(("filters", "no-pixels" if model.config.family == "hybrid" else "no-patches"))
        return Examination(
            bundle=bundle, name=_speakable(name), views=views, where=where, shown_heads=shown_heads,
            heads={layer: Heads(*map(np.concatenate, zip(*found, strict=True))) for layer, found in measured.items()},
            norms={layer: _lengths(np.concatenate(found)) for layer, found in norms.items()},
            positions=None if table is None else similarity(table),
            structure=None if table is None else structure(table, model.config.grid),
            filters=components,
            reach=reaches(model, images[: min(_PROBED, len(pictures))], probed, draws=4) if answers else {},
            comparison=comparison, absent=absent,
        )  # fmt: skip


def _choose(
    model: AnyModel, where: Layout | None, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Layers and heads to show, counted from 0 and in order."""
    if where is None:
        if layers is not None or heads is not None:
            raise UsageError(
                f"Layers and heads must be left out for family {model.config.family}: it has no attention."
            )
        return [], []
    depth, count = model.config.depth, model.config.heads
    chosen = (
        sorted({count_from("Layer", layer, depth) for layer in (range(depth) if layers is None else layers)}),
        sorted({count_from("Head", head, count) for head in (range(count) if heads is None else heads)}),
    )
    if not all(chosen):
        raise UsageError("Layers and heads must be at least one each, got none.")
    return chosen


def _check_room(pictures: int, maps_of_one: int, model: AnyModel) -> None:
    if not 1 <= pictures <= MOST:
        raise UsageError(
            f"Pictures on one page must be 1 to {MOST}, got {pictures:,}."
            + (" Name some of them, and give the folder by --data (in Python: others)." if pictures else "")
        )
    needed = pictures * maps_of_one * 4 * (model.config.tokens or 0) ** 2
    if needed > _ROOM:
        raise UsageError(
            f"Attention must fit into {_ROOM / 1e9:.0f} GB, got {pictures} picture(s) that would need"
            f" {needed / 1e9:.0f} GB. Name fewer pictures, layers or heads."
        )


def _call(picture: Picture, index: int) -> str:
    return _speakable(str(picture)) if isinstance(picture, str | Path) else f"picture {index}"


def _speakable(name: str) -> str:
    """A name that any file can hold: bytes that are no text are shown as such."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _prepare(bundle: Bundle, crops: Sequence[np.ndarray]) -> Tensor:
    weight = next(bundle.model.parameters())
    pixels = torch.from_numpy(np.stack(crops)).to(weight.device)
    return bundle.preprocess.scale(pixels).to(weight.dtype)


def _view(
    bundle: Bundle, where: Layout | None, name: str, pixels: np.ndarray, image: Tensor, seen: Seen, *, classifies: bool
) -> View:
    model = bundle.model
    answers = []
    if classifies:
        best = seen.logits[0].float().softmax(-1).sort(descending=True)
        labels = bundle.labels or tuple(map(str, range(len(best.values))))
        top = zip(best.values[:5].tolist(), best.indices[:5].tolist(), strict=True)
        answers = [{"label": labels[index], "score": score} for score, index in top]
    view = View(_speakable(name), pixels, answers)
    if where is None:
        return view
    found = {method: values[0] for method, values in maps(model, image[None], seen).items()}
    if not classifies:
        found.pop("relevance", None)
    view = dataclasses.replace(
        view, maps=found, reading=reading(seen, where)[0],
        followed=where.grid[0] // 2 * where.grid[1] + where.grid[1] // 2,
        attention={layer: weights[0].float().cpu().numpy() for layer, weights in sorted(seen.attention.items())},
    )  # fmt: skip
    if not isinstance(model, ViT):
        return view
    path = class_path(model, seen) if classifies else []
    return dataclasses.replace(view, panels=walk(model, seen, view.followed), path=path)


def _weigh(model: AnyModel, image: Tensor, view: View, seen: Seen, seed: int) -> dict[str, Any]:
    """Occlusion, the patch-drop curve, and the deletion and insertion of every map and of random ones."""
    label, grid = int(seen.logits[0].argmax()), evidence_grid(model)
    worth = occlusion(model, image, label, grid)
    judged = {name: to_cells(values, grid) for name, values in view.maps.items()} | {"occlusion": worth}
    found = {name: faith(model, image, label, values, grid)._asdict() for name, values in judged.items()}
    generator = np.random.default_rng(seed)
    random = np.array([faith(model, image, label, generator.random(grid), grid) for _ in range(DRAWS)])
    # In a random order, deletion and insertion are draws of the same thing.
    mean, deviation = float(random.mean()), float(random.std(ddof=1))
    found["random"] = {"deletion": mean, "insertion": mean, "deviation": deviation}
    dropped = patch_drop(model, image, label, grid, shares=DROPPED, draws=DRAWS, seed=seed)
    return {
        "class": label, "grid": list(grid), "occlusion": _rounded(worth), "faith": found,
        "patch_drop": [
            {"share": share, "probability": float(row.mean()), "interval": _interval(row)}
            for share, row in zip(DROPPED, dropped, strict=True)
        ],
    }  # fmt: skip


def _compare(
    model: AnyModel, images: Tensor, against: tuple[str, Bundle] | None, pictures: Sequence[Picture]
) -> Comparison:
    one = two = _grams(model, images)
    if against is not None:
        other = against[1]
        with evaluating(other.model):
            two = _grams(other.model, _prepare(other, [other.preprocess.crop(picture) for picture in pictures]))
    name = None if against is None else _speakable(against[0])
    return Comparison(cka_table(one, two), list(one), list(two), len(images), name)


def _grams(model: AnyModel, images: Tensor) -> Mapping[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {}
    for part in images.tensor_split(-(-len(images) // _BATCH)):
        for name, tensor in look(model, part, attention=False).steps.items():
            if name.startswith("blocks."):
                found.setdefault(name, []).append(gram(tensor.float().flatten(1).cpu().numpy()))
    return found


def _count_norms(norms: dict[int, list[np.ndarray]], seen: Seen, prefix: int) -> None:
    for layer in sorted(seen.layers):
        tokens = seen.steps[f"blocks.{layer}"]
        if tokens.ndim == 3:
            norms.setdefault(layer, []).append(token_norms(tokens[:, prefix:]))


def _lengths(norms_BN: np.ndarray) -> list[float]:
    return [float(np.median(norms_BN)), float(norms_BN.max()), float(outliers(norms_BN).mean())]


def _interval(values: np.ndarray) -> list[float] | None:
    ends = mean_interval(values.tolist())
    return None if ends is None else list(ends)


def _rounded(table: np.ndarray) -> list[list[float]]:
    return [[round(float(value), 6) for value in row] for row in table]


def _absent(
    model: AnyModel, where: Layout | None, count: int, *, answers: bool, classifies: bool, evidence: bool
) -> list[tuple[str, str]]:
    reasons = []
    if where is None:
        why = "no-attention" if layout(model) is None else "one-patch"
        reasons += [(panel, why) for panel in ("attention", "maps", "distances")]
    if where is None or not isinstance(model, ViT):
        reasons.append(("walk", "no-walk" if layout(model) is None or where is not None else "one-patch"))
    if not answers:
        reasons += [("answers", "no-answer"), ("reach", "shifted"), ("evidence", "no-answer")]
    elif not classifies:
        reasons += [(panel, "no-classes") for panel in ("answers", "evidence")]
    elif not evidence:
        reasons.append(("evidence", "not-asked"))
    if count < FEW:
        reasons.append(("cka", "few"))
    return reasons
