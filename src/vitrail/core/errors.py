"""Errors for users: one line with the rule, the value and what to do."""

import difflib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self


class VitrailError(Exception):
    """Base class of all errors, whose message is one line. By itself: something is damaged or failed (exit code 1).

    >>> try:
    ...     vitrail.create("ViT-B/61")
    ... except vitrail.VitrailError as error:
    ...     print(error)
    Model must be a name that `vitrail models` lists, got 'ViT-B/61'. Did you mean 'ViT-B/16'?
    """

    exit_code = 1  # of the command line


class UsageError(VitrailError, ValueError):
    """Wrong use (exit code 2): an unknown name, a path that does not exist, an impossible setting."""

    exit_code = 2


class MissingError(UsageError, ImportError):
    """An optional package that is needed is not installed."""

    @classmethod
    def for_extra(cls, subject: str, extra: str, package: str) -> Self:
        """The error of something that needs a package of an extra of ours. The name vitrail on a public index is not
        ours, so the command installs from the source folder."""
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
    """What is wrong, without the file's name and the full stop; the entire message if no cause is given."""

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
    """Memory is not enough, or could not be allocated."""


class UnprovedError(VitrailError):
    """A file that was made from a bundle does not answer as the bundle does."""


def library_memory_error(error: Exception) -> VitrailError | None:
    """The error to raise in place of one of an import, if a shared library did not fit into memory."""
    text, is_import = str(error), isinstance(error, ImportError)
    is_unmapped = "failed to map segment" in text or (is_import and "annot allocate memory" in text)
    if not (is_import or isinstance(error, OSError)) or not is_unmapped or "permitted" in text:
        return None
    return VitrailError(
        f"Memory must be enough to load the libraries, got too little ({first_line(error)}). End other programs, or"
        " raise the limit (ulimit -v)."
    )


def first_line(error: BaseException) -> str:
    """The first line of another library's error, without colours; its class if it has no message."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def did_you_mean(given: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """`" Did you mean 'ViT-B/16'?"`, or an empty string if no name is similar. `elsewhere` has names that are used
    elsewhere, with the known one to suggest for each."""
    meant = {name: name for name in known} | dict(elsewhere or {})
    plain = {_plain(name): name for name in meant}
    near = [given] if given in meant else []
    near = near or [plain[name] for name in difflib.get_close_matches(_plain(given), plain, n=1, cutoff=0.6)]
    near = near or difflib.get_close_matches(given, meant, n=1, cutoff=0.6)
    return f" Did you mean {meant[near[0]]!r}?" if near else ""


def suggest_path(path: str | Path, suggest: Callable[[Path], Path | None]) -> str:
    """`" Did you mean 'photos/cats'?"` for a path that does not exist: a similar one, of those that exist beside the
    first part that is missing. `suggest` returns what to suggest for a path, or None if it does not fit."""
    path = Path(path)
    first_missing = next((part for part in (*reversed(path.parents), path) if not os.path.lexists(part)), path)
    rest = path.relative_to(first_missing)
    try:
        with os.scandir(first_missing.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_ENTRIES)]
    except OSError:
        return ""
    suggestions = {name: suggest(first_missing.with_name(name) / rest) for name in sorted(names)}
    return did_you_mean(first_missing.name, (), {name: str(near) for name, near in suggestions.items() if near})


_MOST_ENTRIES = 1000  # of a folder that are looked at for a suggestion

# Other libraries spell the sizes out: vit_base_patch16_224 is ViT-B/16.
_SIZE_WORDS = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h", "giant": "g", "gigantic": "gg"}


def _plain(name: str) -> str:
    """A name in lower case, without separators and without parts such as "in21k", "patch" or a resolution, for
    comparison."""
    name = re.sub(r"\bG\b", "gg", name)  # ViT-G is not ViT-g
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if not re.fullmatch(r"\d{3}|in21k|in1k", word)]
    return "".join(_SIZE_WORDS.get(word, word.removeprefix("patch")) for word in words)
