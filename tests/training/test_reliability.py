"""Reliability of training: the numbered proofs R1 to R11 on real runs (R2 and parts of R4 in test_checkpoint.py)."""

import contextlib
import hashlib
import html.parser
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitrail
from tests.processes import run_function, start_function, start_vitrail
from tests.training.runs import train
from tests.training.test_loop import EYE, STATE, curve, make_trainer
from vitrail.cli import main
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.data.sources.registry import open_data
from vitrail.reports.run_report import read_events
from vitrail.training import ranks as training_ranks
from vitrail.training.checkpoint import list_steps, load_newest
from vitrail.training.loop import Trainer
from vitrail.training.objectives import judgement
from vitrail.training.options import Options
from vitrail.training.ranks import Ranks, join_ranks
from vitrail.training.recipe import Recipe, find_recipe
from vitrail.training.resume import resume
from vitrail.training.run_log import RunLog
from vitrail.training.stop import StopSignal
from vitrail.training.trainer_checkpoint import save_trainer

QUICK = (
    "digits",
    "--model",
    "ViT-Pico/2",
    "--steps",
    "120",
    "--checkpoint-seconds",
    "0.2",
    "--set",
    "batch=64",
    "augment.padding=1",
    "augment.mixup=0.2",
    "model.dropout=0.1",
    "average=0.99",
)


def command(output, *more, ranks=1, settings=()):
    start = [sys.executable, "-m", "vitrail"]
    if ranks > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port"]
        start = [*torchrun, str(random.randrange(20_000, 60_000)), "-m", "vitrail"]
    overridden = {setting.partition("=")[0] for setting in settings}  # a setting may be given only once
    defaults = [word for word in QUICK if word.partition("=")[0] not in overridden]
    return [*start, "train", *defaults, *settings, "--output", str(output), *more]


def start(output, *more, ranks=1, settings=()):
    arguments = command(output, *more, ranks=ranks, settings=settings)
    if ranks == 1:
        return start_vitrail(*arguments[3:])
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def fingerprint(output):
    return hashlib.sha256((Path(output) / "bundle" / "model.safetensors").read_bytes()).hexdigest()


def events(output, kind=None):
    lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if kind is None or event["event"] == kind]


def wait_for_step(process, output, step):
    """Wait until the run has logged a step, or has ended."""
    while process.poll() is None:
        path = Path(output) / "metrics.jsonl"
        if path.exists() and any(event["step"] >= step for event in events(output, "step")):
            return
        time.sleep(0.01)


def wait_for_more_steps(process, output, lines, before):
    """Wait until the process has logged `lines` steps after the first `before` bytes of the log, or has ended."""
    path = Path(output) / "metrics.jsonl"
    while process.poll() is None:
        if path.exists() and path.read_bytes()[before:].count(b'"event": "step"') >= lines:
            return
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the folder of a run that was not interrupted."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    process = start(output)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "test accuracy" in out
    assert sorted(path.name for path in output.iterdir() if "tfevents" not in path.name) == [
        ".lock",
        "answers.npz",
        "bundle",
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "report.html",
    ]
    return output


# R1


@pytest.mark.parametrize(
    "kills", [pytest.param(2, id="2 kills"), pytest.param(20, id="20 kills", marks=pytest.mark.slow)]
)
def test_r1_resume_after_random_sigkills_gives_identical_weights(undisturbed, tmp_path, kills):
    output = tmp_path / "run"
    path = output / "metrics.jsonl"
    rng = random.Random(kills)
    killed = resumed = 0
    while True:
        before = path.stat().st_size if path.exists() else 0
        process = start(output, "--resume", "auto")
        if killed < kills:
            # Kill after at least 30 steps, so that each process has trained and saved.
            wait_for_more_steps(process, output, 3 + rng.randrange(3), before)
            time.sleep(rng.random() * 0.2)
            process.kill()
        _, err = process.communicate()
        killed += process.returncode == -signal.SIGKILL
        resumed += "resuming after step" in err
        if process.returncode == 0:
            assert fingerprint(output) == fingerprint(undisturbed)
            assert all(event["step"] > 0 and event["exact"] for event in events(output, "resume"))
            if killed >= kills:
                break
            shutil.rmtree(output)  # the run ended before it was killed often enough: start again
        else:
            assert process.returncode == -signal.SIGKILL, err
    assert resumed >= kills // 2


# R3


def test_r3_full_disk_loses_one_checkpoint_and_run_continues(tmp_path, capsys):
    trainer = make_trainer(total=30)
    output = tmp_path / "run"
    (output / "checkpoints").mkdir(parents=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with RunLog(output, 30, writes=True) as log:
            curve(trainer, 5)
            save_trainer(trainer, output / "checkpoints", STATE, log)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
            curve(trainer, 5)
            save_trainer(trainer, output / "checkpoints", STATE, log)
            with pytest.raises(VitrailError, match=r"step-000000010.* of \d+,\d+.* bytes cannot be written"):
                save_trainer(trainer, output / "checkpoints", STATE, log, required=True)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            newest, errors = load_newest(output / "checkpoints")
            assert (newest.step, errors) == (5, {})
            save_trainer(trainer, output / "checkpoints", STATE, log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list_steps(output / "checkpoints") == [5, 10]
    (failed,) = events(output, "checkpoint-failed")
    assert failed["step"] == 10
    assert "Training continues; the last intact checkpoint is of step 5." in capsys.readouterr().err


def test_r3_full_disk_loses_log_lines_and_run_continues(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with RunLog(tmp_path, 3, writes=True) as log:
        log.write("step", step=1, loss=1.0)
        log.write("step", step=2, loss=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("warning: metrics.jsonl cannot be written (No space left on device)")
    assert lines[1:] == ["warning: 2 lines of metrics.jsonl could not be written"]


def test_incomplete_last_line_does_not_corrupt_next_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    step = {"event": "step", "step": 1, "loss": 2.0, "learning_rate": 1e-3, "images_per_second": 9.5}
    path.write_bytes(json.dumps(step).encode() + b'\n5\n\xff\n{"event": "st')
    with RunLog(tmp_path, 3, writes=True) as log:
        log.write("resume", step=1, exact=True)
    assert [event["event"] for event in read_events(path)] == ["step", "resume"]


def test_read_events_drops_invalid_events(tmp_path):
    events = [
        {"event": "step", "step": 1, "loss": None, "learning_rate": 1e-3, "images_per_second": 9.5},
        {"event": "evaluate", "step": 1, "loss": 1.0, "accuracy": 0.5, "count": 3},
        {"event": "probe", "step": 0, "accuracy": 0.5, "count": 3},
        {"event": "resume"},
    ]
    invalid_values = (None, "x", True, [], {}, 10**400, float("nan"))
    fields = {
        "step": ("step", "learning_rate", "images_per_second", "loss"),
        "evaluate": ("step", "count", "loss"),
        "probe": ("accuracy", "count"),
    }
    path = tmp_path / "metrics.jsonl"
    for event in events[:3]:
        for name in fields[event["event"]]:
            forged = [
                {**event, name: value} for value in invalid_values if value is not None or name in ("step", "count")
            ]
            forged.append({key: event[key] for key in event if key != name})
            path.write_text("".join(json.dumps(line) + "\n" for line in (*events, *forged, {"event": []}, [], None)))
            assert read_events(path) == events


# R4


def test_r4_corrupt_checkpoints_do_not_count_as_kept_ones(tmp_path):
    trainer = make_trainer(total=30)
    folder = tmp_path / "checkpoints"
    with RunLog(tmp_path, 30, writes=False) as log:
        for _ in range(3):
            curve(trainer, 5)
            save_trainer(trainer, folder, STATE, log)
        trainer.options = Options(keep=1)
        assert list_steps(folder) == [10, 15]
        (folder / "step-000000015" / "tensors.safetensors").write_bytes(b"")
        again = make_trainer(total=30)
        checkpoint, notes = resume(again, tmp_path, {})
        assert (checkpoint.step, len(notes)) == (10, 1)
        again.options = Options(keep=1)
        curve(again, 2)
        save_trainer(again, folder, STATE, log)
    newest, errors = load_newest(folder)
    assert (newest.step, errors) == (12, {})
    assert (folder / "damaged-step-000000015").is_dir()


def test_r4_resume_falls_back_to_older_checkpoint_with_note(call, undisturbed, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(undisturbed, output)
    steps = list_steps(output / "checkpoints")
    path = output / "checkpoints" / f"step-{steps[-1]:09d}" / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    process = start(output, "--resume", "auto")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert f"note: {str(path)!r} is corrupt" in err
    assert f"resuming after step {steps[-2]}" in err
    assert fingerprint(output) == fingerprint(undisturbed)
    for step in list_steps(output / "checkpoints"):
        shutil.copy(__file__, output / "checkpoints" / f"step-{step:09d}" / "tensors.safetensors")
    done = call("train", *QUICK, "--output", output, "--resume", "auto")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "No checkpoint" in done.stderr


# R5


def test_r5_unwritable_output_is_rejected_before_any_work(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("x")
    (tmp_path / "foreign" / "config.toml").write_text("title = 'mine'")
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "away")
    for output, more in (
        (tmp_path / "file", ()),
        (tmp_path / "file" / "run", ()),
        ("/proc/run", ()),
        (tmp_path / "foreign", ()),
        (tmp_path / "foreign", ("--force",)),
        (tmp_path / "foreign", ("--resume", "auto")),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(["train", *QUICK, "--output", str(output), *more])
        message = capsys.readouterr().err
        assert exit_info.value.code == 2, (output, message)
        assert len(message.strip().splitlines()) == 1
    assert (tmp_path / "foreign" / "thesis.txt").read_text() == "x"


def test_r5_existing_run_is_rejected_unless_forced_or_resumed_unchanged(call, undisturbed, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(undisturbed, output)
    assert call("train", *QUICK, "--output", output).returncode == 2
    done = call("train", *QUICK, "--output", output, "--resume", "auto", "--seed", "1")
    assert done.returncode == 2
    assert "seed that it started with, got 1 after 0" in done.stderr
    before = fingerprint(output)
    process = start(output, "--resume", "auto")  # a complete run stays unchanged
    process.communicate()
    assert (process.returncode, fingerprint(output)) == (0, before)


def test_run_killed_before_first_checkpoint_starts_from_scratch(undisturbed, tmp_path):
    output = tmp_path / "run"
    for leaves in (".config.toml.writing", "config.toml"):
        output.mkdir(exist_ok=True)
        if leaves == "config.toml":
            shutil.copy(undisturbed / "config.toml", output)
        else:
            (output / leaves).write_text("# vit")
        recipe = Recipe(steps=2, batch=32, learning_rate=0.004)
        train("digits", "ViT-Pico/2", output, recipe, Options(seed=7), resumes=True)
        written = tomllib.loads((output / "config.toml").read_text())
        assert (written["seed"], written["steps"], written["learning_rate"]) == (7, 2, 0.004)
        shutil.rmtree(output)


def test_ranks_with_different_folders_are_rejected(undisturbed):
    class SeparateRanks(Ranks):
        def gather(self, value):
            return [value, 0]

    recipe = find_recipe("small").with_length(epochs=None, steps=120, minutes=None)
    trainer = make_trainer(recipe=recipe.replace(average=0.99))
    trainer.ranks = SeparateRanks()
    with pytest.raises(UsageError, match="one folder that all ranks see, got checkpoints of steps 120, 0"):
        resume(trainer, undisturbed, {})


def test_changed_threads_and_precision_are_noted_on_resume(undisturbed, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(undisturbed, output)
    shutil.rmtree(output / "checkpoints" / f"step-{list_steps(output / 'checkpoints')[-1]:09d}")
    process = start(output, "--resume", "auto", "--threads", "2", "--amp")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "note: threads is 2 after 1: the last bits" in err
    assert "note: amp is True after False" in err
    assert events(output, "resume")[-1]["exact"] is False
    assert "under other conditions" in (output / "report.html").read_text()


def run_with_signal_after_last_step(*arguments):
    def predict_split(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    judgement.predict_split = predict_split
    main(list(arguments))


def test_sigterm_after_last_step_ends_run(tmp_path):
    arguments = ["train", "digits", "--model", "ViT-Pico/2", "--steps", "2", "--output", str(tmp_path / "run")]
    done = run_function(run_with_signal_after_last_step, *arguments)
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr


def run_until_terminal_is_closed(handler, *arguments):
    def update(trainer, *batch):
        if trainer.step == 1:
            os.kill(os.getpid(), signal.SIGHUP)
        return original_update(trainer, *batch)

    original_update, Trainer.update = Trainer.update, update
    signal.signal(signal.SIGHUP, handler)
    main(list(arguments))


@pytest.mark.parametrize(
    ("handler", "code", "steps"),
    [pytest.param(signal.SIG_DFL, 129, 2, id="terminal"), pytest.param(signal.SIG_IGN, 0, 4, id="nohup")],
)
def test_sighup_ends_run_with_checkpoint_unless_ignored_by_nohup(tmp_path, handler, code, steps):
    arguments = ["train", "digits", "--model", "ViT-Pico/2", "--steps", "4", "--output", str(tmp_path / "run")]
    done = run_function(run_until_terminal_is_closed, handler, *arguments)
    assert done.returncode == code, done.stderr
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == steps


# R6, R7, R8


def workers_of(process):
    """Return the ids of the processes that torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"vitrail" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
    ],
)
def test_r6_signal_ends_run_after_complete_step_with_checkpoint(undisturbed, tmp_path, number, ranks):
    output = tmp_path / "run"
    process = start(output, ranks=ranks)
    wait_for_step(process, output, 30)
    sent = time.monotonic()
    # One rank receives the signal, and all ranks stop.
    os.kill(process.pid if ranks == 1 else workers_of(process)[-1], number)
    _, err = process.communicate()
    assert time.monotonic() - sent < 10
    if ranks == 2:
        assert re.search(rf"exitcode\W+{128 + number}\b", err), err
    else:
        assert process.returncode == 128 + number
        assert err.strip().splitlines()[-1].startswith(f"vitrail: stopped by {signal.Signals(number).name} after step")
    (stopped,) = events(output, "stop")
    assert list_steps(output / "checkpoints")[-1] == stopped["step"]
    process = start(output, "--resume", "auto", ranks=ranks)
    process.communicate()
    assert process.returncode == 0
    assert events(output, "resume")[0]["step"] == stopped["step"]
    if ranks == 1:
        assert fingerprint(output) == fingerprint(undisturbed)


def run_with_patience(patience, *arguments):
    training_ranks._SIGTERM_TIMEOUT = patience
    main(list(arguments))


def wait_for_listener(process, port):
    """Wait until the first rank listens for the others, or has ended."""
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.01)


@pytest.mark.parametrize("patience", [1.0, pytest.param(25.0, marks=pytest.mark.slow)])
def test_waiting_rank_ends_soon_after_sigterm(tmp_path, patience):
    """The rank waits in `init_process_group`, where signal handlers of Python do not run."""
    port = free_port()
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = ["train", *QUICK, "--output", str(tmp_path / "run")]
    process = start_function(run_with_patience, patience, *arguments, environment={**os.environ, **environment})
    wait_for_listener(process, port)
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err.splitlines()[-1] == (
        "vitrail: stopped by SIGTERM while waiting for other ranks; continue with --resume auto"
    )
    assert patience <= time.monotonic() - sent < min(patience + 5, 30)


def test_join_ranks_waits_for_threads_before_exit(monkeypatch):
    """Threads of gloo need the GIL after the last collective; if the interpreter exits meanwhile, it aborts."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("vitrail.training.ranks._connect", lambda backend: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    thread = threading.Thread(target=time.sleep, args=(0.3,))
    with join_ranks("cpu"):
        thread.start()
    assert not thread.is_alive()


def free_port():
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        return free_socket.getsockname()[1]


@pytest.mark.slow
def test_rank_inside_collective_ends_soon_after_sigterm(tmp_path):
    """The other rank is stopped: it neither responds nor closes its connection."""
    process = start(tmp_path / "run", ranks=2)
    wait_for_step(process, tmp_path / "run", 10)
    first, second = workers_of(process)
    os.kill(second, signal.SIGSTOP)
    time.sleep(1)
    sent = time.monotonic()
    os.kill(first, signal.SIGTERM)
    while is_alive(first):
        time.sleep(0.05)
    assert 20 < time.monotonic() - sent < 30
    os.kill(second, signal.SIGKILL)
    _, err = process.communicate()
    assert re.search(r"exitcode\W+143\b", err), err


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def undisturbed_pair(tmp_path_factory):
    """Return the folder of a run with two ranks that was not interrupted."""
    output = tmp_path_factory.mktemp("quiet") / "run"
    process = start(output, ranks=2)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return output


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_r7_restart_after_killed_rank_gives_identical_weights(undisturbed_pair, tmp_path, trial):
    """Kill a random rank at a random time; in every fourth trial, while the ranks are still connecting."""
    output, rng = tmp_path / "run", random.Random(trial)
    arguments = command(output, "--resume", "auto", ranks=2)
    arguments.insert(arguments.index("--nproc-per-node"), "--max-restarts=3")
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if is_early := trial % 4 == 3:
        while len(workers_of(process)) < 2:
            time.sleep(0.05)
        time.sleep(2 + 3 * rng.random())
    else:
        wait_for_step(process, output, 10 + rng.randrange(60))
        time.sleep(rng.random() * 0.2)
    killed, survivor = rng.sample(workers_of(process), 2)
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()
    while is_alive(survivor):
        assert time.monotonic() - began < 30
        time.sleep(0.05)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert is_early or len(events(output, "resume")) == 1
    assert fingerprint(output) == fingerprint(undisturbed_pair)


@pytest.mark.slow
def test_r8_changing_number_of_ranks_gives_same_weights_up_to_rounding(tmp_path, capsys):
    """Samples and pixels of every step are equal (tests/data/test_loader.py); weights differ by the order of sums.

    Dropout is off, because it is drawn for each rank. The optimiser is SGD, because AdamW and Muon divide by the norm
    of gradients, which amplifies rounding errors.
    """
    output, alone = tmp_path / "run", tmp_path / "alone"
    plain = ("model.dropout=0", "optimiser=sgd", "learning_rate=0.1")
    for folder, ranks, stop_at in ((alone, 1, None), (output, 1, 30), (output, 2, 70), (output, 1, None)):
        process = start(folder, "--resume", "auto", ranks=ranks, settings=plain)
        if stop_at:
            wait_for_step(process, folder, stop_at)
            process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
        assert stop_at or process.returncode == 0, err
    assert "ranks is 1 after 2" in err
    ours, theirs = (load_file(path / "bundle" / "model.safetensors") for path in (output, alone))
    difference = max((ours[name] - theirs[name]).abs().max().item() for name in theirs)
    with capsys.disabled():
        print(f" [largest difference of a weight: {difference:.1e}]", end="")  # noqa: T201
    assert 0 < difference < 1e-5


# R9


def write_photos(folder, count=24):
    rng = np.random.default_rng(0)
    for index in range(count):
        path = folder / "ab"[index % 2] / f"{index:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return folder


def test_r9_corrupt_images_follow_policy_and_are_recorded(call, tmp_path, monkeypatch):
    folder = write_photos(tmp_path / "data")
    for index in (4, 11):
        (folder / "ab"[index % 2] / f"{index:02d}.png").write_bytes(b"not a picture")
    recipe = Recipe(epochs=1, batch=8, holdout=0.0, preprocess={"crop_fraction": 1.0})
    settings = {"options": Options(workers=1), "model": "ViT-Pico/2"}
    with pytest.raises(CorruptFileError, match=r"(04|11)\.png. cannot be decoded \([^)]*\)\.$"):
        train(str(folder), output=tmp_path / "error", recipe=recipe, **settings)
    done = call("train", folder, "--model", "ViT-Pico/2", "--epochs", "1", "--output", tmp_path / "command")
    assert (done.returncode, "`--set on_damage=skip` trains without them." in done.stderr) == (1, True)
    for policy in ("skip", "substitute"):
        output = tmp_path / policy
        train(str(folder), output=output, recipe=recipe.replace(on_damage=policy), **settings)
        provenance = json.loads((output / "bundle" / "provenance.json").read_text())
        names = {Path(path).name for path in provenance["damaged"]["files"]}
        assert names == {Path(event["file"]).name for event in events(output, "damaged")} == {"04.png", "11.png"}
        assert provenance["damaged"]["policy"] == policy
        assert "04.png" in (output / "report.html").read_text()


def test_r9_checkpoints_within_an_epoch_store_corrupt_images(tmp_path):
    folder = write_photos(tmp_path / "data")
    for index in range(24):
        if index not in (3, 6, 9, 12):
            (folder / "ab"[index % 2] / f"{index:02d}.png").write_bytes(b"not a picture")
    recipe = Recipe(epochs=2, batch=4, holdout=0.0, on_damage="skip", preprocess={"crop_fraction": 1.0})
    output = tmp_path / "run"

    class SignalInThirdStep(StopSignal):
        """Stop signal that reports SIGTERM in the third step."""

        steps = 0

        def __init__(self):
            self._signal = 0

        @property
        def signal(self):
            type(self).steps += 1
            return signal.SIGTERM if type(self).steps == 3 else 0

        @signal.setter
        def signal(self, value):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.training.run.StopSignal", SignalInThirdStep)
        with pytest.raises(VitrailError, match="stopped by SIGTERM after step 3"):
            train(str(folder), "ViT-Pico/2", output, recipe, Options(workers=0))
    state = load_newest(output / "checkpoints")[0].state
    assert len(state["damaged"]) >= 8
    train(str(folder), "ViT-Pico/2", output, recipe, Options(workers=0), resumes=True)
    provenance = json.loads((output / "bundle" / "provenance.json").read_text())
    assert len(provenance["damaged"]["files"]) == 20


def test_r9_evaluation_skips_corrupt_images_without_substitutes(tmp_path):
    folder = tmp_path / "data"
    write_photos(folder / "train")
    write_photos(folder / "test", count=8)
    for index in (2, 5):
        (folder / "test" / "ab"[index % 2] / f"{index:02d}.png").write_bytes(b"not a picture")
    recipe = Recipe(epochs=1, batch=8, holdout=0.0, on_damage="substitute", preprocess={"crop_fraction": 1.0})
    train(str(folder), "ViT-Pico/2", tmp_path / "run", recipe, Options(workers=0))
    assert events(tmp_path / "run", "final")[0]["count"] == 6


def test_r9_data_without_readable_images_raises(tmp_path):
    folder = write_photos(tmp_path / "data")
    for path in folder.glob("*/*.png"):
        path.write_bytes(b"not a picture")
    recipe = Recipe(epochs=1, batch=8, holdout=0.0, on_damage="skip", preprocess={"crop_fraction": 1.0})
    with pytest.raises(CorruptFileError, match="No image of train can be read"):
        train(str(folder), "ViT-Pico/2", tmp_path / "run", recipe, Options(workers=0))


# R10


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_r10_nonfinite_loss_stops_run_or_skips_step(tmp_path, policy):
    data = open_data("digits").splits
    recipe = Recipe(steps=40, batch=64, on_nonfinite=policy)
    torch.manual_seed(0)
    trainer = Trainer(
        vitrail.create("ViT-Pico/2"), EYE, data["train"], data["test"], recipe, Options(workers=0), Ranks()
    )
    trainer.total = 40
    original_forward = trainer.objective.forward

    def forward(*arguments):
        losses = original_forward(*arguments)
        return losses * math.nan if trainer.step == 30 else losses

    trainer.objective.forward = forward
    with RunLog(tmp_path, 40, writes=True) as log:
        if policy == "stop":
            with pytest.raises(VitrailError, match="not finite at step 30"):
                trainer.fit(log=log, checkpoints=tmp_path / "checkpoints", stop=StopSignal())
        else:
            trainer.fit(log=log, checkpoints=tmp_path / "checkpoints", stop=StopSignal())
    (event,) = events(tmp_path, "nonfinite")
    order = trainer.loader.order(30 // trainer.loader.steps)
    offset = 30 % trainer.loader.steps
    assert event["samples"] == order[offset * 64 : (offset + 1) * 64].tolist()
    newest, _ = load_newest(tmp_path / "checkpoints")
    assert newest.step == (40 if policy == "skip" else 23)
    assert all(np.isfinite(array).all() for array in newest.arrays.values())
    if policy == "skip":
        assert math.isfinite(trainer.best["loss"])


# R11


class Elements(html.parser.HTMLParser):
    """Parser that collects the elements of a page with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, {name for name, _ in attributes}))


HOSTILE_LABELS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "&lt;b&gt;",
    "ノード 🐝",
    "a" * 200,
    "con",
]


def test_r11_hostile_names_are_escaped_in_report(tmp_path):
    folder = tmp_path / "data"
    for number, label in enumerate(HOSTILE_LABELS):
        for index in range(4):
            path = folder / label.replace("/", "\u2215") / f"{'<b>' if index else 'x'}{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (30 * number, 60 * index, 0)).save(path)
    output = tmp_path / "run"
    recipe = Recipe(epochs=1, batch=8, holdout=0.3, preprocess={"crop_fraction": 1.0})
    train(str(folder), "ViT-Pico/2", output, recipe, Options(workers=0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run"]
    labels = json.loads((output / "bundle" / "labels.json").read_text())
    assert labels == sorted(label.replace("/", "\u2215") for label in HOSTILE_LABELS)
    page = (output / "report.html").read_text()
    elements = Elements(page).elements
    assert [tag for tag, _ in elements].count("script") == 1  # of the language switch
    assert not any(name.startswith("on") for _, names in elements for name in names)
    assert sum(tag == "img" for tag, _ in elements) == page.count("data:image/png;base64")


def test_names_without_utf8_are_escaped(call, tmp_path):
    """Names of data, output, cache, bundle and a corrupt file are escaped in files that must be UTF-8."""
    parent = tmp_path / os.fsdecode(b"caf\xe9")
    write_photos(parent / "data")
    (parent / "data" / "a" / os.fsdecode(b"\xff.png")).write_bytes(b"not a picture")
    settings = ("--epochs", "2", "--set", "on_damage=skip", "batch=8", "holdout=0.3", "preprocess.crop_fraction=1.0")
    run, tuned = parent / "run", parent / "tuned"
    train = ("train", parent / "data", "--model", "ViT-Pico/2", "--output", run, "--cache", parent / "cache")
    finetune = ("finetune", run / "bundle", parent / "data", "--output", tuned)
    for arguments, output in ((train, run), (finetune, tuned)):
        done = call(*arguments, *settings)
        assert done.returncode == 0, done.stderr
        assert tomllib.loads((output / "config.toml").read_text("utf-8"))["data"] == f"{tmp_path}/caf\\udce9/data"
        assert "caf\\udce9" in (output / "report.html").read_text("utf-8")
        provenance = vitrail.load(output / "bundle").provenance
        assert list(provenance["damaged"]["files"]) == [f"{tmp_path}/caf\\udce9/data/a/\\udcff.png"]
        (event,) = events(output, "damaged")
        assert event["file"] == str(parent / "data" / "a" / os.fsdecode(b"\xff.png"))
        done = call(*arguments, *settings, "--resume", "auto")
        assert "resuming after step" in done.stderr
        assert len(events(output, "damaged")) == 1  # the checkpoint stores the original name
    assert provenance["finetuned_from"]["bundle"] == f"{tmp_path}/caf\\udce9/run/bundle"
    assert "caf\\udce9" in (tuned / "bundle" / "README.md").read_text("utf-8")


# The bundle of a run


def test_bundle_of_run_has_scores_of_run(call, undisturbed):
    done = call("evaluate", undisturbed / "bundle", "digits", "--json")
    scores = json.loads(done.stdout)
    assert (scores["count"], scores["split"], scores["labels_matched"]) == (360, "test", "by name")
    final = events(undisturbed, "final")[0]
    assert scores["accuracy"] == pytest.approx(final["accuracy"], abs=1e-9)
    assert np.array(scores["confusion"]).sum() == 360
    provenance = json.loads((undisturbed / "bundle" / "provenance.json").read_text())
    assert provenance["weights"] == "running average, decay 0.99"
    with pytest.raises(UsageError, match="Resumed"):
        train("digits", "ViT-Pico/2", undisturbed, Recipe(steps=3), Options(), resumes=True)
