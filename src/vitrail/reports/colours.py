"""Colour maps of figures: one sequential and one diverging."""

import numpy as np

DECADES = 4
"""Number of powers of ten on the colour scale of `reach_colours`."""
PAPER, LEAD, INK = (250, 250, 248), (120, 124, 130), (40, 42, 46)
"""Colours of the background, of secondary and of primary text in images."""

# From blue over white to orange. Colour-blind readers can tell negative from positive values.
_DIVERGING = np.array([[33, 102, 172], [146, 197, 222], [247, 247, 247], [253, 184, 99], [179, 88, 6]])
# Seven points of cividis. It is monotonic for colour-blind readers and in grey print.
_CIVIDIS = np.array(
    [[0, 34, 78], [35, 62, 108], [87, 93, 109], [124, 123, 120], [166, 155, 117], [211, 193, 100], [254, 232, 56]]
)


def sequential(shares: np.ndarray) -> np.ndarray:
    """Return uint8 colours (..., 3) of values from 0 (dark) to 1 (bright)."""
    return _interpolate(shares, _CIVIDIS)


def signed(values: np.ndarray) -> np.ndarray:
    """Return uint8 colours (..., 3) of values: negative ones blue, 0 white, positive ones orange, on one scale."""
    return _interpolate(values / max(float(np.abs(values).max()), 1e-12) / 2 + 0.5, _DIVERGING)


def _interpolate(shares: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the colours at shares (0 to 1) of the way through the colour stops (count, 3)."""
    positions = np.clip(shares, 0, 1) * (len(stops) - 1)
    channels = [np.interp(positions, np.arange(len(stops)), stops[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def heat(values: np.ndarray) -> np.ndarray:
    """Return uint8 colours (..., 3) of non-negative values, scaled from 0 to their maximum."""
    return sequential(values / max(float(values.max()), 1e-12))


def reach_colours(influence: np.ndarray) -> np.ndarray:
    """Return uint8 colours (..., 3) of influence, on a logarithmic scale up to 1. Exact zeros are white."""
    with np.errstate(divide="ignore"):
        colours = sequential(1 + np.log10(influence) / DECADES)
    colours[influence == 0] = 255
    return colours
