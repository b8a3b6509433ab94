"""Where tokens look, as pictures."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.configs.vit import ViTConfig
from vitrail.errors import UsageError
from vitrail.inspection.colours import INK, LEAD, PAPER, sequential
from vitrail.models.base import Seen

_TILE, _GAP, _MARGIN = 96, 10, 84


def class_attention_figure(picture: Image.Image, seen: Seen, config: ViTConfig, subject: str) -> Image.Image:
    """What [CLS] looks at in each layer (rows) and head (columns) that `seen` holds, beside the (first) picture.

    Each tile is scaled from 0 (dark) to its own largest value (bright), which stands under it as a multiple of uniform
    attention: a flat map must not be read as a sharp one.
    """
    if config.pool != "cls":
        raise UsageError(f"Class attention must come from a model with pool cls, got pool {config.pool}.")
    layers = sorted(seen.attention)
    columns = config.heads + 1
    line = 18
    width = _MARGIN + columns * (_TILE + _GAP) + _GAP
    height = 2 * line + 20 + len(layers) * (_TILE + line + _GAP)
    figure = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(figure)
    font, small = ImageFont.load_default(13), ImageFont.load_default(11)
    draw.text((_GAP, 8), f"Where does [CLS] look? {subject}", INK, font)
    titles = ["picture", *(f"head {head + 1}" for head in range(config.heads))]
    for column, title in enumerate(titles):
        draw.text((_MARGIN + column * (_TILE + _GAP), 2 * line), title, INK, font)
    for row, layer in enumerate(layers):
        top = 2 * line + 20 + row * (_TILE + line + _GAP)
        draw.text((_GAP, top + _TILE // 2 - 8), f"layer {layer + 1}", INK, font)
        maps = seen.attention[layer][0, :, 0, config.prefix :].float().cpu().numpy()
        tiles = [picture.convert("RGB"), *(_colour(weights.reshape(config.grid)) for weights in maps)]
        for column, tile in enumerate(tiles):
            left = _MARGIN + column * (_TILE + _GAP)
            figure.paste(tile.resize((_TILE, _TILE), Image.Resampling.NEAREST), (left, top))
            draw.rectangle((left - 1, top - 1, left + _TILE, top + _TILE), outline=LEAD)
            if column:
                strongest = maps[column - 1].max() * config.tokens
                draw.text((left, top + _TILE + 2), f"max {strongest:.1f} x uniform", INK, small)
    return figure


def _colour(values: np.ndarray) -> Image.Image:
    return Image.fromarray(sequential(values / max(float(values.max()), 1e-12)))
