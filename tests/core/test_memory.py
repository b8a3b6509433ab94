"""Memory checks before training, and one-line errors for failed allocations."""

import re
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.processes import run_function
from vitrail.api.commands import COMMANDS, Command
from vitrail.api.parameters import command
from vitrail.cli import main
from vitrail.core import memory
from vitrail.core.errors import OutOfMemoryError
from vitrail.training import memory_estimate


def limit_memory(size):
    """Limit the address space of this process to `size` more bytes than now, with what importing torch has mapped."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + int(size)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_in_memory(size, *arguments):
    limit_memory(size)
    main(list(arguments))


def print_available_memory(size):
    limit_memory(size)
    sys.stdout.write(f"{memory.available_memory()}\n")


LARGE = ("--model", "ViT-Micro/4", "--set", "model.resolution=32", "holdout=0", "--steps", "1", "--workers", "0")


def run_limited(size, *words):
    return run_function(run_in_memory, size, *map(str, words))


def test_train_rejects_a_batch_larger_than_memory_and_suggests_a_smaller_one(tmp_path):
    arguments = ("train", "digits", *LARGE, "--output", tmp_path / "run")
    done = run_limited(4e8, *arguments, "--batch", "1024")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert not (tmp_path / "run").exists()
    numbers = re.search(r"1,024 images at a time needs ([\d.]+) GB, got ([\d.]+) GB available\.", done.stderr)
    assert float(numbers[1]) > float(numbers[2])
    assert re.search(r"Use --batch \d+ or --set accumulate=\d+ \([\d.]+ .B\)", done.stderr)
    batch = re.search(r"--batch (\d+)", done.stderr)[1]
    done = run_limited(4e8, *arguments, "--batch", batch)
    assert done.returncode == 0, done.stderr


def test_model_larger_than_memory_is_rejected_before_it_is_built(tmp_path):
    done = run_limited(2e8, "train", "digits", "--model", "ViT-L/16", "--output", tmp_path / "run", "--steps", "1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert re.match(r"vitrail: Model ViT-L/16 must fit into memory: it needs 1\.2 GB, got", done.stderr)


def test_available_memory_respects_limits_of_process_and_control_groups(tmp_path):
    done = run_function(print_available_memory, 2**28)
    assert 2**27 < int(done.stdout) <= 2**28

    (tmp_path / "job" / "step").mkdir(parents=True)
    for folder, limit, used in (("", "max", 900), ("job", "1000", 400), ("job/step", "max", 100)):
        (tmp_path / folder / "memory.max").write_text(limit)
        (tmp_path / folder / "memory.current").write_text(str(used))
        (tmp_path / folder / "memory.stat").write_text("anon 5\ninactive_file 50\n")
    (tmp_path / "groups").write_text("0::/job/step\n")
    assert list(memory._free_of_cgroups(tmp_path / "groups", tmp_path)) == [650]

    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("500")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("100")
    (tmp_path / "memory" / "memory.stat").write_text("total_inactive_file 10\n")
    (tmp_path / "groups").write_text("4:memory:/elsewhere\n3:cpu:/\n")
    assert list(memory._free_of_cgroups(tmp_path / "groups", tmp_path)) == [410]


FAILURES = {
    "torch": lambda: torch.empty(2**58),
    "numpy": lambda: np.empty(2**58),
    "python": lambda: bytearray(2**60),
}


@pytest.mark.parametrize("library", FAILURES)
@pytest.mark.parametrize("name", ["predict", "evaluate", "inspect"])
def test_a_failed_allocation_is_one_line(name, library, monkeypatch, capsys):
    @command
    def allocate() -> None:
        """Allocate more than any machine has."""
        FAILURES[library]()

    monkeypatch.setitem(COMMANDS, name, Command(allocate, lambda result, given: None))
    with pytest.raises(SystemExit, match="1"):
        main([name])
    line = capsys.readouterr().err
    assert line.startswith(f"vitrail: Memory must be enough for `vitrail {name}`: ")
    assert "could not be allocated" in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.79 GiB",
        "MPS backend out of memory (MPS allocated: 9.05 GiB)",
        "libtorch_cpu.so: failed to map segment from shared object",
    ],
)
def test_allocation_failures_of_devices_and_libraries_are_recognised(text):
    assert memory.is_allocation_failure(RuntimeError(text))
    assert not memory.is_allocation_failure(RuntimeError("shapes cannot be multiplied"))
    assert "could not be allocated" in memory.describe_allocation_failure(RuntimeError(text))


def test_failed_allocation_in_training_gives_advice():
    with pytest.raises(OutOfMemoryError, match=r"images at a time: .* Start a new run with --batch 8, --set accum"):
        vitrail.train("digits", "ViT-Pico/2", steps=2, batch=16, callback=lambda step: torch.empty(2**58))


def test_a_run_without_steps_needs_no_memory_for_one(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_estimate, "available_memory", lambda: 3_000_000)
    with pytest.raises(OutOfMemoryError, match="Batch must fit into memory"):
        vitrail.finetune("fashion", "digits", steps=1, output=tmp_path / "run")
    assert vitrail.finetune("fashion", "digits", recipe="frozen", output=tmp_path / "head").steps == 0


def test_failed_allocation_during_speed_measurement_gives_advice(monkeypatch):
    def fail(trainer, batch, stop=None):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("vitrail.training.loop.Trainer.update", fail)
    with pytest.raises(OutOfMemoryError, match="Start a new run with --batch 32"):
        vitrail.finetune("fashion", "digits", minutes=0.2)


def test_small_runs_are_not_measured(monkeypatch):
    monkeypatch.setattr(memory_estimate, "_measure_footprint", lambda *_: pytest.fail("measured"))
    assert vitrail.train("digits", "ViT-Pico/2", steps=1, batch=128).steps == 1


@pytest.mark.parametrize("settings", [{"model.norm": "batch"}, {"model.dropout": 0.1, "optimiser": "muon"}], ids=str)
def test_measuring_memory_gives_identical_weights(settings, monkeypatch):
    footprints = []
    plain = vitrail.train("digits", "ViT-Pico/2", steps=3, batch=16, settings=settings)
    measure = memory_estimate._measure_footprint
    monkeypatch.setattr(memory_estimate, "_NEGLIGIBLE_SHARE", 0)
    monkeypatch.setattr(
        memory_estimate,
        "_measure_footprint",
        lambda *arguments: footprints.append(measure(*arguments)) or footprints[-1],
    )
    other = vitrail.train("digits", "ViT-Pico/2", steps=3, batch=16, settings=settings)
    (footprint,) = footprints
    assert footprint.fixed > 4 * plain.bundle.model.config.parameters
    assert footprint.image > 0
    tensors = other.bundle.model.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in plain.bundle.model.state_dict().items())


@pytest.mark.parametrize(
    "name", ["ViT-Nano/7", "Hybrid-Nano", "ResNet-Nano", "Mixer-Nano/7", "LSTM-Nano/7", "MLP-Nano"]
)
def test_macs_are_an_upper_bound_of_activation_memory(name, monkeypatch):
    """Small runs are not measured by this rule."""
    footprints = []
    monkeypatch.setattr(memory_estimate, "_NEGLIGIBLE_SHARE", 0)
    measure = memory_estimate._measure_footprint
    monkeypatch.setattr(
        memory_estimate,
        "_measure_footprint",
        lambda *arguments: footprints.append(measure(*arguments)) or footprints[-1],
    )
    model = vitrail.train("digits", name, steps=1, batch=8, settings={"model.resolution": 28}).bundle.model
    assert footprints[0].image < model.config.macs
