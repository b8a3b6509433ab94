"""Archives and published data sets are read as distributed, or rejected with a one-line error."""

import contextlib
import fcntl
import gzip
import io
import os
import pickle
import random
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.core import memory
from vitrail.core.errors import CorruptFileError, VitrailError
from vitrail.core.sandbox import read_arrays
from vitrail.data.doctor import find_problems
from vitrail.data.loader import Loader
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import archives
from vitrail.data.sources.archives import TarTree, ZipTree
from vitrail.data.sources.matlab import read_matlab
from vitrail.data.sources.registry import open_data


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make_png(seed: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


PHOTOS = {
    f"photos/{split}/{label}/{number}.png": make_png(len(split) + 10 * len(label) * ord(label[0]) + number)
    for split in ("train", "val")
    for label in ("cat", "dog")
    for number in range(3)
}


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def write_zip(path: Path, files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    if path.suffix == ".zip":
        return write_zip(path, files, zipfile.ZIP_DEFLATED)
    return write_tar(path, files, "w" if path.suffix == ".tar" else "w:gz")


def read_contents(data) -> list[tuple[str, str, bytes]]:
    """Return the split, class and pixels of every image, as the loader reads them."""
    dataset = open_data(data)
    preprocess = Preprocess(resolution=(6, 6), crop_fraction=1.0)
    contents = []
    for split in dataset.splits.values():
        for batch in Loader(split, preprocess, batch=4, shuffle=False).epoch():
            for pixels, label in zip(batch.pixels, batch.labels.tolist(), strict=True):
                contents.append((split.name, dataset.labels[label], pixels.numpy().tobytes()))
    return contents


# CIFAR in each published form


def cifar_files(form: str) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """Return the files of a published form with 12 images, and its images and labels, training images first."""
    rng = np.random.default_rng(5)
    classes = 10 if form.startswith("10-") else 100
    rows = rng.integers(0, 256, (12, 3072), np.uint8)
    labels = np.concatenate([np.arange(10), [3, 4]]) if classes == 10 else rng.permutation(100)[:12]
    names = [f"name-{number:02d}" for number in range(classes)]
    folder = {"10-py": "cifar-10-batches-py", "10-bin": "cifar-10-batches-bin"}.get(form, f"cifar-{form}")
    train = [np.arange(10)[part::5] for part in range(5)] if classes == 10 else [np.arange(10)]
    files = {}
    key = b"labels" if classes == 10 else b"fine_labels"
    for number, indices in enumerate([*train, np.arange(10, 12)]):
        is_test = number == len(train)
        if classes == 10:
            name = "test_batch" if is_test else f"data_batch_{number + 1}"
        else:
            name = "test" if is_test else "train"
        part_rows, part_labels = rows[indices], labels[indices]
        if form in ("10-bin", "100-binary"):
            head = (
                [part_labels[:, None].astype(np.uint8)]
                if classes == 10
                else [(part_labels // 5)[:, None].astype(np.uint8), part_labels[:, None].astype(np.uint8)]
            )
            files[f"{folder}/{name}.bin"] = np.concatenate([*head, part_rows], axis=1).tobytes()
        else:
            table = {
                b"data": part_rows,
                key: part_labels.tolist(),
                b"batch_label": b"a batch",
                b"filenames": [b"x.png"] * len(part_rows),
            }
            files[f"{folder}/{name}"] = pickle_as_python_2(table)
    if form in ("10-bin", "100-binary"):
        names_file = "batches.meta.txt" if classes == 10 else "fine_label_names.txt"
        files[f"{folder}/{names_file}"] = ("\n".join(names) + "\n\n").encode()
    elif classes == 10:
        files[f"{folder}/batches.meta"] = pickle_as_python_2(
            {b"label_names": [n.encode() for n in names], b"num_vis": 3072}
        )
    else:
        files[f"{folder}/meta"] = pickle_as_python_2({b"fine_label_names": [name.encode() for name in names]})
    order = np.concatenate([*train, np.arange(10, 12)])
    return files, rows[order].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels[order]


def pickle_as_python_2(table: object) -> bytes:
    """Return a pickle as Python 2 wrote it, in which bytes are strings."""

    def save_bytes(pickler, content):
        pickler.write(b"T" + len(content).to_bytes(4, "little") + content)  # BINSTRING
        pickler.memoize(content)

    file = io.BytesIO()
    pickler = pickle._Pickler(file, 2)  # the implementation in Python, whose table of types can be changed
    pickler.dispatch = {**pickle._Pickler.dispatch, bytes: save_bytes}
    pickler.dump(table)
    return file.getvalue().replace(b"numpy._core", b"numpy.core")


@pytest.mark.parametrize(
    ("form", "packing"),
    [
        ("10-py", ".tar.gz"),
        ("10-bin", ""),
        ("10-bin", ".tar.gz"),
        ("100-python", ""),
        ("100-python", ".tar"),
        ("100-python", ".zip"),
        ("100-binary", ".tar.gz"),
    ],
)
def test_cifar_has_same_images_and_labels_in_each_published_form(tmp_path, form, packing):
    files, images, labels = cifar_files(form)
    data = write_archive(tmp_path / f"cifar{packing}", files) if packing else write_folder(tmp_path / "cifar", files)
    dataset = open_data(data)
    training, test = dataset.splits["train"], dataset.splits["test"]
    assert len(dataset.labels) == (10 if form.startswith("10-") else 100)
    np.testing.assert_array_equal(np.concatenate([training.images, test.images]), images)
    np.testing.assert_array_equal(np.concatenate([training.labels, test.labels]), labels)
    assert dataset.labels[labels[0]] == f"name-{labels[0]:02d}"
    version = "Python" if form in ("10-py", "100-python") else "binary"
    assert dataset.notes[-1].startswith(f"read as CIFAR-{form.partition('-')[0]}, {version} version: 10 training and 2")


def make_malicious_object(path: Path):
    """Return an object whose pickle runs a command that creates a file."""

    class RunsCommand:
        def __reduce__(self):
            return os.system, (f"touch {path}",)

    return RunsCommand()


@pytest.mark.parametrize(
    ("make_pickle", "reason"),
    [
        (lambda path: pickle.dumps({b"data": make_malicious_object(path)}, 2), r"it asks for posix\.system"),
        (lambda path: pickle.dumps(make_malicious_object(path), 4), r"it asks for posix\.system"),
        (lambda path: b"cbuiltins\neval\n(S'1'\ntR.", r"it asks for builtins\.eval"),
        (lambda path: b"cnumpy\nndarray\n(I4\ntR.", r"it asks for numpy\.ndarray\(\)"),
        (lambda path: pickle.dumps({"data": np.array([{}])}, 2), r"it asks for an array of objects"),
        (lambda path: pickle.dumps([1]), r"it contains a list"),
        (lambda path: b"", r"it is corrupt: EOFError"),
        (lambda path: pickle.dumps({})[:-2], r"it is corrupt: "),
        (
            lambda path: b"N" + b"r\xff\xff\xff\x7f" + b".",
            r"it would fill more memory|it is corrupt|it contains a None",
        ),
        (lambda path: b"]" * 100_000 + b"a" * 99_999 + b".", r"it contains a list|nested too deeply"),
    ],
)
def test_malicious_pickle_is_rejected_and_not_run(tmp_path, home, call, make_pickle, reason):
    files, _, _ = cifar_files("10-py")
    files["cifar-10-batches-py/data_batch_1"] = make_pickle(tmp_path / "touched")
    data = write_archive(tmp_path / "cifar.tar", files)
    with pytest.raises(VitrailError, match=rf"data_batch_1' is refused: it is not plain data \({reason}") as caught:
        open_data(data)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "touched").exists()


def test_cifar_of_wrong_size_gives_one_line_error(tmp_path):
    files, _, _ = cifar_files("10-bin")
    short = dict(files)
    short["cifar-10-batches-bin/data_batch_2.bin"] = files["cifar-10-batches-bin/data_batch_2.bin"][:-1]
    with pytest.raises(VitrailError, match=r"data_batch_2.bin' must have 3,073 bytes for each image, got 6,145 in all"):
        open_data(write_folder(tmp_path / "short", short))
    del files["cifar-10-batches-bin/data_batch_4.bin"]
    with pytest.raises(VitrailError, match=r"is incomplete: data_batch_4.bin is missing"):
        open_data(write_folder(tmp_path / "part", files))


@pytest.mark.parametrize(("form", "names"), [("10-bin", "batches.meta.txt"), ("100-binary", "fine_label_names.txt")])
def test_cifar_with_missing_or_additional_class_name_is_rejected(tmp_path, form, names):
    files, _, _ = cifar_files(form)
    (path,) = (name for name in files if name.endswith(names))
    for old, new in ((b"name-01\n", b"name\n01\n"), (b"name-01\n", b"name-01")):
        changed = {**files, path: files[path].replace(old, new)}
        with pytest.raises(CorruptFileError, match=rf"{names}' must have 100? names of classes, got \d+"):
            open_data(write_folder(tmp_path / "cifar", changed))
    spaced = {**files, path: files[path].replace(b"name-01", b"name 01")}
    assert "name 01" in open_data(write_folder(tmp_path / "cifar", spaced)).labels


def test_pickle_with_duplicate_key_or_trailing_bytes_is_rejected(tmp_path):
    files, _, _ = cifar_files("10-py")
    batch = "cifar-10-batches-py/data_batch_1"
    rows = np.zeros((2, 3072), np.uint8)
    twice = pickle.dumps({b"data": rows, "data": rows + 1, b"labels": [0, 1]}, 2)
    for content, reason in ((files[batch] * 2, "there are bytes after its end"), (twice, "it has a key twice")):
        with pytest.raises(CorruptFileError, match=rf"data_batch_1' is refused: .*{reason}"):
            open_data(write_archive(tmp_path / "cifar.tar", {**files, batch: content}))


# Class folders in archives


@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz", ".tgz"])
def test_archive_of_class_folders_equals_the_folder(tmp_path, home, ending):
    folder = write_folder(tmp_path, PHOTOS) / "photos"
    archive = write_archive(tmp_path / f"set{ending}", PHOTOS | {"photos/README.txt": b"", "__MACOSX/photos/._1": b""})
    assert read_contents(archive) == read_contents(folder)
    assert open_data(archive).fingerprint() == open_data(archive).fingerprint() == open_data(folder).fingerprint()
    assert [finding.kind for finding in find_problems(open_data(archive))] == [
        f.kind for f in find_problems(open_data(folder))
    ]
    unpacked = list(home.rglob("*.tar"))
    assert len(unpacked) == ending.endswith("gz")
    if unpacked:
        before = unpacked[0].stat().st_mtime_ns
        assert open_data(archive).notes == ()
        assert unpacked[0].stat().st_mtime_ns == before


@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz"])
def test_doctor_reports_same_unused_files_in_archive_and_folder(tmp_path, ending):
    unused = {"photos/train/lost.png": make_png(1), "photos/lost.jpg": b"", "photos/train/cat/notes.txt": b""}
    files = PHOTOS | unused | {"photos/README.txt": b"", "photos/val/cat/Thumbs.db": b""}
    folder = write_folder(tmp_path, files) / "photos"
    archive = write_archive(tmp_path / f"set{ending}", files)
    for data, root in ((folder, tmp_path), (archive, archive)):
        findings = [finding for finding in find_problems(open_data(data)) if finding.kind == "ignored-file"]
        assert [finding.message for finding in findings] == ["3 files are not used"]
        assert findings[0].files == tuple(sorted(f"{root}/{name}" for name in unused))


def test_tar_gz_is_unpacked_once_with_a_note(tmp_path, call, home):
    archive = write_archive(tmp_path / "set.tar.gz", PHOTOS)
    first, second = call("doctor", str(archive)), call("doctor", str(archive))
    assert first.stderr.startswith("note: set.tar.gz is unpacked once into ")
    assert first.stderr.count("\n") == 1
    assert (second.stderr, first.stdout) == ("", second.stdout)
    assert len(list(home.rglob("*"))) == 2  # the folder `archives` and one file
    write_archive(archive, dict(list(PHOTOS.items())[:6]))
    assert len(open_data(archive).splits) == 1


def test_partial_files_of_killed_processes_are_removed_and_files_in_use_kept(tmp_path, home, monkeypatch):
    (home / "archives").mkdir(parents=True)
    partial_files = [home / "archives" / f".{name}.tar.writing-x" for name in ("abandoned", "locked", "empty")]
    for path, content in zip(partial_files, (b"half", b"half", b""), strict=True):
        path.write_bytes(content)
    unpack_gzip, unlocked = archives._unpack_gzip, []

    def check_lock(path, file, packed):
        (target,) = set((home / "archives").iterdir()) - set(partial_files)
        with target.open("rb") as reopened, contextlib.suppress(BlockingIOError):
            fcntl.flock(reopened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.append(target)
        return unpack_gzip(path, file, packed)

    monkeypatch.setattr(archives, "_unpack_gzip", check_lock)
    with partial_files[1].open("rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        open_data(write_archive(tmp_path / "set.tar.gz", PHOTOS))
    assert [path.exists() for path in partial_files] == [False, True, True]
    assert unlocked == []


@pytest.mark.parametrize("is_between_files", [False, True])
def test_truncated_unpacked_copy_is_unpacked_again(tmp_path, home, is_between_files):
    archive = write_archive(tmp_path / "set.tar.gz", PHOTOS)
    before = read_contents(archive)
    (unpacked,) = home.rglob("*.tar")
    with tarfile.open(unpacked) as opened:
        offset = opened.getmembers()[5].offset
    os.truncate(unpacked, offset if is_between_files else offset + 600)
    assert read_contents(archive) == before
    assert len(before) == 12
    assert open_data(archive).notes == ()
    os.truncate(unpacked, offset)
    archive.write_bytes(archive.read_bytes()[:-20])
    with pytest.raises(CorruptFileError, match=r"set\.tar\.gz' cannot be read as an archive \(.*ended before"):
        open_data(archive)


def test_archives_of_3000_files_with_korean_names_are_read(tmp_path):
    files = {f"set/{'고양이' if number % 2 else '개'}/{number}.png": b"x" for number in range(3_000)}
    for archive in (write_zip(tmp_path / "many.zip", files), write_tar(tmp_path / "many.tar", files)):
        dataset = open_data(archive)
        assert dataset.labels == ("개", "고양이")
        assert len(dataset.first_split) == 3_000


def write_tar_with_header(path: Path, **fields) -> Path:
    """Write a .tar of one image whose header has these fields."""
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("a/1.png")
        info.size = len(make_png())
        for name, value in fields.items():
            setattr(info, name, value)
        archive.addfile(info, io.BytesIO(make_png()))
    return path


def write_zip_with_name(path: Path, name: str) -> Path:
    """Write a .zip of one image under any name, however unsafe."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), make_png())
    return path


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: write_tar_with_header(p / "a.tar", name="../1.png"), "would lie outside of it"),
        (lambda p: write_tar_with_header(p / "a.tar", name="a/../../1.png"), "would lie outside of it"),
        (lambda p: write_tar_with_header(p / "a.tar", name="/a/1.png"), "would lie outside of it"),
        (lambda p: write_tar_with_header(p / "a.tar", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "is a link"),
        (lambda p: write_tar_with_header(p / "a.tar", type=tarfile.LNKTYPE, linkname="a/2.png"), "is a link"),
        (lambda p: write_tar_with_header(p / "a.tar", type=tarfile.CHRTYPE), "or another special file"),
        (lambda p: write_tar_with_header(p / "a.tar", name="a/" * 200 + "1.png"), "nested too deeply"),
        (lambda p: write_tar_with_header(p / "a.tar", name="a/\udcff.png"), "is not Unicode"),
        (lambda p: write_zip_with_name(p / "a.zip", name="../1.png"), "would lie outside of it"),
        (lambda p: write_zip_with_name(p / "a.zip", name="/1.png"), "would lie outside of it"),
        (lambda p: write_zip_with_name(p / "a.zip", name="a\\..\\..\\1.png"), "would lie outside of it"),
        (lambda p: write_zip(p / "a.zip", {"a/1.png": b""}, zipfile.ZIP_BZIP2), "is neither stored nor deflated"),
        (lambda p: write_zip(p / "a.zip", {"a/1.png": b""}, zipfile.ZIP_LZMA), "is neither stored nor deflated"),
        (lambda p: write_folder(p, {"a.zip": b"PK\3\4 and no more"}) / "a.zip", "File is not a zip file"),
        (lambda p: write_folder(p, {"a.tar": b"x" * 2000}) / "a.tar", "invalid header|truncated header"),
        (lambda p: write_folder(p, {"a.tar.gz": b"x" * 2000}) / "a.tar.gz", "Not a gzipped file"),
        (lambda p: write_folder(p, {"a.tar.gz": gzip.compress(b"x" * 2000)}) / "a.tar.gz", "header"),
        (lambda p: write_folder(p, {"a.tgz": gzip.compress(make_png() * 99)[:-20]}) / "a.tgz", "ended before"),
    ],
)
def test_malformed_archive_gives_one_line_error_and_leaves_no_file(tmp_path, home, make, reason):
    before = set(tmp_path.iterdir())
    path = make(tmp_path)
    with pytest.raises(CorruptFileError, match=rf"cannot be read as an archive \(.*{reason}") as caught:
        open_data(path)
    assert "\n" not in str(caught.value)
    assert set(tmp_path.iterdir()) - before <= {path, home}
    assert not [file for file in home.rglob("*") if file.is_file()]


def test_decompression_bombs_are_rejected(tmp_path, home, monkeypatch):
    """Unpacked sizes are compared with the packed size, the available memory and the free disk space."""
    bomb = write_zip(tmp_path / "bomb.zip", {"a/1.png": bytes(2**22)}, zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(memory, "available_memory", lambda: 2**20)
    with pytest.raises(CorruptFileError, match=r"1.png' would fill 4,194,304 bytes of memory; 1,048,576 are available"):
        read_contents(bomb)
    packed = tmp_path / "bomb.tar.gz"
    packed.write_bytes(gzip.compress(bytes(2**24)))
    monkeypatch.setattr(archives, "_MIN_BOMB", 2**20)
    with pytest.raises(CorruptFileError, match="it unpacks to over 200 times its size"):
        open_data(packed)
    monkeypatch.setattr(archives, "_SPARE_DISK", 2**62)
    with pytest.raises(VitrailError, match=r"Cache must have room for .*bomb.tar.gz.* more than the 0 bytes"):
        open_data(packed)
    assert not [file for file in home.rglob("*") if file.is_file()]


def test_zip_is_not_unpacked_beyond_its_stated_size(tmp_path):
    path = write_zip(tmp_path / "bomb.zip", {"a/1.png": bytes(2**26)}, zipfile.ZIP_DEFLATED)
    forged = bytearray(path.read_bytes())
    position = forged.index(b"PK\1\2") + 24
    forged[position : position + 4] = (1000).to_bytes(4, "little")
    path.write_bytes(forged)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=r"1\.png' cannot be read \(Bad CRC-32"):
            ZipTree(path).read("a/1.png")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_flipped_bit_in_a_zip_is_detected(tmp_path):
    content = bytes(range(256)) * 3
    path = write_zip(tmp_path / "a.zip", {"a/1.ppm": b"P6 16 16 255 " + content, "b/1.ppm": b"P6 16 16 255 " + content})
    assert len(read_contents(path)) == 2
    flipped = bytearray(path.read_bytes())
    flipped[flipped.index(content) + 300] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(CorruptFileError, match=r"a\.zip/a/1\.ppm' cannot be read \(Bad CRC-32 for file"):
        read_contents(path)


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_tar_that_is_truncated_or_has_a_corrupt_header_is_rejected(tmp_path, home, ending):
    """tarfile would list only the files before that position, without an error."""
    intact = write_tar(tmp_path / "a.tar", PHOTOS)
    with tarfile.open(intact) as archive:
        offset = archive.getmembers()[5].offset
    content = intact.read_bytes()
    flipped = bytearray(content)
    flipped[offset] ^= 1
    for corrupt in (content[:offset], bytes(flipped)):
        path = tmp_path / f"b{ending}"
        path.write_bytes(corrupt if ending == ".tar" else gzip.compress(corrupt))
        with pytest.raises(CorruptFileError, match=rf"b{ending}' .*\(it is corrupt or truncated at byte {offset:,}"):
            open_data(path)
    assert not [file for file in home.rglob("*") if file.is_file()]


def test_changed_tar_gz_of_same_size_and_time_is_unpacked_again(tmp_path):
    path = tmp_path / "set.tar.gz"
    versions = []
    for seed in (1, 2):
        plain = write_tar(
            tmp_path / "a.tar", {"set/cat/1.png": make_png(seed), "set/dog/1.png": make_png(3)}
        ).read_bytes()
        path.write_bytes(gzip.compress(plain, 0, mtime=0))
        os.utime(path, (1, 1))
        versions.append((path.stat().st_size, read_contents(path)))
    assert versions[0][0] == versions[1][0]
    assert versions[0][1] != versions[1][1]


@pytest.mark.parametrize("ending", [".zip", ".tar"])
def test_names_with_empty_parts_and_dots_are_normalised(tmp_path, ending):
    plain = write_archive(tmp_path / f"plain{ending}", PHOTOS)
    styles = ("./{}//{}", "{}/./{}", ".//{}\\{}", "././{}/.//{}")
    files = {
        styles[number % 4].format(*name.rsplit("/", 1)): content
        for number, (name, content) in enumerate(PHOTOS.items())
    }
    odd = write_archive(tmp_path / f"odd{ending}", files)
    assert len(read_contents(odd)) == 12
    assert read_contents(odd) == read_contents(plain)


def error_message(read, error_type: type = VitrailError) -> str:
    """Return the message of the error that a reader raises, or an empty string."""
    try:
        read()
    except error_type as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archive_that_zipfile_or_tarfile_rejects_is_rejected(tmp_path, kind):
    """Mutated archives give one-line errors, at least whenever the library raises an error."""
    rng = random.Random(18)
    files = dict(list(PHOTOS.items())[:3])
    path = tmp_path / f"a.{kind}"
    intact = write_archive(path, files).read_bytes()

    def read_with_library():
        if kind == "zip":
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    archive.read(name)
        else:
            with tarfile.open(path, "r:") as archive:
                for info in archive:
                    with contextlib.suppress(AttributeError):
                        archive.extractfile(info).read()

    def read_ours():
        tree = (ZipTree if kind == "zip" else TarTree)(path)
        for folder in tree._files:
            for name in tree.files(folder):
                tree.read(f"{folder}/{name}" if folder else name)

    rejected = 0
    for _ in range(200):
        mutated = bytearray(intact)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        if rng.random() < 0.2:
            del mutated[rng.randrange(len(mutated)) :]
        path.write_bytes(mutated)
        message = error_message(read_ours)
        rejected += bool(message)
        assert message.count("\n") == 0
        assert message or not error_message(read_with_library, Exception), "the library rejects this archive"
    assert rejected > 40


def test_mutated_pickles_are_rejected_or_read_as_plain_data(tmp_path):
    """The reader is called without its sandbox."""
    rng = random.Random(7)
    table = {b"data": np.arange(64, dtype=np.uint8).reshape(2, 32), b"labels": [3, 4], b"names": [b"a", b"b"]}
    pickles = [pickle_as_python_2(table), pickle.dumps(table, 2), pickle.dumps(table, 5)]

    class Rejected(Exception):
        pass

    def reject(reason):
        raise Rejected(reason)

    for number in range(200):
        mutated = bytearray(pickles[number % 3])
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        (tmp_path / "p").write_bytes(mutated)
        with contextlib.suppress(Rejected, SystemExit):
            report = read_arrays.convert(tmp_path / "p", tmp_path / "out.npz", reject)
            assert set(report) == {"texts"}
            with np.load(tmp_path / "out.npz", allow_pickle=False) as arrays:
                assert all(array.dtype.kind in "iufb" for array in arrays.values())


# Published data sets

SYNSETS = "imagenet_2012_validation_synset_labels.txt"


def synset_file(*ids: str) -> bytes:
    """Return a list of classes with as many lines as the published list, which begins with these WordNet ids."""
    return "".join(f"{synset}\n" for synset in (*ids, *["n0"] * (50_000 - len(ids)))).encode()


def pets_files(training: bytes, test: bytes) -> dict[str, bytes]:
    return {"images/a_1.jpg": b"", "annotations/trainval.txt": training, "annotations/test.txt": test}


def kaggle_files(boxes: bytes) -> dict[str, bytes]:
    name = "ILSVRC2012_val_00000002"
    return {f"{name}.JPEG": b"", "LOC_val_solution.csv": b"ImageId,PredictionString\n" + name.encode() + b"," + boxes}


TINY = {"train/a/images/1.png": b"", "train/b/images/1.png": b"", "val/images/2.png": b"", "val/images/3.png": b""}


def write_matlab(tmp_path: Path, arrays: dict[str, np.ndarray], **settings) -> bytes:
    """Return a MATLAB file that scipy writes."""
    scipy_io = pytest.importorskip("scipy.io")
    scipy_io.savemat(tmp_path / "x.mat", arrays, **settings)
    return (tmp_path / "x.mat").read_bytes()


def make_published(form: str, tmp_path: Path) -> tuple[dict[str, bytes], str, list[tuple[str, str, int]]]:
    """Return the files of a published data set, its note, and the split, class and number of each image."""
    match form:
        case "tiny":
            files = {f"tiny/train/n0{c}/images/n0{c}_{i}.JPEG": make_png(10 * c + i) for c in (1, 2) for i in (0, 1)}
            files |= {"tiny/val/images/val_0.JPEG": make_png(50), "tiny/test/images/test_0.JPEG": make_png(51)}
            files |= {
                "tiny/val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t32\t44\t62\n",
                "tiny/wnids.txt": b"n02\nn01\n",
            }
            note = "Tiny-ImageNet (its 1 test images have no labels): 4 train, 1 val images of 2 classes"
            return files, note, [("train", f"n0{c}", 10 * c + i) for c in (1, 2) for i in (0, 1)] + [("val", "n02", 50)]
        case "imagenet":
            files = {f"set/val/ILSVRC2012_val_0000000{i}.JPEG": make_png(i) for i in (1, 2, 3)}
            lines = "".join(f"ILSVRC2012_val_0000000{i}.JPEG {65 * i}\n" for i in (3, 1, 2))
            note = "ImageNet's validation images with val.txt: 3 val images of 3 classes"
            return files | {"set/val.txt": lines.encode()}, note, [("val", str(65 * i), i) for i in (1, 2, 3)]
        case "imagenet-ids":
            files = {f"ILSVRC2012_val_0000000{i}.JPEG": make_png(i) for i in (1, 2)}
            files[SYNSETS] = synset_file("n2", "n1")
            note = f"ImageNet's validation images with {SYNSETS}: 2 val images of 2 classes"
            return files, note, [("val", "n2", 1), ("val", "n1", 2)]
        case "imagenet-kaggle":
            files = {f"val/ILSVRC2012_val_0000000{i}.JPEG": make_png(i) for i in (1, 2)}
            files["LOC_val_solution.csv"] = (
                b"ImageId,PredictionString\nILSVRC2012_val_00000002,n9 1 2 3 4 n9 5 6 7 8 \n"
                b"ILSVRC2012_val_00000001,n8 1 2 3 4 \n"
            )
            note = "ImageNet's validation images with LOC_val_solution.csv: 2 val images of 2 classes"
            return files, note, [("val", "n8", 1), ("val", "n9", 2)]
        case "pets":
            names = ["Abyssinian_1", "great_pyrenees_2", "great_pyrenees_10", "Abyssinian_3"]
            files = {f"oxford-iiit-pet/images/{name}.jpg": make_png(i) for i, name in enumerate(names)}
            files["oxford-iiit-pet/annotations/trainval.txt"] = b"Abyssinian_1 1 1 1\ngreat_pyrenees_10 2 2 1\n"
            files["oxford-iiit-pet/annotations/test.txt"] = b"great_pyrenees_2 2 2 1\nAbyssinian_3 1 1 1\n"
            truth = [("train", "Abyssinian", 0), ("train", "great_pyrenees", 2)]
            truth += [("test", "great_pyrenees", 1), ("test", "Abyssinian", 3)]
            return files, "Oxford Pets: 2 train, 2 test images of 2 classes", truth
    files = {f"flowers-102/jpg/image_0000{i}.jpg": make_png(i) for i in (1, 2, 3, 4)}
    files["flowers-102/imagelabels.mat"] = write_matlab(
        tmp_path, {"labels": np.array([[77, 5, 77, 5]], np.uint8)}, do_compression=form == "flowers-packed"
    )
    ids = {"trnid": np.array([[3, 4]], np.uint16), "valid": np.array([[1]], np.int32), "tstid": np.array([[2.0]])}
    files["flowers-102/setid.mat"] = write_matlab(tmp_path, ids, do_compression=form == "flowers-packed")
    truth = [("train", "77", 3), ("train", "5", 4), ("val", "77", 1), ("test", "5", 2)]
    return files, "Oxford Flowers: 2 train, 1 val, 1 test images of 2 classes", truth


@pytest.mark.parametrize(
    ("form", "ending"),
    [
        ("tiny", ""),
        ("tiny", ".zip"),
        ("imagenet", ""),
        ("imagenet", ".tar.gz"),
        ("imagenet-ids", ""),
        ("imagenet-kaggle", ".zip"),
        ("pets", ""),
        ("pets", ".tar"),
        ("flowers", ""),
        ("flowers-packed", ".zip"),
    ],
)
def test_published_data_sets_are_recognised(tmp_path, form, ending):
    files, note, truth = make_published(form, tmp_path)
    data = write_archive(tmp_path / f"set{ending}", files) if ending else write_folder(tmp_path / "folder", files)
    dataset = open_data(data)
    assert dataset.notes[-1] == f"read as {note}"
    pixels = Preprocess(resolution=(6, 6), crop_fraction=1.0)
    assert read_contents(data) == [(split, label, pixels.crop(make_png(i)).tobytes()) for split, label, i in truth]
    assert not [finding for finding in find_problems(dataset) if finding.kind == "unreadable"]


def test_1000_wordnet_ids_become_class_numbers_of_imagenet(tmp_path):
    files = {f"ILSVRC2012_val_{i:08d}.JPEG": b"x" for i in range(1, 1001)}
    files[SYNSETS] = synset_file(*(f"n{9999 - i}" for i in range(1000)))
    dataset = open_data(write_folder(tmp_path / "val", files))
    assert dataset.labels[dataset.first_split.labels[0]] == "999"
    assert dataset.notes == (
        f"read as ImageNet's validation images with {SYNSETS}, classes numbered by their WordNet ids:"
        " 1,000 val images of 1,000 classes",
    )


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"images.tar.gz": b"", "annotations.tar.gz": b""}, r"Unpack images.tar.gz there: tar xf images.tar.gz\."),
        ({"imagelabels.mat": b"", "setid.mat": b"", "102flowers.tgz": b""}, r"Unpack 102flowers.tgz there"),
        ({"imagelabels.mat": b"x", "setid.mat": b"", "jpg/1.jpg": b""}, r"as a MATLAB 5 file \(KeyError\)"),
        (
            {"images/a_1.jpg": b"", "annotations/trainval.txt": b"a_1\n", "annotations/test.txt": b""},
            "must have 4 words, got 'a_1'",
        ),
        ({"ILSVRC2012_val_1.JPEG": b"", "val.txt": b"ILSVRC2012_val_2.JPEG 3"}, r"has no label of ILSVRC2012_val_1"),
        ({"ILSVRC2012_val_1.JPEG": b"", "val.txt": b"\xff"}, r"must be text in UTF-8"),
        (
            {"val/ILSVRC2012_val_1.JPEG": b"", "ILSVRC2012_validation_ground_truth.txt": b"490"},
            r"whose numbers follow the development kit's own order",
        ),
        (
            {"train/a/images/1.png": b"", "val/images/2.png": b"", "val/val_annotations.txt": b"2.png b\n"},
            r"has a class that is not in train: b",
        ),
        (
            {"ILSVRC2012_val_1.JPEG": b"", "val.txt": b"ILSVRC2012_val_1.JPEG 3\nval/ILSVRC2012_val_1.JPEG 4"},
            r"val.txt' must name each image once, got 'ILSVRC2012_val_1.JPEG' 2 times",
        ),
        ({**TINY, "val/val_annotations.txt": b"2.png a\n"}, r"val_annotations.txt' has no label of 3.png"),
        (
            {**TINY, "val/val_annotations.txt": b"2.png a\n3.png a\n2.png b\n"},
            r"must name each image once, got '2.png'",
        ),
        (
            {**TINY, "val/val_annotations.txt": b"2.png a\n3.png a\n../../../i0.jpg b\n"},
            r"must name images without folders, got '../../../i0.jpg'",
        ),
        (
            pets_files(b"a_1 1 1 1\n", b"a_1 1 1 1\n"),
            r"annotations' must name each image once, got 'a_1' 2 times",
        ),
        (
            pets_files(b"a_1 1 1 1 a_2 1 1 1\n", b"b_1 2 1 2\n"),
            r"Line 1 of .*trainval.txt' must have 4 words, got 'a_1 1 1 1 a_",
        ),
        (
            pets_files(b"a_1 1 1 1\n#_2 1 1 1\na_3 1 1\n", b"b_1 2 1 2\n"),
            r"Line 3 of .*trainval.txt' must have 4 words",
        ),
        (
            pets_files(b"a_1 1 1 1\n", b"a_2 2 1 2\n"),
            r"test.txt' must have one class number for each breed, got 1 and 2 for a",
        ),
        (
            pets_files(b"a_1 1 1 1\n", b"b_2 1 1 2\n"),
            r"annotations' must have another class number for each breed",
        ),
        (pets_files(b"a_1 1 1 1\n", b"\n"), r"test.txt' has no line"),
        (
            {
                "ILSVRC2012_val_00000001.JPEG": b"",
                "ILSVRC2012_val_00050001.JPEG": b"",
                SYNSETS: synset_file("n2"),
            },
            r"has no label of ILSVRC2012_val_00050001.JPEG",
        ),
        (
            {"ILSVRC2012_val_00000002.JPEG": b"", "1.JPEG": b"", SYNSETS: synset_file("n2")},
            r"has no label of 1.JPEG",
        ),
        (
            {"ILSVRC2012_val_00000002.JPEG": b"", SYNSETS: synset_file("", "n1")[1:]},
            r"must have 50,000 lines, got 49,999",
        ),
        (
            {"ILSVRC2012_val_00000002.JPEG": b"", SYNSETS: synset_file("n1", "n\b2")},
            r"must have a WordNet id such as n0",
        ),
        (
            {"ILSVRC2012_val_1.JPEG": b"", "val.txt": b"ILSVRC2012_val_1.JPEG 6S\n"},
            r"must have a number below 1,000 .*'6S'",
        ),
        ({"ILSVRC2012_val_1.JPEG": b"", "val.txt": b"ILSVRC2012_val_1.JPEG 6 5\n"}, r"must have 2 words"),
        (kaggle_files(b"n9 1 2 3\n"), r"must have an image, and boxes of one class, in each line"),
        (kaggle_files(b"n9 1 2 3 4 n8 5 6 7 8\n"), r"must have an image, and boxes of one class, in each line"),
    ],
)
def test_incomplete_published_data_set_gives_one_line_error(tmp_path, files, reason):
    with pytest.raises(VitrailError, match=reason) as caught:
        open_data(write_folder(tmp_path / "set", files))
    assert "\n" not in str(caught.value)


def test_part_of_imagenet_validation_is_labelled_by_image_number(tmp_path):
    files = {f"ILSVRC2012_val_0000000{i}.JPEG": b"x" for i in (2, 4)}
    dataset = open_data(write_folder(tmp_path / "val", {**files, SYNSETS: synset_file("n1", "n2", "n3", "n4")}))
    assert [dataset.labels[label] for label in dataset.first_split.labels] == ["n2", "n4"]


@pytest.mark.parametrize(
    ("labels", "ids", "reason"),
    [
        ([1.5, 2, 3], {}, r"imagelabels.mat' must have whole numbers of at least 1 in labels"),
        ([-1, 2, 3], {}, r"must have whole numbers of at least 1 in labels"),
        ([np.nan, 2, 3], {}, r"must have whole numbers of at least 1 in labels"),
        ([np.inf, 2, 3], {}, r"must have whole numbers of at least 1 in labels"),
        ([1, 2, 3], {"valid": [np.nan]}, r"setid.mat' must have whole numbers of at least 1 in valid"),
        ([1, 2, 3], {"valid": [0]}, r"must have whole numbers of at least 1 in valid"),
        ([1, 2, 3], {"valid": [4]}, r"must number images from 1 to 3 in valid"),
        ([1, 2, 3], {"tstid": [1]}, r"setid.mat' must name each image once, got '1' 2 times"),
    ],
)
def test_inconsistent_oxford_flowers_give_one_line_error(tmp_path, labels, ids, reason):
    split_ids = {"trnid": [1], "valid": [2], "tstid": [3]} | ids
    files = {f"jpg/image_0000{i}.jpg": b"" for i in (1, 2, 3)}
    files["imagelabels.mat"] = write_matlab(tmp_path, {"labels": np.array(labels)})
    files["setid.mat"] = write_matlab(tmp_path, {key: np.array(value) for key, value in split_ids.items()})
    with pytest.raises(CorruptFileError, match=reason):
        open_data(write_folder(tmp_path / "set", files))


def test_matlab_file_with_duplicate_names_or_bombs_is_rejected(tmp_path):
    content = write_matlab(tmp_path, {"labels": np.arange(4)})
    with pytest.raises(CorruptFileError, match=r"x.mat' must have one array of each name"):
        read_matlab(content + content[128:], "x.mat")
    for unpacked in (bytes(2**24 + 8), bytes(8 * 1001)):
        packed = zlib.compress(unpacked)
        with pytest.raises(CorruptFileError, match=r"cannot be read as a MATLAB 5 file \(ValueError\)"):
            read_matlab(content[:128] + struct.pack("<II", 15, len(packed)) + packed, "x.mat")
    large = write_matlab(tmp_path, {"large": np.zeros(2**23, np.uint8)}, do_compression=True)
    assert read_matlab(content + large[128:], "x.mat").keys() == {"labels", "large"}
    with pytest.raises(CorruptFileError, match=r"\(ValueError\)"):
        read_matlab(content + large[128:] * 2, "x.mat")


@pytest.mark.parametrize("defect", ["truncated", "checksum", "shape", "characters", "small", "version"])
def test_corrupt_matlab_file_is_rejected(tmp_path, defect):
    """A packed array is truncated or differs from its checksum, or a stated size is not that of the numbers."""
    content = write_matlab(
        tmp_path, {"labels": np.arange(40, dtype=np.uint8)[None]}, do_compression=defect in ("truncated", "checksum")
    )
    if defect in ("truncated", "checksum"):
        packed = content[136:-1] if defect == "truncated" else content[136:-1] + bytes([content[-1] ^ 1])
        content = content[:128] + struct.pack("<II", 15, len(packed)) + packed
    if defect == "shape":
        content = content.replace(struct.pack("<ii", 1, 40), struct.pack("<ii", 1, 41))
    if defect == "characters":
        content = write_matlab(tmp_path, {"labels": "a text"})
        assert read_matlab(content, "x.mat") == {}
        return
    if defect == "small":  # a tag that states more than its four bytes
        content = write_matlab(tmp_path, {"labels": np.arange(4, dtype=np.uint8)[None]})
        content = content.replace(struct.pack("<HH", 2, 4), struct.pack("<HH", 2, 8))
        content = content.replace(struct.pack("<ii", 1, 4), struct.pack("<ii", 1, 8))
    if defect == "version":
        content = content[:124] + b"\0\2" + content[126:]
    with pytest.raises(CorruptFileError, match=r"cannot be read as a MATLAB 5 file"):
        read_matlab(content, "x.mat")


def test_mutated_matlab_files_are_rejected_or_read_as_numbers(tmp_path):
    rng = random.Random(3)
    content = write_matlab(tmp_path, {"labels": np.arange(40)}, do_compression=True)
    for _ in range(200):
        mutated = bytearray(content)
        mutated[rng.randrange(120, len(mutated))] = rng.randrange(256)
        with contextlib.suppress(CorruptFileError):
            assert all(array.dtype.kind in "iuf" for array in read_matlab(bytes(mutated), "x.mat").values())


def test_mnist_is_read_from_folder_of_torchvision(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    header = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1])
    files = {
        "train-images-idx3-ubyte": header + b"ab",
        "train-labels-idx1-ubyte": bytes([0, 0, 8, 1, 0, 0, 0, 2, 0, 1]),
    }
    write_folder(raw, files)
    assert [len(open_data(folder).first_split) for folder in (tmp_path, tmp_path / "MNIST", raw)] == [2, 2, 2]
