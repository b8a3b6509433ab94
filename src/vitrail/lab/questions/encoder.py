"""What is each part of the encoder good for? The ViT with one of them changed or left out."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

import vitrail
from vitrail.analysis.heads import measure_heads
from vitrail.lab.images import Images
from vitrail.lab.question import Accuracies, Question, Verdict, bar, between
from vitrail.lab.results import Results
from vitrail.lab.statistics import Estimate
from vitrail.lab.training import read_config
from vitrail.lab.trial import Cell, Outcome
from vitrail.models.base import AnyModel
from vitrail.models.create import build
from vitrail.models.families.vit.model import ViT
from vitrail.models.initialise import lecun_normal_
from vitrail.reports.messages import words_beside
from vitrail.reports.page import Line, Range, chart, figure, ranges, table

_DEEP = 12
_LOOKED_AT = 128


class Variant(NamedTuple):
    """One way to build or to train the ViT."""

    changes: dict[str, Any]
    recipe: dict[str, Any] | None = None
    share: int = 1
    """The images seen are those of the lab over this."""
    against: str | None = None
    """The variant that it is compared with."""


def _deep(**changes: Any) -> dict[str, Any]:
    return {"depth": _DEEP, **changes}


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
"""Those of one round stand together; see `Encoder.rounds`."""

CLAIMS = {"C22": "post", "C23": "relu", "C25": "bare", "C26a": "unscaled", "C26b": "one-head", "C27": "gap"}
"""Each is decided by what the variant loses."""

_ROUNDS = (
    ("base", "bare", "unscaled", "one-head"),
    ("pre", "post"),
    ("relu", "gap"),
    ("local", "strided"),
    ("layer-128", "batch-128", "layer-4", "batch-4"),
    ("pre-warm", "post-warm", "bare-deep"),
)


class Encoder(Question):
    """Every variant at the same number of images, each with its own learning rate."""

    words = words_beside(__file__)
    claims = ("C22", "C23", "C24", "C25", "C26a", "C26b", "C27")

    @functools.cached_property
    def count(self) -> int:
        """How many images all are trained on."""
        return self.lab.usual_size

    @functools.cached_property
    def cells(self) -> dict[str, list[Cell]]:
        """A seed each."""
        found = {}
        for name, variant in VARIANTS.items():
            cells = [
                self.lab.train(
                    "vit",
                    count=self.count,
                    seed=seed,
                    seen=self.lab.seen // variant.share,
                    changes=variant.changes,
                    recipe=variant.recipe,
                )
                for seed in self.lab.seeds_for(self.count)
            ]
            # Small batches are slower than their multiply-accumulates tell.
            slow = 3 if "batch" in (variant.recipe or {}) else 1
            found[name] = [dataclasses.replace(cell, work=slow * cell.work) for cell in cells]
        return found

    # What is measured

    @functools.cached_property
    def starts(self) -> dict[str, list[Cell]]:
        """Gradients of deep models before training."""
        return {
            name: [
                Cell(
                    "vitrail.lab.questions.encoder:gradients",
                    {"model": cell.settings["model"], "seed": seed},
                    work=3 * _LOOKED_AT * self.lab.images.matched("vit", depth=_DEEP).macs,
                )
                for seed, cell in enumerate(self.cells[name])
            ]
            for name in ("pre", "post")
        }

    @functools.cached_property
    def mates(self) -> Cell:
        """Whether an image's output depends on the others of its batch."""
        settings = {norm: self.lab.images.matched("vit", norm=norm).to_document() for norm in ("layer", "batch")}
        return Cell("vitrail.lab.questions.encoder:batch_mates", settings)

    @functools.cached_property
    def entropies(self) -> dict[str, list[Cell]]:
        """How flat the attention of trained models is."""
        work = _LOOKED_AT * self.lab.images.matched("vit").macs
        return {
            name: [
                Cell("vitrail.lab.questions.encoder:attention_entropy", {}, of=(cell,), work=work)
                for cell in self.cells[name]
            ]
            for name in ("base", "unscaled")
        }

    @functools.cached_property
    def batched(self) -> dict[str, list[Cell]]:
        """What models with BatchNorm answer with the statistics of batches."""
        work = 2 * len(self.lab.images.test) * self.lab.images.matched("vit").macs
        return {
            name: [
                Cell("vitrail.lab.questions.encoder:batch_statistics", {"batches": [4, 128]}, of=(cell,), work=work)
                for cell in self.cells[name]
            ]
            for name in ("batch-128", "batch-4")
        }

    def rounds(self) -> Sequence[Sequence[Cell]]:
        if "vit" not in self.lab.families:
            return ()
        measured = (
            [self.mates, *(cell for cells in self.entropies.values() for cell in cells)],
            [cell for cells in self.starts.values() for cell in cells],
            [],
            [],
            [cell for cells in self.batched.values() for cell in cells],
            [],
        )
        first = [
            [cell for name in names for cell in self.cells[name][:2]] + [cell for cell in more if _is_early(cell)]
            for names, more in zip(_ROUNDS, measured, strict=True)
        ]
        every = [cell for cells in self.cells.values() for cell in cells] + [cell for more in measured for cell in more]
        return (*first, every)

    def read(self, results: Results) -> None:
        # Deep models, some of which hardly train, differ more from seed to seed.
        self.found = Accuracies(results, self.cells, alike=lambda name: VARIANTS[name].changes.get("depth"))
        self.norms = {name: _mean(results, cells, "norms") for name, cells in self.starts.items()}
        self.flatness = {name: _mean(results, cells, "entropy") for name, cells in self.entropies.items()}
        self.at_batch = {name: _mean(results, cells, "accuracies") for name, cells in self.batched.items()}
        self.depends = results.get(self.mates)

    def loss(self, name: str) -> Estimate | None:
        """What a variant loses against the one it is compared with."""
        against = VARIANTS[name].against
        return None if against is None else self.found.difference(against, name)

    def verdicts(self) -> Iterator[Verdict]:
        for claim in self.claims:
            if claim in CLAIMS:
                yield Verdict(claim, "trained", self.loss(CLAIMS[claim]), words=self._beside(claim))
            else:
                yield self._independent()

    def _independent(self) -> Verdict:
        """Whether LayerNorm does not depend on the batch, and BatchNorm does."""
        if self.depends is None:
            return Verdict("C24", "exact")
        layer, batch = self.depends["layer"], self.depends["batch"]
        words = {"layer": f"{layer:.1g}", "batch": f"{batch:.2g}"}
        return Verdict("C24", "exact", holds=layer < 1e-9 and batch > 1e-6, words=words)

    def _beside(self, claim: str) -> dict[str, Any]:
        """What fills in the sentence beside the number of a claim."""
        if claim == "C22" and all(one is not None for one in self.norms.values()):
            return {name: f"{norms[-1]:.1f}" for name, norms in self.norms.items() if norms is not None}
        if claim == "C26a" and all(one is not None for one in self.flatness.values()):
            return {name: f"{values.mean():.2f}" for name, values in self.flatness.items() if values is not None}
        return {}

    # The page

    def figures(self) -> Iterator[tuple[str, str]]:
        losses = {name: loss for name in VARIANTS if (loss := self.loss(name)) is not None}
        if losses:
            rows = [Range(self.word(name, "tspan"), 100 * loss.value, *bar(loss)) for name, loss in losses.items()]
            yield "encoder-losses", ranges(rows, self.word("loss", "tspan"), zero=0.0)
        lines = [
            Line(self.word(f"{name}-ln", "tspan"), list(range(1, len(norms) + 1)), norms.tolist(), colour)
            for (name, norms), colour in zip(self.norms.items(), (0, 7), strict=True)
            if norms is not None
        ]
        if lines:
            labels = self.word("layer", "tspan"), self.word("gradient", "tspan")
            yield "encoder-gradients", chart(lines, *labels, log=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.word("nothing", "p"))
        panes = "".join(
            figure(
                self.word(f"{name}-title"),
                self.word(f"{name}-note", count=f"{self.count:,}", seeds=self.found.seeds),
                svg,
            )
            for name, svg in figures.items()
        )
        rows = []
        for name in self.found.right:
            loss, one = self.loss(name), self.found.estimate(name)
            against = VARIANTS[name].against
            rows.append(
                (
                    self.word(name),
                    f"{one.value:.1%}",
                    "-" if against is None else self.word(against),
                    "-" if loss is None else between(loss),
                )
            )
        heads = ("", self.word("accuracy"), self.word("against"), self.word("loss"))
        listed = table(heads, rows, frozenset((1, 3)))
        return f'<div class="panes">{panes}</div>{listed}{self._batches()}'

    def _batches(self) -> str:
        """Accuracies of models with BatchNorm by the statistics that they use."""
        rows = []
        for name, values in self.at_batch.items():
            if values is not None and name in self.found:
                shares = (self.found.estimate(name).value, *values)
                rows.append((self.word(name), *(f"{share:.1%}" for share in shares)))
        heads = ("", self.word("running"), self.word("of-4"), self.word("of-128"))
        return f"{self.word('batches', 'p')}{table(heads, rows, frozenset((1, 2, 3)))}" if rows else ""

    def numbers(self) -> dict[str, Any]:
        measured = {"gradients": self.norms, "entropy": self.flatness, "batch_statistics": self.at_batch}
        return {
            "count": self.count,
            "accuracy": {name: list(self.found.estimate(name)[:2]) for name in self.found.right},
            **{
                key: {name: values.tolist() for name, values in some.items() if values is not None}
                for key, some in measured.items()
            },
        }


def _is_early(cell: Cell) -> bool:
    """Whether a measurement is of the first two seeds."""
    return all(part.settings["seed"] < 2 for part in cell.of or (cell,) if "seed" in part.settings)


def _mean(results: Results, cells: Sequence[Cell], name: str) -> np.ndarray | None:
    found = [one[name] for cell in cells if (one := results.get(cell)) is not None]
    return np.mean(found, axis=0) if found else None


# What the cells do


def gradients(settings: dict[str, Any], images: Images, _of: list[Path], _folder: Path) -> Outcome:
    """Norm of the loss's gradient in each block of an untrained model. Its head is drawn: from one that is zero, as
    training begins with, no gradient reaches the blocks."""
    torch.manual_seed(settings["seed"])
    model = cast(ViT, build(read_config(settings))).train()
    lecun_normal_(model.head)
    split = images.training.spread(_LOOKED_AT)
    logits = model(images.preprocess(split.images))
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(np.asarray(split.labels))).backward()
    norms = [
        float(torch.nn.utils.get_total_norm([one.grad for one in block.parameters() if one.grad is not None]))
        for block in model.blocks
    ]
    return Outcome({"norms": norms}, {})


def batch_mates(settings: dict[str, Any], images: Images, _of: list[Path], _folder: Path) -> Outcome:
    """How far the output for an image moves, in training, if the other images of its batch are others."""
    pixels = images.preprocess(images.training.spread(16).images).double()
    one, other = pixels[:8], torch.cat([pixels[:1], pixels[9:]])
    found = {}
    for norm, document in settings.items():
        torch.manual_seed(0)
        model = build(read_config({"model": document})).double().train()
        lecun_normal_(model.head)
        with torch.no_grad():
            found[norm] = float((model(one)[0] - model(other)[0]).abs().max())
    return Outcome(found, {})


def attention_entropy(_settings: dict[str, Any], images: Images, of: list[Path], _folder: Path) -> Outcome:
    """Entropy of each layer's attention, mean over heads and images; 1 is uniform."""
    model = cast(ViT, vitrail.load(of[0]).model)
    seen = vitrail.look(model, images.preprocess(images.test.spread(_LOOKED_AT).images))
    layout = model.layout()
    found = [float(measure_heads(seen.attention[layer], layout).entropy.mean()) for layer in sorted(seen.attention)]
    return Outcome({"entropy": found}, {})


def batch_statistics(settings: dict[str, Any], images: Images, of: list[Path], _folder: Path) -> Outcome:
    """Accuracy if BatchNorm takes its statistics from the test images of a batch, as it does in training."""
    found = []
    for batch in settings["batches"]:
        model: AnyModel = vitrail.load(of[0]).model.train()
        right = []
        with torch.no_grad():
            for start in range(0, len(images.test), batch):
                part = images.test.take(np.arange(start, min(start + batch, len(images.test))))
                right.append(model(images.preprocess(part.images)).argmax(1).numpy() == part.labels)
        found.append(float(np.concatenate(right).mean()))
    return Outcome({"accuracies": found}, {})
