"""The model during its training: positions and attention distances at every snapshot of a run."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from vitrail.analysis.heads import measure_heads
from vitrail.analysis.position_structure import Structure, position_table, similarity, structure
from vitrail.bundles.bundle import Bundle, load
from vitrail.core.message_files import load_messages
from vitrail.data.thumbnail import image_data_url
from vitrail.models.activations import look
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, prepare
from vitrail.reports.inspect.panels.positions_panel import similarity_tiles
from vitrail.reports.page_kit import figure

_IMAGES = 16  # at most, for attention distances
_TILES = 6  # snapshots whose tiles are shown


class Moment(NamedTuple):
    """The model after some steps."""

    step: int
    positions: Structure | None
    """None for a model without a table of positions."""
    tiles: np.ndarray | None
    """Cosine similarities of its position embeddings, as an image."""
    distances: np.ndarray | None
    """Attention distance of every layer and head, relative to uniform attention; None without attention."""


class GrowthPanel(Panel):
    """What grows over training: row and column in the positions, near and far heads."""

    words = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.moments: list[Moment] = []

    def why_absent(self) -> str | None:
        if not self.context.snapshots:
            return "no-snapshots"
        return self.context.why_no_attention()

    def absences(self) -> Iterator[tuple[str, str, str]]:
        if self.context.snapshots:  # whoever did not ask for a run misses nothing
            yield from super().absences()

    def finish(self) -> None:
        device = str(next(self.context.model.parameters()).device)
        self.moments = [self._measure(step, load(folder, device=device)) for step, folder in self.context.snapshots]

    def _measure(self, step: int, bundle: Bundle) -> Moment:
        model, layout = bundle.model, bundle.model.layout()
        table, known, tiles, distances = position_table(model), None, None, None
        if table is not None and model.config.grid is not None:
            known = structure(table, model.config.grid)
            tiles = similarity_tiles(similarity(table), model.config.grid)
        if layout is not None:
            crops = [bundle.preprocess.crop(image) for image in self.context.sources[:_IMAGES]]
            activations = look(model, prepare(bundle, crops))
            measured = [
                measure_heads(weights.float().cpu(), layout) for _, weights in sorted(activations.attention.items())
            ]
            distances = np.stack([one.of_uniform.mean(axis=0) for one in measured])
        return Moment(step, known, tiles, distances)

    def numbers(self) -> dict[str, Any]:
        if not self.context.snapshots:
            return {}
        rows = [
            {
                "step": one.step,
                "positions": None if one.positions is None else one.positions._asdict(),
                "attention_distance_of_uniform": None
                if one.distances is None
                else [[round(float(head), 6) for head in layer] for layer in one.distances],
            }
            for one in self.moments
        ]
        return {"growth": rows}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        placed = [(one.step, one.positions) for one in self.moments if one.positions is not None]
        if placed:
            steps = [_shifted(step) for step, _ in placed]
            lines = [
                Line(self.label("row"), steps, [one.row for _, one in placed], 0),
                Line(self.label("column"), steps, [one.column for _, one in placed], 1),
                Line(self.label("row-and-column"), steps, [one.additive for _, one in placed], 2),
            ]
            labels = self.label("steps"), self.label("share-of-1")
            yield "growth-positions", line_chart(lines, *labels, log_x=True, dots=True)
        looked = [(one.step, one.distances) for one in self.moments if one.distances is not None]
        if looked:
            steps = [_shifted(step) for step, _ in looked]
            depth = len(looked[0][1])
            for layer in range(depth):
                heads = [
                    Line("", steps, [float(one[layer, head]) for _, one in looked], 7)
                    for head in range(looked[0][1].shape[1])
                ]
                mean = Line(self.label("mean"), steps, [float(one[layer].mean()) for _, one in looked], 1)
                drawn = line_chart([*heads, mean], self.label("steps"), self.label("of-uniform-distance"), log_x=True)
                yield f"growth-distances-{layer}", drawn

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.moments:
            return ""
        parts = [self.say("growth", count=len(self.moments), last=f"{self.moments[-1].step:,}")]
        tiled = [one for one in self.moments if one.tiles is not None]
        if tiled:
            parts.append(figure(self.word("positions"), self.word("positions-note"), str(figures["growth-positions"])))
            some = [tiled[at] for at in sorted({round(x) for x in np.linspace(0, len(tiled) - 1, _TILES)})]
            tiles = "".join(
                f'<div><img class="wide" src="{image_data_url(one.tiles)}" alt="">'
                f"<small>{self.word('after-steps', step=f'{one.step:,}')}</small></div>"
                for one in some
                if one.tiles is not None
            )
            parts.append(f'<div class="multiples large">{tiles}</div>')
        drawn = [name for name in figures if name.startswith("growth-distances-")]
        if drawn:
            panes = "".join(
                figure(self.word("distances", layer=name.rpartition("-")[2]), "", str(figures[name])) for name in drawn
            )
            parts.append(f'{self.say("distances-note")}<div class="panes">{panes}</div>')
        return "".join(parts)


def _shifted(step: int) -> float:
    """A step on a logarithmic axis, where the start stands before the first step."""
    return step or 0.5
