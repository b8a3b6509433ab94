"""DATA: every form a user may name, one table of classes, and what is refused in one line."""

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


def image(path, seed=0, size=(20, 16), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    """cat and dog for training, cat and emu for validation: the tables of the splits differ."""
    for split, label, count in (
        ("train", "cat", 5),
        ("train", "dog", 4),
        ("validation", "cat", 2),
        ("validation", "emu", 1),
    ):
        for index in range(count):
            image(tmp_path / split / label / f"{index}.png", index)
    return tmp_path


def test_one_table_of_classes_for_all_splits(folder):
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


def test_training_refuses_a_class_without_training_images(folder):
    with pytest.raises(CorruptFileError, match=r"no training image of class 'emu'.*vitrail doctor"):
        open_data(folder).for_training(holdout=0.2, seed=0)


def test_files_at_any_depth_links_and_what_is_no_image(tmp_path):
    image(tmp_path / "a" / "deep" / "er" / "x.JPG")
    image(tmp_path / "a" / "y.png")
    image(tmp_path / "b" / "z.webp")
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


def test_classes_called_like_splits(tmp_path):
    for label in ("test", "train", "val", "other"):
        image(tmp_path / label / "x.png")
    assert open_data(tmp_path).labels == ("other", "test", "train", "val")


def test_splits_by_their_other_names_and_beside_strangers(tmp_path):
    for split in ("Train", "valid", "TEST"):
        for label in "ab":
            image(tmp_path / split / label / "x.png")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "boxes.json").write_text("{}")
    assert list(open_data(tmp_path).splits) == ["train", "val", "test"]
    image(tmp_path / "more" / "x.png")
    with pytest.raises(UsageError, match="Train beside 'more'"):
        open_data(tmp_path)


def test_a_path_is_never_a_built_in_set(tmp_path, monkeypatch):
    for label in "ab":
        image(tmp_path / "digits" / label / "x.png")
    monkeypatch.chdir(tmp_path)
    assert open_data(Path("digits")).labels == ("a", "b")
    assert open_data("./digits").labels == ("a", "b")
    assert len(open_data("digits").labels) == 10


def test_evaluation_takes_test_then_val_then_everything(tmp_path, folder):
    assert open_data(folder).for_evaluation().name == "val"
    image(folder / "test" / "cat" / "t.png")
    data = open_data(folder)
    assert data.for_evaluation().name == "test"
    assert data.for_evaluation("validation").name == "val"
    with pytest.raises(UsageError, match="Did you mean"):
        data.for_evaluation("tests")


@pytest.mark.parametrize("packed", [False, True])
def test_idx_folders(tmp_path, packed):
    rng = np.random.default_rng(0)
    wanted = {}
    for prefix, split, count in (("train", "train", 7), ("t10k", "test", 3)):
        images, labels = rng.integers(0, 256, (count, 5, 4), np.uint8), rng.integers(0, 3, count).astype(np.uint8)
        labels[:3] = [2, 0, 1]
        wanted[split] = (images, labels)
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
            (tmp_path / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    data = open_data(tmp_path)
    assert data.labels == ("0", "1", "2")
    for split, (images, labels) in wanted.items():
        np.testing.assert_array_equal(data.splits[split].images[..., 0], images)
        np.testing.assert_array_equal(data.splits[split].labels, labels)
    path = tmp_path / ("train-images-idx3-ubyte" + ".gz" * packed)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"\0\0\7\1" + whole[4:], whole + whole[-30:], b""):
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=path.name):
            open_data(tmp_path)


def test_npz_files(tmp_path):
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
    ("arrays", "complaint"),
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
def test_impossible_npz_files_are_one_line(tmp_path, arrays, complaint):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(VitrailError, match=complaint) as caught:
        open_data(tmp_path / "x.npz")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("point", [0, 0xD800, 0x7FFFFFFF])
def test_names_in_arrays_are_texts(tmp_path, point):
    """As a character, numpy keeps any 32 bits. A bundle could not be saved with such a name, after all the training."""
    names, images = np.array(["a", "b"]), np.zeros((2, 4, 4), np.uint8)
    names.view(np.uint32)[1] = point
    for labels in ({"labels": names}, {"labels": np.arange(2), "classes": names}):
        np.savez(tmp_path / "x.npz", images=images, **labels)
        with pytest.raises(CorruptFileError, match="texts in Unicode, and not empty"):
            open_data(tmp_path / "x.npz")


def test_csv_files(tmp_path):
    for index in range(4):
        image(tmp_path / "sub" / f"{index}, x.png", index)
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
def test_files_damaged_anywhere_are_one_line_or_still_good(tmp_path, kind):
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
    whole = path.read_bytes()
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged[: rng.integers(1, len(whole))] if rng.random() < 0.3 else damaged)
        try:
            open_data(data)
        except VitrailError as error:
            refused += "\n" not in str(error)
    assert refused > 100


def test_a_file_that_promises_more_than_the_machine_holds(tmp_path):
    header = struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**15, 2**15)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(header)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, 1) + b"x")
    with pytest.raises(CorruptFileError, match="would fill"):
        open_data(tmp_path)


def peak_of(function):
    """The most memory, in bytes, that numpy and Python held at once while the function ran, and what it raised."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1], ""
    except VitrailError as error:
        return tracemalloc.get_traced_memory()[1], str(error)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["npz", "idx"])
def test_arrays_are_unpacked_once_and_only_if_they_fit(tmp_path, monkeypatch, kind):
    """A file of 30 kB that unpacks to 32 MB: all of it, without a copy, or nothing."""
    images, labels = np.zeros((2**15, 32, 32), np.uint8), (np.arange(2**15) % 3).astype(np.uint8)
    if kind == "npz":
        data = tmp_path / "x.npz"
        np.savez_compressed(data, images=images, labels=labels)
    else:
        data = tmp_path
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
            (tmp_path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    peak, refusal = peak_of(lambda: open_data(data))
    assert (peak < 1.1 * images.nbytes, refusal) == (True, "")
    monkeypatch.setattr("vitrail.core.memory.available_memory", lambda: 30 * 2**20)
    peak, refusal = peak_of(lambda: open_data(data))
    assert peak < 2**20
    assert "would fill" in refusal
    assert "31,457,280 are available" in refusal


def lying(path, header_shape, told, stored=100):
    """An npz whose array promises `header_shape` bytes and whose archive tells of `told`, where `stored` are."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {header_shape}, }}".ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(stored)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", content)
    size = struct.pack("<I", len(content))
    path.write_bytes(path.read_bytes().replace(size, struct.pack("<I", 128 + told)))


@pytest.mark.parametrize(
    ("shape", "told", "complaint"),
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
def test_archives_that_lie_about_their_sizes_are_refused(tmp_path, shape, told, complaint):
    lying(tmp_path / "x.npz", shape, told)
    peak, refusal = peak_of(lambda: open_data(tmp_path / "x.npz"))
    assert complaint in refusal
    assert "\n" not in refusal
    assert peak < 20 * 2**20


def test_pipes_are_no_data(tmp_path):
    """Reading one would wait for ever."""
    for name in ("x.npz", "x.csv", "idx/train-images-idx3-ubyte"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(VitrailError, match="regular file"):
            open_data(tmp_path / "idx" if "idx" in name else tmp_path / name)


@pytest.mark.parametrize(
    ("text", "complaint"),
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
def test_impossible_csv_files_are_one_line(tmp_path, text, complaint):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(VitrailError, match=complaint) as caught:
        open_data(tmp_path / "x.csv")
    assert "\n" not in str(caught.value)


def test_what_is_no_data_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "flat").mkdir()
    image(tmp_path / "flat" / "x.png")
    (tmp_path / "hollow" / "cat").mkdir(parents=True)
    (tmp_path / "file.txt").write_text("x")
    for name in ("missing", "empty", "flat", "hollow", "file.txt", "\0", "x" * 5000):
        with pytest.raises(UsageError):
            open_data(tmp_path / name)
    with pytest.raises(UsageError, match="Did you mean 'fashion-mnist'"):
        open_data("fashion-mnst")
    for split in ("train", "val", "validation"):
        image(tmp_path / "both" / split / "cat" / "x.png")
    with pytest.raises(UsageError, match="must have one val folder"):
        open_data(tmp_path / "both")


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    data = open_data("digits")
    training, test = data.splits["train"], data.splits["test"]
    assert (training.images.shape, test.images.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    assert np.bincount(test.labels).tolist() == [36] * 10

    def rows(images, labels):
        return sorted(map(tuple, np.column_stack([images.reshape(len(labels), -1), labels]).tolist()))

    theirs = load_digits()
    both = rows(np.concatenate([training.images, test.images]), np.concatenate([training.labels, test.labels]))
    assert both == rows(np.round(theirs.images * 255 / 16).astype(np.uint8), theirs.target)


def test_fashion_mnist_where_it_is_and_where_it_is_not(tmp_path, monkeypatch):
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


def test_forty_clothes_are_four_test_images_of_each_class():
    data = open_data("fashion-40")
    assert (data.labels, data.licence, list(data.splits)) == (tuple(sorted(_FASHION_CLASSES)), "mit", ["test"])
    assert data.splits["test"].images.shape == (40, 28, 28, 1)
    assert np.bincount(data.splits["test"].labels).tolist() == [4] * 10
    if not _FASHION_PACKAGE.is_dir():
        pytest.skip("dataset-fashion-mnist is not installed")
    whole = open_data("fashion-mnist").splits["test"]
    label_of = {pixels.tobytes(): label for pixels, label in zip(whole.images, whole.labels, strict=True)}
    for pixels, label in zip(data.splits["test"].images, data.splits["test"].labels, strict=True):
        assert label_of[pixels.tobytes()] == label


def test_the_fingerprint_follows_names_sizes_labels_and_pixels(folder):
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
def test_held_out_is_the_share_of_each_class_and_never_all_of_it(counts, share, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    held_out = sample_held_out(labels, share, seed)
    for label, count in enumerate(counts):
        found = int(held_out[labels == label].sum())
        assert found == (0 if count == 1 else min(max(round(share * count), 1), count - 1))
    assert np.array_equal(held_out, sample_held_out(labels, share, seed))
    assert not sample_held_out(labels, 0.0, seed).any()


def test_another_seed_holds_out_others():
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
def test_csv_files_of_spreadsheets_are_read_in_their_encoding(tmp_path, encoding, mark, name):
    text = "file,label\r\n사진/고양이1.png,고양이\r\n사진/2.png,강아지\r\n"
    (tmp_path / "목록.csv").write_bytes(mark + text.encode(encoding))
    data = open_data(tmp_path / "목록.csv")
    assert data.labels == ("강아지", "고양이")
    assert [os.path.relpath(path, tmp_path) for path in data.first_split.images] == ["사진/고양이1.png", "사진/2.png"]
    assert data.notes == (() if name is None else (f"목록.csv is read as text in {name}",))


@pytest.mark.parametrize(
    "content", ["a.png,猫\n".encode("shift-jis"), "a.png,café\n".encode("latin-1"), b"a.png,x\n\xff,y\n"]
)
def test_csv_in_another_encoding_says_what_to_do(tmp_path, content):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r'must be text in UTF-8, UTF-16 or CP949, .* Save it as "CSV UTF-8"\.$'):
        open_data(tmp_path / "x.csv")


def test_missing_data_says_so_first_and_suggests_a_neighbour(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(UsageError) as refused:
        open_data(tmp_path / "photso")
    assert str(refused.value) == (
        "Data must be a file or folder that exists, or a built-in data set (digits, fashion-40, fashion-mnist), got"
        f" {str(tmp_path / 'photso')!r}. Did you mean {str(tmp_path / 'photos')!r}?"
    )


def test_a_folder_that_wraps_one_data_set_is_descended_into(folder, tmp_path_factory):
    outer = tmp_path_factory.mktemp("outer")
    (outer / "photos").mkdir()
    folder.rename(outer / "photos" / "photos")
    for beside in (outer, outer / "photos"):
        (beside / "__MACOSX" / "photos").mkdir(parents=True)
        (beside / "__MACOSX" / "photos" / "._0.png").touch()
        (beside / ".DS_Store").touch()
        (beside / "readme.txt").touch()
    data, inner = open_data(outer / "photos"), open_data(outer / "photos" / "photos")
    assert (data.labels, list(data.splits)) == (("cat", "dog", "emu"), ["train", "val"])
    assert data.notes == (
        f"{str(outer / 'photos')!r} holds one folder, which is the data set: {str(outer / 'photos' / 'photos')!r}",
    )
    assert inner.notes == ()
    assert open_data(outer).fingerprint() == data.fingerprint() == inner.fingerprint()


def test_a_single_class_or_a_folder_beside_images_is_not_descended_into(tmp_path):
    for path in ("one/cat/0.png", "one/cat/1.png", "deep/cat/more/0.png", "loose/0.png", "loose/a/b/0.png"):
        image(tmp_path / path)
    image(tmp_path / "loose/a/c/0.png")
    assert open_data(tmp_path / "one").labels == ("cat",)
    assert open_data(tmp_path / "deep").labels == ("cat",)
    assert open_data(tmp_path / "loose").labels == ("a",)
