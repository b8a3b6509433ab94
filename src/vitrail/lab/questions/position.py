"""How should a patch know where it was? Seven kinds of position, where they enter, and what learned ones learn."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.analysis.position_structure import position_table
from vitrail.bundles.bundle import load
from vitrail.lab.exact import DIFFERENT, EQUAL, difference, drawn, random_images
from vitrail.lab.images import Images
from vitrail.lab.measurements import looking_cell, open_model
from vitrail.lab.measures import conditions, distances
from vitrail.lab.permute import move, permutation
from vitrail.lab.question import COLOURS, Accuracies, Question, Verdict, bar, points
from vitrail.lab.results import Results
from vitrail.lab.statistics import Estimate, mean_of, pool, smallest
from vitrail.lab.trial import Cell, Outcome
from vitrail.models.config import read_model
from vitrail.models.positions.modules import grid_coordinates, sincos_1d
from vitrail.reports.messages import words_beside
from vitrail.reports.page import Line, Range, chart, figure, ranges, table

KINDS = ("none", "learned-1d", "learned-2d", "sincos-1d", "sincos-2d", "relative", "rope-2d")
PLACES = ("every", "shared")
"""Where learned-1d may enter besides once, at the input."""
MARGIN = 0.01
"""About equal: within one point."""


class Position(Question):
    """ViT with each kind of position, otherwise alike."""

    words = words_beside(__file__)
    claims = ("C17", "C18", "C19", "C20", "C21", "P1")

    @functools.cached_property
    def cells(self) -> dict[tuple[str, int], list[Cell]]:
        """The cells of every variant and size, a seed each."""
        variants = {kind: {"position": kind} for kind in KINDS} | {place: {"position_at": place} for place in PLACES}
        counts = dict.fromkeys((self.lab.usual_size, self.lab.sizes[0]))
        return {
            (name, count): [
                self.lab.train("vit", count=count, seed=seed, changes=changes) for seed in self.lab.seeds_for(count)
            ]
            for count in counts
            for name, changes in variants.items()
        }

    @functools.cached_property
    def fine(self) -> list[Cell]:
        """Learned positions of a grid that is large enough to show structure."""
        if self.lab.images.size == "Pico":
            return self.cells["learned-1d", self.lab.usual_size]
        seeds, seen = self.lab.seeds_for(self.lab.usual_size), self.lab.seen // 2
        return [self.lab.train("vit", count=self.lab.usual_size, seed=seed, size="Micro", seen=seen) for seed in seeds]

    @functools.cached_property
    def measured(self) -> dict[str, Cell]:
        """What every kind's encoding is after training."""
        return {
            kind: looking_cell("vitrail.lab.questions.position:measure", self.cells[kind, self.lab.usual_size][0], 0)
            for kind in KINDS
        }

    @functools.cached_property
    def proof(self) -> Cell:
        model = self.lab.images.matched("vit")
        return Cell("vitrail.lab.questions.position:prove", {"model": model.to_document()}, work=1e9)

    def rounds(self) -> Sequence[Sequence[Cell]]:
        if "vit" not in self.lab.families:
            return ([self.proof],)
        compared = ("none", "learned-1d", "learned-2d", "sincos-2d")
        main = {name: cells for (name, count), cells in self.cells.items() if count == self.lab.usual_size}
        kinds = [cell for kind in KINDS for cell in main[kind][:2]]
        return (
            [self.proof],
            [cell for kind in compared for cell in (*main[kind][:2], self.measured[kind])],
            self.fine,
            [*kinds, *self.measured.values()],
            [cell for cells in main.values() for cell in cells[:2]],
            [cell for cells in main.values() for cell in cells],
            [cell for cells in self.cells.values() for cell in cells],
        )

    def read(self, results: Results) -> None:
        def of_size(count: int) -> Accuracies:
            """Each size has its own seed noise: small training sets have more."""
            return Accuracies(results, {name: cells for (name, at), cells in self.cells.items() if at == count})

        self.found, self.few = of_size(self.lab.usual_size), of_size(self.lab.sizes[0])
        self.proved = results.get(self.proof)
        self.encodings = {
            kind: found for kind, cell in self.measured.items() if (found := results.get(cell)) is not None
        }
        known = [found for cell in self.fine if (found := results.get(cell)) is not None]
        self.courses = [np.array(found["places"]) for found in known if found.get("places")]
        """For each seed (looks, 4): step, additive, row and column; the first one before training."""
        self.is_fine_cut_off = any(map(results.is_cut_off, self.fine))

    def verdicts(self) -> Iterator[Verdict]:
        yield Verdict("C17", "trained", self._learned(), is_share=False)
        yield Verdict("C18", "exact", holds=self._needs_position())
        yield Verdict("C19", "trained", self._lead("learned-1d", "sincos-2d"))
        yield Verdict("C20", "trained", self._lead("learned-1d", "learned-2d"), margin=MARGIN)
        yield Verdict("C21", "exact", holds=self._are_good())
        leads = {kind: self._lead(kind, "none") for kind in KINDS if kind != "none" and kind in self.found}
        yield Verdict("P1", "trained", smallest(list(leads.values())) if leads else None, words=self._worst(leads))

    def _worst(self, leads: Mapping[str, Estimate | None]) -> dict[str, str]:
        """The kind that is least ahead of no positions."""
        known = {kind: lead.value for kind, lead in leads.items() if lead is not None}
        return {"kind": min(known, key=lambda kind: known[kind])} if known else {}

    def _lead(self, one: str, other: str) -> Estimate | None:
        return self.found.difference(one, other)

    def _learned(self) -> Estimate | None:
        """The smaller of what training adds to the R2 of rows and of columns."""
        if not self.courses:
            return None
        gains = [[float((course[-1] - course[0])[at]) for course in self.courses] for at in (2, 3)]
        found = [mean_of(some, pool([some]))._replace(is_cut_off=self.is_fine_cut_off) for some in gains]
        return smallest(found)

    def _needs_position(self) -> bool | None:
        if self.proved is None:
            return None
        without, with_one = self.proved["none"].values(), self.proved["kinds"].values()
        return all(one < EQUAL for one in without) and all(one > DIFFERENT for one in with_one)

    def _are_good(self) -> bool | None:
        if self.proved is None:
            return None
        return all(
            one["unique"] > 1e-3 and one["bounded"] <= 1 and one["uneven"] < EQUAL and one["length"] < EQUAL
            for one in self.proved["sinusoids"].values()
        )

    def _name(self, name: str, tag: str = "span") -> str:
        return name if name in KINDS else self.word(f"placed-{name}", tag)

    def figures(self) -> Iterator[tuple[str, str]]:
        rows = []
        for name in self.found.right:
            one = self.found.estimate(name)
            colour = COLOURS["vit"] if name in KINDS else 7
            rows.append(Range(self._name(name, "tspan"), 100 * one.value, *bar(one), colour))
        if rows:
            yield "position-accuracy", ranges(rows, self.word("accuracy", "tspan"))
        if self.courses:
            steps, (additive, row, column) = self.courses[0][1:, 0], np.mean(self.courses, axis=0)[1:, 1:].T
            names = zip(("additive", "row", "column"), (additive, row, column), (3, 0, 1), strict=True)
            lines = [Line(self.word(name, "tspan"), steps.tolist(), ys.tolist(), colour) for name, ys, colour in names]
            yield (
                "position-structure",
                chart(lines, self.word("steps", "tspan"), self.word("r2", "tspan"), log_x=True, dots=True),
            )

    def html(self, figures: dict[str, str]) -> str:
        if not self.found.right and not self.courses:
            return str(self.word("nothing", "p"))
        panes = "".join(
            figure(
                self.word(f"{name}-title"),
                self.word(
                    f"{name}-note",
                    count=f"{self.lab.usual_size:,}",
                    seeds=len(self.courses),
                    runs=self.found.seeds,
                    **self._ends(),
                ),
                svg,
            )
            for name, svg in figures.items()
        )
        return f'<div class="panes">{panes}</div>{self._table()}{self.word("conditions-note", "p")}'

    def _ends(self) -> dict[str, str]:
        """R2 of rows and columns before and after training."""
        if not self.courses:
            return {"before": "-", "after": "-"}
        first, last = (np.mean(self.courses, axis=0)[at, 2:] for at in (0, -1))
        return {"before": f"{first[0]:.2f} / {first[1]:.2f}", "after": f"{last[0]:.2f} / {last[1]:.2f}"}

    def _table(self) -> str:
        of_sizes = {self.lab.usual_size: self.found, self.lab.sizes[0]: self.few}
        rows = []
        for kind in KINDS:
            if kind not in self.found:
                continue
            shares = [f"{one.estimate(kind).value:.1%}" if kind in one else "-" for one in of_sizes.values()]
            lead = self._lead(kind, "none")
            is_known = lead is not None and not math.isnan(lead.error) and kind != "none"
            said = f"{points(lead.value)} ({_range(lead)})" if lead is not None and is_known else "-"
            found = self.encodings.get(kind)
            numbers = ["-"] * 3 if found is None else [_change(found, name) for name in ("unique", "bounded", "uneven")]
            rows.append([kind, *shares, said, *numbers])
        heads = [
            "",
            *(self.word("accuracy-head", count=f"{count:,}") for count in of_sizes),
            self.word("lead-head", count=f"{self.lab.usual_size:,}"),
            *(self.word(name) for name in ("unique", "bounded", "uneven")),
        ]
        return table(heads, rows, frozenset(range(1, len(heads)))) if rows else ""

    def numbers(self) -> dict[str, Any]:
        return {
            "accuracy": {
                f"{name} {count}": list(found.estimate(name)[:2])
                for count, found in ((self.lab.usual_size, self.found), (self.lab.sizes[0], self.few))
                for name in found.right
            },
            "conditions": self.encodings,
            "structure": [course.tolist() for course in self.courses],
            "exact": self.proved,
        }


def _range(one: Estimate) -> str:
    low, high = (f"{value:+.1f}" for value in bar(one))
    return f"{low} … {high}"


def _change(found: dict[str, Any], name: str) -> str:
    before, after = (f"{found[when][name]:.2f}" for when in ("before", "after"))
    return after if before == after else f"{before} → {after}"


def prove(settings: dict[str, Any], _images: Images, _of: list[Path], _folder: Path) -> Outcome:
    """Without positions the order of patches is lost, with any kind it is not; and sinusoids are good encodings."""
    config = read_model(settings["model"])
    order = permutation("patches", config.resolution, settings["model"]["patch"], 0)

    def shuffled(**changes: Any) -> float:
        model = drawn(config.replace(**changes))
        images = random_images(model)
        with torch.no_grad():
            return difference(model(images), model(move(images, order)))

    result = {
        "none": {pool: shuffled(position="none", pool=pool) for pool in ("cls", "gap", "map")},
        "kinds": {kind: shuffled(position=kind) for kind in KINDS if kind != "none"},
        "sinusoids": {name: _sinusoids(name, settings["model"]["width"]) for name in ("sincos-1d", "sincos-2d")},
    }
    return Outcome(result, {})


def _sinusoids(name: str, width: int) -> dict[str, float]:
    """The three conditions of sinusoids, the worst over lengths, and how much a distance depends on the length."""
    worst = {"unique": np.inf, "bounded": 0.0, "uneven": 0.0, "length": 0.0}
    first = None
    for side in (4, 14, 24):
        rows, columns = grid_coordinates((side, side))
        if name == "sincos-1d":
            encoding = sincos_1d(rows * side + columns, width).numpy()
        else:
            encoding = torch.cat([sincos_1d(place, width // 2) for place in (rows, columns)], 1).numpy()
        apart = distances(encoding)
        one = conditions(apart, float(np.abs(encoding).max()), (side, side))
        worst["unique"] = min(worst["unique"], one.unique)
        worst["bounded"] = max(worst["bounded"], one.bounded)
        worst["uneven"] = max(worst["uneven"], one.uneven)
        near = apart[0, 1:4, 0]  # to the next three of the row, which every length has
        first = near if first is None else first
        worst["length"] = max(worst["length"], float(np.abs(near - first).max()))
    return worst


def measure(_settings: dict[str, Any], _images: Images, of: list[Path], _folder: Path) -> Outcome:
    """The three conditions of a trained model's encoding, before and after training."""
    bundle = load(of[0])
    models = {"before": open_model(bundle.provenance["lab"], []), "after": bundle.model}
    return Outcome({when: _conditions(model) for when, model in models.items()}, {})


@torch.no_grad()
def _conditions(model: Any) -> dict[str, float]:
    """Of what the model's position says of each pair of patches."""
    config, position = model.config, model.position
    added, rotation = position_table(model), position.rotation(model)
    if rotation is not None:
        added = torch.cat(rotation[:, config.prefix :].double().unbind(), dim=1).numpy()
    biases = [position.bias(model, layer) for layer in range(config.depth)]
    if added is not None:
        pairs, largest = distances(added), float(np.abs(added).max())
    elif biases[0] is not None:
        of_patches = torch.cat(biases)[:, config.prefix :, config.prefix :].double()
        pairs, largest = of_patches.permute(1, 2, 0).numpy(), float(of_patches.abs().max())
    else:
        pairs, largest = np.zeros((config.patches, config.patches, 1)), 0.0
    return conditions(pairs, largest, config.grid)._asdict()
