"""Progress lines and meters in terminals of any width."""

import contextlib
import errno
import fcntl
import io
import os
import re
import struct
import sys
import termios

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from vitrail.core.terminal import Meter
from vitrail.training.run_log import RunLog

FIELDS = {"loss": 2.3456, "learning_rate": 1e-3, "images_per_second": 1234.0}


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def line_of(tmp_path, monkeypatch, width, *, held_out, total=1560, fields=FIELDS):
    """Return the last state of the progress line of a run in a terminal."""
    terminal = FakeTerminal()
    console = Console(file=terminal, width=width, force_terminal=True, legacy_windows=False)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("vitrail.training.progress_line.Console", lambda **_: console)
    clock = iter(range(0, 10**9, 60))
    monkeypatch.setattr("vitrail.training.progress_line.time.monotonic", lambda: next(clock))
    with RunLog(tmp_path, total, writes=True) as log:
        for step in (total // 2, total // 2 + 10):
            log.progress(step, fields, held_out)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", terminal.getvalue())]
    return [line for line in lines if line.strip()][-1]


@pytest.mark.parametrize("total", [1560, 123_456])
def test_progress_line_of_80_columns_shows_all_parts(tmp_path, monkeypatch, total):
    line = line_of(tmp_path, monkeypatch, 80, held_out="accuracy 95.4%", total=total)
    assert len(line) <= 80
    for part in (f"{total // 2 + 10}/{total}", "loss 2.3456", "1,234 images/s", " left", "held-out 95.4%"):
        assert part in line
    assert re.search(r"\d:\d\d:\d\d left", line)
    assert line.count("━") + line.count("╸") >= 5


@pytest.mark.parametrize(
    ("width", "expected", "dropped"),
    [
        (60, ("790/1560", "loss 2.3456", " left", "held-out 95.4%", "━━━━"), ("images/s", "lr ")),
        (40, ("790/1560", "loss 2.3456", " left", "━━"), ("images/s", "lr ", "held-out")),
        (120, ("790/1560", "loss 2.3456", "lr 1.00e-03", "1,234 images/s", "held-out 95.4%", "━" * 20), ()),
    ],
)
def test_narrow_progress_line_drops_the_least_important_parts(tmp_path, monkeypatch, width, expected, dropped):
    line = line_of(tmp_path, monkeypatch, width, held_out="accuracy 95.4%")
    assert len(line) <= width
    assert [part for part in expected if part not in line] == []
    assert [part for part in dropped if part in line] == []


def test_progress_line_without_a_terminal(tmp_path, capsys):
    with RunLog(tmp_path, 10, writes=True) as log:
        log.progress(10, FIELDS, "colours right 25.0%")
    assert capsys.readouterr().err == (
        "step 10/10  loss 2.3456  lr 1.00e-03  1,234 images/s  held-out colours right 25.0%\n"
    )


def test_meter_appears_after_a_second_and_is_cleared(monkeypatch):
    terminal, times = FakeTerminal(), iter([0.0, 0.5, 1.1, 1.2, 1.4, 1.5])
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("vitrail.core.terminal.time.monotonic", lambda: next(times))
    meter = Meter(1000, "images")
    for done in (64, 128, 192, 256, 1000):
        meter(done)
    first, second = "128 of 1,000 images, 0:07 left, 116 images/s", "256 of 1,000 images, 0:04 left, 183 images/s"
    assert terminal.getvalue() == f"\r{first}\r{second}\r{len(second) * ' '}\r"
    # No line for short work, and none without a terminal.
    for stream in (FakeTerminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        times = iter([0.0, 0.1, 0.2] if stream.isatty() else [0.0, 5.0, 9.0])
        meter = Meter(2, "images")
        meter(1)
        meter(2)
        assert stream.getvalue() == ""


class UnwritableStream(FakeTerminal):
    """A stream on a full disk, or of a closed terminal."""

    def write(self, _=""):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


@pytest.mark.parametrize("is_terminal", [False, True])
def test_unwritable_messages_do_not_end_a_run(call, tmp_path, monkeypatch, is_terminal):
    monkeypatch.setattr(UnwritableStream, "isatty", lambda _: is_terminal)
    monkeypatch.setattr("sys.stderr", UnwritableStream())
    done = call("train", "digits", "--model", "ViT-Pico/2", "--steps", "2", "--output", tmp_path / "run")
    assert done.returncode == 0
    assert f"model   {tmp_path / 'run' / 'bundle'}\n" in done.stdout
    assert (tmp_path / "run" / "bundle" / "manifest.json").is_file()
    assert call("info", "nothing").returncode == 2


@pytest.fixture
def watched(monkeypatch):
    """Return a function that calls `run` with a terminal of 60 columns as stderr, and returns its result and output."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    os.set_blocking(master, False)
    terminal = os.fdopen(slave, "w")
    monkeypatch.setattr("vitrail.core.terminal._METER_DELAY", 0.0)
    monkeypatch.setattr("vitrail.core.terminal._METER_INTERVAL", 0.0)

    def read(run):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", terminal)
            done = run()
        pieces = []
        with contextlib.suppress(BlockingIOError):  # raised when all has been read
            while True:
                pieces.append(os.read(master, 4096))
        return done, b"".join(pieces).decode()

    yield read
    terminal.close()
    os.close(master)


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "photos").mkdir()
    for index in range(12):
        noise = np.random.default_rng(index).integers(0, 256, (28, 28), np.uint8)
        Image.fromarray(noise).save(tmp_path / "photos" / f"{index:02d}.png")
    return tmp_path / "photos"


LINE = re.compile(r"\r(\d+) of 12 images, \d+:\d\d left, [\d,.]+ images/s")


def test_predict_shows_progress_in_a_terminal_with_unchanged_stdout(call, watched, photos, tmp_path):
    arguments = ("predict", "fashion", photos, "--json")
    plain = call(*arguments)
    assert plain.stderr == ""
    done, output = watched(lambda: call(*arguments))
    assert done.stdout == plain.stdout
    assert [int(number) for number in LINE.findall(output)] == [*range(1, 12)]
    assert output.endswith(" \r")  # the line is cleared
    # Also where all answers go to a file, and where they are sorted in the end.
    for number, options in enumerate(((), ("--sort", "uncertain"))):
        table = tmp_path / f"{number}.csv"
        done, output = watched(lambda: call("predict", "fashion", photos, "--output", table, *options))  # noqa: B023
        assert done.returncode == 0
        assert [int(number) for number in LINE.findall(output)] == [*range(1, 12)]


def test_predict_clears_the_progress_line_before_each_row(call, watched, photos, monkeypatch):
    """Rows and the progress line are printed to the same terminal."""
    written = []

    def run():
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setattr("sys.stdout.write", lambda text: (sys.stderr.write(text), written.append(text)))
        return call("predict", "fashion", photos)

    _, output = watched(run)
    rows = [line for line in "".join(written).splitlines() if "photos/" in line]
    assert len(rows) == 12
    for row in rows:
        before, separator, _ = output.replace("\r\n", "\n").partition(row)
        assert separator
        assert before.endswith(("\r", "\n")) or not before


def test_inspect_shows_progress_in_a_terminal(call, watched, photos, tmp_path):
    arguments = ("inspect", "fashion", photos, "--output", tmp_path / "page")
    done, output = watched(lambda: call(*arguments))
    assert done.returncode == 0
    assert output.startswith("\r0 of 12 images\r")
    assert {int(number) for number in LINE.findall(output)} == {*range(1, 12)}
    assert call("inspect", "fashion", photos, "--output", tmp_path / "other").stderr == ""


def test_an_error_clears_the_progress_line(watched):
    def run():
        with contextlib.suppress(KeyboardInterrupt), Meter(12, "images") as meter:
            meter(3)
            raise KeyboardInterrupt

    _, output = watched(run)
    assert output.endswith(" \r")


def test_a_meter_fits_narrow_terminals(monkeypatch):
    terminal = FakeTerminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("vitrail.core.terminal._METER_DELAY", -1.0)
    monkeypatch.setattr("vitrail.core.terminal.terminal_width", lambda _: 30)
    Meter(1000, "images")(10)
    assert re.fullmatch(r"\r10 of 1,000 images, \d+:\d\d left", terminal.getvalue())
