"""Panel `reach`: receptive fields, the pixels that change the state at the centre of a layer."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vitrail.analysis.receptive_field import Reach, reaches
from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.reports.colours import reach_colours
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, wide_image
from vitrail.reports.page_kit import figure

GRADIENT_SHARES = (0.2, 0.5, 0.8)
"""The area of the smallest square that contains each share of the gradient is reported."""
_MAX_IMAGES = 4


class ReceptiveFieldPanel(Panel):
    """Receptive fields of the first, the middle and the last layer, by gradients."""

    messages = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.reach: dict[int, Reach] = {}
        """Receptive field of each measured layer."""

    def why_absent(self) -> str | None:
        return "shifted" if self.context.model.config.predicts == "pixels" else None

    def finish(self) -> None:
        context, depth = self.context, self.context.model.config.depth
        images = context.images[: min(_MAX_IMAGES, len(context.page_images))]
        self.reach = reaches(context.model, images, sorted({0, depth // 2, depth - 1}), draws=4)

    def layer_numbers(self, layer: int) -> dict[str, Any]:
        if layer not in self.reach:
            return {}
        field = self.reach[layer]
        areas = {f"area_{share:g}": area for share, area in field.areas(GRADIENT_SHARES).items()}
        return {"reach": {"pixels": float((field.influence > 0).mean()), **areas}}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for name, influence in self.arrays().items():
            yield name, reach_colours(influence)

    def arrays(self) -> dict[str, np.ndarray]:
        return {f"reach-{layer}": field.influence for layer, field in self.reach.items()}

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.reach:
            return ""
        tiles = []
        for layer, field in self.reach.items():
            note = Html(
                "; ".join(
                    self.t("square", share=f"{share:.0%}", area=f"{area:.1%}")
                    for share, area in field.areas(GRADIENT_SHARES).items()
                )
            )
            image = wide_image(figures[f"reach-{layer}"], f"receptive field of layer {layer}")
            tiles.append(figure(self.t("after", layer=layer), note, image))
        intro = "of-image" if self.context.model.config.grid is None else "of-centre"
        return f'{self.paragraph(intro)}{self.paragraph("squares")}<div class="tiles">{"".join(tiles)}</div>'
