"""After training from a head by least squares: keep the better of both models on held-out images."""

from typing import Any, Literal, NamedTuple

from vitrail.training.loop import Trainer
from vitrail.training.runlog import RunLog
from vitrail.training.start import Start


class Choice(NamedTuple):
    """Which model is kept after training from a head by least squares, and why."""

    kept: Literal["start", "tuned"]
    reason: str


def choose(trainer: Trainer, begin: Start, log: RunLog) -> Choice | None:
    """Keep the trained model, unless the initial one is better on the held-out images."""
    start = trainer.start
    if start is None or begin.body is None or not trainer.total:
        return None
    tuned = trainer.latest or trainer.examine()  # a run that had ended already evaluates once more
    choice, scores = _compare(trainer, start, tuned), {}
    if tuned is not None and start["count"]:
        scores = {"start": start["score"], "tuned": tuned["score"], "count": start["count"]}
    log.write("choice", step=trainer.step, kept=choice.kept, **scores, reason=choice.reason)
    log.say(f"note: {choice.reason}")
    if choice.kept == "start":
        trainer.return_to_start(begin.body())
    return choice


def _compare(trainer: Trainer, start: dict[str, Any], tuned: dict[str, Any] | None) -> Choice:
    if tuned is None or not start["count"]:
        return Choice(
            "tuned",
            "the tuned model is kept: there are no held-out images to compare it with the head by least squares",
        )
    head, model = (f"{trainer.objective.describe(found)}, loss {found['loss']:.3f}" for found in (start, tuned))
    on = f"on {start['count']:,} held-out images"
    if start["score"] > tuned["score"]:
        return Choice("start", f"the head by least squares is kept: {head} {on}; after {trainer.step:,} steps {model}")
    if start["score"] == tuned["score"]:
        return Choice("tuned", f"the tuned model is kept: {model} {on}; the head by least squares was as good")
    return Choice("tuned", f"the tuned model is kept: {model} {on}; the head by least squares had {head}")
