"""Augmentation equals torchvision's operations bit for bit and is a pure function of (seed, epoch, sample)."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.peers import import_peer
from vitrail.core import rng
from vitrail.core.errors import UsageError
from vitrail.core.rng import Stream
from vitrail.data.augment import operations
from vitrail.data.augment.config import Augment
from vitrail.data.augment.crop import Crop
from vitrail.data.augment.jitter import JITTERS
from vitrail.data.augment.mixing import Mixing
from vitrail.data.augment.pipeline import augment, mix
from vitrail.data.augment.randaugment import GOOGLE, TABLES, TORCHVISION, Operation, RandAugment
from vitrail.data.preprocess import Preprocess

PREPROCESS = Preprocess(resolution=(24, 20), crop_fraction=1.0)
GREY_PREPROCESS = PREPROCESS.replace(mean=(0.5,), std=(0.5,))

# All augmentations of single images.
ALL_AUGMENTATIONS = Augment(
    crop="pad",
    padding=3,
    flip="random",
    randaugment=2,
    magnitude=12,
    brightness=0.4,
    contrast=0.3,
    saturation=0.5,
    hue=0.2,
    erasing=0.5,
    fill=9,
)


def noise(*shape, seed=0):
    """Return random images of different brightness with noise, in which any wrong pixel is detected."""
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 200, (*shape[:-3], 1, 1, 1)) + rng.integers(0, 56, shape)
    return levels.astype(np.uint8)


def stream(count, seed=0, epoch=0):
    return Stream(seed, epoch, np.arange(count))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("ours", "theirs", "strengths"),
    [
        ("brightness", "adjust_brightness", [0.0, 0.35, 1.0, 1.9]),
        ("contrast", "adjust_contrast", [0.0, 0.35, 1.0, 1.9]),
        ("saturation", "adjust_saturation", [0.0, 0.35, 1.0, 1.9]),
        ("sharpness", "adjust_sharpness", [0.0, 0.35, 1.0, 1.9]),
        ("hue", "adjust_hue", [-0.5, -0.13, 0.0, 0.37]),
        ("posterise", "posterize", [8, 6, 4, 1]),
        ("solarise", "solarize", [255.0, 128.5, 7.0, 0.0]),
        ("autocontrast", "autocontrast", None),
        ("equalise", "equalize", None),
    ],
)
def test_operation_equals_torchvision_on_each_image(ours, theirs, strengths, channels):
    functional = import_peer("torchvision.transforms.functional")
    for height, width in ((24, 20), (2, 3), (1, 1), (40, 70)):
        images = noise(4, height, width, channels)
        strength = [] if strengths is None else [np.array(strengths)]
        changed = getattr(operations, ours)(images, *strength)
        for index, pixels in enumerate(images):
            image = operations.to_image(pixels)
            settings = [] if strengths is None else [strengths[index]]
            expected = np.asarray(getattr(functional, theirs)(image, *settings)).reshape(pixels.shape)
            np.testing.assert_array_equal(changed[index], expected)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("ours", "name"),
    [
        ("shear_x", "ShearX"),
        ("shear_y", "ShearY"),
        ("translate_x", "TranslateX"),
        ("translate_y", "TranslateY"),
        ("rotate", "Rotate"),
    ],
)
def test_geometric_operation_equals_torchvision(ours, name, channels):
    apply = import_peer("torchvision.transforms.autoaugment")._apply_op
    nearest = import_peer("torchvision.transforms").InterpolationMode.NEAREST
    extents = np.array([-0.29, 0.11, 0.3]) if "shear" in ours else np.array([-11.3, 3.7, 29.0])
    images = noise(3, 24, 20, channels)
    changed = getattr(operations, ours)(images, extents, 7)
    for index, pixels in enumerate(images):
        image = operations.to_image(pixels)
        expected = apply(image, name, float(extents[index]), interpolation=nearest, fill=[7] * channels)
        np.testing.assert_array_equal(changed[index], np.asarray(expected).reshape(pixels.shape))


def test_randaugment_draws_torchvision_operations_and_strengths():
    """Many samples give exactly the images that torchvision can produce, each with the expected frequency."""
    torchvision = import_peer("torchvision.transforms")
    apply = import_peer("torchvision.transforms.autoaugment")._apply_op
    image = Image.fromarray(noise(24, 20, 3))
    possible = {}
    for name, (levels, signed) in torchvision.RandAugment()._augmentation_space(31, (24, 20)).items():
        level = float(levels[9]) if levels.ndim else 0.0
        for sign in (1, -1) if signed else (1,):
            changed = apply(image, name, sign * level, torchvision.InterpolationMode.NEAREST, None)
            possible.setdefault(np.asarray(changed).tobytes(), []).append((name, sign, 1 / 14 / (2 if signed else 1)))
    # Strengths are rounded in single precision. Contrast shows a wrong last bit, so test it over the whole scale.
    for magnitude in range(0, 31, 5):
        strength = 1 + float(torchvision.RandAugment()._augmentation_space(31, (24, 20))["Contrast"][0][magnitude])
        changed = augment(np.stack([image] * 200), stream(200), Augment(randaugment=1, magnitude=magnitude), PREPROCESS)
        expected = apply(image, "Contrast", strength - 1, torchvision.InterpolationMode.NEAREST, None)
        assert any((pixels == np.asarray(expected)).all() for pixels in changed), magnitude
    count = 4200
    changed = augment(np.stack([image] * count), stream(count), Augment(randaugment=1), PREPROCESS)
    for content, draws in possible.items():
        probability = sum(weight for *_, weight in draws)
        frequency = sum(pixels.tobytes() == content for pixels in changed) / count
        assert abs(frequency - probability) < 4.5 * math.sqrt(probability * (1 - probability) / count), draws
    assert {pixels.tobytes() for pixels in changed} == set(possible)


def test_resized_crop_equals_torchvision_for_same_box():
    functional = import_peer("torchvision.transforms.functional")
    torchvision = import_peer("torchvision.transforms")
    settings = Augment(crop="resized", scale=(0.2, 0.9))
    images = noise(8, 60, 45, 3)
    boxes = Crop(crop="resized", scale=(0.2, 0.9)).boxes(np.full(8, 60), np.full(8, 45), stream(8))
    crops = augment(images, stream(8), settings, PREPROCESS)
    for image, box, crop in zip(images, boxes.tolist(), crops, strict=True):
        expected = functional.resized_crop(
            Image.fromarray(image), *box, [24, 20], torchvision.InterpolationMode.BICUBIC
        )
        np.testing.assert_array_equal(crop, np.asarray(expected))


def test_crop_boxes_have_mean_and_deviation_of_torchvision():
    torchvision = import_peer("torchvision.transforms")
    scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    for height, width in ((100, 80), (30, 200)):
        image = Image.new("L", (width, height))
        theirs = np.array([torchvision.RandomResizedCrop.get_params(image, scale, ratio) for _ in range(4000)])
        ours = Crop(crop="resized").boxes(np.full(4000, height), np.full(4000, width), stream(4000))
        assert (ours[:, :2] >= 0).all()
        assert (ours[:, 0] + ours[:, 2] <= height).all()
        assert (ours[:, 1] + ours[:, 3] <= width).all()
        error = theirs.std(axis=0) / math.sqrt(2000)
        assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 5 * error + 1e-9).all()
        assert (np.abs(ours.std(axis=0) / np.maximum(theirs.std(axis=0), 1e-9) - 1) < 0.1).all()


@given(height=st.integers(1, 300), width=st.integers(1, 300), seed=st.integers(0, 99))
def test_crop_boxes_lie_inside_image_of_any_size(height, width, seed):
    for crop in (Crop(crop="resized"), Crop(crop="resized", scale=(0.01, 0.02), ratio=(0.05, 20))):
        boxes = crop.boxes(np.full(20, height), np.full(20, width), Stream(seed, 0, np.arange(20)))
        top, left, tall, wide = boxes.T
        assert (top >= 0).all()
        assert (left >= 0).all()
        assert (tall >= 1).all()
        assert (wide >= 1).all()
        assert (top + tall <= height).all()
        assert (left + wide <= width).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", ["none", "pad", "resized"])
def test_single_image_and_batch_give_same_pixels(crop, channels):
    settings = ALL_AUGMENTATIONS.replace(crop=crop)
    preprocess = PREPROCESS if channels == 3 else GREY_PREPROCESS
    for size in ((24, 20), (31, 47)):
        images = noise(40, *size, channels)
        batch = augment(images, stream(40, seed=3, epoch=2), settings, preprocess)
        assert batch.shape == (40, 24, 20, channels)
        assert batch.dtype == np.uint8
        for index in range(40):
            single = augment([preprocess.read(images[index])], Stream(3, 2, np.array([index])), settings, preprocess)
            np.testing.assert_array_equal(single[0], batch[index])
    assert len({pixels.tobytes() for pixels in batch}) == 40


def test_augmentation_depends_only_on_seed_epoch_and_index():
    images = noise(16, 24, 20, 3)
    expected = augment(images, stream(16), ALL_AUGMENTATIONS, PREPROCESS)
    torch.rand(3), np.random.default_rng(5).random(3)
    np.testing.assert_array_equal(augment(images, stream(16), ALL_AUGMENTATIONS, PREPROCESS), expected)
    reversed_stream = Stream(0, 0, np.arange(16)[::-1])
    np.testing.assert_array_equal(augment(images[::-1], reversed_stream, ALL_AUGMENTATIONS, PREPROCESS)[::-1], expected)
    for other in (stream(16, seed=1), stream(16, epoch=1), Stream(0, 0, np.arange(16) + 16)):
        changed = augment(images, other, ALL_AUGMENTATIONS, PREPROCESS)
        assert not any((pixels == other_pixels).all() for pixels, other_pixels in zip(changed, expected, strict=True))


def test_without_augmentation_pixels_equal_evaluation():
    image = noise(50, 60, 3)
    np.testing.assert_array_equal(
        augment([PREPROCESS.read(image)], stream(1), Augment(), PREPROCESS)[0], PREPROCESS.crop(image)
    )


def test_alternate_flip_mirrors_each_image_in_every_other_epoch():
    images = noise(30, 24, 20, 1)
    epochs = [augment(images, stream(30, epoch=e), Augment(flip="alternate"), GREY_PREPROCESS) for e in range(4)]
    mirrored = [(epoch == images).all(axis=(1, 2, 3)) for epoch in epochs]
    np.testing.assert_array_equal(mirrored[0], ~mirrored[1])
    np.testing.assert_array_equal(mirrored[0], mirrored[2])
    np.testing.assert_array_equal(mirrored[1], mirrored[3])
    assert 5 < mirrored[0].sum() < 25


def test_erasing_fills_boxes_of_published_size_with_mean_colour():
    white = np.full((2000, 24, 20, 3), 255, np.uint8)
    erased = augment(white, stream(2000), Augment(erasing=0.5), PREPROCESS)
    painted = (erased == np.rint(np.array(PREPROCESS.mean) * 255)).all(axis=3)
    share = painted.mean(axis=(1, 2))
    assert abs((share > 0).mean() - 0.5) < 0.05
    assert share[share > 0].min() > 0.005
    assert share.max() < 0.36
    assert ((erased == 255).all(axis=3) | painted).all()


def test_images_of_5_bands_are_cropped_and_flipped():
    preprocess = Preprocess(resolution=(8, 8), mean=(0.5,) * 5, std=(0.5,) * 5)
    images = noise(4, 12, 12, 5)
    settings = Augment(crop="resized", flip="random", erasing=0.5)
    batch = augment(images, stream(4), settings, preprocess)
    assert batch.shape == (4, 8, 8, 5)
    np.testing.assert_array_equal(augment([images[2]], Stream(0, 0, np.array([2])), settings, preprocess)[0], batch[2])


@pytest.mark.parametrize(
    "settings",
    [
        {"crop": "padd"},
        {"mixup": 1.5},
        {"scale": (0.5, 0.1)},
        {"magnitude": 31},
        {"hue": 0.6},
        {"padding": -1},
        {"mixup": 1e-5},
        {"scale": ("a", "b")},
    ],
)
def test_settings_out_of_range_are_rejected(settings):
    with pytest.raises(UsageError):
        Augment(**settings)


def test_mixup_and_cutmix_mix_neighbours_by_stated_share():
    images = torch.arange(9.0)[:, None, None, None].expand(9, 2, 10, 10).clone()
    for settings in (Augment(mixup=0.8), Augment(cutmix=1.0), Augment(mixup=0.2, cutmix=1.0)):
        mixture = settings.mixture(stream(9), (10, 10))
        mixed = mix(images, mixture)
        assert mixture.partner.tolist() == [1, 0, 3, 2, 5, 4, 7, 6, 8]
        expected = mixture.share * np.arange(9) + (1 - mixture.share) * mixture.partner
        np.testing.assert_allclose(mixed.mean(dim=(1, 2, 3)).numpy(), expected, atol=1e-5)
        np.testing.assert_array_equal(mixed[8], images[8])
    is_cut = mixture.boxes[:, 2] > 0
    assert 0 < is_cut.sum() < 9
    cut_image = mixed[int(np.argmax(is_cut))]
    assert set(cut_image.unique().tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0}


def test_corrupt_sample_is_not_mixed():
    alone = np.array([False, True, False, False])
    mixture = Augment(mixup=1.0).mixture(stream(4), (4, 4), alone)
    assert mixture.share[:2].tolist() == [1.0, 1.0]
    assert (mixture.share[2:] < 1).all()


def test_mixture_of_a_pair_does_not_depend_on_the_batch():
    settings = Augment(mixup=0.5, cutmix=0.5)
    batch_mixture = settings.mixture(stream(8), (28, 28))
    part = settings.mixture(Stream(0, 0, np.arange(4, 8)), (28, 28))
    np.testing.assert_array_equal(part.share, batch_mixture.share[4:])
    np.testing.assert_array_equal(part.boxes, batch_mixture.boxes[4:])


def test_random_numbers_are_uniform_independent_and_unchanged():
    # Golden values: a change here changes every training run.
    golden = [0.8984208762, 0.2692922277, 0.5058775307]
    np.testing.assert_allclose(rng.uniform(7, 2, np.arange(3), stream="flip"), golden, atol=1e-9)
    numbers = rng.uniform(0, np.arange(300)[:, None], np.arange(300), stream="test")
    counts = np.histogram(numbers, bins=100)[0]
    assert ((counts - 900) ** 2 / 900).sum() < 160  # chi-square with 99 degrees of freedom: above 160 once in 10,000
    for first, second in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.015
    other = rng.uniform(0, np.arange(300)[:, None], np.arange(300), stream="other")
    assert abs(np.corrcoef(numbers.ravel(), other.ravel())[0, 1]) < 0.015


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0])
def test_beta_has_expected_mean_and_variance(alpha):
    share = rng.beta(alpha, 0, np.arange(50_000), stream="mixup")
    assert share.min() >= 0
    assert share.max() <= 1
    assert abs(share.mean() - 0.5) < 0.01
    assert abs(share.var() * 4 * (2 * alpha + 1) - 1) < 0.03


@given(count=st.integers(0, 500), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10_000))
def test_permutation_has_every_number_once(count, seed, epoch):
    order = rng.permutation(count, seed, epoch, stream="order")
    np.testing.assert_array_equal(np.sort(order), np.arange(count))


# Operations of Google's RandAugment


def test_google_strengths_equal_big_vision():
    rng = np.random.default_rng(0)
    images = rng.integers(20, 200, (3, 224, 224, 3), dtype=np.uint8)
    signs = np.array([1.0, -1.0, 1.0])

    def apply(name, magnitude):
        augmentation = RandAugment(randaugment=1, operations="google", magnitude=magnitude, fill=128)
        return augmentation.apply_row({row.name: row for row in GOOGLE}[name], images, signs, stream(3))

    assert (apply("Invert", 10) == 255 - images).all()
    assert (apply("Solarize", 10) == images).all()  # a threshold of 256 is above every level
    assert (apply("Solarize", 5) == np.where(images < 128, images, 255 - images)).all()
    assert (apply("Posterize", 20) == images).all()  # all eight bits are kept
    assert (apply("Posterize", 10) == images & 0b11110000).all()
    assert (apply("Brightness", 10) == operations.brightness(images, np.full(3, 1.9))).all()
    assert (apply("Brightness", 0) == operations.brightness(images, np.full(3, 0.1))).all()
    moved = apply("TranslateX", 10)
    assert (moved[0, :, :100] == 128).all()
    assert (moved[0, :, 100:] == images[0, :, :-100]).all()
    assert (moved[1, :, -100:] == 128).all()
    cut = (apply("Cutout", 10) != images).any(axis=3)
    rows, columns = cut[0].any(axis=1), cut[0].any(axis=0)
    assert 0 < rows.sum() <= 80
    assert 0 < columns.sum() <= 80
    assert (apply("SolarizeAdd", 10) == np.where(images < 128, np.minimum(images.astype(int) + 110, 255), images)).all()
    for row in GOOGLE:
        assert row.name == "Solarize" or (apply(row.name, 15) != images).any(), row.name
    settings = Augment(randaugment=2, operations="google", magnitude=15, fill=128)
    changed = augment(np.stack([images[0, :24, :20]] * 300), stream(300), settings, PREPROCESS)
    assert len({pixels.tobytes() for pixels in changed}) > 100


# Tables of operations


def test_order_of_operation_tables_is_unchanged():
    """A random number selects the row, so reordering or inserting rows changes every training run."""
    torchvision = import_peer("torchvision.transforms").RandAugment()._augmentation_space(31, (24, 20))
    assert [row.name for row in TORCHVISION] == list(torchvision)
    assert " ".join(row.name for row in GOOGLE) == (
        "AutoContrast Equalize Invert Rotate Posterize Solarize Color Contrast Brightness Sharpness"
        " ShearX ShearY TranslateX TranslateY Cutout SolarizeAdd"
    )
    assert [row.name for row in JITTERS] == ["brightness", "contrast", "saturation", "hue"]


def test_pixels_of_a_seed_are_unchanged():
    """Golden values: a change here changes every training run."""
    images = (np.arange(64 * 6 * 5).reshape(64, 6, 5, 1) * 37 % 256).astype(np.uint8)
    preprocess = Preprocess(resolution=(6, 5), crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    settings = Augment(crop="pad", flip="alternate", randaugment=1, operations="google", magnitude=10, erasing=0.5)
    pixels = augment(images, stream(64, seed=7, epoch=1), settings, preprocess)
    assert hashlib.sha256(pixels.tobytes()).hexdigest()[:16] == "56f58e31e3ef5d12"


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        ({"crop": "pad", "padding": 3, "fill": 7}, "c607545e9de2"),
        ({"crop": "resized", "scale": (0.2, 0.9)}, "5781293baadc"),
        ({"flip": "random"}, "1af0bebcde85"),
        ({"flip": "alternate"}, "20e8a01bd679"),
        ({"brightness": 0.4, "contrast": 0.3, "saturation": 0.5, "hue": 0.2}, "c14dd93acf3b"),
        ({"erasing": 0.5}, "524ec73ecaec"),
        ({"randaugment": 3, "operations": "google", "magnitude": 12, "fill": 9}, "af4087bb531f"),
        ({"randaugment": 2}, "8024e83b258a"),
    ],
    ids=str,
)
def test_pixels_of_each_augmentation_are_unchanged(settings, digest):
    """Golden values: a change here changes every training run."""
    images = np.random.default_rng(0).integers(0, 256, (40, 31, 47, 3)).astype(np.uint8)
    pixels = augment(images, stream(40, seed=3, epoch=2), Augment(**settings), PREPROCESS.replace(crop_fraction=0.9))
    assert hashlib.sha256(pixels.tobytes()).hexdigest()[:12] == digest


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        ({"mixup": 0.8}, "982479fef5e1"),
        ({"cutmix": 1.0}, "0dc1de53f1f5"),
        ({"mixup": 0.2, "cutmix": 1.0}, "962583189589"),
    ],
    ids=str,
)
def test_mixtures_are_unchanged(settings, digest):
    """Golden values: a change here changes every training run."""
    mixture = Augment(**settings).mixture(stream(9, seed=3, epoch=2), (10, 10))
    assert hashlib.sha256(b"".join(np.round(part, 9).tobytes() for part in mixture)).hexdigest()[:12] == digest


@pytest.mark.parametrize("row", [*TORCHVISION, *GOOGLE], ids=lambda row: row.name)
def test_operation_supports_channels_of_its_row(row):
    for channels in (1, 3) if row.channels else (1, 2, 3, 5):
        images = noise(4, 8, 6, channels)
        changed = RandAugment().apply_row(row, images, np.array([1.0, -1.0, 1.0, -1.0]), stream(4))
        assert (changed.shape, changed.dtype) == (images.shape, np.uint8)


def test_added_row_is_drawn_with_magnitude_and_checks_channels(monkeypatch):
    """An added row is drawn as often as the others, gets the magnitude, and its channels are checked."""
    row = Operation("Set", lambda images, level: np.full_like(images, level), lambda ctx: (ctx.magnitude,), (1, 5))
    monkeypatch.setitem(TABLES, "torchvision", (TORCHVISION[0], row))
    settings = Augment(randaugment=1, magnitude=30)
    changed = augment(
        np.zeros((400, 24, 20, 5), np.uint8), stream(400), settings, PREPROCESS.replace(mean=(0.5,) * 5, std=(0.5,) * 5)
    )
    assert set(np.unique(changed)) == {0, 30}
    assert 150 < (changed[:, 0, 0, 0] == 30).sum() < 250
    settings.check_channels(5)
    with pytest.raises(
        UsageError, match=r"by Set must have images of 1 or 5 channels, got 3\. Set augment.randaugment"
    ):
        settings.check_channels(3)


def test_jitter_rejects_unsupported_channels():
    Augment(brightness=0.5, crop="resized", flip="random", erasing=0.5, mixup=0.2).check_channels(5)
    for name in ("contrast", "saturation", "hue"):
        with pytest.raises(
            UsageError, match=f"by {name} must have images of 1 or 3 channels, got 5. Set augment.{name}"
        ):
            Augment(**{name: 0.1}).check_channels(5)


def test_inactive_augmentation_does_not_mix():
    settings = Augment()
    assert [part.mixes for part in settings.augmentations if isinstance(part, Mixing)] == [True]
    assert not settings.mixes
    assert settings.mixture(Stream(0, 0, np.arange(4)), (8, 8)) is None
    assert Augment(mixup=0.2).mixture(Stream(0, 0, np.arange(4)), (8, 8)) is not None
