"""The cache of features in memory: equal to computing them, never stale, bounded."""

import threading

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.core.errors import CorruptFileError
from vitrail.data.dataset import Split
from vitrail.evaluation import feature_cache
from vitrail.evaluation.feature_cache import FeatureCache
from vitrail.evaluation.features import extract_features
from vitrail.lab.exact import redraw


@pytest.fixture
def bundle():
    preprocess = vitrail.Preprocess(resolution=(8, 8), mean=(0.5,), std=(0.5,))
    return vitrail.Bundle(model=redraw(vitrail.create("ViT-Pico/2", classes=3)), preprocess=preprocess)


@pytest.fixture
def computed(monkeypatch):
    """Return a list of the number of images of each computation."""
    counts = []

    def extract(model, preprocess, images, **options):
        counts.append(len(images))
        return extract_features(model, preprocess, images, **options)

    monkeypatch.setattr(feature_cache, "extract_features", extract)
    return counts


def make_images(count=6):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
    return Split("images", pixels, np.zeros(count, np.int64))


def test_features_equal_those_that_are_computed_and_each_image_is_computed_once(bundle, computed):
    images, cache = make_images(), FeatureCache()
    for order in ([0, 1, 2], [2, 0, 0, 3], [5, 4, 3, 2, 1, 0]):
        chosen = images.select(np.array(order))
        expected = extract_features(bundle.model, bundle.preprocess, chosen)
        np.testing.assert_allclose(cache.extract(bundle, chosen), expected, rtol=1e-5, atol=1e-6)
    assert computed == [3, 1, 2]
    features = cache.extract(bundle, images)
    features[:] = 0  # the result belongs to the caller
    assert cache.extract(bundle, images).any(axis=1).all()
    assert len(cache) == 6


def change_weights(bundle):
    with torch.no_grad():
        bundle.model.blocks[3].mlp.fc2.bias[0] += 1e-3


def change_preprocessing(bundle):
    object.__setattr__(bundle, "preprocess", bundle.preprocess.replace(mean=(0.4,)))


def change_module(bundle):
    class Doubled(torch.nn.LayerNorm):
        def forward(self, images):
            return 2 * super().forward(images)

    norm = Doubled(48, eps=bundle.model.norm.eps)
    norm.load_state_dict(bundle.model.norm.state_dict())
    bundle.model.norm = norm


def add_hook(bundle):
    bundle.model.norm.register_forward_hook(lambda module, inputs, output: 2 * output)


@pytest.mark.parametrize("change", [change_weights, change_preprocessing, change_module, add_hook])
def test_features_are_computed_again_after_a_change(bundle, computed, change):
    images, cache = make_images(), FeatureCache()
    before = cache.extract(bundle, images)
    change(bundle)
    after = cache.extract(bundle, images)
    assert computed == [6, 6]
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, extract_features(bundle.model, bundle.preprocess, images))


def test_each_layer_has_entries_of_its_own(bundle, computed):
    images, cache = make_images(), FeatureCache()
    outputs = [cache.extract(bundle, images, layer=layer) for layer in (None, 0, -1, 3)]
    assert computed == [6, 6, 6]  # -1 is layer 3
    np.testing.assert_array_equal(outputs[2], outputs[3])
    assert not np.array_equal(outputs[0], outputs[1])


def test_a_file_is_known_by_its_content(bundle, computed, tmp_path):
    pixels, cache = make_images(2).images[..., 0], FeatureCache()
    paths = [str(tmp_path / name) for name in ("a.png", "copy of a.png")]
    for path in paths:
        Image.fromarray(pixels[0]).save(path)
    images = Split("images", paths, np.zeros(2, np.int64))
    first, copy = cache.extract(bundle, images)
    np.testing.assert_array_equal(first, copy)
    assert computed == [1]
    Image.fromarray(pixels[1]).save(paths[1])
    assert not np.array_equal(cache.extract(bundle, images)[1], copy)
    assert computed == [1, 1]


def test_a_file_that_is_replaced_while_it_is_computed_is_not_stored(bundle, monkeypatch, tmp_path):
    pixels, path = make_images(2).images[..., 0], tmp_path / "a.png"
    images = Split("images", [str(path)], np.zeros(1, np.int64))
    originals = []
    for index in (1, 0):
        Image.fromarray(pixels[index]).save(path)
        originals.insert(0, path.read_bytes())

    def replace_and_extract(*arguments, **options):
        path.write_bytes(originals[1])
        return extract_features(*arguments, **options)

    cache = FeatureCache()
    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "extract_features", replace_and_extract)
        replaced = cache.extract(bundle, images)
    assert len(cache) == 0
    path.write_bytes(originals[0])
    first = cache.extract(bundle, images)
    np.testing.assert_array_equal(first, extract_features(bundle.model, bundle.preprocess, images))
    assert not np.array_equal(first, replaced)


def test_files_that_cannot_be_read_have_no_features(bundle, monkeypatch, tmp_path):
    path = tmp_path / "a.png"
    images = Split("images", [str(path)], np.zeros(1, np.int64))
    cache = FeatureCache()
    with monkeypatch.context() as patch:  # the file is created after it was hashed
        patch.setattr(feature_cache, "extract_features", lambda *_, **__: np.ones((1, 48), np.float32))
        assert cache.extract(bundle, images).all()
    with pytest.raises(CorruptFileError):
        cache.extract(bundle, images)


def test_the_cache_is_bounded_and_drops_the_least_recently_used(bundle, computed):
    images = make_images(4)
    entry = 48 * 4 + 300
    cache = FeatureCache(capacity=3 * entry)
    for index in (0, 1, 2, 0, 3, 0):
        cache.extract(bundle, images.select(np.array([index])))
    assert computed == [1] * 4
    assert (len(cache), cache.used) == (3, 3 * entry)
    cache.extract(bundle, images.select(np.array([1])))
    assert computed == [1] * 5
    without = FeatureCache(capacity=0)
    assert without.extract(bundle, images).shape == (4, 48)
    assert (len(without), without.used) == (0, 0)


def test_threads_share_a_cache(bundle):
    images, cache = make_images(32), FeatureCache(capacity=20 * (48 * 4 + 300))
    expected = extract_features(bundle.model, bundle.preprocess, images)
    outputs = []
    threads = [threading.Thread(target=lambda: outputs.append(cache.extract(bundle, images))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 4
    for output in outputs:
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    assert cache.used == 20 * (48 * 4 + 300)
