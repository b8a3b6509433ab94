"""Checkpoints are written atomically at any system call, and flipped bits are detected (R2 and R4 of the proofs)."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from vitrail.training.checkpoint import load_newest, remove_old_checkpoints, save_checkpoint

SAVE = """
import sys
import numpy as np
from pathlib import Path
from vitrail.training.checkpoint import remove_old_checkpoints, save_checkpoint
folder = Path(sys.argv[1])
arrays = {"a": np.arange(5000, dtype=np.float32), "b": np.ones((7, 9))}
save_checkpoint(folder, 2, arrays, {"step": 2})
remove_old_checkpoints(folder, keep=1, best=None)
"""
CALLS = (
    "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,ftruncate,chmod,fchmod"
)


def can_trace(tmp_path):
    if shutil.which("strace") is None:
        return False
    return (
        subprocess.run(["strace", "-o", tmp_path / "trial", "true"], capture_output=True, check=False).returncode == 0
    )


def crash_points(tmp_path, every):
    """Return each (system call, number) on the checkpoint folder while a checkpoint is saved and an old one removed."""
    folder = tmp_path / "count"
    folder.mkdir()
    save_checkpoint(folder, 1, {"a": np.zeros(3)}, {"step": 1})
    log = tmp_path / "calls"
    subprocess.run(
        ["strace", "-f", "-y", "-e", f"trace={CALLS}", "-o", log, sys.executable, "-c", SAVE, folder],
        check=True,
        capture_output=True,
    )
    counts, points = {}, []
    for line in log.read_text().splitlines():
        if match := re.match(r"\d+\s+(\w+)\(", line):
            call = match[1]
            counts[call] = counts.get(call, 0) + 1
            if str(folder) in line:
                points.append((call, counts[call]))
    return points[::every]


@pytest.mark.parametrize("every", [pytest.param(6, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_r2_sigkill_at_any_system_call_of_a_save_leaves_intact_checkpoint(tmp_path, every, capsys):
    if not can_trace(tmp_path):
        pytest.skip("needs strace and the right to trace processes")
    points = crash_points(tmp_path, every)
    survived = 0
    for call, number in points:
        folder = tmp_path / f"{call}-{number}"
        folder.mkdir()
        save_checkpoint(folder, 1, {"a": np.arange(3.0)}, {"step": 1})
        completed = subprocess.run(
            [
                "strace",
                "-f",
                "-e",
                f"trace={call}",
                "-e",
                f"inject={call}:signal=KILL:when={number}",
                "-o",
                "/dev/null",
                sys.executable,
                "-c",
                SAVE,
                folder,
            ],
            capture_output=True,
            check=False,
        )
        assert completed.returncode in (-9, 137), (call, number, completed.stderr)
        newest, errors = load_newest(folder)
        assert errors == {}, (call, number)
        assert newest.step in (1, 2), (call, number)
        survived += 1
        shutil.rmtree(folder)
    with capsys.disabled():
        print(f" [killed at {survived} of {survived} system calls, an intact checkpoint every time]", end="")  # noqa: T201
    assert survived == len(points) >= (30 if every == 1 else 5)


def test_r4_flipped_bits_and_truncated_files_are_detected(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, {"a": np.arange(300, dtype=np.float32)}, {"step": step, "seed": 7})
    newest = tmp_path / "step-000000002"
    files = sorted(newest.iterdir())
    rng = np.random.default_rng(0)
    sizes = np.array([path.stat().st_size for path in files])
    detected = 0
    for trial in range(1064):
        path = files[rng.choice(len(files), p=sizes / sizes.sum())]
        content = path.read_bytes()
        corrupt = bytearray(content)
        if trial < 1000:
            corrupt[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        else:
            corrupt = corrupt[: rng.integers(len(content))]
        path.write_bytes(corrupt)
        checkpoint, errors = load_newest(tmp_path)
        detected += checkpoint.step == 1 and len(errors) == 1 and "step-000000002" in errors[2]
        path.write_bytes(content)
    assert detected == 1064
    assert load_newest(tmp_path)[0].step == 2
    for step in (1, 2):
        (tmp_path / f"step-{step:09d}" / "state.json").unlink()
    assert load_newest(tmp_path)[0] is None


def test_remove_old_checkpoints_keeps_newest_and_best(tmp_path):
    for step in range(1, 7):
        save_checkpoint(tmp_path, step, {"a": np.zeros(2)}, {"step": step})
    remove_old_checkpoints(tmp_path, keep=2, best=3)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-000000003",
        "step-000000005",
        "step-000000006",
    ]
