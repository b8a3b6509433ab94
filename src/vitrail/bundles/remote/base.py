"""The interface of sources in a network: fetch the files of one checkpoint that the user named, and nothing else."""

import abc
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitrail.core.errors import CorruptFileError, UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Download:
    """Files of a checkpoint that are on this machine now."""

    path: Path
    """A file, or a folder as libraries write it."""
    address: str
    """Where they come from, with the exact revision if there is one."""
    weights: Mapping[str, str]
    """SHA-256 of each file of tensors, by name."""
    discard: Callable[[], None]
    """Remove the tensors from the cache: they turned out to be damaged."""
    notes: tuple[str, ...] = ()

    @property
    def provenance(self) -> dict[str, Any]:
        """What a bundle records of them."""
        return {"address": self.address, "sha256": dict(self.weights)}


class Remote(abc.ABC):
    """One kind of source. `REMOTES` in bundles/remote/registry.py knows it by its prefix."""

    @abc.abstractmethod
    def fetch(self, address: str, sha256: str | None) -> Download:
        """The files at an address, from the cache if they are there and up to date. If `sha256` is given, the file of
        tensors must have it."""


def parse_sha256(text: str) -> str:
    """A SHA-256 as the user typed it, in lower case."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise UsageError(f"SHA-256 must be 64 hexadecimal digits, got {text!r}.")
    return text.lower()


def demand(sha256: str | None, found: str, path: str | Path) -> None:
    """Refuse a file that is not the one that the user demands."""
    if sha256 is not None and found != sha256:
        raise CorruptFileError(
            path=path, cause=f"must have the SHA-256 {sha256}, got {found}", advice="Nothing is kept."
        )
