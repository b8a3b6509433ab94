"""Results that are plain numbers and texts, as `--json` prints them."""

from typing import Any


class Report(dict[str, Any]):
    """A result by the keys that `--json` prints."""

    def to_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return dict(self)


class Rows(list[Any]):
    """A result with a row for each thing that is listed."""

    total: int = 0
    """Number of rows, with those that were passed to a receiver."""

    def to_json(self) -> list[Any]:
        """The document that `--json` prints."""
        return [row.to_json() if hasattr(row, "to_json") else row for row in self]
