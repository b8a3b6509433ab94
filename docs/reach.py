"""Draw docs/reach/*.svg: receptive fields of an untrained small model of each family, in English and Korean.

.venv/bin/python docs/reach.py          (a few seconds; deterministic)
"""

import base64
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitrail.analysis.receptive_field import reach
from vitrail.bundles.pretrained import create
from vitrail.reports.colours import DECADES, reach_colours

MODELS = {
    "ViT-Nano/7": {},
    "Hybrid-Nano": {},
    "ResNet-Nano": {},
    "Mixer-Nano/7": {},
    "LSTM-Nano/7": {},
    "iGPT-Micro": {"causal": True},
    "MLP-Nano": {},
}

MESSAGES = {
    "title": ("{name}: which pixels reach the centre?", "{name}: 어떤 픽셀이 가운데에 영향을 줄까요?"),
    "causal": (" (causal)", " (인과적)"),
    "layer": ("after layer {layer}", "층 {layer} 뒤"),
    "share": ("{share:.0%} of pixels reach it", "픽셀의 {share:.0%}가 영향을 줌"),
    "scale": (
        "bright: 1, dark: 1e-{decades} of the strongest; white: exactly 0",
        "밝음: 1, 어두움: 가장 강한 값의 1e-{decades}, 흰색: 정확히 0",
    ),
}
"""Texts of the figures in English and Korean."""

SUFFIXES = ("svg", "ko.svg")
TILE, GAP, TOP = 168, 14, 52
STYLE = """
text { fill: #1c2127; font: 14px system-ui, sans-serif; } .soft { fill: #5b6470; font-size: 12px; }
image { image-rendering: pixelated; } rect { fill: none; stroke: #98a2b0; }
@media (prefers-color-scheme: dark) { text { fill: #e8eaed; } .soft { fill: #98a2b0; } }
"""


def reach_figure(name: str, maps: dict[int, np.ndarray], *, is_causal: bool, language: int) -> str:
    """Return influence maps side by side as SVG, one per layer, on a logarithmic scale.

    Pixels without influence are white. `language` is the index of the text in `MESSAGES`.
    """

    def message(key: str, **fields: object) -> str:
        return MESSAGES[key][language].format(**fields)

    title = message("title", name=name + (message("causal") if is_causal else ""))
    parts = [f'<text x="{GAP}" y="22">{title}</text>']
    for column, (layer, influence) in enumerate(maps.items()):
        x = GAP + column * (TILE + GAP)
        buffer = io.BytesIO()
        Image.fromarray(reach_colours(influence)).save(buffer, "PNG", optimize=True)
        data = base64.b64encode(buffer.getvalue()).decode()
        box = f'x="{x}" y="{TOP}" width="{TILE}" height="{TILE}"'
        share = message("share", share=(influence > 0).mean())
        parts += [
            f'<image {box} href="data:image/png;base64,{data}"/><rect {box}/>',
            f'<text class="soft" x="{x}" y="{TOP - 7}">{message("layer", layer=layer)}</text>',
            f'<text class="soft" x="{x}" y="{TOP + TILE + 16}">{share}</text>',
        ]
    parts.append(f'<text class="soft" x="{GAP}" y="{TOP + TILE + 36}">{message("scale", decades=DECADES)}</text>')
    width, height = max(GAP + len(maps) * (TILE + GAP), 380), TOP + TILE + 46
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    for name, changes in MODELS.items():
        torch.manual_seed(0)
        model = create(name, **changes)
        images = torch.randn(16, 1, *model.config.resolution)
        layers = sorted({0, model.config.depth // 2, model.config.depth - 1})
        maps = {layer: reach(model, images, layer) for layer in layers}
        for language, suffix in enumerate(SUFFIXES):
            figure = reach_figure(name, maps, is_causal=bool(changes), language=language)
            (Path(__file__).parent / "reach" / f"{model.config.family}.{suffix}").write_text(figure, encoding="utf-8")
