"""Runs that older versions began and that were killed: they go on, now and for ever."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from test_reliability import events
from vitrail.storage import MANIFEST, _write_manifest

FIXTURE = Path(__file__).parent / "fixtures" / "run-half-way"
"""The first 33 of 66 steps, written by version 0.1.0.dev0 and ended by SIGKILL."""

COMMAND = (
    "train", "digits", "--model", "ViT-Pico/2", "--epochs", "6", "--threads", "1", "--set", "batch=128",
    "optimiser=muon", "learning_rate=0.01", "average=0.9", "augment.padding=1", "augment.mixup=0.2", "model.width=16",
    "model.depth=2", "model.heads=2", "model.mlp=32", "model.dropout=0.1", "model.position=learned-2d",
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_of_version_0_1_goes_on_to_the_weights_of_one_that_was_never_killed(call, run, tmp_path):
    done = call(*COMMAND, "--output", run, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "going on after step 33 of 66" in done.stderr
    (resumed,) = events(run, "resume")
    assert (resumed["step"], events(run, "end")[0]["step"]) == (33, 66)
    assert call(*COMMAND, "--output", tmp_path / "anew").returncode == 0
    ours, anew = (load_file(folder / "bundle" / "model.safetensors") for folder in (run, tmp_path / "anew"))
    half = load_file(FIXTURE / "checkpoints" / "step-000000033" / "tensors.safetensors")
    for name, tensor in anew.items():
        # The first half ran on another machine: not the same bits, but far nearer than the second half moved them.
        way = float((tensor - half[f"average/model.{name}"]).abs().max())
        assert float((ours[name] - tensor).abs().max()) <= 1e-3 + 0.02 * way, name


def test_a_setting_that_is_newer_than_the_run_takes_its_default(call, run):
    folder = run / "checkpoints" / "step-000000033"
    state = json.loads((folder / "state.json").read_text())
    for part, name in (("recipe", "least_steps"), ("model", "wrap"), ("preprocess", "jpeg")):
        del state[part][name]
    del state["recipe"]["augment"]["erasing"]
    (folder / "state.json").write_text(json.dumps(state))
    (folder / MANIFEST).unlink()
    _write_manifest(folder)
    done = call(*COMMAND, "--output", run, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "going on after step 33 of 66" in done.stderr
