"""Does the reading order of patches matter? An LSTM with five orders, and ViT, which has none, as a control."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.bundles.bundle import load
from vitrail.core.message_files import load_messages
from vitrail.lab.exact import DIFFERENT, EQUAL, random_images, random_model, relative_difference
from vitrail.lab.images import Images
from vitrail.lab.measurements import measurement_trial, open_model, read_test_images
from vitrail.lab.permute import move, patch_order
from vitrail.lab.position_measures import (
    influence_matrix,
    recency_index,
    removal_effect_by_position,
    strength_by_position,
)
from vitrail.lab.question import COLOURS, FIRST_SEEDS, Accuracies, Question, Verdict, percent_interval, points_text
from vitrail.lab.statistics import Estimate, mean_of, smallest
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.models.config import read_model
from vitrail.models.families.lstm.model import sequence_order
from vitrail.models.initialise import lecun_normal_
from vitrail.reports.charts import Interval, Line, interval_chart, line_chart
from vitrail.reports.page_kit import figure, table

ORDERS = ("raster", "reversed", "random", "column", "snake")
_SAMPLE = 256  # test images for gradients


class OrderQuestion(Question):
    """Compares the same LSTM with five reading orders."""

    messages = load_messages(__file__)
    claims = ("C32b", "C33")

    @functools.cached_property
    def trials(self) -> dict[str, list[Trial]]:
        """Trials of the LSTM by order, and of ViT, one per seed."""

        def train_seeds(family: str, **changes: Any) -> list[Trial]:
            seeds = range(self.lab.seeds)
            return [self.lab.train(family, count=self.lab.default_size, seed=seed, changes=changes) for seed in seeds]

        control = {"vit": train_seeds("vit")} if "vit" in self.lab.families else {}
        return {order: train_seeds("lstm", order=order) for order in ORDERS} | control

    @functools.cached_property
    def measurement_trials(self) -> dict[str, list[Trial]]:
        """Measurements of the influence of each patch by reading time. ViT uses raster order."""
        task, passes = "vitrail.lab.questions.order:measure", 30.0 * _SAMPLE
        return {
            name: [
                measurement_trial(task, trial, passes, order="raster" if name == "vit" else name, images=_SAMPLE)
                for trial in trials
            ]
            for name, trials in self.trials.items()
        }

    @functools.cached_property
    def proof_trial(self) -> Trial:
        """Trial that checks the exact statements."""
        models = {family: self.lab.images.matched_config(family).to_document() for family in ("lstm", "vit")}
        return Trial("vitrail.lab.questions.order:prove", {"models": models}, work=1e9)

    def rounds(self) -> Sequence[Sequence[Trial]]:
        def select(names: Sequence[str], seeds: int | None = FIRST_SEEDS) -> list[Trial]:
            return [
                trial
                for name in names
                for group in (self.trials, self.measurement_trials)
                for trial in group[name][:seeds]
            ]

        if "lstm" not in self.lab.families:
            return ([self.proof_trial],)
        first = [name for name in self.trials if name not in ("column", "snake")]
        return [self.proof_trial], select(first), select(tuple(self.trials)), select(tuple(self.trials), None)

    def read(self, results: Results) -> None:
        self.accuracies = Accuracies(results, self.trials)
        self.proof = results.get(self.proof_trial)
        self.measurements: dict[str, list[dict[str, Any]]] = {}
        for name, trials in self.measurement_trials.items():
            if finished := [result for trial in trials if (result := results.get(trial)) is not None]:
                self.measurements[name] = finished

    def verdicts(self) -> Iterator[Verdict]:
        orders = [order for order in ORDERS if order in self.measurements]
        yield Verdict("C32b", "trained", smallest([self._excess_recency(order) for order in orders]), is_share=False)
        yield Verdict("C33", "exact", holds=self._assumes_order())

    def _excess_recency(self, order: str) -> Estimate:
        """Return the recency index minus 0.5, its value for even influence."""
        estimate = mean_of([result["after"]["recency"] - 0.5 for result in self.measurements[order]])
        trainings = self.accuracies.trainings
        return estimate._replace(
            is_cut_off=order in self.accuracies.cut_off,
            trainings=frozenset((trainings[order],)) if order in trainings else frozenset(),
        )

    def _assumes_order(self) -> bool | None:
        """Return whether C33 holds: the LSTM depends on the order of patches, ViT without positions does not."""
        if self.proof is None:
            return None
        orders, moved, later = (self.proof[name] for name in ("orders", "moved", "later"))
        is_lstm_ordered = all(value > DIFFERENT for value in orders.values()) and all(
            value < EQUAL for value in moved.values()
        )
        is_vit_unordered = later["vit"] > 0 and self.proof["vit without positions"] < EQUAL
        return is_lstm_ordered and later["lstm"] == 0 and is_vit_unordered

    def figures(self) -> Iterator[tuple[str, str]]:
        rows = []
        for order in ORDERS:
            if order in self.accuracies:
                estimate = self.accuracies.estimate(order)
                rows.append(
                    Interval(self.t(order, "tspan"), 100 * estimate.value, *percent_interval(estimate), COLOURS["lstm"])
                )
        if rows:
            yield "order-accuracy", interval_chart(rows, self.t("accuracy", "tspan"))
        lines = [
            Line(self.t(f"line-{name}", "tspan"), list(range(1, len(ys) + 1)), ys.tolist(), colour)
            for name, ys, colour in self._strength_curves()
        ]
        if lines:
            yield "order-strength", line_chart(lines, self.t("time", "tspan"), self.t("strength", "tspan"), dots=True)

    def _strength_curves(self) -> Iterator[tuple[str, np.ndarray, int]]:
        """Yield the influence of patches by reading time, with mean 1.

        It is averaged over all orders, so that the content of images at each position averages out.
        """
        orders = [order for order in ORDERS if order in self.measurements]
        for when, colour in (("after", COLOURS["lstm"]), ("before", 7)):
            if orders:
                curves = [result[when]["strength"] for order in orders for result in self.measurements[order]]
                yield when, np.mean([np.array(curve) / np.mean(curve) for curve in curves], axis=0), colour
        if orders and "vit" in self.measurements:
            grid = self.lab.images.matched_config("vit").grid or (1, 1)
            curves = [
                np.array(result["after"]["strength"])[sequence_order(order, grid).numpy()]
                for order in orders
                for result in self.measurements["vit"]
            ]
            yield "vit", np.mean([curve / curve.mean() for curve in curves], axis=0), COLOURS["vit"]

    def html(self, figures: dict[str, str]) -> str:
        if not self.accuracies.right:
            return str(self.t("nothing", "p"))
        note = {"count": f"{self.lab.default_size:,}", "seeds": self.accuracies.seeds}
        panes = "".join(
            figure(self.t(f"{name}-title"), self.t(f"{name}-note", **note), svg) for name, svg in figures.items()
        )
        rows = []
        for name in (*ORDERS, "vit"):
            if name not in self.accuracies:
                continue
            lead = self.accuracies.difference(name, "raster") if name not in ("raster", "vit") else None
            lead_text = "-"
            if lead is not None and lead.error == lead.error:
                low, high = (f"{value:+.1f}" for value in percent_interval(lead))
                lead_text = f"{points_text(lead.value)} ({low} … {high})"
            rows.append(
                [self.t(name), f"{self.accuracies.estimate(name).value:.1%}", lead_text, *self._measurement_texts(name)]
            )
        names = ("accuracy-head", "lead-head", "recency-before", "recency-after", "removal", "last-first", "agreement")
        order_table = table(["", *(self.t(name) for name in names)], rows, frozenset(range(1, 8)))
        return f'<div class="panes">{panes}</div>{order_table}{self.t("table-note", "p")}'

    def _measurement_texts(self, name: str) -> list[str]:
        if name not in self.measurements:
            return ["-"] * 5
        results = self.measurements[name]
        before, after = (
            float(np.mean([result[when]["recency"] for result in results])) for when in ("before", "after")
        )
        ratio = float(np.mean([result["after"]["strength"][-1] / result["after"]["strength"][0] for result in results]))
        removal, agreement = (float(np.mean([result[kind] for result in results])) for kind in ("removal", "agreement"))
        excess = self._excess_recency(name)
        low, high = excess.interval() if excess.error == excess.error else (excess.value, excess.value)
        recency_text = f"{after:.2f} ({0.5 + low:.2f} … {0.5 + high:.2f})" if low < high else f"{after:.2f}"
        return [f"{before:.2f}", recency_text, f"{removal:.2f}", f"{ratio:.1f}", f"{agreement:.0%}"]

    def numbers(self) -> dict[str, Any]:
        return {
            "accuracy": {name: list(self.accuracies.estimate(name)[:2]) for name in self.accuracies.right},
            "recency": {
                name: {when: [result[when]["recency"] for result in results] for when in ("before", "after")}
                for name, results in self.measurements.items()
            },
            "removal": {name: [result["removal"] for result in results] for name, results in self.measurements.items()},
            "agreement": {
                name: [result["agreement"] for result in results] for name, results in self.measurements.items()
            },
            "exact": self.proof,
        }


def prove(settings: dict[str, Any], _images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: check that an LSTM, unlike ViT, depends on the order and its states on earlier patches only."""
    lstm, vit = (read_model(settings["models"][family]) for family in ("lstm", "vit"))
    plain, patch = random_model(lstm), settings["models"]["lstm"]["patch"]
    images, grid = random_images(plain), lstm.grid or (1, 1)
    orders, moved = {}, {}
    with torch.no_grad():
        for name in ORDERS[1:]:
            logits = random_model(lstm.replace(order=name))(images)
            reordered = move(images, patch_order(sequence_order(name, grid), lstm.resolution, patch))
            orders[name], moved[name] = (
                relative_difference(plain(images), logits),
                relative_difference(plain(reordered), logits),
            )
        without_positions = random_model(vit.replace(position="none"))
        order = patch_order(sequence_order("random", grid), vit.resolution, patch)
        order_change = relative_difference(without_positions(images), without_positions(move(images, order)))
    later = {
        name: int(influence_matrix(random_model(config), 0).tril(-1).sum())
        for name, config in (("lstm", lstm), ("vit", vit))
    }
    return Outcome({"orders": orders, "moved": moved, "vit without positions": order_change, "later": later}, {})


def measure(settings: dict[str, Any], images: Images, bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure the influence of patches by reading time, and the effect of reading backwards.

    The head of the untrained model is drawn at random, because with its initial zeros all gradients are 0.
    """
    bundle = load(bundles[0])
    trained: Any = bundle.provenance["lab"]
    untrained = open_model(trained, [])
    lecun_normal_(untrained.head)
    pixels, classes = read_test_images(images, settings["images"])
    labels = torch.from_numpy(classes)
    patch, grid = trained["model"]["patch"], bundle.model.config.grid
    order = sequence_order(settings["order"], grid)
    result: dict[str, Any] = {}
    for when, model in (("before", untrained), ("after", bundle.model)):
        strength = strength_by_position(model, pixels, labels, patch, order)
        result[when] = {"strength": strength.tolist(), "recency": recency_index(strength)}
    result["removal"] = recency_index(removal_effect_by_position(bundle.model, pixels, labels, patch, order))
    backwards = torch.empty_like(order)
    backwards[order] = order.flip(0)
    with torch.no_grad():
        predictions = [
            bundle.model(batch).argmax(1)
            for batch in (pixels, move(pixels, patch_order(backwards, bundle.model.config.resolution, patch)))
        ]
    result["agreement"] = float((predictions[0] == predictions[1]).float().mean())
    return Outcome(result, {})
