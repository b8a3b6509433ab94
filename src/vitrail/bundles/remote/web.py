"""Checkpoints at `https://` addresses: single files of at most 16 GiB, resumed and cached atomically.

`http://` is only allowed for servers on this machine.
"""

import contextlib
import errno
import hashlib
import http.client
import json
import re
import shutil
import ssl
import time
import urllib.error
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlunsplit

from vitrail.bundles.file_names import ENDINGS, check_magic_bytes
from vitrail.bundles.remote.base import Download, Remote, check_sha256
from vitrail.bundles.remote.transport import CHUNK, PATIENCE, RefusedError, open_address, parse_address
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError, first_line
from vitrail.core.files import checksum, file_lock, replace_text, user_folder
from vitrail.core.terminal import say

MAX_BYTES = 16 * 2**30
"""Maximum size of a file."""
_ATTEMPTS = 5  # failed attempts in a row without progress
_PAUSE = 1.0  # seconds between attempts


class Web(Remote):
    """Single files. A cached file is fetched again only if the server has another version."""

    def fetch(self, address: str, sha256: str | None) -> Download:
        parts = parse_address(address)
        name = unquote(parts.path.rpartition("/")[2])
        display_address = urlunsplit(parts._replace(query="", fragment=""))  # the query may contain a secret
        if not name.endswith(ENDINGS) or Path(name).name != name:
            raise UsageError(
                f"Address must end in {', '.join(ENDINGS)}, got {display_address!r}. A repository of the Hugging Face"
                " Hub is hf:owner/name."
            )
        folder = user_folder() / "weights" / hashlib.sha256(address.encode()).hexdigest()[:16]
        cached = _CachedFile(address, display_address, folder / name)
        with file_lock(folder / "lock", lambda holder: say(f"waiting for {holder}, which fetches the same file")):
            try:
                notes = cached.update(sha256)
            except OSError as error:
                raise VitrailError(
                    f"The cache {str(folder)!r} cannot be used ({error.strerror}). Remove it, or set VITRAIL_HOME to"
                    " another folder."
                ) from None
        return Download(
            path=cached.file,
            address=display_address,
            weights={name: cached.digest},
            discard=cached.remove,
            notes=notes,
        )


class _Interrupted(Exception):
    """A transfer ended early. The message is the reason."""


_CONNECTION_ERRORS = (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError, urllib.error.URLError)
"""Errors of a connection that breaks."""


class _CachedFile:
    """A file in our cache, with the partial download and the state to resume or update it.

    `display_address` is the address without its query, for messages and the provenance.
    """

    def __init__(self, address: str, display_address: str, file: Path) -> None:
        self.address, self.display_address, self.file = address, display_address, file
        self._part = file.with_name(f"{file.name}.part")
        self._state = file.with_name("state.json")
        self.digest = ""

    def update(self, sha256: str | None) -> tuple[str, ...]:
        """Fetch the file unless the cache has the current version. Set `digest` and return notes.

        If the server cannot be reached, use the cached version. Raise CorruptFileError and remove the file if it does
        not have `sha256`.
        """
        state = self._read_state()
        if self.file.exists():
            self.digest = checksum(self.file)
            if self.digest != state.get("sha256"):
                self.remove()
            elif self.digest == sha256:
                return ()
        try:
            self._fetch()
        except _Interrupted as error:
            if self.file.exists():
                check_sha256(sha256, self.digest, self.display_address)
                return (f"{self.display_address} cannot be reached ({error}): the copy in the cache is used",)
            resume_advice = ""
            if self._part_bytes and self._read_state().get("part"):
                resume_advice = f" {self._part_bytes:,} bytes are kept: run the same command again to resume."
            else:  # without a version, the rest cannot be requested
                self._remove_part()
            raise VitrailError(
                f"{self.display_address} cannot be fetched ({error}).{resume_advice} Or fetch it on another machine"
                f" (curl -LO), copy it to this one, then: vitrail convert {self.file.name} DST"
            ) from None
        except RefusedError as error:
            self._remove_part()
            raise UsageError(
                f"Address must be a file that can be fetched, got {self.display_address!r} ({error})."
            ) from None
        try:
            check_sha256(sha256, self.digest, self.display_address)
        except CorruptFileError:
            self.remove()
            raise
        return ()

    def remove(self) -> None:
        """Remove the file, its partial download and its state from the cache."""
        for path in (self.file, self._part, self._state):
            path.unlink(missing_ok=True)

    def _remove_part(self) -> None:
        """Remove the partial download of a file that cannot be completed."""
        self._part.unlink(missing_ok=True)
        if not self.file.exists():
            self._state.unlink(missing_ok=True)

    def _fetch(self) -> None:
        """Fetch the file in as many attempts as needed, until `_ATTEMPTS` in a row make no progress."""
        failures, most_bytes = 0, self._part_bytes
        while True:
            start = time.monotonic()
            try:
                return self._fetch_once()
            except (_Interrupted, *_CONNECTION_ERRORS) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    raise RefusedError(_connection_message(error)) from None
                # Progress is at least the lowest allowed speed, because a few bytes per attempt would never end. Bytes
                # that had arrived before do not count.
                least_bytes = CHUNK / PATIENCE * (time.monotonic() - start)
                failures = 0 if self._part_bytes > most_bytes + least_bytes else failures + 1
                most_bytes = max(most_bytes, self._part_bytes)
                if failures >= _ATTEMPTS or (not self._part_bytes and _is_unreachable(error)):
                    raise _Interrupted(_connection_message(error)) from None
                time.sleep(_PAUSE)

    @property
    def _part_bytes(self) -> int:
        """Size of the partial download in bytes."""
        return self._part.stat().st_size if self._part.exists() else 0

    def _fetch_once(self) -> None:
        """Request the file once: the rest of a partial download, or the file if it has changed."""
        state, headers = self._read_state(), {"Accept-Encoding": "identity", "User-Agent": "vitrail"}
        if self._part_bytes and state.get("part"):
            headers |= {"Range": f"bytes={self._part_bytes}-", "If-Range": state["part"]}
        elif self.file.exists() and state.get("validator"):
            header = "If-None-Match" if state["validator"].startswith('"') else "If-Modified-Since"
            headers[header] = state["validator"]
        try:
            response = open_address(self.address, headers)
        except urllib.error.HTTPError as error:
            if error.code == 304 and {"If-None-Match", "If-Modified-Since"} & headers.keys():
                return
            if error.code == 416:  # the file has become shorter
                self._part.unlink(missing_ok=True)
                raise _Interrupted("the file has changed") from None
            raise
        except ValueError:  # raised by urllib for the address of a redirect
            raise RefusedError("it redirects to an address that cannot be read") from None
        with response:
            if response.status != 200 and not (response.status == 206 and "Range" in headers):
                reason = f"the server answers {response.status} {response.reason}, which is not a complete file"
                raise RefusedError(reason)
            self._receive(response)

    def _receive(self, response: Any) -> None:
        """Write the body of a response to the partial download, and move it to its place if it is complete."""
        etag, date = response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")
        validator = etag if etag.startswith('"') else date  # a weak ETag does not guarantee equal bytes
        offset, total = 0, _content_length(response)
        if response.status == 206:
            offset, total = self._part_bytes, self._check_continuation(response, validator)
            validator = self._read_state()["part"]
        _check_size(total, self.display_address)
        if total is not None and shutil.disk_usage(self._part.parent).free < total - offset:
            raise VitrailError(
                f"{self.display_address} has {total:,} bytes, which do not fit on the disk of {self._part.parent}."
                " Free some space."
            )
        self._write_state({**self._read_state(), "part": validator})
        say(
            f"fetching {self.display_address}"
            + (f" ({total:,} bytes)" if total else "")
            + (f" from {offset:,}" if offset else "")
        )
        with self._handle_write_errors(), self._part.open("ab" if offset else "wb") as file:
            _copy_stream(response, file, self.display_address, self.file.name, offset)
        if total is not None and self._part_bytes != total:
            raise _Interrupted(f"the connection ended after {self._part_bytes:,} of {total:,} bytes")
        if not self._part_bytes:
            raise RefusedError("the file is empty")
        self.digest = checksum(self._part)
        self._write_state({"validator": validator, "sha256": self.digest})
        self._part.replace(self.file)

    def _check_continuation(self, response: Any, validator: str) -> int:
        """Check that a response continues the partial download, and return the size of the complete file.

        Otherwise remove the partial download and raise `_Interrupted`.
        """
        part_validator = self._read_state()["part"]
        # A response to If-Range may leave out only a date (RFC 9110).
        is_same = validator == part_validator or (not validator and not part_validator.startswith('"'))
        content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""), re.ASCII)
        if not is_same or content_range is None or int(content_range[1]) != self._part_bytes:
            self._part.unlink()
            raise _Interrupted("the server continues at another position" if is_same else "the file has changed")
        return int(content_range[2])

    @contextlib.contextmanager
    def _handle_write_errors(self) -> Generator[None]:
        """Remove the partial download if the disk is full or the content is wrong. Other errors keep it."""
        try:
            yield
        except CorruptFileError:
            self._remove_part()
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._remove_part()
            raise VitrailError(
                f"{self.display_address} could not be written into the cache {self._part.parent} ({error.strerror})."
            ) from None

    def _read_state(self) -> dict[str, str]:
        """Read the SHA-256 and the validators (ETag or date) of the cached file. Empty if missing or invalid."""
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        is_valid = isinstance(state, dict) and all(
            isinstance(value, str) and value.isprintable() for value in state.values()
        )
        return state if is_valid else {}

    def _write_state(self, state: dict[str, str]) -> None:
        replace_text(self._state, json.dumps(state))


def _content_length(response: Any) -> int | None:
    """Return the size of a response's body. None for chunked transfer, which marks its end."""
    if response.chunked:
        return None
    length = response.headers.get("Content-Length", "")
    if not (length.isascii() and length.isdecimal()):
        raise RefusedError("the server does not state the size of the file")
    return int(length)


def _copy_stream(response: Any, file: BinaryIO, address: str, name: str, offset: int) -> None:
    """Copy the body of a response to a file, from `offset` on. Check its type and size, and print progress."""
    size, reported_at = offset, time.monotonic()
    while chunk := response.read(CHUNK):
        if not size:
            check_magic_bytes(name, chunk, address)
        size += len(chunk)
        _check_size(size, address)
        file.write(chunk)
        if time.monotonic() - reported_at > 10:
            reported_at = time.monotonic()
            say(f"{size:,} bytes fetched")


def _check_size(size: int | None, address: str) -> None:
    """Raise CorruptFileError for a file of more than `MAX_BYTES`."""
    if size is not None and size > MAX_BYTES:
        raise CorruptFileError(path=address, cause=f"must have at most {MAX_BYTES:,} bytes, got {size:,} or more")


def _is_unreachable(error: Exception) -> bool:
    """Return whether no connection to the server was made, so that another attempt is pointless."""
    return isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError)


def _connection_message(error: Exception) -> str:
    """Describe an error of a connection in a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {str(error.reason).partition(chr(10))[0]}".rstrip()
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended early"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return getattr(reason, "strerror", None) or first_line(reason if isinstance(reason, Exception) else error)
