"""Which parts of the encoder help? The ViT with one part changed or removed."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

import vitrail
from vitrail.analysis.heads import measure_heads
from vitrail.core.message_files import load_messages
from vitrail.lab.images import Images
from vitrail.lab.question import FIRST_SEEDS, Accuracies, Question, Verdict, difference_text, percent_interval
from vitrail.lab.statistics import Estimate
from vitrail.lab.training import read_config
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.models.base import AnyModel
from vitrail.models.create import build
from vitrail.models.families.vit.model import ViT
from vitrail.models.initialise import lecun_normal_
from vitrail.reports.charts import Interval, Line, interval_chart, line_chart
from vitrail.reports.page_kit import figure, table

_DEPTH = 12  # of the variants that test the position of LayerNorm
_SAMPLE = 128  # images for gradients and entropies


class Variant(NamedTuple):
    """Changes to the ViT or to its training."""

    changes: dict[str, Any]
    recipe: dict[str, Any] | None = None
    share: int = 1
    """Divisor of the lab's number of images seen."""
    against: str | None = None
    """Name of the variant for comparison."""


def _deep(**changes: Any) -> dict[str, Any]:
    return {"depth": _DEPTH, **changes}


VARIANTS = {
    "base": Variant({}),
    "bare": Variant({"residual": False}, against="base"),
    "unscaled": Variant({"attention_scale": 1.0}, against="base"),
    "one-head": Variant({"heads": 1}, against="base"),
    "pre": Variant(_deep(), {"warmup": 0.0}, 2),
    "post": Variant(_deep(norm_order="post"), {"warmup": 0.0}, 2, against="pre"),
    "relu": Variant({"activation": "relu"}, against="base"),
    "gap": Variant({"pool": "gap"}, against="base"),
    "local": Variant({"attention": "local"}, against="base"),
    "strided": Variant({"attention": "strided"}, against="base"),
    "layer-128": Variant({}, share=4),
    "batch-128": Variant({"norm": "batch"}, share=4, against="layer-128"),
    "layer-4": Variant({}, {"batch": 4}, 4),
    "batch-4": Variant({"norm": "batch"}, {"batch": 4}, 4, against="layer-4"),
    "pre-warm": Variant(_deep(), share=2),
    "post-warm": Variant(_deep(norm_order="post"), share=2, against="pre-warm"),
    "bare-deep": Variant(_deep(residual=False), share=2, against="pre-warm"),
}
"""Variants, grouped by round; see `EncoderQuestion.rounds`."""

CLAIMS = {"C22": "post", "C23": "relu", "C25": "bare", "C26a": "unscaled", "C26b": "one-head", "C27": "gap"}
"""Claims with the variant whose loss decides."""

_ROUNDS = (
    ("base", "bare", "unscaled", "one-head"),
    ("pre", "post"),
    ("relu", "gap"),
    ("local", "strided"),
    ("layer-128", "batch-128", "layer-4", "batch-4"),
    ("pre-warm", "post-warm", "bare-deep"),
)


class EncoderQuestion(Question):
    """Compares variants of the ViT at the same number of images, each with its own learning rate."""

    messages = load_messages(__file__)
    claims = ("C22", "C23", "C24", "C25", "C26a", "C26b", "C27")

    @functools.cached_property
    def count(self) -> int:
        """Number of training images of all variants."""
        return self.lab.default_size

    @functools.cached_property
    def trials(self) -> dict[str, list[Trial]]:
        """Trials by variant, one per seed."""
        by_variant = {}
        for name, variant in VARIANTS.items():
            trials = [
                self.lab.train(
                    "vit",
                    count=self.count,
                    seed=seed,
                    seen=self.lab.seen // variant.share,
                    changes=variant.changes,
                    recipe=variant.recipe,
                )
                for seed in range(self.lab.seeds)
            ]
            # Small batches are slower than their multiply-accumulates suggest.
            slowdown = 3 if "batch" in (variant.recipe or {}) else 1
            by_variant[name] = [dataclasses.replace(trial, work=slowdown * trial.work) for trial in trials]
        return by_variant

    # Measurements

    @functools.cached_property
    def gradient_trials(self) -> dict[str, list[Trial]]:
        """Trials that measure gradients of deep models before training."""
        return {
            name: [
                Trial(
                    "vitrail.lab.questions.encoder:gradients",
                    {"model": trial.settings["model"], "seed": seed},
                    work=3 * _SAMPLE * self.lab.images.matched_config("vit", depth=_DEPTH).macs,
                )
                for seed, trial in enumerate(self.trials[name])
            ]
            for name in ("pre", "post")
        }

    @functools.cached_property
    def batch_mates_trial(self) -> Trial:
        """Trial that measures whether an image's output depends on the other images of its batch."""
        settings = {norm: self.lab.images.matched_config("vit", norm=norm).to_document() for norm in ("layer", "batch")}
        return Trial("vitrail.lab.questions.encoder:batch_mates", settings)

    @functools.cached_property
    def entropy_trials(self) -> dict[str, list[Trial]]:
        """Trials that measure the entropy of attention in trained models."""
        work = _SAMPLE * self.lab.images.matched_config("vit").macs
        return {
            name: [
                Trial("vitrail.lab.questions.encoder:attention_entropy", {}, inputs=(trial,), work=work)
                for trial in self.trials[name]
            ]
            for name in ("base", "unscaled")
        }

    @functools.cached_property
    def batch_statistics_trials(self) -> dict[str, list[Trial]]:
        """Trials that evaluate BatchNorm models with the statistics of test batches."""
        work = 2 * len(self.lab.images.test) * self.lab.images.matched_config("vit").macs
        return {
            name: [
                Trial(
                    "vitrail.lab.questions.encoder:batch_statistics", {"batches": [4, 128]}, inputs=(trial,), work=work
                )
                for trial in self.trials[name]
            ]
            for name in ("batch-128", "batch-4")
        }

    def rounds(self) -> Sequence[Sequence[Trial]]:
        if "vit" not in self.lab.families:
            return ()
        measurements_by_round = (
            [self.batch_mates_trial, *(trial for trials in self.entropy_trials.values() for trial in trials)],
            [trial for trials in self.gradient_trials.values() for trial in trials],
            [],
            [],
            [trial for trials in self.batch_statistics_trials.values() for trial in trials],
            [],
        )
        first_seeds = [
            [trial for name in names for trial in self.trials[name][:FIRST_SEEDS]]
            + [trial for trial in measurements if _is_early(trial)]
            for names, measurements in zip(_ROUNDS, measurements_by_round, strict=True)
        ]
        all_trials = [trial for trials in self.trials.values() for trial in trials] + [
            trial for measurements in measurements_by_round for trial in measurements
        ]
        return (*first_seeds, all_trials)

    def read(self, results: Results) -> None:
        # Deep models vary more between seeds, because some hardly train.
        self.accuracies = Accuracies(results, self.trials)
        self.norms = {name: _mean_result(results, trials, "norms") for name, trials in self.gradient_trials.items()}
        self.entropies = {
            name: _mean_result(results, trials, "entropy") for name, trials in self.entropy_trials.items()
        }
        self.batch_accuracies = {
            name: _mean_result(results, trials, "accuracies") for name, trials in self.batch_statistics_trials.items()
        }
        self.batch_mates_changes = results.get(self.batch_mates_trial)

    def loss(self, name: str) -> Estimate | None:
        """Return the loss in accuracy of a variant against its comparison."""
        against = VARIANTS[name].against
        return None if against is None else self.accuracies.difference(against, name)

    def verdicts(self) -> Iterator[Verdict]:
        for claim in self.claims:
            if claim in CLAIMS:
                yield Verdict(claim, "trained", self.loss(CLAIMS[claim]), fields=self._result_fields(claim))
            else:
                yield self._batch_independence()

    def _batch_independence(self) -> Verdict:
        """Return the verdict on C24: BatchNorm depends on the batch, LayerNorm does not."""
        if self.batch_mates_changes is None:
            return Verdict("C24", "exact")
        layer, batch = self.batch_mates_changes["layer"], self.batch_mates_changes["batch"]
        fields = {"layer": f"{layer:.1g}", "batch": f"{batch:.2g}"}
        return Verdict("C24", "exact", holds=layer < 1e-9 and batch > 1e-6, fields=fields)

    def _result_fields(self, claim: str) -> dict[str, Any]:
        """Return the placeholders of the result message of a claim."""
        if claim == "C22" and all(array is not None for array in self.norms.values()):
            return {name: f"{norms[-1]:.1f}" for name, norms in self.norms.items() if norms is not None}
        if claim == "C26a" and all(array is not None for array in self.entropies.values()):
            return {name: f"{values.mean():.2f}" for name, values in self.entropies.items() if values is not None}
        return {}

    # The page

    def figures(self) -> Iterator[tuple[str, str]]:
        losses = {name: loss for name in VARIANTS if (loss := self.loss(name)) is not None}
        if losses:
            rows = [
                Interval(self.t(name, "tspan"), 100 * loss.value, *percent_interval(loss))
                for name, loss in losses.items()
            ]
            yield "encoder-losses", interval_chart(rows, self.t("loss", "tspan"), zero=0.0)
        lines = [
            Line(self.t(f"{name}-ln", "tspan"), list(range(1, len(norms) + 1)), norms.tolist(), colour)
            for (name, norms), colour in zip(self.norms.items(), (0, 7), strict=True)
            if norms is not None
        ]
        if lines:
            labels = self.t("layer", "tspan"), self.t("gradient", "tspan")
            yield "encoder-gradients", line_chart(lines, *labels, log=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.t("nothing", "p"))
        panes = "".join(
            figure(
                self.t(f"{name}-title"),
                self.t(f"{name}-note", count=f"{self.count:,}", seeds=self.accuracies.seeds),
                svg,
            )
            for name, svg in figures.items()
        )
        rows = []
        for name in self.accuracies.right:
            loss, estimate = self.loss(name), self.accuracies.estimate(name)
            against = VARIANTS[name].against
            rows.append(
                (
                    self.t(name),
                    f"{estimate.value:.1%}",
                    "-" if against is None else self.t(against),
                    "-" if loss is None else difference_text(loss),
                )
            )
        heads = ("", self.t("accuracy"), self.t("against"), self.t("loss"))
        loss_table = table(heads, rows, frozenset((1, 3)))
        return f'<div class="panes">{panes}</div>{loss_table}{self._batch_table()}'

    def _batch_table(self) -> str:
        """Return the table of BatchNorm accuracies by the statistics in use."""
        rows = []
        for name, values in self.batch_accuracies.items():
            if values is not None and name in self.accuracies:
                shares = (self.accuracies.estimate(name).value, *values)
                rows.append((self.t(name), *(f"{share:.1%}" for share in shares)))
        heads = ("", self.t("running"), self.t("of-4"), self.t("of-128"))
        return f"{self.t('batches', 'p')}{table(heads, rows, frozenset((1, 2, 3)))}" if rows else ""

    def numbers(self) -> dict[str, Any]:
        measured = {"gradients": self.norms, "entropy": self.entropies, "batch_statistics": self.batch_accuracies}
        return {
            "count": self.count,
            "accuracy": {name: list(self.accuracies.estimate(name)[:2]) for name in self.accuracies.right},
            **{
                key: {name: values.tolist() for name, values in arrays.items() if values is not None}
                for key, arrays in measured.items()
            },
        }


def _is_early(trial: Trial) -> bool:
    """Return whether a measurement belongs to the first seeds."""
    return all(part.settings["seed"] < FIRST_SEEDS for part in trial.inputs or (trial,) if "seed" in part.settings)


def _mean_result(results: Results, trials: Sequence[Trial], name: str) -> np.ndarray | None:
    """Return the mean over seeds of a result. None if no trial was run."""
    values = [result[name] for trial in trials if (result := results.get(trial)) is not None]
    return np.mean(values, axis=0) if values else None


# Trial functions


def gradients(settings: dict[str, Any], images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure the norm of the loss gradient in each block of an untrained model.

    The head is drawn at random: with the zero head of the initial model, no gradient reaches the blocks.
    """
    torch.manual_seed(settings["seed"])
    model = cast(ViT, build(read_config(settings))).train()
    lecun_normal_(model.head)
    split = images.training.sample_evenly(_SAMPLE)
    logits = model(images.preprocess(split.images))
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(np.asarray(split.labels))).backward()
    norms = [
        float(
            torch.nn.utils.get_total_norm(
                [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
            )
        )
        for block in model.blocks
    ]
    return Outcome({"norms": norms}, {})


def batch_mates(settings: dict[str, Any], images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure how much the output for an image changes if the rest of its batch is replaced.

    The models are in training mode, with LayerNorm and with BatchNorm.
    """
    pixels = images.preprocess(images.training.sample_evenly(16).images).double()
    batch, other_batch = pixels[:8], torch.cat([pixels[:1], pixels[9:]])
    changes = {}
    for norm, document in settings.items():
        torch.manual_seed(0)
        model = build(read_config({"model": document})).double().train()
        lecun_normal_(model.head)
        with torch.no_grad():
            changes[norm] = float((model(batch)[0] - model(other_batch)[0]).abs().max())
    return Outcome(changes, {})


def attention_entropy(_settings: dict[str, Any], images: Images, bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure the mean entropy of attention by layer. 1 is uniform."""
    model = cast(ViT, vitrail.load(bundles[0]).model)
    activations = vitrail.look(model, images.preprocess(images.test.sample_evenly(_SAMPLE).images))
    layout = model.layout()
    entropies = [
        float(measure_heads(activations.attention[layer], layout).entropy.mean())
        for layer in sorted(activations.attention)
    ]
    return Outcome({"entropy": entropies}, {})


def batch_statistics(settings: dict[str, Any], images: Images, bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure accuracy if BatchNorm uses the statistics of test batches, as in training mode."""
    accuracies = []
    for batch in settings["batches"]:
        model: AnyModel = vitrail.load(bundles[0]).model.train()
        right = []
        with torch.no_grad():
            for start in range(0, len(images.test), batch):
                part = images.test.select(np.arange(start, min(start + batch, len(images.test))))
                right.append(model(images.preprocess(part.images)).argmax(1).numpy() == part.labels)
        accuracies.append(float(np.concatenate(right).mean()))
    return Outcome({"accuracies": accuracies}, {})
