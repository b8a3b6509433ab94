"""Panel `distances`: mean attention distance of each head, as in Figure 7 (right) of arXiv 2010.11929."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.analysis.heads import HeadStatistics, measure_heads
from vitrail.core.message_files import load_messages
from vitrail.evaluation.metrics import mean_interval
from vitrail.models.activations import Activations
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, interval
from vitrail.reports.page_kit import figure, table


class DistancesPanel(Panel):
    """Distance, entropy and attention to [CLS] and registers, per head, as means over all images."""

    messages = load_messages(__file__)
    needs_other_images = True

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self._heads_by_image: dict[int, list[HeadStatistics]] = {}
        self.heads: dict[int, HeadStatistics] = {}
        """Statistics of each layer, (images, H)."""

    def why_absent(self) -> str | None:
        return self.context.why_no_attention()

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        assert self.context.layout is not None
        for layer, weights in activations.attention.items():
            heads = measure_heads(weights.float().cpu(), self.context.layout)
            self._heads_by_image.setdefault(layer, []).append(heads)

    def finish(self) -> None:
        self.heads = {
            layer: HeadStatistics(*map(np.concatenate, zip(*by_image, strict=True)))
            for layer, by_image in sorted(self._heads_by_image.items())
        }

    def layer_numbers(self, layer: int) -> dict[str, Any]:
        if layer not in self.heads:
            return {}
        rows = [
            {
                "attention_distance": float(distance.mean()),
                "attention_distance_interval": interval(distance),
                "attention_distance_of_uniform": float(of_uniform.mean()),
                "entropy": float(spread.mean()),
                "prefix_mass": float(mass.mean()),
            }
            for distance, of_uniform, spread, mass in zip(*(part.T for part in self.heads[layer]), strict=True)
        ]
        return {"heads": rows}

    @property
    def _has_prefix(self) -> bool:
        return self.context.layout is not None and self.context.layout.prefix > 0

    def figures(self) -> Iterator[tuple[str, Figure]]:
        if not self.heads:
            return
        layers = list(self.heads)
        means = [heads.of_uniform.mean(axis=0) for heads in self.heads.values()]
        points = [(layer, float(value)) for layer, row in zip(layers, means, strict=True) for value in row]
        lines = [
            Line(self.svg_label("heads"), [x for x, _ in points], [y for _, y in points], 0, joined=False),
            Line(self.svg_label("mean"), layers, [float(row.mean()) for row in means], 1),
            Line(self.svg_label("uniform"), [layers[0], layers[-1]], [1.0, 1.0], 7),
        ]
        yield "distances", line_chart(lines, self.svg_label("layer"), self.svg_label("of-uniform"))
        if self._has_prefix:
            masses = [float(heads.prefix_mass.mean()) for heads in self.heads.values()]
            lines = [Line(self.svg_label("mean"), layers, masses, 1)]
            yield "prefix-mass", line_chart(lines, self.svg_label("layer"), self.svg_label("share"), dots=True)

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.heads:
            return ""
        panes = figure(self.t("distance-title"), self.t("distance-note"), str(figures["distances"]))
        columns = ["layer", "nearest", "farthest", "of-uniform", "entropy-column"]
        if self._has_prefix:
            panes += figure(self.t("mass-title"), self.t("mass-note"), str(figures["prefix-mass"]))
            columns.append("mass")
        headers = [self.t(name) for name in columns]
        rows = [self._row(layer)[: len(columns)] for layer in self.heads]
        intro = self.paragraph("distances", count=len(self.heads[0].distance))
        return f'{intro}<div class="panes">{panes}</div>{table(headers, rows, numeric=frozenset(range(len(columns))))}'

    def _row(self, layer: int) -> list[object]:
        heads = self.heads[layer]
        distance = heads.distance.mean(axis=0)
        return [
            layer,
            _mean_text(heads.distance[:, distance.argmin()]),
            _mean_text(heads.distance[:, distance.argmax()]),
            f"{heads.of_uniform.mean():.2f}",
            f"{heads.entropy.mean():.2f}",
            f"{heads.prefix_mass.mean():.2f}",
        ]


def _mean_text(values: np.ndarray) -> str:
    """Format the mean over images, with its interval if there are several images."""
    ends = mean_interval(values.tolist())
    return f"{values.mean():.1f}" if ends is None else f"{values.mean():.1f} ({ends[0]:.1f} .. {ends[1]:.1f})"
