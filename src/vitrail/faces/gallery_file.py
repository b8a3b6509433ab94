"""The SQLite file of a gallery: its tables, and a connection that trusts nothing in it.

A gallery from elsewhere may be forged: a view that never ends, a trigger that changes entries, pages that refer to each
other. So a file must have exactly our tables and a sound structure before anything else is read from it, and every
statement ends after a signal, or after more instructions than a file of its size can need.
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
"""Seconds to wait for other programs."""
RESTORE = "Restore it from a copy."
BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE person (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL);
CREATE TABLE template (
    id INTEGER PRIMARY KEY, person INTEGER NOT NULL REFERENCES person, source TEXT UNIQUE NOT NULL,
    vector BLOB NOT NULL, digest BLOB NOT NULL
);
CREATE INDEX template_person ON template (person);
"""

_CHECKED_EVERY = 10_000  # instructions of SQLite between two looks at a statement
_SHORT = 1_000_000  # instructions that any statement may take, plus one for each byte of the file (0.1 is enough)
_LONGEST_VALUE = 2**24  # bytes of a text or an embedding


def in_use() -> str:
    """Why a file cannot be changed now."""
    return f"another program has been using it for {PATIENCE:g} seconds"


class Connection(sqlite3.Connection):
    """A connection to a gallery. Its statements end after a signal, or after too many instructions."""

    path: Path

    def prepare(self, path: Path) -> None:
        """Distrust the file, and watch every statement, before anything is read."""
        self.path, self._checks, self._raised = path, 0, None
        self.set_progress_handler(self._watch().__next__, _CHECKED_EVERY)
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        with self.told():
            for setting in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
                self.execute(f"PRAGMA {setting}")

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        """Execute a statement; its instructions are counted from zero."""
        self._checks = 0
        return super().execute(*statement)

    def _watch(self) -> Generator[bool]:
        """Yield whether to end the statement that runs.

        A handler of signals raises in the first Python code that runs, which is this; sqlite3 would drop the exception
        and only end the statement. In a generator it arrives at `yield`, so that `told` can raise it again.
        """
        ends = False
        while True:
            try:
                yield ends
                self._checks += 1
                ends = self._checks * _CHECKED_EVERY > _SHORT + self._size()
            except GeneratorExit:
                raise
            except BaseException as raised:
                self._raised, ends = raised, True

    def _size(self) -> int:
        journal = self.path.with_name(f"{self.path.name}-wal")
        return sum(file.stat().st_size for file in (self.path, journal) if file.exists())

    @contextlib.contextmanager
    def told(self) -> Generator[None]:
        """Convert errors of SQLite; an exception that a handler of signals raised is raised again."""
        try:
            with _told(self.path):
                yield
        except VitrailError:
            if (raised := self._raised) is None:
                raise
            self._raised = None
            raise raised from None

    def check_structure(self) -> None:
        """Reject tables, views, triggers and indexes that are not ours, and pages that are in two places."""
        with self.told():
            if _schema(self) != _expected_schema():
                raise CorruptFileError(
                    path=self.path,
                    cause="must have the tables that `vitrail faces enroll` makes, and no views or triggers",
                    advice=RESTORE,
                )
            self.check_pages("quick_check")

    def check_pages(self, pragma: str) -> None:
        """Run SQLite's own check: `quick_check` or `integrity_check`."""
        (verdict,) = self.execute(f"PRAGMA {pragma}(1)").fetchone()
        if verdict != "ok":  # some verdicts have a title
            raise CorruptFileError(path=self.path, cause=f"is damaged ({verdict.splitlines()[-1]})", advice=RESTORE)


def _schema(connection: sqlite3.Connection) -> set[tuple[str, ...]]:
    """Type, name, table and SQL of every entry of the schema; spaces count once."""
    rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
    return {(*map(str, entry), re.sub("[ \n]+", " ", str(sql))) for *entry, sql in rows}


@functools.cache
def _expected_schema() -> set[tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return _schema(connection)


@contextlib.contextmanager
def _told(path: Path) -> Generator[None]:
    """SQLite's errors in our words."""
    try:
        yield
    except UnicodeDecodeError:  # where a message of SQLite quotes what is damaged
        raise CorruptFileError(path=path, cause="is damaged: its text is not UTF-8", advice=RESTORE) from None
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in BUSY:
            raise VitrailError(
                f"{str(path)!r} is locked: another program has been writing to it for {PATIENCE:g} seconds. Try again"
                " when it has ended."
            ) from None
        if code == sqlite3.SQLITE_NOTADB:
            raise UsageError(foreign(path)) from None
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise UsageError(f"Gallery must be a file that can be written, got {str(path)!r} ({error}).") from None
        if code in NO_ROOM:
            raise VitrailError(f"{str(path)!r} cannot be written ({error}); nothing is changed.") from None
        if code == sqlite3.SQLITE_INTERRUPT:
            raise CorruptFileError(path=path, cause="is damaged: reading it does not end", advice=RESTORE) from None
        raise CorruptFileError(path=path, cause=f"is damaged ({first_line(error)})", advice=RESTORE) from None


def connect(path: Path) -> Connection:
    """Open a file that exists."""
    with _told(path):
        uri = f"{path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None, factory=Connection)
    try:
        connection.prepare(path)
    except BaseException:
        connection.close()
        raise
    return connection


def create_private(path: Path) -> None:
    """An empty file that only its owner can read; its journal gets the same permissions."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"Gallery must be a file that can be written, got {str(path)!r} ({reason}).") from None


def foreign(path: Path) -> str:
    """The error about a file that is no gallery."""
    return f"Gallery must be a file that `vitrail faces enroll` made, got {str(path)!r}, which is something else."
