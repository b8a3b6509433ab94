"""How should positions be encoded? Seven encodings, where they enter, and what learned positions learn."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.analysis.position_structure import position_table
from vitrail.bundles.bundle import load
from vitrail.core.message_files import load_messages
from vitrail.lab.exact import DIFFERENT, EQUAL, random_images, random_model, relative_difference
from vitrail.lab.images import Images
from vitrail.lab.measurements import measurement_trial, open_model
from vitrail.lab.measures import measure_conditions, pairwise_distances
from vitrail.lab.permute import move, permutation
from vitrail.lab.question import COLOURS, Accuracies, Question, Verdict, percent_interval, points_text
from vitrail.lab.statistics import Estimate, mean_of, pool, smallest
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.models.config import read_model
from vitrail.models.positions.grid import grid_coordinates, sinusoids
from vitrail.reports.charts import Interval, Line, interval_chart, line_chart
from vitrail.reports.page_kit import figure, table

KINDS = ("none", "learned-1d", "learned-2d", "sincos-1d", "sincos-2d", "relative", "rope-2d")
PLACES = ("every", "shared")
"""Other places for learned-1d than once at the input."""
MARGIN = 0.01
"""Margin of equality: one percentage point."""


class PositionQuestion(Question):
    """The same ViT with each position encoding."""

    messages = load_messages(__file__)
    claims = ("C17", "C18", "C19", "C20", "C21", "P1")

    @functools.cached_property
    def trials(self) -> dict[tuple[str, int], list[Trial]]:
        """Trials by variant and size, one per seed."""
        variants = {kind: {"position": kind} for kind in KINDS} | {place: {"position_at": place} for place in PLACES}
        counts = dict.fromkeys((self.lab.default_size, self.lab.sizes[0]))
        return {
            (name, count): [
                self.lab.train("vit", count=count, seed=seed, changes=changes) for seed in self.lab.seeds_for(count)
            ]
            for count in counts
            for name, changes in variants.items()
        }

    @functools.cached_property
    def fine(self) -> list[Trial]:
        """Trials with learned positions on a grid large enough to show structure."""
        if self.lab.images.size == "Pico":
            return self.trials["learned-1d", self.lab.default_size]
        seeds, seen = self.lab.seeds_for(self.lab.default_size), self.lab.seen // 2
        return [
            self.lab.train("vit", count=self.lab.default_size, seed=seed, size="Micro", seen=seen) for seed in seeds
        ]

    @functools.cached_property
    def measured(self) -> dict[str, Trial]:
        """Measurements of the trained encodings."""
        return {
            kind: measurement_trial(
                "vitrail.lab.questions.position:measure", self.trials[kind, self.lab.default_size][0], 0
            )
            for kind in KINDS
        }

    @functools.cached_property
    def proof_trial(self) -> Trial:
        model = self.lab.images.matched_config("vit")
        return Trial("vitrail.lab.questions.position:prove", {"model": model.to_document()}, work=1e9)

    def rounds(self) -> Sequence[Sequence[Trial]]:
        if "vit" not in self.lab.families:
            return ([self.proof_trial],)
        compared = ("none", "learned-1d", "learned-2d", "sincos-2d")
        main = {name: trials for (name, count), trials in self.trials.items() if count == self.lab.default_size}
        kinds = [trial for kind in KINDS for trial in main[kind][:2]]
        return (
            [self.proof_trial],
            [trial for kind in compared for trial in (*main[kind][:2], self.measured[kind])],
            self.fine,
            [*kinds, *self.measured.values()],
            [trial for trials in main.values() for trial in trials[:2]],
            [trial for trials in main.values() for trial in trials],
            [trial for trials in self.trials.values() for trial in trials],
        )

    def read(self, results: Results) -> None:
        def of_size(count: int) -> Accuracies:
            """Return accuracies of one size. Seed noise is per size, because small sets have more."""
            return Accuracies(results, {name: trials for (name, at), trials in self.trials.items() if at == count})

        self.accuracies, self.smallest_accuracies = of_size(self.lab.default_size), of_size(self.lab.sizes[0])
        self.proof = results.get(self.proof_trial)
        self.encodings = {
            kind: result for kind, trial in self.measured.items() if (result := results.get(trial)) is not None
        }
        fine_results = [result for trial in self.fine if (result := results.get(trial)) is not None]
        self.structure_curves = [np.array(result["places"]) for result in fine_results if result.get("places")]
        """For each seed (evaluations, 4): step, additive, row, column. The first row is before training."""
        self.is_fine_cut_off = any(map(results.is_cut_off, self.fine))

    def verdicts(self) -> Iterator[Verdict]:
        yield Verdict("C17", "trained", self._learned(), is_share=False)
        yield Verdict("C18", "exact", holds=self._needs_position())
        yield Verdict("C19", "trained", self._lead("learned-1d", "sincos-2d"))
        yield Verdict("C20", "trained", self._lead("learned-1d", "learned-2d"), margin=MARGIN)
        yield Verdict("C21", "exact", holds=self._sinusoids_are_good())
        leads = {kind: self._lead(kind, "none") for kind in KINDS if kind != "none" and kind in self.accuracies}
        yield Verdict(
            "P1", "trained", smallest(list(leads.values())) if leads else None, fields=self._weakest_kind(leads)
        )

    def _weakest_kind(self, leads: Mapping[str, Estimate | None]) -> dict[str, str]:
        """Return the encoding with the smallest lead over no positions."""
        values = {kind: lead.value for kind, lead in leads.items() if lead is not None}
        return {"kind": min(values, key=lambda kind: values[kind])} if values else {}

    def _lead(self, kind: str, other_kind: str) -> Estimate | None:
        return self.accuracies.difference(kind, other_kind)

    def _learned(self) -> Estimate | None:
        """Return the smaller gain of R2 by training, of rows and of columns."""
        if not self.structure_curves:
            return None
        gains = [[float((course[-1] - course[0])[at]) for course in self.structure_curves] for at in (2, 3)]
        estimates = [
            mean_of(seed_gains, pool([seed_gains]))._replace(is_cut_off=self.is_fine_cut_off) for seed_gains in gains
        ]
        return smallest(estimates)

    def _needs_position(self) -> bool | None:
        if self.proof is None:
            return None
        without, with_one = self.proof["none"].values(), self.proof["kinds"].values()
        return all(change < EQUAL for change in without) and all(change > DIFFERENT for change in with_one)

    def _sinusoids_are_good(self) -> bool | None:
        if self.proof is None:
            return None
        return all(
            condition["unique"] > 1e-3
            and condition["bounded"] <= 1
            and condition["uneven"] < EQUAL
            and condition["length"] < EQUAL
            for condition in self.proof["sinusoids"].values()
        )

    def _name(self, name: str, tag: str = "span") -> str:
        return name if name in KINDS else self.t(f"placed-{name}", tag)

    def figures(self) -> Iterator[tuple[str, str]]:
        rows = []
        for name in self.accuracies.right:
            estimate = self.accuracies.estimate(name)
            colour = COLOURS["vit"] if name in KINDS else 7
            rows.append(Interval(self._name(name, "tspan"), 100 * estimate.value, *percent_interval(estimate), colour))
        if rows:
            yield "position-accuracy", interval_chart(rows, self.t("accuracy", "tspan"))
        if self.structure_curves:
            steps, (additive, row, column) = (
                self.structure_curves[0][1:, 0],
                np.mean(self.structure_curves, axis=0)[1:, 1:].T,
            )
            names = zip(("additive", "row", "column"), (additive, row, column), (3, 0, 1), strict=True)
            lines = [Line(self.t(name, "tspan"), steps.tolist(), ys.tolist(), colour) for name, ys, colour in names]
            yield (
                "position-structure",
                line_chart(lines, self.t("steps", "tspan"), self.t("r2", "tspan"), log_x=True, dots=True),
            )

    def html(self, figures: dict[str, str]) -> str:
        if not self.accuracies.right and not self.structure_curves:
            return str(self.t("nothing", "p"))
        panes = "".join(
            figure(
                self.t(f"{name}-title"),
                self.t(
                    f"{name}-note",
                    count=f"{self.lab.default_size:,}",
                    seeds=len(self.structure_curves),
                    runs=self.accuracies.seeds,
                    **self._ends(),
                ),
                svg,
            )
            for name, svg in figures.items()
        )
        return f'<div class="panes">{panes}</div>{self._table()}{self.t("conditions-note", "p")}'

    def _ends(self) -> dict[str, str]:
        """Return R2 of rows and columns before and after training, formatted."""
        if not self.structure_curves:
            return {"before": "-", "after": "-"}
        first, last = (np.mean(self.structure_curves, axis=0)[at, 2:] for at in (0, -1))
        return {"before": f"{first[0]:.2f} / {first[1]:.2f}", "after": f"{last[0]:.2f} / {last[1]:.2f}"}

    def _table(self) -> str:
        of_sizes = {self.lab.default_size: self.accuracies, self.lab.sizes[0]: self.smallest_accuracies}
        rows = []
        for kind in KINDS:
            if kind not in self.accuracies:
                continue
            shares = [
                f"{accuracies.estimate(kind).value:.1%}" if kind in accuracies else "-"
                for accuracies in of_sizes.values()
            ]
            lead = self._lead(kind, "none")
            is_known = lead is not None and not math.isnan(lead.error) and kind != "none"
            lead_text = f"{points_text(lead.value)} ({_interval_range(lead)})" if lead is not None and is_known else "-"
            encoding = self.encodings.get(kind)
            numbers = (
                ["-"] * 3
                if encoding is None
                else [_before_after_text(encoding, name) for name in ("unique", "bounded", "uneven")]
            )
            rows.append([kind, *shares, lead_text, *numbers])
        heads = [
            "",
            *(self.t("accuracy-head", count=f"{count:,}") for count in of_sizes),
            self.t("lead-head", count=f"{self.lab.default_size:,}"),
            *(self.t(name) for name in ("unique", "bounded", "uneven")),
        ]
        return table(heads, rows, frozenset(range(1, len(heads)))) if rows else ""

    def numbers(self) -> dict[str, Any]:
        return {
            "accuracy": {
                f"{name} {count}": list(accuracies.estimate(name)[:2])
                for count, accuracies in (
                    (self.lab.default_size, self.accuracies),
                    (self.lab.sizes[0], self.smallest_accuracies),
                )
                for name in accuracies.right
            },
            "conditions": self.encodings,
            "structure": [course.tolist() for course in self.structure_curves],
            "exact": self.proof,
        }


def _interval_range(estimate: Estimate) -> str:
    low, high = (f"{value:+.1f}" for value in percent_interval(estimate))
    return f"{low} … {high}"


def _before_after_text(conditions: dict[str, Any], name: str) -> str:
    before, after = (f"{conditions[when][name]:.2f}" for when in ("before", "after"))
    return after if before == after else f"{before} → {after}"


def prove(settings: dict[str, Any], _images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Check that only a ViT without positions ignores the order of patches, and the properties of sinusoids."""
    config = read_model(settings["model"])
    order = permutation("patches", config.resolution, settings["model"]["patch"], 0)

    def shuffled(**changes: Any) -> float:
        model = random_model(config.replace(**changes))
        images = random_images(model)
        with torch.no_grad():
            return relative_difference(model(images), model(move(images, order)))

    result = {
        "none": {pool: shuffled(position="none", pool=pool) for pool in ("cls", "gap", "map")},
        "kinds": {kind: shuffled(position=kind) for kind in KINDS if kind != "none"},
        "sinusoids": {name: _sinusoids(name, settings["model"]["width"]) for name in ("sincos-1d", "sincos-2d")},
    }
    return Outcome(result, {})


def _sinusoids(name: str, width: int) -> dict[str, float]:
    """Return the worst properties of sinusoids over grid sizes, and how much distances depend on the grid size."""
    worst = {"unique": np.inf, "bounded": 0.0, "uneven": 0.0, "length": 0.0}
    first = None
    for side in (4, 14, 24):
        rows, columns = grid_coordinates((side, side))
        if name == "sincos-1d":
            encoding = sinusoids(rows * side + columns, width).numpy()
        else:
            encoding = torch.cat([sinusoids(place, width // 2) for place in (rows, columns)], 1).numpy()
        separations = pairwise_distances(encoding)
        result = measure_conditions(separations, float(np.abs(encoding).max()), (side, side))
        worst["unique"] = min(worst["unique"], result.unique)
        worst["bounded"] = max(worst["bounded"], result.bounded)
        worst["uneven"] = max(worst["uneven"], result.uneven)
        near = separations[0, 1:4, 0]  # to the next three positions of the row, which exist in every grid
        first = near if first is None else first
        worst["length"] = max(worst["length"], float(np.abs(near - first).max()))
    return worst


def measure(_settings: dict[str, Any], _images: Images, bundles: list[Path], _folder: Path) -> Outcome:
    """Measure the properties of a model's encoding before and after training."""
    bundle = load(bundles[0])
    models = {"before": open_model(bundle.provenance["lab"], []), "after": bundle.model}
    return Outcome({when: _measure_encoding(model) for when, model in models.items()}, {})


@torch.no_grad()
def _measure_encoding(model: Any) -> dict[str, float]:
    """Measure the properties of the encoding of patch pairs by the model's position module."""
    config, position = model.config, model.position
    added, rotation = position_table(model), position.rotation(model)
    if rotation is not None:
        added = torch.cat(rotation[:, config.prefix :].double().unbind(), dim=1).numpy()
    biases = [position.bias(model, layer) for layer in range(config.depth)]
    if added is not None:
        pairs, largest = pairwise_distances(added), float(np.abs(added).max())
    elif biases[0] is not None:
        of_patches = torch.cat(biases)[:, config.prefix :, config.prefix :].double()
        pairs, largest = of_patches.permute(1, 2, 0).numpy(), float(of_patches.abs().max())
    else:
        pairs, largest = np.zeros((config.patches, config.patches, 1)), 0.0
    return measure_conditions(pairs, largest, config.grid)._asdict()
