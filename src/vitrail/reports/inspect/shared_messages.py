"""Sentences of the page of `vitrail inspect` itself and of several panels: `words.toml`; and what the symbols of
equations mean: `symbols.toml`."""

from pathlib import Path

from vitrail.core.message_files import load_messages

SHARED = load_messages(__file__)
SYMBOLS = load_messages(str(Path(__file__).with_name("symbols.toml")))
