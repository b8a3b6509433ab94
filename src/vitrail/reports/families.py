"""Colours and names of model families in figures."""

import re
from collections.abc import Sequence

from vitrail.reports.translations import with_korean

COLOURS = {"vit": 0, "resnet": 1, "hybrid": 2, "mixer": 3, "lstm": 4, "mlp": 5, "igpt": 6}
"""Index of the palette of each family, the same in all figures. Families of other packages have the colour 7."""

_KOREAN = {
    "vit": "ViT",
    "resnet": "CNN",
    "hybrid": "하이브리드",
    "mixer": "Mixer",
    "lstm": "LSTM",
    "mlp": "MLP",
    "igpt": "iGPT",
}


def family_colours(families: Sequence[str]) -> list[int]:
    """Return the colour of each model of a figure: that of its family, or its position if a family occurs twice.

    Charts repeat the eight colours of the palette from the ninth model on, with dashed lines.
    """
    are_distinct = len(set(families)) == len(families)
    return [COLOURS.get(family, 7) if are_distinct else position for position, family in enumerate(families)]


def family_label(name: str) -> str:
    """Return the label of a family, or of a name that begins with one ("vit 0"), for a chart in both languages."""
    family = re.split(r"\W", name, maxsplit=1)[0]
    return with_korean(name, {name: _KOREAN.get(family, family) + name.removeprefix(family)}, "tspan")
