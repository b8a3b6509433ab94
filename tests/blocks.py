"""The blocks of code in a page: what they are, which of them run, and the process that runs them as written."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

# Lines of bash that are not ours to run here: set-up, which other tests do.
OTHERS = ("make ", "pip install ")

# Runs in a process of its own, one for many pages: importing torch again and again would be most of the time.
RUNNER = """
import contextlib, io, json, os, sys
from vitrail.cli import main

for page, folder, blocks in json.load(sys.stdin):
    os.chdir(folder)
    names = {"__name__": "__main__"}
    for language, text, output in blocks:
        print(f"### {page}: {text}", file=sys.stderr, flush=True)
        if language == "bash":
            main(text)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, page, "exec"), names)
        if output is not None and printed.getvalue() != output:
            sys.exit(f"printed:\\n{printed.getvalue()}the page says:\\n{output}")
"""


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    reason: str
    """Why it is not run, if a comment above it says so."""
    output: str | None
    """What it prints, if a block of text follows that says so."""


def blocks(path: Path) -> list[Block]:
    """Fenced blocks of a page."""
    pattern = r"(?:<!-- not run: (.*?) -->\n)?^```([^\n]*)\n(.*?)^```$(?:(?=\n\n^```text\n(.*?)^```$))?"
    matches = re.finditer(pattern, path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [Block(match[2], match[3], match[1] or "", match[4] if match[2] == "python" else None) for match in matches]


def runnable(path: Path) -> list[tuple[str, str | list[str], str | None]]:
    """What is run of a page, in order: blocks of Python with what they print, and the words of each command."""
    steps = []
    for block in blocks(path):
        if block.reason or block.language not in ("python", "bash"):
            continue
        if block.language == "python":
            steps.append(("python", block.text, block.output))
            continue
        for line in block.text.splitlines():
            command = shlex.split(line, comments=True)
            if command[:1] == ["vitrail"]:
                steps.append(("bash", command[1:], None))
            else:
                assert not command or line.startswith(OTHERS), f"{path.name}: {line}"
    return steps
