"""Draw docs/reach/*.png: for one small model of each family, which pixels reach the centre, before any training.

.venv/bin/python docs/reach.py          (a few seconds; the same images every time)
"""

from pathlib import Path

import torch

from vitrail.analysis.receptive_field import reach
from vitrail.bundles.pretrained import create
from vitrail.reports.receptive_field_figure import reach_figure

MODELS = {
    "ViT-Nano/7": {},
    "Hybrid-Nano": {},
    "ResNet-Nano": {},
    "Mixer-Nano/7": {},
    "LSTM-Nano/7": {},
    "iGPT-Micro": {"causal": True},
    "MLP-Nano": {},
}

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
