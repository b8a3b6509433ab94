"""Sentences of the page of `vitrail inspect` itself and of several panels: `words.toml`; and what the symbols of
equations mean: `symbols.toml`."""

from pathlib import Path

from vitrail.reports.messages import words_beside

SHARED = words_beside(__file__)
SYMBOLS = words_beside(str(Path(__file__).with_name("symbols.toml")))
