"""The loader yields each sample once, with the same order and pixels for any number of workers and ranks; the cache."""

import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.data.augment.config import Augment
from vitrail.data.augment.pipeline import mix
from vitrail.data.cache import _ENTRY, ImageCache, _entry_checksum
from vitrail.data.dataset import Split
from vitrail.data.loader import Loader, rank_share
from vitrail.data.preprocess import Preprocess

PREPROCESS = Preprocess(resolution=(24, 24))
SETTINGS = Augment(crop="resized", flip="random", randaugment=1, erasing=0.3, mixup=0.4, cutmix=0.6)


def make_split(count, size=24, channels=3, classes=5):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, size, size, channels), dtype=np.uint8)
    return Split("train", pixels, np.arange(count) % classes)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A split of 37 image files of various sizes, formats and modes."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    paths = []
    for index in range(37):
        height, width = rng.integers(30, 90, 2)
        pixels = rng.integers(0, 256, (height // 6, width // 6, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((int(width), int(height)), Image.Resampling.BICUBIC)
        paths.append(str(folder / f"{index:02d}.{'png' if index % 5 == 0 else 'jpg'}"))
        image.convert("L" if index % 7 == 0 else "RGB").save(paths[-1])
    return Split("train", paths, np.arange(37) % 3)


def load_batches(loader, epoch=0, start=0):
    """Return the inputs of each training step: indices, pixels, labels, weights, share of mixing and global size."""
    batches = []
    for batch in loader.epoch(epoch, start=start):
        images = loader.preprocess.scale(batch.pixels)
        if batch.mixture is not None:
            images = mix(images, batch.mixture)
        share = None if batch.mixture is None else batch.mixture.share
        batches.append(
            (batch.indices, images.numpy(), batch.labels.numpy(), batch.weights.numpy(), share, batch.global_size)
        )
    return batches


def assert_same_batches(batches, expected_batches):
    assert len(batches) == len(expected_batches)
    for batch, expected_batch in zip(batches, expected_batches, strict=True):
        for values, expected in zip(batch, expected_batch, strict=True):
            np.testing.assert_array_equal(values, expected)


@given(
    count=st.integers(1, 200),
    batch=st.integers(1, 64),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_every_sample_exactly_once_for_any_batch_and_ranks(count, batch, ranks, seed, shuffle):
    split = make_split(count, size=1, channels=1)
    preprocess = Preprocess(resolution=1, crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    per_rank = [
        list(
            Loader(split, preprocess, batch=batch, seed=seed, rank=r, ranks=ranks, workers=0, shuffle=shuffle).epoch(2)
        )
        for r in range(ranks)
    ]
    global_batches = list(Loader(split, preprocess, batch=batch, seed=seed, workers=0, shuffle=shuffle).epoch(2))
    for step, batch_of_all in enumerate(global_batches):
        joined = np.concatenate([batches[step].indices for batches in per_rank])
        np.testing.assert_array_equal(joined, batch_of_all.indices)
        assert {batches[step].global_size for batches in per_rank} == {len(batch_of_all.indices)}
    np.testing.assert_array_equal(np.sort(np.concatenate([part.indices for part in global_batches])), np.arange(count))
    assert len(global_batches) == -(-count // batch)


@given(count=st.integers(0, 300), ranks=st.integers(1, 9))
def test_ranks_take_complete_pairs_evenly(count, ranks):
    sizes = [len(range(count)[rank_share(count, rank, ranks)]) for rank in range(ranks)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes)  # rank 0, whose running statistics are saved, has the largest part
    shares = [rank_share(count, rank, ranks, unit=2) for rank in range(ranks)]
    assert shares[0].start == 0
    assert shares[-1].stop == count
    assert all(left.stop == right.start for left, right in itertools.pairwise(shares))
    assert all(share.start % 2 == 0 or share.start == count for share in shares)
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 3


@pytest.mark.parametrize("kind", ["files", "small", "large"])
def test_any_number_of_workers_gives_same_batches(kind, files):
    split = {"files": files, "small": make_split(50), "large": make_split(20, size=80)}[kind]
    preprocess = PREPROCESS if kind != "large" else Preprocess(resolution=(72, 72))
    batches_by_workers = [
        load_batches(Loader(split, preprocess, batch=8, seed=5, settings=SETTINGS, workers=w), epoch=3)
        for w in (0, 1, 2, 5)
    ]
    for batches in batches_by_workers[1:]:
        assert_same_batches(batches, batches_by_workers[0])
    other_seed = load_batches(Loader(split, preprocess, batch=8, seed=6, settings=SETTINGS), epoch=3)
    assert not np.array_equal(other_seed[0][0], batches_by_workers[0][0][0])


@pytest.mark.parametrize("kind", ["files", "small"])
@pytest.mark.parametrize("batch", [6, 7, 16])
def test_two_ranks_get_pixels_of_one_rank_at_every_step(kind, batch, files):
    split = files if kind == "files" else make_split(41)
    single_rank = load_batches(Loader(split, PREPROCESS, batch=batch, settings=SETTINGS), epoch=1)
    two_ranks = [
        load_batches(Loader(split, PREPROCESS, batch=batch, settings=SETTINGS, rank=r, ranks=2), epoch=1)
        for r in (0, 1)
    ]
    for global_batch, *parts in zip(single_rank, *two_ranks, strict=True):
        for column in range(4):
            np.testing.assert_array_equal(global_batch[column], np.concatenate([part[column] for part in parts]))


def test_restart_within_epoch_continues_with_next_sample(files):
    loader = Loader(files, PREPROCESS, batch=5, settings=SETTINGS, seed=9)
    all_batches = load_batches(loader, epoch=4)
    for start in (0, 1, 3, loader.steps - 1, loader.steps):
        remaining = load_batches(Loader(files, PREPROCESS, batch=5, settings=SETTINGS, seed=9), epoch=4, start=start)
        assert_same_batches(remaining, all_batches[start:])
        sample_indices = [index for indices, *_ in remaining for index in indices.tolist()]
        assert sample_indices == loader.order(4)[5 * start :].tolist()


def test_epochs_differ_in_order_and_pixels():
    loader = Loader(make_split(64), PREPROCESS, batch=64, settings=Augment(crop="resized"))
    first, second = (load_batches(loader, epoch)[0] for epoch in (0, 1))
    assert not np.array_equal(first[0], second[0])
    first_pixels, second_pixels = (pixels[np.argsort(indices)] for indices, pixels, *_ in (first, second))
    assert not np.array_equal(first_pixels, second_pixels)


def test_without_shuffle_batches_are_in_order_and_equal_preprocess(files):
    batches = load_batches(Loader(files, PREPROCESS, batch=10, shuffle=False))
    np.testing.assert_array_equal(np.concatenate([part[0] for part in batches]), np.arange(37))
    np.testing.assert_array_equal(np.concatenate([part[1] for part in batches]), PREPROCESS(files.images).numpy())


def damage_files(files, tmp_path):
    """Return the split with three unreadable files: an empty file, a text, and a missing file."""
    paths = list(files.images)
    for index, content in ((3, b""), (11, b"not a picture"), (12, None)):
        paths[index] = str(tmp_path / f"broken-{index}.jpg")
        if content is not None:
            (tmp_path / f"broken-{index}.jpg").write_bytes(content)
    return Split("train", paths, files.labels)


def test_corrupt_images_raise_or_are_skipped_or_substituted(files, tmp_path):
    split = damage_files(files, tmp_path)
    with pytest.raises(CorruptFileError, match=r"broken-[^`]*$"):
        load_batches(Loader(split, PREPROCESS, batch=8))

    loader = Loader(split, PREPROCESS, batch=8, on_damage="skip", settings=SETTINGS)
    skipped = load_batches(loader)
    indices, weights = (np.concatenate([part[column] for part in skipped]) for column in (0, 3))
    assert sorted(indices[weights == 0].tolist()) == [3, 11, 12]
    assert sorted(indices.tolist()) == list(range(37))
    assert sorted(loader.damaged) == sorted(split.images[index] for index in (3, 11, 12))
    assert "broken-11.jpg" in loader.damaged[split.images[11]]

    loader = Loader(split, PREPROCESS, batch=37, shuffle=False, on_damage="substitute")
    (substituted,) = load_batches(loader)
    assert substituted[3].all()
    for index, substitute in ((3, 4), (11, 13), (12, 13)):
        np.testing.assert_array_equal(substituted[1][index], substituted[1][substitute])
        assert substituted[2][index] == split.labels[substitute]
    assert len(loader.damaged) == 3

    unreadable = Split("train", [split.images[3]] * 4, np.zeros(4, int))
    with pytest.raises(CorruptFileError, match="No image"):
        load_batches(Loader(unreadable, PREPROCESS, batch=2, on_damage="substitute"))


def test_closing_an_epoch_early_ends_all_threads(files):
    batches = Loader(files, PREPROCESS, batch=4, workers=3).epoch(0)
    next(batches)
    batches.close()
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("vitrail-loader")]
    for thread in workers:
        thread.join(5)
    assert not any(thread.is_alive() for thread in workers)


def test_grey_images_become_3_channels_for_colour_model():
    (batch,) = Loader(make_split(6, channels=1), PREPROCESS, batch=6, shuffle=False).epoch(0)
    assert batch.pixels.shape == (6, 24, 24, 3)


def test_loader_rejects_invalid_arguments():
    with pytest.raises(UsageError, match="must have images"):
        Loader(Split("val", [], np.zeros(0, int)), PREPROCESS, batch=1)
    five_bands = Preprocess(mean=(0.5,) * 5, std=(0.5,) * 5)
    for settings in (Augment(randaugment=1), Augment(contrast=0.1), Augment(saturation=0.1), Augment(hue=0.1)):
        with pytest.raises(UsageError, match="1 or 3 channels"):
            Loader(make_split(4, channels=5), five_bands, batch=2, settings=settings)
    with pytest.raises(UsageError, match="1 or 3 channels"):
        Loader(Split("train", ["x.png"], np.zeros(1, int)), five_bands, batch=2)
    for arguments in ({"rank": 2, "ranks": 2}, {"rank": -1}, {"ranks": 0}, {"on_damage": "ignore"}, {"seed": -1}):
        with pytest.raises(UsageError):
            Loader(make_split(4), PREPROCESS, batch=2, **arguments)
    with pytest.raises(UsageError, match="Start"):
        next(Loader(make_split(4), PREPROCESS, batch=2).epoch(0, start=3))


def test_epoch_without_readable_image_raises(tmp_path):
    split = Split("train", [str(tmp_path / f"{index}.png") for index in range(4)], np.zeros(4, int))
    with pytest.raises(CorruptFileError, match="No image of train"):
        load_batches(Loader(split, PREPROCESS, batch=2, on_damage="skip"))


def test_threads_restore_warning_filters(files):
    before = list(warnings.filters)
    for _ in range(3):
        load_batches(Loader(files, PREPROCESS, batch=4, workers=4))
    assert warnings.filters == before


def test_rank_without_samples_gets_empty_batch():
    loader = Loader(make_split(4), PREPROCESS, batch=4, settings=SETTINGS, rank=2, ranks=3)
    ((indices, images, *_),) = load_batches(loader)
    assert (len(indices), images.shape) == (0, (0, 3, 24, 24))


def test_cache_gives_same_pixels_without_decoding_again(files, tmp_path, monkeypatch):
    plain = [load_batches(Loader(files, PREPROCESS, batch=8, settings=SETTINGS), epoch=e) for e in (0, 1)]
    with ImageCache(tmp_path, 10**8) as cache, ImageCache(tmp_path, 10**8) as another:
        loader = Loader(files, PREPROCESS, batch=8, settings=SETTINGS, cache=cache)
        assert_same_batches(load_batches(loader, epoch=0), plain[0])
        assert (cache.hits, cache.misses) == (0, 37)

        def fail(*_):
            raise AssertionError("decoded again")

        with monkeypatch.context() as patch:
            patch.setattr("vitrail.data.preprocess.open_image", fail)
            assert_same_batches(load_batches(loader, epoch=1), plain[1])
            assert_same_batches(
                load_batches(Loader(files, PREPROCESS, batch=8, settings=SETTINGS, cache=another), epoch=1), plain[1]
            )
        load_batches(Loader(files, PREPROCESS.replace(background=(1, 2, 3)), batch=8, cache=cache))
        assert cache.misses == 74


def test_cache_detects_changed_files_and_corrupt_entries(tmp_path):
    path, folder = tmp_path / "x.png", tmp_path / "cache"

    def read():
        """Return the colour of the corner as a new process reads it, and whether it came from the cache."""
        with ImageCache(folder, 10**6) as cache:
            return np.asarray(cache.read(str(path), PREPROCESS))[0, 0].tolist(), bool(cache.hits)

    Image.new("RGB", (9, 9), "red").save(path)
    assert [read(), read()] == [([255, 0, 0], False), ([255, 0, 0], True)]
    Image.new("RGB", (9, 9), "blue").save(path)
    assert [read(), read()] == [([0, 0, 255], False), ([0, 0, 255], True)]
    content = bytearray((folder / "pixels").read_bytes())
    content[300] ^= 1
    (folder / "pixels").write_bytes(content)
    assert [read(), read()] == [([0, 0, 255], False), ([0, 0, 255], True)]
    (folder / "pixels").write_bytes(content[:400])
    assert [read(), read()] == [([0, 0, 255], False), ([0, 0, 255], True)]
    # A crash left a partial entry: later entries are still found.
    (folder / "index").write_bytes((folder / "index").read_bytes() + b"half an entry")
    Image.new("RGB", (9, 9), "lime").save(path)
    assert [read(), read()] == [([0, 255, 0], False), ([0, 255, 0], True)]


def test_cache_follows_file_that_changes_while_open(tmp_path):
    path = tmp_path / "x.png"
    with ImageCache(tmp_path / "cache", 10**6) as cache:
        for colour, level in (("red", [255, 0, 0]), ("blue", [0, 0, 255]), ("red", [255, 0, 0])):
            Image.new("RGB", (9, 9), colour).save(path)
            os.utime(path, ns=(0, cache.hits + cache.misses))
            assert np.asarray(cache.read(str(path), PREPROCESS))[0, 0].tolist() == level
        assert (cache.hits, cache.misses) == (1, 2)
        size = (tmp_path / "cache" / "pixels").stat().st_size
        assert size == 2 * 9 * 9 * 3


def test_corrupt_entry_is_stored_again_only_once(tmp_path):
    path = tmp_path / "x.png"
    Image.new("RGB", (9, 9), "red").save(path)
    with ImageCache(tmp_path / "cache", 10**6) as cache:
        cache.read(str(path), PREPROCESS)
    content = bytearray((tmp_path / "cache" / "pixels").read_bytes())
    content[7] ^= 1
    (tmp_path / "cache" / "pixels").write_bytes(content)
    with ImageCache(tmp_path / "cache", 10**6) as cache:
        for _ in range(5):
            cache.read(str(path), PREPROCESS)
        assert (cache.hits, cache.misses) == (4, 1)


@pytest.fixture
def cached(tmp_path):
    """A cache of eight images, and a function that reads all of them and returns the number of hits."""
    rng = np.random.default_rng(0)
    paths = [str(tmp_path / f"{number}.png") for number in range(8)]
    for number, path in enumerate(paths):
        Image.fromarray(rng.integers(0, 256, (4 + number, 30 - number, 3), np.uint8)).save(path)
    expected = [np.asarray(PREPROCESS.read(path)) for path in paths]

    def read_all():
        with ImageCache(tmp_path / "cache", 10**6) as cache:
            for path, pixels in zip(paths, expected, strict=True):
                np.testing.assert_array_equal(np.asarray(cache.read(path, PREPROCESS)), pixels)
            return cache.hits

    assert [read_all(), read_all()] == [0, 8]
    return tmp_path / "cache", read_all


@pytest.mark.parametrize(
    "change",
    [
        {"height": 30, "width": 4},  # another shape with as many bytes
        {"height": 1},
        {"height": 0, "checksum": 0},  # the checksum of no pixels
        {"width": 0, "checksum": 0},
        {"channels": 0, "checksum": 0},
        {"channels": 1, "width": 90},
        {"height": 2**32 - 1, "width": 2**32 - 1, "channels": 2**32 - 1},
        {"height": 2**20, "width": 2**20},
        {"offset": 2**64 - 1},
        {"offset": 2**63},
        {"offset": 1},
    ],
    ids=str,
)
def test_cache_decodes_image_of_impossible_entry_again(cached, change):
    folder, read_all = cached
    content = (folder / "index").read_bytes()
    names = ("key", "offset", "height", "width", "channels", "checksum")
    first = dict(zip(names, _ENTRY.unpack(content[: _ENTRY.size]), strict=True))
    assert (first["height"], first["width"], first["channels"]) == (4, 30, 3)
    (folder / "index").write_bytes(_ENTRY.pack(*(first | change).values()) + content[_ENTRY.size :])
    assert [read_all(), read_all()] == [7, 8]


@pytest.mark.parametrize(("width", "channels"), [(90, 1), (45, 2), (18, 5)])
def test_cache_decodes_image_of_entry_with_other_channels_again(cached, width, channels):
    folder, read_all = cached
    content, pixels = (folder / "index").read_bytes(), (folder / "pixels").read_bytes()
    key, offset, height, *_ = _ENTRY.unpack(content[: _ENTRY.size])
    shape = (height, width, channels)
    checksum = _entry_checksum(key, offset, shape, pixels[offset : offset + height * width * channels])
    (folder / "index").write_bytes(_ENTRY.pack(key, offset, *shape, checksum) + content[_ENTRY.size :])
    assert [read_all(), read_all()] == [7, 8]


def test_cache_entry_of_a_huge_image_allocates_no_memory(cached):
    folder, read_all = cached
    os.truncate(folder / "pixels", 2**36)  # a sparse file
    content = (folder / "index").read_bytes()
    key = content[:16]
    (folder / "index").write_bytes(_ENTRY.pack(key, 0, 2**16, 2**16, 3, 0) + content[_ENTRY.size :])
    tracemalloc.start()
    assert read_all() == 7
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_cache_with_mutated_index_gives_same_pixels(cached):
    folder, read_all = cached
    index, pixels = (folder / "index").read_bytes(), (folder / "pixels").read_bytes()
    hits = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        mutated = bytearray(index)
        position = int(rng.integers(len(index)))
        match seed % 4:
            case 0:
                mutated[position] ^= 1 << int(rng.integers(8))
            case 1:
                mutated = mutated[:position]
            case 2:
                mutated[position:position] = rng.bytes(int(rng.integers(1, 60)))
            case 3:
                mutated = rng.bytes(position)
        (folder / "index").write_bytes(mutated)
        (folder / "pixels").write_bytes(pixels)
        hits.append(read_all())
        assert read_all() == 8, seed
    assert (min(hits), max(hits)) == (0, 7)


def test_processes_that_share_a_cache_store_each_image_once(files, tmp_path):
    script = (
        "import sys\nfrom vitrail.data.cache import ImageCache\nfrom vitrail.data.preprocess import Preprocess\n"
        "with ImageCache(sys.argv[1], 10**8) as cache:\n"
        "    for path in sys.argv[2:]:\n        cache.read(path, Preprocess(resolution=(24, 24)))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), *files.images]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    with ImageCache(tmp_path, 10**8) as cache:
        size = 0
        for path in files.images:
            pixels = np.asarray(cache.read(path, PREPROCESS))
            np.testing.assert_array_equal(pixels, np.atleast_3d(np.asarray(PREPROCESS.read(path))))
            size += pixels.nbytes
        assert cache.misses == 0
    assert (tmp_path / "pixels").stat().st_size == size


def test_full_disk_leaves_images_uncached(files, tmp_path):
    """A limit on the size of files simulates a full disk."""
    expected = load_batches(Loader(files, PREPROCESS, batch=8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with ImageCache(tmp_path, 10**8) as cache:
            loader = Loader(files, PREPROCESS, batch=8, cache=cache)
            assert_same_batches(load_batches(loader), expected)
            assert_same_batches(load_batches(loader), expected)
            assert 0 < cache.hits < 37
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_cache_stays_within_its_limit(files, tmp_path):
    with ImageCache(tmp_path, 40_000) as cache:
        loader = Loader(files, PREPROCESS, batch=8, cache=cache)
        first = load_batches(loader)
        assert 20_000 < (tmp_path / "pixels").stat().st_size <= 40_000
        assert_same_batches(load_batches(loader), first)
        assert 0 < cache.hits < 37


def test_cache_rejects_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="Cache must be a folder"):
        ImageCache(tmp_path / "file", 1)
