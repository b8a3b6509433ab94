"""Resuming runs: killed ones, those of older versions, with a corrupt checkpoint, and finished ones."""

import json
import shlex
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file as numpy_file
from safetensors.numpy import save_file
from safetensors.torch import load_file

from tests.training.objectives.test_multilabel import write_toys
from tests.training.test_loop import HALF_WAY, STATE, curve, make_trainer
from tests.training.test_reliability import events
from vitrail.core.errors import CorruptFileError, VitrailError
from vitrail.core.files import MANIFEST, _write_manifest
from vitrail.models.config import read_model
from vitrail.training.checkpoint import load_newest
from vitrail.training.recipe import Recipe
from vitrail.training.resume import resume
from vitrail.training.run_log import RunLog
from vitrail.training.run_state import read_state
from vitrail.training.trainer_checkpoint import collect_arrays, restore_trainer, save_trainer

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
    """Change the state (and tensors) of a checkpoint and rewrite its manifest."""
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(change(state) or state))
    if arrays is not None:
        tensors = numpy_file(folder / "tensors.safetensors")
        save_file(arrays(tensors) or tensors, folder / "tensors.safetensors")
    (folder / MANIFEST).unlink()
    _write_manifest(folder)


@pytest.fixture
def run(tmp_path):
    shutil.copytree(HALF_WAY, tmp_path / "run")
    return tmp_path / "run"


def test_resumed_run_of_version_0_1_ends_near_weights_of_new_run(call, run, tmp_path):
    done = call(*COMMAND, "--output", run, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "resuming after step 33 of 66" in done.stderr
    (resumed,) = events(run, "resume")
    assert (resumed["step"], events(run, "end")[0]["step"]) == (33, 66)
    page = (run / "report.html").read_text()
    assert "Loss: " in page
    assert 'value="seconds"' in page  # of the second half: version 0.1 did not record seconds
    assert call(*COMMAND, "--output", tmp_path / "new").returncode == 0
    resumed_weights, new_weights = (
        load_file(folder / "bundle" / "model.safetensors") for folder in (run, tmp_path / "new")
    )
    half = load_file(HALF_WAY / "checkpoints" / "step-000000033" / "tensors.safetensors")
    for name, tensor in new_weights.items():
        # The first half ran on another machine: weights differ, but much less than training changes them.
        change = float((tensor - half[f"average/model.{name}"]).abs().max())
        difference = (resumed_weights[name] - tensor).abs()
        if name.endswith("attn.qkv.bias"):  # the gradient of the key bias is only rounding, which AdamW amplifies
            difference[len(difference) // 3 : 2 * len(difference) // 3] = 0
        assert float(difference.max()) <= 1e-3 + 0.02 * change, name


def test_resume_uses_defaults_for_settings_newer_than_run(call, run):
    folder = run / "checkpoints" / "step-000000033"

    def remove_newer_settings(state):
        for part, name in (("recipe", "least_steps"), ("model", "wrap"), ("preprocess", "jpeg")):
            del state[part][name]
        del state["recipe"]["augment"]["erasing"]

    forge(folder, remove_newer_settings)
    done = call(*COMMAND, "--output", run, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "resuming after step 33 of 66" in done.stderr


def test_read_state_completes_state_of_older_version():
    recipe = Recipe.from_json(STATE["recipe"]).to_json()  # with the defaults of newer settings
    defaults = {
        "left_out": 0,
        "latest": None,
        "start": None,
        "losses": [],
        "waited": 0,
        "stopped": None,
        "rate_scale": 1.0,
        "corrections": "none",
    }
    model = read_model(STATE["model"]).to_document()
    assert read_state(STATE) == {**STATE, "recipe": recipe, "model": model, **defaults}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": {"unheard": 1}}, "Recipe has unknown fields: unheard."),
        ({"recipe": {"batch": 0}}, "Batch must be an integer from 1 to 1,000,000, got 0."),
        ({"model": None}, "Model must be a JSON object, got NoneType."),
    ],
)
def test_state_of_newer_version_raises_one_line_error(call, run, change, message):
    forge(run / "checkpoints" / "step-000000033", lambda state: {**state, **change})
    done = call(*COMMAND, "--output", run, "--resume", "auto")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line == f"vitrail: Checkpoint has a state that this version cannot read: {message}"


def test_resume_names_corrupt_checkpoint_and_uses_previous_one(call, run):
    folder = run / "checkpoints" / "step-000000033"
    shutil.copytree(folder, older := run / "checkpoints" / "step-000000022")
    forge(older, lambda state: {**state, "step": 22})
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(text.replace('"step": 33', '"step": 32'))
    done = call(*COMMAND, "--output", run, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert f"note: {str(folder / 'state.json')!r} is corrupt: its checksum is not the one recorded." in done.stderr
    assert "resuming after step 22 of 66" in done.stderr
    assert folder.with_name("damaged-step-000000033").is_dir()


def test_checkpoint_with_tensors_of_other_run_is_rejected(tmp_path):
    trainer = make_trainer()
    curve(trainer, 3)
    with RunLog(tmp_path, 20, writes=False) as log:
        save_trainer(trainer, tmp_path / "checkpoints", STATE, log)
    checkpoint = load_newest(tmp_path / "checkpoints")[0]
    name = "memory/model.blocks.0.mlp.fc1.bias/exp_avg"
    without = {other: array for other, array in checkpoint.arrays.items() if other != name}
    for arrays in (
        without,
        {**without, name: checkpoint.arrays[name][:1]},
        {**checkpoint.arrays, f"{name}.x": np.zeros(1)},
    ):
        with pytest.raises(
            CorruptFileError, match=rf"must have the tensors of this run, got different tensors, such as {name}"
        ):
            restore_trainer(make_trainer(), checkpoint._replace(arrays=arrays))


def test_run_with_only_skipped_steps_can_be_resumed(tmp_path):
    """Without a step, an optimiser has no state, and a checkpoint without state is valid."""
    recipe = Recipe(steps=20, batch=32, on_nonfinite="skip")
    trainer, again = make_trainer(recipe=recipe), make_trainer(recipe=recipe)
    trainer.step = trainer.skipped_steps = 4
    with RunLog(tmp_path, 20, writes=False) as log:
        save_trainer(trainer, tmp_path / "checkpoints", STATE, log)
    assert resume(again, tmp_path, {})[0].step == 4
    assert curve(again, 5) == curve(trainer, 5)


class Factored(torch.optim.Optimizer):
    """Optimiser that stores the mean square of each row and column instead of each number (arXiv 1804.04235)."""

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


def test_optimiser_state_of_other_shapes_is_restored(tmp_path):
    def make():
        trainer = make_trainer()
        trainer.optimisers = [Factored(trainer.objective.parameters())]
        for group in trainer.optimisers[0].param_groups:
            group["share"] = 1.0
        return trainer

    complete, first, second = make(), make(), make()
    expected = curve(complete, 12)
    assert curve(first, 7) == expected[:7]
    assert collect_arrays(first)["memory/model.blocks.0.attn.qkv.weight/rows"].shape == (144,)
    with RunLog(tmp_path, 20, writes=False) as log:
        save_trainer(first, tmp_path / "checkpoints", STATE, log)
    assert resume(second, tmp_path, {})[0].step == 7
    assert curve(second, 5) == expected[7:]
    # State that is not a tensor would be lost, so it is rejected before anything is written.
    second.optimisers[0].state[second.objective.model.head.bias]["calls"] = 7
    with RunLog(tmp_path, 20, writes=False) as log, pytest.raises(VitrailError, match="got calls of type int from Fac"):
        save_trainer(second, tmp_path / "checkpoints", STATE, log)


# Training further


def command_of(line):
    """Return the arguments of the command that a message ends with, to train for one more epoch."""
    words = shlex.split(line.partition("To train on: vitrail ")[2])
    return ["1" if word == "N" else word for word in words]


def draw_people(folder):
    for name in ("Ann", "Ben", "Cid", "Dee"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)).save(
                folder / name / f"{number}.png"
            )


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (["train", "digits"], "finetune new/bundle digits --epochs N --output NEW"),
        (
            ["train", "toys one/toys.csv", "--objective", "multilabel"],
            "finetune new/bundle 'toys one/toys.csv' --epochs N --output NEW --set objective=multilabel",
        ),
        (["faces", "train", "people"], "faces train DATA --from new/bundle --epochs N --output NEW"),
    ],
    ids=["classify", "multilabel", "margin"],
)
def test_resumed_finished_run_names_a_command_that_trains_on(call, tmp_path, monkeypatch, start, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toys one").mkdir()
    write_toys(tmp_path / "toys one", 20)
    draw_people(tmp_path / "people")
    arguments = [*start, "--model", "ViT-Pico/2", "--output", "new", "--steps", "2", "--batch", "8"]
    assert call(*arguments).returncode == 0
    before = (tmp_path / "new" / "bundle" / "model.safetensors").read_bytes()
    done = call(*arguments, "--resume", "auto")
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "resuming" in line]
    advice = f"To train on: vitrail {expected}"
    assert line == f"resuming after step 2 of 2; there are no more steps to train. {advice}"
    assert (tmp_path / "new" / "bundle" / "model.safetensors").read_bytes() == before
    done = call(*["people" if word == "DATA" else word for word in command_of(line)])
    assert done.returncode == 0, done.stderr
    provenance = json.loads((tmp_path / "NEW" / "bundle" / "provenance.json").read_text())
    assert provenance["finetuned_from"]["bundle"] == "new/bundle"
    assert provenance["steps"] > 0


@pytest.mark.parametrize(
    ("length", "difference"), [(("--epochs", "9"), "epochs 9"), (("--minutes", "3"), "minutes 3.0")]
)
def test_longer_resume_names_the_command_that_trains_on(call, run, length, difference):
    started = [word for word in COMMAND if word not in ("--epochs", "6")]
    done = call(*started, *length, "--output", run, "--resume", "auto")
    assert (done.returncode, done.stderr) == (
        2,
        f"vitrail: Resumed run must have the length that it started with, got {difference} after epochs 6. To train on"
        f" after its end: vitrail finetune {run}/bundle digits --epochs N --output NEW\n",
    )
    assert not (run / "bundle").exists()


def test_resume_with_other_length_and_setting_names_both(call, run):
    changed = ["9" if word == "6" else "batch=64" if word == "batch=128" else word for word in COMMAND]
    done = call(*changed, "--output", run, "--resume", "auto")
    assert (done.returncode, done.stderr) == (
        2,
        "vitrail: Resumed run must have the recipe that it started with, got batch 64 after 128; epochs 9 after 6."
        " Choose another output folder to start a new run.\n",
    )


def test_run_without_classes_is_trained_longer_in_a_new_run(call, tmp_path):
    arguments = ["train", "digits", "--model", "ViT-Pico/2", "--objective", "masked", "--steps", "1", "--batch", "8"]
    arguments += ["--output", tmp_path / "run"]
    assert call(*arguments).returncode == 0
    done = call(*arguments, "--resume", "auto")
    assert done.returncode == 0
    assert (
        "resuming after step 1 of 1; there are no more steps to train. To train longer, start a new run with more"
        " --epochs or --steps in another output folder.\n"
    ) in done.stderr
