"""Gallery files: exact search, thresholds, corrupt and forged files, removal without traces, and `kill -9`."""

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
from vitrail.faces import gallery as gallery_module
from vitrail.faces import gallery_file
from vitrail.faces.gallery import Gallery
from vitrail.faces.thresholds import Calibration

WIDTH = 24
THRESHOLD = Calibration(far=0.1, threshold=0.5, errors=10, trials=100, interval=(0.05, 0.18), people=9, data="x")


def unit_vectors(count, seed=0, width=WIDTH):
    vectors = np.random.default_rng(seed).normal(size=(count, width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def image_hashes(count, seed=0):
    return [np.random.default_rng((seed, number)).bytes(32).hex() for number in range(count)]


def write_gallery(path, people=3, images=2, model="m" * 64):
    """Write a gallery of random people `Person 0`, ...; return their embeddings (people, images, width)."""
    embeddings = unit_vectors(people * images).reshape(people, images, WIDTH)
    with Gallery.open(path, model=model, bundle="face", width=WIDTH) as opened:
        for number in range(people):
            opened.enroll(f"Person {number}", embeddings[number], image_hashes(images, number))
    return embeddings


@pytest.fixture
def path(tmp_path):
    return tmp_path / "people.gallery"


def test_search_ranks_people_by_the_mean_of_their_embeddings(path):
    embeddings = write_gallery(path, people=50, images=3)
    with Gallery.open(path, model="m" * 64) as opened:
        index = opened.index()
        assert opened.people() == {f"Person {number}": 3 for number in range(50)}
    means = embeddings.astype(np.float64).sum(axis=1)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    assert (index.templates_PD.dtype, index.templates_PD.shape) == (np.float32, (50, WIDTH))
    for probe in unit_vectors(5, seed=8):
        scores = means @ probe
        matches = index.search(probe, 4)
        assert [match.name for match in matches] == [f"Person {person}" for person in np.argsort(-scores)[:4]]
        assert [match.score for match in matches] == pytest.approx(np.sort(scores)[::-1][:4], abs=1e-6)
    assert len(index.search(probe, 1000)) == 50


def test_an_image_is_enrolled_once_and_for_one_person_only(path):
    write_gallery(path)
    with Gallery.open(path, model="m" * 64, width=WIDTH) as opened:
        assert opened.enroll("Person 1", unit_vectors(3, 5), [*image_hashes(2, 1), "new"]) == 1
        assert opened.enroll("Person 1", unit_vectors(1, 5), ["new"]) == 0
        assert opened.people()["Person 1"] == 3
        with pytest.raises(UsageError, match="got one of 'Person 2' that is enrolled as 'Person 1'"):
            opened.enroll("Person 2", unit_vectors(2, 6), ["newest", "new"])
        assert "newest" not in opened.sources()
        assert opened.sources()["new"] == "Person 1"


def test_names_in_nfc_and_nfd_are_one_person(path):
    decomposed = unicodedata.normalize("NFD", "김한글")
    with Gallery.open(path, model="m", width=WIDTH) as opened:
        opened.enroll(decomposed, unit_vectors(1), ["a"])
        opened.enroll("김한글", unit_vectors(1, 1), ["b"])
        assert opened.people() == {"김한글": 2}
        assert opened.remove(decomposed)
        for invalid in ("", " Ann", "Ann\n", "\x00"):
            with pytest.raises(UsageError, match="Name must be printable text"):
                opened.enroll(invalid, unit_vectors(1), ["c"])


def test_only_the_owner_can_read_gallery_and_journal(path):
    write_gallery(path)
    with Gallery.open(path) as opened:
        opened.enroll("Ann", unit_vectors(1), ["a"])
        files = [path, *path.parent.glob("*-wal"), *path.parent.glob("*-shm")]
        assert len(files) == 3
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_opening_with_another_model_is_rejected(path):
    write_gallery(path)
    with pytest.raises(UsageError, match=r"created with \(face, hash mmmmmmmmmmmm\), got other \(nnnnnnnnnnnn\)"):
        Gallery.open(path, model="n" * 64, bundle="other", width=WIDTH)


def test_searching_an_empty_gallery_returns_no_candidates(path):
    write_gallery(path, people=1)
    with Gallery.open(path) as opened:
        opened.remove("Person 0")
        assert opened.index().search(unit_vectors(1)[0]) == []


# Thresholds


def test_a_change_of_people_removes_only_the_threshold_of_identify(path):
    write_gallery(path)
    with Gallery.open(path) as opened:
        assert opened.calibration("verify") is None
        opened.calibrate({"verify": THRESHOLD, "identify": THRESHOLD}, opened.changes)
        assert opened.calibration("identify") == THRESHOLD
        opened.enroll("Person 0", unit_vectors(1), image_hashes(1, 0))  # no new image
        assert opened.calibration("identify") == THRESHOLD
        opened.enroll("Person 3", unit_vectors(1), ["a"])
        assert (opened.calibration("identify"), opened.calibration("verify")) == (None, THRESHOLD)
        before = opened.changes
        opened.calibrate({"identify": THRESHOLD}, before)
        opened.remove("Person 3")
        assert opened.calibration("identify") is None
        with pytest.raises(VitrailError, match="was changed during calibration"):
            opened.calibrate({"identify": THRESHOLD}, before)


# Corrupt files and other files


def overwrite_pages(path):
    """Overwrite all pages except the first."""
    with path.open("r+b") as file:
        file.seek(16384)
        file.write(b"\xa5" * (path.stat().st_size - 16384))


def read_all(path):
    with Gallery.open(path) as opened:
        opened.index()
        opened.calibration("identify")


def execute_sql(path, statement):
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


def forge_threshold(path, document=None, **fields):
    """Store a threshold with a valid hash."""
    document = document or json.dumps(THRESHOLD.to_json() | fields)
    digest = gallery_module._digest("m" * 64, "identify", document).hex()
    execute_sql(path, f"UPDATE about SET value = '{digest} {document}' WHERE key = 'identify'")


def forge_vector(path, vector):
    """Store an embedding with a valid hash."""
    with sqlite3.connect(path) as connection:
        query = "SELECT name, source FROM template JOIN person ON person = person.id WHERE template.id = 1"
        digest = gallery_module._digest("m" * 64, *connection.execute(query).fetchone(), vector)
        connection.execute("UPDATE template SET vector = ?, digest = ? WHERE id = 1", (vector, digest))
    connection.close()


@pytest.mark.parametrize(
    ("corrupt", "error_class", "message"),
    [
        (lambda path: path.write_bytes(b"not a database at all" * 999), UsageError, "got another file"),
        (lambda path: path.write_bytes(b""), UsageError, "got another file"),
        (lambda path: execute_sql(path, "PRAGMA application_id = 7"), UsageError, "got another file"),
        (
            lambda path: execute_sql(path, "PRAGMA user_version = 3"),
            VitrailError,
            "has format 3; this vitrail reads up to 2",
        ),
        (lambda path: execute_sql(path, "PRAGMA user_version = 1"), VitrailError, "has format 1, in which corruption"),
        (overwrite_pages, CorruptFileError, "is damaged"),
        (
            lambda path: execute_sql(path, "DELETE FROM about WHERE key = 'width'"),
            CorruptFileError,
            "not state its width",
        ),
        (lambda path: forge_vector(path, b"\0"), CorruptFileError, "a wrong length"),
        (lambda path: forge_vector(path, bytes(4 * WIDTH)), CorruptFileError, "unit vector"),
        (lambda path: forge_vector(path, "text"), CorruptFileError, "a wrong length"),
        (
            lambda path: execute_sql(path, "UPDATE person SET name = 'Ann' WHERE id = 1"),
            CorruptFileError,
            "not as they were",
        ),
        (
            lambda path: execute_sql(path, "UPDATE template SET person = 2 WHERE id = 1"),
            CorruptFileError,
            "not as they were",
        ),
        (lambda path: execute_sql(path, "DELETE FROM template WHERE id = 1"), CorruptFileError, "not as they were"),
        (lambda path: execute_sql(path, "DELETE FROM person WHERE id = 1"), CorruptFileError, "not as they were"),
        (
            lambda path: execute_sql(path, "UPDATE about SET value = 'abc' WHERE key = 'width'"),
            CorruptFileError,
            "width cannot",
        ),
        (
            lambda path: execute_sql(path, "UPDATE about SET value = '0' WHERE key = 'width'"),
            CorruptFileError,
            "width cannot",
        ),
        (
            lambda path: execute_sql(path, "UPDATE about SET value = '1' WHERE key = 'width'"),
            CorruptFileError,
            "wrong length",
        ),
        (
            lambda path: execute_sql(path, "UPDATE about SET value = x'00' WHERE key = 'width'"),
            CorruptFileError,
            "not state its",
        ),
        (
            lambda path: execute_sql(path, "UPDATE person SET name = x'00' WHERE id = 1"),
            CorruptFileError,
            "not printable text",
        ),
        (lambda path: execute_sql(path, "PRAGMA user_version = -3"), CorruptFileError, "its format is -3"),
        (lambda path: forge_threshold(path, "[]"), CorruptFileError, "cannot be read"),
        (lambda path: forge_threshold(path, "[" * 100_000), CorruptFileError, "cannot be read"),
        (lambda path: forge_threshold(path, threshold="0.5"), CorruptFileError, "cannot be read"),
        (lambda path: forge_threshold(path, threshold=math.nan), CorruptFileError, "cannot be read"),
        (lambda path: forge_threshold(path, interval=[0, math.inf]), CorruptFileError, "cannot be read"),
        (lambda path: forge_threshold(path, trials=1.5), CorruptFileError, "cannot be read"),
        (lambda path: forge_threshold(path, data=None), CorruptFileError, "cannot be read"),
    ],
)
def test_corrupt_files_and_other_files_raise_errors_of_one_line(path, corrupt, error_class, message):
    write_gallery(path)
    corrupt(path)
    with pytest.raises(error_class, match=message) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == (2 if error_class is UsageError else 1)


# Forged files

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
    write_gallery(path)
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()
    before = path.read_bytes()
    for open_gallery in (Gallery.open, lambda path: Gallery.open(path, model="m" * 64, width=WIDTH)):
        with pytest.raises(CorruptFileError, match="must have the tables that `vitrail faces enroll` makes") as caught:
            open_gallery(path).close()
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def tree_page(children, header=0, size=512):
    """Return an inner page of a table. `children` may repeat a page number."""
    page = bytearray(size)
    for number, child in enumerate(children[:-1]):
        offset = size - 5 * (number + 1)
        struct.pack_into(">IB", page, offset, child, number + 1)
        struct.pack_into(">H", page, header + 12 + 2 * number, offset)
    count = len(children) - 1
    struct.pack_into(">BHHHBI", page, header, 5, 0, count, size - 5 * count, 0, children[-1])
    return page


def index_page(name, table, root, size=512):
    """Return a leaf page of the schema with one entry: the index of a constraint."""
    texts = [b"index", name.encode(), table.encode()]
    header = bytes([13 + 2 * len(text) for text in texts] + [1, 0])
    record = bytes([len(header) + 1]) + header + b"".join(texts) + bytes([root])
    cell = bytes([len(record), 100]) + record
    page = bytearray(size)
    struct.pack_into(">BHHHBH", page, 0, 13, 0, 1, size - len(cell), 0, size - len(cell))
    page[size - len(cell) :] = cell
    return page


def forge_tree(path, table):
    """Let each page of a table, or of the schema, refer to the next page 30 times, so that reading would not end."""
    connection = sqlite3.connect(path)
    roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
    connection.close()
    content = path.read_bytes()
    pages = [bytearray(content[start : start + 512]) for start in range(0, len(content), 512)]
    tree = [tree_page([len(pages) + 2 + level] * 30) for level in range(12)]
    if table == "sqlite_master":
        first = pages[0]
        offsets = [108, *struct.unpack_from(">3H", first, 112)[: struct.unpack_from(">H", first, 103)[0]]]
        children = [struct.unpack_from(">I", first, offset)[0] for offset in (*offsets[1:], offsets[0])]
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
def test_reading_pages_that_never_end_raises_an_error_of_one_line(path, monkeypatch, table, reason):
    monkeypatch.setattr(gallery_module, "_PAGE_SIZE", 512)
    write_gallery(path)
    forge_tree(path, table)
    start = time.monotonic()
    with pytest.raises(CorruptFileError, match=f"is damaged.*{reason}") as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 10


ENDLESS_STATEMENT = f"""
import signal, sys
from vitrail.faces import gallery, gallery_file

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
gallery_file._MIN_INSTRUCTIONS = 10**15
try:
    with gallery.Gallery.open(sys.argv[1]) as opened, opened.reading():
        print("ready", flush=True)
        opened._connection.execute("{ENDLESS} SELECT count(*) FROM n WHERE id < 0").fetchall()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_interrupts_a_running_statement(path, number, code):
    write_gallery(path)
    process = subprocess.Popen([sys.executable, "-c", ENDLESS_STATEMENT, path], stdout=-1, stderr=-1)
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    process.send_signal(number)
    try:
        assert (process.communicate(timeout=10)[1], process.returncode) == (b"", code)
    finally:
        process.kill()


def read_results(path):
    """Return search results and thresholds of a gallery."""
    with Gallery.open(path, model="m" * 64) as opened, opened.reading():
        index = opened.index()
        matches = [index.search(probe, 3) for probe in unit_vectors(4, seed=8)]
        return matches, opened.calibration("verify"), opened.calibration("identify")


def corruptions(content, rng):
    """Yield corrupt versions of a file: one flipped bit in a used byte, one random byte, or a truncated file."""
    used = np.flatnonzero(np.frombuffer(content, np.uint8))
    for _ in range(300):
        offset = int(rng.choice(used))
        yield content[:offset] + bytes([content[offset] ^ 1 << int(rng.integers(8))]) + content[offset + 1 :]
        offset = int(rng.integers(len(content)))
        yield content[:offset] + rng.bytes(1) + content[offset + 1 :]
    for end in (*rng.integers(0, len(content), 20), *range(0, len(content), 16384)):
        yield content[: int(end)]


def test_a_corrupt_file_raises_an_error_or_gives_the_same_results(path):
    """It never gives a wrong name, score or threshold."""
    write_gallery(path)
    with Gallery.open(path) as opened:
        opened.calibrate({"verify": THRESHOLD, "identify": THRESHOLD}, opened.changes)
    expected, content, unaffected, messages = read_results(path), path.read_bytes(), 0, []
    for number, corrupt in enumerate(corruptions(content, np.random.default_rng(0))):
        path.write_bytes(corrupt)
        try:
            assert read_results(path) == expected, number
            unaffected += 1
        except VitrailError as error:
            messages.append(str(error))
        for journal in path.parent.glob(f"{path.name}-*"):
            journal.unlink()
    assert 100 < unaffected < 500  # pages are mostly empty
    assert not any("\n" in message for message in messages)


def test_removing_from_a_corrupt_file_raises_and_changes_nothing(path):
    """An embedding without its person would stay in the file although `remove` reports that no trace remains."""
    write_gallery(path)
    execute_sql(path, "UPDATE template SET person = 2 WHERE id = 1")
    before = path.read_bytes()
    with Gallery.open(path) as opened, pytest.raises(CorruptFileError, match="not as they were written"):
        opened.remove("Person 0")
    assert path.read_bytes() == before


def test_every_method_rejects_a_forged_width_or_name(path):
    write_gallery(path)
    execute_sql(path, "UPDATE about SET value = '12' WHERE key = 'width'")
    with pytest.raises(CorruptFileError, match="not state the width of its model, 24"):
        Gallery.open(path, model="m" * 64, width=WIDTH)
    execute_sql(path, "UPDATE person SET name = x'00' WHERE id = 1")
    with Gallery.open(path) as opened:
        for read in (opened.people, opened.sources, lambda: opened.remove("Nobody")):
            with pytest.raises(CorruptFileError, match="a name is not printable text"):
                read()


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (unit_vectors(2), r"shape \(1, 24\), got \(2, 24\)"),
        (unit_vectors(1, width=12), r"shape \(1, 24\), got \(1, 12\)"),
        (2 * unit_vectors(1), "unit vectors"),
        (np.full((1, WIDTH), np.nan, np.float32), "unit vectors"),
    ],
)
def test_embeddings_of_another_shape_or_length_are_not_enrolled(path, embeddings, message):
    write_gallery(path)
    with Gallery.open(path) as opened:
        with pytest.raises(UsageError, match=f"Embeddings must .*{message}"):
            opened.enroll("Ann", embeddings, ["a"])
        assert "Ann" not in opened.people()


def test_missing_files_and_folders_are_rejected_as_galleries(tmp_path):
    with pytest.raises(UsageError, match="Gallery must be a file that exists"):
        Gallery.open(tmp_path / "none")
    with pytest.raises(UsageError, match="Gallery must be a file, got"):
        Gallery.open(tmp_path, width=3)
    with pytest.raises(UsageError, match="can be written"):
        Gallery.open(tmp_path / "nowhere" / "people.gallery", model="m", width=3)
    assert list(tmp_path.iterdir()) == []


def test_another_sqlite_database_is_rejected_and_not_written(tmp_path):
    database = tmp_path / "other.sqlite"
    execute_sql(database, "CREATE TABLE mine (x)")
    before = database.read_bytes()
    with pytest.raises(UsageError, match="got another file"):
        Gallery.open(database, model="m", width=WIDTH)
    assert database.read_bytes() == before


def test_enroll_raises_if_another_program_keeps_the_gallery_locked(path, monkeypatch):
    write_gallery(path)
    monkeypatch.setattr(gallery_file, "PATIENCE", 0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with Gallery.open(path) as opened:
        assert len(opened.index().names) == 3  # readers do not wait
        with pytest.raises(VitrailError, match=r"is locked: another program .* for 0.2 seconds") as caught:
            opened.enroll("Ann", unit_vectors(1), ["a"])
    other.close()
    assert caught.value.exit_code == 1


# Removing


def traces(path, secrets):
    """Return the secrets that occur in the file, or in another file whose name starts with its name."""
    contents = b"".join(file.read_bytes() for file in path.parent.iterdir() if file.name.startswith(path.name))
    return [secret for secret in secrets if secret in contents]


def secrets_of(name, embeddings, sources):
    """Return bytes that must not remain after a removal: the name, the hashes, and parts of the embeddings."""
    parts = [row.tobytes()[at : at + 16] for row in embeddings for at in (0, 40, 80)]
    return [name.encode(), *(source.encode() for source in sources), *parts]


def traces_after_removals(path, seed):
    """Enroll people with random names and numbers of images, remove a third of them, and return remaining traces."""
    rng = np.random.default_rng(seed)
    people, remaining = {}, []
    with Gallery.open(path, model="m", width=WIDTH) as opened:
        opened._connection.execute("PRAGMA synchronous = OFF")  # makes the test faster
        for number in range(150):
            name = f"Person {rng.bytes(int(rng.integers(6, 20))).hex()}"
            count = int(rng.integers(1, 4))
            people[name] = (unit_vectors(count, number), image_hashes(count, number))
            opened.enroll(name, *people[name])
        opened._empty_journal()
        removed = sorted(people)[::3]
        for name in removed:
            secrets = secrets_of(name, *people[name])
            assert traces(path, secrets) == secrets
            assert opened.remove(name)
            remaining += traces(path, secrets)
        assert opened.people() == {name: len(rows) for name, (rows, _) in people.items() if name not in removed}
    return remaining + traces(path, [secret for name in removed for secret in secrets_of(name, *people[name])])


@pytest.mark.parametrize("page_size", [16384, 512])
def test_no_trace_of_a_removed_person_remains(path, monkeypatch, page_size):
    """With small pages, SQLite moves entries often."""
    monkeypatch.setattr(gallery_module, "_PAGE_SIZE", page_size)
    assert traces_after_removals(path, seed=3) == []


def test_secure_deletion_alone_would_leave_traces(tmp_path, monkeypatch):
    """This is why `remove` rewrites the file, and it shows that the test above can fail."""
    monkeypatch.setattr(gallery_module, "_PAGE_SIZE", 512)
    monkeypatch.setattr(Gallery, "_rewrite_file", Gallery._empty_journal)
    if not any(traces_after_removals(tmp_path / f"{seed}.gallery", seed) for seed in (3, 2, 4, 5)):
        pytest.skip(f"SQLite {sqlite3.sqlite_version} leaves no copies of entries that it moves")


def test_a_removal_that_a_reader_prevents_can_be_repeated(path, monkeypatch):
    embeddings = write_gallery(path)
    monkeypatch.setattr(gallery_file, "PATIENCE", 0.2)
    secrets = secrets_of("Person 1", embeddings[1], image_hashes(2, 1))
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


REMOVAL_ON_FULL_DISK = """
import resource, sys
from vitrail.core.errors import VitrailError
from vitrail.faces.gallery import Gallery

resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))  # no space for a second copy
try:
    with Gallery.open(sys.argv[1]) as opened:
        opened.remove("Person 1")
except VitrailError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_concurrent_removal_by_another_program_stays_unfinished(path, monkeypatch):
    write_gallery(path)
    empty_journal = Gallery._empty_journal

    def empty_and_start_another_removal(opened):
        reason = empty_journal(opened)
        monkeypatch.setattr(Gallery, "_rewrite_file", lambda _: "killed")
        with Gallery.open(path) as other, pytest.raises(VitrailError, match="traces remain"):
            other.remove("Person 2")
        return reason

    monkeypatch.setattr(Gallery, "_empty_journal", empty_and_start_another_removal)
    with Gallery.open(path) as opened:
        assert opened.remove("Person 1")
    monkeypatch.undo()
    with Gallery.open(path) as opened:
        assert opened.remove("Person 2") is False  # erases the remaining traces of that person
        with pytest.raises(UsageError, match="got 'Person 2'"):
            opened.remove("Person 2")


def test_a_removal_on_a_full_disk_can_be_repeated(path):
    embeddings = unit_vectors(400, width=512)
    with Gallery.open(path, model="m", width=512) as opened:
        opened._connection.execute("PRAGMA synchronous = OFF")  # makes the test faster
        for number, embedding in enumerate(embeddings):
            opened.enroll(f"Person {number}", embedding[None], [f"source {number}"])
    done = subprocess.run(
        [sys.executable, "-c", REMOVAL_ON_FULL_DISK, path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    message = r"'Person 1' is removed, but traces remain in .* \(d.*(full|I/O error)\)\. Free disk space, or"
    assert re.match(message, done.stdout)
    with Gallery.open(path) as opened:
        assert len(opened.people()) == 399
        assert opened.remove("Person 1") is False
        with pytest.raises(UsageError, match="got 'Person 1'"):
            opened.remove("Person 1")
    assert traces(path, [embeddings[1].tobytes()[:16]]) == []


def test_remove_waits_five_seconds_for_other_programs():
    assert gallery_file.PATIENCE == 5


def test_enroll_and_remove_work_while_another_thread_reads(path):
    write_gallery(path, people=20)
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
                opened.enroll("Ann", unit_vectors(1, number), [f"ann {number}"])
                opened.remove("Ann")
    finally:
        while not reads[0] and not errors:
            time.sleep(0.01)
        stop.set()
        thread.join()
    assert errors == []
    assert traces(path, [b"Ann", b"ann 3", unit_vectors(1, 3).tobytes()[:16]]) == []


# kill -9


KILLED_ENROLMENTS = """
import json, os, random, select, signal, sys
import numpy as np
from vitrail.faces.gallery import Gallery

assert not any(name in sys.modules for name in ("torch", "PIL"))
path, committed = sys.argv[1], []
vector = np.eye(24, dtype=np.float32)[:1]
rng = random.Random(0)
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
    select.select([read], [], [], 20)  # until the child has enrolled an image
    select.select([], [], [], rng.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(read) as pipe:
        committed += [line.rstrip("\\n") for line in pipe if line.endswith("\\n")]
print(json.dumps(committed))
"""


def test_a_hundred_kills_lose_nobody_who_was_enrolled(path):
    done = subprocess.run([sys.executable, "-c", KILLED_ENROLMENTS, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    committed = json.loads(done.stdout)
    assert len({name.split()[0] for name in committed}) == 100
    with Gallery.open(path) as opened:
        people = opened.people()
        assert [name for name in committed if people.get(name) != 1] == []
        assert set(people.values()) == {1}  # nobody is stored without an image
        assert len(people) - len(committed) <= 100
        assert len(opened.index().names) == len(people)
        assert opened._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_repeating_a_killed_removal_erases_all_traces(path, monkeypatch):
    embeddings = write_gallery(path)
    secrets = secrets_of("Person 1", embeddings[1], image_hashes(2, 1))
    copy = path.with_name("copy.gallery")

    def copy_and_interrupt(_):
        for ending in ("", "-wal", "-shm"):
            shutil.copy(f"{path}{ending}", f"{copy}{ending}")  # the state after a kill at this moment
        raise KeyboardInterrupt

    monkeypatch.setattr(Gallery, "_rewrite_file", copy_and_interrupt)
    with pytest.raises(KeyboardInterrupt), Gallery.open(path) as opened:
        opened.remove("Person 1")
    monkeypatch.undo()
    assert traces(copy, secrets) != []
    with Gallery.open(copy) as opened:
        assert sorted(opened.people()) == ["Person 0", "Person 2"]
        assert opened.remove("Person 1") is False
    assert traces(copy, secrets) == []


def test_an_empty_file_of_an_interrupted_creation_becomes_a_gallery(path):
    path.touch()
    write_gallery(path)
    with Gallery.open(path) as opened:
        assert len(opened.people()) == 3
