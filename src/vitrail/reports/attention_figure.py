"""A figure of attention maps."""

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.reports.colours import INK, LEAD, PAPER, heat

_TILE, _GAP, _MARGIN, _LINE = 96, 10, 84, 18
_ASPECTS = 0.25, 4.0  # beyond, a tile is no longer to scale


def attention_figure(
    pixels_HWC: np.ndarray,
    maps: Mapping[int, np.ndarray],
    tokens: int,
    title: str,
    numbers: Sequence[int] | None = None,
) -> Image.Image:
    """Attention maps (heads, h, w) of each layer (rows) and head (columns; `numbers` if not all) beside their image.

    Each tile is scaled from 0 (dark) to its own maximum (bright), which is printed below it as a multiple of uniform
    attention to all `tokens`, so that a flat map is not mistaken for a sharp one.
    """
    heads = len(next(iter(maps.values())))
    top = 2 * _LINE + 20
    aspect = min(max(pixels_HWC.shape[0] / pixels_HWC.shape[1], _ASPECTS[0]), _ASPECTS[1])
    tall = round(_TILE * aspect)
    size = _MARGIN + (heads + 1) * (_TILE + _GAP) + _GAP, top + len(maps) * (tall + _LINE + _GAP)
    figure = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(figure)
    font, small = ImageFont.load_default(13), ImageFont.load_default(11)
    draw.text((_GAP, 8), title, INK, font)
    for column, name in enumerate(["image", *(f"head {head}" for head in numbers or range(heads))]):
        draw.text((_MARGIN + column * (_TILE + _GAP), 2 * _LINE), name, INK, font)
    image = np.repeat(pixels_HWC, 3, axis=2) if pixels_HWC.shape[2] == 1 else pixels_HWC
    for row, (layer, some) in enumerate(sorted(maps.items())):
        down = top + row * (tall + _LINE + _GAP)
        draw.text((_GAP, down + tall // 2 - 8), f"layer {layer}", INK, font)
        for column, tile in enumerate([image, *map(heat, some)]):
            left = _MARGIN + column * (_TILE + _GAP)
            figure.paste(Image.fromarray(tile).resize((_TILE, tall), Image.Resampling.NEAREST), (left, down))
            draw.rectangle((left - 1, down - 1, left + _TILE, down + tall), outline=LEAD)
            if column:
                strongest = some[column - 1].max() * tokens
                draw.text((left, down + tall + 2), f"max {strongest:.1f} x uniform", INK, small)
    return figure
