"""Attribution maps: the patches that a prediction comes from, by several methods."""

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
    """Rollout, the last layer's attention and relevance, each over the image with its entropy."""

    words = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.maps: dict[int, dict[str, np.ndarray]] = {}
        """Of each shown image, by method, (h, w), non-negative."""

    def why_absent(self) -> str | None:
        return self.context.why_no_attention()

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        found = {method: values[0] for method, values in maps(self.context.model, image_CHW[None], activations).items()}
        if self.context.why_no_prediction() is not None:
            found.pop("relevance", None)
        self.maps[number] = found

    def image_numbers(self, number: int) -> dict[str, Any]:
        found = self.maps.get(number, {})
        return {"maps": {name: {"entropy": entropy(one), "values": rounded(one)} for name, one in found.items()}}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for name, values in self.arrays().items():
            yield name, heat(values)

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            _file_of(number, method): values for number, found in self.maps.items() for method, values in found.items()
        }

    def html(self, figures: Mapping[str, Figure]) -> str:
        parts = []
        for number, found in self.maps.items():
            tiles = "".join(
                figure(
                    self.word(f"map-{method}"),
                    self._entropy(values),
                    self.overlay(number, figures[_file_of(number, method)]),
                )
                for method, values in found.items()
            )
            parts.append(self.each(number, f'<div class="tiles">{tiles}</div>'))
        return self.say("maps") + "".join(parts) if parts else ""

    def _entropy(self, values: np.ndarray) -> Html:
        found = entropy(values)
        return self.word("empty") if found is None else self.word("entropy", value=f"{found:.2f}")


def _file_of(number: int, method: str) -> str:
    return f"picture-{number}-{method.replace(' ', '-')}"
