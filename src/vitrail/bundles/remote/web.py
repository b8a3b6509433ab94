"""A file at an `https://` address: resumed, at most 16 GiB, in the cache whole or not at all.

`http://` is only for servers on this machine.
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

MOST = 16 * 2**30
"""Bytes of a file at most."""
_ATTEMPTS = 5  # without progress
_PAUSE = 1.0  # seconds before the next one


class Web(Remote):
    """One file. A second time it is only asked for if it has changed."""

    def fetch(self, address: str, sha256: str | None) -> Download:
        parts = parse_address(address)
        name = unquote(parts.path.rpartition("/")[2])
        bare = urlunsplit(parts._replace(query="", fragment=""))  # a query may hold a key
        if not name.endswith(ENDINGS) or Path(name).name != name:
            raise UsageError(
                f"Address must end in {', '.join(ENDINGS)}, got {bare!r}. A repository of the Hugging Face Hub is"
                " hf:owner/name."
            )
        folder = user_folder() / "weights" / hashlib.sha256(address.encode()).hexdigest()[:16]
        copy = _Copy(address, bare, folder / name)
        with file_lock(folder / "lock", lambda other: say(f"waiting for {other}, which fetches the same file")):
            try:
                notes = copy.bring(sha256)
            except OSError as error:
                raise VitrailError(
                    f"The cache {str(folder)!r} cannot be used ({error.strerror}). Remove it, or set VITRAIL_HOME to"
                    " another folder."
                ) from None
        return Download(path=copy.file, address=bare, weights={name: copy.digest}, discard=copy.remove, notes=notes)


class _Cut(Exception):
    """The connection ended early."""


_BROKEN = (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError, urllib.error.URLError)
"""What a connection that breaks raises."""


class _Copy:
    """The copy of a file in our cache, with what is needed to resume and to renew it."""

    def __init__(self, address: str, bare: str, file: Path) -> None:
        self.address, self.bare, self.file = address, bare, file
        self._part = file.with_name(f"{file.name}.part")
        self._state = file.with_name("state.json")
        self.digest = ""

    def bring(self, sha256: str | None) -> tuple[str, ...]:
        """Make the copy complete and up to date; returns notes."""
        state = self._read_state()
        if self.file.exists():
            self.digest = checksum(self.file)
            if self.digest != state.get("sha256"):
                self.remove()
            elif self.digest == sha256:
                return ()
        try:
            self._try_often()
        except _Cut as wall:
            if self.file.exists():
                check_sha256(sha256, self.digest, self.bare)
                return (f"{self.bare} cannot be reached ({wall}): the copy in the cache is used",)
            kept = ""
            if self._come and self._read_state().get("part"):
                kept = f" {self._come:,} bytes have come and stay: the same command goes on."
            else:  # nothing by which the rest could be asked for
                self._forget_part()
            raise VitrailError(
                f"{self.bare} cannot be fetched ({wall}).{kept} Or fetch it where there is a network (curl -LO), bring"
                f" it here, then: vitrail convert {self.file.name} DST"
            ) from None
        except RefusedError as refusal:
            self._forget_part()
            raise UsageError(f"Address must be a file that can be fetched, got {self.bare!r} ({refusal}).") from None
        try:
            check_sha256(sha256, self.digest, self.bare)
        except CorruptFileError:
            self.remove()
            raise
        return ()

    def remove(self) -> None:
        """Remove the copy from the cache."""
        for path in (self.file, self._part, self._state):
            path.unlink(missing_ok=True)

    def _forget_part(self) -> None:
        """Remove what has come of a file that will not be completed."""
        self._part.unlink(missing_ok=True)
        if not self.file.exists():
            self._state.unlink(missing_ok=True)

    def _try_often(self) -> None:
        """Fetch until the file is complete, as long as attempts bring enough for their time."""
        attempts, most = 0, self._come
        while True:
            start = time.monotonic()
            try:
                return self._attempt()
            except (_Cut, *_BROKEN) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    raise RefusedError(_spoken(error)) from None
                least = CHUNK / PATIENCE * (time.monotonic() - start)  # else a few bytes an attempt would never end
                attempts = 0 if self._come > most + least else attempts + 1
                most = max(most, self._come)  # what comes a second time is no progress
                if attempts >= _ATTEMPTS or (not self._come and _is_wall(error)):
                    raise _Cut(_spoken(error)) from None
                time.sleep(_PAUSE)

    @property
    def _come(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _attempt(self) -> None:
        state, headers = self._read_state(), {"Accept-Encoding": "identity", "User-Agent": "vitrail"}
        if self._come and state.get("part"):
            headers |= {"Range": f"bytes={self._come}-", "If-Range": state["part"]}
        elif self.file.exists() and state.get("validator"):
            named = "If-None-Match" if state["validator"].startswith('"') else "If-Modified-Since"
            headers[named] = state["validator"]
        try:
            answer = open_address(self.address, headers)
        except urllib.error.HTTPError as error:
            if error.code == 304 and {"If-None-Match", "If-Modified-Since"} & headers.keys():
                return
            if error.code == 416:  # the file has become shorter
                self._part.unlink(missing_ok=True)
                raise _Cut("the file has changed") from None
            raise
        except ValueError:  # urllib reads the address of a redirect before we do
            raise RefusedError("it leads to an address that cannot be read") from None
        with answer:
            if answer.status != 200 and not (answer.status == 206 and "Range" in headers):
                raise RefusedError(f"the server answers {answer.status} {answer.reason}, which is no whole file")
            self._receive(answer)

    def _receive(self, answer: Any) -> None:
        etag, date = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified", "")
        validator = etag if etag.startswith('"') else date  # a weak one does not promise equal bytes
        begun, total = 0, _length(answer)
        if answer.status == 206:
            begun, total = self._come, self._continued(answer, validator)
            validator = self._read_state()["part"]
        _check_size(total, self.bare)
        if total is not None and shutil.disk_usage(self._part.parent).free < total - begun:
            raise VitrailError(
                f"{self.bare} has {total:,} bytes, for which the disk of {self._part.parent} is too full."
            )
        self._write_state({**self._read_state(), "part": validator})
        say(f"fetching {self.bare}" + (f" ({total:,} bytes)" if total else "") + (f" from {begun:,}" if begun else ""))
        with self._kept(), self._part.open("ab" if begun else "wb") as file:
            _copy_stream(answer, file, self.bare, self.file.name, begun)
        if total is not None and self._come != total:
            raise _Cut(f"the connection ended after {self._come:,} of {total:,} bytes")
        if not self._come:
            raise RefusedError("the file is empty")
        self.digest = checksum(self._part)
        self._write_state({"validator": validator, "sha256": self.digest})
        self._part.replace(self.file)

    def _continued(self, answer: Any, validator: str) -> int:
        """The size of the file whose rest comes; what has come is dropped if the rest is not of the same file."""
        known = self._read_state()["part"]
        # Only a date may be left out of an answer to If-Range.
        is_same = validator == known or (not validator and not known.startswith('"'))
        place = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""), re.ASCII)
        if not is_same or place is None or int(place[1]) != self._come:
            self._part.unlink()
            raise _Cut("the server continues elsewhere" if is_same else "the file has changed")
        return int(place[2])

    @contextlib.contextmanager
    def _kept(self) -> Generator[None]:
        """What has come stays, unless the disk is full or it is not what it should be."""
        try:
            yield
        except CorruptFileError:
            self._forget_part()
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._forget_part()
            raise VitrailError(
                f"{self.bare} could not be written into the cache {self._part.parent} ({error.strerror})."
            ) from None

    def _read_state(self) -> dict[str, str]:
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        is_ours = isinstance(state, dict) and all(isinstance(one, str) and one.isprintable() for one in state.values())
        return state if is_ours else {}

    def _write_state(self, state: dict[str, str]) -> None:
        replace_text(self._state, json.dumps(state))


def _length(answer: Any) -> int | None:
    """The stated size of a whole file; None if it comes in chunks, whose end is marked."""
    if answer.chunked:
        return None
    length = answer.headers.get("Content-Length", "")
    if not (length.isascii() and length.isdecimal()):
        raise RefusedError("the server does not say how many bytes it has, so its end cannot be known")
    return int(length)


def _copy_stream(answer: Any, file: BinaryIO, bare: str, name: str, begun: int) -> None:
    come, told = begun, time.monotonic()
    while chunk := answer.read(CHUNK):
        if not come:
            check_magic_bytes(name, chunk, bare)
        come += len(chunk)
        _check_size(come, bare)
        file.write(chunk)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            say(f"{come:,} bytes have come")


def _check_size(size: int | None, bare: str) -> None:
    if size is not None and size > MOST:
        raise CorruptFileError(path=bare, cause=f"must have at most {MOST:,} bytes, got {size:,} or more")


def _is_wall(error: Exception) -> bool:
    """Whether there is no way to the server at all, so that trying again would only take time."""
    return isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError)


def _spoken(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {str(error.reason).partition(chr(10))[0]}".rstrip()
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended early"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return getattr(reason, "strerror", None) or first_line(reason if isinstance(reason, Exception) else error)
