"""What happens to pixels between a picture and a model: one object, stored in the bundle, used everywhere.

The arithmetic is that of timm's evaluation transform, to the pixel: published scores depend on it.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.images.decode import open_picture
from vitrail.settings import Pair, Settings, check_number

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Picture = str | Path | Image.Image | np.ndarray

_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocess(Settings):
    """Resize the shorter side, crop the centre, scale to 0..1, subtract `mean`, divide by `std`."""

    title: ClassVar[str] = "Preprocessing"

    resolution: Pair = (224, 224)
    """Height and width that the model reads."""
    crop_fraction: float = 0.9
    """Which part of the resized shorter side the crop keeps."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Pillow's filter for the resize."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Subtracted from each channel; there are as many channels as numbers."""
    std: tuple[float, ...] = IMAGENET_STD
    """Divides each channel."""

    def __post_init__(self) -> None:
        self._set_pair("resolution", low=1, high=65_536)
        self._check_choices(("interpolation",))
        if not isinstance(self.crop_fraction, float | int) or not 0 < self.crop_fraction <= 1:
            raise UsageError(f"Crop fraction must be above 0 and at most 1, got {self.crop_fraction!r}.")
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            if not isinstance(numbers, list | tuple) or not numbers:
                raise UsageError(f"{name.capitalize()} must be a number for each channel, got {numbers!r}.")
            object.__setattr__(self, name, tuple(numbers))
            for number in numbers:
                check_number(name, number, low=-1e6, below=1e6)
        if len(self.std) != len(self.mean):
            raise UsageError(f"Mean and std must have equally many numbers, got {self.mean!r} and {self.std!r}.")
        if min(self.std) <= 0:
            raise UsageError(f"Std must be above 0 in each channel, got {self.std!r}.")

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour, otherwise the number of bands."""
        return len(self.mean)

    def __call__(self, pictures: Iterable[Picture]) -> Tensor:
        """Pictures (paths, Pillow images, uint8 arrays) as one batch of tensors (B, C, H, W)."""
        return torch.stack([self.one(picture) for picture in pictures])

    def one(self, picture: Picture) -> Tensor:
        """One picture as a tensor (C, H, W)."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        scaled = (self.crop(picture).astype(np.float32) / 255 - mean) / std
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))

    def crop(self, picture: Picture) -> np.ndarray:
        """The picture as the model's eye gets it, before numbers are scaled: uint8 (H, W, C)."""
        height, width = self.resolution
        bands = []
        for image in _as_images(picture, self.channels):
            image = image.resize(self._resized(image.width, image.height), _FILTERS[self.interpolation])
            left, top = round((image.width - width) / 2), round((image.height - height) / 2)
            bands.append(np.asarray(image.crop((left, top, left + width, top + height))).reshape(height, width, -1))
        return np.concatenate(bands, axis=2)

    def _resized(self, width: int, height: int) -> Pair:
        """Width and height after the resize: both sides at least the crop over its fraction, the aspect kept."""
        wide, high = (int(side / self.crop_fraction) for side in reversed(self.resolution))
        if width * high <= height * wide:  # the width is the side that limits
            return wide, int(wide * height / width)
        return int(high * width / height), high


def _as_images(picture: Picture, channels: int) -> list[Image.Image]:
    """One Pillow image of 1 or 3 channels, or one for each band: Pillow has no mode for other numbers."""
    if channels not in (1, 3):
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (channels,):
            raise UsageError(f"Picture of {channels} bands must be a uint8 array (height, width, {channels}).")
        return [Image.fromarray(np.ascontiguousarray(picture[..., band])) for band in range(channels)]
    if isinstance(picture, str | Path):
        image = open_picture(picture)
    elif isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or 0 in picture.shape or picture.shape[2:] not in ((), (1,), (3,), (4,)):
            raise UsageError(
                f"Array must be uint8 of shape (height, width) or (height, width, 1, 3 or 4), got {picture.dtype} of"
                f" shape {picture.shape}."
            )
        image = Image.fromarray(picture[..., 0] if picture.shape[2:] == (1,) else picture)
    elif isinstance(picture, Image.Image):
        image = picture
    else:
        raise UsageError(f"Picture must be a path, a Pillow image or a uint8 array, got {type(picture).__name__}.")
    return [image.convert("L" if channels == 1 else "RGB")]
