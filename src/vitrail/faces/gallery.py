"""A gallery: the enrolled people of a face recognition program, in one SQLite file.

Its tables:

person        the name of a person
template      the embedding of one image of a person, and the SHA-256 of the image (images are not stored)
about         the model of the embeddings, the numbers of images and of changes, the calibrated thresholds, and whether
              traces of a removed person remain

SQLite detects corruption of its own structures, but not of the stored values: one flipped bit could turn Ann's
embedding into that of another person. Therefore each embedding and each threshold is stored with a hash.

The module `gallery_file` has the connection to SQLite and the checks of untrusted files.

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
from vitrail.faces.gallery_file import (
    BUSY,
    DISK_FULL,
    RESTORE_ADVICE,
    SCHEMA,
    connect,
    create_private,
    describe_use_by_another,
    not_a_gallery,
)
from vitrail.faces.thresholds import Calibration

FORMAT = 2
TASKS = ("verify", "identify")

_APPLICATION_ID = 0x76747267  # "vtrg", marks a SQLite file as a gallery
_NONE = "none"  # value in `about` for no traces or no threshold
_PAGE_SIZE = 16384  # bytes; a page of SQLite's default size, 4096, would hold only one embedding of 512 numbers


def composed(name: str) -> str:
    """Return a name in Unicode's NFC, in which names are compared: some systems write 한 as three characters."""
    return unicodedata.normalize("NFC", name)


def plain_name(name: str) -> str:
    """Return the name of a person as a gallery stores it. Raises UsageError if it is not printable text."""
    name = composed(name)
    if not name or name != name.strip() or not name.isprintable():
        raise UsageError(f"Name must be printable text without spaces around it, got {name!r}.")
    return name


class Candidate(NamedTuple):
    """A person of the gallery, with the score of an image."""

    name: str
    score: float


class Index(NamedTuple):
    """The people of a gallery in memory, for searching."""

    names: tuple[str, ...]
    templates_PD: np.ndarray
    """The mean embedding of each person, as a unit vector, float32."""

    def scores(self, vectors_ND: np.ndarray) -> np.ndarray:
        """Return the score of every image with every person (N, P)."""
        return vectors_ND @ self.templates_PD.T

    def search(self, vector_D: np.ndarray, count: int = 5) -> list[Candidate]:
        """Return the `count` people with the highest scores, highest first. The search is exact: one matrix product."""
        scores = self.templates_PD @ vector_D
        if not len(scores):
            return []
        highest = np.argpartition(-scores, min(count, len(scores)) - 1)[:count]
        order = highest[np.argsort(-scores[highest], kind="stable")]
        return [Candidate(self.names[person], float(scores[person])) for person in order]


class Gallery:
    """An open gallery file. Open it by `Gallery.open`; close it by `close` or a `with` statement."""

    def __init__(self, path: Path) -> None:
        self.path, self._connection = path, connect(path)

    @classmethod
    def open(cls, path: str | Path, *, model: str | None = None, bundle: str = "", width: int | None = None) -> Self:
        """Open a gallery. With `width`, the width of the embeddings, a missing file is created.

        `model` is the hash of a bundle and `bundle` its name in messages. Raises UsageError if the embeddings in the
        gallery were computed by another model.
        """
        path = Path(path)
        if path.exists() and not path.is_file():
            raise UsageError(f"Gallery must be a file, got {str(path)!r}.")
        if not path.exists() and width is None:
            raise UsageError(
                f"Gallery must be a file that exists, got {str(path)!r}. `vitrail faces enroll` creates one."
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
        """Raise the errors that `open` with a width would raise, without creating or changing the file.

        Missing files, and unfinished files of a program that was killed while it created them, are accepted.
        """
        if path.is_file():
            with contextlib.closing(cls(path)) as gallery, gallery._connection.converted_errors():
                if gallery._is_unfinished():
                    return
        if path.exists():
            cls.open(path, model=model, bundle=bundle).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. The last program that closes it merges the journal into it."""
        self._connection.close()

    @property
    def model(self) -> str:
        """Hash of the bundle that computed the embeddings."""
        return self._read_about("model")

    @property
    def bundle(self) -> str:
        """Path or name of the bundle when the gallery was created."""
        return self._read_about("bundle")

    def people(self) -> dict[str, int]:
        """Return the number of images of each person, by name."""
        with self._connection.converted_errors():
            query = "SELECT name, count(template.id) FROM person LEFT JOIN template ON person = person.id"
            counts = dict(self._connection.execute(f"{query} GROUP BY person.id ORDER BY name"))
        self._check_names(counts)
        return counts

    def sources(self) -> dict[str, str]:
        """Return the name of the person in each image, by the SHA-256 of the image."""
        with self._connection.converted_errors():
            query = "SELECT source, name FROM template JOIN person ON person = person.id"
            names = dict(self._connection.execute(query))
        self._check_names(names.values())
        return names

    def enroll(self, name: str, vectors_ND: np.ndarray, sources: Sequence[str]) -> int:
        """Add images of a new or enrolled person in one transaction. Return the number of new images.

        Images that the person already has are skipped. Raises UsageError if an image is enrolled for another person.
        New images remove the threshold of `identify`, because it depends on the enrolled people.
        """
        name, width = plain_name(name), self._read_count("width")
        if vectors_ND.shape != (len(sources), width):
            raise UsageError(f"Embeddings must have shape {(len(sources), width)}, got {vectors_ND.shape}.")
        if not _are_units(vectors_ND):
            raise UsageError("Embeddings must be unit vectors, got one of another length.")
        find = "SELECT name FROM template JOIN person ON person = person.id WHERE source = ?"
        with self._writing():
            enrolled = {
                source: row[0] for source in sources if (row := self._connection.execute(find, (source,)).fetchone())
            }
            if other_names := [enrolled_name for enrolled_name in enrolled.values() if enrolled_name != name]:
                raise UsageError(
                    f"Image must be of one person, got one of {name!r} that is enrolled as {other_names[0]!r}."
                )
            new = {source: index for index, source in enumerate(sources) if source not in enrolled}
            if not new:
                return 0
            self._insert_images(name, {source: vectors_ND[index] for source, index in new.items()})
        return len(new)

    def _insert_images(self, name: str, vectors: Mapping[str, np.ndarray]) -> None:
        """Insert the embeddings of a person's images, by the hash of the image. Must run within a transaction."""
        self._connection.execute("INSERT OR IGNORE INTO person (name) VALUES (?)", (name,))
        (person,) = self._connection.execute("SELECT id FROM person WHERE name = ?", (name,)).fetchone()
        for source, vector_D in vectors.items():
            vector = vector_D.astype("<f4").tobytes()
            self._connection.execute(
                "INSERT INTO template (person, source, vector, digest) VALUES (?, ?, ?, ?)",
                (person, source, vector, _digest(self.model, name, source, vector)),
            )
        self._record_change(len(vectors))

    def remove(self, name: str) -> bool:
        """Remove a person and every trace of them from the file and its journal.

        Returns False if the person was already removed and this call only erased the traces that an interrupted removal
        had left. Raises VitrailError if the traces cannot be erased now.

        SQLite's `secure_delete` overwrites deleted entries, but not the copies that remain where SQLite once moved an
        entry to another page. Therefore the file is rewritten (VACUUM) and the journal emptied.
        """
        name = plain_name(name)
        with self._writing():
            self._check_integrity()  # an embedding without its person would not be deleted
            row = self._connection.execute("SELECT id FROM person WHERE name = ?", (name,)).fetchone()
            if row is None and self._read_about("traces") == _NONE:
                suggestion = did_you_mean(name, list(self.people()))
                raise UsageError(f"Name must be one that is enrolled in {str(self.path)!r}, got {name!r}.{suggestion}")
            if row is not None:
                images = self._connection.execute("DELETE FROM template WHERE person = ?", row).rowcount
                self._connection.execute("DELETE FROM person WHERE id = ?", row)
                self._record_change(-images)
                self._write_about("traces", f"left by change {self.changes}")
        if reason := self._rewrite_file():
            raise VitrailError(
                f"{name!r} is removed, but traces remain in {str(self.path)!r} ({reason}). Free disk space, or wait"
                " until the other program has ended; then run the same command again."
            )
        return row is not None

    def calibration(self, task: str) -> Calibration | None:
        """Return the calibrated threshold of `verify` or `identify`; None if there is none or it was removed."""
        if (value := self._read_about(task)) == _NONE:
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
        """Number of enrolments and removals so far."""
        return self._read_count("changes")

    def calibrate(self, calibrations: dict[str, Calibration], changes: int) -> None:
        """Store thresholds by task. Raises VitrailError if the gallery has had other `changes` since calibration."""
        with self._writing():
            if self.changes != changes:
                raise VitrailError(f"{str(self.path)!r} was changed during calibration. Calibrate again.")
            for task, calibration in calibrations.items():
                document = json.dumps(calibration.to_json(), sort_keys=True)
                self._write_about(task, f"{_digest(self.model, task, document).hex()} {document}")

    def index(self) -> Index:
        """Read all people into memory, for searching. The index does not follow later changes of the gallery."""
        rows, width = self._read_entries(), self._read_count("width")
        if any(not isinstance(vector, bytes) or len(vector) != 4 * width for _, _, vector in rows):
            raise CorruptFileError(path=self.path, cause="is damaged: an embedding has a wrong length")
        people, names = [person for person, _, _ in rows], dict.fromkeys((person, name) for person, name, _ in rows)
        vectors = np.frombuffer(b"".join(vector for _, _, vector in rows), "<f4").reshape(-1, width)
        del rows
        if not _are_units(vectors):
            raise CorruptFileError(path=self.path, cause="is damaged: an embedding is not a unit vector")
        _, starts = np.unique(np.array(people, np.int64), return_index=True)
        return Index(tuple(name for _, name in names), mean_templates(vectors, starts))

    def _read_entries(self) -> list[tuple[int, str, bytes]]:
        """Return the id and name of the person and the embedding of every image, sorted by person.

        Raises CorruptFileError if an entry is missing or its hash is wrong.
        """
        with self.reading():
            query = "SELECT person.id, name, source, vector, digest FROM template JOIN person ON person = person.id"
            rows = self._connection.execute(f"{query} ORDER BY person.id").fetchall()
            model, images = self.model, self._read_count("images")
        self._check_names(name for _, name, *_ in rows)
        if len({source for _, _, source, *_ in rows}) != images or any(
            digest != _digest(model, name, source, vector) for _, name, source, vector, digest in rows
        ):
            raise CorruptFileError(path=self.path, cause=_CHANGED_ENTRIES, advice=RESTORE_ADVICE)
        return [(person, name, vector) for person, name, _, vector, _ in rows]

    def _check_integrity(self) -> None:
        """Raise CorruptFileError if an entry or a page of the file is corrupt."""
        self._read_entries()
        self._connection.check_pages("integrity_check")

    def _prepare(self, model: str | None, bundle: str, width: int | None) -> None:
        """Apply SQLite settings, create the tables of a new file, and check format, structure, model and width."""
        with self._connection.converted_errors():
            for setting in ("synchronous = FULL", "secure_delete = ON", "foreign_keys = ON", "temp_store = MEMORY"):
                self._connection.execute(f"PRAGMA {setting}")
            if width is not None and self._is_unfinished():
                self._connection.execute(f"PRAGMA page_size = {_PAGE_SIZE}")
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._create_tables(model or "", bundle, width)
            application_id, version = (
                self._connection.execute(f"PRAGMA {key}").fetchone()[0] for key in ("application_id", "user_version")
            )
        if application_id != _APPLICATION_ID:
            raise not_a_gallery(self.path)
        if version > FORMAT:
            raise VitrailError(
                f"{str(self.path)!r} has format {version}; this vitrail reads up to {FORMAT}. Upgrade vitrail."
            )
        if version < 1:
            raise CorruptFileError(path=self.path, cause=f"is damaged: its format is {version}")
        if version < FORMAT:
            raise VitrailError(
                f"{str(self.path)!r} has format {version}, in which corruption is not detected. Enroll its people"
                " into a new gallery."
            )
        self._connection.check_structure()
        if model is not None and model != self.model:
            raise UsageError(
                f"Gallery must be used with the bundle that it was created with ({self.bundle}, hash"
                f" {self.model[:12]}), got {bundle} ({model[:12]}). Embeddings of two models, or of aligned and"
                " unaligned faces, cannot be compared."
            )
        if width is not None and width != self._read_count("width"):
            raise CorruptFileError(
                path=self.path, cause=f"is damaged: it does not state the width of its model, {width}"
            )

    def _is_unfinished(self) -> bool:
        """Return whether the file is empty, or a program was killed before it created the tables."""
        # Not count(*): SQLite counts in a single instruction, which cannot be interrupted.
        entry = self._connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        (application_id,) = self._connection.execute("PRAGMA application_id").fetchone()
        return (entry, application_id) == (None, 0)

    def _create_tables(self, model: str, bundle: str, width: int) -> None:
        with self._writing():
            if not self._is_unfinished():  # another program has created them meanwhile
                return
            for statement in filter(str.strip, SCHEMA.split(";")):
                self._connection.execute(statement)
            about = {"model": model, "bundle": escape_surrogates(bundle), "width": str(width)}
            about |= {"images": "0", "changes": "0", "traces": _NONE, **dict.fromkeys(TASKS, _NONE)}
            self._connection.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            self._connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            self._connection.execute(f"PRAGMA user_version = {FORMAT}")

    def _read_about(self, key: str) -> str:
        """Return a value of the table `about`."""
        with self._connection.converted_errors():
            row = self._connection.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        if row is None or not isinstance(row[0], str):
            raise CorruptFileError(path=self.path, cause=f"is damaged: it does not state its {key}")
        return row[0]

    def _write_about(self, key: str, value: str) -> None:
        """Change a value of the table `about`. Must run within a transaction."""
        self._connection.execute("UPDATE about SET value = ? WHERE key = ?", (value, key))

    def _read_count(self, key: str) -> int:
        """Return a number of the table `about`."""
        text = self._read_about(key)
        if not re.fullmatch("[0-9]{1,9}", text) or (key == "width" and int(text) < 1):
            raise CorruptFileError(path=self.path, cause=f"is damaged: its {key} cannot be {text[:20]!r}")
        return int(text)

    def _check_names(self, names: Iterable[object]) -> None:
        for name in names:
            if not isinstance(name, str) or not name.isprintable():
                raise CorruptFileError(path=self.path, cause="is damaged: a name is not printable text")

    def _record_change(self, images: int) -> None:
        """Count a change that adds (or, if negative, removes) images. Must run within the transaction of the change.

        Also removes the threshold of `identify`, which depends on the enrolled people.
        """
        self._write_about("identify", _NONE)
        for key, increment in (("changes", 1), ("images", images)):
            self._write_about(key, str(self._read_count(key) + increment))

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        """Read transaction: all reads in the block see one state of the gallery, also if other programs write."""
        if self._connection.in_transaction:  # the block becomes part of it
            yield
            return
        with self._connection.converted_errors():
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """Write transaction: committed to disk at the end of the block, or rolled back if the block raises."""
        with self._connection.converted_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _rewrite_file(self) -> str | None:
        """Rewrite the file without traces of removed people, and empty its journal.

        Needs free disk space for a second copy. Returns None if done, or the reason why it is not possible now.
        """
        traces = self._read_about("traces")
        with self._connection.converted_errors():
            try:
                self._connection.execute("VACUUM")
                if reason := self._empty_journal():
                    return reason
                # The condition fails if another program has removed another person meanwhile.
                update = "UPDATE about SET value = ? WHERE key = 'traces' AND value = ?"
                self._connection.execute(update, (_NONE, traces))
            except sqlite3.OperationalError as error:
                if (code := error.sqlite_errorcode & 0xFF) not in (*BUSY, *DISK_FULL):
                    raise
                return str(error) if code in DISK_FULL else describe_use_by_another()
        return None

    def _empty_journal(self) -> str | None:
        """Merge the journal into the file and empty it. Returns None if done, or the reason why it is not possible."""
        busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return describe_use_by_another() if busy else None


def _digest(*parts: str | bytes) -> bytes:
    """Return the SHA-256 of several parts and their lengths, so that no other division into parts has the same hash."""
    contents = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    lengths = ",".join(str(len(content)) for content in contents)
    return hashlib.sha256(b"".join([lengths.encode(), b":", *contents])).digest()


def _are_units(vectors_ND: np.ndarray) -> bool:
    return bool(np.allclose(np.einsum("nd,nd->n", vectors_ND, vectors_ND), 1, atol=1e-3))


_CHANGED_ENTRIES = "is damaged: its entries are not as they were written"
