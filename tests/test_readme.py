"""What the READMEs tell a reader to type works as written."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_python_blocks_run(tmp_path):
    script = "\n".join(blocks("README.md", "python"))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my-bundle" / "manifest.json").exists()


def test_python_blocks_of_the_docs_run(tmp_path):
    script = "\n".join(blocks("docs/inspect.md", "python"))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_run(tmp_path):
    lines = [line for block in blocks("README.md", "bash") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("vitrail ")]
    assert len(commands) >= 7
    # One after the other in one process: starting each anew would be most of the time.
    script = f"from vitrail.cli import main\nfor words in {[words[1:] for words in commands]!r}:\n    main(words)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_both_languages_show_the_same_commands():
    def commands(page):
        return [shlex.split(line, comments=True) for block in blocks(page, "bash") for line in block.splitlines()]

    assert commands("README.md") == commands("README.ko.md")


def test_both_languages_show_the_same_python():
    """But for comments, and for words inside of strings."""

    def shape(page):
        tree = ast.parse("\n".join(blocks(page, "python")))
        return re.sub(r"Constant\(value='.*?'\)", "Constant()", ast.dump(tree))

    assert shape("README.md") == shape("README.ko.md")
    assert shape("docs/inspect.md") == shape("docs/inspect.ko.md")


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")], ids=lambda path: path.name)
def test_pages_are_finished_and_their_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^[A-Z]{3,}_[A-Z]{3,}$|TODO|FIXME", text, re.MULTILINE)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
