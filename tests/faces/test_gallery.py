"""The gallery: exact search, one model, nothing lost by kill -9, nothing left of who is removed."""

import json
import math
import re
import shutil
import signal
import sqlite3
import stat
import struct
import subprocess
import sys
import threading
import time
import unicodedata

import numpy as np
import pytest

from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.faces import gallery as module
from vitrail.faces import gallery_file
from vitrail.faces.gallery import Gallery
from vitrail.faces.thresholds import Calibration

WIDTH = 24
THRESHOLD = Calibration(far=0.1, threshold=0.5, errors=10, trials=100, interval=(0.05, 0.18), people=9, data="x")


def vectors(count, seed=0, width=WIDTH):
    found = np.random.default_rng(seed).normal(size=(count, width))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def hashes(count, seed=0):
    return [np.random.default_rng((seed, number)).bytes(32).hex() for number in range(count)]


def make(path, people=3, images=2, model="m" * 64):
    """A gallery of made-up people `Person 0`, ...; returns their embeddings (people, images, width)."""
    every = vectors(people * images).reshape(people, images, WIDTH)
    with Gallery.open(path, model=model, bundle="face", width=WIDTH) as opened:
        for number in range(people):
            opened.enroll(f"Person {number}", every[number], hashes(images, number))
    return every


@pytest.fixture
def path(tmp_path):
    return tmp_path / "people.gallery"


def test_people_are_found_by_their_mean_exactly(path):
    every = make(path, people=50, images=3)
    with Gallery.open(path, model="m" * 64) as opened:
        index = opened.index()
        assert opened.people() == {f"Person {number}": 3 for number in range(50)}
    means = every.astype(np.float64).sum(axis=1)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    assert (index.templates_PD.dtype, index.templates_PD.shape) == (np.float32, (50, WIDTH))
    for probe in vectors(5, seed=8):
        scores = means @ probe
        found = index.search(probe, 4)
        assert [match.name for match in found] == [f"Person {at}" for at in np.argsort(-scores)[:4]]
        assert [match.score for match in found] == pytest.approx(np.sort(scores)[::-1][:4], abs=1e-6)
    assert len(index.search(probe, 1000)) == 50


def test_images_are_added_once_and_of_one_person(path):
    make(path)
    with Gallery.open(path, model="m" * 64, width=WIDTH) as opened:
        assert opened.enroll("Person 1", vectors(3, 5), [*hashes(2, 1), "new"]) == 1
        assert opened.enroll("Person 1", vectors(1, 5), ["new"]) == 0
        assert opened.people()["Person 1"] == 3
        with pytest.raises(UsageError, match="got one of 'Person 2' that is enrolled as 'Person 1'"):
            opened.enroll("Person 2", vectors(2, 6), ["newest", "new"])
        assert "newest" not in opened.sources()
        assert opened.sources()["new"] == "Person 1"


def test_a_name_is_the_same_in_every_spelling_of_unicode(path):
    decomposed = unicodedata.normalize("NFD", "김한글")
    with Gallery.open(path, model="m", width=WIDTH) as opened:
        opened.enroll(decomposed, vectors(1), ["a"])
        opened.enroll("김한글", vectors(1, 1), ["b"])
        assert opened.people() == {"김한글": 2}
        assert opened.remove(decomposed)
        for wrong in ("", " Ann", "Ann\n", "\x00"):
            with pytest.raises(UsageError, match="Name must be printable text"):
                opened.enroll(wrong, vectors(1), ["c"])


def test_only_the_owner_can_read_it(path):
    make(path)
    with Gallery.open(path) as opened:
        opened.enroll("Ann", vectors(1), ["a"])
        files = [path, *path.parent.glob("*-wal"), *path.parent.glob("*-shm")]
        assert len(files) == 3
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_another_model_is_refused(path):
    make(path)
    with pytest.raises(UsageError, match=r"made with \(face, hash mmmmmmmmmmmm\), got other \(nnnnnnnnnnnn\)"):
        Gallery.open(path, model="n" * 64, bundle="other", width=WIDTH)


def test_an_empty_gallery_finds_nobody(path):
    make(path, people=1)
    with Gallery.open(path) as opened:
        opened.remove("Person 0")
        assert opened.index().search(vectors(1)[0]) == []


# Thresholds


def test_thresholds_are_kept_and_that_of_identify_only_for_these_people(path):
    make(path)
    with Gallery.open(path) as opened:
        assert opened.calibration("verify") is None
        opened.calibrate({"verify": THRESHOLD, "identify": THRESHOLD}, opened.changes)
        assert opened.calibration("identify") == THRESHOLD
        opened.enroll("Person 0", vectors(1), hashes(1, 0))  # nothing new
        assert opened.calibration("identify") == THRESHOLD
        opened.enroll("Person 3", vectors(1), ["a"])
        assert (opened.calibration("identify"), opened.calibration("verify")) == (None, THRESHOLD)
        before = opened.changes
        opened.calibrate({"identify": THRESHOLD}, before)
        opened.remove("Person 3")
        assert opened.calibration("identify") is None
        with pytest.raises(VitrailError, match="has been changed meanwhile"):
            opened.calibrate({"identify": THRESHOLD}, before)


# Files that are something else


def damage(path):
    """Overwrite what follows the first page."""
    with path.open("r+b") as file:
        file.seek(16384)
        file.write(b"\xa5" * (path.stat().st_size - 16384))


def read_all(path):
    with Gallery.open(path) as opened:
        opened.index()
        opened.calibration("identify")


def change(path, statement):
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


def forge(path, document=None, **changed):
    document = document or json.dumps(THRESHOLD.to_json() | changed)
    digest = module._digest("m" * 64, "identify", document).hex()
    change(path, f"UPDATE about SET value = '{digest} {document}' WHERE key = 'identify'")


def forge_vector(path, vector):
    with sqlite3.connect(path) as connection:
        query = "SELECT name, source FROM template JOIN person ON person = person.id WHERE template.id = 1"
        digest = module._digest("m" * 64, *connection.execute(query).fetchone(), vector)
        connection.execute("UPDATE template SET vector = ?, digest = ? WHERE id = 1", (vector, digest))
    connection.close()


@pytest.mark.parametrize(
    ("change_it", "kind", "message"),
    [
        (lambda path: path.write_bytes(b"not a database at all" * 999), UsageError, "which is something else"),
        (lambda path: path.write_bytes(b""), UsageError, "which is something else"),
        (lambda path: change(path, "PRAGMA application_id = 7"), UsageError, "which is something else"),
        (
            lambda path: change(path, "PRAGMA user_version = 3"),
            VitrailError,
            "has format 3; this vitrail reads up to 2",
        ),
        (lambda path: change(path, "PRAGMA user_version = 1"), VitrailError, "has format 1, in which damage"),
        (damage, CorruptFileError, "is damaged"),
        (lambda path: change(path, "DELETE FROM about WHERE key = 'width'"), CorruptFileError, "not state its width"),
        (lambda path: forge_vector(path, b"\0"), CorruptFileError, "a wrong length"),
        (lambda path: forge_vector(path, bytes(4 * WIDTH)), CorruptFileError, "unit vector"),
        (lambda path: forge_vector(path, "text"), CorruptFileError, "a wrong length"),
        (
            lambda path: change(path, "UPDATE person SET name = 'Ann' WHERE id = 1"),
            CorruptFileError,
            "not as they were",
        ),
        (
            lambda path: change(path, "UPDATE template SET person = 2 WHERE id = 1"),
            CorruptFileError,
            "not as they were",
        ),
        (lambda path: change(path, "DELETE FROM template WHERE id = 1"), CorruptFileError, "not as they were"),
        (lambda path: change(path, "DELETE FROM person WHERE id = 1"), CorruptFileError, "not as they were"),
        (
            lambda path: change(path, "UPDATE about SET value = 'abc' WHERE key = 'width'"),
            CorruptFileError,
            "width cannot",
        ),
        (
            lambda path: change(path, "UPDATE about SET value = '0' WHERE key = 'width'"),
            CorruptFileError,
            "width cannot",
        ),
        (
            lambda path: change(path, "UPDATE about SET value = '1' WHERE key = 'width'"),
            CorruptFileError,
            "wrong length",
        ),
        (
            lambda path: change(path, "UPDATE about SET value = x'00' WHERE key = 'width'"),
            CorruptFileError,
            "not state its",
        ),
        (
            lambda path: change(path, "UPDATE person SET name = x'00' WHERE id = 1"),
            CorruptFileError,
            "not printable text",
        ),
        (lambda path: change(path, "PRAGMA user_version = -3"), CorruptFileError, "its format is -3"),
        (lambda path: forge(path, "[]"), CorruptFileError, "cannot be read"),
        (lambda path: forge(path, "[" * 100_000), CorruptFileError, "cannot be read"),
        (lambda path: forge(path, threshold="0.5"), CorruptFileError, "cannot be read"),
        (lambda path: forge(path, threshold=math.nan), CorruptFileError, "cannot be read"),
        (lambda path: forge(path, interval=[0, math.inf]), CorruptFileError, "cannot be read"),
        (lambda path: forge(path, trials=1.5), CorruptFileError, "cannot be read"),
        (lambda path: forge(path, data=None), CorruptFileError, "cannot be read"),
    ],
)
def test_files_that_are_damaged_or_no_galleries_are_one_line(path, change_it, kind, message):
    make(path)
    change_it(path)
    with pytest.raises(kind, match=message) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == (2 if kind is UsageError else 1)


# Files from elsewhere

ENDLESS = "WITH RECURSIVE n (id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n)"


@pytest.mark.parametrize(
    "statements",
    [
        ("ALTER TABLE person RENAME TO other", f"CREATE VIEW person AS {ENDLESS} SELECT id, 'x' || id AS name FROM n"),
        ("ALTER TABLE about RENAME TO other", f"CREATE VIEW about AS {ENDLESS} SELECT id AS key, id AS value FROM n"),
        (f"CREATE VIEW more AS {ENDLESS} SELECT * FROM n",),
        ("CREATE TRIGGER t AFTER INSERT ON template BEGIN UPDATE person SET name = 'Eve' WHERE id = 1; END",),
        ("CREATE TABLE more (x)",),
        ("CREATE VIRTUAL TABLE more USING fts5 (x)",),
        ("CREATE INDEX more ON person (upper(name))",),
        ("ALTER TABLE person ADD COLUMN more TEXT",),
        ("ALTER TABLE person ADD COLUMN more GENERATED ALWAYS AS (name || name)",),
        ("DROP INDEX template_person",),
        ("DROP INDEX template_person", "CREATE INDEX template_person ON template (source)"),
        ("ANALYZE",),
        (
            "PRAGMA writable_schema = ON",
            "UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', 'NOT NULL CHECK (1)') WHERE name = 'person'",
        ),
    ],
)
def test_tables_that_are_not_ours_are_rejected_before_anything_is_written(path, statements):
    make(path)
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()
    before = path.read_bytes()
    for open_it in (Gallery.open, lambda path: Gallery.open(path, model="m" * 64, width=WIDTH)):
        with pytest.raises(CorruptFileError, match="must have the tables that `vitrail faces enroll` makes") as caught:
            open_it(path).close()
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def tree_page(children, header=0, size=512):
    """An inner page of a table, whose children may be one page many times."""
    page = bytearray(size)
    for number, child in enumerate(children[:-1]):
        place = size - 5 * (number + 1)
        struct.pack_into(">IB", page, place, child, number + 1)
        struct.pack_into(">H", page, header + 12 + 2 * number, place)
    count = len(children) - 1
    struct.pack_into(">BHHHBI", page, header, 5, 0, count, size - 5 * count, 0, children[-1])
    return page


def index_page(name, table, root, size=512):
    """A page of the schema with one entry: an index that belongs to a constraint."""
    texts = [b"index", name.encode(), table.encode()]
    header = bytes([13 + 2 * len(text) for text in texts] + [1, 0])
    record = bytes([len(header) + 1]) + header + b"".join(texts) + bytes([root])
    cell = bytes([len(record), 100]) + record
    page = bytearray(size)
    struct.pack_into(">BHHHBH", page, 0, 13, 0, 1, size - len(cell), 0, size - len(cell))
    page[size - len(cell) :] = cell
    return page


def forge_tree(path, table):
    """Let the pages of a table, or of the schema, refer to the next page thirty times each: reading would not end."""
    connection = sqlite3.connect(path)
    roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
    connection.close()
    content = path.read_bytes()
    pages = [bytearray(content[at : at + 512]) for at in range(0, len(content), 512)]
    tree = [tree_page([len(pages) + 2 + level] * 30) for level in range(12)]
    if table == "sqlite_master":
        first = pages[0]
        places = [108, *struct.unpack_from(">3H", first, 112)[: struct.unpack_from(">H", first, 103)[0]]]
        children = [struct.unpack_from(">I", first, place)[0] for place in (*places[1:], places[0])]
        pages[0] = first[:100] + tree_page([*children, len(pages) + 1], header=100)[100:]
        leaf = index_page("sqlite_autoindex_about_1", "about", roots["sqlite_autoindex_about_1"])
    else:
        leaf, pages[roots[table] - 1] = pages[roots[table] - 1], tree_page([len(pages) + 1] * 30)
    pages += [*tree, leaf]
    struct.pack_into(">I", pages[0], 28, len(pages))
    path.write_bytes(b"".join(pages))


@pytest.mark.parametrize(
    ("table", "reason"),
    [("sqlite_master", "reading it does not end"), ("about", "out of order"), ("template", "out of order")],
)
def test_pages_that_make_reading_endless_are_one_line(path, monkeypatch, table, reason):
    monkeypatch.setattr(module, "_PAGE", 512)
    make(path)
    forge_tree(path, table)
    start = time.monotonic()
    with pytest.raises(CorruptFileError, match=f"is damaged.*{reason}") as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 10


STUCK = f"""
import signal, sys
from vitrail.faces import gallery, gallery_file

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
gallery_file._SHORT = 10**15
try:
    with gallery.Gallery.open(sys.argv[1]) as opened, opened.reading():
        print("ready", flush=True)
        opened._connection.execute("{ENDLESS} SELECT count(*) FROM n WHERE id < 0").fetchall()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_statement_that_runs(path, number, code):
    make(path)
    process = subprocess.Popen([sys.executable, "-c", STUCK, path], stdout=-1, stderr=-1)
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    process.send_signal(number)
    try:
        assert (process.communicate(timeout=10)[1], process.returncode) == (b"", code)
    finally:
        process.kill()


def answers(path):
    """All that a program decides by."""
    with Gallery.open(path, model="m" * 64) as opened, opened.reading():
        index = opened.index()
        found = [index.search(probe, 3) for probe in vectors(4, seed=8)]
        return found, opened.calibration("verify"), opened.calibration("identify")


def damages(content, chance):
    """A flipped bit where there is something; a byte of any value anywhere; an end that is cut off."""
    used = np.flatnonzero(np.frombuffer(content, np.uint8))
    for _ in range(300):
        at = int(chance.choice(used))
        yield content[:at] + bytes([content[at] ^ 1 << int(chance.integers(8))]) + content[at + 1 :]
        at = int(chance.integers(len(content)))
        yield content[:at] + chance.bytes(1) + content[at + 1 :]
    for end in (*chance.integers(0, len(content), 20), *range(0, len(content), 16384)):
        yield content[: int(end)]


def test_a_damaged_file_is_an_error_or_answers_as_before(path):
    """Never a wrong name, score or threshold."""
    make(path)
    with Gallery.open(path) as opened:
        opened.calibrate({"verify": THRESHOLD, "identify": THRESHOLD}, opened.changes)
    before, content, kept, told = answers(path), path.read_bytes(), 0, []
    for number, damaged in enumerate(damages(content, np.random.default_rng(0))):
        path.write_bytes(damaged)
        try:
            assert answers(path) == before, number
            kept += 1
        except VitrailError as error:
            told.append(str(error))
        for journal in path.parent.glob(f"{path.name}-*"):
            journal.unlink()
    assert 100 < kept < 500  # pages are mostly empty
    assert not any("\n" in line for line in told)


def test_nobody_is_removed_from_a_damaged_file(path):
    """An embedding that has lost its person would be left in the file, and the answer be that no trace is."""
    make(path)
    change(path, "UPDATE template SET person = 2 WHERE id = 1")
    before = path.read_bytes()
    with Gallery.open(path) as opened, pytest.raises(CorruptFileError, match="not as they were written"):
        opened.remove("Person 0")
    assert path.read_bytes() == before


def test_a_forged_width_or_name_is_damaged_wherever_it_is_met(path):
    make(path)
    change(path, "UPDATE about SET value = '12' WHERE key = 'width'")
    with pytest.raises(CorruptFileError, match="not state the width of its model, 24"):
        Gallery.open(path, model="m" * 64, width=WIDTH)
    change(path, "UPDATE person SET name = x'00' WHERE id = 1")
    with Gallery.open(path) as opened:
        for read in (opened.people, opened.sources, lambda: opened.remove("Nobody")):
            with pytest.raises(CorruptFileError, match="a name is not printable text"):
                read()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (vectors(2), r"shape \(1, 24\), got \(2, 24\)"),
        (vectors(1, width=12), r"shape \(1, 24\), got \(1, 12\)"),
        (2 * vectors(1), "unit vectors"),
        (np.full((1, WIDTH), np.nan, np.float32), "unit vectors"),
    ],
)
def test_embeddings_of_another_shape_or_length_are_not_enrolled(path, wrong, message):
    make(path)
    with Gallery.open(path) as opened:
        with pytest.raises(UsageError, match=f"Embeddings must .*{message}"):
            opened.enroll("Ann", wrong, ["a"])
        assert "Ann" not in opened.people()


def test_paths_that_cannot_be_a_gallery(tmp_path):
    with pytest.raises(UsageError, match="Gallery must be a file that exists"):
        Gallery.open(tmp_path / "none")
    with pytest.raises(UsageError, match="Gallery must be a file, got"):
        Gallery.open(tmp_path, width=3)
    with pytest.raises(UsageError, match="can be written"):
        Gallery.open(tmp_path / "nowhere" / "people.gallery", model="m", width=3)
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_database_is_not_written_to(tmp_path):
    foreign = tmp_path / "foreign.sqlite"
    change(foreign, "CREATE TABLE mine (x)")
    before = foreign.read_bytes()
    with pytest.raises(UsageError, match="something else"):
        Gallery.open(foreign, model="m", width=WIDTH)
    assert foreign.read_bytes() == before


def test_a_gallery_that_another_program_writes_to_is_locked(path, monkeypatch):
    make(path)
    monkeypatch.setattr(gallery_file, "PATIENCE", 0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with Gallery.open(path) as opened:
        assert len(opened.index().names) == 3  # readers do not wait
        with pytest.raises(VitrailError, match=r"is locked: another program .* for 0.2 seconds") as caught:
            opened.enroll("Ann", vectors(1), ["a"])
    other.close()
    assert caught.value.exit_code == 1


# Removing


def traces(path, secrets):
    """Which of some bytes are in the file or in any other that begins with its name."""
    contents = b"".join(file.read_bytes() for file in path.parent.iterdir() if file.name.startswith(path.name))
    return [secret for secret in secrets if secret in contents]


def secrets_of(name, embeddings, sources):
    """What must be gone: the name, the hashes, and every eight bytes at the beginning and middle of an embedding."""
    parts = [row.tobytes()[at : at + 16] for row in embeddings for at in (0, 40, 80)]
    return [name.encode(), *(source.encode() for source in sources), *parts]


def removals(path, seed):
    """Enroll people of random names and numbers of images, remove a third of them, one by one; what is left of each."""
    random = np.random.default_rng(seed)
    people, found = {}, []
    with Gallery.open(path, model="m", width=WIDTH) as opened:
        opened._connection.execute("PRAGMA synchronous = OFF")  # only to be faster here
        for number in range(150):
            name = f"Person {random.bytes(int(random.integers(6, 20))).hex()}"
            count = int(random.integers(1, 4))
            people[name] = (vectors(count, number), hashes(count, number))
            opened.enroll(name, *people[name])
        opened._empty_journal()
        removed = sorted(people)[::3]
        for name in removed:
            secrets = secrets_of(name, *people[name])
            assert traces(path, secrets) == secrets
            assert opened.remove(name)
            found += traces(path, secrets)
        assert opened.people() == {name: len(rows) for name, (rows, _) in people.items() if name not in removed}
    return found + traces(path, [secret for name in removed for secret in secrets_of(name, *people[name])])


@pytest.mark.parametrize("page", [16384, 512])
def test_no_trace_is_left_of_who_is_removed(path, monkeypatch, page):
    """Small pages make SQLite move entries often."""
    monkeypatch.setattr(module, "_PAGE", page)
    assert removals(path, seed=3) == []


def test_secure_deletion_alone_would_leave_traces(tmp_path, monkeypatch):
    """The reason why the file is written anew, and proof that the test above can fail."""
    monkeypatch.setattr(module, "_PAGE", 512)
    monkeypatch.setattr(Gallery, "_rewrite", Gallery._empty_journal)
    if not any(removals(tmp_path / f"{seed}.gallery", seed) for seed in (3, 2, 4, 5)):
        pytest.skip(f"SQLite {sqlite3.sqlite_version} leaves no copies of entries that it moves")


def test_a_reader_in_the_way_is_said_and_the_same_command_finishes(path, monkeypatch):
    every = make(path)
    monkeypatch.setattr(gallery_file, "PATIENCE", 0.2)
    secrets = secrets_of("Person 1", every[1], hashes(2, 1))
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM person").fetchone()
    with Gallery.open(path) as opened:
        with pytest.raises(
            VitrailError, match=r"'Person 1' is removed, but traces remain in .* the same command"
        ) as caught:
            opened.remove("Person 1")
        assert caught.value.exit_code == 1
        assert "Person 1" not in opened.people()
        assert traces(path, secrets) != []
        with pytest.raises(VitrailError, match="traces remain"):
            opened.remove("Person 1")
        reader.close()
        assert opened.remove("Person 1") is False
        assert traces(path, secrets) == []
        with pytest.raises(UsageError, match=r"got 'Person 1'\. Did you mean 'Person"):
            opened.remove("Person 1")


FULL = """
import resource, sys
from vitrail.core.errors import VitrailError
from vitrail.faces.gallery import Gallery

resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))  # a disk without room for a second copy
try:
    with Gallery.open(sys.argv[1]) as opened:
        opened.remove("Person 1")
except VitrailError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_removal_by_another_program_meanwhile_is_not_taken_for_finished(path, monkeypatch):
    make(path)
    empty = Gallery._empty_journal

    def let_another_begin(opened):
        reason = empty(opened)
        monkeypatch.setattr(Gallery, "_rewrite", lambda _: "killed")
        with Gallery.open(path) as other, pytest.raises(VitrailError, match="traces remain"):
            other.remove("Person 2")
        return reason

    monkeypatch.setattr(Gallery, "_empty_journal", let_another_begin)
    with Gallery.open(path) as opened:
        assert opened.remove("Person 1")
    monkeypatch.undo()
    with Gallery.open(path) as opened:
        assert opened.remove("Person 2") is False  # what is left of that person is removed now
        with pytest.raises(UsageError, match="got 'Person 2'"):
            opened.remove("Person 2")


def test_a_full_disk_is_said_and_the_same_command_finishes(path):
    every = vectors(400, width=512)
    with Gallery.open(path, model="m", width=512) as opened:
        opened._connection.execute("PRAGMA synchronous = OFF")  # only to be faster here
        for number, row in enumerate(every):
            opened.enroll(f"Person {number}", row[None], [f"source {number}"])
    done = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    told = r"'Person 1' is removed, but traces remain in .* \(d.*(full|I/O error)\): make room, or"
    assert re.match(told, done.stdout)
    with Gallery.open(path) as opened:
        assert len(opened.people()) == 399
        assert opened.remove("Person 1") is False
        with pytest.raises(UsageError, match="got 'Person 1'"):
            opened.remove("Person 1")
    assert traces(path, [every[1].tobytes()[:16]]) == []


def test_the_wait_for_a_reader_is_five_seconds():
    assert gallery_file.PATIENCE == 5


def test_people_come_and_go_while_others_read(path):
    make(path, people=20)
    stop, errors, reads = threading.Event(), [], [0]

    def read():
        try:
            while not stop.is_set():
                with Gallery.open(path) as opened:
                    assert len(opened.index().names) >= 20
                reads[0] += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        with Gallery.open(path) as opened:
            for number in range(8):
                opened.enroll("Ann", vectors(1, number), [f"ann {number}"])
                opened.remove("Ann")
    finally:
        while not reads[0] and not errors:
            time.sleep(0.01)
        stop.set()
        thread.join()
    assert errors == []
    assert traces(path, [b"Ann", b"ann 3", vectors(1, 3).tobytes()[:16]]) == []


# kill -9


KILLED = """
import json, os, random, select, signal, sys
import numpy as np
from vitrail.faces.gallery import Gallery

assert not any(name in sys.modules for name in ("torch", "PIL"))
path, committed = sys.argv[1], []
vector = np.eye(24, dtype=np.float32)[:1]
chance = random.Random(0)
for number in range(100):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with Gallery.open(path, model="m", width=24) as gallery:
            for image in range(10_000):
                name = f"{number} {image}"
                gallery.enroll(name, vector, [name])
                os.write(write, f"{name}\\n".encode())
        os._exit(0)
    os.close(write)
    select.select([read], [], [], 20)  # until it is enrolling
    select.select([], [], [], chance.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(read) as said:
        committed += [line.rstrip("\\n") for line in said if line.endswith("\\n")]
print(json.dumps(committed))
"""


def test_a_hundred_kills_lose_nobody_who_was_enrolled(path):
    done = subprocess.run([sys.executable, "-c", KILLED, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    committed = json.loads(done.stdout)
    assert len({name.split()[0] for name in committed}) == 100
    with Gallery.open(path) as opened:
        people = opened.people()
        assert [name for name in committed if people.get(name) != 1] == []
        assert set(people.values()) == {1}  # everybody whole: who was not committed has no half
        assert len(people) - len(committed) <= 100
        assert len(opened.index().names) == len(people)
        assert opened._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_killed_removal_is_finished_by_the_same_command(path, monkeypatch):
    every = make(path)
    secrets = secrets_of("Person 1", every[1], hashes(2, 1))
    copy = path.with_name("copy.gallery")

    def die(self):
        for ending in ("", "-wal", "-shm"):
            shutil.copy(f"{path}{ending}", f"{copy}{ending}")  # what a kill at this moment leaves
        raise KeyboardInterrupt

    monkeypatch.setattr(Gallery, "_rewrite", die)
    with pytest.raises(KeyboardInterrupt), Gallery.open(path) as opened:
        opened.remove("Person 1")
    monkeypatch.undo()
    assert traces(copy, secrets) != []
    with Gallery.open(copy) as opened:
        assert sorted(opened.people()) == ["Person 0", "Person 2"]
        assert opened.remove("Person 1") is False
    assert traces(copy, secrets) == []


def test_an_interrupted_creation_can_be_gone_on_with(path):
    path.touch()
    make(path)
    with Gallery.open(path) as opened:
        assert len(opened.people()) == 3
