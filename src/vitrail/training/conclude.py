"""The end of a run: the weights to keep, their final evaluation, the bundle and its provenance."""

from typing import Any

import torch

from vitrail import __version__
from vitrail.bundles.bundle import Bundle
from vitrail.core.files import escape_surrogates
from vitrail.data.dataset import Dataset, Split
from vitrail.evaluation.history import LINEAR_HEAD
from vitrail.training.keep_best import Choice, choose
from vitrail.training.loop import Trainer
from vitrail.training.objectives.judgement import Judgement
from vitrail.training.recipe import OBJECTIVES
from vitrail.training.run_log import RunLog
from vitrail.training.starting_point import StartingPoint

_FITTED = 1000  # training images that tell how well they are learned


def conclude(
    trainer: Trainer,
    initial: StartingPoint,
    dataset: Dataset,
    split: Split | None,
    log: RunLog,
    fingerprint: str,
    command: str,
) -> tuple[Bundle, Judgement | None]:
    """After the last step: the weights to keep, their final evaluation on `split`, the bundle."""
    is_best = trainer.restore_best()
    choice = choose(trainer, initial, log)
    judgement = _judge(trainer, split, log)
    # Only the first rank has the judgement, but all of them must evaluate.
    fitted = _fitted(trainer) if trainer.ranks.broadcast(judgement is not None) else {}
    scores = None
    if judgement is not None and split is not None:
        scores = {"split": split.name, **judgement.scores, **fitted}
        log.write("final", step=trainer.step, **scores)
    bundle = Bundle(
        model=trainer.kept_model.eval(),
        answer=trainer.kept_objective.answer(trainer.held_out_loader, trainer.ranks),
        preprocess=trainer.preprocess,
        labels=dataset.labels if trainer.objective.classifies else None,
        provenance=_provenance(trainer, initial, dataset, fingerprint, choice, scores, command, is_best=is_best),
    )
    return bundle, judgement


def _judge(trainer: Trainer, split: Split | None, log: RunLog) -> Judgement | None:
    """The final evaluation of the kept model."""
    if split is None:
        return None
    loader = trainer.evaluation_loader(split)
    judgement = trainer.kept_objective.judge(loader, trainer.ranks)
    trainer.collect_damage(log, loader)
    return judgement


def _fitted(trainer: Trainer) -> dict[str, Any]:
    """How well the kept model does on images that it was trained on, beside which its scores tell overfitting."""
    if not trainer.objective.classifies:
        return {}
    found = trainer.evaluate_loader(trainer.evaluation_loader(trainer.loader.split.sample_evenly(_FITTED)))
    return {f"training_{trainer.objective.watched}": found[trainer.objective.watched]}


def _provenance(
    trainer: Trainer,
    initial: StartingPoint,
    dataset: Dataset,
    fingerprint: str,
    choice: Choice | None,
    scores: dict[str, Any] | None,
    command: str,
    *,
    is_best: bool,
) -> dict[str, Any]:
    """Provenance of the bundle."""
    recipe = trainer.recipe
    provenance = {
        "data": f"{escape_surrogates(dataset.name)}: {len(trainer.loader.split):,} training images",
        "data_fingerprint": fingerprint,
        "training_fingerprint": dataset.splits.get("train", dataset.first_split).content_fingerprint(),
        "licence": dataset.licence,
        "objective": recipe.objective,
        "weights": _which_weights(trainer, initial, choice, is_best=is_best),
        **({} if choice is None else {"choice": choice.reason}),
        "steps": trainer.step,
        **({} if trainer.stopped is None else {"stopped": f"by {trainer.stopped}, of {trainer.total} steps"}),
        "epochs": round(trainer.step / trainer.loader.steps, 3),
        "seed": trainer.options.seed,
        # Which images were held out: `evaluation.splits` finds them again.
        **({} if "val" in dataset.splits else {"holdout": float(recipe.holdout)}),
        "ranks": trainer.ranks.count,
        "threads": torch.get_num_threads(),
        "vitrail": __version__,
        "torch": str(torch.__version__),
        "seconds": round(trainer.elapsed_seconds, 1),
        "command": escape_surrogates(command),
        **initial.origin,
    }
    if (package := OBJECTIVES.provider(recipe.objective)) is not None:
        provenance["objective_package"] = package
    if scores is not None:
        provenance["scores"] = scores
    if trainer.damaged:
        files = {escape_surrogates(path): escape_surrogates(reason) for path, reason in trainer.damaged.items()}
        provenance["damaged"] = {"policy": recipe.on_damage, "files": files}
    return provenance


def _which_weights(trainer: Trainer, initial: StartingPoint, choice: Choice | None, *, is_best: bool) -> str:
    if choice is not None and choice.kept == "start":
        return LINEAR_HEAD
    if not trainer.total:
        return "as they began" if initial.probe is None else LINEAR_HEAD
    average = trainer.recipe.average
    if trainer.recipe.freeze:
        return f"{LINEAR_HEAD}, trained" + (f" (running average, decay {average})" if average else "")
    which = f"running average, decay {average}" if average else "last"
    if not is_best or trainer.best is None:
        return which
    of = f" ({which})" if average else ""
    return f"best on the held-out images, of step {trainer.best['step']}{of}"
