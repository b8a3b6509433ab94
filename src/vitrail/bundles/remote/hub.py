"""Checkpoints of the Hugging Face Hub, `hf:owner/repository[@revision]`, through its own client.

The client's cache, tokens and environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, ...) apply.
"""

import contextlib
import hashlib
import os
import re
import warnings
from collections.abc import Generator, Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from vitrail.bundles.file_names import READ_FILES, WEIGHTS, choose_weights, read_index
from vitrail.bundles.remote.base import Download, Remote, check_sha256
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError, first_line
from vitrail.core.files import checksum
from vitrail.core.optional import import_extra, import_without_telemetry
from vitrail.core.terminal import say


class Hub(Remote):
    """A repository of models: only its weights and the documents that belong to them are fetched."""

    def fetch(self, address: str, sha256: str | None) -> Download:
        repository, revision = _parse(address)
        client = _import_client(address)
        snapshot = _look(client, repository, revision)
        name = choose_weights(snapshot.names, f"hf:{snapshot.repository}")
        beside = [_get(client, snapshot, one) for one in snapshot.names if one in READ_FILES]
        # By the name that the user gave, which the client then remembers for the time without a network.
        files = [_get(client, snapshot, name, revision or client.constants.DEFAULT_REVISION)]
        if files[0].parent.name != snapshot.commit:
            raise VitrailError(f"hf:{repository} has changed while it was fetched. Fetch it again.")
        if name.endswith(".index.json"):
            if sha256 is not None:
                raise UsageError(f"--sha256 must be of one file, got a repository with several: {name}.")
            files += [_get(client, snapshot, shard) for shard in read_index(files[0])]
        found = {path.name: _verified(path) for path in (*files, *beside)}
        try:
            check_sha256(sha256, found[name], f"{name} of hf:{snapshot.repository}")
        except CorruptFileError:
            _forget(files)
            raise
        return Download(
            path=files[0].parent if name in WEIGHTS else files[0],
            address=f"hf:{snapshot.present_name}@{snapshot.commit}",
            weights={path.name: found[path.name] for path in files if not path.name.endswith(".json")},
            discard=lambda: _forget(files),
            notes=snapshot.notes,
        )


def _import_client(address: str) -> ModuleType:
    client = import_extra("huggingface_hub", extra="hub", subject=f"The source {address}")
    for part in ("constants", "errors"):
        import_without_telemetry(f"huggingface_hub.{part}")
    return client


def _parse(address: str) -> tuple[str, str | None]:
    repository, at, revision = address.partition(":")[2].removeprefix("//").partition("@")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository, re.ASCII) or (at and not revision):
        raise UsageError(f"Repository must be hf:owner/name, or hf:owner/name@revision, got {address!r}.")
    return repository, revision or None


class _Snapshot(NamedTuple):
    """A repository at one commit."""

    repository: str
    """As the user calls it."""
    present_name: str
    """As the Hub calls it now."""
    commit: str
    names: list[str]
    """Its files; without a connection, those in the cache."""
    folder: Path | None
    """The folder in the cache, without a connection."""
    notes: tuple[str, ...] = ()


def _look(client: ModuleType, repository: str, revision: str | None) -> _Snapshot:
    """List a repository; without a connection, what the cache has of it."""
    try:
        with _in_one_line(client, repository, revision):
            info = client.HfApi().model_info(repository, revision=revision)
            if not re.fullmatch(r"[0-9a-f]{40}", info.sha):  # the client makes paths of it
                raise ValueError("a commit")
    except _Unreachable as wall:
        folder = _cached(client, repository, revision)
        if folder is None:
            raise
        names = [path.name for path in folder.iterdir() if path.is_file()]
        note = f"{wall.reason}: the copy in the cache is used"
        return _Snapshot(repository, repository, folder.name, names, folder, () if wall.is_wanted else (note,))
    notes = () if info.id == repository else (f"hf:{repository} is now called hf:{info.id}",)
    return _Snapshot(repository, info.id, info.sha, [file.rfilename for file in info.siblings or ()], None, notes)


def _cached(client: ModuleType, repository: str, revision: str | None) -> Path | None:
    """The folder of a repository in the client's cache, if it has been fetched before."""
    for name in (*WEIGHTS, *READ_FILES):
        found = client.try_to_load_from_cache(repository, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _get(client: ModuleType, snapshot: _Snapshot, name: str, revision: str | None = None) -> Path:
    """One file, in the client's cache; of another revision than the snapshot's commit, if one is given."""
    if name not in snapshot.names:
        raise CorruptFileError(f"hf:{snapshot.repository} must have the file {name}, which its index names, got none.")
    if snapshot.folder is not None:
        return snapshot.folder / name
    known = client.try_to_load_from_cache(snapshot.repository, name, revision=snapshot.commit)
    if name.endswith(tuple(WEIGHTS)) and not isinstance(known, str):
        say(f"fetching {name} of hf:{snapshot.repository}")
    with _in_one_line(client, snapshot.repository, snapshot.commit):
        return Path(client.hf_hub_download(snapshot.repository, name, revision=revision or snapshot.commit))


def _verified(path: Path) -> str:
    """The SHA-256 of a file in the cache. The client compares only sizes; the cache names each file by its hash."""
    digest = checksum(path)
    stated = Path(os.readlink(path)).name if path.is_symlink() else ""  # noqa: PTH115 - one step, not the last target
    is_wrong = len(stated) == 64 and stated != digest
    if len(stated) == 40:  # small files are named as git does it
        content = path.read_bytes()
        is_wrong = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() != stated
    if is_wrong:
        _forget([path])
        raise CorruptFileError(
            path=path.name, cause=f"came damaged: its hash must be {stated}", advice="Fetch it again."
        )
    return digest


def _forget(paths: Iterable[Path]) -> None:
    """Remove files from the cache."""
    for path in paths:
        blob = path.parent / os.readlink(path) if path.is_symlink() else path  # noqa: PTH115
        path.unlink(missing_ok=True)
        blob.unlink(missing_ok=True)


class _Unreachable(VitrailError):
    """The Hub cannot be reached."""

    def __init__(self, repository: str, reason: str, *, is_wanted: bool) -> None:
        self.reason, self.is_wanted = reason, is_wanted
        super().__init__(
            f"{reason}, and hf:{repository} is not in the cache. Where there is a network, run: hf download"
            f" {repository} --local-dir FOLDER; bring FOLDER here, then: vitrail convert FOLDER DST"
        )


@contextlib.contextmanager
def _in_one_line(client: ModuleType, repository: str, revision: str | None) -> Generator[None]:
    """Errors of the client in our words."""
    errors, at = client.errors, f"hf:{repository}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the space of the disk, on tokens
            yield
    except errors.GatedRepoError:
        raise UsageError(
            f"{at} is gated: accept its terms at {client.constants.ENDPOINT}/{repository}, then log in (hf auth login)"
            " or set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"Revision must be one of {at}, got {revision!r}.") from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"Repository must be one that the Hub has, got {at!r}. If it is private, log in (hf auth login) or set"
            " HF_TOKEN."
        ) from None
    except errors.HFValidationError as error:
        raise UsageError(f"Repository must be hf:owner/name, got {at!r} ({first_line(error)}).") from None
    except errors.OfflineModeIsEnabled:
        raise _Unreachable(repository, "HF_HUB_OFFLINE is set", is_wanted=True) from None
    except errors.HTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise UsageError(f"The Hub refuses the token for {at} ({status}). Log in again: hf auth login") from None
        reason = f"it answers {status}" if status else first_line(error)
        raise _Unreachable(repository, f"The Hub cannot be reached ({reason})", is_wanted=False) from None
    except errors.LocalEntryNotFoundError as error:
        reason = first_line(error.__cause__ or error)
        raise _Unreachable(repository, f"The Hub cannot be reached ({reason})", is_wanted=False) from None
    except (ValueError, TypeError, KeyError, AttributeError):  # a page of a proxy, for instance
        raise _Unreachable(repository, "The Hub cannot be reached (what answers is no Hub)", is_wanted=False) from None
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise VitrailError(f"{at} could not be fetched into the cache ({reason}). Nothing of it is kept.") from None
