"""Panel `maps`: attribution maps, which show the patches that a prediction comes from."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.analysis.heads import entropy
from vitrail.analysis.maps import maps
from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.reports.colours import heat
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, rounded
from vitrail.reports.page_kit import figure


class MapsPanel(Panel):
    """Rollout, the last layer's attention and relevance, each shown over the image with its entropy."""

    messages = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.maps: dict[int, dict[str, np.ndarray]] = {}
        """Maps (h, w) of each page image, by method. Non-negative."""

    def why_absent(self) -> str | None:
        return self.context.why_no_attention()

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        batch = maps(self.context.model, image_CHW[None], activations)
        if self.context.why_no_prediction() is not None:
            batch.pop("relevance", None)
        self.maps[number] = {method: maps_1hw[0] for method, maps_1hw in batch.items()}

    def image_numbers(self, number: int) -> dict[str, Any]:
        by_method = self.maps.get(number, {})
        return {
            "maps": {
                method: {"entropy": entropy(values), "values": rounded(values)} for method, values in by_method.items()
            }
        }

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for name, values in self.arrays().items():
            yield name, heat(values)

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            _figure_name(number, method): values
            for number, by_method in self.maps.items()
            for method, values in by_method.items()
        }

    def html(self, figures: Mapping[str, Figure]) -> str:
        parts = []
        for number, by_method in self.maps.items():
            tiles = "".join(
                figure(
                    self.t(f"map-{method}"),
                    self._entropy(values),
                    self.photo_with_map(number, figures[_figure_name(number, method)]),
                )
                for method, values in by_method.items()
            )
            parts.append(self.block_for_image(number, f'<div class="tiles">{tiles}</div>'))
        return self.paragraph("maps") + "".join(parts) if parts else ""

    def _entropy(self, values: np.ndarray) -> Html:
        spread = entropy(values)
        return self.t("empty") if spread is None else self.t("entropy", value=f"{spread:.2f}")


def _figure_name(number: int, method: str) -> str:
    return f"picture-{number}-{method.replace(' ', '-')}"
