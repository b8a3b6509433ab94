"""Locks: one process at a time writes a run folder or builds an ONNX file."""

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from tests.training.test_loop import HALF_WAY
from vitrail.core.errors import UsageError
from vitrail.core.files import file_lock
from vitrail.training.checkpoint import remove_old_checkpoints, remove_temporary_folders

TRAIN = ("train", "digits", "--model", "MLP-Pico", "--steps", "2", "--threads", "1", "--set", "batch=32")
HOLD = """
import os, sys, time
from pathlib import Path
from vitrail.core.files import file_lock
with file_lock(Path(sys.argv[1]), lambda holder: sys.exit(holder)):
    is_child = "fork" in sys.argv and os.fork() == 0
    if is_child:
        os.setsid()
    if is_child or "fork" not in sys.argv:
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def holder(path, *more):
    """Start another process that holds a lock, and yield it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, path, *more], stdout=subprocess.PIPE, text=True)
    try:
        process.child = int(process.stdout.readline())
        yield process
    finally:
        process.kill()
        process.communicate()


def refuse(holder):
    raise UsageError(holder)


def name(process):
    return f"process {process.pid} on {socket.gethostname()}"


def test_lock_error_names_the_process_that_holds_the_lock(tmp_path):
    path = tmp_path / "new" / ".lock"
    with holder(path) as process:
        with pytest.raises(UsageError, match=name(process)), file_lock(path, refuse):
            pass
        process.kill()
        process.wait()
        with file_lock(path, refuse) as is_held:
            assert is_held
            assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
            with pytest.raises(UsageError, match=f"process {os.getpid()} "), file_lock(path, refuse):
                pass
    assert path.exists()
    with file_lock(path, refuse) as is_held:
        assert is_held


def test_children_do_not_inherit_a_lock(tmp_path):
    with holder(tmp_path / ".lock", "fork") as process:
        process.kill()
        process.wait()
        try:
            with file_lock(tmp_path / ".lock", refuse) as is_held:
                assert is_held
        finally:
            os.kill(process.child, signal.SIGKILL)
    with file_lock(tmp_path / ".lock", refuse):
        assert (
            "lock"
            not in subprocess.run(
                ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True, close_fds=False
            ).stdout
        )


def test_waiting_process_gets_the_lock_after_its_release(tmp_path):
    waited = []
    with holder(tmp_path / ".lock") as process:

        def wait(holder):
            waited.append(holder)
            process.kill()

        with file_lock(tmp_path / ".lock", wait) as is_held:
            assert is_held
    assert waited == [name(process)]


def test_run_folder_locked_by_another_process_is_unchanged(call, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(HALF_WAY, run)
    (writing := run / "checkpoints" / ".step-000000040.writing-x").mkdir()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with holder(run / ".lock") as process:
        for flag in (("--resume", "auto"), ("--force",)):
            done = call(*TRAIN, "--output", run, *flag)
            (line,) = done.stderr.splitlines()
            assert done.returncode == 2
            assert f"{str(run)!r}, which {name(process)} is writing." in line
        assert writing.is_dir()
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == before
    done = call(*TRAIN, "--output", run, "--force")
    assert done.returncode == 0, done.stderr
    assert not writing.exists()
    assert (run / ".lock").read_text().startswith(f"process {os.getpid()} ")


def test_folder_with_only_a_lock_file_counts_as_empty(call, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    assert call(*TRAIN, "--output", tmp_path / "run").returncode == 0
    (tmp_path / "begun").mkdir()
    for leaves in (".lock", ".config.toml.writing"):
        (tmp_path / "begun" / leaves).touch()
    assert call(*TRAIN, "--output", tmp_path / "begun", "--resume", "auto").returncode == 0
    # An error after the output folder was checked leaves no folder.
    assert call(*TRAIN, "model.classes=3", "--output", tmp_path / "new").returncode == 2
    assert not (tmp_path / "new").exists()


def test_run_on_a_file_system_without_locks_prints_a_note(call, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.toml").write_text("# vitrail")
    (alive := tmp_path / "checkpoints" / ".step-000000040.writing-x").mkdir()
    done = call(*TRAIN, "--output", tmp_path, "--resume", "auto")
    assert done.returncode == 0
    assert f"note: {str(tmp_path)!r} is on a file system without locks" in done.stderr
    assert alive.is_dir()


def test_removing_old_checkpoints_keeps_folders_being_written(tmp_path):
    for leaves in (".step-000000009.writing-x", ".step-000000008.removed"):
        (tmp_path / leaves).mkdir()
    remove_old_checkpoints(tmp_path, keep=2, best=None)
    assert [path.name for path in tmp_path.iterdir()] == [".step-000000009.writing-x"]
    remove_temporary_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_second_run_in_the_same_folder_is_rejected(tmp_path):
    command = [sys.executable, "-m", "vitrail", *TRAIN, "--output", tmp_path / "run", "--resume", "auto"]
    command[command.index("2")] = "400"
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    messages = [process.communicate()[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 2], messages
    refused = messages[0] if processes[0].returncode == 2 else messages[1]
    assert " is writing. " in refused.splitlines()[-1]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


# The ONNX file of a bundle

MAKE = """
import sys, time, types
from pathlib import Path
from importlib.metadata import version
from vitrail.inference import model_files as cache
from vitrail.inference.onnx_engine import MODEL, OnnxEngine
from vitrail.core.files import atomic_folder, checksum, write_json
def build_model_file(bundle, place, engine, precision, earlier):
    with open(sys.argv[2], "a") as file:
        file.write("made\\n")
    time.sleep(0.5)
    with atomic_folder(place, force=True) as folder:
        (folder / MODEL).touch()
        key = cache.fingerprint(bundle)
        about = {"format": cache.FORMAT, "kind": "onnx", "precision": precision, "bundle": key}
        about["versions"] = {"onnxruntime": version("onnxruntime")}
        proof = about | {"files": {MODEL: checksum(folder / MODEL)}}
        write_json(folder / cache.PROOF, proof)
sys.modules["vitrail.inference.build_model_file"] = types.SimpleNamespace(build_model_file=build_model_file)
print(cache.prepare_model_file(sys.argv[1], OnnxEngine, "float32"))
"""


def test_concurrent_processes_build_a_model_file_once(tmp_path):
    shutil.copytree(HALF_WAY.with_name("bundle-format-1"), tmp_path / "bundle")
    command = [sys.executable, "-c", MAKE, tmp_path / "bundle", tmp_path / "made"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate() for process in processes]
    assert {out for out, _ in outputs} == {f"{tmp_path / 'bundle'}.onnx\n"}, outputs
    assert (tmp_path / "made").read_text() == "made\n"
    assert sum("waiting for" in err for _, err in outputs) <= 2


@pytest.mark.slow
def test_eight_processes_export_once(tmp_path):
    pytest.importorskip("onnxruntime")
    shutil.copytree(HALF_WAY.with_name("bundle-format-1"), tmp_path / "bundle")
    imports = "import sys\nfrom vitrail.inference.onnx_engine import OnnxEngine"
    script = f"{imports}\nprint(OnnxEngine.prepare(sys.argv[1], 'float32'))"
    command = [sys.executable, "-c", script, tmp_path / "bundle"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    outputs = [process.communicate() for process in processes]
    assert {out for out, _ in outputs} == {f"{tmp_path / 'bundle'}.onnx\n"}, outputs
    assert sum("making" in err for _, err in outputs) == 1
