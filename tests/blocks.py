"""Code blocks in pages of the documentation: parse them, select those to run, and run them as written."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

# Set-up commands, which other tests run.
OTHERS = ("make ", "pip install ")

# Script that runs the steps of many pages in one process, because importing torch for each page would be slow.
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
    """Reason in a comment above why the block is not run; empty if it is run."""
    output: str | None
    """Expected output, from a text block that follows; None without one."""


def blocks(path: Path) -> list[Block]:
    """Return the fenced code blocks of a page."""
    pattern = r"(?:<!-- not run: (.*?) -->\n)?^```([^\n]*)\n(.*?)^```$(?:(?=\n\n^```text\n(.*?)^```$))?"
    matches = re.finditer(pattern, path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [Block(match[2], match[3], match[1] or "", match[4] if match[2] == "python" else None) for match in matches]


def runnable(path: Path) -> list[tuple[str, str | list[str], str | None]]:
    """Return the steps of a page in order: Python blocks with their output, and arguments of `vitrail` commands."""
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
