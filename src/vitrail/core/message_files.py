"""Messages of pages in English and Korean, from TOML files next to the modules that show them."""

import tomllib
from pathlib import Path

Messages = dict[str, dict[str, str]]
"""Sentences by key and language (en, ko). They may contain {fields}."""


def load_messages(file: str) -> Messages:
    """Return the messages in `page.toml` for the Python file `page.py`."""
    return tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))
