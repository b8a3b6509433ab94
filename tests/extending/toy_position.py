"""A kind of position in numbers: one learned row for each diagonal of the grid. No torch here."""

from vitrail.models.config import Table
from vitrail.models.positions.rules import PositionRules


class Diagonal(PositionRules):
    """Patches on one diagonal share a position."""

    model = "toy_position_model:DiagonalTable"

    @property
    def diagonals(self) -> int:
        """Number of diagonals from the top right to the bottom left."""
        return sum(self.config.grid) - 1

    @property
    def parameters(self) -> int:
        return self.tables * self.diagonals * self.config.width

    @property
    def fixed_tables(self) -> dict[str, Table]:
        return {"diagonal": Table((self.config.patches,), "int64")}
