"""Runs that were killed and go on: those of older versions, for ever; those whose checkpoints were forged, never."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as numpy_file
from safetensors.numpy import save_file
from safetensors.torch import load_file

from tests.training.test_loop import HALF_WAY, STATE, curve, make_trainer
from tests.training.test_reliability import events
from vitrail.core.errors import DamagedError, VitrailError
from vitrail.core.files import MANIFEST, _write_manifest
from vitrail.models.config import read_model
from vitrail.training.recipe import Recipe
from vitrail.training.resume import resume
from vitrail.training.run_log import RunLog
from vitrail.training.run_state import check_state

COMMAND = (
    "train",
    "digits",
    "--model",
    "ViT-Pico/2",
    "--epochs",
    "6",
    "--threads",
    "1",
    "--set",
    "batch=128",
    "optimiser=muon",
    "learning_rate=0.01",
    "average=0.9",
    "augment.padding=1",
    "augment.mixup=0.2",
    "model.width=16",
    "model.depth=2",
    "model.heads=2",
    "model.mlp=32",
    "model.dropout=0.1",
    "model.position=learned-2d",
)


def forge(folder, change, arrays=None):
    """Change the state (and tensors) of a checkpoint and make its manifest agree."""
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(change(state) or state))
    if arrays is not None:
        found = numpy_file(folder / "tensors.safetensors")
        save_file(arrays(found) or found, folder / "tensors.safetensors")
    (folder / MANIFEST).unlink()
    _write_manifest(folder)


@pytest.fixture
def run(tmp_path):
    shutil.copytree(HALF_WAY, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_of_version_0_1_goes_on_to_the_weights_of_one_that_was_never_killed(call, run, tmp_path):
    done = call(*COMMAND, "--output", run, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "going on after step 33 of 66" in done.stderr
    (resumed,) = events(run, "resume")
    assert (resumed["step"], events(run, "end")[0]["step"]) == (33, 66)
    page = (run / "report.html").read_text()
    assert "Loss: " in page
    assert 'value="seconds"' in page  # of the second half: version 0.1 recorded none
    assert call(*COMMAND, "--output", tmp_path / "anew").returncode == 0
    ours, anew = (load_file(folder / "bundle" / "model.safetensors") for folder in (run, tmp_path / "anew"))
    half = load_file(HALF_WAY / "checkpoints" / "step-000000033" / "tensors.safetensors")
    for name, tensor in anew.items():
        # The first half ran on another machine: not the same bits, but far nearer than the second half moved them.
        way = float((tensor - half[f"average/model.{name}"]).abs().max())
        apart = (ours[name] - tensor).abs()
        if name.endswith("attn.qkv.bias"):  # of keys its gradient is rounding, which AdamW enlarges
            apart[len(apart) // 3 : 2 * len(apart) // 3] = 0
        assert float(apart.max()) <= 1e-3 + 0.02 * way, name


def test_a_setting_that_is_newer_than_the_run_takes_its_default(call, run):
    folder = run / "checkpoints" / "step-000000033"

    def age(state):
        for part, name in (("recipe", "least_steps"), ("model", "wrap"), ("preprocess", "jpeg")):
            del state[part][name]
        del state["recipe"]["augment"]["erasing"]

    forge(folder, age)
    done = call(*COMMAND, "--output", run, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "going on after step 33 of 66" in done.stderr


def test_every_field_of_a_state_is_checked():
    good = STATE
    recipe = Recipe.from_json(good["recipe"]).to_json()  # with the defaults of settings that are newer
    model = read_model(good["model"]).to_document()
    newer = {
        "left_out": 0,
        "latest": None,
        "start": None,
        "losses": [],
        "waited": 0,
        "stopped": None,
        "rate_scale": 1.0,
    }
    assert check_state(good) == {**good, "recipe": recipe, "model": model, **newer}
    strange = (None, "x", -5, 10**9 + 1, 1.5, True, [], {}, [1], {"a": 1}, float("nan"), "x" * 99)
    best = good["best"]
    forged = [{**good, name: value} for name in good for value in strange]
    forged += [{**good, "best": {**best, name: value}} for name in best for value in strange if value != 1.5]
    forged += [{**good, "best": {**best, **change}} for change in ({"step": 34}, {"step": 0}, {"accuracy": 1.5})]
    forged += [
        {**good, part: {**good[part], name: value}}
        for part in ("recipe", "preprocess", "model")
        for name in good[part]
        for value in (float("nan"), [[]])
    ]
    forged += [{**good, part: {**good[part], "unheard": 1}} for part in ("recipe", "preprocess", "model")]
    forged += [{name: value for name, value in good.items() if name != left_out} for left_out in good]
    forged += [{**good, "step": 67}, {**good, "total": 32}, {**good, "origin": {"steps": 3}}, {**good, "left_out": 34}]
    for state in forged:
        if state == good or all(state.get(name) == good[name] or plausible(name, state.get(name)) for name in good):
            continue
        with pytest.raises(DamagedError) as refused:
            check_state(state)
        assert "\n" not in str(refused.value)


def test_fields_that_are_newer_than_version_0_1_are_checked_too():
    start = {"score": 0.5, "loss": 1.0, "accuracy": 0.5, "count": 8}
    known = ({"start": start}, {"start": {"count": 0}}, {"losses": [0.5, None]}, {"left_out": 33})
    known += ({"latest": start}, {"latest": {**start, "score": None, "loss": None}})
    for fine in (*known, {"waited": 3, "stopped": "patience"}, {"stopped": "callback"}):
        assert check_state({**STATE, **fine}).items() >= fine.items()
    forged = [{"left_out": value} for value in (None, "x", -1, 34, 1.5, True)]
    forged += [{"start": value} for value in ("x", 3, True, [], {}, {"count": 3}, {**start, "accuracy": 1.5})]
    forged += [{"start": {**start, name: value}} for name in start for value in (None, "x", True, float("nan"))]
    forged += [{"latest": value} for value in ("x", 3, True, [], {}, {"count": 0}, {**start, "accuracy": 1.5})]
    forged += [{"latest": {**start, name: value}} for name in start for value in ("x", True, float("nan"))]
    forged += [{"latest": {**start, "count": None}}]
    forged += [{"losses": value} for value in (None, 3, {}, "x", ["x"], [float("nan")], [[]], [True])]
    forged += [{"waited": value} for value in (None, "x", -1, 34, 1.5, True)]
    forged += [{"stopped": value} for value in ("x", "", 0, True, [], {}, ["patience"])]
    forged += [{"rate_scale": value} for value in (None, "x", -1, True, float("nan"))]
    for change in forged:
        with pytest.raises(DamagedError):
            check_state({**STATE, **change})


def plausible(name, value):
    """What no reader of the state alone can tell from the truth."""
    match name:
        case "bundle" | "data" | "device" | "torch":
            return isinstance(value, str)
        case "amp" | "compile":
            return isinstance(value, bool)
        case "preprocess" | "recipe":
            return value == {}
        case "seed":
            return value == 10**9 + 1
        case "seconds":
            return value in (1.5, 10**9 + 1)
        case "best":
            if not isinstance(value, dict):
                return value is None
            return value.get("count") == 10**9 + 1 or any(
                value.get(name) in (-5, 10**9 + 1) for name in ("loss", "score")
            )
    return False


def test_a_forged_checkpoint_is_a_damaged_one(call, run):
    """The checksum is right, a value is not: the one before is taken, and that is said."""
    folder = run / "checkpoints" / "step-000000033"
    shutil.copytree(folder, older := run / "checkpoints" / "step-000000022")
    forge(older, lambda state: {**state, "step": 22})
    forge(folder, lambda state: {**state, "total": 10**9})
    done = call(*COMMAND, "--output", run, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert f"note: {str(folder)!r} is damaged: total must be 66, got 1000000000." in done.stderr
    assert "going on after step 22 of 66" in done.stderr
    assert folder.with_name("damaged-step-000000033").is_dir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": -5}, "its step must be that of its folder, got -5."),
        ({"step": "x"}, "its step must be that of its folder, got 'x'."),
        ({"best": 3}, "Best must be null or have step, score, loss and count, got 3."),
        (
            {"best": {**STATE["best"], "score": 0.99}},
            f"score of the best must be {STATE['best']['accuracy']}, got 0.99.",
        ),
        ({"best": {"step": 3, "score": 0, "loss": 0, "count": 1}}, "best must have 'accuracy', got none."),
        ({"recipe": {"batch": 0}}, "Batch must be an integer from 1 to 1,000,000, got 0."),
    ],
)
def test_a_run_whose_only_checkpoint_is_forged_ends_in_one_line(call, run, change, words):
    forge(run / "checkpoints" / "step-000000033", lambda state: {**state, **change})
    done = call(*COMMAND, "--output", run, "--resume", "auto")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("vitrail: No checkpoint in ")
    assert line.endswith(f"is damaged: {words}")


def test_every_tensor_of_a_checkpoint_is_checked(tmp_path):
    recipe = Recipe(steps=20, batch=32, average=0.9)
    trainer = make_trainer(recipe=recipe)
    with RunLog(tmp_path, 20, writes=False) as log:
        for _ in range(2):
            curve(trainer, 3)
            trainer.save(tmp_path / "checkpoints", STATE, log)
    newest = tmp_path / "checkpoints" / "step-000000006"
    shutil.copytree(newest, kept := tmp_path / "kept")
    name = "model.blocks.0.mlp.fc1.bias"
    moment = f"memory/{name}/exp_avg"
    nan = np.full(96, np.nan, np.float32)
    for change, words in (
        (lambda a: {n: a[n] for n in a if n != moment}, f"tensor {moment} is missing."),
        (lambda a: {n: a[n] for n in a if name not in n or "memory" not in n}, f"tensor {moment} is missing."),
        (lambda a: {n: a[n] for n in a if "memory" not in n}, "is missing."),
        (lambda a: {**a, moment: a[moment][:1]}, f"{moment} must be float32 of shape (96,), got float32 of (1,)."),
        (lambda a: {**a, moment: a[moment].astype(float)}, "must be float32 of shape (96,), got float64 of (96,)."),
        (lambda a: {**a, f"memory/{name}/x": a[moment]}, f"tensor memory/{name}/x is unknown."),
        (lambda a: {**a, "memory/model.x/exp_avg": a[moment]}, "tensor memory/model.x/exp_avg is unknown."),
        *(
            (lambda a, n=n: {**a, n: nan}, f"tensor {n} must have finite numbers, got others.")
            for n in (moment, f"now/{name}", f"average/{name}")
        ),
        (lambda a: {**a, "now/model.head.bias": a["now/model.head.bias"][:1]}, "of shape (10,), got float32 of (1,)."),
    ):
        forge(newest, dict, change)
        again = make_trainer(recipe=recipe)
        checkpoint, (note,) = resume(again, tmp_path, {})
        assert checkpoint.step == again.step == 3
        assert note.startswith(f"{str(newest)!r} is damaged: ")
        assert note.endswith(words), note
        shutil.rmtree(newest, ignore_errors=True)
        shutil.copytree(kept, newest)
        shutil.rmtree(tmp_path / "checkpoints" / "damaged-step-000000006")
    assert resume(make_trainer(recipe=recipe), tmp_path, {})[0].step == 6


def test_a_run_that_only_left_steps_out_goes_on(tmp_path):
    """Without a step, an optimiser has no memory; a checkpoint that says so is whole."""
    recipe = Recipe(steps=20, batch=32, on_nonfinite="skip")
    trainer, again = make_trainer(recipe=recipe), make_trainer(recipe=recipe)
    trainer.step = trainer.left_out = 4
    with RunLog(tmp_path, 20, writes=False) as log:
        trainer.save(tmp_path / "checkpoints", STATE, log)
    assert resume(again, tmp_path, {})[0].step == 4
    assert curve(again, 5) == curve(trainer, 5)


class Factored(torch.optim.Optimizer):
    """Keeps the mean square of each row and each column instead of each number (as arXiv 1804.04235 does)."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            memory, square = self.state[parameter], parameter.grad.square() + 1e-12
            flat = square.reshape(len(square), -1) if parameter.ndim > 1 else square[None]
            for name, axis in (("rows", 1), ("columns", 0)):
                mean = flat.mean(axis)
                memory[name] = mean if name not in memory else memory[name].lerp(mean, 0.1)
            scale = memory["rows"][:, None] * memory["columns"] / memory["rows"].mean()
            parameter.sub_(parameter.grad / scale.sqrt().reshape(parameter.shape), alpha=1e-3)


def test_an_optimisers_memory_has_its_own_shapes(tmp_path):
    def make():
        trainer = make_trainer()
        trainer.optimisers = [Factored(trainer.objective.parameters())]
        for group in trainer.optimisers[0].param_groups:
            group["share"] = 1.0
        return trainer

    whole, first, second = make(), make(), make()
    expected = curve(whole, 12)
    assert curve(first, 7) == expected[:7]
    assert first.arrays()["memory/model.blocks.0.attn.qkv.weight/rows"].shape == (144,)
    with RunLog(tmp_path, 20, writes=False) as log:
        first.save(tmp_path / "checkpoints", STATE, log)
    assert resume(second, tmp_path, {})[0].step == 7
    assert curve(second, 5) == expected[7:]
    # What no tensor holds would be forgotten: it is refused before anything is written.
    second.optimisers[0].state[second.objective.model.head.bias]["calls"] = 7
    with RunLog(tmp_path, 20, writes=False) as log, pytest.raises(VitrailError, match="got calls of type int from Fac"):
        second.save(tmp_path / "checkpoints", STATE, log)
