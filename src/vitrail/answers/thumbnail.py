"""Small versions of images for pages with many of them."""

import numpy as np
from PIL import Image

from vitrail.pages.page import data_image

_SIDE = 144  # pixels; a page shows them at about this size


def thumbnail(pixels_HWC: np.ndarray) -> str:
    """Pixels as a data URL of a few kilobytes. Of other channels than colours, the first is shown."""
    shown = pixels_HWC[..., :3] if pixels_HWC.shape[2] >= 3 else pixels_HWC[..., :1]
    height, width = shown.shape[:2]
    if max(height, width) > _SIDE:
        scale = _SIDE / max(height, width)
        size = (max(round(width * scale), 1), max(round(height * scale), 1))
        one = Image.fromarray(shown if shown.shape[2] == 3 else shown[..., 0]).resize(size, Image.Resampling.BILINEAR)
        shown = np.asarray(one).reshape(size[1], size[0], -1)
    return data_image(shown, photo=True, quality=80)
