"""The way from an image to its logits, station by station, as `inspect` shows it. Every family names its own."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from vitrail.core.settings import Pair


class Station(NamedTuple):
    """One station: what is computed, by which equation, and its values for one image.

    Equations are plain text, which `reports.equations` typesets: `z_1 = MLP(LN(z')) + z'`.
    """

    key: str
    """Its name, that of `Activations.steps` if it is recorded there."""
    equation: str
    values: Tensor
    """(N, D) of the places of `grid`, row by row; or (D) of the image as one. May be empty."""
    sentence: str
    """Name of the sentence about it in `inspection/panels/walk.toml`."""
    grid: Pair | None = None
    """Rows and columns of the places."""
    shape: tuple[int, ...] = ()
    """Shape of the whole result, if it is more than `values`, as with [CLS]."""
    space: str = ""
    """Stations of one space have features of the same meaning, so that colours can be compared between them; empty
    for one that stands alone."""
    fields: Mapping[str, Any] = {}
    """What the placeholders of its sentence stand for."""
    shows: Literal["", "image", "patch", "colours", "maps", "states", "reads"] = ""
    """What else its figure has: the image with its grid, the pixels of the followed patch, `values` as colours from -1
    to 1, channels as feature maps, states in the order of reading (`extra`), or what each place reads from the others
    (`extra`)."""
    extra: Tensor | None = None
    """(N, S) states in the order of reading; or (N, N), what each place reads from each."""
    layer: int | None = None
    """Number of the layer whose output this is."""
