"""Attention of every layer and head, for the patch under the pointer."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from torch import Tensor

from vitrail.analysis.heads import reading
from vitrail.core.errors import UsageError
from vitrail.core.message_files import load_messages
from vitrail.data.thumbnail import image_data_url
from vitrail.models.activations import Activations, count_all_from
from vitrail.models.base import Layout
from vitrail.reports.attention_figure import attention_figure
from vitrail.reports.colours import sequential
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, rgb
from vitrail.reports.inspect.shared_messages import SHARED
from vitrail.reports.translations import LANGUAGES

_ROOM = 4_000_000_000  # bytes of attention that may be held
_SCRIPTED = ("layer", "head", "from", "to", "on-patches", "largest", "uniform", "entropy-column", "row", "column")

Detail = Literal["heads", "means", "reads"]
"""How much attention the page contains: every head of every patch; means over heads of every patch; only that of the
tokens which the head reads."""

# What a smaller page keeps. The levels are those of attention: with 127, entropies are right to 0.01; with 63, to
# 0.02, at 20 % less to carry.
_SMALLER: tuple[tuple[Detail, int], ...] = (("heads", 63), ("means", 127), ("reads", 127))


class AttentionPanel(Panel):
    """Maps of the shown layers and heads beside the image; its script overlays the selected one."""

    words = load_messages(__file__)
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.detail: Detail = "heads"
        self.levels = 127
        self.layers, self.heads = self._choose()
        """Indices of the shown layers and heads."""
        self.weights: dict[int, dict[int, np.ndarray]] = {}
        """Attention weights of each shown image and layer, float32 (H, T, T)."""
        self.reading: dict[int, np.ndarray] = {}
        """For each shown image, the weights of the tokens in the input of the head (T)."""

    def _choose(self) -> tuple[list[int], list[int]]:
        """Layers and heads to show, in order; refused if they do not exist or would not fit into memory."""
        asked, config, count = self.context, self.context.model.config, len(self.context.shown)
        if asked.layout is None:
            if asked.layers is not None or asked.heads is not None:
                raise UsageError(f"Layers and heads must not be given for family {config.family}: it has no attention.")
            return [], []
        layers = range(config.depth) if asked.layers is None else asked.layers
        heads = range(config.heads) if asked.heads is None else asked.heads
        chosen = (
            sorted(set(count_all_from("Layer", layers, config.depth))),
            sorted(set(count_all_from("Head", heads, config.heads))),
        )
        if not all(chosen):
            raise UsageError("Layers and heads must be at least one each, got none.")
        needed = count * len(chosen[0]) * len(chosen[1]) * 4 * config.tokens**2
        if needed > _ROOM:
            raise UsageError(
                f"Attention must fit into {_ROOM / 1e9:.0f} GB, got {count} image(s) that would need"
                f" {needed / 1e9:.0f} GB. Name fewer images, layers or heads."
            )
        return chosen

    @property
    def _layout(self) -> Layout:
        assert self.context.layout is not None
        return self.context.layout

    def why_absent(self) -> str | None:
        return self.context.why_no_attention()

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        self.weights[number] = {
            layer: activations.attention[layer][0, self.heads].float().cpu().numpy() for layer in self.layers
        }
        self.reading[number] = reading(activations, self._layout)[0]

    def read(self, number: int, layer: int) -> np.ndarray:
        """Attention of the tokens that the head reads, averaged with their weights (H, T)."""
        return np.tensordot(self.weights[number][layer], self.reading[number], axes=(1, 0))

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for number in self.weights:
            prefix, grid = self._layout.prefix, self._layout.grid
            maps = {layer: self.read(number, layer)[:, prefix:].reshape(-1, *grid) for layer in self.layers}
            who = {"[CLS]": "[CLS]", "mean": "the mean patch", "pool": "the pooling query"}[self._layout.reads]
            pixels, tokens = rgb(self.context.pixels(number)), len(self.reading[number])
            figure = attention_figure(pixels, maps, tokens, f"Where does {who} look?", self.heads)
            yield f"picture-{number}-attention", np.asarray(figure)

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            f"picture-{number}-attention-{layer}": weights
            for number, layers in self.weights.items()
            for layer, weights in layers.items()
        }

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.weights:
            return ""
        overlay = '<canvas id="laid"></canvas><div id="mark" class="mark" hidden></div>'
        stage = self.photo(0, overlay, attributes='id="stage" class="photo laid" tabindex="0" role="application"')
        who = self.word(f"reads-{self._layout.reads.strip('[]').lower()}")
        return "".join(
            [
                self.say("attention"),
                self.say("merged") if self._layout.merges else "",
                "" if self.detail == "heads" else self.say(self.detail),
                '<form class="controls" autocomplete="off">',
                f'<label><input type="radio" name="way" value="from" checked> {self.word("from")}</label>',
                f'<label><input type="radio" name="way" value="to"> {self.word("to")}</label>',
                f'<button id="class" type="button">{who}</button></form>',
                f'<div class="attention"><div class="side-stage">{stage}<p id="asked" aria-live="polite"></p></div>',
                '<div class="scroll"><div id="heads"></div></div></div>',
            ]
        )

    def data(self) -> dict[str, Any]:
        layout, words = self._layout, {**SHARED, **self.words}
        found: dict[str, Any] = {
            "words": {language: {name: words[name][language] for name in _SCRIPTED} for language in LANGUAGES},
            "heads": self.heads,
            "levels": self.levels,
            "ramp": sequential(np.linspace(0, 1, 256)).tolist(),
            "grid": layout.grid,
            "prefix": layout.prefix,
            "reads": layout.reads,
        }
        if layout.allowed is not None:  # how many patches each one may look at, and is looked at by
            found["allowed"] = {"from": layout.allowed.sum(axis=1).tolist(), "to": layout.allowed.sum(axis=0).tolist()}
        found["images"] = [
            {"name": self.context.names[number], "layers": [self._packed_layer(number, layer) for layer in self.layers]}
            for number in self.weights
        ]
        return found

    def _packed_layer(self, number: int, layer: int) -> dict[str, Any]:
        weights = self.weights[number][layer]
        packed = {"layer": layer, "read": self._packed(self.read(number, layer)[:, None])}
        if self.detail == "heads":
            packed["all"] = self._packed(weights)
        elif self.detail == "means":
            packed["all"] = self._packed(weights.mean(axis=0, keepdims=True))
        return packed

    def _packed(self, weights_HQT: np.ndarray) -> dict[str, Any]:
        """Attention as an 8-bit image with rows h*Q+q: square roots of values relative to the maximum of the row.

        The square root preserves small values. [CLS] and registers, which often get most of the attention, have a
        separate maximum, so that patches stay visible.
        """
        heads, queries, tokens = weights_HQT.shape
        rows, prefix = weights_HQT.reshape(heads * queries, tokens), self._layout.prefix
        parts, peaks = [], []
        for part in (rows[:, :prefix], rows[:, prefix:]):
            largest = part.max(axis=1, initial=0)
            parts.append(np.round(self.levels * np.sqrt(part / np.maximum(largest, 1e-30)[:, None])).astype(np.uint8))
            peaks.append([float(f"{peak:.4g}") for peak in largest])
        image = image_data_url(np.concatenate(parts, axis=1)[..., None])
        return {"heads": heads, "rows": queries, "image": image, "peaks": peaks}

    def least_bytes(self) -> int:
        """An attention weight takes almost a byte, and a tenth of one if almost all are zero."""
        count = sum(weights.size for layers in self.weights.values() for weights in layers.values())
        return {"heads": count, "means": count // max(len(self.heads), 1), "reads": 0}[self.detail] // 10

    def smaller(self) -> Iterator[Self]:
        for detail, levels in _SMALLER if self.weights else ():
            less = copy.copy(self)
            less.detail, less.levels = detail, levels
            yield less
