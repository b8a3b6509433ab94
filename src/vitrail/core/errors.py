"""Errors for users: one line with the rule, the value and what to do."""

import difflib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self


class VitrailError(Exception):
    """Base class of all errors, whose message is one line. Exit code 1: a file is corrupt, or an operation failed.

    >>> try:
    ...     vitrail.create("ViT-B/61")
    ... except vitrail.VitrailError as error:
    ...     print(error)
    Model must be a name that `vitrail models` lists, got 'ViT-B/61'. Did you mean 'ViT-B/16'?
    """

    exit_code = 1
    """Exit code of the command line."""


class UsageError(VitrailError, ValueError):
    """Wrong use (exit code 2): an unknown name, a path that does not exist, an impossible setting."""

    exit_code = 2


class MissingError(UsageError, ImportError):
    """An optional package is not installed."""

    @classmethod
    def for_extra(cls, subject: str, extra: str, package: str) -> Self:
        """Return the error for a missing package of one of vitrail's extras.

        The command installs from the source folder, because vitrail on a public index is another project.
        """
        return cls(
            f"{subject} needs the {extra!r} extra ({package} is missing). Run, in the source folder of vitrail:"
            f' pip install -c constraints.txt ".[{extra}]".'
        )


class CorruptFileError(VitrailError):
    """A file is corrupt or has unexpected content.

    `CorruptFileError(path="a.png", cause="cannot be decoded (it is cut off)")` has the message "'a.png' cannot be
    decoded (it is cut off)."; `message` replaces that sentence.
    """

    path: str | None
    """The file, or another name for it in messages; None if no single file is the cause."""
    cause: str
    """The problem, without the file's name and the full stop; the message, if no cause was passed."""

    def __init__(self, message: str = "", *, path: str | Path | None = None, cause: str = "", advice: str = "") -> None:
        self.path = None if path is None else str(path)
        self.cause = (cause or message).removesuffix(".")
        subject = "" if self.path is None else f"{self.path!r} "
        sentence = f"{subject}{self.cause}{'' if self.cause.endswith('?') else '.'}"
        super().__init__(message or f"{sentence} {advice}".rstrip())


DamagedError = CorruptFileError
"""Former name of `CorruptFileError`."""


class CorruptImageError(CorruptFileError):
    """An image of a data set cannot be read."""


class OutOfMemoryError(VitrailError, MemoryError):
    """An allocation would exceed the available memory, or failed."""


class UnprovedError(VitrailError):
    """A file made from a bundle does not give the predictions of the bundle."""


def library_memory_error(error: Exception) -> VitrailError | None:
    """Return an error that explains that a shared library did not fit into memory, or None for any other error."""
    text = str(error).lower()
    is_out_of_memory = (isinstance(error, ImportError | OSError) and "failed to map segment" in text) or (
        isinstance(error, ImportError) and "cannot allocate memory" in text
    )
    # A file system that forbids execution (noexec) gives the same text, followed by "Operation not permitted".
    if not is_out_of_memory or "not permitted" in text:
        return None
    return VitrailError(
        f"Memory must be enough to load the libraries, got too little ({first_line(error)}). Close other programs, or"
        " raise the limit (ulimit -v)."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, without colours; the name of its class if it has no message."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def did_you_mean(name: str, names: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """Return `" Did you mean 'ViT-B/16'?"` for the most similar of `names`; an empty string if none is similar.

    `aliases` maps further names, such as those of other tools, to the name to suggest.
    """
    suggestions = {candidate: candidate for candidate in names} | dict(aliases or {})
    simplified = {_simplify_name(candidate): candidate for candidate in suggestions}
    matches = [name] if name in suggestions else []
    matches = matches or [
        simplified[match] for match in difflib.get_close_matches(_simplify_name(name), simplified, n=1, cutoff=0.6)
    ]
    matches = matches or difflib.get_close_matches(name, suggestions, n=1, cutoff=0.6)
    return f" Did you mean {suggestions[matches[0]]!r}?" if matches else ""


def suggest_path(path: str | Path, suggest: Callable[[Path], Path | None]) -> str:
    """Return `" Did you mean 'photos/cats'?"` for a path that does not exist; an empty string if none is similar.

    Candidates replace the first missing part by a name in its folder. `suggest` returns the path to suggest for a
    candidate, or None to skip it.
    """
    path = Path(path)
    first_missing = next((part for part in (*reversed(path.parents), path) if not os.path.lexists(part)), path)
    rest = path.relative_to(first_missing)
    try:
        with os.scandir(first_missing.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MAX_ENTRIES)]
    except OSError:
        return ""
    suggestions = {name: suggest(first_missing.with_name(name) / rest) for name in sorted(names)}
    return did_you_mean(first_missing.name, (), {name: str(path) for name, path in suggestions.items() if path})


_MAX_ENTRIES = 1000  # entries of a folder that are compared for a suggestion

# Other libraries spell the sizes out: vit_base_patch16_224 is ViT-B/16.
_SIZE_WORDS = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h", "giant": "g", "gigantic": "gg"}


def _simplify_name(name: str) -> str:
    """Return a model name for comparison: in lower case, without separators, "patch", "in21k" and resolutions."""
    name = re.sub(r"\bG\b", "gg", name)  # ViT-G is not ViT-g
    parts = [part for part in re.split(r"[^a-z0-9]+", name.lower()) if not re.fullmatch(r"\d{3}|in21k|in1k", part)]
    return "".join(_SIZE_WORDS.get(part, part.removeprefix("patch")) for part in parts)
