"""After training from a head by least squares: keep the better of both models on held-out images."""

from typing import Any, Literal, NamedTuple

from vitrail.core.settings import pluralise
from vitrail.evaluation.history import LINEAR_HEAD
from vitrail.training.loop import Trainer
from vitrail.training.run_log import RunLog
from vitrail.training.starting_point import StartingPoint

_FEW_MISTAKES = 0.1  # of the head: its residual, by which the learning rate is scaled


class Choice(NamedTuple):
    """Which model is kept after training from a head by least squares, and why."""

    kept: Literal["start", "tuned"]
    reason: str


def choose(trainer: Trainer, initial: StartingPoint, log: RunLog) -> Choice | None:
    """Keep the trained model, unless the initial one is better on the held-out images, or as good with few mistakes."""
    starting_scores = trainer.starting_scores
    if starting_scores is None or initial.body is None or not trainer.total:
        return None
    tuned = trainer.latest or trainer.evaluate_held_out()  # a run that had ended already evaluates once more
    choice, scores = _compare(trainer, starting_scores, tuned), {}
    if tuned is not None and starting_scores["count"]:
        scores = {"start": starting_scores["score"], "tuned": tuned["score"], "count": starting_scores["count"]}
    log.write("choice", step=trainer.step, kept=choice.kept, **scores, reason=choice.reason)
    log.say(f"note: {choice.reason}")
    if choice.kept == "start":
        trainer.restore_starting_point(initial.body())
    return choice


def _compare(trainer: Trainer, starting_scores: dict[str, Any], tuned: dict[str, Any] | None) -> Choice:
    before, after = LINEAR_HEAD, "fine-tuned model"
    if trainer.recipe.freeze:
        before, after = "head by least squares", "trained head"
    if tuned is None or not starting_scores["count"]:
        return Choice("tuned", f"the {after} is kept: there are no held-out images to compare it with the {before}")
    head, model = (
        f"{trainer.objective.describe(scores)}, loss {scores['loss']:.3f}" for scores in (starting_scores, tuned)
    )
    images = f"on {starting_scores['count']:,} images {_origin_of_held_out(trainer)}"
    is_tie = starting_scores["score"] == tuned["score"]
    tie = " (a tie)" if is_tie else ""
    # A head that makes few mistakes leaves little to gain: then a tie does not show that training helped.
    if starting_scores["score"] > tuned["score"] or (is_tie and trainer.rate_scale < _FEW_MISTAKES):
        steps = pluralise(trainer.step, "step")
        return Choice("start", f"the {before} is kept: {head} {images}; after {steps} {model}{tie}")
    return Choice("tuned", f"the {after} is kept: {model} {images}; the {before} had {head}{tie}")


def _origin_of_held_out(trainer: Trainer) -> str:
    """Where the images that choose come from."""
    split = "held-out" if trainer.held_out_loader is None else trainer.held_out_loader.split.name
    return "held out of the training images" if split == "held-out" else f"of the split {split}"
