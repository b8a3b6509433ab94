"""Alignment: faces moved, turned and scaled so that eyes, nose and mouth are where the template has them."""

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
alignment of insightface; left and right as the image shows them. The centre of the first pixel is at 0."""
BY_LANDMARKS, UNALIGNED = "five landmarks", "none"
"""What a bundle says of faces that were aligned so, or not at all."""
SIDE = 112
"""Pixels of an aligned face, in height and width."""

_LEAST = 4  # pixels that the points of a face span
_LEAST_ALIKE = 0.4  # share of the template that the points explain: a full profile 0.5, left and right exchanged 0.05


def similarity(points_52: np.ndarray) -> np.ndarray:
    """The matrix (2, 3) that moves, turns and scales five points onto the template with the least squared distance:
    (x, y, 1) of the image becomes (x, y) of the aligned face."""
    points_52 = np.asarray(points_52, np.float64)
    centre, goal = points_52.mean(axis=0), TEMPLATE.mean(axis=0)
    # As complex numbers, a rotation with a scale is one factor: least squares has a closed form.
    source = (points_52 - centre) @ [1, 1j]
    target = (TEMPLATE - goal) @ [1, 1j]
    size = float(np.vdot(source, source).real)
    if not size > 0:
        raise UsageError("Landmarks must be five different points, got the same point five times.")
    factor = np.vdot(source, target) / size
    if abs(factor) ** 2 * size < _LEAST_ALIKE * np.vdot(target, target).real:
        raise UsageError(
            "Landmarks must be left eye, right eye, nose, left and right corner of the mouth, left and right as the"
            " image shows them, got points that are no face in this order."
        )
    turn = np.array([[factor.real, -factor.imag], [factor.imag, factor.real]])
    return np.concatenate([turn, (goal - turn @ centre)[:, None]], axis=1)


def align(image: Image.Image, points_52: np.ndarray) -> Image.Image:
    """The aligned face, 112 x 112 pixels; black where the image does not reach."""
    matrix, (x, y) = similarity(points_52), np.mean(points_52, axis=0)
    if not (0 <= x < image.width and 0 <= y < image.height) or np.ptp(points_52, axis=0).max() < _LEAST:
        raise UsageError(
            f"Landmarks must be pixels on the face, at least {_LEAST} of them apart, got points around ({x:.1f},"
            f" {y:.1f}) in an image of {image.width} x {image.height}."
        )
    # Pillow asks the other way round: where in the image does each pixel of the result come from?
    back = np.linalg.inv(matrix[:, :2])
    shift = 0.5 - back @ (matrix[:, 2] + 0.5)  # its coordinates are 0.5 at the centre of the first pixel
    data = (*back[0], shift[0], *back[1], shift[1])
    shrink = int(1 / max(np.sqrt(abs(np.linalg.det(matrix[:, :2]))), 1e-6))
    if shrink > 1:  # bicubic interpolation reads 4 x 4 pixels: a large photo is averaged first
        image = image.reduce(shrink)
        data = tuple(value / shrink for value in data)
    return image.transform((SIDE, SIDE), Image.Transform.AFFINE, data, Image.Resampling.BICUBIC)


def read_landmarks(path: str | Path) -> dict[str, np.ndarray]:
    """Five points (5, 2) for each image, by its path below DATA as `path_key` spells it: from a CSV file with the
    columns file, x1, y1, ... x5, y5, or from a JSON object of five pairs for each file."""
    text = read_text(path, "Landmarks", "a .csv or .json file")
    rows = _from_json(text, path) if Path(path).suffix == ".json" else _from_csv(text, path)
    found = {}
    for name, numbers in rows:
        try:
            points = np.array(numbers, np.float64).reshape(5, 2)
        except (TypeError, ValueError):
            raise CorruptFileError(path=path, cause=f"must have five points (x, y) for {name!r}") from None
        if not np.isfinite(points).all():
            raise CorruptFileError(path=path, cause=f"must have finite numbers for {name!r}")
        if (key := path_key(name)) in found:
            raise CorruptFileError(path=path, cause=f"has {name!r} twice")
        found[key] = points
    return found


def path_key(path: str) -> str:
    """A path in the one spelling by which images are compared: `./a//b` is `a/b`, and 한 one character. Capitals stay,
    because file systems tell them apart."""
    return unicodedata.normalize("NFC", posixpath.normpath(path.replace(os.sep, "/")))


def _from_json(text: str, path: str | Path) -> Iterable[tuple[str, Any]]:
    try:
        document = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(path=path, cause=f"is no JSON document ({error})") from None
    if not isinstance(document, tuple):
        raise CorruptFileError(path=path, cause="must be a JSON object of five points for each file")
    return document


def _from_csv(text: str, path: str | Path) -> Iterable[tuple[str, Any]]:
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    header = ["file", *(f"{axis}{number}" for number in range(1, 6) for axis in "xy")]
    if not rows or [cell.strip() for cell in rows[0]] != header:
        raise CorruptFileError(path=path, cause=f"must begin with the header {','.join(header)}")
    return ((row[0], row[1:]) for row in rows[1:])
