"""Sentences of the page of `vitrail inspect` itself and of several panels: `words.toml`; and what the symbols of
equations mean: `symbols.toml`."""

from pathlib import Path

from vitrail.core.messages import messages_beside

SHARED = messages_beside(__file__)
SYMBOLS = messages_beside(str(Path(__file__).with_name("symbols.toml")))
