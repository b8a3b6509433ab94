"""Runs from Python: results, messages, observers, and the states of the run folder."""

import contextlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import vitrail
from tests.training.runs import finetune, train
from vitrail.core.errors import UsageError
from vitrail.data.dataset import Dataset
from vitrail.data.sources.registry import open_data
from vitrail.training.observer import Observer
from vitrail.training.options import Options
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import Recipe
from vitrail.training.run_folder import RunFolder, RunFolderState

RECIPE = Recipe(steps=2, batch=16)
ALONE = Options(workers=0)


@pytest.fixture(scope="module")
def small_data():
    """Forty digits in memory, with names of the classes."""
    split = open_data("digits").splits["test"].select(np.arange(40))
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return Dataset("some digits", names, {"train": split, "test": split.select(np.arange(8), "test")})


def test_train_in_quiet_mode_returns_saved_bundle_and_prints_nothing(tmp_path, small_data, capfd):
    result = train(small_data, "ViT-Pico/2", tmp_path / "run", RECIPE, ALONE, quiet=True)
    assert capfd.readouterr() == ("", "")
    assert result.folder == tmp_path / "run"
    written = vitrail.load(result.folder / "bundle")
    assert (result.bundle.labels, result.bundle.provenance) == (written.labels, written.provenance)
    for name, tensor in written.model.state_dict().items():
        torch.testing.assert_close(tensor, result.bundle.model.state_dict()[name], rtol=0, atol=0)
    assert (result.scores["split"], result.scores["count"]) == ("test", 8)
    assert result.scores == written.provenance["scores"]
    assert "of 8; 95 % interval" in result.sentence
    assert written.provenance["data"].startswith("some digits: ")


def test_data_without_test_split_is_evaluated_on_held_out_images(tmp_path, small_data):
    alone = Dataset("training images", small_data.labels, {"train": small_data.splits["train"]})
    result = train(alone, "ViT-Pico/2", tmp_path / "run", RECIPE, ALONE, quiet=True)
    assert result.scores["split"] == "held-out"
    assert result.sentence.startswith("held-out accuracy ")


def test_notes_go_to_stderr_only(tmp_path, small_data, capfd):
    train(small_data, "ViT-Pico/2", tmp_path / "run", RECIPE, ALONE)
    out, err = capfd.readouterr()
    assert not out
    assert "30 images of 10 classes, 10 held out" in err


def test_finetune_in_quiet_mode_returns_bundle_with_origin(tmp_path, small_data, capfd):
    result = finetune(
        "fashion", small_data, tmp_path / "run", RECIPE.replace(head="probe", holdout=0.0), ALONE, quiet=True
    )
    assert capfd.readouterr() == ("", "")
    assert result.bundle.labels == small_data.labels
    assert result.bundle.provenance["finetuned_from"]["bundle"] == "fashion"


def test_run_without_evaluation_images_has_no_scores(tmp_path, small_data):
    alone = Dataset("training images", small_data.labels, {"train": small_data.splits["train"]})
    result = train(alone, "ViT-Pico/2", tmp_path / "run", RECIPE.replace(holdout=0.0), ALONE, quiet=True)
    assert (result.scores, result.sentence) == (None, None)


def test_recipe_without_exactly_one_length_is_rejected(tmp_path, small_data):
    for lengths, message in (({}, "none"), ({"epochs": 1, "steps": 2}, "epochs=1 and steps=2")):
        with pytest.raises(UsageError, match=f"one of epochs, steps and minutes, got {message}"):
            train(small_data, "ViT-Pico/2", tmp_path / "run", Recipe(**lengths), ALONE, quiet=True)
    assert not (tmp_path / "run").exists()


def test_run_folder_reports_its_state(tmp_path, small_data):
    path = tmp_path / "run"
    new = RunFolder(path, resumes=False, force=False)
    assert new.state is RunFolderState.NEW
    path.mkdir()
    assert new.state is RunFolderState.NEW
    (path / ".lock").touch()
    assert new.state is RunFolderState.NEW
    (path / ".config.toml.writing").touch()
    assert new.state is RunFolderState.BEGUN
    with contextlib.ExitStack() as stack:
        RunFolder(path, resumes=True, force=False).claim("in Python\n", stack, print)
    assert new.state is RunFolderState.BEGUN
    new.write_config("in Python\n")
    assert new.state is RunFolderState.BEGUN
    (new.checkpoints / "step-000000001").mkdir()
    assert new.state is RunFolderState.UNDER_WAY
    train(small_data, "ViT-Pico/2", path, RECIPE, ALONE, force=True, quiet=True)
    assert new.state is RunFolderState.FINISHED
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    (tmp_path / "file").touch()
    for name in ("photos", "file"):
        assert RunFolder(tmp_path / name, resumes=False, force=False).state is RunFolderState.FOREIGN
        for options in (
            {"resumes": False, "force": False},
            {"resumes": False, "force": True},
            {"resumes": True, "force": False},
        ):
            with pytest.raises(UsageError, match="Output"):
                RunFolder(tmp_path / name, **options).check()


@pytest.mark.parametrize("settings", [{"optimiser": "sgd", "momentum": 0.0}, {"optimiser": "sgd"}, {}])
def test_resume_gives_identical_weights_for_every_optimiser_state(tmp_path, small_data, settings):
    recipe = RECIPE.replace(steps=4, **settings)
    complete = train(small_data, "ViT-Pico/2", tmp_path / "complete", recipe, Options(workers=0, keep=9), quiet=True)
    shutil.copytree(complete.folder, tmp_path / "part")
    for name in ("checkpoints/step-000000004", "bundle"):
        shutil.rmtree(tmp_path / "part" / name)
    resumed = train(small_data, "ViT-Pico/2", tmp_path / "part", recipe, ALONE, resumes=True, quiet=True)
    for name, tensor in complete.bundle.model.state_dict().items():
        assert torch.equal(tensor, resumed.bundle.model.state_dict()[name]), name


def test_existing_output_raises_usage_error_in_python(tmp_path, small_data):
    train(small_data, "ViT-Pico/2", str(tmp_path / "run"), RECIPE, ALONE, quiet=True)
    with pytest.raises(UsageError, match="Output must not exist yet"):
        train(small_data, "ViT-Pico/2", str(tmp_path / "run"), RECIPE, ALONE, quiet=True)


def test_training_in_a_thread_works_without_signal_handlers(tmp_path, small_data):
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(train, small_data, "ViT-Pico/2", tmp_path / "run", RECIPE, ALONE, quiet=True)
        assert work.result().bundle.provenance["steps"] == 2


def test_per_class_subsets_are_nested_and_exclude_held_out_images(small_data):
    smallest, held_out = small_data.for_training(holdout=0.2, seed=3, per_class=1)
    larger, same_held_out = small_data.for_training(holdout=0.2, seed=3, per_class=2)
    largest, _ = small_data.for_training(holdout=0.2, seed=3)
    assert np.bincount(smallest.labels).tolist() == [1] * 10
    np.testing.assert_array_equal(held_out.images, same_held_out.images)
    image_sets = [{image.tobytes() for image in split.images} for split in (smallest, larger, largest)]
    assert image_sets[0] <= image_sets[1] <= image_sets[2]
    assert not image_sets[2] & {image.tobytes() for image in held_out.images}


def test_run_writes_snapshots_gradient_norms_and_training_accuracy(tmp_path, small_data):
    recipe = RECIPE.replace(steps=10, per_class=2)
    options = Options(workers=0, snapshots=3, gradients=True)
    result = train(small_data, "ViT-Pico/2", tmp_path / "run", recipe, options, quiet=True)
    names = [path.name for path in sorted((result.folder / "snapshots").iterdir())]
    assert names == ["step-000000000", "step-000000001", "step-000000003", "step-000000010"]
    first, last = (
        vitrail.load(result.folder / "snapshots" / name).model.state_dict() for name in (names[0], names[-1])
    )
    assert not first["head.weight"].any()
    for name, tensor in result.bundle.model.state_dict().items():
        assert torch.equal(tensor, last[name])
    events = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    (step,) = (event for event in events if event["event"] == "step" and event["step"] == 10)
    assert len(step["gradients"]) == 4 + 2
    assert all(norm > 0 for norm in step["gradients"][1:])
    model, split = result.bundle.model, small_data.for_training(holdout=0.1, seed=0, per_class=2)[0]
    with torch.no_grad():
        predictions = model(result.bundle.preprocess(list(split.images))).argmax(1).numpy()
    assert result.scores["training_accuracy"] == pytest.approx((predictions == split.labels).mean())


def test_unwritable_contents_are_rejected_at_start(tmp_path, small_data):
    run = train(small_data, "ViT-Pico/2", tmp_path / "run", RECIPE, ALONE, quiet=True).folder
    for name in ("report.html", "metrics.jsonl"):
        (run / name).unlink()
        os.mkfifo(run / name)
        with pytest.raises(UsageError, match=f"regular files, got .*{name}"):
            train(small_data, "ViT-Pico/2", run, RECIPE, ALONE, resumes=True, quiet=True)
        (run / name).unlink()
    shutil.rmtree(run / "bundle")
    (run / "bundle").mkdir()
    (run / "bundle" / "photo.png").touch()
    with pytest.raises(UsageError, match="must be a folder that vitrail wrote"):
        train(small_data, "ViT-Pico/2", run, RECIPE, ALONE, resumes=True, quiet=True)


def test_all_ranks_call_the_same_collectives(tmp_path, small_data, monkeypatch):
    """A collective that other ranks do not call would block."""

    class RecordingRanks(Ranks):
        def __getattribute__(self, name):
            if name in ("reduce_max", "reduce_sum", "broadcast", "gather", "run_on_first"):
                calls.append(name)
            return is_first if name == "is_first" else super().__getattribute__(name)

        def broadcast(self, value):
            if is_first:
                broadcast_values.append(value)
            return broadcast_values[calls.count("broadcast") - 1]

    calls_by_rank, broadcast_values = {}, []
    recipe = RECIPE.replace(epochs=2, steps=None, patience=1)
    monkeypatch.setattr("vitrail.training.run.join_ranks", lambda _: contextlib.nullcontext(RecordingRanks()))
    for is_first in (True, False):
        calls = calls_by_rank[is_first] = []
        output = tmp_path / f"{is_first}"
        train(small_data, "ViT-Pico/2", output, recipe, ALONE, quiet=True, callback=lambda step: None)
    assert calls_by_rank[True] == calls_by_rank[False]
    assert calls_by_rank[True].count("gather") > 4


def test_observers_receive_events_without_report(tmp_path):
    """An observer receives the events of `metrics.jsonl` and the result; `training` does not write a page."""
    calls = []

    class RecordingObserver(Observer):
        def __init__(self, info):
            calls.append(("begin", info.folder, info.watched, info.model.name))

        def record(self, event, fields):
            calls.append((event, fields.get("step")))

        def step(self, number):
            calls.append(number)

        def update(self, position):
            calls.append(("update", position.step, position.total))

        def fail(self, position, error):
            calls.append(("fail", position.step, str(error)))

        def finish(self, outcome):
            calls.append(("finish", outcome.bundle.provenance["steps"], outcome.illustrate().rows[0][1].dtype))

        def close(self):
            calls.append("close")

    recipe = Recipe(steps=2, batch=64, objective="masked")
    train("digits", "ViT-Pico/2", tmp_path / "run", recipe, ALONE, quiet=True, observers=(RecordingObserver,))
    expected = [
        ("begin", tmp_path / "run", "accuracy", "ViT-Pico/2"),
        ("start", 0),
        0,
        1,
        2,
        ("step", 2),
        ("evaluate", 2),
    ]
    assert calls == [*expected, ("update", 2, 2), ("finish", 2, np.uint8), ("end", 2), "close"]
    assert not (tmp_path / "run" / "report.html").exists()
    calls.clear()

    def fail(step):
        raise ArithmeticError("no more")

    with pytest.raises(ArithmeticError):
        train(
            "digits",
            "ViT-Pico/2",
            tmp_path / "failed",
            recipe,
            ALONE,
            callback=fail,
            quiet=True,
            observers=(RecordingObserver,),
        )
    assert calls[-2:] == [("fail", 1, "no more"), "close"]
