"""Runs that end before their last step: by patience, by the callback, or by an exception of the callback."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.paths import ROOT
from tests.processes import run_function
from tests.training.runs import train
from vitrail.core.errors import UsageError
from vitrail.data.dataset import Dataset
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.run_reader import read_run
from vitrail.training.checkpoint import list_steps, load_newest
from vitrail.training.loop import Trainer
from vitrail.training.options import Options
from vitrail.training.recipe import Recipe

# 30 training images in batches of 10: three steps per epoch, then an evaluation on 10 held-out images.
RECIPE = Recipe(epochs=8, batch=10, patience=2, average=0.9, model={"dropout": 0.1})
OPTIONS = Options(workers=0, keep=99)
WITH_TESTS = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.fixture(scope="module")
def small_data():
    """Forty digits, ten of them held out."""
    split = open_data("digits").splits["test"]
    parts = {"train": split.select(np.arange(30), "train"), "val": split.select(np.arange(30, 40), "val")}
    return Dataset("some digits", tuple("0123456789"), parts)


def run(data, output, recipe=RECIPE, **more):
    return train(data, "ViT-Pico/2", output, recipe, OPTIONS, quiet=True, **more)


def events(output, kind):
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def weights(output):
    return (output / "bundle" / "model.safetensors").read_bytes()


@pytest.fixture
def scripted(monkeypatch):
    """Replace evaluations by scores for each epoch. The function returns the evaluated weights by step."""

    def script(scores):
        evaluated = {}

        def evaluate_held_out(self):
            evaluated[self.step] = {name: tensor.clone() for name, tensor in self.kept_model.state_dict().items()}
            score = scores[self.step // self.loader.steps - 1]
            return {"score": score, "loss": 1.0, "accuracy": score, "count": 10}

        monkeypatch.setattr(Trainer, "evaluate_held_out", evaluate_held_out)
        return evaluated

    return script


@pytest.mark.parametrize(
    ("scores", "patience", "average", "steps", "best"),
    [
        ((0.1, 0.5, 0.4, 0.5, 0.9, 0.9, 0.9, 0.9), 2, 0.9, 12, 6),  # a tie is not better
        ((0.1, 0.5, 0.4, 0.6, 0.3, 0.2, 0.1, 0.9), 3, 0.0, 21, 12),  # a better score restarts the count
        (
            (0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0),
            7,
            0.0,
            24,
            3,
        ),  # patience ends at the last step: the run is not stopped
        (
            (0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.7, 0.7),
            9,
            0.9,
            24,
            12,
        ),  # patience never ends, but the best weights are kept
        ((math.nan,) * 8, 1, 0.0, 3, None),
    ],
)
def test_patience_stops_run_and_keeps_best_weights(
    small_data, tmp_path, scripted, scores, patience, average, steps, best
):
    evaluated = scripted(scores)
    weights_by_step, rates = {}, []

    def remember(step):
        rates.append(step.learning_rate)
        weights_by_step[step.step] = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}

    recipe = RECIPE.replace(patience=patience, average=average)
    result = run(small_data, tmp_path / "run", recipe, callback=remember)
    provenance = result.bundle.provenance
    assert (provenance["steps"], len(weights_by_step)) == (steps, steps)
    expected = (evaluated if average else weights_by_step)[steps if best is None else best]
    for name, tensor in load_file(tmp_path / "run" / "bundle" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    is_early = steps < 24
    stops = events(tmp_path / "run", "stop")
    assert stops == ([{"event": "stop", "step": steps, "reason": "patience", "best": best}] if is_early else [])
    assert provenance.get("stopped") == ("by patience, of 24 steps" if is_early else None)
    of_average = " (running average, decay 0.9)" if average else ""
    description = "last" if best is None else f"best on the held-out images, of step {best}{of_average}"
    assert provenance["weights"] == description
    # The schedule does not change with patience: the learning rate is far from its end.
    assert (rates[-1] > 0.1 * max(rates)) == (steps < 20)


def test_patience_without_held_out_images_is_rejected(call, small_data, tmp_path):
    alone = Dataset("training images", small_data.labels, {"train": small_data.splits["train"]})
    with pytest.raises(UsageError, match="Patience must have held-out images to watch, got none of 'training images'"):
        run(alone, tmp_path / "run", RECIPE.replace(holdout=0.0))
    arguments = ("digits", "--model", "ViT-Pico/2", "--epochs", 1, "--patience", 2, "--output", tmp_path / "run")
    done = call("train", *arguments, "--set", "holdout=0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    done = call("train", *arguments[:-4], "--patience", 0, "--output", tmp_path / "run")
    assert (done.returncode, "Patience must be an integer from 1 to" in done.stderr) == (2, True)
    assert not (tmp_path / "run").exists()


def test_finetune_with_patience_compares_head_with_best_score(call, tmp_path):
    arguments = ("fashion", "digits", "--output", tmp_path / "run", "--recipe", "auto", "--patience", 1, "--lr", 0.05)
    done = call("finetune", *arguments, "--epochs", 6, "--per-class", 3, "--batch", 8)
    assert done.returncode == 0, done.stderr
    (choice,), evaluations = events(tmp_path / "run", "choice"), events(tmp_path / "run", "evaluate")
    assert choice["tuned"] == max(event["accuracy"] for event in evaluations if event["step"])
    assert len(evaluations) < 7


def test_starting_head_is_compared_with_best_instead_of_last_weights(small_data, tmp_path, scripted):
    scripted((0.6, 0.3, 0.4))  # the last score is also that of the starting point
    vitrail.finetune("fashion", small_data, recipe="auto", epochs=3, patience=1, output=tmp_path / "run", quiet=True)
    (choice,) = events(tmp_path / "run", "choice")
    assert [choice[name] for name in ("kept", "start", "tuned")] == ["tuned", 0.4, 0.6]


def run_until_killed(data, output):
    def die(step):
        if step.step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    run(data, output, callback=die)


def test_resume_after_sigkill_stops_at_same_step_with_identical_weights(small_data, tmp_path):
    """The best weights are from before the kill, and the count of evaluations is restored."""
    complete = run(small_data, tmp_path / "complete")
    assert complete.bundle.provenance["stopped"]
    (stop,) = events(tmp_path / "complete", "stop")
    output = tmp_path / "killed"
    done = run_function(run_until_killed, small_data, output)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list_steps(output / "checkpoints") == [3, 6]
    torch.set_num_threads(2)  # the run restores its number of threads
    run(small_data, output, resumes=True)
    assert events(output, "stop") == [stop]
    assert weights(output) == weights(tmp_path / "complete")
    # Resuming a stopped run again adds no steps.
    run(small_data, output, resumes=True)
    assert len(events(output, "step")) == len(events(tmp_path / "complete", "step"))
    assert weights(output) == weights(tmp_path / "complete")


RANKS = """
import os, sys
from pathlib import Path
from tests.training.test_stop import run, small_data
seen = []
def watch(step):
    seen.append(step.loss)
    if len(seen) == int(sys.argv[2]) and os.environ["RANK"] == "1":
        raise LookupError("mine")
result = run(small_data.__wrapped__(), Path(sys.argv[1]), callback=watch)
total = sum(float(tensor.double().sum()) for tensor in result.bundle.model.state_dict().values())
sys.stdout.write(f"{len(seen)} {sum(seen)!r} {total!r}\\n")
"""


@pytest.fixture
def torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANKS)

    def start(output, failing_step):
        port = str(random.randrange(20_000, 60_000))
        arguments = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
        arguments += [str(script), str(output), str(failing_step)]
        return subprocess.run(arguments, env=WITH_TESTS, capture_output=True, text=True, check=False)

    return start


@pytest.mark.slow
def test_two_ranks_stop_at_same_step_with_same_weights(torchrun, tmp_path):
    done = torchrun(tmp_path / "run", 0)
    assert done.returncode == 0, done.stderr
    first_rank, second_rank = done.stdout.splitlines()
    assert first_rank == second_rank
    (stop,) = events(tmp_path / "run", "stop")
    assert (stop["reason"], stop["step"]) == ("patience", int(first_rank.split()[0]))


@pytest.mark.slow
def test_callback_error_on_one_rank_ends_all_ranks_with_checkpoint(small_data, torchrun, tmp_path):
    done = torchrun(tmp_path / "run", 2)
    assert done.returncode == 1
    assert "LookupError: mine" in done.stderr
    assert list_steps(tmp_path / "run" / "checkpoints") == [2]
    assert events(tmp_path / "run", "callback-failed")[0]["step"] == 2


def test_callback_receives_every_step_without_changing_weights(small_data, tmp_path):
    plain = run(small_data, tmp_path / "plain")
    steps = []

    def record_step(step):
        torch.manual_seed(len(steps))
        step.model(torch.randn(2, 1, 8, 8)).sum().backward()  # a callback may use the model and random numbers
        assert not step.model.training
        steps.append(step)

    watched = run(small_data, tmp_path / "watched", callback=record_step)
    assert weights(tmp_path / "plain") == weights(tmp_path / "watched")
    count = plain.bundle.provenance["steps"]
    assert (
        [step.step for step in steps] == [*range(1, count + 1)] == [*range(1, watched.bundle.provenance["steps"] + 1)]
    )
    assert [step.epoch for step in steps] == [index // 3 for index in range(count)]
    assert {step.total for step in steps} == {24}
    assert steps[1].held_out is None
    assert steps[2].held_out["accuracy"] == events(tmp_path / "watched", "evaluate")[0]["accuracy"]
    logged = events(tmp_path / "watched", "step")[0]
    assert logged["loss"] == pytest.approx(sum(step.loss for step in steps[:3]) / 3)
    assert logged["learning_rate"] == steps[2].learning_rate
    assert "Step(step=1, total=24, epoch=0, loss=" in repr(steps[0])
    assert "LayerNorm" not in repr(steps[0])


@pytest.mark.parametrize("score", [0.5, math.nan])
def test_resumed_run_restores_latest_evaluation(small_data, tmp_path, scripted, score):
    scripted((score,) * 8)
    recipe, evaluations = RECIPE.replace(epochs=2, patience=None), []

    def fail(step):
        evaluations.append(step.held_out)
        if step.step == 4:
            raise LookupError

    with pytest.raises(LookupError):
        run(small_data, tmp_path / "run", recipe, callback=fail)
    run(small_data, tmp_path / "run", recipe, resumes=True, callback=lambda step: evaluations.append(step.held_out))
    assert len(evaluations) == 6
    assert (
        repr(evaluations[4])
        == repr(evaluations[3])
        == repr({"score": score, "loss": 1.0, "accuracy": score, "count": 10})
    )


def test_least_images_adds_epochs_but_not_evaluations(small_data, tmp_path):
    count = len(small_data.first_split)
    recipe = RECIPE.replace(epochs=2, least_images=6 * count - 1, patience=None)
    run(small_data, tmp_path / "run", recipe)
    assert [event["step"] for event in events(tmp_path / "run", "evaluate")] == [9, 18]  # three steps per epoch
    run(small_data, tmp_path / "other", recipe.replace(least_images=2 * count))
    assert [event["step"] for event in events(tmp_path / "other", "evaluate")] == [3, 6]


def test_run_killed_before_first_checkpoint_starts_from_scratch(small_data, tmp_path, monkeypatch):
    recipe = RECIPE.replace(epochs=4, evaluate_every=4, patience=None)
    monkeypatch.setattr("vitrail.training.loop.save_trainer", lambda *_, **__: None)

    def fail(step):
        if step.step == 10:
            raise LookupError

    with pytest.raises(LookupError):
        run(small_data, tmp_path / "run", recipe, callback=fail)
    monkeypatch.undo()
    steps = RECIPE.replace(epochs=None, steps=2, patience=None)  # other settings are allowed
    again = run(small_data, tmp_path / "run", steps, resumes=True)
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [3, 6, 9, 10, 2]
    assert [event["step"] for event in again.history if event["event"] == "step"] == [2]
    assert [event["event"] for event in again.history].count("start") == 1
    assert "callback-failed" not in (event["event"] for event in again.history)
    assert read_run(tmp_path / "run").step == 2


def test_run_stopped_by_callback_is_not_continued_on_resume(small_data, tmp_path):
    output = tmp_path / "run"
    recipe = RECIPE.replace(patience=None)
    result = run(small_data, output, recipe, callback=lambda step: np.bool_(step.step == 5))
    assert result.bundle.provenance["stopped"] == "by callback, of 24 steps"
    assert read_run(output).step == 5
    assert events(output, "stop") == [{"event": "stop", "step": 5, "reason": "callback", "best": 3}]
    assert [event["step"] for event in events(output, "evaluate")] == [3, 5]
    assert list_steps(output / "checkpoints") == [3, 5]
    assert load_newest(output / "checkpoints")[0].state["stopped"] == "callback"
    before = weights(output)
    shutil.rmtree(output / "bundle")  # as after a kill before the bundle was written
    again = run(small_data, output, recipe, resumes=True)
    assert again.bundle.provenance["steps"] == 5
    assert weights(output) == before
    # A callback that returns True at the last step does not stop the run.
    complete = run(small_data, tmp_path / "complete", recipe, callback=lambda step: step.step == step.total)
    assert "stopped" not in complete.bundle.provenance


def test_callback_error_is_raised_after_checkpoint_and_run_can_resume(small_data, tmp_path):
    complete = run(small_data, tmp_path / "complete")
    error = KeyError("mine")

    def fail(step):
        if step.step == 4:
            raise error

    with pytest.raises(KeyError) as raised:
        run(small_data, tmp_path / "run", callback=fail)
    assert raised.value is error
    assert list_steps(tmp_path / "run" / "checkpoints") == [3, 4]
    (event,) = events(tmp_path / "run", "callback-failed")
    assert event == {"event": "callback-failed", "step": 4, "error": "KeyError: 'mine'"}
    resumed = run(small_data, tmp_path / "run", resumes=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "complete")
    assert resumed.bundle.provenance["steps"] == complete.bundle.provenance["steps"]


@pytest.mark.parametrize("value", [0.25, "stop", [], torch.tensor(True)])
def test_callback_must_return_boolean_or_none(small_data, tmp_path, value):
    with pytest.raises(UsageError, match="Callback must return True to end the run, or None or False to continue, got"):
        run(small_data, tmp_path / "run", callback=lambda _: value)


def test_report_states_reason_for_early_stop(small_data, tmp_path, scripted):
    scripted((0.5, 0.4, 0.3))
    run(small_data, tmp_path / "run")
    report = (tmp_path / "run" / "report.html").read_text()
    assert "stopped by patience, of 24 steps; weights: best on the held-out images, of step 3" in report
