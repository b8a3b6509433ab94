"""Panel `growth`: position embeddings and attention distances at every snapshot of a training run."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from vitrail.analysis.heads import measure_heads
from vitrail.analysis.position_structure import PositionStructure, position_table, similarity, structure
from vitrail.bundles.bundle import Bundle, load
from vitrail.core.message_files import load_messages
from vitrail.data.thumbnail import image_data_url
from vitrail.models.activations import look
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, make_batch, rounded
from vitrail.reports.inspect.panels.positions_panel import similarity_tiles
from vitrail.reports.page_kit import figure

_MAX_IMAGES = 16  # for attention distances
_MAX_TILES = 6  # snapshots whose similarity tiles are shown


class SnapshotStatistics(NamedTuple):
    """Statistics of the model after `step` training steps."""

    step: int
    positions: PositionStructure | None
    """None for a model without a position table."""
    tiles: np.ndarray | None
    """Cosine similarities of the position embeddings, as pixels, uint8 (h, w, 3)."""
    distances: np.ndarray | None
    """Attention distances (layers, heads) relative to uniform attention. None without attention."""


class GrowthPanel(Panel):
    """How position embeddings learn rows and columns, and heads become local, during training."""

    messages = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.snapshots: list[SnapshotStatistics] = []

    def why_absent(self) -> str | None:
        if not self.context.snapshots:
            return "no-snapshots"
        return self.context.why_no_attention()

    def missing_parts(self) -> Iterator[tuple[str, str, str]]:
        if self.context.snapshots:  # a bundle that is not a run has nothing missing
            yield from super().missing_parts()

    def finish(self) -> None:
        device = str(next(self.context.model.parameters()).device)
        self.snapshots = [self._measure(step, load(folder, device=device)) for step, folder in self.context.snapshots]

    def _measure(self, step: int, bundle: Bundle) -> SnapshotStatistics:
        model, layout = bundle.model, bundle.model.layout()
        table, positions, tiles, distances = position_table(model), None, None, None
        if table is not None and model.config.grid is not None:
            positions = structure(table, model.config.grid)
            tiles = similarity_tiles(similarity(table), model.config.grid)
        if layout is not None:
            crops = [bundle.preprocess.crop(image) for image in self.context.sources[:_MAX_IMAGES]]
            activations = look(model, make_batch(bundle, crops))
            layers = [
                measure_heads(weights.float().cpu(), layout) for _, weights in sorted(activations.attention.items())
            ]
            distances = np.stack([heads.of_uniform.mean(axis=0) for heads in layers])
        return SnapshotStatistics(step, positions, tiles, distances)

    def numbers(self) -> dict[str, Any]:
        if not self.context.snapshots:
            return {}
        rows = [
            {
                "step": snapshot.step,
                "positions": None if snapshot.positions is None else snapshot.positions._asdict(),
                "attention_distance_of_uniform": None if snapshot.distances is None else rounded(snapshot.distances),
            }
            for snapshot in self.snapshots
        ]
        return {"growth": rows}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        structures = [
            (_log_axis_step(snapshot.step), snapshot.positions)
            for snapshot in self.snapshots
            if snapshot.positions is not None
        ]
        if structures:
            steps = [step for step, _ in structures]
            lines = [
                Line(self.svg_label("row"), steps, [positions.row for _, positions in structures], 0),
                Line(self.svg_label("column"), steps, [positions.column for _, positions in structures], 1),
                Line(self.svg_label("row-and-column"), steps, [positions.additive for _, positions in structures], 2),
            ]
            labels = self.svg_label("steps"), self.svg_label("share-of-1")
            yield "growth-positions", line_chart(lines, *labels, log_x=True, dots=True)
        with_attention = [
            (_log_axis_step(snapshot.step), snapshot.distances)
            for snapshot in self.snapshots
            if snapshot.distances is not None
        ]
        if with_attention:
            steps = [step for step, _ in with_attention]
            distances_SLH = np.stack([distances for _, distances in with_attention])
            for layer, distances_HS in enumerate(distances_SLH.transpose(1, 2, 0)):
                heads = [Line("", steps, distances_S.tolist(), 7) for distances_S in distances_HS]
                mean = Line(self.svg_label("mean"), steps, distances_HS.mean(axis=0).tolist(), 1)
                labels = self.svg_label("steps"), self.svg_label("of-uniform-distance")
                yield f"growth-distances-{layer}", line_chart([*heads, mean], *labels, log_x=True)

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.snapshots:
            return ""
        parts = [self.paragraph("growth", count=len(self.snapshots), last=f"{self.snapshots[-1].step:,}")]
        with_tiles = [snapshot for snapshot in self.snapshots if snapshot.tiles is not None]
        if with_tiles:
            parts.append(figure(self.t("positions"), self.t("positions-note"), str(figures["growth-positions"])))
            indices = sorted({round(x) for x in np.linspace(0, len(with_tiles) - 1, _MAX_TILES)})
            tiles = "".join(
                f'<div><img class="wide" src="{image_data_url(snapshot.tiles)}" alt="">'
                f"<small>{self.t('after-steps', step=f'{snapshot.step:,}')}</small></div>"
                for snapshot in (with_tiles[index] for index in indices)
                if snapshot.tiles is not None
            )
            parts.append(f'<div class="multiples large">{tiles}</div>')
        layer_charts = [name for name in figures if name.startswith("growth-distances-")]
        if layer_charts:
            panes = "".join(
                figure(self.t("distances", layer=name.rpartition("-")[2]), "", str(figures[name]))
                for name in layer_charts
            )
            parts.append(f'{self.paragraph("distances-note")}<div class="panes">{panes}</div>')
        return "".join(parts)


def _log_axis_step(step: int) -> float:
    """Return the position of a step on a logarithmic axis. Step 0 is drawn at 0.5."""
    return step or 0.5
