"""Images and thumbnails as data URLs, for pages that contain their images."""

import base64
import io

import numpy as np
from PIL import Image

_SIDE = 144  # pixels; a page shows them at about this size


def thumbnail_data_url(pixels_HWC: np.ndarray) -> str:
    """Return a small image as a data URL: the first three channels as colours, otherwise the first one as grey."""
    pixels_HWC = pixels_HWC[..., :3] if pixels_HWC.shape[2] >= 3 else pixels_HWC[..., :1]
    height, width, channels = pixels_HWC.shape
    if max(height, width) > _SIDE:
        scale = _SIDE / max(height, width)
        size = (max(round(width * scale), 1), max(round(height * scale), 1))
        image = Image.fromarray(pixels_HWC if channels == 3 else pixels_HWC[..., 0])
        pixels_HWC = np.asarray(image.resize(size, Image.Resampling.BILINEAR)).reshape(size[1], size[0], -1)
    return image_data_url(pixels_HWC, photo=True, quality=80)


def image_data_url(pixels_HWC: np.ndarray, *, photo: bool = False, quality: int = 92) -> str:
    """Return pixels as a data URL of a PNG file, or of a JPEG file for a `photo` of more than 64 x 64 pixels."""
    file = io.BytesIO()
    image = Image.fromarray(pixels_HWC[..., 0] if pixels_HWC.shape[2] == 1 else pixels_HWC[..., :3])
    is_jpeg = photo and image.width * image.height > 64 * 64
    if is_jpeg:
        image.save(file, "JPEG", quality=quality, subsampling=0 if quality > 90 else 2)
    else:
        image.save(file, "PNG", optimize=True)
    return f"data:image/{'jpeg' if is_jpeg else 'png'};base64,{base64.b64encode(file.getvalue()).decode()}"
