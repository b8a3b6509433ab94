"""Results of commands that consist of numbers and texts, as `--json` prints them."""

from typing import Any


class Report(dict[str, Any]):
    """A result as a dict with the keys that `--json` prints."""

    def to_json(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        return dict(self)


class Rows(list[Any]):
    """A result as a list of rows, such as models or images."""

    total: int = 0
    """Number of rows, including those that were passed to a receiver."""

    def to_json(self) -> list[Any]:
        """Return the document that `--json` prints."""
        return [row.to_json() if hasattr(row, "to_json") else row for row in self]
