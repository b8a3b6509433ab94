"""Panel `positions`: row and column structure of position embeddings, as in Figure 7 (centre) of arXiv 2010.11929."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vitrail.analysis.position_structure import PositionStructure, position_table, similarity, structure
from vitrail.core.message_files import load_messages
from vitrail.reports.colours import sequential
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, wide_image
from vitrail.reports.page_kit import figure, headline_numbers


class PositionsPanel(Panel):
    """Cosine similarities of the position embeddings of all patches, and how well they encode rows and columns."""

    messages = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.table = None if context.layout is None else position_table(context.model)
        self.similarity: np.ndarray | None = None
        """Cosine similarities (N, N)."""
        self.structure: PositionStructure | None = None

    def why_absent(self) -> str | None:
        if self.table is not None:
            return None
        return "one-patch" if self.context.why_no_attention() == "one-patch" else "no-table"

    def finish(self) -> None:
        if self.table is not None:
            self.similarity = similarity(self.table)
            self.structure = structure(self.table, self.context.model.config.grid)

    def numbers(self) -> dict[str, Any]:
        return {"positions": None if self.structure is None else self.structure._asdict()}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        if self.similarity is not None:
            yield "positions", similarity_tiles(self.similarity, self.context.model.config.grid)

    def arrays(self) -> dict[str, np.ndarray]:
        return {} if self.similarity is None else {"positions": self.similarity}

    def html(self, figures: Mapping[str, Figure]) -> str:
        encoding = self.structure
        if encoding is None:
            return ""
        captions = [
            (self.t("additive", chance=f"{encoding.additive_by_chance:.2f}"), f"{encoding.additive:.2f}"),
            (self.t("row-r2"), f"{encoding.row:.2f}"),
            (self.t("column-r2"), f"{encoding.column:.2f}"),
        ]
        walkthrough = self.context.walkthrough
        intro = self.paragraph("tiles") + self.paragraph(f"position-{walkthrough.position_origin}")
        if walkthrough.position_tables > 1:
            intro += self.paragraph("first-layer")
        tiles = wide_image(figures["positions"], "position embeddings")
        return intro + headline_numbers(captions) + figure(self.t("similarity"), self.t("similarity-note"), tiles)


def similarity_tiles(table_NN: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Draw a tile for each patch, at its position in the grid: its similarity to all patches.

    `table_NN` are cosine similarities. Return pixels, uint8 (h, w, 3).
    """
    rows, columns = grid
    tiles = sequential((table_NN.reshape(rows, columns, rows, columns) + 1) / 2)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1), (0, 0)), constant_values=255)
    return tiles.transpose(0, 2, 1, 3, 4).reshape(rows * (rows + 1), columns * (columns + 1), 3)
