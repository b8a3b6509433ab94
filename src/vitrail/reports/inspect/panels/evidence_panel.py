"""Evidence: how the prediction changes when parts of the image are removed, and whether the maps predict that."""

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
"""Shares of the cells that are removed at random."""
DRAWS = 5
"""Number of random orders that maps are compared with, and of random sets of cells for each share."""
_MEASURES = ("deletion", "insertion")
_SEVERAL = 5  # images from which on an interval says something


class EvidencePanel(Panel):
    """Occlusion, deletion and insertion of every map, and random cells removed; hundreds of forward passes per
    image."""

    words = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.found: dict[int, dict[str, Any]] = {}
        """Results of each shown image, as in `inspect.json`."""
        self._probability: dict[int, float] = {}

    def why_absent(self) -> str | None:
        return self.context.why_no_prediction() or (None if self.context.evidence else "not-asked")

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        model, seed, grid = self.context.model, self.context.seed + number, evidence_grid(self.context.model)
        answer = self.context.bundle.answer
        shares = answer.probabilities(activations.logits[0].float())
        label = int(activations.logits[0].argmax())
        self._probability[number] = float(shares[label])
        worth = occlusion(model, image_CHW, label, grid, answer)
        of_model = {} if self.context.layout is None else maps(model, image_CHW[None], activations)
        judged = {name: to_cells(values[0], grid) for name, values in of_model.items()} | {"occlusion": worth}
        judge = functools.partial(faith, model, image_CHW, label, grid=grid, answer=answer)
        scores = {name: judge(values)._asdict() for name, values in judged.items()}
        generator = np.random.default_rng(seed)
        random = np.array([judge(generator.random(grid)) for _ in range(DRAWS)])
        # In a random order, deletion and insertion are draws of the same thing.
        mean, deviation = float(random.mean()), float(random.std(ddof=1))
        scores["random"] = {"deletion": mean, "insertion": mean, "deviation": deviation}
        dropped = patch_drop(model, image_CHW, label, grid, shares=DROPPED, draws=DRAWS, seed=seed, answer=answer)
        self.found[number] = {
            "class": label,
            "grid": list(grid),
            "occlusion": rounded(worth),
            "faith": scores,
            "patch_drop": [
                {"share": share, "probability": float(row.mean()), "interval": interval(row)}
                for share, row in zip(DROPPED, dropped, strict=True)
            ],
        }

    def numbers(self) -> dict[str, Any]:
        return {"faith": self.faith()}

    def image_numbers(self, number: int) -> dict[str, Any]:
        return {"evidence": self.found.get(number)}

    def faith(self) -> dict[str, Any] | None:
        """Deletion and insertion of each map: means over images with intervals."""
        judged = [one["faith"] for one in self.found.values()]
        if not judged:
            return None
        return {
            name: {
                measure: {"mean": float(np.mean(values)), "interval": interval(np.array(values))}
                for measure in _MEASURES
                if (values := [one[name][measure] for one in judged])
            }
            for name in judged[0]
        }

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for number, one in self.found.items():
            yield f"picture-{number}-occlusion", signed(np.array(one["occlusion"]))
            yield f"picture-{number}-dropped", self._dropped(number)

    def _dropped(self, number: int) -> str:
        """The probability with more and more random cells removed."""
        rows, start = self.found[number]["patch_drop"], self._probability[number]
        xs = [0.0, *(row["share"] for row in rows)]
        lines = [Line(self.label("prediction"), xs, [start, *(row["probability"] for row in rows)], 0)]
        ends = [[start, *(min(max(row["interval"][end], 0), 1) for row in rows)] for end in (0, 1)]
        lines += [Line(name, xs, ys, 7) for name, ys in zip(("95 %", ""), ends, strict=True)]
        return line_chart(lines, self.label("removed"), self.label("probability"), dots=True)

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.found:
            return ""
        parts = [self.each(number, self._image(number, figures)) for number in self.found]
        return self.say("evidence") + "".join(parts) + self._all_images()

    def _image(self, number: int, figures: Mapping[str, Figure]) -> str:
        worth, scores = np.array(self.found[number]["occlusion"]), self.found[number]["faith"]
        rows = [
            (self.word(f"map-{name}"), *(f"{one[measure]:.2f}" for measure in _MEASURES))
            for name, one in sorted(scores.items(), key=lambda row: row[1]["deletion"])
        ]
        occluded = figure(
            self.word("map-occlusion"),
            self.word("occlusion-note", most=f"{max(worth.max(), 0):.2g}", least=f"{max(-worth.min(), 0):.2g}"),
            self.overlay(number, figures[f"picture-{number}-occlusion"]),
        )
        judged = figure(
            self.word("faith"),
            self.word("faith-note", draws=DRAWS, deviation=f"{scores['random']['deviation']:.2f}"),
            self._table(rows),
        )
        dropped = figure(
            self.word("dropped"), self.word("dropped-note", draws=DRAWS), str(figures[f"picture-{number}-dropped"])
        )
        return f'<div class="panes">{occluded}{judged}{dropped}</div>'

    def _all_images(self) -> str:
        """The means over all images, which are less noisy than a single one."""
        means = self.faith()
        if means is None or len(self.found) < _SEVERAL:
            return ""

        def cell(one: dict[str, Any]) -> str:
            low, high = np.clip(one["interval"], 0, 1)
            return f"{one['mean']:.2f} ({low:.2f} .. {high:.2f})"

        rows = [
            (self.word(f"map-{name}"), *(cell(one[measure]) for measure in _MEASURES))
            for name, one in sorted(means.items(), key=lambda row: row[1]["deletion"]["mean"])
        ]
        note = self.word("faith-all-note", count=len(self.found))
        return figure(self.word("faith-all"), note, self._table(rows))

    def _table(self, rows: Sequence[Sequence[str]]) -> str:
        return table([self.word(name) for name in ("map", *_MEASURES)], rows, frozenset({1, 2}))
