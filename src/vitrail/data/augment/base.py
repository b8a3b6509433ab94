"""Base classes of augmentations of training images."""

import dataclasses
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, Settings

if TYPE_CHECKING:
    import numpy as np

    from vitrail.core.rng import Stream
    from vitrail.data.augment.mixing import Mixture
    from vitrail.data.preprocess import Preprocess


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation(Settings):
    """Base class of an augmentation of training images. Its fields are its settings; the defaults change nothing.

    Random numbers come from the stream of the samples, under names of the augmentation (`stream.uniform("flip")`). So
    they are a pure function of (seed, epoch, sample), and a photo alone gets the same pixels as in a batch. Renaming a
    stream or reordering draws changes every training run.
    """

    title: ClassVar[str] = "Augmentation"

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether the settings change anything. Otherwise no other method is called."""

    @property
    def mixes(self) -> bool:
        """Whether the augmentation mixes images in pairs when it is active (see `mixture`)."""
        return False

    def check_channels(self, channels: int) -> None:
        """Raise UsageError if the augmentation does not support images of this number of channels."""

    def boxes(self, heights: "np.ndarray", widths: "np.ndarray", stream: "Stream") -> "np.ndarray | None":
        """Return the box (top, left, height, width) to crop from each decoded image, int64 (B, 4).

        The box is resized to the resolution of the model. With None, images are preprocessed as in evaluation.
        """
        return None

    def apply(self, images: "np.ndarray", stream: "Stream", preprocess: "Preprocess") -> "np.ndarray":
        """Return augmented images. `images` have the resolution of the model, uint8 (B, height, width, C).

        An implementation must not write to `images`.
        """
        return images

    def mixture(self, stream: "Stream", size: tuple[int, int], alone: "np.ndarray | None") -> "Mixture":
        """Return how to mix the normalised images of a batch in pairs. It is called only if the augmentation `mixes`.

        `alone` marks samples that must not be mixed.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FillingAugmentation(Augmentation):
    """Base class of an augmentation that uncovers pixels, with the setting of their value."""

    fill: Annotated[int, Bounds(0, 255)] = 0
    """Value of padded pixels and of pixels that rotation and shear uncover."""


def require_channels(setting: str, operation: str, supported: tuple[int, ...] | None, channels: int) -> None:
    """Raise UsageError if an operation does not support this number of channels; `supported` is None for any number."""
    if supported is not None and channels not in supported:
        raise UsageError(
            f"Augmentation by {operation} must have images of {' or '.join(map(str, supported))} channels, got"
            f" {channels}. Set augment.{setting} to 0."
        )
