"""Panel `filters`: filters of the patch embedding, as in Figure 7 (left) of arXiv 2010.11929."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vitrail.analysis.position_structure import filters
from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, wide_image
from vitrail.reports.page_kit import figure


class FiltersPanel(Panel):
    """Principal components of the kernels that project patches of pixels."""

    messages = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.components = filters(context.model)
        """Components (count, P, P, C) from 0 to 1, and their shares of the variance. None without patches."""

    def why_absent(self) -> str | None:
        return "no-patches" if self.components is None else None

    def numbers(self) -> dict[str, Any]:
        if self.components is None:
            return {"filters": None}
        return {"filters": {"variance": [float(share) for share in self.components[1]]}}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        if self.components is not None:
            yield "filters", filter_tiles(self.components[0])

    def arrays(self) -> dict[str, np.ndarray]:
        return {} if self.components is None else {"filters": self.components[0]}

    def html(self, figures: Mapping[str, Figure]) -> str:
        if self.components is None:
            return ""
        components, shares = self.components
        channels = components.shape[3]
        note = self.t("components-note", count=len(components), share=f"{shares.sum():.0%}")
        if channels not in (1, 3):
            note = Html(note + self.t("channels", count=channels, shown=3 if channels > 3 else 1))
        tiles = wide_image(figures["filters"], "patch embedding")
        return self.paragraph("filters") + figure(self.t("components"), note, tiles)


def filter_tiles(filters: np.ndarray, columns: int = 7) -> np.ndarray:
    """Draw filters (count, P, P, C) side by side, in their first three channels (or their first).

    Return pixels, uint8 (h, w, 3).
    """
    coloured = filters[..., :3] if filters.shape[3] >= 3 else np.repeat(filters[..., :1], 3, axis=3)
    count, height, width, _ = coloured.shape
    rows = -(-count // columns)
    blank = np.ones((rows * columns - count, height, width, 3))
    tiles = np.concatenate([coloured, blank]).reshape(rows, columns, height, width, 3)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1), (0, 0)), constant_values=1.0)
    mosaic = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * (height + 1), columns * (width + 1), 3)
    return (255 * mosaic).round().astype(np.uint8)
