"""Does the reading order of patches matter? An LSTM with several orders, and ViT, which has none, as a control."""

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from vitrail.bundles.bundle import load
from vitrail.core.message_files import load_messages
from vitrail.lab.exact import DIFFERENT, EQUAL, random_images, random_model, relative_difference
from vitrail.lab.images import Images
from vitrail.lab.measurements import MeasuredValues, measurement_trial, open_model, read_test_images
from vitrail.lab.permute import move, patch_order
from vitrail.lab.position_measures import (
    influence_matrix,
    recency_index,
    removal_effect_by_position,
    strength_by_position,
)
from vitrail.lab.question import (
    COLOURS,
    FIRST_SEEDS,
    Accuracies,
    Question,
    Verdict,
    difference_text,
    interval_text,
    percent_interval,
    points_text,
)
from vitrail.lab.questions.order_sequences import FAMILIES as SEQUENCE_FAMILIES
from vitrail.lab.questions.order_sequences import PARITY_LENGTH, RECALL_LENGTHS, sequence_trials
from vitrail.lab.statistics import Estimate
from vitrail.lab.trial import Outcome, Trial, compare_variants
from vitrail.lab.trial_results import Results
from vitrail.models.config import read_model
from vitrail.models.families.lstm.config import LSTMConfig
from vitrail.models.families.lstm.model import sequence_order
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.initialise import lecun_normal_
from vitrail.reports.charts import Interval, Line, interval_chart, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

ORDERS = ("raster", "reversed", "random", "column", "snake")
PAIRS = (("raster", "reversed"), ("random", "random-reversed"))
"""Orders and their reverses, in which the LSTM reads the finest grid."""
_MAX_PATCHES = 256  # of the finest grid: 14 x 14 for 28 px, 16 x 16 for 32 px, 8 x 8 for 8 px
_SAMPLE = 256  # test images for gradients


class OrderQuestion(Question):
    """Compares the same LSTM with several reading orders, and LSTM and ViT on generated sequences."""

    messages = load_messages(__file__)
    claims = ("C32b", "C33", "C46")

    def _train_seeds(self, family: str, **settings: Any) -> list[Trial]:
        seeds = range(self.lab.seeds)
        return [self.lab.train(family, count=self.lab.default_size, seed=seed, **settings) for seed in seeds]

    @functools.cached_property
    def trials(self) -> dict[str, list[Trial]]:
        """Trials of the LSTM by order, and of ViT, one per seed."""
        control = {"vit": self._train_seeds("vit")} if "vit" in self.lab.families else {}
        return {order: self._train_seeds("lstm", changes={"order": order}) for order in ORDERS} | control

    @functools.cached_property
    def fine_trials(self) -> dict[str, list[Trial]]:
        """Trials with the finest grid, of the LSTM by order and of ViT, on half as many images seen."""
        trials: dict[str, list[Trial]] = {}
        for pair in PAIRS:
            changes = [self._fine_changes["lstm"] | {"order": order} for order in pair]
            trained = [self._train_seeds("lstm", changes=change, seen=self.lab.seen // 2) for change in changes]
            trials |= compare_variants(dict(zip(pair, trained, strict=True)))
        if "vit" in self.lab.families:
            trials["vit"] = self._train_seeds("vit", changes=self._fine_changes["vit"], seen=self.lab.seen // 2)
        return trials

    @functools.cached_property
    def _fine_changes(self) -> dict[str, dict[str, Any]]:
        """Settings of the models with the finest grid of at most 256 patches, by family.

        ViT is half as wide and half as deep as in other questions; the LSTM has as many multiply-accumulates.
        """
        side = min(self.lab.images.resolution)
        patch = min(size for size in range(1, side + 1) if not side % size and (side // size) ** 2 <= _MAX_PATCHES)
        vit = cast(ViTConfig, self.lab.images.matched_config("vit", patch=patch))
        changes = {"patch": patch, "width": vit.width // 2, "mlp": vit.mlp // 2, "depth": vit.depth // 2}
        macs = vit.replace(**changes).macs
        lstm = cast(LSTMConfig, self.lab.images.matched_config("lstm", patch=patch).with_macs(macs))
        return {"vit": changes, "lstm": {"patch": patch, "hidden": lstm.hidden}}

    @functools.cached_property
    def measurement_trials(self) -> dict[str, list[Trial]]:
        """Measurements of the influence of each patch by reading time. ViT uses raster order."""
        return {
            name: [
                measurement_trial(
                    "vitrail.lab.questions.order:measure",
                    trial,
                    2.0 * _MAX_PATCHES * _SAMPLE,
                    order="raster" if name == "vit" else name,
                    images=_SAMPLE,
                )
                for trial in trials
            ]
            for name, trials in self.fine_trials.items()
        }

    @functools.cached_property
    def sequence_trials(self) -> dict[tuple[str, str, int], list[Trial]]:
        """Trials on generated sequences by task, family and length, one per seed."""
        lengths = [("parity", PARITY_LENGTH), *(("recall", length) for length in RECALL_LENGTHS)]
        trials: dict[tuple[str, str, int], list[Trial]] = {}
        for task, length in lengths:
            keys = [(task, family, length) for family in self.lab.selected(SEQUENCE_FAMILIES)]
            trials |= compare_variants({key: sequence_trials(*key, self.lab.seeds) for key in keys})
        return trials

    @functools.cached_property
    def proof_trial(self) -> Trial:
        """Trial that checks the exact statements."""
        models = {family: self.lab.images.matched_config(family).to_document() for family in ("lstm", "vit")}
        return Trial("vitrail.lab.questions.order:prove", {"models": models}, work=1e9)

    def rounds(self) -> Sequence[Sequence[Trial]]:
        def fine(names: Sequence[str], seeds: int | None = FIRST_SEEDS) -> list[Trial]:
            groups = self.fine_trials, self.measurement_trials
            return [trial for name in names for group in groups for trial in group[name][:seeds]]

        def standard(names: Sequence[str], seeds: int | None = FIRST_SEEDS) -> list[Trial]:
            return [trial for name in names for trial in self.trials[name][:seeds]]

        def sequences(task: str, seeds: int | None = FIRST_SEEDS) -> list[Trial]:
            return [trial for key, trials in self.sequence_trials.items() if key[0] == task for trial in trials[:seeds]]

        if "lstm" not in self.lab.families:
            return ([self.proof_trial],)
        names, fine_names = tuple(self.trials), tuple(self.fine_trials)
        return (
            [self.proof_trial],
            fine(PAIRS[0]),
            standard([name for name in names if name not in ("column", "snake")]),
            standard(names),
            sequences("parity"),
            fine(fine_names),
            sequences("recall"),
            [*standard(names, None), *fine(fine_names, None), *sequences("parity", None), *sequences("recall", None)],
        )

    def read(self, results: Results) -> None:
        self.accuracies = Accuracies(results, self.trials)
        self.fine_accuracies = Accuracies(results, self.fine_trials)
        self.sequences = Accuracies(results, self.sequence_trials)
        self.recency = MeasuredValues(results, self.measurement_trials, lambda measured: [measured["after"]["recency"]])
        self.proof = results.get(self.proof_trial)
        self.same_length: dict[str, float] = {}
        """Accuracy on parity at the length of training, by family."""
        for (task, family, _), trials in self.sequence_trials.items():
            finished = [result for trial in trials if (result := results.get(trial)) is not None]
            if task == "parity" and finished:
                self.same_length[family] = float(np.mean([result["same_length"] for result in finished]))
        self.measurements: dict[str, list[dict[str, Any]]] = {}
        for name, trials in self.measurement_trials.items():
            if finished := [result for trial in trials if (result := results.get(trial)) is not None]:
                self.measurements[name] = finished

    def verdicts(self) -> Iterator[Verdict]:
        yield Verdict("C32b", "trained", self._excess_recency(), is_share=False, fields=self._recall_fields())
        yield Verdict("C33", "exact", holds=self._assumes_order())
        keys = {family: ("parity", family, PARITY_LENGTH) for family in SEQUENCE_FAMILIES}
        fields = {}
        if all(key in self.sequences for key in keys.values()):
            fields = {family: f"{self.sequences.estimate(key).value:.1%}" for family, key in keys.items()}
            fields |= {f"{family}_same": f"{share:.1%}" for family, share in self.same_length.items()}
        yield Verdict("C46", "trained", self.sequences.difference(keys["lstm"], keys["vit"]), fields=fields)

    @property
    def _orders(self) -> list[str]:
        """The orders of the pairs that were measured in both directions."""
        return [order for pair in PAIRS if all(name in self.recency for name in pair) for order in pair]

    def _excess_recency(self) -> Estimate | None:
        """Return the recency index of the LSTM minus that of ViT, mean over orders and their reverses.

        The same influences, read in an order and in its reverse, have the mean 0.5. So the mean of ViT is 0.5,
        wherever in the image it looks, and only what depends on the time of reading remains.
        """
        if not self._orders:
            return None
        mean = self.recency.contrast(*((1 / len(self._orders), order) for order in self._orders))
        return None if mean is None else mean._replace(value=mean.value - 0.5)

    def _recall_fields(self) -> dict[str, Any]:
        """Return accuracies in recalling the first token by family."""
        keys = {family: [("recall", family, length) for length in RECALL_LENGTHS] for family in SEQUENCE_FAMILIES}
        if any(key not in self.sequences for family_keys in keys.values() for key in family_keys):
            return {}
        texts = {
            family: ", ".join(f"{100 * self.sequences.estimate(key).value:.0f}" for key in family_keys)
            for family, family_keys in keys.items()
        }
        return {**texts, "steps": ", ".join(map(str, RECALL_LENGTHS))}

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
            yield "order-strength", line_chart(lines, self.t("time", "tspan"), self.t("strength", "tspan"))
        recall_lines = []
        for family in SEQUENCE_FAMILIES:
            lengths = [length for length in RECALL_LENGTHS if ("recall", family, length) in self.sequences]
            estimates = [self.sequences.estimate(("recall", family, length)) for length in lengths]
            if estimates:
                values, bars = [100 * estimate.value for estimate in estimates], list(map(percent_interval, estimates))
                recall_lines.append(Line(family_label(family), lengths, values, COLOURS[family], bars=bars))
        if recall_lines:
            labels = self.t("steps", "tspan"), self.t("accuracy", "tspan")
            yield "order-recall", line_chart(recall_lines, *labels, log_x=True, dots=True)

    def _strength_curves(self) -> Iterator[tuple[str, np.ndarray, int]]:
        """Yield the influence of patches by reading time, with mean 1.

        It is averaged over orders and their reverses, so that the content of images at each position averages out.
        """
        orders = self._orders
        for when, colour in (("after", COLOURS["lstm"]), ("before", 7)):
            if orders:
                curves = [result[when]["strength"] for order in orders for result in self.measurements[order]]
                yield when, np.mean([np.array(curve) / np.mean(curve) for curve in curves], axis=0), colour
        if orders and "vit" in self.measurements:
            curves = [strength for order in orders for strength in self._vit_strengths(order)]
            yield "vit", np.mean([curve / curve.mean() for curve in curves], axis=0), COLOURS["vit"]

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.t("nothing", "p"))
        accuracies = {"order-strength": self.fine_accuracies, "order-recall": self.sequences}
        notes = {name: accuracies.get(name, self.accuracies).seeds for name in figures}
        count = f"{self.lab.default_size:,}"
        panes = "".join(
            figure(self.t(f"{name}-title"), self.t(f"{name}-note", count=count, seeds=notes[name]), svg)
            for name, svg in figures.items()
        )
        return f'<div class="panes">{panes}</div>{self._order_table()}{self._recency_table()}'

    def _order_table(self) -> str:
        """Return the table of accuracies by order."""
        rows = []
        for name in (*ORDERS, "vit"):
            if name in self.accuracies:
                lead = self.accuracies.difference(name, "raster") if name not in ("raster", "vit") else None
                lead_text = "-" if lead is None else f"{points_text(lead.value)} ({difference_text(lead)})"
                rows.append([self.t(name), interval_text(self.accuracies.estimate(name)), lead_text])
        heads = ["", self.t("accuracy-head"), self.t("lead-head")]
        return table(heads, rows, frozenset((1, 2))) if rows else ""

    def _recency_table(self) -> str:
        """Return the table of recency indices by order, with those of ViT in the same order."""
        rows = [
            [self.t(name), *self._recency_texts(name)] for pair in PAIRS for name in pair if name in self.measurements
        ]
        names = (
            "fine-accuracy",
            "recency-before",
            "recency-after",
            "recency-vit",
            "removal",
            "last-first",
            "agreement",
        )
        heads = ["", *map(self.t, names)]
        return f"{table(heads, rows, frozenset(range(1, 8)))}{self.t('table-note', 'p')}" if rows else ""

    def _recency_texts(self, order: str) -> list[str]:
        results = self.measurements[order]
        before = float(np.mean([result["before"]["recency"] for result in results]))
        after = self.recency.estimate(order)
        low, high = (after.value, after.value) if math.isnan(after.error) else after.interval()
        after_text = f"{after.value:.2f} ({low:.2f} … {high:.2f})" if low < high else f"{after.value:.2f}"
        ratio = float(np.mean([result["after"]["strength"][-1] / result["after"]["strength"][0] for result in results]))
        removal, agreement = (float(np.mean([result[name] for result in results])) for name in ("removal", "agreement"))
        vit = [recency_index(strength) for strength in self._vit_strengths(order)]
        vit_text = f"{np.mean(vit):.2f}" if vit else "-"
        accuracy = f"{self.fine_accuracies.estimate(order).value:.1%}"
        return [accuracy, f"{before:.2f}", after_text, vit_text, f"{removal:.2f}", f"{ratio:.1f}", f"{agreement:.0%}"]

    def _vit_strengths(self, order: str) -> list[np.ndarray]:
        """Return the influence of patches in ViT in a reading order, for each seed."""
        grid = read_model(self.fine_trials["vit"][0].settings["model"]).grid if "vit" in self.fine_trials else None
        indices = sequence_order(order, grid or (1, 1)).numpy()
        return [np.array(result["after"]["strength"])[indices] for result in self.measurements.get("vit", ())]

    def numbers(self) -> dict[str, Any]:
        def estimates(accuracies: Accuracies) -> dict[str, list[float]]:
            return {_key_text(name): list(accuracies.estimate(name)[:2]) for name in accuracies.right}

        return {
            "accuracy": estimates(self.accuracies),
            "fine accuracy": estimates(self.fine_accuracies),
            "sequences": estimates(self.sequences),
            "same length": self.same_length,
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


def _key_text(name: str | tuple[str, str, int]) -> str:
    return name if isinstance(name, str) else " ".join(map(str, name))


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
