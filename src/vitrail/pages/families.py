"""The colours of model families."""

from collections.abc import Sequence

COLOURS = {"vit": 0, "resnet": 1, "hybrid": 2, "mixer": 3, "lstm": 4, "mlp": 5, "igpt": 6}
"""Every family keeps its colour in all figures; others share the last one."""


def colours_of(families: Sequence[str]) -> list[int]:
    """The colour of each of several models by its family; if a family is there twice, all have others. From the ninth
    on they are the same colours, for dashed lines."""
    are_distinct = len(set(families)) == len(families)
    return [COLOURS.get(family, 7) if are_distinct else at for at, family in enumerate(families)]
