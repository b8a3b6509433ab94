"""Messages of pages in English and Korean, from TOML files beside the modules that show them."""

import tomllib
from pathlib import Path

Messages = dict[str, dict[str, str]]
"""Sentences by name and language (en, ko); {fields} in them are filled in."""


def load_messages(file: str) -> Messages:
    """The messages in the TOML file with the name of a Python file."""
    return tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))
