"""What people see of a run while it runs, in terminals of any width."""

import errno
import io
import re

import pytest
from rich.console import Console

from vitrail.console import Meter
from vitrail.training.runlog import RunLog

FIELDS = {"loss": 2.3456, "learning_rate": 1e-3, "images_per_second": 1234.0}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def line_of(tmp_path, monkeypatch, width, *, held_out, total=1560, fields=FIELDS):
    """The last state of the progress line of a terminal."""
    terminal = Terminal()
    console = Console(file=terminal, width=width, force_terminal=True, legacy_windows=False)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("vitrail.training.runlog.Console", lambda **_: console)
    clock = iter(range(0, 10**9, 60))
    monkeypatch.setattr("vitrail.training.runlog.time.monotonic", lambda: next(clock))
    with RunLog(tmp_path, total, writes=True) as log:
        for step in (total // 2, total // 2 + 10):
            log.progress(step, fields, held_out)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", terminal.getvalue())]
    return [line for line in lines if line.strip()][-1]


@pytest.mark.parametrize("total", [1560, 123_456])
def test_80_columns_show_everything_that_matters(tmp_path, monkeypatch, total):
    line = line_of(tmp_path, monkeypatch, 80, held_out="accuracy 95.4%", total=total)
    assert len(line) <= 80
    for words in (f"{total // 2 + 10}/{total}", "loss 2.3456", "1,234 images/s", " left", "held-out 95.4%"):
        assert words in line
    assert re.search(r"\d:\d\d:\d\d left", line)
    assert line.count("━") + line.count("╸") >= 5


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (60, ("790/1560", "loss 2.3456", " left", "held-out 95.4%", "━━━━"), ("images/s", "lr ")),
        (40, ("790/1560", "loss 2.3456", " left", "━━"), ("images/s", "lr ", "held-out")),
        (120, ("790/1560", "loss 2.3456", "lr 1.00e-03", "1,234 images/s", "held-out 95.4%", "━" * 20), ()),
    ],
)
def test_narrow_terminals_lose_the_least_important_first(tmp_path, monkeypatch, width, shown, left_out):
    line = line_of(tmp_path, monkeypatch, width, held_out="accuracy 95.4%")
    assert len(line) <= width
    assert [words for words in shown if words not in line] == []
    assert [words for words in left_out if words in line] == []


def test_without_a_terminal_the_line_says_what_is_right(tmp_path, capsys):
    with RunLog(tmp_path, 10, writes=True) as log:
        log.progress(10, FIELDS, "colours right 25.0%")
    assert capsys.readouterr().err == (
        "step 10/10  loss 2.3456  lr 1.00e-03  1,234 images/s  held-out colours right 25.0%\n"
    )


def test_a_meter_shows_what_takes_a_while_and_leaves_nothing(monkeypatch):
    terminal, times = Terminal(), iter([0.0, 0.5, 1.1, 1.2, 1.4, 1.5])
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("vitrail.console.time.monotonic", lambda: next(times))
    meter = Meter(1000, "images")
    for done in (64, 128, 192, 256, 1000):
        meter(done)
    assert terminal.getvalue() == "\r128 of 1,000 images\r256 of 1,000 images\r" + 19 * " " + "\r"
    # Nothing that is over in a moment, and nothing where nobody watches.
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        times = iter([0.0, 0.1, 0.2] if stream.isatty() else [0.0, 5.0, 9.0])
        meter = Meter(2, "images")
        meter(1)
        meter(2)
        assert stream.getvalue() == ""


class Full(Terminal):
    """A stream on a full disk, or of a terminal that was closed."""

    def write(self, _=""):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


@pytest.mark.parametrize("is_terminal", [False, True])
def test_messages_that_cannot_be_written_do_not_end_a_run(call, tmp_path, monkeypatch, is_terminal):
    monkeypatch.setattr(Full, "isatty", lambda _: is_terminal)
    monkeypatch.setattr("sys.stderr", Full())
    done = call("train", "digits", "--model", "ViT-Pico/2", "--steps", "2", "--output", tmp_path / "run")
    assert done.returncode == 0
    assert f"model   {tmp_path / 'run' / 'bundle'}\n" in done.stdout
    assert (tmp_path / "run" / "bundle" / "manifest.json").is_file()
    assert call("info", "nothing").returncode == 2
