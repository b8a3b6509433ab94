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
from vitrail.lab.permute import move, permutation
from vitrail.lab.position_measures import measure_encoding, pairwise_distances
from vitrail.lab.question import COLOURS, FIRST_SEEDS, Accuracies, Question, Verdict, percent_interval, points_text
from vitrail.lab.statistics import Estimate, mean_of, smallest
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.models.config import read_model
from vitrail.models.positions.grid import grid_coordinates, sinusoids
from vitrail.reports.charts import Interval, Line, interval_chart, line_chart
from vitrail.reports.page_kit import figure, table

KINDS = ("none", "learned-1d", "learned-2d", "sincos-1d", "sincos-2d", "relative", "rope-2d")
PLACES = ("every", "shared")
"""Where learned-1d positions are added instead of once at the input: in every layer, with own or shared tables."""
MARGIN = 0.01
"""Largest difference in accuracy that counts as equal: one percentage point."""


class PositionQuestion(Question):
    """Compares the same ViT with each position encoding."""

    messages = load_messages(__file__)
    claims = ("C17", "C18", "C19", "C20", "C21", "P1")

    @functools.cached_property
    def trials(self) -> dict[tuple[str, int], list[Trial]]:
        """Trials by variant and size, one per seed."""
        variants = {kind: {"position": kind} for kind in KINDS} | {place: {"position_at": place} for place in PLACES}
        counts = dict.fromkeys((self.lab.default_size, self.lab.sizes[0]))
        return {
            (name, count): [
                self.lab.train("vit", count=count, seed=seed, changes=changes) for seed in range(self.lab.seeds)
            ]
            for count in counts
            for name, changes in variants.items()
        }

    @functools.cached_property
    def fine_trials(self) -> list[Trial]:
        """Trials with learned positions on a grid large enough to show structure."""
        if self.lab.images.size == "Pico":
            return self.trials["learned-1d", self.lab.default_size]
        seeds, seen = range(self.lab.seeds), self.lab.seen // 2
        return [
            self.lab.train("vit", count=self.lab.default_size, seed=seed, size="Micro", seen=seen) for seed in seeds
        ]

    @functools.cached_property
    def measurement_trials(self) -> dict[str, Trial]:
        """Measurements of the trained encodings."""
        return {
            kind: measurement_trial(
                "vitrail.lab.questions.position:measure", self.trials[kind, self.lab.default_size][0], 0
            )
            for kind in KINDS
        }

    @functools.cached_property
    def proof_trial(self) -> Trial:
        """Trial that checks the exact statements."""
        model = self.lab.images.matched_config("vit")
        return Trial("vitrail.lab.questions.position:prove", {"model": model.to_document()}, work=1e9)

    def rounds(self) -> Sequence[Sequence[Trial]]:
        if "vit" not in self.lab.families:
            return ([self.proof_trial],)
        compared = ("none", "learned-1d", "learned-2d", "sincos-2d")
        main = {name: trials for (name, count), trials in self.trials.items() if count == self.lab.default_size}
        kinds = [trial for kind in KINDS for trial in main[kind][:FIRST_SEEDS]]
        return (
            [self.proof_trial],
            [trial for kind in compared for trial in (*main[kind][:FIRST_SEEDS], self.measurement_trials[kind])],
            self.fine_trials,
            [*kinds, *self.measurement_trials.values()],
            [trial for trials in main.values() for trial in trials[:FIRST_SEEDS]],
            [trial for trials in main.values() for trial in trials],
            [trial for trials in self.trials.values() for trial in trials],
        )

    def read(self, results: Results) -> None:
        def accuracies_at(count: int) -> Accuracies:
            """Return accuracies of one size. Seed noise is per size, because small sets have more."""
            return Accuracies(results, {name: trials for (name, size), trials in self.trials.items() if size == count})

        self.accuracies, self.smallest_accuracies = (
            accuracies_at(self.lab.default_size),
            accuracies_at(self.lab.sizes[0]),
        )
        self.proof = results.get(self.proof_trial)
        self.encodings = {
            kind: result
            for kind, trial in self.measurement_trials.items()
            if (result := results.get(trial)) is not None
        }
        fine_results = [result for trial in self.fine_trials if (result := results.get(trial)) is not None]
        self.structure_curves = [np.array(result["places"]) for result in fine_results if result.get("places")]
        """For each seed (evaluations, 4): step, additive, row, column. The first row is before training."""
        self.is_fine_cut_off = any(map(results.is_cut_off, self.fine_trials))

    def verdicts(self) -> Iterator[Verdict]:
        yield Verdict("C17", "trained", self._structure_gain(), is_share=False)
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

    def _structure_gain(self) -> Estimate | None:
        """Return the smaller gain of R2 by training, of rows and of columns."""
        if not self.structure_curves:
            return None
        gains = [[float((curve[-1] - curve[0])[column]) for curve in self.structure_curves] for column in (2, 3)]
        estimates = [mean_of(seed_gains)._replace(is_cut_off=self.is_fine_cut_off) for seed_gains in gains]
        return smallest(estimates)

    def _needs_position(self) -> bool | None:
        """Return whether C18 holds: only without positions, the order of patches changes no logit."""
        if self.proof is None:
            return None
        without_positions, with_positions = self.proof["none"].values(), self.proof["kinds"].values()
        is_unordered = all(change < EQUAL for change in without_positions)
        return is_unordered and all(change > DIFFERENT for change in with_positions)

    def _sinusoids_are_good(self) -> bool | None:
        """Return whether C21 holds: sinusoids have all properties of a good encoding."""
        if self.proof is None:
            return None
        return all(
            properties["unique"] > 1e-3
            and properties["bounded"] <= 1
            and properties["uneven"] < EQUAL
            and properties["length"] < EQUAL
            for properties in self.proof["sinusoids"].values()
        )

    def _variant_label(self, name: str, tag: str = "span") -> str:
        return name if name in KINDS else self.t(f"placed-{name}", tag)

    def figures(self) -> Iterator[tuple[str, str]]:
        rows = []
        for name in self.accuracies.right:
            estimate = self.accuracies.estimate(name)
            colour = COLOURS["vit"] if name in KINDS else 7
            rows.append(
                Interval(self._variant_label(name, "tspan"), 100 * estimate.value, *percent_interval(estimate), colour)
            )
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
                    **self._structure_fields(),
                ),
                svg,
            )
            for name, svg in figures.items()
        )
        return f'<div class="panes">{panes}</div>{self._table()}{self.t("conditions-note", "p")}'

    def _structure_fields(self) -> dict[str, str]:
        """Return R2 of rows and columns before and after training, formatted."""
        if not self.structure_curves:
            return {"before": "-", "after": "-"}
        first, last = (np.mean(self.structure_curves, axis=0)[index, 2:] for index in (0, -1))
        return {"before": f"{first[0]:.2f} / {first[1]:.2f}", "after": f"{last[0]:.2f} / {last[1]:.2f}"}

    def _table(self) -> str:
        accuracies_by_size = {self.lab.default_size: self.accuracies, self.lab.sizes[0]: self.smallest_accuracies}
        rows = []
        for kind in KINDS:
            if kind not in self.accuracies:
                continue
            shares = [
                f"{accuracies.estimate(kind).value:.1%}" if kind in accuracies else "-"
                for accuracies in accuracies_by_size.values()
            ]
            lead = self._lead(kind, "none")
            has_lead = lead is not None and not math.isnan(lead.error) and kind != "none"
            lead_text = f"{points_text(lead.value)} ({_interval_range(lead)})" if lead is not None and has_lead else "-"
            encoding = self.encodings.get(kind)
            numbers = (
                ["-"] * 3
                if encoding is None
                else [_before_after_text(encoding, name) for name in ("unique", "bounded", "uneven")]
            )
            rows.append([kind, *shares, lead_text, *numbers])
        heads = [
            "",
            *(self.t("accuracy-head", count=f"{count:,}") for count in accuracies_by_size),
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
            "structure": [curve.tolist() for curve in self.structure_curves],
            "exact": self.proof,
        }


def _interval_range(estimate: Estimate) -> str:
    low, high = (f"{value:+.1f}" for value in percent_interval(estimate))
    return f"{low} … {high}"


def _before_after_text(properties: dict[str, Any], name: str) -> str:
    before, after = (f"{properties[when][name]:.2f}" for when in ("before", "after"))
    return after if before == after else f"{before} → {after}"


def prove(settings: dict[str, Any], _images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: check that only a ViT without positions ignores the order of patches, and check sinusoids."""
    config = read_model(settings["model"])
    order = permutation("patches", config.resolution, settings["model"]["patch"], 0)

    def shuffle_change(**changes: Any) -> float:
        model = random_model(config.replace(**changes))
        images = random_images(model)
        with torch.no_grad():
            return relative_difference(model(images), model(move(images, order)))

    result = {
        "none": {pool: shuffle_change(position="none", pool=pool) for pool in ("cls", "gap", "map")},
        "kinds": {kind: shuffle_change(position=kind) for kind in KINDS if kind != "none"},
        "sinusoids": {
            name: _measure_sinusoids(name, settings["model"]["width"]) for name in ("sincos-1d", "sincos-2d")
        },
    }
    return Outcome(result, {})


def _measure_sinusoids(name: str, width: int) -> dict[str, float]:
    """Return the worst properties of sinusoids over grid sizes, and how much distances depend on the grid size."""
    worst = {"unique": np.inf, "bounded": 0.0, "uneven": 0.0, "length": 0.0}
    reference = None
    for side in (4, 14, 24):
        rows, columns = grid_coordinates((side, side))
        if name == "sincos-1d":
            encoding = sinusoids(rows * side + columns, width).numpy()
        else:
            encoding = torch.cat([sinusoids(coordinates, width // 2) for coordinates in (rows, columns)], 1).numpy()
        separations = pairwise_distances(encoding)
        result = measure_encoding(separations, float(np.abs(encoding).max()), (side, side))
        worst["unique"] = min(worst["unique"], result.unique)
        worst["bounded"] = max(worst["bounded"], result.bounded)
        worst["uneven"] = max(worst["uneven"], result.uneven)
        near = separations[0, 1:4, 0]  # distances to the next three positions of the row, which exist in every grid
        reference = near if reference is None else reference
        worst["length"] = max(worst["length"], float(np.abs(near - reference).max()))
    return worst


def measure(_settings: dict[str, Any], _images: Images, bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure the properties of a model's position encoding before and after training."""
    bundle = load(bundles[0])
    models = {"before": open_model(bundle.provenance["lab"], []), "after": bundle.model}
    return Outcome({when: _measure_encoding(model) for when, model in models.items()}, {})


@torch.no_grad()
def _measure_encoding(model: Any) -> dict[str, float]:
    """Measure the properties of the position encoding of a model's patches."""
    config, position = model.config, model.position
    encoding, rotation = position_table(model), position.rotation(model)
    if rotation is not None:
        encoding = torch.cat(rotation[:, config.prefix :].double().unbind(), dim=1).numpy()
    biases = [position.bias(model, layer) for layer in range(config.depth)]
    if encoding is not None:
        pairs, largest = pairwise_distances(encoding), float(np.abs(encoding).max())
    elif biases[0] is not None:
        patch_biases = torch.cat(biases)[:, config.prefix :, config.prefix :].double()
        pairs, largest = patch_biases.permute(1, 2, 0).numpy(), float(patch_biases.abs().max())
    else:
        pairs, largest = np.zeros((config.patches, config.patches, 1)), 0.0
    return measure_encoding(pairs, largest, config.grid)._asdict()
