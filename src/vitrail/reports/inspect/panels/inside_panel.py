"""Panel `inside`: every step inside a Transformer layer, from LayerNorm to the MLP, for the followed patch."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from vitrail.core.errors import UsageError
from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations, resolve_indices
from vitrail.reports.colours import sequential, signed
from vitrail.reports.equations import typeset
from vitrail.reports.inspect.packing import pack, round_significant
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel
from vitrail.reports.inspect.shared_messages import SHARED_MESSAGES
from vitrail.reports.translations import LANGUAGES

_MAX_FEATURES = 96  # of each vector in the page
_MAX_BYTES = 200_000_000  # of the attention scores of all tokens in memory
_LAYER_INPUT = "entering"  # key in inspect.json
_HEAD_STEPS = ("q", "k", "v", "heads")
_PAIR_STEPS = ("scores", "weights")
_RESIDUAL_STEPS = (_LAYER_INPUT, "msa", "middle", "z2", "out")
_SCRIPT_MESSAGES = (
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


class LayerSteps(NamedTuple):
    """Values of all steps inside one layer for one image.

    Shapes: R recorded tokens, F features (at most 96), H heads, d width of a head, T all tokens.
    """

    rows: list[int]
    """Indices of the recorded tokens: all tokens, or [CLS] and the followed patch."""
    vectors: dict[str, np.ndarray]
    """First features of each step, (R, F)."""
    lengths: dict[str, np.ndarray]
    """Norms of the complete vectors, (R)."""
    heads: dict[str, np.ndarray]
    """q, k, v and the outputs of the heads, (H, R, d)."""
    scores: np.ndarray
    """Attention scores (H, R, T). Masked scores are -inf."""
    norms: dict[str, dict[str, np.ndarray]]
    """Statistics of the input of each norm layer, by name, (R). Norm layers without statistics are left out."""
    positive: np.ndarray
    """Share of positive values in the hidden layer of the MLP, (R)."""

    def weights(self) -> np.ndarray:
        """Return the attention weights (H, R, T)."""
        exponentials = np.exp(self.scores - self.scores.max(axis=-1, keepdims=True))
        return exponentials / exponentials.sum(axis=-1, keepdims=True)

    def select(self, tokens: list[int]) -> "LayerSteps":
        """Return the values of fewer tokens."""
        at = [self.rows.index(token) for token in tokens]
        return LayerSteps(
            tokens,
            {name: values[at] for name, values in self.vectors.items()},
            {name: values[at] for name, values in self.lengths.items()},
            {name: values[:, at] for name, values in self.heads.items()},
            self.scores[:, at],
            {
                norm: {name: values[at] for name, values in statistics.items()}
                for norm, statistics in self.norms.items()
            },
            self.positive[at],
        )


class InsideLayerPanel(Panel):
    """Every step of the selected layers, for the followed patch and a selected head."""

    messages = load_messages(__file__)
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        config = context.model.config
        if context.inside is not None and not context.model.opens_blocks:
            raise UsageError(f"Inside must be omitted for family {config.family}, which has no Transformer layers.")
        depth = config.depth
        layers = {0, depth // 2, depth - 1} if context.inside is None else context.inside
        self.layers = sorted(set(resolve_indices("Layer", layers, depth)))
        if not self.layers:
            raise UsageError("Inside must be at least one layer, got none.")
        self.has_all_tokens = True
        """Whether the page contains every token, or only the followed patch and [CLS]."""
        self.steps: dict[int, dict[int, LayerSteps]] = {}
        """By page image and layer."""

    @property
    def inside_layers(self) -> frozenset[int]:
        return frozenset(self.layers if self.why_absent() is None else ())

    def why_absent(self) -> str | None:
        if not self.context.model.opens_blocks:
            return "no-blocks"
        return self.context.why_no_attention()

    @property
    def _prefix(self) -> int:
        return self.context.model.config.prefix

    @property
    def _small_page_tokens(self) -> list[int]:
        """Tokens of a reduced page: [CLS], if the head reads it, and the followed patch."""
        return [*([0] if self._reads_class else []), self._prefix + (self.context.followed or 0)]

    @property
    def _reads_class(self) -> bool:
        return self.context.layout is not None and self.context.layout.reads == "[CLS]"

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        tokens = self.context.model.config.tokens or 1
        heads = self.context.model.config.heads or 1
        needed = 4 * len(self.context.page_images) * len(self.layers) * heads * tokens**2
        rows = list(range(tokens)) if needed <= _MAX_BYTES else self._small_page_tokens
        self.steps[number] = {layer: self._layer_steps(layer, activations, rows) for layer in self.layers}

    def _layer_steps(self, layer: int, activations: Activations, rows: list[int]) -> LayerSteps:
        """Return the values of all steps inside a layer for the tokens `rows`."""
        walkthrough = self.context.walkthrough
        equations = walkthrough.layer_equations(layer)
        steps = {
            name: activations.steps[f"blocks.{layer}.{name}"][0].float().cpu().numpy()
            for name in equations
            if name != "out"
        }
        steps[_LAYER_INPUT] = walkthrough.layer_input(layer, activations)[0].detach().float().cpu().numpy()
        steps["out"] = activations.steps[f"blocks.{layer}"][0].float().cpu().numpy()
        is_pre_norm = next(iter(equations)) == "norm1"
        norm_inputs = {"norm1": _LAYER_INPUT, "norm2": "middle"} if is_pre_norm else {"norm1": "middle"}
        vectors = {name: step[rows] for name, step in steps.items() if name not in _HEAD_STEPS + _PAIR_STEPS}
        return LayerSteps(
            rows=rows,
            vectors={name: step[:, :_MAX_FEATURES] for name, step in vectors.items()},
            lengths={name: np.linalg.norm(step, axis=-1) for name, step in vectors.items()},
            heads={name: steps[name][:, rows] for name in _HEAD_STEPS},
            scores=steps["scores"][:, rows],
            norms={
                norm: statistics
                for norm, source in norm_inputs.items()
                if (statistics := self._norm_statistics(vectors[source]))
            },
            positive=(vectors["z1"] > 0).mean(axis=-1),
        )

    def _norm_statistics(self, tokens_RD: np.ndarray) -> dict[str, np.ndarray]:
        statistics = self.context.walkthrough.norm_statistics(torch.from_numpy(tokens_RD)[None])
        return {name: values_1R[0].numpy() for name, values_1R in statistics.items()}

    def image_numbers(self, number: int) -> dict[str, Any]:
        layers = self.steps.get(number, {})
        return {"inside": [self._followed_numbers(layer, steps) for layer, steps in layers.items()]}

    def _followed_numbers(self, layer: int, steps: LayerSteps) -> dict[str, Any]:
        """Return the numbers of the followed patch for `inspect.json`."""
        at = steps.rows.index(self._small_page_tokens[-1])
        weights = steps.weights()
        return {
            "layer": layer,
            "norms": {
                norm: {name: float(f"{values[at]:.6g}") for name, values in statistics.items()}
                for norm, statistics in steps.norms.items()
            },
            "lengths": {name: float(f"{values[at]:.6g}") for name, values in steps.lengths.items()},
            "positive": float(steps.positive[at]),
            "heads": [
                {
                    "head": head,
                    "length": float(f"{np.linalg.norm(steps.heads['heads'][head, at]):.6g}"),
                    "scores": [
                        None if np.isneginf(score) else float(f"{score:.5g}") for score in steps.scores[head, at]
                    ],
                    "weights": round_significant(weights[head, at], 5),
                }
                for head in range(len(steps.scores))
            ],
        }

    # The section

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.steps:
            return ""
        equations = self.context.walkthrough.layer_equations(self.layers[0])
        layers = "".join(f'<option value="{layer}">{layer}</option>' for layer in self.layers)
        heads = "".join(
            f'<option value="{head}">{head}</option>' for head in range(self.context.model.config.heads or 1)
        )
        controls = (
            f'<label>{self.t("layer")} <select id="inside-layer">{layers}</select></label>'
            f'<label>{self.t("head")} <select id="inside-head">{heads}</select></label>'
        )
        if self._reads_class:
            controls += (
                f'<label><input type="radio" name="inside-token" value="patch" checked> {self.t("of-patch")}</label>'
                f'<label><input type="radio" name="inside-token" value="class"> {self.t("of-class")}</label>'
            )
        rows = "".join(self._row(name, equation) for name, equation in {_LAYER_INPUT: "z", **equations}.items())
        return (
            f"{self.paragraph('inside-intro')}{'' if self.has_all_tokens else self.paragraph('few-tokens')}"
            f'<form class="controls" autocomplete="off">{controls}</form><p id="inside-of" aria-live="polite"></p>'
            f'<div class="steps">{rows}</div>{self.symbol_list(" ".join(equations.values()))}'
        )

    def _row(self, name: str, equation: str) -> str:
        css_class = "map" if name in _PAIR_STEPS else "strip"
        return (
            f'<div class="step"><div>{typeset(equation)}</div>'
            f"<div>{self.paragraph(f'step-{name}')}"
            f'<canvas class="{css_class}" aria-hidden="true" data-step="{name}"></canvas>'
            f'<code data-note="{name}"></code></div></div>'
        )

    def script_data(self) -> dict[str, Any]:
        messages = {**SHARED_MESSAGES, **self.messages}
        return {
            "messages": {
                language: {name: messages[name][language] for name in ("layer", "head", "of-class", *_SCRIPT_MESSAGES)}
                for language in LANGUAGES
            },
            "prefix": self._prefix,
            "class": self._reads_class,
            "signed": signed(np.linspace(-1, 1, 255)).tolist(),
            "ramp": sequential(np.linspace(0, 1, 256)).tolist(),
            "images": {
                number: {layer: self._pack(steps) for layer, steps in layers.items()}
                for number, layers in self.steps.items()
            },
        }

    def _pack(self, steps: LayerSteps) -> dict[str, Any]:
        """Return the data of one layer and image for the script."""
        if not self.has_all_tokens:
            steps = steps.select(self._small_page_tokens)
        # One colour scale for all vectors of the residual stream.
        stream = [steps.vectors[name] for name in _RESIDUAL_STEPS if name in steps.vectors]
        scale = float(np.percentile(np.abs(np.concatenate(stream, axis=None)), 99.5))
        masked = np.isneginf(steps.scores)
        scores = np.where(masked, 0, steps.scores)
        masked_score = float(scores.min()) - 20.0  # practically 0 after the softmax
        return {
            "rows": steps.rows,
            "vectors": {
                name: {
                    "width": values.shape[1],
                    **pack(values, scale=scale if name in _RESIDUAL_STEPS else None),
                }
                for name, values in steps.vectors.items()
            },
            "lengths": {name: round_significant(values) for name, values in steps.lengths.items()},
            "heads": {name: {"width": values.shape[2], **pack(values)} for name, values in steps.heads.items()},
            "head_lengths": round_significant(np.linalg.norm(steps.heads["heads"], axis=-1), 3),
            "scores": pack(np.where(masked, masked_score, scores) if masked.any() else scores, bits=16),
            "least": masked_score + 10 if masked.any() else None,
            "tokens": steps.scores.shape[2],
            "norms": {
                norm: {name: round_significant(values) for name, values in statistics.items()}
                for norm, statistics in steps.norms.items()
            },
            "positive": round_significant(steps.positive, 3),
        }

    def min_bytes(self) -> int:
        if not self.has_all_tokens:
            return 0
        return 2 * sum(steps.scores.size for layers in self.steps.values() for steps in layers.values())

    def smaller_versions(self) -> Iterator[Self]:
        if self.steps:
            panel = copy.copy(self)
            panel.has_all_tokens = False
            yield panel
