"""Settings of augmentation; `data.augment.pipeline` applies them."""

import dataclasses
from typing import ClassVar, Literal

from vitrail.core.errors import UsageError
from vitrail.core.settings import Settings, check_share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augment(Settings):
    """Crop, flip, RandAugment, colour jitter, erasing; then Mixup or CutMix. The defaults change nothing."""

    title: ClassVar[str] = "Augmentation"

    crop: Literal["none", "pad", "resized"] = "none"
    """none: as in evaluation. pad: pad the image, then crop a random window. resized: RandomResizedCrop."""
    padding: int = 4
    """Padding of crop = pad, in pixels."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the area that crop = resized keeps."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width over height of crop = resized."""
    flip: Literal["none", "random", "alternate"] = "none"
    """Flip left-right at random, or each image in every other epoch (starting at random)."""
    randaugment: int = 0
    """Number of random operations (RandAugment, arXiv 1909.13719)."""
    operations: Literal["torchvision", "google"] = "torchvision"
    """Operations and strengths: those of torchvision, or of Google's code (used by AugReg), where some operations get
    weaker with a higher magnitude."""
    magnitude: int = 9
    """Strength of RandAugment, up to 30 on torchvision's scale; 10 is usual on Google's."""
    brightness: float = 0.0
    """Colour jitter: factors from 1 - x to 1 + x."""
    contrast: float = 0.0
    """Colour jitter: factors from 1 - x to 1 + x."""
    saturation: float = 0.0
    """Colour jitter: factors from 1 - x to 1 + x."""
    hue: float = 0.0
    """Colour jitter: rotation of the hue from -x to x, where 0.5 is half a circle."""
    erasing: float = 0.0
    """Probability of erasing a random box with the mean colour (arXiv 1708.04896)."""
    mixup: float = 0.0
    """Alpha of Mixup (arXiv 1710.09412), up to 1; 0 is off."""
    cutmix: float = 0.0
    """Alpha of CutMix (arXiv 1905.04899), up to 1; with Mixup, each image gets one of the two at random."""
    fill: int = 0
    """Value of padded pixels and of those that rotation and shear uncover."""

    def __post_init__(self) -> None:
        self._check_choices(("crop", "flip", "operations"))
        self._set_integer("padding", low=0, high=1024)
        self._set_integer("randaugment", low=0, high=16)
        self._set_integer("magnitude", low=0, high=30)
        self._set_integer("fill", low=0, high=255)
        for name, high in (("brightness", 1), ("contrast", 1), ("saturation", 1), ("hue", 0.5), ("erasing", 1)):
            check_share(name, getattr(self, name), high)
        for name in ("mixup", "cutmix"):
            check_share(name, getattr(self, name), 1)
            if 0 < getattr(self, name) < 0.01:
                raise UsageError(f"{name.capitalize()} must be 0 or from 0.01 to 1, got {getattr(self, name)!r}.")
        for name, high in (("scale", 1.0), ("ratio", 100.0)):
            ends = getattr(self, name)
            is_pair = (
                isinstance(ends, list | tuple) and len(ends) == 2 and all(isinstance(e, int | float) for e in ends)
            )
            if not is_pair or not 0 < ends[0] <= ends[1] <= high:
                raise UsageError(f"{name.capitalize()} must be two rising numbers above 0, to {high:g}, got {ends!r}.")
            object.__setattr__(self, name, tuple(ends))

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return self.mixup > 0 or self.cutmix > 0
