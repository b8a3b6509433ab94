"""Figures of receptive fields."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.reports.colours import INK, LEAD, PAPER, sequential

_DECADES = 4  # of the logarithmic colour scale


def reach_colours(influence: np.ndarray) -> np.ndarray:
    """Colours on a logarithmic scale relative to the maximum; exact zeros are white."""
    with np.errstate(divide="ignore"):
        colours = sequential(1 + np.log10(influence) / _DECADES)
    colours[influence == 0] = 255
    return colours


def reach_figure(name: str, maps: dict[int, np.ndarray]) -> Image.Image:
    """Maps side by side, one per layer, on a logarithmic scale; pixels without influence are white."""
    tile, gap, top = 168, 14, 52
    figure = Image.new("RGB", (gap + len(maps) * (tile + gap), top + tile + 46), PAPER)
    draw = ImageDraw.Draw(figure)
    font, small = ImageFont.load_default(14), ImageFont.load_default(11)
    draw.text((gap, 8), f"{name}: which pixels reach the centre?", INK, font)
    for column, (layer, influence) in enumerate(maps.items()):
        left = gap + column * (tile + gap)
        figure.paste(
            Image.fromarray(reach_colours(influence)).resize((tile, tile), Image.Resampling.NEAREST), (left, top)
        )
        draw.rectangle((left - 1, top - 1, left + tile, top + tile), outline=LEAD)
        draw.text((left, top - 18), f"after layer {layer}", INK, small)
        draw.text((left, top + tile + 4), f"{(influence > 0).mean():.0%} of pixels reach it", INK, small)
    draw.text((gap, top + tile + 24), f"bright 1, dark 1e-{_DECADES} of the strongest; white: exactly 0", INK, small)
    return figure
