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

from vitrail.bundles.file_names import METADATA_FILES, WEIGHTS, choose_weights, read_index
from vitrail.bundles.remote.base import Download, Remote, check_sha256
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError, first_line
from vitrail.core.files import checksum
from vitrail.core.optional import import_extra, import_without_telemetry
from vitrail.core.terminal import say


class Hub(Remote):
    """Repositories of models. Only the weights and the documents that belong to them are fetched."""

    def fetch(self, address: str, sha256: str | None) -> Download:
        repository, revision = _parse_hub_address(address)
        client = _import_client(address)
        snapshot = _list_repository(client, repository, revision)
        weights_name = choose_weights(snapshot.names, f"hf:{snapshot.repository}")
        documents = [_fetch_file(client, snapshot, name) for name in snapshot.names if name in METADATA_FILES]
        # Fetched by the revision that the user named, because the client caches its commit for use offline.
        files = [_fetch_file(client, snapshot, weights_name, revision or client.constants.DEFAULT_REVISION)]
        if files[0].parent.name != snapshot.commit:
            raise VitrailError(f"hf:{repository} changed while it was fetched. Fetch it again.")
        if weights_name.endswith(".index.json"):
            if sha256 is not None:
                raise UsageError(
                    f"--sha256 must be used with a single file, got a repository with several: {weights_name}."
                )
            files += [_fetch_file(client, snapshot, shard) for shard in read_index(files[0])]
        digests = {path.name: _verify_cached_file(path) for path in (*files, *documents)}
        try:
            check_sha256(sha256, digests[weights_name], f"{weights_name} of hf:{snapshot.repository}")
        except CorruptFileError:
            _remove_from_cache(files)
            raise
        return Download(
            path=files[0].parent if weights_name in WEIGHTS else files[0],
            address=f"hf:{snapshot.current_name}@{snapshot.commit}",
            weights={path.name: digests[path.name] for path in files if not path.name.endswith(".json")},
            discard=lambda: _remove_from_cache(files),
            notes=snapshot.notes,
        )


def _import_client(address: str) -> ModuleType:
    """Import huggingface_hub. `address` is the source in the error if it is not installed."""
    client = import_extra("huggingface_hub", extra="hub", subject=f"The source {address}")
    for part in ("constants", "errors"):
        import_without_telemetry(f"huggingface_hub.{part}")
    return client


def _parse_hub_address(address: str) -> tuple[str, str | None]:
    """Split `hf:owner/repository@revision` into repository and revision."""
    repository, at, revision = address.partition(":")[2].removeprefix("//").partition("@")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository, re.ASCII) or (at and not revision):
        raise UsageError(f"Repository must be hf:owner/name, or hf:owner/name@revision, got {address!r}.")
    return repository, revision or None


class _Snapshot(NamedTuple):
    """A repository at one commit."""

    repository: str
    """Name of the repository that the user typed."""
    current_name: str
    """Current name of the repository on the Hub, which differs if it was renamed."""
    commit: str
    names: list[str]
    """File names of the repository. Offline, those in the cache."""
    folder: Path | None = None
    """Offline, the folder in the cache; otherwise None."""
    notes: tuple[str, ...] = ()


def _list_repository(client: ModuleType, repository: str, revision: str | None) -> _Snapshot:
    """List the files of a repository. If the Hub cannot be reached, list those in the cache."""
    try:
        with _convert_client_errors(client, repository, revision):
            info = client.HfApi().model_info(repository, revision=revision)
            if not re.fullmatch(r"[0-9a-f]{40}", info.sha):  # the client uses it in paths
                raise ValueError("not a commit")  # converted to "the response is not from the Hub"
    except _HubUnreachable as error:
        folder = _find_cached_folder(client, repository, revision)
        if folder is None:
            raise
        names = [path.name for path in folder.iterdir() if path.is_file()]
        note = f"{error.reason}: the copy in the cache is used"
        return _Snapshot(
            repository,
            current_name=repository,
            commit=folder.name,
            names=names,
            folder=folder,
            notes=() if error.is_offline_mode else (note,),
        )
    notes = () if info.id == repository else (f"hf:{repository} is now called hf:{info.id}",)
    names = [file.rfilename for file in info.siblings or ()]
    return _Snapshot(repository, current_name=info.id, commit=info.sha, names=names, notes=notes)


def _find_cached_folder(client: ModuleType, repository: str, revision: str | None) -> Path | None:
    """Return the folder of a repository in the client's cache, if it has been fetched before."""
    for name in (*WEIGHTS, *METADATA_FILES):
        cached_path = client.try_to_load_from_cache(repository, name, revision=revision)
        if isinstance(cached_path, str):
            return Path(cached_path).parent
    return None


def _fetch_file(client: ModuleType, snapshot: _Snapshot, name: str, revision: str | None = None) -> Path:
    """Fetch a file into the client's cache and return its path. The default revision is the snapshot's commit."""
    if name not in snapshot.names:
        raise CorruptFileError(f"hf:{snapshot.repository} must have the file {name}, which its index names, got none.")
    if snapshot.folder is not None:
        return snapshot.folder / name
    cached_path = client.try_to_load_from_cache(snapshot.repository, name, revision=snapshot.commit)
    if name.endswith(tuple(WEIGHTS)) and not isinstance(cached_path, str):
        say(f"fetching {name} of hf:{snapshot.repository}")
    with _convert_client_errors(client, snapshot.repository, snapshot.commit):
        return Path(client.hf_hub_download(snapshot.repository, name, revision=revision or snapshot.commit))


def _verify_cached_file(path: Path) -> str:
    """Verify a file in the client's cache by the hash that is its name, and return its SHA-256.

    The client itself compares only sizes. A corrupt file is removed from the cache, and CorruptFileError is raised.
    """
    digest = checksum(path)
    expected = Path(os.readlink(path)).name if path.is_symlink() else ""  # noqa: PTH115 - one step, not the last target
    is_corrupt = len(expected) == 64 and expected != digest
    if len(expected) == 40:  # small files are named by their git hash
        content = path.read_bytes()
        git_hash = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        is_corrupt = git_hash != expected
    if is_corrupt:
        _remove_from_cache([path])
        raise CorruptFileError(
            path=path.name, cause=f"is corrupt: its hash must be {expected}", advice="Fetch it again."
        )
    return digest


def _remove_from_cache(paths: Iterable[Path]) -> None:
    """Remove files and the blobs that they link to from the client's cache."""
    for path in paths:
        blob = path.parent / os.readlink(path) if path.is_symlink() else path  # noqa: PTH115
        path.unlink(missing_ok=True)
        blob.unlink(missing_ok=True)


class _HubUnreachable(VitrailError):
    """The Hub cannot be reached."""

    def __init__(self, repository: str, reason: str, *, is_offline_mode: bool) -> None:
        self.reason, self.is_offline_mode = reason, is_offline_mode
        super().__init__(
            f"{reason}, and hf:{repository} is not in the cache. On a machine with a network, run: hf download"
            f" {repository} --local-dir FOLDER; copy FOLDER to this machine, then: vitrail convert FOLDER DST"
        )


@contextlib.contextmanager
def _convert_client_errors(client: ModuleType, repository: str, revision: str | None) -> Generator[None]:
    """Convert errors of the client to VitrailError and UsageError with one line each."""
    errors, address = client.errors, f"hf:{repository}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about disk space and tokens
            yield
    except errors.GatedRepoError:
        raise UsageError(
            f"{address} is gated: accept its terms at {client.constants.ENDPOINT}/{repository}, then log in"
            " (hf auth login) or set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"Revision must be a branch, tag or commit of {address}, got {revision!r}.") from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"Repository must be one that the Hub has, got {address!r}. If it is private, log in (hf auth login) or set"
            " HF_TOKEN."
        ) from None
    except errors.HFValidationError as error:
        raise UsageError(f"Repository must be hf:owner/name, got {address!r} ({first_line(error)}).") from None
    except errors.OfflineModeIsEnabled:
        raise _HubUnreachable(repository, "HF_HUB_OFFLINE is set", is_offline_mode=True) from None
    except errors.HTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise UsageError(
                f"The Hub refuses the token for {address} ({status}). Log in again: hf auth login"
            ) from None
        reason = f"it answers {status}" if status else first_line(error)
        raise _HubUnreachable(repository, f"The Hub cannot be reached ({reason})", is_offline_mode=False) from None
    except errors.LocalEntryNotFoundError as error:
        reason = first_line(error.__cause__ or error)
        raise _HubUnreachable(repository, f"The Hub cannot be reached ({reason})", is_offline_mode=False) from None
    except (ValueError, TypeError, KeyError, AttributeError):  # for instance the login page of a proxy
        reason = "The Hub cannot be reached (the response is not from the Hub)"
        raise _HubUnreachable(repository, reason, is_offline_mode=False) from None
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise VitrailError(
            f"{address} could not be fetched into the cache ({reason}). No partial file is kept."
        ) from None
