"""Colour maps of the figures."""

import numpy as np

DECADES = 4
"""Powers of ten on the colour scale of `reach_colours`."""
PAPER, LEAD, INK = (250, 250, 248), (120, 124, 130), (40, 42, 46)

# From blue over white to orange: a map that keeps its sign for colour-blind readers.
_SIGNED = np.array([[33, 102, 172], [146, 197, 222], [247, 247, 247], [253, 184, 99], [179, 88, 6]])
# Seven points of cividis, a map that keeps its order for colour-blind readers and in grey print.
_CIVIDIS = np.array(
    [[0, 34, 78], [35, 62, 108], [87, 93, 109], [124, 123, 120], [166, 155, 117], [211, 193, 100], [254, 232, 56]]
)


def sequential(shares: np.ndarray) -> np.ndarray:
    """Values from 0 (dark) to 1 (bright) as uint8 colours, (..., 3)."""
    return _between(shares, _CIVIDIS)


def signed(values: np.ndarray) -> np.ndarray:
    """Values from the most negative (blue) over 0 (white) to the most positive (orange), both on the same scale."""
    return _between(values / max(float(np.abs(values).max()), 1e-12) / 2 + 0.5, _SIGNED)


def _between(shares: np.ndarray, stops: np.ndarray) -> np.ndarray:
    places = np.clip(shares, 0, 1) * (len(stops) - 1)
    channels = [np.interp(places, np.arange(len(stops)), stops[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def heat(values: np.ndarray) -> np.ndarray:
    """A map (h, w) in colours, scaled from 0 to its maximum."""
    return sequential(values / max(float(values.max()), 1e-12))


def reach_colours(influence: np.ndarray) -> np.ndarray:
    """Colours on a logarithmic scale relative to the maximum; exact zeros are white."""
    with np.errstate(divide="ignore"):
        colours = sequential(1 + np.log10(influence) / DECADES)
    colours[influence == 0] = 255
    return colours
