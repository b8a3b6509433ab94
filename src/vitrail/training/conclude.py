"""The end of a training run: the choice of the final weights, their evaluation, the bundle and its provenance."""

from typing import Any

import torch

from vitrail import __version__
from vitrail.bundles.bundle import Bundle
from vitrail.core.files import escape_surrogates
from vitrail.data.dataset import Dataset, Split
from vitrail.evaluation.history import LINEAR_HEAD
from vitrail.training.keep_best import Choice, choose_kept_model
from vitrail.training.loop import Trainer
from vitrail.training.objectives.judgement import Judgement
from vitrail.training.recipe import OBJECTIVES
from vitrail.training.run_log import RunLog
from vitrail.training.starting_point import StartingPoint

_MAX_TRAINING_IMAGES = 1000  # training images on which the kept model is evaluated


def conclude(
    trainer: Trainer,
    starting_point: StartingPoint,
    dataset: Dataset,
    split: Split | None,
    log: RunLog,
    fingerprint: str,
    command: str,
) -> tuple[Bundle, Judgement | None]:
    """Choose the weights to keep, evaluate them on `split`, and return the bundle and the final evaluation.

    All ranks take part. The trainer's kept weights may be replaced by the best ones or by the starting point.
    """
    is_best = trainer.restore_best()
    choice = choose_kept_model(trainer, starting_point, log)
    judgement = _evaluate_kept_model(trainer, split, log)
    # Only the first rank has the judgement, but all ranks must take part in the evaluation.
    training_scores = _score_training_images(trainer) if trainer.ranks.broadcast(judgement is not None) else {}
    scores = None
    if judgement is not None and split is not None:
        scores = {"split": split.name, **judgement.scores, **training_scores}
        log.write("final", step=trainer.step, **scores)
    bundle = Bundle(
        model=trainer.kept_model.eval(),
        answer=trainer.kept_objective.decision_rule(trainer.held_out_loader, trainer.ranks),
        preprocess=trainer.preprocess,
        labels=dataset.labels if trainer.objective.classifies else None,
        provenance=_make_provenance(
            trainer, starting_point, dataset, fingerprint, choice, scores, command, is_best=is_best
        ),
    )
    return bundle, judgement


def _evaluate_kept_model(trainer: Trainer, split: Split | None, log: RunLog) -> Judgement | None:
    """Evaluate the kept model on `split` and log unreadable images. Return None without a split."""
    if split is None:
        return None
    loader = trainer.evaluation_loader(split)
    judgement = trainer.kept_objective.judge(loader, trainer.ranks)
    trainer.collect_damage(log, loader)
    return judgement


def _score_training_images(trainer: Trainer) -> dict[str, Any]:
    """Return the score of the kept model on some training images, which shows overfitting next to the test score."""
    if not trainer.objective.classifies:
        return {}
    split = trainer.loader.split.sample_evenly(_MAX_TRAINING_IMAGES)
    metrics = trainer.evaluate_loader(trainer.evaluation_loader(split))
    return {f"training_{trainer.objective.watched}": metrics[trainer.objective.watched]}


def _make_provenance(
    trainer: Trainer,
    starting_point: StartingPoint,
    dataset: Dataset,
    fingerprint: str,
    choice: Choice | None,
    scores: dict[str, Any] | None,
    command: str,
    *,
    is_best: bool,
) -> dict[str, Any]:
    """Return the provenance of the bundle: data, weights, settings, scores, software versions."""
    recipe = trainer.recipe
    provenance = {
        "data": f"{escape_surrogates(dataset.name)}: {len(trainer.loader.split):,} training images",
        "data_fingerprint": fingerprint,
        **({} if dataset.corrections is None else {"corrections": dataset.corrections.to_json()}),
        "training_fingerprint": dataset.splits.get("train", dataset.first_split).content_fingerprint(),
        "licence": dataset.licence,
        "objective": recipe.objective,
        "weights": _describe_weights(trainer, starting_point, choice, is_best=is_best),
        **({} if choice is None else {"choice": choice.reason}),
        "steps": trainer.step,
        **({} if trainer.stopped is None else {"stopped": f"by {trainer.stopped}, of {trainer.total} steps"}),
        "epochs": round(trainer.step / trainer.loader.steps, 3),
        "seed": trainer.options.seed,
        # `evaluation.splits` reads this to find the held-out images again.
        **({} if "val" in dataset.splits else {"holdout": float(recipe.holdout)}),
        "ranks": trainer.ranks.count,
        "threads": torch.get_num_threads(),
        "vitrail": __version__,
        "torch": str(torch.__version__),
        "seconds": round(trainer.elapsed_seconds, 1),
        "command": escape_surrogates(command),
        **starting_point.origin,
    }
    if (package := OBJECTIVES.provider(recipe.objective)) is not None:
        provenance["objective_package"] = package
    if scores is not None:
        provenance["scores"] = scores
    if trainer.damaged:
        files = {escape_surrogates(path): escape_surrogates(reason) for path, reason in trainer.damaged.items()}
        provenance["damaged"] = {"policy": recipe.on_damage, "files": files}
    return provenance


def _describe_weights(trainer: Trainer, starting_point: StartingPoint, choice: Choice | None, *, is_best: bool) -> str:
    """Describe which weights the bundle has: the last ones, an average, the best ones or the starting point."""
    if choice is not None and choice.kept == "start":
        return LINEAR_HEAD
    if not trainer.total:
        return "initial weights" if starting_point.probe is None else LINEAR_HEAD
    average = trainer.recipe.average
    if trainer.recipe.freeze:
        return f"{LINEAR_HEAD}, trained" + (f" (running average, decay {average})" if average else "")
    final_weights = f"running average, decay {average}" if average else "last"
    if not is_best or trainer.best is None:
        return final_weights
    suffix = f" ({final_weights})" if average else ""
    return f"best on the held-out images, of step {trainer.best['step']}{suffix}"
