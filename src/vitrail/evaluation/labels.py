"""Matching the classes of a bundle and of data by name."""

from collections.abc import Sequence

import numpy as np

from vitrail.core.errors import UsageError


def match_labels(ours: Sequence[str] | None, classes: int, theirs: Sequence[str]) -> tuple[np.ndarray, str]:
    """The model's index of each class of the data, and how they were matched.

    They are matched by name; or as indices, if the model has no names or if all names in the data are integers below
    the number of classes (and not names of the model).
    """
    known = {name: index for index, name in enumerate(ours or ())}
    if all(name in known for name in theirs):
        return np.array([known[name] for name in theirs]), "by name"
    if all(name.isascii() and name.isdigit() and len(name) < 20 and int(name) < classes for name in theirs):
        return np.array([int(name) for name in theirs]), "as class numbers"
    strange = [name for name in theirs if name not in known]
    if ours is None:
        raise UsageError(
            f"Classes of the data must be numbers below {classes}, as the bundle has no names, got {strange[0]!r}."
        )
    raise UsageError(
        f"Classes of the data must be among the bundle's {classes}, got {', '.join(map(repr, strange[:3]))}"
        f"{' ...' if len(strange) > 3 else ''}; it knows {', '.join(map(repr, list(known)[:5]))}"
        f"{' ...' if len(known) > 5 else ''}."
    )


def note_match(ours: Sequence[str] | None, classes: int, theirs: Sequence[str]) -> list[str]:
    """A note if names that differ are matched by index."""
    place, how = match_labels(ours, classes, theirs)
    if how != "as class numbers" or ours is None:
        return []
    return [
        f"names of classes differ, so they are matched by index: {theirs[0]!r} of the data is {ours[place[0]]!r} of the"
        " bundle (to match by name, give the data the bundle's names)"
    ]
