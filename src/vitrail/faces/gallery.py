"""A gallery: the people that a program should know, in one SQLite file.

person        name
template      the embedding of one image of a person, and the SHA-256 of that image; no image is kept
about         the model that made the embeddings, the numbers of images and of changes, the thresholds as `calibrate`
              found them, and whether traces of a removed person are left

SQLite notices damage to its own structures, but not to what they hold: one flipped bit would make Ann another person.
So embeddings and thresholds are kept with a hash of all that must be read together.

Its connection to SQLite, and what is checked before anything is read, are in `gallery_file`.

The journal is a write-ahead log, so that readers and one writer do not wait for each other. A transaction is on disk
when it returns: `kill -9` and power failures lose nothing that was committed.
"""

import contextlib
import hashlib
import json
import re
import sqlite3
import unicodedata
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from vitrail.core.errors import CorruptFileError, UsageError, VitrailError, did_you_mean
from vitrail.core.files import escape_surrogates
from vitrail.evaluation.identification_metrics import mean_templates
from vitrail.faces.gallery_file import BUSY, NO_ROOM, RESTORE, SCHEMA, connect, create_private, foreign, in_use
from vitrail.faces.thresholds import Calibration

FORMAT = 2
TASKS = ("verify", "identify")

_APPLICATION = 0x76747267  # "vtrg", by which `file` and we know a gallery
_NONE = "none"  # of traces, or a threshold
_PAGE = 16384  # bytes; in SQLite's 4096, an embedding of 512 numbers would be alone


def composed(name: str) -> str:
    """A name in the one spelling by which people are compared: some systems write 한 as three characters, others as
    one."""
    return unicodedata.normalize("NFC", name)


def plain_name(name: str) -> str:
    """The name of a person as a gallery keeps it."""
    name = composed(name)
    if not name or name != name.strip() or not name.isprintable():
        raise UsageError(f"Name must be printable text without spaces around it, got {name!r}.")
    return name


class Candidate(NamedTuple):
    """A person of the gallery, and how alike an image is."""

    name: str
    score: float


class Index(NamedTuple):
    """The people of a gallery in memory, to search in."""

    names: tuple[str, ...]
    templates_PD: np.ndarray
    """The mean embedding of each person, as a unit vector, float32."""

    def scores(self, vectors_ND: np.ndarray) -> np.ndarray:
        """The score of every image with every person (N, P)."""
        return vectors_ND @ self.templates_PD.T

    def search(self, vector_D: np.ndarray, count: int = 5) -> list[Candidate]:
        """The most alike people, best first: exact, by one matrix product."""
        scores = self.templates_PD @ vector_D
        some = np.argpartition(-scores, min(count, len(scores)) - 1)[:count] if len(scores) else np.empty(0, np.int64)
        return [Candidate(self.names[at], float(scores[at])) for at in some[np.argsort(-scores[some], kind="stable")]]


class Gallery:
    """A gallery file that is open. Use `open`, and close it, or use it in a `with` statement."""

    def __init__(self, path: Path) -> None:
        self.path, self._connection = path, connect(path)

    @classmethod
    def open(cls, path: str | Path, *, model: str | None = None, bundle: str = "", width: int | None = None) -> Self:
        """Open a gallery. Another `model` (hash of a bundle, which messages call `bundle`) than that of its embeddings
        is refused. With a `width`, a file that does not exist is made, for embeddings of that many numbers."""
        path = Path(path)
        if path.exists() and not path.is_file():
            raise UsageError(f"Gallery must be a file, got {str(path)!r}.")
        if not path.exists() and width is None:
            raise UsageError(
                f"Gallery must be a file that exists, got {str(path)!r}. `vitrail faces enroll` makes one."
            )
        if not path.exists():
            create_private(path)
        gallery = cls(path)
        try:
            gallery._prepare(model, bundle, width)
        except BaseException:
            gallery.close()
            raise
        return gallery

    @classmethod
    def check(cls, path: Path, *, model: str, bundle: str) -> None:
        """Refuse early what `open` with a width would refuse. A file that does not exist, or that a program was making
        when it was killed, is not refused."""
        if path.is_file():
            with contextlib.closing(cls(path)) as gallery, gallery._connection.told():
                if gallery._is_unfinished():
                    return
        if path.exists():
            cls.open(path, model=model, bundle=bundle).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. The last program to do so writes the journal into it."""
        self._connection.close()

    @property
    def model(self) -> str:
        """Hash of the bundle that its embeddings are of."""
        return self._about("model")

    @property
    def bundle(self) -> str:
        """What that bundle was called."""
        return self._about("bundle")

    def people(self) -> dict[str, int]:
        """How many images each person has, by name."""
        with self._connection.told():
            query = "SELECT name, count(template.id) FROM person LEFT JOIN template ON person = person.id"
            found = dict(self._connection.execute(f"{query} GROUP BY person.id ORDER BY name"))
        self._check_names(found)
        return found

    def sources(self) -> dict[str, str]:
        """The name of the person in each image, by the SHA-256 of the image."""
        with self._connection.told():
            query = "SELECT source, name FROM template JOIN person ON person = person.id"
            found = dict(self._connection.execute(query))
        self._check_names(found.values())
        return found

    def enroll(self, name: str, vectors_ND: np.ndarray, sources: Sequence[str]) -> int:
        """Add images of a person, who may be known already, all of them or none. Returns how many are new: those that
        the person has already are left out. An image of somebody else is refused.

        The threshold of identification is dropped, because it depends on who is enrolled.
        """
        name, width = plain_name(name), self._number("width")
        if vectors_ND.shape != (len(sources), width):
            raise UsageError(f"Embeddings must have shape {(len(sources), width)}, got {vectors_ND.shape}.")
        if not _are_units(vectors_ND):
            raise UsageError("Embeddings must be unit vectors, got one of another length.")
        find = "SELECT name FROM template JOIN person ON person = person.id WHERE source = ?"
        with self._writing():
            known = {
                source: row[0] for source in sources if (row := self._connection.execute(find, (source,)).fetchone())
            }
            if taken := [other for other in known.values() if other != name]:
                raise UsageError(f"Image must be of one person, got one of {name!r} that is enrolled as {taken[0]!r}.")
            new = {source: row for row, source in enumerate(sources) if source not in known}
            if not new:
                return 0
            self._add(name, {source: vectors_ND[row] for source, row in new.items()})
        return len(new)

    def _add(self, name: str, vectors: Mapping[str, np.ndarray]) -> None:
        """Write images of a person by their hashes, within a transaction."""
        self._connection.execute("INSERT OR IGNORE INTO person (name) VALUES (?)", (name,))
        (person,) = self._connection.execute("SELECT id FROM person WHERE name = ?", (name,)).fetchone()
        for source, vector_D in vectors.items():
            vector = vector_D.astype("<f4").tobytes()
            self._connection.execute(
                "INSERT INTO template (person, source, vector, digest) VALUES (?, ?, ?, ?)",
                (person, source, vector, _digest(self.model, name, source, vector)),
            )
        self._count_change(len(vectors))

    def remove(self, name: str) -> bool:
        """Remove a person and every trace of them from the file and its journal. If a removal was interrupted before
        that, the same call ends it; False if the name was gone already.

        `secure_delete` overwrites what is deleted, but copies stay where SQLite once moved an entry from one page to
        another; so all that is left is written anew (VACUUM), and the journal is emptied.
        """
        name = plain_name(name)
        with self._writing():
            self._check_entries()  # an entry that has lost its person would stay
            found = self._connection.execute("SELECT id FROM person WHERE name = ?", (name,)).fetchone()
            if found is None and self._about("traces") == _NONE:
                near = did_you_mean(name, list(self.people()))
                raise UsageError(f"Name must be one that is enrolled in {str(self.path)!r}, got {name!r}.{near}")
            if found is not None:
                images = self._connection.execute("DELETE FROM template WHERE person = ?", found).rowcount
                self._connection.execute("DELETE FROM person WHERE id = ?", found)
                self._count_change(-images)
                self._state("traces", f"left by change {self.changes}")
        if reason := self._rewrite():
            raise VitrailError(
                f"{name!r} is removed, but traces remain in {str(self.path)!r} ({reason}): make room, or let the other"
                " program end, then give the same command again."
            )
        return found is not None

    def calibration(self, task: str) -> Calibration | None:
        """The threshold of `verify` or `identify`, if one was set and is still valid."""
        if (value := self._about(task)) == _NONE:
            return None
        digest, _, document = value.partition(" ")
        try:
            if digest != _digest(self.model, task, document).hex():
                raise ValueError(value)
            return Calibration.from_json(json.loads(document))
        except (TypeError, KeyError, ValueError, RecursionError):
            raise CorruptFileError(
                path=self.path, cause=f"is damaged: its threshold of {task} cannot be read"
            ) from None

    @property
    def changes(self) -> int:
        """How often people were enrolled or removed."""
        return self._number("changes")

    def calibrate(self, found: dict[str, Calibration], changes: int) -> None:
        """Set thresholds by task; refused if there were more `changes` since they were found."""
        with self._writing():
            if self.changes != changes:
                raise VitrailError(f"{str(self.path)!r} has been changed meanwhile. Calibrate again.")
            for task, one in found.items():
                document = json.dumps(one.to_json(), sort_keys=True)
                self._state(task, f"{_digest(self.model, task, document).hex()} {document}")

    def index(self) -> Index:
        """Everybody, to search in. It stays as it is while the gallery changes."""
        rows, width = self._entries(), self._number("width")
        if any(not isinstance(vector, bytes) or len(vector) != 4 * width for _, _, vector in rows):
            raise CorruptFileError(path=self.path, cause="is damaged: an embedding has a wrong length")
        people, names = [person for person, _, _ in rows], dict.fromkeys((person, name) for person, name, _ in rows)
        vectors = np.frombuffer(b"".join(vector for _, _, vector in rows), "<f4").reshape(-1, width)
        del rows
        if not _are_units(vectors):
            raise CorruptFileError(path=self.path, cause="is damaged: an embedding is not a unit vector")
        _, starts = np.unique(np.array(people, np.int64), return_index=True)
        return Index(tuple(name for _, name in names), mean_templates(vectors, starts))

    def _entries(self) -> list[tuple[int, str, bytes]]:
        """The number and the name of a person, and an embedding, for every image, sorted by person: none is missing,
        and each is as it was enrolled."""
        with self.reading():
            query = "SELECT person.id, name, source, vector, digest FROM template JOIN person ON person = person.id"
            rows = self._connection.execute(f"{query} ORDER BY person.id").fetchall()
            model, images = self.model, self._number("images")
        self._check_names(name for _, name, *_ in rows)
        if len({source for _, _, source, *_ in rows}) != images or any(
            digest != _digest(model, name, source, vector) for _, name, source, vector, digest in rows
        ):
            raise CorruptFileError(path=self.path, cause=_CHANGED, advice=RESTORE)
        return [(person, name, vector) for person, name, _, vector, _ in rows]

    def _check_entries(self) -> None:
        """Refuse a file of which a part is not as it was written."""
        self._entries()
        self._connection.check_pages("integrity_check")

    def _prepare(self, model: str | None, bundle: str, width: int | None) -> None:
        with self._connection.told():
            for setting in ("synchronous = FULL", "secure_delete = ON", "foreign_keys = ON", "temp_store = MEMORY"):
                self._connection.execute(f"PRAGMA {setting}")
            if width is not None and self._is_unfinished():
                self._connection.execute(f"PRAGMA page_size = {_PAGE}")
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._create(model or "", bundle, width)
            application, version = (
                self._connection.execute(f"PRAGMA {key}").fetchone()[0] for key in ("application_id", "user_version")
            )
        if application != _APPLICATION:
            raise UsageError(foreign(self.path))
        if version > FORMAT:
            raise VitrailError(
                f"{str(self.path)!r} has format {version}; this vitrail reads up to {FORMAT}. Upgrade vitrail."
            )
        if version < 1:
            raise CorruptFileError(path=self.path, cause=f"is damaged: its format is {version}")
        if version < FORMAT:
            raise VitrailError(
                f"{str(self.path)!r} has format {version}, in which damage is not noticed. Enroll its people into a new"
                " gallery."
            )
        self._connection.check_structure()
        if model is not None and model != self.model:
            raise UsageError(
                f"Gallery must be used with the bundle that it was made with ({self.bundle}, hash {self.model[:12]}),"
                f" got {bundle} ({model[:12]}): embeddings of two models, or of aligned and other faces, cannot be"
                " compared."
            )
        if width is not None and width != self._number("width"):
            raise CorruptFileError(
                path=self.path, cause=f"is damaged: it does not state the width of its model, {width}"
            )

    def _is_unfinished(self) -> bool:
        """Whether the file is empty, or a program was killed before it made the tables."""
        # Not count(*): SQLite counts in one instruction, which nothing can interrupt.
        entry = self._connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        return (entry, application) == (None, 0)

    def _create(self, model: str, bundle: str, width: int) -> None:
        with self._writing():
            if not self._is_unfinished():  # another program was faster
                return
            for statement in filter(str.strip, SCHEMA.split(";")):
                self._connection.execute(statement)
            about = {"model": model, "bundle": escape_surrogates(bundle), "width": str(width)}
            about |= {"images": "0", "changes": "0", "traces": _NONE, **dict.fromkeys(TASKS, _NONE)}
            self._connection.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            self._connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._connection.execute(f"PRAGMA user_version = {FORMAT}")

    def _about(self, key: str) -> str:
        with self._connection.told():
            row = self._connection.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        if row is None or not isinstance(row[0], str):
            raise CorruptFileError(path=self.path, cause=f"is damaged: it does not state its {key}")
        return row[0]

    def _state(self, key: str, value: str) -> None:
        """Change what `_about` reads, within a transaction."""
        self._connection.execute("UPDATE about SET value = ? WHERE key = ?", (value, key))

    def _number(self, key: str) -> int:
        text = self._about(key)
        if not re.fullmatch("[0-9]{1,9}", text) or (key == "width" and int(text) < 1):
            raise CorruptFileError(path=self.path, cause=f"is damaged: its {key} cannot be {text[:20]!r}")
        return int(text)

    def _check_names(self, names: Iterable[object]) -> None:
        for name in names:
            if not isinstance(name, str) or not name.isprintable():
                raise CorruptFileError(path=self.path, cause="is damaged: a name is not printable text")

    def _count_change(self, images: int) -> None:
        """Within a transaction that adds so many images: the threshold of identification depended on who was
        enrolled."""
        self._state("identify", _NONE)
        for key, more in (("changes", 1), ("images", images)):
            self._state(key, str(self._number(key) + more))

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        """All that is read in the block is of one moment, whatever other programs write meanwhile."""
        if self._connection.in_transaction:  # of which it is a part
            yield
            return
        with self._connection.told():
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """A transaction: all of it is on disk at the end of the block, or nothing is changed."""
        with self._connection.told():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _rewrite(self) -> str | None:
        """Write all that the file should hold anew, which takes as much room again, and empty its journal. Returns the
        reason if that is not possible now."""
        traces = self._about("traces")
        with self._connection.told():
            try:
                self._connection.execute("VACUUM")
                if reason := self._empty_journal():
                    return reason
                # Unless another program has removed somebody else meanwhile.
                done = "UPDATE about SET value = ? WHERE key = 'traces' AND value = ?"
                self._connection.execute(done, (_NONE, traces))
            except sqlite3.OperationalError as error:
                if (code := error.sqlite_errorcode & 0xFF) not in (*BUSY, *NO_ROOM):
                    raise
                return str(error) if code in NO_ROOM else in_use()
        return None

    def _empty_journal(self) -> str | None:
        busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return in_use() if busy else None


def _digest(*parts: str | bytes) -> bytes:
    """SHA-256 of several parts: their lengths keep what moves from one to the next from going unnoticed."""
    some = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return hashlib.sha256(b"".join([",".join(str(len(part)) for part in some).encode(), b":", *some])).digest()


def _are_units(vectors_ND: np.ndarray) -> bool:
    return bool(np.allclose(np.einsum("nd,nd->n", vectors_ND, vectors_ND), 1, atol=1e-3))


_CHANGED = "is damaged: its entries are not as they were written"
