"""Images of every format with a few bytes changed: what Pillow refuses is refused, in one line and nowhere else."""

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
GREY, PALETTE, CLEAR = COLOUR.convert("L"), COLOUR.quantize(16), COLOUR.convert("RGBA")
CLEAR.putalpha(GREY)
DEEP = Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)
UPSIDE_DOWN = Image.Exif()
UPSIDE_DOWN[0x0112] = 6


def encoded(image, form, **options):
    file = io.BytesIO()
    image.save(file, format=form, **options)
    return file.getvalue()


def originals():
    """Small files of every format that is read, by an ending of their own."""
    files = {
        "base.jpg": encoded(COLOUR, "JPEG", exif=UPSIDE_DOWN),
        "progressive.jpg": encoded(COLOUR, "JPEG", progressive=True),
        "cmyk.jpg": encoded(COLOUR.convert("CMYK"), "JPEG"),
        "two.mpo": encoded(COLOUR, "MPO", save_all=True, append_images=[COLOUR], exif=UPSIDE_DOWN),
        "colour.png": encoded(COLOUR, "PNG", exif=UPSIDE_DOWN),
        "palette.png": encoded(PALETTE, "PNG", transparency=3),
        "shades.png": encoded(PALETTE, "PNG", transparency=bytes(range(16))),
        "one-level.png": encoded(GREY, "PNG", transparency=77),
        "grey-clear.png": encoded(CLEAR.convert("LA"), "PNG"),
        "deep.png": encoded(DEEP, "PNG"),
        "moving.png": encoded(CLEAR, "PNG", save_all=True, append_images=[CLEAR.rotate(90)]),
        "moving.gif": encoded(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(90)], transparency=0),
        "lossy.webp": encoded(COLOUR, "WEBP", exif=UPSIDE_DOWN),
        "lossless.webp": encoded(CLEAR, "WEBP", lossless=True),
        "moving.webp": encoded(CLEAR, "WEBP", save_all=True, append_images=[CLEAR.rotate(90)]),
        "colour.bmp": encoded(COLOUR, "BMP"),
        "palette.bmp": encoded(PALETTE, "BMP"),
        "bits.bmp": encoded(GREY.convert("1"), "BMP"),
        "grey.pgm": encoded(GREY, "PPM"),
        "deep.pgm": encoded(DEEP, "PPM"),
        "bits.pbm": encoded(GREY.convert("1"), "PPM"),
        "plain.ppm": b"P3 3 2 255 " + b" ".join(b"%d" % (13 * place) for place in range(18)),
        "clear.tif": encoded(CLEAR, "TIFF", exif=UPSIDE_DOWN),
        "deep.tif": encoded(DEEP, "TIFF"),
        "cmyk.tif": encoded(COLOUR.convert("CMYK"), "TIFF"),
        "lab.tif": encoded(COLOUR.convert("LAB"), "TIFF"),
        "palette.tif": encoded(PALETTE, "TIFF"),
    }
    if "AVIF" in Image.registered_extensions().values():
        files["colour.avif"] = encoded(COLOUR, "AVIF")
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "zstd", "lzma"):
        files[f"{compression}.tif"] = encoded(COLOUR, "TIFF", compression=compression)
    for compression in ("group3", "group4"):
        files[f"{compression}.tif"] = encoded(GREY.convert("1"), "TIFF", compression=compression)
    return files


def flipped(content, rng):
    """One bit is another."""
    place = int(rng.integers(8 * len(content)))
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def cut(content, rng):
    return content[: int(rng.integers(1, len(content)))]


def inserted(content, rng):
    place = int(rng.integers(len(content)))
    return content[:place] + rng.bytes(int(rng.integers(1, 9))) + content[place:]


def header_edited(content, rng):
    """Some of the first bytes become such as break arithmetic."""
    changed = bytearray(content)
    for place in rng.integers(min(len(content), 200), size=int(rng.integers(1, 4))):
        changed[place] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))]))
    return bytes(changed)


def mutations(count, seed=0):
    """(name, content) of so many damaged files, of all formats and kinds of damage by turns."""
    files, kinds = list(originals().items()), (flipped, cut, inserted, header_edited)
    for index in range(count):
        rng = np.random.default_rng((seed, index))
        name, content = files[index % len(files)]
        damage = kinds[index // len(files) % len(kinds)]
        yield f"{index:05d}-{damage.__name__}-{name}", damage(content, rng)


def fully_decoded(content):
    """What Pillow alone makes of a file, upright; None if it refuses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(content))
            image.load()
        except Exception:
            return None
        try:
            return ImageOps.exif_transpose(image)
        except Exception:  # damaged EXIF says nothing
            return image


def refusal(read, content):
    """The image, or else the error in words."""
    try:
        return read(content), ""
    except CorruptFileError as error:
        return None, str(error)


def is_refused(content):
    """Compare with Pillow's full decode: the same verdict, and the same pixels."""
    expected, (image, error) = fully_decoded(content), refusal(open_image, content)
    if image is None:
        # More is refused for one reason alone.
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
    ("name", "least_refused"),
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
def test_a_flipped_bit_is_refused_where_pillow_refuses_it(name, least_refused, capfd):
    content = originals()[name]
    refused = sum(is_refused(flipped(content, np.random.default_rng(seed))) for seed in range(500))
    assert least_refused <= refused < 500
    assert capfd.readouterr() == ("", "")


def test_two_thousand_mutations_of_every_format(capfd):
    found = {Image.open(io.BytesIO(content)).format for content in originals().values()}
    assert found >= {*FORMATS, "MPO"} - {"AVIF"}
    small = Preprocess(resolution=(4, 4), jpeg="double")
    refused = 0
    for name, content in mutations(2000):
        # In the model's channels, and scaled: the same verdict.
        pixels, error = refusal(small.crop, content)
        assert is_refused(content) == (pixels is None), (name, error)
        assert pixels is None or pixels.shape == (4, 4, 3)
        refused += pixels is None
    assert 500 < refused < 1500
    assert capfd.readouterr() == ("", "")


def test_predict_and_doctor_on_two_thousand_mutations(tmp_path, capfd):
    """The commands themselves, on files: what Pillow refuses is named, with exit code 1, and nothing else is said."""
    refused = set()
    for number, (name, content) in enumerate(mutations(2000, seed=1)):
        path = tmp_path / "data" / "ab"[number % 2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        image = fully_decoded(content)
        if image is None or image.width * image.height > MAX_PIXELS:
            refused.add(str(path))
    assert 500 < len(refused) < 1500
    said = run(capfd, "predict", "fashion", tmp_path / "data", "--json")
    assert len(said.err.splitlines()) <= 1  # the sum of it
    answers = [json.loads(line) for line in said.out.splitlines()]
    assert len(answers) == 2000
    assert {answer["file"] for answer in answers if "error" in answer} == refused
    said = run(capfd, "doctor", tmp_path / "data", "--json")
    assert said.err == ""
    findings = json.loads(said.out)["findings"]
    unreadable = [finding for finding in findings if finding["kind"] == "unreadable"]
    assert {file for finding in unreadable for file in finding["files"]} == refused
    assert not [finding["message"] for finding in unreadable if "_io." in finding["message"]]


def run(capfd, *words):
    """What a command that ends with exit code 1 prints, from Python and from C."""
    with pytest.raises(SystemExit) as leaving:
        main([str(word) for word in words])
    said = capfd.readouterr()
    assert leaving.value.code == 1
    assert "internal error" not in said.out + said.err
    return said
