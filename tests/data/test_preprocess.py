"""Decoding and preprocessing: every mode, orientation and size gives the model's input or a one-line error."""

import io
import json
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.data.decode import MAX_PIXELS, open_image, read_file, to_channels
from vitrail.data.image_files import list_images
from vitrail.data.preprocess import Preprocess

WHITE = (255, 255, 255)


def noise(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encode(image, **options):
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


# Transposition from the upright image to the image that is stored with each EXIF orientation.
STORED_TRANSPOSITIONS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", STORED_TRANSPOSITIONS)
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("JPEG", {"quality": 95, "subsampling": "4:4:4"}),
        ("MPO", {"quality": 95, "subsampling": "4:4:4", "save_all": True}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("AVIF", {"quality": 95, "subsampling": "4:4:4"}),
    ],
)
def test_every_exif_orientation_is_applied_in_every_format(form, options, orientation):
    if form not in Image.registered_extensions().values():
        pytest.skip(f"this Pillow has no {form}")
    upright = Image.fromarray(noise(4, 6)).resize((96, 64), Image.Resampling.BICUBIC)
    stored = (
        upright if STORED_TRANSPOSITIONS[orientation] is None else upright.transpose(STORED_TRANSPOSITIONS[orientation])
    )
    exif = Image.Exif()
    exif[0x0112] = orientation
    if options.get("save_all"):
        options = {**options, "append_images": [stored]}
    content = encode(stored, format=form, exif=exif, **options)
    image = open_image(content)
    assert image.size == (96, 64)
    assert image.format == form
    assert np.abs(np.asarray(image).astype(int) - np.asarray(upright)).mean() < 2
    sizes = []

    def sufficient_size(width, height):
        sizes.append((width, height))
        return 40, 30  # a scale of 1/2 is sufficient, but would not be with width and height exchanged

    scaled = open_image(content, sufficient_size)
    is_jpeg = form in ("JPEG", "MPO")
    assert set(sizes) <= {(96, 64)}
    assert scaled.size == ((48, 32) if is_jpeg else (96, 64))
    expected = np.asarray(upright.resize(scaled.size, Image.Resampling.BOX)).astype(int)
    assert np.abs(np.asarray(scaled) - expected).mean() < 3
    double = Preprocess(resolution=(15, 20), resize="squash", crop_fraction=1.0, jpeg="double")
    assert np.abs(double.crop(content).astype(int) - double.crop(upright)).mean() < 3


def test_exif_after_the_pixels_of_a_png_is_applied():
    upright = Image.fromarray(noise(8, 12))
    exif = Image.Exif()
    exif[0x0112] = 3
    content = encode(upright.transpose(Image.Transpose.ROTATE_180), format="PNG", exif=exif)
    begin = content.index(b"eXIf") - 4
    end = begin + 12 + int.from_bytes(content[begin : begin + 4], "big")
    last = content.index(b"IEND") - 4
    reordered = content[:begin] + content[end:last] + content[begin:end] + content[last:]
    assert np.array_equal(np.asarray(open_image(reordered)), np.asarray(upright))


@pytest.mark.parametrize("ending", ["pgm", "bmp", "tif"])
def test_decoded_image_is_independent_of_its_file(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    levels = noise(32, 32, channels=1)
    Image.fromarray(levels).save(path)
    image = open_image(path)
    with path.open("r+b") as file:
        file.seek(-1024, os.SEEK_END)
        file.write(bytes(1024))
    assert np.array_equal(np.asarray(image), levels)


def lossless_jpeg(levels):
    """Return a lossless JPEG (ITU-T T.81, annex H), which stores each level as difference to the previous level."""
    height, width = levels.shape
    bits = []
    for y in range(height):
        for x in range(width):
            previous = levels[y, x - 1] if x else levels[y - 1, 0] if y else 128
            difference = int(levels[y, x]) - int(previous)
            size = abs(difference).bit_length()
            code = difference if difference > 0 else difference + (1 << size) - 1
            bits.append(f"{size:04b}" + (f"{code:0{size}b}" if size else ""))
    text = "".join(bits)
    text += "1" * (-len(text) % 8)
    frame = b"\xff\xc3\0\x0b\x08" + height.to_bytes(2, "big") + width.to_bytes(2, "big") + b"\x01\x01\x11\0"
    table = b"\xff\xc4\0\x1c\0" + bytes([0, 0, 0, 9] + [0] * 12) + bytes(range(9))
    scan = int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\0")
    return b"\xff\xd8" + frame + table + b"\xff\xda\0\x08\x01\x01\0\x01\0\0" + scan + b"\xff\xd9"


def test_jpeg_that_cannot_be_scaled_is_decoded_at_full_size(tmp_path):
    levels = noise(64, 80, channels=1)
    content = lossless_jpeg(levels)
    (tmp_path / "x.jpg").write_bytes(content)
    for source in (content, tmp_path / "x.jpg"):
        assert np.array_equal(np.asarray(open_image(source, lambda *_: (10, 8))), levels)
    with pytest.raises(CorruptFileError, match=r"^'cut' cannot be decoded \(image file is truncated"):
        open_image(content[:-900], lambda *_: (10, 8), name="cut")


def test_corrupt_tiff_prints_nothing_and_hides_no_output_of_other_threads(capfd):
    """By default, libtiff prints errors from C, while other threads may print, too."""
    corrupt = bytearray(encode(Image.fromarray(noise(64, 64)), format="TIFF", compression="tiff_adobe_deflate"))
    corrupt[200] ^= 255
    lines = [f"line {number}\n" for number in range(300)]

    def decode(_):
        with pytest.raises(CorruptFileError):
            open_image(bytes(corrupt))

    def print_all():
        for line in lines:
            os.write(2, line.encode())

    with ThreadPoolExecutor(3) as pool:
        printing = pool.submit(print_all)
        list(pool.map(decode, range(200)))
        printing.result()
    assert capfd.readouterr() == ("", "".join(lines))


def test_16_bit_levels_are_scaled_and_not_clipped():
    levels = np.linspace(0, 65_535, 64).astype(np.uint16).reshape(8, 8)
    for file_format in ("PNG", "TIFF"):
        image = open_image(encode(Image.fromarray(levels), format=file_format))
        assert np.array_equal(np.asarray(to_channels(image, 1, WHITE)), np.rint(levels / 257).astype(np.uint8))
    wide = Image.fromarray(levels.astype(np.int32))
    assert np.array_equal(np.asarray(to_channels(wide, 1, WHITE)), np.rint(levels / 257).astype(np.uint8))
    shares = Image.fromarray((levels / 65_535).astype(np.float32))
    assert np.array_equal(np.asarray(to_channels(shares, 1, WHITE)), np.rint(levels / 65_535 * 255).astype(np.uint8))
    dark = Image.fromarray(np.full((2, 2), 200, np.int32))
    assert np.asarray(to_channels(dark, 1, WHITE)).tolist() == [[200, 200]] * 2


def test_transparent_pixels_are_blended_with_background():
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0, :, 0] = 200
    pixels[0, :, 3] = (0, 128, 255)
    image = Image.fromarray(pixels)
    red = np.asarray(to_channels(image, 3, (0, 0, 255)))[0]
    assert red.tolist() == [[0, 0, 255], [100, 0, 127], [200, 0, 0]]
    palette = image.convert("RGB").quantize(4)
    palette.info["transparency"] = palette.getpixel((0, 0))
    clear = open_image(encode(palette, format="PNG", transparency=palette.getpixel((0, 0))))
    assert np.asarray(to_channels(clear, 3, (1, 2, 3)))[0].tolist() == [[1, 2, 3]] * 3
    grey = Image.fromarray(np.array([[[10, 0], [10, 255]]], np.uint8))
    assert np.asarray(to_channels(grey, 1, WHITE)).tolist() == [[255, 10]]
    for straight, premultiplied in (("LA", "La"), ("RGBA", "RGBa")):
        multiplied = image.convert(straight).convert(premultiplied)
        expected = np.asarray(to_channels(multiplied.convert(straight), 3, (0, 0, 255)))
        assert np.array_equal(np.asarray(to_channels(multiplied, 3, (0, 0, 255))), expected)


def test_colour_modes_are_converted_as_in_pillow():
    rgb = Image.fromarray(noise(8, 8))
    cmyk = open_image(encode(rgb.convert("CMYK"), format="TIFF"))
    assert np.array_equal(np.asarray(to_channels(cmyk, 3, WHITE)), np.asarray(cmyk.convert("RGB")))
    for mode in ("1", "L", "P", "YCbCr", "HSV", "LAB", "CMYK", "RGBX"):
        for channels in (1, 3):
            image = rgb.convert(mode) if mode != "LAB" else _convert_to_lab(rgb)
            expected = image.convert("RGB").convert("L" if channels == 1 else "RGB")
            np.testing.assert_array_equal(np.asarray(to_channels(image, channels, WHITE)), np.asarray(expected))


def test_16_bit_image_is_scaled_whatever_its_largest_level():
    for level in (255, 256, 65_535):  # a dark image of 16 bits stays dark
        pgm = b"P5 4 4 65535\n" + np.full(16, level, ">u2").tobytes()
        assert np.asarray(to_channels(open_image(pgm), 1, WHITE))[0, 0] == round(level / 257)
    for largest in (1.0, 1.01):
        shares = Image.fromarray(np.array([[0.5, largest]], np.float32))
        assert np.asarray(to_channels(shares, 1, WHITE)).tolist() == [[128, 255]]


@pytest.mark.parametrize("form", ["PNG", "WEBP", "JPEG"])
def test_image_with_corrupt_exif_is_decoded(form):
    rgb = Image.fromarray(noise(8, 8))
    content = encode(rgb, format=form, lossless=True, exif=b"Exif\0\0garbage-and-more")
    assert open_image(content).size == (8, 8)


def _convert_to_lab(rgb):
    from PIL import ImageCms

    standard = ImageCms.createProfile("sRGB")
    return ImageCms.profileToProfile(rgb, standard, ImageCms.createProfile("LAB"), outputMode="LAB")


def test_first_frame_of_an_animation_is_decoded():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    image = open_image(encode(frames[0], format="GIF", save_all=True, append_images=frames[1:]))
    assert image.convert("RGB").getpixel((0, 0)) == (255, 0, 0)


@settings(max_examples=60)
@given(
    mode=st.sampled_from(["1", "L", "P", "RGB", "RGBA", "RGBa", "LA", "La", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"]),
    size=st.one_of(
        st.tuples(st.integers(1, 50), st.integers(1, 50)),
        st.tuples(st.just(1), st.integers(1, 20_000)),
        st.tuples(st.integers(1, 20_000), st.just(1)),
    ),
    resize=st.sampled_from(["shorter", "squash", "pad"]),
    channels=st.sampled_from([1, 3]),
)
def test_any_mode_and_size_gives_finite_tensor(mode, size, resize, channels):
    half = (0.5,) * channels
    preprocess = Preprocess(resolution=(20, 28), resize=resize, mean=half, std=half)
    tensor = preprocess([Image.new(mode, size)])
    assert tensor.shape == (1, channels, 20, 28)
    assert tensor.isfinite().all()


@given(
    mean=st.lists(st.floats(-1, 2, width=32), min_size=1, max_size=4),
    std=st.floats(0.0078125, 4),
    seed=st.integers(0, 100),
)
def test_scale_array_equals_scale_bit_for_bit(mean, std, seed):
    preprocess = Preprocess(resolution=(16, 16), mean=tuple(mean), std=(std,) * len(mean))
    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    pixels = np.concatenate([np.roll(levels, seed + band, axis=1) for band in range(len(mean))], axis=3)
    pixels = np.concatenate([pixels, pixels[:, ::-1]])
    array, tensor = preprocess.scale_array(pixels), preprocess.scale(torch.from_numpy(pixels))
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    assert tensor.is_contiguous()
    np.testing.assert_array_equal(array.view(np.int32), tensor.numpy().view(np.int32))
    expected = (pixels.astype(np.float64) / 255 - mean) / std
    np.testing.assert_allclose(array, np.moveaxis(expected, 3, 1), rtol=1e-4, atol=1e-5)


def test_resize_rules_give_expected_sizes_and_background():
    image = np.zeros((10, 20, 3), np.uint8)
    settings = {"resolution": (8, 8), "crop_fraction": 1.0}
    padded = Preprocess(resize="pad", background=(255, 0, 0), **settings).crop(image)
    assert (padded[2:6] == 0).all()
    assert (padded[:2] == (255, 0, 0)).all()
    assert (padded[6:] == (255, 0, 0)).all()
    assert Preprocess(resize="pad", **settings).resized_size(20, 10) == (8, 4)
    assert Preprocess(resize="squash", **settings).resized_size(20, 10) == (8, 8)
    assert Preprocess(resize="shorter", **settings).resized_size(20, 10) == (16, 8)
    grey = Preprocess(resize="pad", mean=(0.5,), std=(0.5,), **settings).crop(image)
    assert (grey[0] == 255).all()


def test_only_the_part_under_the_crop_of_a_long_image_is_resized():
    ramp = np.linspace(0, 255, 20_000).astype(np.uint8)[None]
    start = time.perf_counter()
    pixels = Preprocess(mean=(0.5,), std=(0.5,)).crop(ramp)
    assert time.perf_counter() - start < 5
    assert abs(float(pixels.mean()) - 127.5) < 2


def test_jpeg_double_is_stored_and_changes_pixels_slightly(tmp_path):
    smooth = Image.fromarray(noise(40, 60)).resize((2400, 1600), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "camera.jpg", quality=90)
    exact, double = Preprocess(), Preprocess(jpeg="double")
    assert Preprocess.from_json(double.to_json()) == double
    assert open_image(tmp_path / "camera.jpg", double._twice_resized_size).size == (1200, 800)
    difference = np.abs(exact.crop(tmp_path / "camera.jpg").astype(int) - double.crop(tmp_path / "camera.jpg"))
    assert 0 < difference.mean() < 2
    exif = Image.Exif()
    exif[0x0112] = 6
    smooth.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.jpg", quality=90, exif=exif)
    assert open_image(tmp_path / "turned.jpg", double._twice_resized_size).size == (1200, 800)


def test_corrupt_and_other_files_give_one_line_errors(tmp_path):
    intact = encode(Image.fromarray(noise(50, 50)), format="JPEG")
    cases = {
        "empty.png": b"",
        "text.jpg": b"hello",
        "cut.jpg": intact[: len(intact) // 2],
        "head.png": b"\x89PNG\r\n\x1a\n",
        "page.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorruptFileError, match="cannot be decoded") as caught:
            open_image(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(CorruptFileError, match=r"^'member 3' cannot be decoded") as caught:
            open_image(content, name="member 3")
        assert "_io." not in str(caught.value)
        with pytest.raises(CorruptFileError, match=r"^'image 1' cannot be decoded"):
            Preprocess()([intact, content])
    for read in (open_image, read_file):
        with pytest.raises(CorruptFileError, match=r"empty\.png' cannot be decoded \(it is empty\)\.$"):
            read(tmp_path / "empty.png")
    with pytest.raises(UsageError, match="must be a file that exists"):
        open_image(tmp_path)


def test_levels_that_are_not_finite_are_rejected(tmp_path):
    Image.fromarray(np.full((2, 2), np.nan, np.float32)).save(tmp_path / "nan.tiff")
    with pytest.raises(CorruptFileError, match=r"nan\.tiff' of mode F cannot be converted"):
        Preprocess()([tmp_path / "nan.tiff"])


def test_palette_image_without_palette_is_rejected_alone(tmp_path, call):
    """Pillow opens such a file without an error."""
    file = io.BytesIO()
    Image.new("P", (2, 2)).save(file, "PNG")
    content = file.getvalue()
    start = content.index(b"PLTE") - 4
    length = int.from_bytes(content[start : start + 4], "big")
    for name in ("bad", "good"):
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8), 200).save(tmp_path / name / "fine.png")
    (tmp_path / "bad" / "broken.png").write_bytes(content[:start] + content[start + 12 + length :])
    done = call("predict", "fashion", tmp_path, "--json")
    errors = [json.loads(line).get("error") for line in done.stdout.splitlines()]
    assert [error is None for error in errors] == [False, True, True]
    assert errors[0].endswith("broken.png' of mode P cannot be converted (it has no palette).")
    done = call("doctor", tmp_path, "--json")
    assert done.returncode == 1
    assert "it has no palette" in done.stdout


def test_too_many_pixels_are_rejected_before_decoding():
    side = int(MAX_PIXELS**0.5) + 10
    bomb = encode(Image.new("1", (side, side)), format="PNG")
    assert len(bomb) < 200_000
    with pytest.raises(CorruptFileError, match="pixels are more than"):
        open_image(bomb)


@pytest.mark.parametrize(
    "arguments",
    [
        {"resize": "stretch"},
        {"jpeg": "fast"},
        {"background": (0, 0)},
        {"background": (0, 0, 256)},
        {"crop_fraction": 0.001},
    ],
    ids=str,
)
def test_preprocess_rejects_invalid_settings(arguments):
    with pytest.raises(UsageError):
        Preprocess(**arguments)


@pytest.mark.slow
def test_every_image_of_pillows_tests_is_decoded_or_rejected(capfd):
    """Unpack Pillow's source package and set PILLOW_TEST_IMAGES to its Tests/images."""
    folder = Path(os.environ.get("PILLOW_TEST_IMAGES", "nowhere"))
    if not folder.is_dir():
        pytest.skip("needs Tests/images of Pillow's source package: set PILLOW_TEST_IMAGES")
    preprocess = Preprocess(resolution=(32, 32))
    decoded = rejected = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        start = time.perf_counter()
        try:
            tensor = preprocess([path])
        except VitrailError:
            rejected += 1
        else:
            assert tensor.shape == (1, 3, 32, 32)
            assert tensor.isfinite().all()
            decoded += 1
        assert time.perf_counter() - start < 5, path
        assert capfd.readouterr() == ("", ""), path  # decoders in C print without Python
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1_000_000  # KiB
    assert decoded > 400
    assert rejected > 100


@pytest.mark.parametrize("brand", [b"heic", b"mif1"])
def test_heic_error_states_conversion(tmp_path, brand):
    (tmp_path / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftyp" + brand + bytes(100))
    with pytest.raises(
        CorruptFileError,
        match=r"IMG_1.HEIC' is a HEIC \(HEIF\) image, .*: convert it to JPEG and remove it, for example",
    ):
        open_image(tmp_path / "IMG_1.HEIC")
    assert list_images([tmp_path]) == [str(tmp_path / "IMG_1.HEIC")]
    (tmp_path / "film.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(100))
    with pytest.raises(CorruptFileError, match="its header is not that of a JPEG"):
        open_image(tmp_path / "film.mp4")
