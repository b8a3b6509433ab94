"""Draw attention maps of all layers and heads as one image."""

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.reports.colours import INK, LEAD, PAPER, heat

_TILE, _GAP, _MARGIN, _LINE = 96, 10, 84, 18
_ASPECTS = 0.25, 4.0  # limits of the height of a tile relative to its width, so that tiles of long images stay visible


def attention_figure(
    pixels_HWC: np.ndarray,
    maps: Mapping[int, np.ndarray],
    tokens: int,
    title: str,
    numbers: Sequence[int] | None = None,
) -> Image.Image:
    """Draw the attention maps (heads, h, w) of each layer as a row of tiles, after the image.

    `maps` is keyed by layer. `numbers` are the numbers of the heads (default: 0, 1, ...). Each tile is scaled from 0
    (dark) to its own maximum (bright). The maximum is printed below, as a multiple of uniform attention to all
    `tokens`, so that readers do not mistake a flat map for a sharp one.
    """
    heads = len(next(iter(maps.values())))
    top = 2 * _LINE + 20
    aspect = min(max(pixels_HWC.shape[0] / pixels_HWC.shape[1], _ASPECTS[0]), _ASPECTS[1])
    tile_height = round(_TILE * aspect)
    size = _MARGIN + (heads + 1) * (_TILE + _GAP) + _GAP, top + len(maps) * (tile_height + _LINE + _GAP)
    figure = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(figure)
    font, small = ImageFont.load_default(13), ImageFont.load_default(11)
    draw.text((_GAP, 8), title, INK, font)
    for column, name in enumerate(["image", *(f"head {head}" for head in numbers or range(heads))]):
        draw.text((_MARGIN + column * (_TILE + _GAP), 2 * _LINE), name, INK, font)
    image = np.repeat(pixels_HWC, 3, axis=2) if pixels_HWC.shape[2] == 1 else pixels_HWC
    for row, (layer, head_maps) in enumerate(sorted(maps.items())):
        y = top + row * (tile_height + _LINE + _GAP)
        draw.text((_GAP, y + tile_height // 2 - 8), f"layer {layer}", INK, font)
        for column, tile in enumerate([image, *map(heat, head_maps)]):
            x = _MARGIN + column * (_TILE + _GAP)
            figure.paste(Image.fromarray(tile).resize((_TILE, tile_height), Image.Resampling.NEAREST), (x, y))
            draw.rectangle((x - 1, y - 1, x + _TILE, y + tile_height), outline=LEAD)
            if column:
                strongest = head_maps[column - 1].max() * tokens
                draw.text((x, y + tile_height + 2), f"max {strongest:.1f} x uniform", INK, small)
    return figure
