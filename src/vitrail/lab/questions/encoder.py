"""Which parts of the encoder help? The ViT with one part changed or removed."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

import vitrail
from vitrail.analysis.heads import measure_heads
from vitrail.core.message_files import load_messages
from vitrail.lab.images import Images
from vitrail.lab.question import Verdict, difference_text
from vitrail.lab.statistics import Estimate
from vitrail.lab.training import read_config
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.lab.variant_question import Key, Variant, VariantQuestion
from vitrail.models.base import AnyModel
from vitrail.models.create import build
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.model import ViT
from vitrail.models.initialise import lecun_normal_
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.page_kit import figure, table

_DEPTH = 12  # of the variants that test LayerNorm and residual connections
_SAMPLE = 128  # images for gradients and entropies
_SMALL_BATCH: dict[str, Any] = {"batch": 4}
_NO_WARMUP: dict[str, Any] = {"warmup": 0.0}

LOSSES = {
    "C22": "post",
    "C23": "relu",
    "C25": "bare",
    "C26a": "unscaled",
    "C26b": "one-head",
    "C27": "gap",
    "C38": "no-norm",
    "C39": "linear",
    "C40": "narrow-mlp",
}
"""Claims with the variant whose loss against its reference decides."""

_STAGES = (
    ("base", "bare", "unscaled", "one-head"),
    ("pre", "post"),
    ("relu", "linear", "gap"),
    ("wide-mlp", "narrow-mlp"),
    ("layer-128", "batch-128", "layer-4", "batch-4"),
    ("pre-warm", "post-warm", "bare-deep", "no-norm"),
    ("local", "strided", "narrow-mlp-deep"),
)


class EncoderQuestion(VariantQuestion):
    """Compares variants of the ViT at the same number of images."""

    messages = load_messages(__file__)
    claims = (*LOSSES, "C24", "C43")

    @functools.cached_property
    def variants(self) -> Mapping[str, Variant]:
        vit = cast(ViTConfig, self.lab.images.matched_config("vit"))
        wide, narrow = {"mlp": 4 * vit.width}, {"mlp": vit.width}
        deep_narrow = {**narrow, "depth": _equal_cost_depth(vit.replace(**narrow), vit.replace(**wide).macs)}
        return {
            "base": Variant(),
            "bare": Variant(changes={"residual": False}, against="base"),
            "unscaled": Variant(changes={"attention_scale": 1.0}, against="base"),
            "one-head": Variant(changes={"heads": 1}, against="base"),
            "relu": Variant(changes={"activation": "relu"}, against="base"),
            "linear": Variant(changes={"activation": "none"}, against="base"),
            "gap": Variant(changes={"pool": "gap"}, against="base"),
            "local": Variant(changes={"attention": "local"}, against="base"),
            "strided": Variant(changes={"attention": "strided"}, against="base"),
            "wide-mlp": Variant(changes=wide),
            "narrow-mlp": Variant(changes=narrow, against="wide-mlp"),
            "narrow-mlp-deep": Variant(changes=deep_narrow, against="wide-mlp"),
            "layer-128": Variant(share=4),
            "batch-128": Variant(changes={"norm": "batch"}, share=4, against="layer-128"),
            # Small batches are slower than their multiply-accumulates suggest.
            "layer-4": Variant(recipe=_SMALL_BATCH, share=4, slowdown=3),
            "batch-4": Variant(changes={"norm": "batch"}, recipe=_SMALL_BATCH, share=4, slowdown=3, against="layer-4"),
            "pre": Variant(changes={"depth": _DEPTH}, recipe=_NO_WARMUP, share=2),
            "post": Variant(changes={"depth": _DEPTH, "norm_order": "post"}, recipe=_NO_WARMUP, share=2, against="pre"),
            "pre-warm": Variant(changes={"depth": _DEPTH}, share=2),
            "post-warm": Variant(changes={"depth": _DEPTH, "norm_order": "post"}, share=2, against="pre-warm"),
            "bare-deep": Variant(changes={"depth": _DEPTH, "residual": False}, share=2, against="pre-warm"),
            "no-norm": Variant(changes={"depth": _DEPTH, "norm": "none"}, share=2, against="pre-warm"),
        }

    def stages(self) -> Sequence[Sequence[Key]]:
        return [[(name, count) for name in names for count in self.counts] for names in _STAGES]

    # Measurements

    @functools.cached_property
    def _batch_mates_trial(self) -> Trial:
        """Trial that measures whether an image's output depends on the other images of its batch."""
        settings = {norm: self.lab.images.matched_config("vit", norm=norm).to_document() for norm in ("layer", "batch")}
        return Trial("vitrail.lab.questions.encoder:batch_mates", settings)

    @property
    def proof_trials(self) -> Sequence[Trial]:
        return (self._batch_mates_trial,)

    def measurement_trials(self, key: Key) -> Mapping[str, Sequence[Trial]]:
        """Gradients of deep models before training, entropy of trained attention, accuracy with batch statistics."""
        task, macs = "vitrail.lab.questions.encoder:{}".format, self.lab.images.matched_config("vit").macs
        match key[0]:
            case "pre" | "post":
                work = 3 * _SAMPLE * self.lab.images.matched_config("vit", depth=_DEPTH).macs
                settings = [
                    {"model": trial.settings["model"], "seed": trial.settings["seed"]} for trial in self.trials[key]
                ]
                return {"norms": [Trial(task("gradients"), setting, work=work) for setting in settings]}
            case "base" | "unscaled":
                return {"entropy": self._measure(key, task("attention_entropy"), {}, _SAMPLE * macs)}
            case "batch-128" | "batch-4":
                work = 2 * len(self.lab.images.test) * macs
                return {"accuracies": self._measure(key, task("batch_statistics"), {"batches": [4, 128]}, work)}
        return {}

    def _measure(self, key: Key, task: str, settings: dict[str, Any], work: float) -> list[Trial]:
        return [Trial(task, settings, inputs=(trial,), work=work) for trial in self.trials[key]]

    def read(self, results: Results) -> None:
        super().read(results)
        self.batch_mates_changes = results.get(self._batch_mates_trial)

    def _mean(self, name: str, measurement: str) -> np.ndarray | None:
        """Return the mean over seeds of a measurement. None if it was not run."""
        measured = self.measurements.get((name, self.counts[0]), {}).get(measurement, [])
        return np.mean([result[measurement] for result in measured], axis=0) if measured else None

    # Verdicts

    def verdicts(self) -> Iterator[Verdict]:
        for claim, name in LOSSES.items():
            gain = self.lead(self.variants[name].against or "", name)
            yield Verdict(claim, "trained", gain, fields=self._result_fields(claim))
        yield self._batch_independence()
        yield Verdict("C43", "trained", self._small_batch_loss())

    def _small_batch_loss(self) -> Estimate | None:
        """Return how much more BatchNorm lags behind LayerNorm with batches of 4 images than with 128."""
        signs = {"layer-4": 1.0, "batch-4": -1.0, "layer-128": -1.0, "batch-128": 1.0}
        return self.accuracies.contrast(*((sign, (name, self.counts[0])) for name, sign in signs.items()))

    def _batch_independence(self) -> Verdict:
        """Return the verdict on C24: BatchNorm depends on the batch, LayerNorm does not."""
        if self.batch_mates_changes is None:
            return Verdict("C24", "exact")
        layer, batch = self.batch_mates_changes["layer"], self.batch_mates_changes["batch"]
        fields = {"layer": f"{layer:.1g}", "batch": f"{batch:.2g}"}
        return Verdict("C24", "exact", holds=layer < 1e-9 and batch > 1e-6, fields=fields)

    def _result_fields(self, claim: str) -> dict[str, Any]:
        """Return the placeholders of the result message of a claim."""
        if claim == "C22":
            norms = {name: self._mean(name, "norms") for name in ("pre", "post")}
            texts = {name: f"{array[-1]:.1f}" for name, array in norms.items() if array is not None}
        elif claim == "C26a":
            entropies = {name: self._mean(name, "entropy") for name in ("base", "unscaled")}
            texts = {name: f"{array.mean():.2f}" for name, array in entropies.items() if array is not None}
        elif claim == "C40" and (gain := self.gain("narrow-mlp-deep", self.counts[0])) is not None:
            return {"deep": difference_text(gain)}
        else:
            return {}
        return texts if len(texts) == 2 else {}

    # The page

    def figures(self) -> Iterator[tuple[str, str]]:
        yield from super().figures()
        lines = []
        for name, colour in (("pre", 0), ("post", 7)):
            if (norms := self._mean(name, "norms")) is not None:
                xs = list(range(1, len(norms) + 1))
                lines.append(Line(self.t(f"{name}-ln", "tspan"), xs, norms.tolist(), colour))
        if lines:
            labels = self.t("layer", "tspan"), self.t("gradient", "tspan")
            yield "encoder-gradients", line_chart(lines, *labels, log=True, dots=True)

    def panes(self, figures: dict[str, str]) -> Iterator[str]:
        yield from super().panes(figures)
        if (name := "encoder-gradients") in figures:
            yield figure(self.t(f"{name}-title"), self.t(f"{name}-note"), figures[name])

    def details(self) -> str:
        """Return the table of BatchNorm accuracies by the statistics in use."""
        rows = []
        for name in ("batch-128", "batch-4"):
            key, values = (name, self.counts[0]), self._mean(name, "accuracies")
            if values is not None and key in self.accuracies:
                shares = (self.accuracies.estimate(key).value, *values)
                rows.append((self.t(name), *(f"{share:.1%}" for share in shares)))
        heads = ("", self.t("running"), self.t("of-4"), self.t("of-128"))
        return f"{self.t('batches', 'p')}{table(heads, rows, frozenset((1, 2, 3)))}" if rows else ""

    def numbers(self) -> dict[str, Any]:
        measured: dict[str, dict[str, list[float]]] = {}
        for (name, _), measurements in self.measurements.items():
            for measurement in measurements:
                if (values := self._mean(name, measurement)) is not None:
                    measured.setdefault(measurement, {})[name] = values.tolist()
        return super().numbers() | measured


def _equal_cost_depth(config: ViTConfig, macs: int) -> int:
    """Return the depth at which a ViT comes closest to a number of multiply-accumulates."""
    return min(range(1, 4 * config.depth), key=lambda depth: abs(config.replace(depth=depth).macs - macs))


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
