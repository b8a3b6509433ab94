"""Image files of every format with changed bytes: rejected exactly if Pillow rejects them, with a one-line error."""

import io
import json
import warnings

import numpy as np
import pytest
from PIL import Image, ImageOps

from vitrail.cli import main
from vitrail.core.errors import CorruptFileError
from vitrail.data.decode import FORMATS, MAX_PIXELS, open_image
from vitrail.data.preprocess import Preprocess

COLOUR = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)).resize(
    (24, 20), Image.Resampling.BICUBIC
)
GREY, PALETTE, TRANSPARENT = COLOUR.convert("L"), COLOUR.quantize(16), COLOUR.convert("RGBA")
TRANSPARENT.putalpha(GREY)
SIXTEEN_BITS = Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)
TURNED = Image.Exif()
TURNED[0x0112] = 6


def encode(image, form, **options):
    file = io.BytesIO()
    image.save(file, format=form, **options)
    return file.getvalue()


def intact_files():
    """Return the names and contents of small image files of every format that is read."""
    files = {
        "base.jpg": encode(COLOUR, "JPEG", exif=TURNED),
        "progressive.jpg": encode(COLOUR, "JPEG", progressive=True),
        "cmyk.jpg": encode(COLOUR.convert("CMYK"), "JPEG"),
        "two.mpo": encode(COLOUR, "MPO", save_all=True, append_images=[COLOUR], exif=TURNED),
        "colour.png": encode(COLOUR, "PNG", exif=TURNED),
        "palette.png": encode(PALETTE, "PNG", transparency=3),
        "shades.png": encode(PALETTE, "PNG", transparency=bytes(range(16))),
        "one-level.png": encode(GREY, "PNG", transparency=77),
        "grey-clear.png": encode(TRANSPARENT.convert("LA"), "PNG"),
        "deep.png": encode(SIXTEEN_BITS, "PNG"),
        "moving.png": encode(TRANSPARENT, "PNG", save_all=True, append_images=[TRANSPARENT.rotate(90)]),
        "moving.gif": encode(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(90)], transparency=0),
        "lossy.webp": encode(COLOUR, "WEBP", exif=TURNED),
        "lossless.webp": encode(TRANSPARENT, "WEBP", lossless=True),
        "moving.webp": encode(TRANSPARENT, "WEBP", save_all=True, append_images=[TRANSPARENT.rotate(90)]),
        "colour.bmp": encode(COLOUR, "BMP"),
        "palette.bmp": encode(PALETTE, "BMP"),
        "bits.bmp": encode(GREY.convert("1"), "BMP"),
        "grey.pgm": encode(GREY, "PPM"),
        "deep.pgm": encode(SIXTEEN_BITS, "PPM"),
        "bits.pbm": encode(GREY.convert("1"), "PPM"),
        "plain.ppm": b"P3 3 2 255 " + b" ".join(b"%d" % (13 * index) for index in range(18)),
        "clear.tif": encode(TRANSPARENT, "TIFF", exif=TURNED),
        "deep.tif": encode(SIXTEEN_BITS, "TIFF"),
        "cmyk.tif": encode(COLOUR.convert("CMYK"), "TIFF"),
        "lab.tif": encode(COLOUR.convert("LAB"), "TIFF"),
        "palette.tif": encode(PALETTE, "TIFF"),
    }
    if "AVIF" in Image.registered_extensions().values():
        files["colour.avif"] = encode(COLOUR, "AVIF")
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "zstd", "lzma"):
        files[f"{compression}.tif"] = encode(COLOUR, "TIFF", compression=compression)
    for compression in ("group3", "group4"):
        files[f"{compression}.tif"] = encode(GREY.convert("1"), "TIFF", compression=compression)
    return files


def flip_bit(content, rng):
    """Return the bytes with one flipped bit."""
    position = int(rng.integers(8 * len(content)))
    mutated = bytearray(content)
    mutated[position // 8] ^= 1 << position % 8
    return bytes(mutated)


def truncate(content, rng):
    return content[: int(rng.integers(1, len(content)))]


def insert_bytes(content, rng):
    position = int(rng.integers(len(content)))
    return content[:position] + rng.bytes(int(rng.integers(1, 9))) + content[position:]


def change_header(content, rng):
    """Return the bytes with up to three changed values in the header, often values at the limits of integers."""
    mutated = bytearray(content)
    for position in rng.integers(min(len(content), 200), size=int(rng.integers(1, 4))):
        mutated[position] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))]))
    return bytes(mutated)


def mutations(count, seed=0):
    """Yield the names and contents of `count` mutated files, of each format and mutation in turn."""
    files, mutators = list(intact_files().items()), (flip_bit, truncate, insert_bytes, change_header)
    for index in range(count):
        rng = np.random.default_rng((seed, index))
        name, content = files[index % len(files)]
        mutate = mutators[index // len(files) % len(mutators)]
        yield f"{index:05d}-{mutate.__name__}-{name}", mutate(content, rng)


def decode_with_pillow(content):
    """Return the upright image that Pillow decodes, or None if Pillow rejects the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(content))
            image.load()
        except Exception:
            return None
        try:
            return ImageOps.exif_transpose(image)
        except Exception:  # corrupt EXIF data are ignored
            return image


def try_read(read, content):
    """Return the image and an empty string, or None and the error message."""
    try:
        return read(content), ""
    except CorruptFileError as error:
        return None, str(error)


def is_rejected(content):
    """Return whether we reject a file, after checking that Pillow rejects it too or gives the same pixels."""
    expected, (image, error) = decode_with_pillow(content), try_read(open_image, content)
    if image is None:
        # Files that Pillow accepts are rejected only because of their size.
        is_large = expected is not None and expected.width * expected.height > MAX_PIXELS
        assert expected is None or (is_large and f"pixels are more than {MAX_PIXELS:,}" in error), error
        assert "\n" not in error
        assert "_io." not in error
        return True
    assert expected is not None
    assert (image.mode, image.size) == (expected.mode, expected.size)
    assert image.tobytes() == expected.tobytes()
    return False


@pytest.mark.parametrize(
    ("name", "min_rejected"),
    [
        ("colour.png", 400),
        ("base.jpg", 20),
        ("lossy.webp", 10),
        ("tiff_adobe_deflate.tif", 400),
        ("packbits.tif", 5),
        ("moving.gif", 20),
        ("palette.bmp", 5),
    ],
)
def test_flipped_bit_is_rejected_exactly_if_pillow_rejects_it(name, min_rejected, capfd):
    content = intact_files()[name]
    rejected = sum(is_rejected(flip_bit(content, np.random.default_rng(seed))) for seed in range(500))
    assert min_rejected <= rejected < 500
    assert capfd.readouterr() == ("", "")


def test_2000_mutated_files_are_rejected_exactly_if_pillow_rejects_them(capfd):
    formats = {Image.open(io.BytesIO(content)).format for content in intact_files().values()}
    assert formats >= {*FORMATS, "MPO"} - {"AVIF"}
    small = Preprocess(resolution=(4, 4), jpeg="double")
    rejected = 0
    for name, content in mutations(2000):
        # Conversion and scaling must not change which files are rejected.
        pixels, error = try_read(small.crop, content)
        assert is_rejected(content) == (pixels is None), (name, error)
        assert pixels is None or pixels.shape == (4, 4, 3)
        rejected += pixels is None
    assert 500 < rejected < 1500
    assert capfd.readouterr() == ("", "")


def test_predict_and_doctor_name_exactly_the_files_that_pillow_rejects(tmp_path, capfd):
    """The commands exit with code 1 and print nothing but one error for each file that Pillow rejects."""
    rejected = set()
    for number, (name, content) in enumerate(mutations(2000, seed=1)):
        path = tmp_path / "data" / "ab"[number % 2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        image = decode_with_pillow(content)
        if image is None or image.width * image.height > MAX_PIXELS:
            rejected.add(str(path))
    assert 500 < len(rejected) < 1500
    output = run_failing(capfd, "predict", "fashion", tmp_path / "data", "--json")
    assert len(output.err.splitlines()) <= 1  # the summary
    predictions = [json.loads(line) for line in output.out.splitlines()]
    assert len(predictions) == 2000
    assert {prediction["file"] for prediction in predictions if "error" in prediction} == rejected
    output = run_failing(capfd, "doctor", tmp_path / "data", "--json")
    assert output.err == ""
    findings = json.loads(output.out)["findings"]
    unreadable = [finding for finding in findings if finding["kind"] == "unreadable"]
    assert {file for finding in unreadable for file in finding["files"]} == rejected
    assert not [finding["message"] for finding in unreadable if "_io." in finding["message"]]


def run_failing(capfd, *arguments):
    """Run a command that exits with code 1 and return its output, including output from C."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    output = capfd.readouterr()
    assert caught.value.code == 1
    assert "internal error" not in output.out + output.err
    return output
