"""Configurations of models that cut the image into patches."""

import dataclasses
from typing import Annotated

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, Pair
from vitrail.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchedConfig(ModelConfig):
    """A model of patches: their size and number, and the cost of embedding them."""

    patch: Annotated[Pair, Bounds(1, 4096)] = (16, 16)
    """Height and width of a patch in pixels."""
    stride: Annotated[Pair | None, Bounds(1, 4096)] = None
    """Step from patch to patch; none means the patch size, so that patches do not overlap."""
    padding: Annotated[Pair, Bounds(0, 4096)] = (0, 0)
    """Zeros added on each side before the image is cut into patches."""
    width: Annotated[int, Bounds(1, 65_536)] = 768
    """Width D of a token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_grid()

    @property
    def step(self) -> Pair:
        """Pixels from one patch to the next."""
        return self.stride or self.patch

    @property
    def canvas(self) -> tuple[int, int, int]:
        """Channels, height and width of what is cut into patches: the image, or the feature map of a stem."""
        return self.channels, *self.resolution

    @property
    def canvas_scale(self) -> int:
        """Image pixels per canvas pixel, vertically and horizontally."""
        return 1

    @property
    def grid(self) -> Pair:
        """Rows and columns of patches."""
        sides = zip(self.canvas[1:], self.padding, self.patch, self.step, strict=True)
        rows, columns = ((side + 2 * pad - patch) // step + 1 for side, pad, patch, step in sides)
        return rows, columns

    @property
    def patches(self) -> int:
        """Number N of patches."""
        return self.grid[0] * self.grid[1]

    @property
    def _embed_parameters(self) -> int:
        return self.canvas[0] * self.patch[0] * self.patch[1] * self.width + self.width

    @property
    def _embed_macs(self) -> int:
        return self.patches * self.canvas[0] * self.patch[0] * self.patch[1] * self.width

    def _check_grid(self) -> None:
        # Also a limit: without it, some settings of a few bytes would ask for millions of patches.
        if any(pad >= patch for pad, patch in zip(self.padding, self.patch, strict=True)):
            raise UsageError(
                f"Padding must be smaller than the patch {self.patch}, got {self.padding}: some patches would hold"
                " nothing of the image."
            )
        scale = self.canvas_scale
        for side, given, size, pad, patch, step in zip(
            ("height", "width"), self.resolution, self.canvas[1:], self.padding, self.patch, self.step, strict=True
        ):
            got = f"got {side} {given}" + (f" (a feature map of {size})" if scale > 1 else "")
            if size + 2 * pad < patch:
                raise UsageError(
                    f"Resolution must be at least one patch, {got} with patch {patch}."
                    " Choose a larger resolution or a smaller patch."
                )
            if (size + 2 * pad - patch) % step:
                lower = size - (size + 2 * pad - patch) % step
                is_plain = self.stride is None and not pad
                kind = f"patch {patch}" if is_plain else f"patch {patch}, stride {step}, padding {pad}"
                raise UsageError(
                    f"Resolution must divide into whole patches, {got} with {kind}."
                    f" Use {f'{scale * lower} or ' if lower > 0 else ''}{scale * (lower + step)}."
                )
