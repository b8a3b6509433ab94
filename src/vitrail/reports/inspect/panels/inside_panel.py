"""The inside of a Transformer's layer for the followed patch: every step from LayerNorm to the MLP."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from vitrail.core.errors import UsageError
from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations, count_all_from
from vitrail.reports.colours import sequential, signed
from vitrail.reports.equations import typeset
from vitrail.reports.inspect.packing import pack, rounded_to
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel
from vitrail.reports.inspect.shared_messages import SHARED
from vitrail.reports.translations import LANGUAGES

_FEATURES = 96  # of each vector that the page carries
_ROOM = 200_000_000  # bytes that the scores of every token may take
_OF_HEADS = ("q", "k", "v", "heads")
_OF_PAIRS = ("scores", "weights")
_SCRIPTED = (
    "length",
    "mean-deviation",
    "rms",
    "largest-score",
    "largest-weight",
    "prefix-weight",
    "registers-weight",
    "of-heads",
    "positive",
    "one-patch-only",
)


class Inner(NamedTuple):
    """What is kept of one layer and image, for the tokens `rows`."""

    rows: list[int]
    """Indices of the tokens: all, or [CLS] and the followed one."""
    vectors: dict[str, np.ndarray]
    """By the name of the step, (R, at most 96); `lengths` are of the whole vectors."""
    lengths: dict[str, np.ndarray]
    heads: dict[str, np.ndarray]
    """q, k, v and heads: (H, R, d)."""
    scores: np.ndarray
    """(H, R, T); masked ones are -inf."""
    norms: dict[str, dict[str, np.ndarray]]
    """What each norm computes of the token that enters it, by name, each (R); only norms that compute something."""
    positive: np.ndarray
    """Share of the MLP's hidden layer that is positive, (R)."""

    def weights(self) -> np.ndarray:
        """The softmax of the scores (H, R, T)."""
        shares = np.exp(self.scores - self.scores.max(axis=-1, keepdims=True))
        return shares / shares.sum(axis=-1, keepdims=True)

    def only(self, tokens: list[int]) -> "Inner":
        """The same for some of its tokens."""
        at = [self.rows.index(token) for token in tokens]
        return Inner(
            tokens,
            {name: values[at] for name, values in self.vectors.items()},
            {name: values[at] for name, values in self.lengths.items()},
            {name: values[:, at] for name, values in self.heads.items()},
            self.scores[:, at],
            {name: {one: values[at] for one, values in used.items()} for name, used in self.norms.items()},
            self.positive[at],
        )


class InsideLayerPanel(Panel):
    """Each step of some layers, for the patch in hand and a chosen head."""

    words = load_messages(__file__)
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        config = context.model.config
        if context.inside is not None and not context.model.opens_blocks:
            raise UsageError(f"Inside must not be given for family {config.family}: it has no Transformer's layers.")
        depth = config.depth
        asked = {0, depth // 2, depth - 1} if context.inside is None else context.inside
        self.layers = sorted(set(count_all_from("Layer", asked, depth)))
        if not self.layers:
            raise UsageError("Inside must be at least one layer, got none.")
        self.has_all = True
        """Whether the page carries every token, or only the followed one and [CLS]."""
        self.inner: dict[int, dict[int, Inner]] = {}
        """Of each shown image and layer."""

    @property
    def opens(self) -> frozenset[int]:
        return frozenset(self.layers if self.why_absent() is None else ())

    def why_absent(self) -> str | None:
        if not self.context.model.opens_blocks:
            return "no-blocks"
        return self.context.why_no_attention()

    @property
    def _prefix(self) -> int:
        return self.context.model.config.prefix

    @property
    def _kept(self) -> list[int]:
        """The tokens of a small page: [CLS], if there is one, and the followed patch."""
        return [*([0] if self._reads_class else []), self._prefix + (self.context.followed or 0)]

    @property
    def _reads_class(self) -> bool:
        return self.context.layout is not None and self.context.layout.reads == "[CLS]"

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        tokens = self.context.model.config.tokens or 1
        heads = self.context.model.config.heads or 1
        needed = 4 * len(self.context.shown) * len(self.layers) * heads * tokens**2
        rows = list(range(tokens)) if needed <= _ROOM else self._kept
        self.inner[number] = {layer: self._open(layer, activations, rows) for layer in self.layers}

    def _open(self, layer: int, activations: Activations, rows: list[int]) -> Inner:
        walkthrough = self.context.walkthrough
        equations = walkthrough.layer_equations(layer)
        steps = {
            name: activations.steps[f"blocks.{layer}.{name}"][0].float().cpu().numpy()
            for name in equations
            if name != "out"
        }
        steps["entering"] = walkthrough.layer_input(layer, activations)[0].detach().float().cpu().numpy()
        steps["out"] = activations.steps[f"blocks.{layer}"][0].float().cpu().numpy()
        is_first = next(iter(equations)) == "norm1"
        normed = {"norm1": "entering", "norm2": "middle"} if is_first else {"norm1": "middle"}
        vectors = {name: step[rows] for name, step in steps.items() if name not in _OF_HEADS + _OF_PAIRS}
        return Inner(
            rows,
            {name: step[:, :_FEATURES] for name, step in vectors.items()},
            {name: np.linalg.norm(step, axis=-1) for name, step in vectors.items()},
            {name: steps[name][:, rows] for name in _OF_HEADS},
            steps["scores"][:, rows],
            {name: used for name, entering in normed.items() if (used := self._statistics(vectors[entering]))},
            (vectors["z1"] > 0).mean(axis=-1),
        )

    def _statistics(self, entering_RD: np.ndarray) -> dict[str, np.ndarray]:
        found = self.context.walkthrough.norm_statistics(torch.from_numpy(entering_RD)[None])
        return {name: values[0].numpy() for name, values in found.items()}

    def image_numbers(self, number: int) -> dict[str, Any]:
        """Every step of the followed patch."""
        if number not in self.inner:
            return {"inside": []}
        return {"inside": [self._numbers(layer, inner) for layer, inner in self.inner[number].items()]}

    def _numbers(self, layer: int, inner: Inner) -> dict[str, Any]:
        at = inner.rows.index(self._kept[-1])
        weights = inner.weights()
        return {
            "layer": layer,
            "norms": {
                name: {one: float(f"{values[at]:.6g}") for one, values in used.items()}
                for name, used in inner.norms.items()
            },
            "lengths": {name: float(f"{values[at]:.6g}") for name, values in inner.lengths.items()},
            "positive": float(inner.positive[at]),
            "heads": [
                {
                    "head": head,
                    "length": float(f"{np.linalg.norm(inner.heads['heads'][head, at]):.6g}"),
                    "scores": [
                        None if np.isneginf(score) else float(f"{score:.5g}") for score in inner.scores[head, at]
                    ],
                    "weights": rounded_to(weights[head, at], 5),
                }
                for head in range(len(inner.scores))
            ],
        }

    # The section

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.inner:
            return ""
        equations = self.context.walkthrough.layer_equations(self.layers[0])
        layers = "".join(f'<option value="{layer}">{layer}</option>' for layer in self.layers)
        heads = "".join(
            f'<option value="{head}">{head}</option>' for head in range(self.context.model.config.heads or 1)
        )
        controls = (
            f'<label>{self.word("layer")} <select id="inside-layer">{layers}</select></label>'
            f'<label>{self.word("head")} <select id="inside-head">{heads}</select></label>'
        )
        if self._reads_class:
            controls += (
                f'<label><input type="radio" name="inside-token" value="patch" checked> {self.word("of-patch")}</label>'
                f'<label><input type="radio" name="inside-token" value="class"> {self.word("of-class")}</label>'
            )
        rows = "".join(self._row(name, equation) for name, equation in {"entering": "z", **equations}.items())
        return (
            f"{self.say('inside-intro')}{'' if self.has_all else self.say('few-tokens')}"
            f'<form class="controls" autocomplete="off">{controls}</form><p id="inside-of" aria-live="polite"></p>'
            f'<div class="steps">{rows}</div>{self.symbols(" ".join(equations.values()))}'
        )

    def _row(self, name: str, equation: str) -> str:
        shape = 'class="map"' if name in _OF_PAIRS else 'class="strip"'
        return (
            f'<div class="step"><div>{typeset(equation)}</div>'
            f'<div>{self.say(f"step-{name}")}<canvas {shape} aria-hidden="true" data-step="{name}"></canvas>'
            f'<code data-note="{name}"></code></div></div>'
        )

    def data(self) -> dict[str, Any]:
        words = {**SHARED, **self.words}
        return {
            "words": {
                language: {name: words[name][language] for name in ("layer", "head", "of-class", *_SCRIPTED)}
                for language in LANGUAGES
            },
            "prefix": self._prefix,
            "class": self._reads_class,
            "signed": signed(np.linspace(-1, 1, 255)).tolist(),
            "ramp": sequential(np.linspace(0, 1, 256)).tolist(),
            "images": {
                number: {layer: self._packed(inner) for layer, inner in layers.items()}
                for number, layers in self.inner.items()
            },
        }

    def _packed(self, inner: Inner) -> dict[str, Any]:
        if not self.has_all:
            inner = inner.only(self._kept)
        # One scale for all vectors of the residual stream, one for queries, keys and values.
        stream = [inner.vectors[name] for name in ("entering", "msa", "middle", "z2", "out") if name in inner.vectors]
        scale = float(np.percentile(np.abs(np.concatenate(stream, axis=None)), 99.5))
        masked = np.isneginf(inner.scores)
        scores = np.where(masked, 0, inner.scores)
        lowest = float(scores.min()) - 20.0  # after the softmax, as good as nothing
        return {
            "rows": inner.rows,
            "vectors": {
                name: {
                    "width": values.shape[1],
                    **pack(values, scale=scale if name in ("entering", "msa", "middle", "z2", "out") else None),
                }
                for name, values in inner.vectors.items()
            },
            "lengths": {name: rounded_to(values) for name, values in inner.lengths.items()},
            "heads": {name: {"width": values.shape[2], **pack(values)} for name, values in inner.heads.items()},
            "head_lengths": rounded_to(np.linalg.norm(inner.heads["heads"], axis=-1), 3),
            "scores": pack(np.where(masked, lowest, scores) if masked.any() else scores, bits=16),
            "least": lowest + 10 if masked.any() else None,
            "tokens": inner.scores.shape[2],
            "norms": {
                name: {one: rounded_to(values) for one, values in used.items()} for name, used in inner.norms.items()
            },
            "positive": rounded_to(inner.positive, 3),
        }

    def least_bytes(self) -> int:
        if not self.has_all:
            return 0
        return 2 * sum(inner.scores.size for layers in self.inner.values() for inner in layers.values())

    def smaller(self) -> Iterator[Self]:
        if self.inner:
            less = copy.copy(self)
            less.has_all = False
            yield less
