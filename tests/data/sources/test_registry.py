"""Opening DATA of every form: class tables, splits, fingerprints and one-line errors."""

import gzip
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.data.dataset import sample_held_out
from vitrail.data.sources.built_in import _FASHION_CLASSES, _FASHION_PACKAGE
from vitrail.data.sources.registry import open_data


def save_image(path, seed=0, size=(20, 16), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    """A folder with the classes cat and dog for training, and cat and emu for validation."""
    for split, label, count in (
        ("train", "cat", 5),
        ("train", "dog", 4),
        ("validation", "cat", 2),
        ("validation", "emu", 1),
    ):
        for index in range(count):
            save_image(tmp_path / split / label / f"{index}.png", index)
    return tmp_path


def test_splits_share_one_table_of_classes(folder):
    data = open_data(folder)
    assert data.labels == ("cat", "dog", "emu")
    assert list(data.splits) == ["train", "val"]
    assert data.splits["train"].labels.tolist() == [0] * 5 + [1] * 4
    assert data.splits["val"].labels.tolist() == [0, 0, 2]
    assert [os.path.relpath(path, folder) for path in data.splits["val"].images] == [
        "validation/cat/0.png",
        "validation/cat/1.png",
        "validation/emu/0.png",
    ]


def test_training_rejects_class_without_training_images(folder):
    with pytest.raises(CorruptFileError, match=r"no training image of class 'emu'.*vitrail doctor"):
        open_data(folder).for_training(holdout=0.2, seed=0)


def test_folders_list_images_at_any_depth_and_follow_links(tmp_path):
    save_image(tmp_path / "a" / "deep" / "er" / "x.JPG")
    save_image(tmp_path / "a" / "y.png")
    save_image(tmp_path / "b" / "z.webp")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "a" / ".hidden.png").write_bytes(b"no picture")
    (tmp_path / ".git").mkdir()
    (tmp_path / "a" / "round").symlink_to(tmp_path / "a")
    (tmp_path / "b" / "over").symlink_to(tmp_path / "a" / "deep")
    (tmp_path / "a" / "deep" / "back").symlink_to(tmp_path / "b")
    data = open_data(tmp_path)
    assert list(data.splits) == ["all"]
    names = [os.path.relpath(path, tmp_path) for path in data.first_split.images]
    assert {"a/deep/er/x.JPG", "a/y.png", "b/z.webp", "b/over/er/x.JPG"} <= set(names)
    assert len(names) < 12


def test_folders_with_names_of_splits_may_be_classes(tmp_path):
    for label in ("test", "train", "val", "other"):
        save_image(tmp_path / label / "x.png")
    assert open_data(tmp_path).labels == ("other", "test", "train", "val")


def test_splits_are_recognised_by_other_names_and_beside_other_folders(tmp_path):
    for split in ("Train", "valid", "TEST"):
        for label in "ab":
            save_image(tmp_path / split / label / "x.png")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "boxes.json").write_text("{}")
    assert list(open_data(tmp_path).splits) == ["train", "val", "test"]
    save_image(tmp_path / "more" / "x.png")
    with pytest.raises(UsageError, match="Train beside 'more'"):
        open_data(tmp_path)


def test_path_object_is_never_a_built_in_data_set(tmp_path, monkeypatch):
    for label in "ab":
        save_image(tmp_path / "digits" / label / "x.png")
    monkeypatch.chdir(tmp_path)
    assert open_data(Path("digits")).labels == ("a", "b")
    assert open_data("./digits").labels == ("a", "b")
    assert len(open_data("digits").labels) == 10


def test_evaluation_uses_test_or_else_val(tmp_path, folder):
    assert open_data(folder).for_evaluation().name == "val"
    save_image(folder / "test" / "cat" / "t.png")
    data = open_data(folder)
    assert data.for_evaluation().name == "test"
    assert data.for_evaluation("validation").name == "val"
    with pytest.raises(UsageError, match="Did you mean"):
        data.for_evaluation("tests")


@pytest.mark.parametrize("packed", [False, True])
def test_idx_folder_gives_its_arrays_or_names_corrupt_file(tmp_path, packed):
    rng = np.random.default_rng(0)
    expected = {}
    for prefix, split, count in (("train", "train", 7), ("t10k", "test", 3)):
        images, labels = rng.integers(0, 256, (count, 5, 4), np.uint8), rng.integers(0, 3, count).astype(np.uint8)
        labels[:3] = [2, 0, 1]
        expected[split] = (images, labels)
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
            (tmp_path / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    data = open_data(tmp_path)
    assert data.labels == ("0", "1", "2")
    for split, (images, labels) in expected.items():
        np.testing.assert_array_equal(data.splits[split].images[..., 0], images)
        np.testing.assert_array_equal(data.splits[split].labels, labels)
    path = tmp_path / ("train-images-idx3-ubyte" + ".gz" * packed)
    intact = path.read_bytes()
    for corrupt in (intact[: len(intact) // 2], b"\0\0\7\1" + intact[4:], intact + intact[-30:], b""):
        path.write_bytes(corrupt)
        with pytest.raises(CorruptFileError, match=path.name):
            open_data(tmp_path)


def test_npz_file_sorts_its_classes(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (6, 5, 4, 3), np.uint8), np.array([10, 2, 2, 10, 7, 7])
    np.savez(tmp_path / "all.npz", images=images, labels=labels)
    data = open_data(tmp_path / "all.npz")
    assert data.labels == ("2", "7", "10")
    assert data.first_split.labels.tolist() == [2, 0, 0, 2, 1, 1]
    np.savez(tmp_path / "words.npz", train_images=images[..., 0], train_labels=np.array(list("xyzxyz")))
    data = open_data(tmp_path / "words.npz")
    assert (data.labels, data.splits["train"].images.shape) == (("x", "y", "z"), (6, 5, 4, 1))
    np.savez(tmp_path / "named.npz", images=images, labels=labels % 3, classes=np.array(["wolf", "ape", "bee"]))
    data = open_data(tmp_path / "named.npz")
    assert data.labels == ("ape", "bee", "wolf")
    assert [data.labels[index] for index in data.first_split.labels] == ["ape", "bee", "bee", "ape", "ape", "ape"]


@pytest.mark.parametrize(
    ("arrays", "error"),
    [
        ({"images": np.zeros((2, 4, 4)), "labels": np.zeros(2, int)}, "uint8"),
        ({"images": np.zeros((2, 4, 4), np.uint8)}, "only one of images and labels"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(3, int)}, "for each image"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(2)}, "for each image"),
        ({"images": np.zeros((2, 3, 8, 8), np.uint8), "labels": np.zeros(2, int)}, "channels last"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(2, int), "train_labels": np.zeros(2)}, "either"),
        ({"pictures": np.zeros((2, 4, 4), np.uint8)}, "must be called images"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, 5]), "classes": np.array(["a"])}, "below 1"),
        (
            {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(2, int), "classes": np.array("a")},
            "list of names",
        ),
        (
            {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(2, int), "classes": np.array(["a", "a"])},
            "differ",
        ),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(2, int), "classes": np.array([b"a"])}, "names"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([1, 2**64 - 1], np.uint64)}, "integers up to"),
        (
            {"images": np.array([{}, {}]), "labels": np.zeros(2, int)},
            r"cannot be read as npz \(images: it contains",
        ),
    ],
)
def test_invalid_npz_file_gives_one_line_error(tmp_path, arrays, error):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(VitrailError, match=error) as caught:
        open_data(tmp_path / "x.npz")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code_point", [0, 0xD800, 0x7FFFFFFF])
def test_class_name_in_array_must_be_unicode(tmp_path, code_point):
    """A character in numpy is any 32 bits. Without the check, saving the bundle would fail after the training."""
    names, images = np.array(["a", "b"]), np.zeros((2, 4, 4), np.uint8)
    names.view(np.uint32)[1] = code_point
    for labels in ({"labels": names}, {"labels": np.arange(2), "classes": names}):
        np.savez(tmp_path / "x.npz", images=images, **labels)
        with pytest.raises(CorruptFileError, match="texts in Unicode, and not empty"):
            open_data(tmp_path / "x.npz")


def test_csv_file_is_read_with_and_without_header(tmp_path):
    for index in range(4):
        save_image(tmp_path / "sub" / f"{index}, x.png", index)
    path = tmp_path / "list.csv"
    path.write_text('"sub/0, x.png",dog\n"sub/1, x.png",cat\n')
    data = open_data(path)
    assert data.labels == ("cat", "dog")
    assert [data.labels[index] for index in data.first_split.labels] == ["dog", "cat"]
    assert Path(data.first_split.images[1]).samefile(tmp_path / "sub" / "1, x.png")
    path.write_text(
        '\ufeffid,Label,file,split\n7,dog,"sub/0, x.png",train\n8,cat,"sub/1, x.png",train\n\n9,cat,a.png,test\n'
    )
    data = open_data(path)
    assert {name: split.labels.tolist() for name, split in data.splits.items()} == {"train": [1, 0], "test": [0]}


@pytest.mark.parametrize("kind", ["npz", "idx"])
def test_mutated_npz_or_idx_file_is_read_or_rejected_in_one_line(tmp_path, kind):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (20, 6, 6), np.uint8), (np.arange(20) % 3).astype(np.uint8)
    if kind == "npz":
        path = data = tmp_path / "x.npz"
        np.savez_compressed(path, images=images, labels=labels)
    else:
        data, path = tmp_path, tmp_path / "train-images-idx3-ubyte.gz"
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
            (tmp_path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    intact = path.read_bytes()
    rejected = 0
    for _ in range(200):
        mutated = bytearray(intact)
        mutated[rng.integers(len(intact))] ^= 1 << rng.integers(8)
        path.write_bytes(mutated[: rng.integers(1, len(intact))] if rng.random() < 0.3 else mutated)
        try:
            open_data(data)
        except VitrailError as error:
            rejected += "\n" not in str(error)
    assert rejected > 100


def test_idx_file_that_states_more_than_memory_is_rejected(tmp_path):
    header = struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**15, 2**15)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(header)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, 1) + b"x")
    with pytest.raises(CorruptFileError, match="would fill"):
        open_data(tmp_path)


def measure_peak_memory(function):
    """Return the peak memory of a function in bytes, and the message of its error or an empty string."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1], ""
    except VitrailError as error:
        return tracemalloc.get_traced_memory()[1], str(error)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["npz", "idx"])
def test_arrays_are_unpacked_without_copy_and_only_if_they_fit_in_memory(tmp_path, monkeypatch, kind):
    """A file of 30 kB unpacks to 32 MB."""
    images, labels = np.zeros((2**15, 32, 32), np.uint8), (np.arange(2**15) % 3).astype(np.uint8)
    if kind == "npz":
        data = tmp_path / "x.npz"
        np.savez_compressed(data, images=images, labels=labels)
    else:
        data = tmp_path
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
            (tmp_path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    peak, message = measure_peak_memory(lambda: open_data(data))
    assert (peak < 1.1 * images.nbytes, message) == (True, "")
    monkeypatch.setattr("vitrail.core.memory.available_memory", lambda: 30 * 2**20)
    peak, message = measure_peak_memory(lambda: open_data(data))
    assert peak < 2**20
    assert "would fill" in message
    assert "31,457,280 are available" in message


def write_inconsistent_npz(path, header_shape, stated_size, stored_size=100):
    """Write an npz file whose stated shape and stated size differ from the stored bytes."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {header_shape}, }}".ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(stored_size)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", content)
    size = struct.pack("<I", len(content))
    path.write_bytes(path.read_bytes().replace(size, struct.pack("<I", 128 + stated_size)))


@pytest.mark.parametrize(
    ("shape", "stated_size", "error"),
    [
        ((10**12,), 100, "states 1,000,000,000,000 bytes"),
        ((10**7,), 10**7, "has fewer"),
        ((50,), 100, "states 50 bytes"),
        ((50,), 50, "Bad CRC"),
        ((-10, -10), 100, "cannot be read as npz"),
        (("x",), 100, "cannot be read as npz"),
        ((10**12, 0), 0, "cannot be read as npz"),
    ],
)
def test_npz_file_with_inconsistent_sizes_is_rejected(tmp_path, shape, stated_size, error):
    write_inconsistent_npz(tmp_path / "x.npz", shape, stated_size)
    peak, message = measure_peak_memory(lambda: open_data(tmp_path / "x.npz"))
    assert error in message
    assert "\n" not in message
    assert peak < 20 * 2**20


def test_pipe_is_rejected_as_data(tmp_path):
    """Reading a pipe would never end."""
    for name in ("x.npz", "x.csv", "idx/train-images-idx3-ubyte"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(VitrailError, match="regular file"):
            open_data(tmp_path / "idx" if "idx" in name else tmp_path / name)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "none"),
        ("file,label\n", "none"),
        ("a.png\n", "Line 1.*must be file,label"),
        ("file,label\na.png,\n", "Line 2"),
        ("file,class\na.png,x\n", "header must have"),
        ("a.png,x,tain\n", "split train, val or test"),
        ("a.png,x,train\nb.png,y\n", "every line"),
        ('a.png,"x\n', "cannot be read as CSV"),
    ],
)
def test_invalid_csv_file_gives_one_line_error(tmp_path, text, error):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(VitrailError, match=error) as caught:
        open_data(tmp_path / "x.csv")
    assert "\n" not in str(caught.value)


def test_path_without_data_is_rejected(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "flat").mkdir()
    save_image(tmp_path / "flat" / "x.png")
    (tmp_path / "hollow" / "cat").mkdir(parents=True)
    (tmp_path / "file.txt").write_text("x")
    for name in ("missing", "empty", "flat", "hollow", "file.txt", "\0", "x" * 5000):
        with pytest.raises(UsageError):
            open_data(tmp_path / name)
    with pytest.raises(UsageError, match="Did you mean 'fashion-mnist'"):
        open_data("fashion-mnst")
    for split in ("train", "val", "validation"):
        save_image(tmp_path / "duplicate" / split / "cat" / "x.png")
    with pytest.raises(UsageError, match="must have one val folder"):
        open_data(tmp_path / "duplicate")


def test_digits_equal_scikit_learn():
    from sklearn.datasets import load_digits

    data = open_data("digits")
    training, test = data.splits["train"], data.splits["test"]
    assert (training.images.shape, test.images.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    assert np.bincount(test.labels).tolist() == [36] * 10

    def rows(images, labels):
        return sorted(map(tuple, np.column_stack([images.reshape(len(labels), -1), labels]).tolist()))

    expected = load_digits()
    digits = rows(np.concatenate([training.images, test.images]), np.concatenate([training.labels, test.labels]))
    assert digits == rows(np.round(expected.images * 255 / 16).astype(np.uint8), expected.target)


def test_fashion_mnist_is_read_from_vitrail_data_or_error_states_installation(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.data.sources.built_in._FASHION_PACKAGE", tmp_path / "nowhere")
    with pytest.raises(UsageError, match="apt install dataset-fashion-mnist"):
        open_data("fashion-mnist")
    labels = np.arange(10, dtype=np.uint8)
    images = np.arange(10, dtype=np.uint8)[:, None, None] * np.ones((1, 28, 28), np.uint8)
    for prefix in ("train", "t10k"):
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
            (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path))
    data = open_data("fashion-mnist")
    assert data.labels == tuple(sorted(_FASHION_CLASSES))
    split = data.splits["test"]
    assert [data.labels[index] for index in split.labels] == [
        _FASHION_CLASSES[level] for level in split.images[:, 0, 0, 0]
    ]


def test_fashion_40_has_four_test_images_of_each_class():
    data = open_data("fashion-40")
    assert (data.labels, data.licence, list(data.splits)) == (tuple(sorted(_FASHION_CLASSES)), "mit", ["test"])
    assert data.splits["test"].images.shape == (40, 28, 28, 1)
    assert np.bincount(data.splits["test"].labels).tolist() == [4] * 10
    if not _FASHION_PACKAGE.is_dir():
        pytest.skip("dataset-fashion-mnist is not installed")
    test = open_data("fashion-mnist").splits["test"]
    label_of = {pixels.tobytes(): label for pixels, label in zip(test.images, test.labels, strict=True)}
    for pixels, label in zip(data.splits["test"].images, data.splits["test"].labels, strict=True):
        assert label_of[pixels.tobytes()] == label


def test_fingerprint_changes_with_file_sizes_and_pixels(folder):
    data = open_data(folder)
    before = data.fingerprint()
    assert open_data(folder).fingerprint() == before
    path = folder / "train" / "cat" / "0.png"
    path.write_bytes(path.read_bytes() + b" ")
    assert open_data(folder).fingerprint() != before
    digits = open_data("digits")
    first = digits.fingerprint()
    digits.splits["test"].images[0, 0, 0, 0] ^= 1
    assert digits.fingerprint() != first


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    share=st.floats(0.01, 0.9),
    seed=st.integers(0, 1000),
)
def test_share_of_each_class_is_held_out_but_never_all(counts, share, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    held_out = sample_held_out(labels, share, seed)
    for label, count in enumerate(counts):
        held_out_count = int(held_out[labels == label].sum())
        assert held_out_count == (0 if count == 1 else min(max(round(share * count), 1), count - 1))
    assert np.array_equal(held_out, sample_held_out(labels, share, seed))
    assert not sample_held_out(labels, 0.0, seed).any()


def test_held_out_samples_depend_on_seed():
    labels = np.zeros(100, int)
    assert (sample_held_out(labels, 0.2, 0) != sample_held_out(labels, 0.2, 1)).any()


@pytest.mark.parametrize(
    ("encoding", "mark", "name"),
    [
        ("cp949", b"", "CP949"),
        ("utf-16-le", b"\xff\xfe", "UTF-16"),
        ("utf-16-be", b"\xfe\xff", "UTF-16"),
        ("utf-16-le", b"", "UTF-16"),
        ("utf-16-be", b"", "UTF-16"),
        ("utf-8", b"\xef\xbb\xbf", None),
        ("utf-8", b"", None),
    ],
)
def test_csv_file_of_spreadsheet_is_read_in_its_encoding(tmp_path, encoding, mark, name):
    text = "file,label\r\n사진/고양이1.png,고양이\r\n사진/2.png,강아지\r\n"
    (tmp_path / "목록.csv").write_bytes(mark + text.encode(encoding))
    data = open_data(tmp_path / "목록.csv")
    assert data.labels == ("강아지", "고양이")
    assert [os.path.relpath(path, tmp_path) for path in data.first_split.images] == ["사진/고양이1.png", "사진/2.png"]
    assert data.notes == (() if name is None else (f"목록.csv is read as text in {name}",))


@pytest.mark.parametrize(
    "content", ["a.png,猫\n".encode("shift-jis"), "a.png,café\n".encode("latin-1"), b"a.png,x\n\xff,y\n"]
)
def test_csv_file_in_another_encoding_is_rejected_with_advice(tmp_path, content):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r'must be text in UTF-8, UTF-16 or CP949, .* Save it as "CSV UTF-8"\.$'):
        open_data(tmp_path / "x.csv")


def test_missing_data_error_suggests_similar_path(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(UsageError) as caught:
        open_data(tmp_path / "photso")
    assert str(caught.value) == (
        "Data must be a file or folder that exists, or a built-in data set (digits, fashion-40, fashion-mnist), got"
        f" {str(tmp_path / 'photso')!r}. Did you mean {str(tmp_path / 'photos')!r}?"
    )


def test_folder_with_one_data_set_inside_is_opened(folder, tmp_path_factory):
    outer = tmp_path_factory.mktemp("outer")
    (outer / "photos").mkdir()
    folder.rename(outer / "photos" / "photos")
    for parent in (outer, outer / "photos"):
        (parent / "__MACOSX" / "photos").mkdir(parents=True)
        (parent / "__MACOSX" / "photos" / "._0.png").touch()
        (parent / ".DS_Store").touch()
        (parent / "readme.txt").touch()
    data, inner = open_data(outer / "photos"), open_data(outer / "photos" / "photos")
    assert (data.labels, list(data.splits)) == (("cat", "dog", "emu"), ["train", "val"])
    assert data.notes == (
        f"{str(outer / 'photos')!r} holds one folder, which is the data set: {str(outer / 'photos' / 'photos')!r}",
    )
    assert inner.notes == ()
    assert open_data(outer).fingerprint() == data.fingerprint() == inner.fingerprint()


def test_single_class_or_folder_beside_images_is_not_a_wrapper(tmp_path):
    for path in ("one/cat/0.png", "one/cat/1.png", "deep/cat/more/0.png", "loose/0.png", "loose/a/b/0.png"):
        save_image(tmp_path / path)
    save_image(tmp_path / "loose/a/c/0.png")
    assert open_data(tmp_path / "one").labels == ("cat",)
    assert open_data(tmp_path / "deep").labels == ("cat",)
    assert open_data(tmp_path / "loose").labels == ("a",)
