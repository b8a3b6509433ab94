"""Preprocessing of images for a model. It is stored in the bundle and used by every command.

`Preprocess` equals timm's evaluation transform bit for bit, because published scores depend on it.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from PIL import Image

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.settings import Bounds, Pair, Settings
from vitrail.data.decode import open_image, to_channels

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

ImageLike = str | Path | bytes | Image.Image | np.ndarray

_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}

# Above this number of pixels, only the part under the crop is resized. Otherwise a very long image could fill memory.
_MAX_RESIZED = 32_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocess(Settings):
    """Apply the EXIF orientation, resize, crop the centre, scale to 0..1, subtract `mean`, divide by `std`.

    Images are paths, Pillow images or arrays (height, width, channels) of bytes; the result is a batch for the model.

        >>> preprocess = vitrail.Preprocess(resolution=(96, 96))
        >>> preprocess([np.zeros((120, 160, 3), np.uint8)]).shape
        torch.Size([1, 3, 96, 96])
    """

    title: ClassVar[str] = "Preprocessing"

    resolution: Annotated[Pair, Bounds(1, 65_536)] = (224, 224)
    """Input height and width of the model."""
    resize: Literal["shorter", "squash", "pad"] = "shorter"
    """shorter: keep the aspect ratio, fit the shorter side, crop the rest. squash: stretch both sides. pad: keep the
    aspect ratio, fit the longer side, fill the rest with the background."""
    crop_fraction: Annotated[float, Bounds(0.01, 1)] = 0.9
    """Share of the resized image that the crop keeps."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Pillow's filter for the resize, with antialiasing."""
    background: Annotated[tuple[int, int, int], Bounds(0, 255)] = (255, 255, 255)
    """Colour (red, green, blue) under transparent pixels and around padded images."""
    jpeg: Literal["exact", "double"] = "exact"
    """Decode JPEG files exactly, or (double) at the smallest scale of at least twice the needed size, which is
    faster."""
    mean: Annotated[tuple[float, ...], Bounds(-1e6, 1e6)] = IMAGENET_MEAN
    """Subtracted from each channel; its length is the number of channels."""
    std: Annotated[tuple[float, ...], Bounds(0, 1e6)] = IMAGENET_STD
    """Divides each channel."""

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            if not isinstance(numbers, list | tuple) or not numbers:
                raise UsageError(f"{name.capitalize()} must be a number for each channel, got {numbers!r}.")
        super().__post_init__()
        if len(self.std) != len(self.mean):
            raise UsageError(f"Mean and std must have equally many numbers, got {self.mean!r} and {self.std!r}.")
        if min(self.std) <= 0:
            raise UsageError(f"Std must be above 0 in each channel, got {self.std!r}.")

    @property
    def background_pixel(self) -> tuple[int, int, int] | int:
        """The background in the model's channels: a colour, or its grey level."""
        return self.background if self.channels == 3 else _grey_level(self.background)

    @property
    def channels(self) -> int:
        """Number of channels: 1 for grey, 3 for colour, otherwise bands of an array."""
        return len(self.mean)

    def __call__(self, images: Iterable[ImageLike]) -> "Tensor":
        """Preprocess images (paths, bytes of files, Pillow images, uint8 arrays) into one batch (B, C, H, W)."""
        from torch import from_numpy  # not at the top: users of arrays need no torch

        if isinstance(images, str | bytes | Path | Image.Image):
            raise UsageError("Images must be a list of images, got a single one. Put it into a list.")
        return self.scale(from_numpy(self.crop_all(images)))

    def read(self, image: ImageLike, *, name: str = "image") -> Image.Image | np.ndarray:
        """Decode an image into the model's channels, upright, without resize and crop.

        The result is a Pillow image, or an array unless the model has 1 or 3 channels. Errors call bytes `name`.
        """
        bands = self._split_bands(image, name)
        return bands[0] if len(bands) == 1 else np.stack([np.asarray(band) for band in bands], axis=2)

    def crop(self, image: ImageLike, *, name: str = "image") -> np.ndarray:
        """Resize and crop an image without normalisation: uint8 (H, W, C). Errors call bytes `name`."""
        return self._stack_bands([self._resize_and_crop(band) for band in self._split_bands(image, name)])

    def crop_all(self, images: Iterable[ImageLike]) -> np.ndarray:
        """Resize and crop every image: uint8 (B, H, W, C). Errors name images without a path by their index."""
        return np.stack([self.crop(image, name=f"image {index}") for index, image in enumerate(images)])

    def crop_box(self, image: ImageLike, box: tuple[int, int, int, int]) -> np.ndarray:
        """Crop a box (top, left, height, width) and resize it to the model's resolution: uint8 (H, W, C)."""
        top, left, box_height, box_width = box
        corners = (left, top, left + box_width, top + box_height)
        height, width = self.resolution
        resample = _FILTERS[self.interpolation]
        return self._stack_bands(
            [band.crop(corners).resize((width, height), resample) for band in self._split_bands(image)]
        )

    def leaves_unchanged(self, height: int, width: int, channels: int) -> bool:
        """Return whether `crop` changes no pixel of an array of this shape."""
        keeps_size = self.resolution == (height, width) and self.resized_size(width, height) == (width, height)
        return keeps_size and channels == self.channels

    def scale(self, pixels_BHWC: "Tensor") -> "Tensor":
        """Normalise cropped images: float32 (B, C, H, W)."""
        scaled_BCHW = pixels_BHWC.movedim(-1, -3).contiguous().float().div_(255)
        mean, std = (scaled_BCHW.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return scaled_BCHW.sub_(mean).div_(std)

    def scale_array(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        """Normalise cropped images without torch; the result equals that of `scale` bit for bit."""
        scaled_BCHW = np.ascontiguousarray(np.moveaxis(pixels_BHWC, -1, -3)).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (self.mean, self.std))
        scaled_BCHW /= np.float32(255)
        scaled_BCHW -= mean
        scaled_BCHW /= std
        return scaled_BCHW

    def resized_size(self, width: int, height: int) -> Pair:
        """Return the width and height after the resize, before the crop.

        As in timm, the shorter side becomes crop size / crop fraction, rounded down; the longer side keeps the aspect
        ratio, rounded down.
        """
        wide, high = (int(side / self.crop_fraction) for side in reversed(self.resolution))
        if self.resize == "squash":
            return wide, high
        width_limits = width * high <= height * wide
        if width_limits == (self.resize == "shorter"):
            return wide, max(int(wide * height / width), 1)
        return max(int(high * width / height), 1), high

    def _stack_bands(self, bands: list[Image.Image]) -> np.ndarray:
        """Join images of the model's resolution along the channels: uint8 (H, W, C)."""
        return np.concatenate([np.asarray(band).reshape(*self.resolution, -1) for band in bands], axis=2)

    def _resize_and_crop(self, image: Image.Image) -> Image.Image:
        """Resize an image and crop its centre to the model's resolution."""
        height, width = self.resolution
        wide, high = self.resized_size(image.width, image.height)
        left, top = round((wide - width) / 2), round((high - height) / 2)
        resample = _FILTERS[self.interpolation]
        if wide * high > _MAX_RESIZED:
            across, down = image.width / wide, image.height / high
            right, bottom = min((left + width) * across, image.width), min((top + height) * down, image.height)
            return image.resize((width, height), resample, box=(left * across, top * down, right, bottom))
        image = image.resize((wide, high), resample)
        if left >= 0 and top >= 0:
            return image.crop((left, top, left + width, top + height))
        canvas = Image.new(image.mode, (width, height), self.background_pixel)
        canvas.paste(image, (-left, -top))
        return canvas

    def _split_bands(self, image: ImageLike, name: str = "image") -> list[Image.Image]:
        """Return one Pillow image of 1 or 3 channels, or one per channel: Pillow has no mode for other numbers."""
        channels = self.channels
        if channels not in (1, 3):
            if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape[2:] != (channels,):
                raise UsageError(f"Image of {channels} bands must be a uint8 array (height, width, {channels}).")
            return [Image.fromarray(np.ascontiguousarray(image[..., band])) for band in range(channels)]
        if isinstance(image, str | Path | bytes):
            opened = open_image(image, self._twice_resized_size if self.jpeg == "double" else None, name=name)
        elif isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or 0 in image.shape or image.shape[2:] not in ((), (1,), (3,), (4,)):
                raise UsageError(
                    f"Array must be uint8 of shape (height, width) or (height, width, 1, 3 or 4), got {image.dtype}"
                    f" of shape {image.shape}."
                )
            opened = Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)
        elif isinstance(image, Image.Image):
            opened = image
        else:
            raise UsageError(f"Image must be a path, a Pillow image or a uint8 array, got {type(image).__name__}.")
        try:
            return [to_channels(opened, channels, self.background)]
        except (OSError, ValueError) as error:
            name = str(image) if isinstance(image, str | Path) else name
            raise CorruptFileError(path=name, cause=f"of mode {opened.mode} cannot be converted ({error})") from None

    def _twice_resized_size(self, width: int, height: int) -> Pair:
        """Return twice the size after the resize, which a JPEG is decoded to at least."""
        wide, high = self.resized_size(width, height)
        return 2 * wide, 2 * high


def _grey_level(colour: tuple[int, int, int]) -> int:
    """Return the grey level of a colour, as in Pillow (ITU-R 601-2)."""
    pixel = Image.new("RGB", (1, 1), colour).convert("L").getpixel((0, 0))
    return int(pixel) if isinstance(pixel, int | float) else 0
