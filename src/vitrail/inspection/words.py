"""Sentences of the page of `vitrail inspect` itself and of several panels: `words.toml`."""

from vitrail.pages.words import words_beside

SHARED = words_beside(__file__)
