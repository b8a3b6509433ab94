"""Training in bfloat16: the setting and its alias, the speed measurement, and exact resuming."""

import re

import pytest
import torch

import vitrail
from tests.training.runs import train
from tests.training.test_loop import curve, make_trainer
from tests.training.test_stop import RECIPE, events, small_data, weights  # noqa: F401
from vitrail.core.errors import UsageError
from vitrail.training import run as running
from vitrail.training.checkpoint import load_newest
from vitrail.training.options import Options
from vitrail.training.precision import describe_bfloat16_speed

NOTE = r"a step in bfloat16 is \d+\.\dx (as fast as|slower than) in float32 on this machine \(measured on \d+ images\)"
SHORT = RECIPE.replace(epochs=2, patience=None)


def train_briefly(data, output, **more):
    options = more.pop("options", Options(workers=0, precision="bfloat16"))
    return train(data, "ViT-Pico/2", output, SHORT, options, quiet=True, **more)


def test_amp_and_bfloat16_are_the_same_setting():
    assert Options(amp=True) == Options(precision="bfloat16") == Options(amp=True, precision="bfloat16")
    assert (Options().precision, Options().amp) == ("float32", False)
    with pytest.raises(UsageError, match="Precision must be one of float32, bfloat16, got 'int8'"):
        Options(precision="int8")  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize("name", ["ViT-Pico/2", "ResNet-Pico"])
def test_speed_measurement_preserves_weights_gradients_and_rng(name):
    trainer = make_trainer(name)
    before = {name: tensor.clone() for name, tensor in trainer.objective.state_dict().items()}
    random_state = torch.get_rng_state()
    assert re.fullmatch(NOTE + r"(; omit --precision to train in float32)?", describe_bfloat16_speed(trainer))
    after = trainer.objective.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in trainer.objective.parameters())


def test_speed_measurement_and_resume_give_identical_weights(small_data, tmp_path, monkeypatch, capsys):  # noqa: F811
    def fail(step):
        if step.step == 4:
            raise LookupError

    train_briefly(small_data, tmp_path / "complete", options=Options(workers=0, amp=True))
    with pytest.raises(LookupError):
        train_briefly(small_data, tmp_path / "cut", callback=fail)
    train_briefly(small_data, tmp_path / "cut", resumes=True)
    assert events(tmp_path / "cut", "resume")[0]["exact"] is True
    assert load_newest(tmp_path / "cut" / "checkpoints")[0].state["amp"] is True
    monkeypatch.setattr(running, "describe_bfloat16_speed", lambda trainer: "not measured")
    train_briefly(small_data, tmp_path / "unmeasured")
    assert weights(tmp_path / "complete") == weights(tmp_path / "cut") == weights(tmp_path / "unmeasured")
    train_briefly(small_data, tmp_path / "plain", options=Options(workers=0))
    assert weights(tmp_path / "plain") != weights(tmp_path / "complete")


def test_bfloat16_losses_equal_float32_up_to_rounding():
    """Compare a few steps of a tiny model. Effects on accuracy can only be measured on hardware with bfloat16."""
    plain, lower = make_trainer(), make_trainer()
    lower.options = Options(workers=0, precision="bfloat16")
    expected, losses = (torch.tensor(curve(trainer, 8)) for trainer in (plain, lower))
    assert expected.std() > 0.01
    assert 0 < (losses - expected).abs().max() < 0.003


def test_run_prints_bfloat16_speed_once(tmp_path, capsys):
    vitrail.train("digits", "ViT-Pico/2", steps=1, amp=True, workers=0, quiet=False, output=tmp_path / "run")
    assert len(re.findall(f"note: {NOTE}", capsys.readouterr().err)) == 1
