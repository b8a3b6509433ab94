"""What the READMEs tell a reader to type works as written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "README.ko.md"])
def test_python_blocks_run(page, tmp_path):
    script = "\n".join(blocks(page, "python"))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my-bundle" / "manifest.json").exists()


def test_commands_run(tmp_path):
    lines = [line for block in blocks("README.md", "bash") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("vitrail ")]
    assert len(commands) >= 7
    for command in commands:
        done = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 0, (command, done.stderr)


def test_both_languages_show_the_same_commands():
    def commands(page):
        return [shlex.split(line, comments=True) for block in blocks(page, "bash") for line in block.splitlines()]

    assert commands("README.md") == commands("README.ko.md")
