"""Draw docs/reach/*.png: receptive fields of an untrained small model of each family.

.venv/bin/python docs/reach.py          (a few seconds; deterministic)
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from vitrail.analysis.receptive_field import reach
from vitrail.bundles.pretrained import create
from vitrail.reports.colours import DECADES, INK, LEAD, PAPER, reach_colours

MODELS = {
    "ViT-Nano/7": {},
    "Hybrid-Nano": {},
    "ResNet-Nano": {},
    "Mixer-Nano/7": {},
    "LSTM-Nano/7": {},
    "iGPT-Micro": {"causal": True},
    "MLP-Nano": {},
}


def reach_figure(name: str, maps: dict[int, np.ndarray]) -> Image.Image:
    """Draw influence maps side by side, one per layer, on a logarithmic scale. Pixels without influence are white."""
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
    draw.text((gap, top + tile + 24), f"bright 1, dark 1e-{DECADES} of the strongest; white: exactly 0", INK, small)
    return figure


for name, changes in MODELS.items():
    torch.manual_seed(0)
    model = create(name, **changes)
    images = torch.randn(16, 1, *model.config.resolution)
    layers = sorted({0, model.config.depth // 2, model.config.depth - 1})
    figure = reach_figure(
        name + (" (causal)" if changes else ""), {layer: reach(model, images, layer) for layer in layers}
    )
    family = model.config.family
    figure.save(Path(__file__).parent / "reach" / f"{family}.png")
