"""Images as data URLs, and small versions of images for pages with many of them."""

import base64
import io

import numpy as np
from PIL import Image

_SIDE = 144  # pixels; a page shows them at about this size


def thumbnail_data_url(pixels_HWC: np.ndarray) -> str:
    """Pixels as a data URL of a few kilobytes. Of other channels than colours, the first is shown."""
    shown = pixels_HWC[..., :3] if pixels_HWC.shape[2] >= 3 else pixels_HWC[..., :1]
    height, width = shown.shape[:2]
    if max(height, width) > _SIDE:
        scale = _SIDE / max(height, width)
        size = (max(round(width * scale), 1), max(round(height * scale), 1))
        one = Image.fromarray(shown if shown.shape[2] == 3 else shown[..., 0]).resize(size, Image.Resampling.BILINEAR)
        shown = np.asarray(one).reshape(size[1], size[0], -1)
    return image_data_url(shown, photo=True, quality=80)


def image_data_url(pixels_HWC: np.ndarray, *, photo: bool = False, quality: int = 92) -> str:
    """Pixels as a data URL: a PNG file, or a JPEG of this quality for a large `photo`, which is much smaller."""
    file = io.BytesIO()
    one = pixels_HWC[..., 0] if pixels_HWC.shape[2] == 1 else pixels_HWC[..., :3]
    is_jpeg = photo and one.shape[0] * one.shape[1] > 64 * 64
    if is_jpeg:
        Image.fromarray(one).save(file, "JPEG", quality=quality, subsampling=0 if quality > 90 else 2)
    else:
        Image.fromarray(one).save(file, "PNG", optimize=True)
    return f"data:image/{'jpeg' if is_jpeg else 'png'};base64,{base64.b64encode(file.getvalue()).decode()}"
