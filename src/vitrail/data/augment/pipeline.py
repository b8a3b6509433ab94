"""Augmentation of training images, as a pure function of (seed, epoch, sample).

Random numbers are computed for a batch at once and do not depend on the other images of the batch. `augment` works on
decoded photos one by one, or on many small images in memory, with the same pixels as a result. `mix` is applied
last, to normalised images.
"""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.core.rng import Stream
from vitrail.data.augment.config import Augment
from vitrail.data.augment.mixing import Mixture
from vitrail.data.preprocess import Preprocess

Photos = Sequence[Image.Image | np.ndarray] | np.ndarray
"""Decoded images of any sizes (see `Preprocess.read`), or an array (B, H, W, C) of them."""


def augment(images: Photos, stream: Stream, settings: Augment, preprocess: Preprocess) -> np.ndarray:
    """Augment decoded images. Return pixels of the model's resolution, uint8 (B, height, width, C)."""
    pixels = _crop_all(images, stream, settings, preprocess)
    for augmentation in settings.active:
        pixels = augmentation.apply(pixels, stream, preprocess)
    return np.ascontiguousarray(pixels)


def _crop_all(images: Photos, stream: Stream, settings: Augment, preprocess: Preprocess) -> np.ndarray:
    """Crop images to the model's resolution: random boxes if an augmentation draws them, otherwise as in evaluation."""
    heights, widths = _image_sizes(images)
    for augmentation in settings.active:
        boxes = augmentation.boxes(heights, widths, stream)
        if boxes is not None:
            crops = zip(images, boxes.tolist(), strict=True)
            return np.stack([preprocess.crop_box(image, tuple(box)) for image, box in crops])
    if isinstance(images, np.ndarray) and preprocess.leaves_unchanged(*images.shape[1:]):
        return images
    return np.stack([preprocess.crop(image) for image in images])


def _image_sizes(images: Photos) -> np.ndarray:
    """Return the heights and widths of images, (2, B)."""
    if isinstance(images, np.ndarray):
        return np.tile(images.shape[1:3], (len(images), 1)).T
    sizes = [(image.height, image.width) if isinstance(image, Image.Image) else image.shape[:2] for image in images]
    return np.array(sizes).T


def mix(images_BCHW: Tensor, mixture: Mixture) -> Tensor:
    """Return normalised images mixed in pairs by Mixup or CutMix, as `mixture` states."""
    device = images_BCHW.device
    partners = images_BCHW[torch.from_numpy(mixture.partner).to(device)]
    is_cut = mixture.boxes[:, 2] * mixture.boxes[:, 3] > 0
    share = torch.from_numpy(np.where(is_cut, 1.0, mixture.share)).to(device, images_BCHW.dtype)[:, None, None, None]
    mixed = images_BCHW * share + partners * (1 - share)
    if not is_cut.any():
        return mixed
    top, left, tall, wide = torch.from_numpy(mixture.boxes).to(device).T[..., None, None, None]
    rows = torch.arange(images_BCHW.shape[2], device=device)[None, None, :, None]
    columns = torch.arange(images_BCHW.shape[3], device=device)[None, None, None, :]
    inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    return torch.where(inside, partners, mixed)
