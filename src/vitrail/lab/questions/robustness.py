"""What is still known of an image that is taken apart? Shuffled blocks, dropped cells, filtered frequencies."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.html import Html
from vitrail.lab import perturbations
from vitrail.lab.images import Images
from vitrail.lab.measurements import Readings, looking_cell, open_model, read_test_images
from vitrail.lab.question import COLOURS, Question, bar, interval_text
from vitrail.lab.results import Results
from vitrail.lab.trial import Cell, Outcome, pack, unpack
from vitrail.reports.families import in_figure
from vitrail.reports.messages import words_beside
from vitrail.reports.page import Line, chart, figure, table

_ASKED = 2000  # test images


class Robustness(Question):
    """Accuracy on changed test images, of models that were trained on images as they are. It answers no claim."""

    words = words_beside(__file__)

    @functools.cached_property
    def cells(self) -> dict[str, list[Cell]]:
        """What looks at the models of each family that were trained on the most images."""
        count = self.lab.sizes[-1]
        passes = (len(_changes(self.lab.images)) + 1) * min(_ASKED, len(self.lab.images.test))
        return {
            family: [
                looking_cell(
                    "vitrail.lab.questions.robustness:measure",
                    self.lab.train(family, count=count, seed=seed),
                    passes,
                )
                for seed in self.lab.seeds_for(count)
            ]
            for family in self.lab.families
        }

    def rounds(self) -> Sequence[Sequence[Cell]]:
        first = [name for name in ("vit", "resnet") if name in self.cells]
        return (
            [cell for family in first for cell in self.cells[family][:2]],
            [cell for some in self.cells.values() for cell in some[:2]],
            [cell for some in self.cells.values() for cell in some],
        )

    def read(self, results: Results) -> None:
        self.names = ["", *_changes(self.lab.images)]
        self.found = {name: Readings(results, self.cells, functools.partial(_right, name)) for name in self.names}

    @property
    def _known(self) -> list[str]:
        return [name for name in self.lab.families if name in self.found[""]]

    def figures(self) -> Iterator[tuple[str, str]]:
        for kind in perturbations.CURVES if self._known else ():
            points = perturbations.curve(kind, self.names)
            lines = []
            for family in self._known:
                some = [self.found[name].estimate(family) for _, name in points]
                values = [100 * one.value for one in some]
                colour = COLOURS.get(family, 7)
                lines.append(
                    Line(in_figure(family), [x for x, _ in points], values, colour, bars=[bar(one) for one in some])
                )
            across, up = self.word(kind, "tspan"), self.word("accuracy", "tspan")
            yield f"robustness-{kind}", chart(lines, across, up, dots=True, log_x=kind == "shuffle")

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.word("nothing", "p"))
        note = self.word("note", count=f"{self.lab.sizes[-1]:,}", seeds=self.found[""].seeds)
        panes = "".join(figure(self.word(f"{name}-title"), note, svg) for name, svg in figures.items())
        named = [(self.word("unchanged"), "")]
        for kind in perturbations.CURVES:
            named += [
                (Html(f"{self.word(kind)}: {x:g}"), name) for x, name in perturbations.curve(kind, self.names) if name
            ]
        rows = [[said, *(interval_text(self.found[name].estimate(one)) for one in self._known)] for said, name in named]
        listed = table(["", *self._known], rows, frozenset(range(1, len(self._known) + 1)))
        return f'<div class="panes">{panes}</div>{listed}'

    def numbers(self) -> dict[str, Any]:
        return {
            name or "unchanged": {family: list(self.found[name].estimate(family)[:2]) for family in self._known}
            for name in self.names
        }


def _right(name: str, found: dict[str, Any]) -> np.ndarray:
    return unpack(found["right"][name], found["count"])


def _changes(images: Images) -> dict[str, perturbations.Change]:
    """Cells that are dropped are the patches of the lab's ViT."""
    grid = images.config(images.size, "vit").grid or (1, 1)
    return perturbations.other_changes(perturbations.shuffle_grids(images.resolution), grid)


def measure(settings: dict[str, Any], images: Images, of: list[Path], _folder: Path) -> Outcome:
    """Whether each test image is named rightly under each change."""
    model = open_model(settings, of)
    pixels, labels = read_test_images(images, _ASKED)
    plain = perturbations.probabilities(model, pixels).argmax(axis=1)
    right = {"": pack(plain == labels)}
    for name, one in perturbations.ask(model, pixels, labels, _changes(images), plain=plain):
        right[name] = pack(one.right)
    return Outcome({"count": len(labels), "right": right, "accuracy": float((plain == labels).mean())}, {})
