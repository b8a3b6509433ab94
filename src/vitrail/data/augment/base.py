"""The interface of augmentations."""

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
    """One augmentation. Its fields are its settings; their defaults change nothing.

    Random numbers come from the stream of the samples, under names of its own (`stream.uniform("flip")`). So they are a
    pure function of (seed, epoch, sample), and one photo gets the same pixels as the same photo in a batch. Another
    name or another order of draws changes every training run.
    """

    title: ClassVar[str] = "Augmentation"

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether the settings change anything. Otherwise no other method is called."""

    @property
    def mixes(self) -> bool:
        """Whether it mixes images in pairs when it is active (see `mixture`)."""
        return False

    def check_channels(self, channels: int) -> None:
        """Raise an error if images of this number of channels are not supported."""

    def boxes(self, heights: "np.ndarray", widths: "np.ndarray", stream: "Stream") -> "np.ndarray | None":
        """The box (top, left, height, width) of each decoded image that is resized to the resolution of the model,
        int64 (B, 4). None: the whole image is preprocessed as in evaluation."""
        return None

    def apply(self, images: "np.ndarray", stream: "Stream", preprocess: "Preprocess") -> "np.ndarray":
        """Augment images that have the resolution of the model, uint8 (B, height, width, C). The argument must not be
        written to."""
        return images

    def mixture(self, stream: "Stream", size: tuple[int, int], alone: "np.ndarray | None") -> "Mixture":
        """How the normalised images of a batch are mixed in pairs, if it `mixes`. `alone` marks samples that must not
        be mixed."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FillingAugmentation(Augmentation):
    """An augmentation that uncovers pixels."""

    fill: Annotated[int, Bounds(0, 255)] = 0
    """Value of padded pixels and of those that rotation and shear uncover."""


def require_channels(setting: str, operation: str, supported: tuple[int, ...] | None, channels: int) -> None:
    """Raise an error if an operation does not support this number of channels; `supported` is None for any."""
    if supported is not None and channels not in supported:
        raise UsageError(
            f"Augmentation by {operation} must have images of {' or '.join(map(str, supported))} channels, got"
            f" {channels}. Set augment.{setting} to 0."
        )
