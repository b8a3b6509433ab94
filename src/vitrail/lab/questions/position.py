"""How should positions be encoded? Seven encodings, where they enter, and what learned positions learn."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.analysis.position_structure import position_table
from vitrail.bundles.bundle import load
from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.lab.exact import DIFFERENT, EQUAL, random_images, random_model, relative_difference
from vitrail.lab.images import Images
from vitrail.lab.measurements import measurement_trial, open_model
from vitrail.lab.permute import move, permutation
from vitrail.lab.position_measures import measure_encoding, pairwise_distances
from vitrail.lab.question import Verdict, find_trainings
from vitrail.lab.statistics import Estimate, mean_of, smallest
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.lab.variant_question import Key, Variant, VariantQuestion
from vitrail.models.config import read_model
from vitrail.models.positions.grid import grid_coordinates, sinusoids
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.page_kit import figure, table

KINDS = ("none", "learned-1d", "learned-2d", "sincos-1d", "sincos-2d", "relative", "rope-2d")
PLACES = ("every", "shared")
"""Where learned-1d positions are added instead of once at the input: in every layer, with own or shared tables."""
NEARNESS = 4
"""Index of Mantel's correlation in a row of a structure curve."""
_COMPARED = ("none", "learned-1d", "learned-2d", "sincos-2d")
MARGIN = 0.01
"""Largest difference in accuracy that counts as equal: one percentage point."""


class PositionQuestion(VariantQuestion):
    """Compares the same ViT with each position encoding."""

    messages = load_messages(__file__)
    claims = ("C17", "C18", "C19", "C20", "C21", "P1")

    @functools.cached_property
    def variants(self) -> Mapping[str, Variant]:
        kinds = {kind: Variant(changes={"position": kind}, against="none") for kind in KINDS[1:]}
        places = {place: Variant(changes={"position_at": place}, against="learned-1d") for place in PLACES}
        return {"none": Variant(changes={"position": "none"}), **kinds, **places}

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.lab.default_size, self.lab.sizes[0])))

    def stages(self) -> Sequence[Sequence[Key]]:
        main = [key for key in self.keys if key[1] == self.counts[0]]
        kinds = [key for key in main if key[0] in KINDS]
        return [key for key in kinds if key[0] in _COMPARED], kinds, main, self.keys

    @functools.cached_property
    def fine_trials(self) -> list[Trial]:
        """Trials with learned positions on a grid large enough to show structure."""
        if "vit" not in self.lab.families:
            return []
        if self.lab.images.size == "Pico":
            return self.trials["learned-1d", self.counts[0]]
        return [
            self.lab.train("vit", count=self.counts[0], seed=seed, size="Micro", seen=self.lab.seen // 2)
            for seed in range(self.lab.seeds)
        ]

    def measurement_trials(self, key: Key) -> Mapping[str, Sequence[Trial]]:
        if key[0] not in KINDS or key[1] != self.counts[0]:
            return {}
        return {"encoding": [measurement_trial("vitrail.lab.questions.position:measure", self.trials[key][0], 0)]}

    @functools.cached_property
    def proof_trial(self) -> Trial:
        """Trial that checks the exact statements."""
        model = self.lab.images.matched_config("vit")
        return Trial("vitrail.lab.questions.position:prove", {"model": model.to_document()}, work=1e9)

    def rounds(self) -> Sequence[Sequence[Trial]]:
        rounds = super().rounds()
        return ([self.proof_trial], [*self.fine_trials, *rounds[0]], *rounds[1:]) if rounds else ([self.proof_trial],)

    def read(self, results: Results) -> None:
        super().read(results)
        self.proof = results.get(self.proof_trial)
        self.encodings = {
            key[0]: measured["encoding"][0] for key, measured in self.measurements.items() if measured.get("encoding")
        }
        fine_results = [result for trial in self.fine_trials if (result := results.get(trial)) is not None]
        self.structure_curves = [np.array(result["places"]) for result in fine_results if result.get("places")]
        """For each seed (evaluations, 5): step, additive, row, column, nearness. The first row is before training."""
        self.is_fine_cut_off = any(map(results.is_cut_off, self.fine_trials))
        self.fine_trainings = frozenset(find_trainings(results, {"fine": self.fine_trials}).values())

    def verdicts(self) -> Iterator[Verdict]:
        yield Verdict("C17", "trained", self._nearness_gain(), is_share=False)
        yield Verdict("C18", "exact", holds=self._needs_position())
        yield Verdict("C19", "trained", self.lead("learned-1d", "sincos-2d"))
        yield Verdict("C20", "trained", self.lead("learned-1d", "learned-2d"), margin=MARGIN)
        yield Verdict("C21", "exact", holds=self._sinusoids_are_good())
        leads = {kind: self.gain(kind, self.counts[0]) for kind in KINDS[1:]}
        values = {kind: lead.value for kind, lead in leads.items() if lead is not None}
        weakest = {"kind": min(values, key=lambda kind: values[kind])} if len(values) == len(leads) else {}
        yield Verdict("P1", "trained", smallest(list(leads.values())), fields=weakest)

    def _nearness_gain(self) -> Estimate | None:
        """Return how much training raises the correlation of similarity with nearness on the grid."""
        if not self.structure_curves:
            return None
        gains = [float(curve[-1, NEARNESS] - curve[0, NEARNESS]) for curve in self.structure_curves]
        return mean_of(gains)._replace(is_cut_off=self.is_fine_cut_off, trainings=self.fine_trainings)

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

    def label(self, name: str, tag: str = "span") -> Html:
        return Html(name) if name in KINDS else self.t(f"placed-{name}", tag)

    def figures(self) -> Iterator[tuple[str, str]]:
        yield from super().figures()
        if self.structure_curves:
            curves = np.mean(self.structure_curves, axis=0)[1:].T
            names = (("additive", 1, 3), ("row", 2, 0), ("column", 3, 1), ("nearness", NEARNESS, 5))
            lines = [
                Line(self.t(name, "tspan"), curves[0].tolist(), curves[index].tolist(), colour)
                for name, index, colour in names
            ]
            labels = self.t("steps", "tspan"), self.t("structure", "tspan")
            yield "position-structure", line_chart(lines, *labels, log_x=True, dots=True)

    def panes(self, figures: dict[str, str]) -> Iterator[str]:
        yield from super().panes(figures)
        if (name := "position-structure") in figures:
            first, last = (np.mean(self.structure_curves, axis=0)[index, NEARNESS] for index in (0, -1))
            fields = {"before": f"{first:.2f}", "after": f"{last:.2f}", "seeds": str(len(self.structure_curves))}
            yield figure(self.t(f"{name}-title"), self.t(f"{name}-note", **fields), figures[name])

    def details(self) -> str:
        """Return the table of the properties of each encoding."""
        names = ("unique", "bounded", "uneven")
        rows = [
            (kind, *(_before_after_text(encoding, name) for name in names)) for kind, encoding in self.encodings.items()
        ]
        heads = ("", *(self.t(name) for name in names))
        return f"{table(heads, rows, frozenset((1, 2, 3)))}{self.t('conditions-note', 'p')}" if rows else ""

    def numbers(self) -> dict[str, Any]:
        return super().numbers() | {
            "conditions": self.encodings,
            "structure": [curve.tolist() for curve in self.structure_curves],
            "exact": self.proof,
        }


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
