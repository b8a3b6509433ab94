"""The interface of remote sources of weights, which fetch the files of one checkpoint."""

import abc
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitrail.core.errors import CorruptFileError, UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Download:
    """Downloaded files of a checkpoint."""

    path: Path
    """The file of weights, or the folder of the checkpoint."""
    address: str
    """Address of the files, with the exact revision if there is one."""
    weights: Mapping[str, str]
    """SHA-256 of each file of tensors, by name."""
    discard: Callable[[], None]
    """Remove the tensors from the cache. Called if they are corrupt."""
    notes: tuple[str, ...] = ()

    @property
    def provenance(self) -> dict[str, Any]:
        """The entry for a bundle's provenance: address and hashes."""
        return {"address": self.address, "sha256": dict(self.weights)}


class Remote(abc.ABC):
    """A remote source of weights, registered by the prefix of its addresses in bundles/remote/registry.py."""

    @abc.abstractmethod
    def fetch(self, address: str, sha256: str | None) -> Download:
        """Return the files at an address, downloaded unless the cache has them and they are up to date.

        Fetch only the checkpoint that the user named. If `sha256` is set, raise CorruptFileError unless the file of
        tensors has this hash.
        """


def parse_sha256(text: str) -> str:
    """Validate a SHA-256 that the user typed, and return it in lower case."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise UsageError(f"SHA-256 must be 64 hexadecimal digits, got {text!r}.")
    return text.lower()


def check_sha256(expected: str | None, digest: str, path: str | Path) -> None:
    """Raise CorruptFileError if the user stated the SHA-256 of a file and its digest differs."""
    if expected is not None and digest != expected:
        raise CorruptFileError(
            path=path, cause=f"must have the SHA-256 {expected}, got {digest}", advice="It is not used."
        )


demand = check_sha256
"""Former name of `check_sha256`, for packages that import it."""
