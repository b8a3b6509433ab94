"""Matching of the classes of data to the classes of a bundle, by name or by number."""

from collections.abc import Sequence

import numpy as np

from vitrail.core.errors import UsageError


def match_labels(
    model_labels: Sequence[str] | None, classes: int, data_labels: Sequence[str]
) -> tuple[np.ndarray, str]:
    """Return the model's class index for each class of the data, and how they were matched.

    Classes are matched by name. If the model has no names, or if all names in the data are integers below the number of
    classes and not names of the model, they are matched as indices. Raises UsageError if neither is possible.
    """
    indices = {name: index for index, name in enumerate(model_labels or ())}
    if all(name in indices for name in data_labels):
        return np.array([indices[name] for name in data_labels]), "by name"
    if all(name.isascii() and name.isdigit() and len(name) < 20 and int(name) < classes for name in data_labels):
        return np.array([int(name) for name in data_labels]), "as class numbers"
    unmatched = [name for name in data_labels if name not in indices]
    if model_labels is None:
        raise UsageError(
            f"Classes of the data must be numbers below {classes}, as the bundle has no names, got {unmatched[0]!r}."
        )
    raise UsageError(
        f"Classes of the data must be among the bundle's {classes} ({', '.join(map(repr, list(indices)[:5]))}"
        f"{', ...' if len(indices) > 5 else ''}), got {', '.join(map(repr, unmatched[:3]))}"
        f"{', ...' if len(unmatched) > 3 else ''}."
    )


def note_match(model_labels: Sequence[str] | None, classes: int, data_labels: Sequence[str]) -> list[str]:
    """Return a note if classes with different names are matched by index, otherwise an empty list."""
    class_indices, matching = match_labels(model_labels, classes, data_labels)
    if matching != "as class numbers" or model_labels is None:
        return []
    return [
        f"names of classes differ, so they are matched by index: {data_labels[0]!r} of the data is"
        f" {model_labels[class_indices[0]]!r} of the bundle (to match by name, give the data the bundle's names)"
    ]
