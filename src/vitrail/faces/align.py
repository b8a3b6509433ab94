"""Alignment of faces: shift, rotate and scale an image so that eyes, nose and mouth are at fixed pixels."""

import csv
import io
import json
import os
import posixpath
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import read_text

TEMPLATE = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
"""Left eye, right eye, nose, left and right corner of the mouth (x, y) in an image of 112 x 112 pixels, as in the
alignment of insightface. Left and right are those of the image, not of the person. The centre of the first pixel is at
0."""
BY_LANDMARKS, UNALIGNED = "five landmarks", "none"
"""Values of `alignment` in the provenance of a bundle: how the faces it was trained on were aligned."""
SIDE = 112
"""Height and width of an aligned face, in pixels."""

_MIN_SPAN = 4  # pixels between the outermost landmarks of a face
# Share of the template's variance that the landmarks must explain. A full profile explains 0.5; landmarks with left and
# right exchanged explain 0.05.
_MIN_EXPLAINED = 0.4


def estimate_similarity(points_52: np.ndarray) -> np.ndarray:
    """Return the similarity transform, a matrix (2, 3), that maps five landmarks to the template by least squares.

    It maps (x, y, 1) of the image to (x, y) of the aligned face. Raises UsageError if all landmarks are one point, or
    are not in the order of the template.
    """
    points_52 = np.asarray(points_52, np.float64)
    centre, template_centre = points_52.mean(axis=0), TEMPLATE.mean(axis=0)
    # In complex numbers, rotation and scale are one factor, so that least squares has a closed form.
    source = (points_52 - centre) @ [1, 1j]
    target = (TEMPLATE - template_centre) @ [1, 1j]
    squared_size = float(np.vdot(source, source).real)
    if not squared_size > 0:
        raise UsageError("Landmarks must be five different points, got the same point five times.")
    factor = np.vdot(source, target) / squared_size
    if abs(factor) ** 2 * squared_size < _MIN_EXPLAINED * np.vdot(target, target).real:
        raise UsageError(
            "Landmarks must be left eye, right eye, nose, left and right corner of the mouth, left and right as the"
            " image shows them, got points that are not a face in this order."
        )
    rotation = np.array([[factor.real, -factor.imag], [factor.imag, factor.real]])
    return np.concatenate([rotation, (template_centre - rotation @ centre)[:, None]], axis=1)


def align(image: Image.Image, points_52: np.ndarray) -> Image.Image:
    """Return the aligned face of an image, 112 x 112 pixels. Pixels outside of the image are black.

    Raises UsageError for landmarks outside of the image or too close to each other.
    """
    matrix, (x, y) = estimate_similarity(points_52), np.mean(points_52, axis=0)
    if not (0 <= x < image.width and 0 <= y < image.height) or np.ptp(points_52, axis=0).max() < _MIN_SPAN:
        raise UsageError(
            f"Landmarks must be pixels on the face, at least {_MIN_SPAN} of them apart, got points around ({x:.1f},"
            f" {y:.1f}) in an image of {image.width} x {image.height}."
        )
    # Pillow needs the inverse map, from pixels of the result to pixels of the image.
    inverse = np.linalg.inv(matrix[:, :2])
    shift = 0.5 - inverse @ (matrix[:, 2] + 0.5)  # in Pillow, the centre of the first pixel is at 0.5
    coefficients = (*inverse[0], shift[0], *inverse[1], shift[1])
    shrink = int(1 / max(np.sqrt(abs(np.linalg.det(matrix[:, :2]))), 1e-6))
    if shrink > 1:  # bicubic interpolation reads only 4 x 4 pixels, so that large photos must be averaged first
        image = image.reduce(shrink)
        coefficients = tuple(value / shrink for value in coefficients)
    return image.transform((SIDE, SIDE), Image.Transform.AFFINE, coefficients, Image.Resampling.BICUBIC)


def read_landmarks(path: str | Path) -> dict[str, np.ndarray]:
    """Read the five facial landmarks (5, 2) of each image, by the image's `path_key`.

    A CSV file has the columns file, x1, y1, ... x5, y5. A JSON file has an object that maps each file to five pairs.
    Raises CorruptFileError for anything else.
    """
    text = read_text(path, "Landmarks", "a .csv or .json file")
    rows = _parse_json_landmarks(text, path) if Path(path).suffix == ".json" else _parse_csv_landmarks(text, path)
    landmarks = {}
    for name, numbers in rows:
        try:
            points = np.array(numbers, np.float64).reshape(5, 2)
        except (TypeError, ValueError):
            raise CorruptFileError(path=path, cause=f"must have five points (x, y) for {name!r}") from None
        if not np.isfinite(points).all():
            raise CorruptFileError(path=path, cause=f"must have finite numbers for {name!r}")
        if (key := path_key(name)) in landmarks:
            raise CorruptFileError(path=path, cause=f"has {name!r} twice")
        landmarks[key] = points
    return landmarks


def path_key(path: str) -> str:
    """Return a path in normal form, so that equal paths compare equal: `a/b` for `./a//b`, and Unicode in NFC.

    Upper case stays, because file systems distinguish it.
    """
    return unicodedata.normalize("NFC", posixpath.normpath(path.replace(os.sep, "/")))


def _parse_json_landmarks(text: str, path: str | Path) -> Iterable[tuple[str, Any]]:
    try:
        document = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(path=path, cause=f"is not a JSON document ({error})") from None
    if not isinstance(document, tuple):
        raise CorruptFileError(path=path, cause="must be a JSON object of five points for each file")
    return document


def _parse_csv_landmarks(text: str, path: str | Path) -> Iterable[tuple[str, Any]]:
    """Return the name of each file with its ten coordinates as text. Raise CorruptFileError for another header."""
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    header = ["file", *(f"{axis}{number}" for number in range(1, 6) for axis in "xy")]
    if not rows or [cell.strip() for cell in rows[0]] != header:
        raise CorruptFileError(path=path, cause=f"must begin with the header {','.join(header)}")
    return ((row[0], row[1:]) for row in rows[1:])
