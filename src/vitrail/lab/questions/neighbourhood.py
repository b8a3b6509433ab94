"""Which families use the neighbourhood of pixels? Models are trained on images with a fixed permutation of pixels.

If permuted weights give the same logits, the permutation has no effect on training. That is proved without training.
"""

import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.core.message_files import load_messages
from vitrail.core.settings import Pair
from vitrail.lab.exact import DIFFERENT, EQUAL, random_images, random_model, relative_difference
from vitrail.lab.images import Images
from vitrail.lab.permute import LEVELS, move, patch_order, permutation, permute_input_weights
from vitrail.lab.question import COLOURS, FIRST_SEEDS, Accuracies, Question, Score, Verdict
from vitrail.lab.statistics import Estimate, smallest
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.models.activations import Activations
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig, read_model
from vitrail.models.create import build
from vitrail.reports.charts import Interval, interval_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit", {}),
    "vit sincos-2d": ("vit", {"position": "sincos-2d"}),
    "hybrid": ("hybrid", {}),
    "resnet": ("resnet", {}),
    "mixer": ("mixer", {}),
    "lstm": ("lstm", {}),
    "mlp": ("mlp", {}),
}
"""Family and changed settings by name of the variant."""
_TRAINED_EQUAL = 1e-6  # tolerance after training steps, because rounding errors accumulate
_RESIZED_EQUAL = 1e-4  # positions are interpolated in single precision


class NeighbourhoodQuestion(Question):
    """Measures or proves the loss of each family under permutations of pixels."""

    messages = load_messages(__file__)
    claims = ("C13", "C14", "C34a", "C36", "P2")

    @functools.cached_property
    def patch(self) -> Pair:
        """Patch of the lab's ViT. It defines the permutations for all families."""
        height, width = self.lab.images.matched_config("vit").to_document()["patch"]
        return height, width

    def config(self, name: str) -> ModelConfig:
        """Return the model config of a variant."""
        family, changes = VARIANTS[name]
        return self.lab.images.matched_config(family, **changes)

    @functools.cached_property
    def trials(self) -> dict[tuple[str, str], list[Trial]]:
        """Trials by variant and level: unpermuted (""), and each level that its weights cannot be permuted for."""
        by_level = {}
        variants = {name: variant for name, variant in VARIANTS.items() if variant[0] in self.lab.families}
        for name, (family, changes) in variants.items():
            model = build(self.config(name))
            for level in ("", *LEVELS):
                if level and permute_input_weights(
                    model, permutation(level, self.lab.images.resolution, self.patch, 0)
                ):
                    continue
                by_level[name, level] = [
                    self.lab.train(
                        family,
                        count=self.lab.default_size,
                        seed=seed,
                        changes=changes,
                        permutation=(level, self.patch, seed) if level else None,
                    )
                    for seed in range(self.lab.seeds)
                ]
        return by_level

    @functools.cached_property
    def proof_trial(self) -> Trial:
        """Trial that checks which permutations have no effect."""
        models = {name: self.config(name).to_document() for name in VARIANTS}
        settings = {"models": models, "patch": list(self.patch)}
        return Trial("vitrail.lab.questions.neighbourhood:prove", settings, work=2e9)

    def rounds(self) -> Sequence[Sequence[Trial]]:
        def select(names: Sequence[str], levels: Sequence[str], seeds: int | None = FIRST_SEEDS) -> list[Trial]:
            return [trial for name in names for level in levels for trial in self.trials.get((name, level), [])[:seeds]]

        all_levels = ("", *LEVELS)
        return (
            [self.proof_trial],
            select(("resnet",), ("", "patches")),
            select(("resnet", "vit"), all_levels),
            select(("mixer", "mlp"), all_levels),
            select(("hybrid", "lstm", "vit sincos-2d"), all_levels),
            select(tuple(VARIANTS), all_levels, None),
        )

    def read(self, results: Results) -> None:
        self.accuracies = Accuracies(results, self.trials)
        self.proof = results.get(self.proof_trial)

    def _is_unaffected(self, name: str, level: str) -> bool:
        """Return whether permuted weights were proved to undo permutations of a level, also during training."""
        change = None if self.proof is None else self.proof["families"][name][level]
        return bool(
            change and change["after"] is not None and change["after"] < EQUAL and change["training"] < _TRAINED_EQUAL
        )

    def loss(self, name: str, level: str) -> Estimate | None:
        """Return the share of skill lost under a permutation: exactly 0 if proved, None if unknown."""
        if self._is_unaffected(name, level):
            return Estimate(0.0, 0.0)
        chance = 1 / len(self.lab.images.labels)
        return self.accuracies.lost_skill((name, ""), (name, level), chance)

    def verdicts(self) -> Iterator[Verdict]:
        yield Verdict("C13", "exact", holds=self._only_patches_and_positions())
        cnn_loss, vit_loss = (self.loss(name, "patches") for name in ("resnet", "vit"))
        yield Verdict("C14", "trained", None if cnn_loss is None or vit_loss is None else cnn_loss - vit_loss)
        yield Verdict("C34a", "exact", holds=self._is_unaffected_by_all("mixer", ("within", "patches")))
        yield Verdict("C36", "exact", holds=self._is_unaffected_by_all("mlp", LEVELS))
        yield Verdict("P2", "trained", smallest([self.loss("resnet", level) for level in LEVELS]))

    def _is_unaffected_by_all(self, name: str, levels: Sequence[str]) -> bool | None:
        return None if self.proof is None else all(self._is_unaffected(name, level) for level in levels)

    def _only_patches_and_positions(self) -> bool | None:
        """Return whether C13 holds: ViT uses the 2-D grid only to cut patches and to resize positions."""
        if self.proof is None:
            return None
        tokens, resized = self.proof["tokens"], self.proof["resized"]
        cuts_use_grid = tokens["within"] and tokens["patches"] and not tokens["pixels"]
        resizing_uses_grid = resized["mirrored"] < _RESIZED_EQUAL and resized["shuffled"] > DIFFERENT
        return bool(self._is_unaffected("vit", "patches") and cuts_use_grid and resizing_uses_grid)

    def _finished_variants(self) -> list[str]:
        return [name for name in VARIANTS if (name, "") in self.accuracies]

    def scores(self) -> Iterator[Score]:
        for level in ("patches", "pixels"):
            for name, (family, changes) in VARIANTS.items():
                loss = self.loss(name, level)
                if loss is not None and not changes:
                    yield Score(level, family, loss)

    def figures(self) -> Iterator[tuple[str, str]]:
        panels = {}
        for level in LEVELS:
            rows = []
            for name in self._finished_variants():
                loss = self.loss(name, level)
                if loss is not None and loss.error == loss.error:
                    colour = COLOURS.get(name, 7)
                    rows.append(
                        Interval(
                            family_label(name), loss.value, *(loss.interval() if loss.error else (0.0, 0.0)), colour
                        )
                    )
            if rows:
                panels[level] = rows
        ends = [value for rows in panels.values() for row in rows for value in row[1:4]]
        if ends:
            low, high = min(*ends, 0.0), max(*ends, 0.1)
            axis_range = (low - 0.05 * (high - low), high + 0.05 * (high - low))
            for level, rows in panels.items():
                yield f"neighbourhood-{level}", interval_chart(rows, self.t("loss", "tspan"), ends=axis_range, zero=0.0)

    def html(self, figures: dict[str, str]) -> str:
        if not self._finished_variants():
            return str(self.t("nothing", "p"))
        note = self.t("figure-note", count=f"{self.lab.default_size:,}", seeds=self.accuracies.seeds)
        panes = "".join(figure(self.t(f"{name}-title"), note, svg) for name, svg in figures.items())
        rows = [
            [
                name,
                f"{self.accuracies.estimate((name, '')).value:.1%}",
                *(_loss_text(self.loss(name, level), self.t("exactly")) for level in LEVELS),
            ]
            for name in self._finished_variants()
        ]
        heads = ["", self.t("accuracy"), *(self.t(level) for level in LEVELS)]
        loss_table = table(heads, rows, frozenset(range(1, 5)))
        return f'<div class="panes">{panes}</div>{loss_table}{self.t("proof-note", "p")}'

    def numbers(self) -> dict[str, Any]:
        losses = {(name, level): self.loss(name, level) for name in self._finished_variants() for level in LEVELS}
        return {
            "accuracy": {
                f"{name} {level}".strip(): list(self.accuracies.estimate((name, level))[:2])
                for name, level in self.accuracies.right
            },
            "loss": {
                f"{name} {level}": [loss.value, *loss.interval()] if loss.error else [0.0, 0.0, 0.0]
                for (name, level), loss in losses.items()
                if loss is not None and loss.error == loss.error
            },
            "exact": self.proof,
        }


def _loss_text(loss: Estimate | None, exactly: str) -> str:
    """Format a loss with its interval. `exactly` is the text for a loss that is proved to be 0."""
    if loss is None:
        return "-"
    if loss.error == 0:
        return exactly
    if loss.error != loss.error:
        return f"{loss.value:.2f}"
    low, high = loss.interval()
    return f"{loss.value:.2f} ({low:.2f} … {high:.2f})"


def prove(settings: dict[str, Any], _images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: check which permutations can be undone in the weights, and where ViT uses the grid."""
    patch = tuple(settings["patch"])
    configs = {name: read_model(document) for name, document in settings["models"].items()}
    result = {
        "families": {
            name: {level: _measure_permutation(config, level, patch) for level in LEVELS}
            for name, config in configs.items()
        },
        "tokens": {level: _same_tokens(configs["vit"], level, patch) for level in LEVELS},
        "resized": _compare_resized(configs["vit"], patch),
    }
    return Outcome(result, {})


def _measure_permutation(config: ModelConfig, level: str, patch: Pair) -> dict[str, float | None]:
    """Measure how much a permutation changes the logits: as is, with permuted weights, and after training both."""
    model, order = random_model(config), permutation(level, config.resolution, patch, 0)
    images = random_images(model)
    permuted_images, permuted_model = move(images, order), copy.deepcopy(model)
    with torch.no_grad():
        before = relative_difference(model(images), model(permuted_images))
        if not permute_input_weights(permuted_model, order):
            return {"before": before, "after": None, "training": None}
        after = relative_difference(model(images), permuted_model(permuted_images))
    return {
        "before": before,
        "after": after,
        "training": relative_difference(_train(model, images), _train(permuted_model, permuted_images)),
    }


def _train(model: AnyModel, images: Tensor, steps: int = 5) -> Tensor:
    """Train a model in place for a few steps with the lab's optimiser and return its logits."""
    labels = torch.arange(len(images)) % model.config.classes
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    with torch.no_grad():
        return model(images)


def _same_tokens(config: ModelConfig, level: str, patch: Pair) -> bool:
    """Return whether tokens consist of the same sets of pixels after a permutation. This does not depend on weights."""
    model = random_model(config)
    token_pixels = []
    for order in (
        torch.arange(config.resolution[0] * config.resolution[1]),
        permutation(level, config.resolution, patch, 0),
    ):
        pixels = random_images(model, 1).requires_grad_()
        activations = Activations(frozenset(), with_attention=False)
        model(move(pixels, order), activations)
        tokens = activations.steps["projected"][0].sum(-1)
        gradients = [torch.autograd.grad(token, pixels, retain_graph=True)[0] for token in tokens]
        token_pixels.append(
            {frozenset(gradient.abs().sum(1).flatten().nonzero().flatten().tolist()) for gradient in gradients}
        )
    return token_pixels[0] == token_pixels[1]


def _compare_resized(config: ModelConfig, patch: Pair) -> dict[str, float]:
    """Compare models at twice the resolution that are equal at their own resolution.

    In one, patches are mirrored, which keeps neighbours. In the other, patches are shuffled.
    """
    model, (height, width) = random_model(config), config.resolution
    grid, large = (height // patch[0], width // patch[1]), (2 * height, 2 * width)
    mirrored, shuffled = copy.deepcopy(model), copy.deepcopy(model)
    indices = torch.arange(grid[0] * grid[1])
    mirror, shuffle = indices.view(grid).flip(1).flatten(), permutation("pixels", grid, (1, 1), 0)
    permute_input_weights(mirrored, patch_order(mirror, config.resolution, patch))
    permute_input_weights(shuffled, patch_order(shuffle, config.resolution, patch))
    model, mirrored, shuffled = (variant.resize(large) for variant in (model, mirrored, shuffled))
    images = random_images(model)
    large_mirror = torch.arange(4 * len(indices)).view(2 * grid[0], 2 * grid[1]).flip(1).flatten()
    with torch.no_grad():
        logits = model(images)
        as_mirror = mirrored(move(images, patch_order(large_mirror, large, patch)))
        as_shuffle = shuffled(move(images, patch_order(shuffle, large, (2 * patch[0], 2 * patch[1]))))
    return {"mirrored": relative_difference(logits, as_mirror), "shuffled": relative_difference(logits, as_shuffle)}
