"""The colours of model families, and their names in figures."""

import re
from collections.abc import Sequence

from vitrail.reports.translations import with_korean

COLOURS = {"vit": 0, "resnet": 1, "hybrid": 2, "mixer": 3, "lstm": 4, "mlp": 5, "igpt": 6}
"""Every family keeps its colour in all figures; others share the last one."""

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
    """The colour of each of several models by its family; if a family is there twice, all have others. From the ninth
    on they are the same colours, for dashed lines."""
    are_distinct = len(set(families)) == len(families)
    return [COLOURS.get(family, 7) if are_distinct else at for at, family in enumerate(families)]


def family_label(name: str) -> str:
    """A family, or a name that begins with one ("vit 0"), as the label of a line or a row in both languages."""
    family = re.split(r"\W", name, maxsplit=1)[0]
    return with_korean(name, {name: _KOREAN.get(family, family) + name.removeprefix(family)}, "tspan")
