"""Panel `evidence`: how the prediction changes when parts of the image are removed, and which maps predict that."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.analysis.evidence import evidence_grid, faith, occlusion, patch_drop, to_cells
from vitrail.analysis.maps import maps
from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.colours import signed
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, interval, rounded
from vitrail.reports.page_kit import figure, table

DROPPED = (0.2, 0.5, 0.8)
"""Shares of the cells to remove at random."""
DRAWS = 5
"""Number of random orders to compare maps with, and of random sets of cells per share."""
_MEASURES = ("deletion", "insertion")
_MIN_IMAGES = 5  # with fewer, the intervals of means over images are too wide to be useful


class EvidencePanel(Panel):
    """Occlusion, deletion and insertion scores of every map, and random removal of cells.

    Needs hundreds of forward passes per image.
    """

    messages = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.evidence: dict[int, dict[str, Any]] = {}
        """Results of each page image, as in `inspect.json`."""
        self._probability: dict[int, float] = {}

    def why_absent(self) -> str | None:
        return self.context.why_no_prediction() or (None if self.context.evidence else "not-asked")

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        """Store the occlusion map of an image, and the deletion and insertion scores of each map and of random ones."""
        model, seed, grid = self.context.model, self.context.seed + number, evidence_grid(self.context.model)
        rule = self.context.bundle.answer
        shares = rule.probabilities(activations.logits[0].float())
        label = int(activations.logits[0].argmax())
        self._probability[number] = float(shares[label])
        occlusion_map = occlusion(model, image_CHW, label, grid, rule)
        attention_maps = {} if self.context.layout is None else maps(model, image_CHW[None], activations)
        cell_maps = {name: to_cells(maps_1hw[0], grid) for name, maps_1hw in attention_maps.items()}
        cell_maps["occlusion"] = occlusion_map
        score = functools.partial(faith, model, image_CHW, label, grid=grid, answer=rule)
        scores = {name: score(values)._asdict() for name, values in cell_maps.items()}
        rng = np.random.default_rng(seed)
        random_scores = np.array([score(rng.random(grid)) for _ in range(DRAWS)])
        # In a random order, deletion and insertion have the same distribution: pool them.
        mean, deviation = float(random_scores.mean()), float(random_scores.std(ddof=1))
        scores["random"] = {"deletion": mean, "insertion": mean, "deviation": deviation}
        dropped = patch_drop(model, image_CHW, label, grid, shares=DROPPED, draws=DRAWS, seed=seed, answer=rule)
        self.evidence[number] = {
            "class": label,
            "grid": list(grid),
            "occlusion": rounded(occlusion_map),
            "faith": scores,
            "patch_drop": [
                {"share": share, "probability": float(row.mean()), "interval": interval(row)}
                for share, row in zip(DROPPED, dropped, strict=True)
            ],
        }

    def numbers(self) -> dict[str, Any]:
        return {"faith": self.mean_faith()}

    def image_numbers(self, number: int) -> dict[str, Any]:
        return {"evidence": self.evidence.get(number)}

    def mean_faith(self) -> dict[str, Any] | None:
        """Return the deletion and insertion scores of each map: means over images with intervals."""
        by_image = [results["faith"] for results in self.evidence.values()]
        if not by_image:
            return None
        return {
            name: {
                measure: {"mean": float(np.mean(values)), "interval": interval(np.array(values))}
                for measure in _MEASURES
                if (values := [faith[name][measure] for faith in by_image])
            }
            for name in by_image[0]
        }

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for number, results in self.evidence.items():
            yield f"picture-{number}-occlusion", signed(np.array(results["occlusion"]))
            yield f"picture-{number}-dropped", self._patch_drop_chart(number)

    def _patch_drop_chart(self, number: int) -> str:
        """Return a chart of the probability over the share of random cells removed."""
        rows, start = self.evidence[number]["patch_drop"], self._probability[number]
        xs = [0.0, *(row["share"] for row in rows)]
        lines = [Line(self.svg_label("prediction"), xs, [start, *(row["probability"] for row in rows)], 0)]
        ends = [[start, *(min(max(row["interval"][end], 0), 1) for row in rows)] for end in (0, 1)]
        lines += [Line(name, xs, ys, 7) for name, ys in zip(("95 %", ""), ends, strict=True)]
        return line_chart(lines, self.svg_label("removed"), self.svg_label("probability"), dots=True)

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.evidence:
            return ""
        parts = [self.block_for_image(number, self._image(number, figures)) for number in self.evidence]
        return self.paragraph("evidence") + "".join(parts) + self._all_images()

    def _image(self, number: int, figures: Mapping[str, Figure]) -> str:
        """Return the figures of a page image: its occlusion map, the scores of all maps, and patch drop."""
        changes, scores = np.array(self.evidence[number]["occlusion"]), self.evidence[number]["faith"]
        rows = [
            (self.t(f"map-{name}"), *(f"{faith[measure]:.2f}" for measure in _MEASURES))
            for name, faith in sorted(scores.items(), key=lambda row: row[1]["deletion"])
        ]
        occlusion_figure = figure(
            self.t("map-occlusion"),
            self.t("occlusion-note", most=f"{max(changes.max(), 0):.2g}", least=f"{max(-changes.min(), 0):.2g}"),
            self.photo_with_map(number, figures[f"picture-{number}-occlusion"]),
        )
        faith_figure = figure(
            self.t("faith"),
            self.t("faith-note", draws=DRAWS, deviation=f"{scores['random']['deviation']:.2f}"),
            self._table(rows),
        )
        drop_figure = figure(
            self.t("dropped"), self.t("dropped-note", draws=DRAWS), str(figures[f"picture-{number}-dropped"])
        )
        return f'<div class="panes">{occlusion_figure}{faith_figure}{drop_figure}</div>'

    def _all_images(self) -> str:
        """Return the table of means over all images, which are less noisy than the scores of one image."""
        means = self.mean_faith()
        if means is None or len(self.evidence) < _MIN_IMAGES:
            return ""

        def mean_text(score: dict[str, Any]) -> str:
            low, high = np.clip(score["interval"], 0, 1)
            return f"{score['mean']:.2f} ({low:.2f} .. {high:.2f})"

        rows = [
            (self.t(f"map-{name}"), *(mean_text(faith[measure]) for measure in _MEASURES))
            for name, faith in sorted(means.items(), key=lambda row: row[1]["deletion"]["mean"])
        ]
        note = self.t("faith-all-note", count=len(self.evidence))
        return figure(self.t("faith-all"), note, self._table(rows))

    def _table(self, rows: Sequence[Sequence[str]]) -> str:
        return table([self.t(name) for name in ("map", *_MEASURES)], rows, numeric=frozenset({1, 2}))
