"""The loader: each sample once, the same order and pixels for any workers and ranks, and damage by policy."""

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

EYE = Preprocess(resolution=(24, 24))
SETTINGS = Augment(crop="resized", flip="random", randaugment=1, erasing=0.3, mixup=0.4, cutmix=0.6)


def in_memory(count, size=24, channels=3, classes=5):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, size, size, channels), dtype=np.uint8)
    return Split("train", pixels, np.arange(count) % classes)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """37 photos of various sizes and kinds."""
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


def run(loader, epoch=0, start=0):
    """Everything that a training step would see, as numbers."""
    seen = []
    for batch in loader.epoch(epoch, start=start):
        images = loader.preprocess.scale(batch.pixels)
        if batch.mixture is not None:
            images = mix(images, batch.mixture)
        share = None if batch.mixture is None else batch.mixture.share
        seen.append(
            (batch.indices, images.numpy(), batch.labels.numpy(), batch.weights.numpy(), share, batch.global_size)
        )
    return seen


def same(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)


@given(
    count=st.integers(1, 200),
    batch=st.integers(1, 64),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_every_sample_exactly_once_for_any_batch_and_ranks(count, batch, ranks, seed, shuffle):
    split = in_memory(count, size=1, channels=1)
    eye = Preprocess(resolution=1, crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    per_rank = [
        list(Loader(split, eye, batch=batch, seed=seed, rank=r, ranks=ranks, workers=0, shuffle=shuffle).epoch(2))
        for r in range(ranks)
    ]
    alone = list(Loader(split, eye, batch=batch, seed=seed, workers=0, shuffle=shuffle).epoch(2))
    for step, whole in enumerate(alone):
        together = np.concatenate([batches[step].indices for batches in per_rank])
        np.testing.assert_array_equal(together, whole.indices)
        assert {batches[step].global_size for batches in per_rank} == {len(whole.indices)}
    np.testing.assert_array_equal(np.sort(np.concatenate([part.indices for part in alone])), np.arange(count))
    assert len(alone) == -(-count // batch)


@given(count=st.integers(0, 300), ranks=st.integers(1, 9))
def test_ranks_take_whole_pairs_evenly(count, ranks):
    sizes = [len(range(count)[rank_share(count, rank, ranks)]) for rank in range(ranks)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes)  # whose running statistics are kept
    shares = [rank_share(count, rank, ranks, unit=2) for rank in range(ranks)]
    assert shares[0].start == 0
    assert shares[-1].stop == count
    assert all(left.stop == right.start for left, right in itertools.pairwise(shares))
    assert all(share.start % 2 == 0 or share.start == count for share in shares)
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 3


@pytest.mark.parametrize("kind", ["files", "small", "large"])
def test_the_number_of_workers_changes_no_bit(kind, files):
    split = {"files": files, "small": in_memory(50), "large": in_memory(20, size=80)}[kind]
    eye = EYE if kind != "large" else Preprocess(resolution=(72, 72))
    runs = [run(Loader(split, eye, batch=8, seed=5, settings=SETTINGS, workers=w), epoch=3) for w in (0, 1, 2, 5)]
    for other in runs[1:]:
        same(runs[0], other)
    again = run(Loader(split, eye, batch=8, seed=6, settings=SETTINGS), epoch=3)
    assert not np.array_equal(again[0][0], runs[0][0][0])


@pytest.mark.parametrize("kind", ["files", "small"])
@pytest.mark.parametrize("batch", [6, 7, 16])
def test_one_rank_and_two_see_the_same_pixels_at_the_same_step(kind, batch, files):
    split = files if kind == "files" else in_memory(41)
    one = run(Loader(split, EYE, batch=batch, settings=SETTINGS), epoch=1)
    two = [run(Loader(split, EYE, batch=batch, settings=SETTINGS, rank=r, ranks=2), epoch=1) for r in (0, 1)]
    for whole, *parts in zip(one, *two, strict=True):
        for column in range(4):
            np.testing.assert_array_equal(whole[column], np.concatenate([part[column] for part in parts]))


def test_a_restart_in_mid_epoch_goes_on_with_the_very_next_sample(files):
    loader = Loader(files, EYE, batch=5, settings=SETTINGS, seed=9)
    whole = run(loader, epoch=4)
    for start in (0, 1, 3, loader.steps - 1, loader.steps):
        rest = run(Loader(files, EYE, batch=5, settings=SETTINGS, seed=9), epoch=4, start=start)
        same(rest, whole[start:])
        seen = [index for indices, *_ in rest for index in indices.tolist()]
        assert seen == loader.order(4)[5 * start :].tolist()


def test_epochs_have_other_orders_and_other_pixels():
    loader = Loader(in_memory(64), EYE, batch=64, settings=Augment(crop="resized"))
    one, two = (run(loader, epoch)[0] for epoch in (0, 1))
    assert not np.array_equal(one[0], two[0])
    back = [np.argsort(part[0]) for part in (one, two)]
    assert not np.array_equal(one[1][back[0]], two[1][back[1]])


def test_evaluation_is_in_order_and_as_predict_sees_it(files):
    batches = run(Loader(files, EYE, batch=10, shuffle=False))
    np.testing.assert_array_equal(np.concatenate([part[0] for part in batches]), np.arange(37))
    np.testing.assert_array_equal(np.concatenate([part[1] for part in batches]), EYE(files.images).numpy())


def damage(files, tmp_path):
    """Three of the photos broken in three ways."""
    paths = list(files.images)
    for index, content in ((3, b""), (11, b"not a picture"), (12, None)):
        paths[index] = str(tmp_path / f"broken-{index}.jpg")
        if content is not None:
            (tmp_path / f"broken-{index}.jpg").write_bytes(content)
    return Split("train", paths, files.labels)


def test_damaged_images_by_policy(files, tmp_path):
    split = damage(files, tmp_path)
    with pytest.raises(CorruptFileError, match=r"broken-[^`]*$"):
        run(Loader(split, EYE, batch=8))

    loader = Loader(split, EYE, batch=8, on_damage="skip", settings=SETTINGS)
    skipped = run(loader)
    indices, weights = (np.concatenate([part[column] for part in skipped]) for column in (0, 3))
    assert sorted(indices[weights == 0].tolist()) == [3, 11, 12]
    assert sorted(indices.tolist()) == list(range(37))
    assert sorted(loader.damaged) == sorted(split.images[index] for index in (3, 11, 12))
    assert "broken-11.jpg" in loader.damaged[split.images[11]]

    loader = Loader(split, EYE, batch=37, shuffle=False, on_damage="substitute")
    (substituted,) = run(loader)
    assert substituted[3].all()
    for index, substitute in ((3, 4), (11, 13), (12, 13)):
        np.testing.assert_array_equal(substituted[1][index], substituted[1][substitute])
        assert substituted[2][index] == split.labels[substitute]
    assert len(loader.damaged) == 3

    nothing = Split("train", [split.images[3]] * 4, np.zeros(4, int))
    with pytest.raises(CorruptFileError, match="No image"):
        run(Loader(nothing, EYE, batch=2, on_damage="substitute"))


def test_leaving_early_leaves_no_thread_behind(files):
    batches = Loader(files, EYE, batch=4, workers=3).epoch(0)
    next(batches)
    batches.close()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("vitrail-loader")]
    for thread in left:
        thread.join(5)
    assert not any(thread.is_alive() for thread in left)


def test_grey_images_for_a_model_of_colours():
    (batch,) = Loader(in_memory(6, channels=1), EYE, batch=6, shuffle=False).epoch(0)
    assert batch.pixels.shape == (6, 24, 24, 3)


def test_impossible_loaders_are_refused():
    with pytest.raises(UsageError, match="must have images"):
        Loader(Split("val", [], np.zeros(0, int)), EYE, batch=1)
    five = Preprocess(mean=(0.5,) * 5, std=(0.5,) * 5)
    for settings in (Augment(randaugment=1), Augment(contrast=0.1), Augment(saturation=0.1), Augment(hue=0.1)):
        with pytest.raises(UsageError, match="1 or 3 channels"):
            Loader(in_memory(4, channels=5), five, batch=2, settings=settings)
    with pytest.raises(UsageError, match="1 or 3 channels"):
        Loader(Split("train", ["x.png"], np.zeros(1, int)), five, batch=2)
    for wrong in ({"rank": 2, "ranks": 2}, {"rank": -1}, {"ranks": 0}, {"on_damage": "ignore"}, {"seed": -1}):
        with pytest.raises(UsageError):
            Loader(in_memory(4), EYE, batch=2, **wrong)
    with pytest.raises(UsageError, match="Start"):
        next(Loader(in_memory(4), EYE, batch=2).epoch(0, start=3))


def test_an_epoch_without_one_readable_image_is_an_error(tmp_path):
    split = Split("train", [str(tmp_path / f"{index}.png") for index in range(4)], np.zeros(4, int))
    with pytest.raises(CorruptFileError, match="No image of train"):
        run(Loader(split, EYE, batch=2, on_damage="skip"))


def test_threads_leave_warnings_as_they_were(files):
    before = list(warnings.filters)
    for _ in range(3):
        run(Loader(files, EYE, batch=4, workers=4))
    assert warnings.filters == before


def test_a_rank_without_samples_has_an_empty_batch():
    loader = Loader(in_memory(4), EYE, batch=4, settings=SETTINGS, rank=2, ranks=3)
    ((indices, images, *_),) = run(loader)
    assert (len(indices), images.shape) == (0, (0, 3, 24, 24))


def test_the_cache_gives_the_same_pixels_and_does_not_decode_again(files, tmp_path, monkeypatch):
    plain = [run(Loader(files, EYE, batch=8, settings=SETTINGS), epoch=e) for e in (0, 1)]
    with ImageCache(tmp_path, 10**8) as cache, ImageCache(tmp_path, 10**8) as another:
        loader = Loader(files, EYE, batch=8, settings=SETTINGS, cache=cache)
        same(run(loader, epoch=0), plain[0])
        assert (cache.hits, cache.misses) == (0, 37)

        def refuse(*_):
            raise AssertionError("decoded again")

        with monkeypatch.context() as patch:
            patch.setattr("vitrail.data.preprocess.open_image", refuse)
            same(run(loader, epoch=1), plain[1])
            same(run(Loader(files, EYE, batch=8, settings=SETTINGS, cache=another), epoch=1), plain[1])
        run(Loader(files, EYE.replace(background=(1, 2, 3)), batch=8, cache=cache))
        assert cache.misses == 74


def test_the_cache_notices_changed_files_and_damage(tmp_path):
    path, folder = tmp_path / "x.png", tmp_path / "cache"

    def read():
        """Colour of the corner as a new process reads it, and whether it came from the cache."""
        with ImageCache(folder, 10**6) as cache:
            return np.asarray(cache.read(str(path), EYE))[0, 0].tolist(), bool(cache.hits)

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
    # A crash in the middle of an entry: what comes after is still found.
    (folder / "index").write_bytes((folder / "index").read_bytes() + b"half an entry")
    Image.new("RGB", (9, 9), "lime").save(path)
    assert [read(), read()] == [([0, 255, 0], False), ([0, 255, 0], True)]


def test_the_cache_follows_a_file_that_changes_under_it(tmp_path):
    path = tmp_path / "x.png"
    with ImageCache(tmp_path / "cache", 10**6) as cache:
        for colour, level in (("red", [255, 0, 0]), ("blue", [0, 0, 255]), ("red", [255, 0, 0])):
            Image.new("RGB", (9, 9), colour).save(path)
            os.utime(path, ns=(0, cache.hits + cache.misses))
            assert np.asarray(cache.read(str(path), EYE))[0, 0].tolist() == level
        assert (cache.hits, cache.misses) == (1, 2)
        size = (tmp_path / "cache" / "pixels").stat().st_size
        assert size == 2 * 9 * 9 * 3


def test_damaged_entries_are_stored_once_more_and_not_again_and_again(tmp_path):
    path = tmp_path / "x.png"
    Image.new("RGB", (9, 9), "red").save(path)
    with ImageCache(tmp_path / "cache", 10**6) as cache:
        cache.read(str(path), EYE)
    content = bytearray((tmp_path / "cache" / "pixels").read_bytes())
    content[7] ^= 1
    (tmp_path / "cache" / "pixels").write_bytes(content)
    with ImageCache(tmp_path / "cache", 10**6) as cache:
        for _ in range(5):
            cache.read(str(path), EYE)
        assert (cache.hits, cache.misses) == (4, 1)


@pytest.fixture
def cached(tmp_path):
    """Eight images of different sizes and a cache that holds them; a function that reads all, and how many hits."""
    rng = np.random.default_rng(0)
    paths = [str(tmp_path / f"{number}.png") for number in range(8)]
    for number, path in enumerate(paths):
        Image.fromarray(rng.integers(0, 256, (4 + number, 30 - number, 3), np.uint8)).save(path)
    expected = [np.asarray(EYE.read(path)) for path in paths]

    def read_all():
        with ImageCache(tmp_path / "cache", 10**6) as cache:
            for path, pixels in zip(paths, expected, strict=True):
                np.testing.assert_array_equal(np.asarray(cache.read(path, EYE)), pixels)
            return cache.hits

    assert [read_all(), read_all()] == [0, 8]
    return tmp_path / "cache", read_all


@pytest.mark.parametrize(
    "change",
    [
        {"height": 30, "width": 4},  # as many bytes, another shape
        {"height": 1},
        {"height": 0, "checksum": 0},  # the checksum of nothing
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
def test_an_entry_of_the_cache_that_cannot_be_true_is_decoded_anew(cached, change):
    folder, read_all = cached
    content = (folder / "index").read_bytes()
    names = ("key", "offset", "height", "width", "channels", "checksum")
    first = dict(zip(names, _ENTRY.unpack(content[: _ENTRY.size]), strict=True))
    assert (first["height"], first["width"], first["channels"]) == (4, 30, 3)
    (folder / "index").write_bytes(_ENTRY.pack(*(first | change).values()) + content[_ENTRY.size :])
    assert [read_all(), read_all()] == [7, 8]


@pytest.mark.parametrize(("width", "channels"), [(90, 1), (45, 2), (18, 5)])
def test_an_entry_of_other_channels_is_decoded_anew_though_its_checksum_is_right(cached, width, channels):
    folder, read_all = cached
    content, pixels = (folder / "index").read_bytes(), (folder / "pixels").read_bytes()
    key, offset, height, *_ = _ENTRY.unpack(content[: _ENTRY.size])
    shape = (height, width, channels)
    checksum = _entry_checksum(key, offset, shape, pixels[offset : offset + height * width * channels])
    (folder / "index").write_bytes(_ENTRY.pack(key, offset, *shape, checksum) + content[_ENTRY.size :])
    assert [read_all(), read_all()] == [7, 8]


def test_a_large_cache_that_promises_a_larger_image_than_is_read_fills_no_memory(cached):
    folder, read_all = cached
    os.truncate(folder / "pixels", 2**36)  # a sparse file
    content = (folder / "index").read_bytes()
    key = content[:16]
    (folder / "index").write_bytes(_ENTRY.pack(key, 0, 2**16, 2**16, 3, 0) + content[_ENTRY.size :])
    tracemalloc.start()
    assert read_all() == 7
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_an_index_of_the_cache_with_any_bytes_changes_no_pixels(cached):
    folder, read_all = cached
    index, pixels = (folder / "index").read_bytes(), (folder / "pixels").read_bytes()
    hits = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        damaged = bytearray(index)
        place = int(rng.integers(len(index)))
        match seed % 4:
            case 0:
                damaged[place] ^= 1 << int(rng.integers(8))
            case 1:
                damaged = damaged[:place]
            case 2:
                damaged[place:place] = rng.bytes(int(rng.integers(1, 60)))
            case 3:
                damaged = rng.bytes(place)
        (folder / "index").write_bytes(damaged)
        (folder / "pixels").write_bytes(pixels)
        hits.append(read_all())
        assert read_all() == 8, seed
    assert (min(hits), max(hits)) == (0, 7)


def test_processes_share_a_cache_without_storing_twice(files, tmp_path):
    script = (
        "import sys\nfrom vitrail.data.cache import ImageCache\nfrom vitrail.data.preprocess import Preprocess\n"
        "with ImageCache(sys.argv[1], 10**8) as cache:\n"
        "    for path in sys.argv[2:]:\n        cache.read(path, Preprocess(resolution=(24, 24)))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), *files.images]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    with ImageCache(tmp_path, 10**8) as cache:
        needed = 0
        for path in files.images:
            pixels = np.asarray(cache.read(path, EYE))
            np.testing.assert_array_equal(pixels, np.atleast_3d(np.asarray(EYE.read(path))))
            needed += pixels.nbytes
        assert cache.misses == 0
    assert (tmp_path / "pixels").stat().st_size == needed


def test_a_full_disk_only_costs_the_cache(files, tmp_path):
    """A limit on the size of files stands for the disk."""
    expected = run(Loader(files, EYE, batch=8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with ImageCache(tmp_path, 10**8) as cache:
            loader = Loader(files, EYE, batch=8, cache=cache)
            same(run(loader), expected)
            same(run(loader), expected)
            assert 0 < cache.hits < 37
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_the_cache_stays_within_its_limit(files, tmp_path):
    with ImageCache(tmp_path, 40_000) as cache:
        loader = Loader(files, EYE, batch=8, cache=cache)
        first = run(loader)
        assert 20_000 < (tmp_path / "pixels").stat().st_size <= 40_000
        same(run(loader), first)
        assert 0 < cache.hits < 37


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="Cache must be a folder"):
        ImageCache(tmp_path / "file", 1)
