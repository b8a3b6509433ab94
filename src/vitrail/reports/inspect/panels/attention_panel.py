"""Panel `attention`: attention of every layer and head, for the patch under the pointer."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from torch import Tensor

from vitrail.analysis.heads import head_input_weights
from vitrail.core.errors import UsageError
from vitrail.core.message_files import load_messages
from vitrail.data.thumbnail import image_data_url
from vitrail.models.activations import Activations, resolve_indices
from vitrail.models.base import Layout
from vitrail.reports.attention_figure import attention_figure
from vitrail.reports.colours import sequential
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, rgb
from vitrail.reports.inspect.shared_messages import SHARED_MESSAGES
from vitrail.reports.translations import LANGUAGES

_MAX_BYTES = 4_000_000_000  # of attention weights in memory
_SCRIPT_MESSAGES = (
    *("layer", "head", "row", "column", "from", "to", "on-patches"),
    *("largest", "uniform", "entropy-column"),
)

Detail = Literal["heads", "means", "reads"]
"""How much attention the page contains.

`heads`: every head for every patch. `means`: means over heads for every patch. `reads`: only the attention of the
tokens that the classification head reads.
"""

# Detail and quantisation levels of smaller pages. Entropies are correct to 0.01 with 127 levels, and to 0.02 with 63
# levels, which need 20 % fewer bytes.
_SMALLER_VERSIONS: tuple[tuple[Detail, int], ...] = (("heads", 63), ("means", 127), ("reads", 127))


class AttentionPanel(Panel):
    """Attention maps of the selected layers and heads. The script shows the selected map over the image."""

    messages = load_messages(__file__)
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.detail: Detail = "heads"
        self.levels = 127
        self.layers, self.heads = self._select()
        """Sorted indices of the shown layers and heads."""
        self.weights: dict[int, dict[int, np.ndarray]] = {}
        """Attention weights of each page image and layer, float32 (H, T, T)."""
        self.token_shares: dict[int, np.ndarray] = {}
        """For each page image, the share of every token in the input of the classification head (T)."""

    def _select(self) -> tuple[list[int], list[int]]:
        """Return the sorted layers and heads to show. Raise UsageError if they do not exist or need too much memory."""
        context, config, count = self.context, self.context.model.config, len(self.context.page_images)
        if context.layout is None:
            if context.layers is not None or context.heads is not None:
                raise UsageError(
                    f"Layers and heads must be omitted for family {config.family}, which has no attention."
                )
            return [], []
        layers = range(config.depth) if context.layers is None else context.layers
        heads = range(config.heads) if context.heads is None else context.heads
        layers = sorted(set(resolve_indices("Layer", layers, config.depth)))
        heads = sorted(set(resolve_indices("Head", heads, config.heads)))
        if not layers or not heads:
            raise UsageError("Layers and heads must be at least one each, got none.")
        needed = count * len(layers) * len(heads) * 4 * config.tokens**2
        if needed > _MAX_BYTES:
            raise UsageError(
                f"Attention maps must fit into {_MAX_BYTES / 1e9:.0f} GB, got {count} image(s) whose maps need"
                f" {needed / 1e9:.0f} GB. Choose fewer images, layers or heads."
            )
        return layers, heads

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
        self.token_shares[number] = head_input_weights(activations, self._layout)[0]

    def head_input_attention(self, number: int, layer: int) -> np.ndarray:
        """Return the attention (H, T) of the tokens that the classification head reads, weighted by their shares."""
        return np.tensordot(self.weights[number][layer], self.token_shares[number], axes=(1, 0))

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for number in self.weights:
            prefix, grid = self._layout.prefix, self._layout.grid
            attention_HT = {layer: self.head_input_attention(number, layer) for layer in self.layers}
            maps = {layer: weights[:, prefix:].reshape(-1, *grid) for layer, weights in attention_HT.items()}
            query = {"[CLS]": "[CLS]", "mean": "the mean patch", "pool": "the pooling query"}[self._layout.reads]
            pixels, tokens = rgb(self.context.pixels(number)), len(self.token_shares[number])
            figure = attention_figure(pixels, maps, tokens, f"Where does {query} look?", self.heads)
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
        query = self.t(f"reads-{self._layout.reads.strip('[]').lower()}")
        return "".join(
            [
                self.paragraph("attention"),
                self.paragraph("merged") if self._layout.merges else "",
                "" if self.detail == "heads" else self.paragraph(self.detail),
                '<form class="controls" autocomplete="off">',
                f'<label><input type="radio" name="way" value="from" checked> {self.t("from")}</label>',
                f'<label><input type="radio" name="way" value="to"> {self.t("to")}</label>',
                f'<button id="class" type="button">{query}</button></form>',
                f'<div class="attention"><div class="side-stage">{stage}<p id="asked" aria-live="polite"></p></div>',
                '<div class="scroll"><div id="heads"></div></div></div>',
            ]
        )

    def script_data(self) -> dict[str, Any]:
        layout, messages = self._layout, {**SHARED_MESSAGES, **self.messages}
        data: dict[str, Any] = {
            "messages": {
                language: {name: messages[name][language] for name in _SCRIPT_MESSAGES} for language in LANGUAGES
            },
            "heads": self.heads,
            "levels": self.levels,
            "ramp": sequential(np.linspace(0, 1, 256)).tolist(),
            "grid": layout.grid,
            "prefix": layout.prefix,
            "reads": layout.reads,
        }
        if layout.allowed is not None:  # numbers of patches that each patch may attend to, and be attended by
            data["allowed"] = {"from": layout.allowed.sum(axis=1).tolist(), "to": layout.allowed.sum(axis=0).tolist()}
        data["images"] = [
            {
                "name": self.context.image_names[number],
                "layers": [self._pack_layer(number, layer) for layer in self.layers],
            }
            for number in self.weights
        ]
        return data

    def _pack_layer(self, number: int, layer: int) -> dict[str, Any]:
        weights = self.weights[number][layer]
        packed = {"layer": layer, "read": self._pack(self.head_input_attention(number, layer)[:, None])}
        if self.detail == "heads":
            packed["all"] = self._pack(weights)
        elif self.detail == "means":
            packed["all"] = self._pack(weights.mean(axis=0, keepdims=True))
        return packed

    def _pack(self, weights_HQT: np.ndarray) -> dict[str, Any]:
        """Encode attention as an 8-bit image with rows h*Q+q: square roots of values relative to the row's maximum.

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

    def min_bytes(self) -> int:
        # An attention weight needs almost a byte, or a tenth of one if almost all weights are zero.
        count = sum(weights.size for layers in self.weights.values() for weights in layers.values())
        return {"heads": count, "means": count // max(len(self.heads), 1), "reads": 0}[self.detail] // 10

    def smaller_versions(self) -> Iterator[Self]:
        for detail, levels in _SMALLER_VERSIONS if self.weights else ():
            panel = copy.copy(self)
            panel.detail, panel.levels = detail, levels
            yield panel
