"""Order of names with numbers as people count: 1, 2, 10."""

import re

_DIGITS = re.compile("([0-9]+)")


def natural_key(text: str) -> tuple[tuple[str | tuple[int, str], ...], str]:
    """Return a key that sorts texts by their numbers and words; upper and lower case are equal.

    >>> sorted(["run 10", "Run 2", "run 1"], key=natural_key)
    ['run 1', 'Run 2', 'run 10']
    """
    words = _DIGITS.split(text.casefold())  # texts and digits alternate, so equal positions can be compared
    numbers = ((len(digits), digits) for digits in (word.lstrip("0") for word in words[1::2]))
    parts: list[str | tuple[int, str]] = [*words]
    parts[1::2] = numbers
    return tuple(parts), text
