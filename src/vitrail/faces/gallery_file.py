"""The SQLite file of a face gallery: its tables, and a connection that is safe for untrusted files.

A gallery from an untrusted source may contain a view that never ends, a trigger that changes entries, or pages that
refer to each other in a cycle. A file must therefore have exactly our tables and a valid structure before its contents
are read. Every statement is interrupted by a signal, and after more instructions than a file of this size can need.
"""

import contextlib
import functools
import os
import re
import sqlite3
from collections.abc import Generator
from pathlib import Path
from typing import Any

from vitrail.core.errors import CorruptFileError, UsageError, VitrailError, first_line

PATIENCE = 5.0
"""Seconds to wait for other programs that use the file."""
RESTORE_ADVICE = "Restore it from a copy."
BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
DISK_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE person (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL);
CREATE TABLE template (
    id INTEGER PRIMARY KEY, person INTEGER NOT NULL REFERENCES person, source TEXT UNIQUE NOT NULL,
    vector BLOB NOT NULL, digest BLOB NOT NULL
);
CREATE INDEX template_person ON template (person);
"""

_CHECK_INTERVAL = 10_000  # SQLite instructions between two calls of the progress handler
# Instructions that any statement may take, plus one per byte of the file. Valid galleries need about 0.1 per byte.
_MIN_INSTRUCTIONS = 1_000_000
_MAX_VALUE_BYTES = 2**24  # of a text or an embedding


def describe_use_by_another() -> str:
    """Return the reason why a gallery that another program uses cannot be changed."""
    return f"another program has been using it for {PATIENCE:g} seconds"


class Connection(sqlite3.Connection):
    """A connection to a gallery. Statements are interrupted by a signal, or after too many instructions."""

    path: Path

    def prepare(self, path: Path) -> None:
        """Apply the settings and limits for untrusted files. Must be called before any other statement."""
        self.path, self._checks, self._signal_error = path, 0, None
        self.set_progress_handler(self._watch_statement().__next__, _CHECK_INTERVAL)
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        with self.converted_errors():
            for setting in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
                self.execute(f"PRAGMA {setting}")

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        """Execute a statement and restart the count of its instructions."""
        self._checks = 0
        return super().execute(*statement)

    def _watch_statement(self) -> Generator[bool]:
        """Yield whether to interrupt the running statement.

        A Python signal handler raises in the first Python code that runs, which is this generator. sqlite3 would drop
        the exception and only interrupt the statement. Here it is stored, and `converted_errors` raises it again.
        """
        is_interrupted = False
        while True:
            try:
                yield is_interrupted
                self._checks += 1
                is_interrupted = self._checks * _CHECK_INTERVAL > _MIN_INSTRUCTIONS + self._file_size()
            except GeneratorExit:
                raise
            except BaseException as error:
                self._signal_error, is_interrupted = error, True

    def _file_size(self) -> int:
        journal = self.path.with_name(f"{self.path.name}-wal")
        return sum(file.stat().st_size for file in (self.path, journal) if file.exists())

    @contextlib.contextmanager
    def converted_errors(self) -> Generator[None]:
        """Convert SQLite errors in the block to VitrailError. Raise the exception of a signal handler again."""
        try:
            with _converted_errors(self.path):
                yield
        except VitrailError:
            if (signal_error := self._signal_error) is None:
                raise
            self._signal_error = None
            raise signal_error from None

    def check_structure(self) -> None:
        """Raise CorruptFileError for tables, views, triggers or indexes that are not ours, and for invalid pages."""
        with self.converted_errors():
            if _read_schema(self) != _expected_schema():
                raise CorruptFileError(
                    path=self.path,
                    cause="must have the tables that `vitrail faces enroll` makes, and no views or triggers",
                    advice=RESTORE_ADVICE,
                )
            self.check_pages("quick_check")

    def check_pages(self, pragma: str) -> None:
        """Run SQLite's `quick_check` or `integrity_check`. Raises CorruptFileError if it fails."""
        (verdict,) = self.execute(f"PRAGMA {pragma}(1)").fetchone()
        if verdict != "ok":  # the first line of some verdicts is only a title
            raise CorruptFileError(
                path=self.path, cause=f"is damaged ({verdict.splitlines()[-1]})", advice=RESTORE_ADVICE
            )


def _read_schema(connection: sqlite3.Connection) -> set[tuple[str, ...]]:
    """Return type, name, table and SQL of every entry of the schema, with normalised spaces."""
    rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
    return {(*map(str, entry), re.sub("[ \n]+", " ", str(sql))) for *entry, sql in rows}


@functools.cache
def _expected_schema() -> set[tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return _read_schema(connection)


@contextlib.contextmanager
def _converted_errors(path: Path) -> Generator[None]:
    """Convert SQLite errors in the block to VitrailError with the path of the gallery."""
    try:
        yield
    except UnicodeDecodeError:  # SQLite's message quotes the corrupt text
        raise CorruptFileError(path=path, cause="is damaged: its text is not UTF-8", advice=RESTORE_ADVICE) from None
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in BUSY:
            raise VitrailError(
                f"{str(path)!r} is locked: another program has been writing to it for {PATIENCE:g} seconds. Try again"
                " when it has ended."
            ) from None
        if code == sqlite3.SQLITE_NOTADB:
            raise not_a_gallery(path) from None
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise UsageError(f"Gallery must be a file that can be written, got {str(path)!r} ({error}).") from None
        if code in DISK_FULL:
            raise VitrailError(f"{str(path)!r} cannot be written ({error}); nothing is changed.") from None
        if code == sqlite3.SQLITE_INTERRUPT:
            raise CorruptFileError(
                path=path, cause="is damaged: reading it does not end", advice=RESTORE_ADVICE
            ) from None
        raise CorruptFileError(path=path, cause=f"is damaged ({first_line(error)})", advice=RESTORE_ADVICE) from None


def connect(path: Path) -> Connection:
    """Open an existing gallery file. Its structure is not checked yet (see `Connection.check_structure`)."""
    with _converted_errors(path):
        uri = f"{path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None, factory=Connection)
    try:
        connection.prepare(path)
    except BaseException:
        connection.close()
        raise
    return connection


def create_private(path: Path) -> None:
    """Create an empty file that only its owner can read. SQLite gives its journal the same permissions."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"Gallery must be a file that can be written, got {str(path)!r} ({reason}).") from None


def not_a_gallery(path: Path) -> UsageError:
    """Return the error for a file that is not a gallery."""
    return UsageError(f"Gallery must be a file that `vitrail faces enroll` wrote, got another file, {str(path)!r}.")
