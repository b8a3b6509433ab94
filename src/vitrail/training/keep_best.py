"""Choose between the starting point (a head fitted by least squares) and the trained model, on held-out images."""

from typing import Any, Literal, NamedTuple

from vitrail.core.settings import pluralise
from vitrail.evaluation.history import LINEAR_HEAD
from vitrail.training.loop import Trainer
from vitrail.training.run_log import RunLog
from vitrail.training.starting_point import StartingPoint

# Residual of the fitted head, by which the learning rate is scaled; below it, the head makes few mistakes.
_SMALL_RESIDUAL = 0.1


class Choice(NamedTuple):
    """The model that is kept after training from a head fitted by least squares, and the reason."""

    kept: Literal["start", "tuned"]
    reason: str


def choose_kept_model(trainer: Trainer, starting_point: StartingPoint, log: RunLog) -> Choice | None:
    """Choose the model with the better score on the held-out images, and log the choice.

    If the starting point is chosen, the kept weights of `trainer` are replaced by it. Return None if there is nothing
    to choose from: the run did not start from a fitted head, or has no steps.
    """
    starting_scores = trainer.starting_scores
    if starting_scores is None or starting_point.body is None or not trainer.total:
        return None
    tuned = (
        trainer.latest or trainer.evaluate_held_out()
    )  # a run that was resumed after its last step has no evaluation yet
    choice, scores = _compare_models(trainer, starting_scores, tuned), {}
    if tuned is not None and starting_scores["count"]:
        scores = {"start": starting_scores["score"], "tuned": tuned["score"], "count": starting_scores["count"]}
    log.write("choice", step=trainer.step, kept=choice.kept, **scores, reason=choice.reason)
    log.say(f"note: {choice.reason}")
    if choice.kept == "start":
        trainer.restore_starting_point(starting_point.body())
    return choice


def _compare_models(trainer: Trainer, starting_scores: dict[str, Any], tuned: dict[str, Any] | None) -> Choice:
    """Compare the scores of the starting point and of the trained model (None without held-out images)."""
    start_name, tuned_name = LINEAR_HEAD, "fine-tuned model"
    if trainer.recipe.freeze:
        start_name, tuned_name = "head by least squares", "trained head"
    if tuned is None or not starting_scores["count"]:
        return Choice(
            "tuned", f"the {tuned_name} is kept: there are no held-out images to compare it with the {start_name}"
        )
    start_text, tuned_text = (
        f"{trainer.objective.describe(scores)}, loss {scores['loss']:.3f}" for scores in (starting_scores, tuned)
    )
    images = f"on {starting_scores['count']:,} images {_describe_held_out(trainer)}"
    is_tie = starting_scores["score"] == tuned["score"]
    tie = " (a tie)" if is_tie else ""
    # If the head makes few mistakes, a tie does not show that training helped.
    if starting_scores["score"] > tuned["score"] or (is_tie and trainer.rate_scale < _SMALL_RESIDUAL):
        steps = pluralise(trainer.step, "step")
        return Choice("start", f"the {start_name} is kept: {start_text} {images}; after {steps} {tuned_text}{tie}")
    return Choice("tuned", f"the {tuned_name} is kept: {tuned_text} {images}; the {start_name} had {start_text}{tie}")


def _describe_held_out(trainer: Trainer) -> str:
    """Describe where the held-out images come from."""
    split = "held-out" if trainer.held_out_loader is None else trainer.held_out_loader.split.name
    return "held out of the training images" if split == "held-out" else f"of the split {split}"
