"""Receptive fields: which pixels change the state at the centre of a layer."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vitrail.analysis.receptive_field import Reach, reaches
from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.reports.colours import reach_colours
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, wide_image
from vitrail.reports.page_kit import figure

HELD = (0.2, 0.5, 0.8)
"""Shares of the gradient; the smallest square that contains each share is reported."""
_IMAGES = 4  # at most, for gradients


class ReceptiveFieldPanel(Panel):
    """Gradients of the first, the middle and the last layer."""

    words = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.reach: dict[int, Reach] = {}
        """Of each probed layer."""

    def why_absent(self) -> str | None:
        return "shifted" if self.context.model.config.predicts == "pixels" else None

    def finish(self) -> None:
        context, depth = self.context, self.context.model.config.depth
        images = context.images[: min(_IMAGES, len(context.shown))]
        self.reach = reaches(context.model, images, sorted({0, depth // 2, depth - 1}), draws=4)

    def layer_numbers(self, layer: int) -> dict[str, Any]:
        if layer not in self.reach:
            return {}
        one = self.reach[layer]
        areas = {f"area_{share:g}": area for share, area in one.areas(HELD).items()}
        return {"reach": {"pixels": float((one.influence > 0).mean()), **areas}}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for name, influence in self.arrays().items():
            yield name, reach_colours(influence)

    def arrays(self) -> dict[str, np.ndarray]:
        return {f"reach-{layer}": one.influence for layer, one in self.reach.items()}

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.reach:
            return ""
        tiles = []
        for layer, one in self.reach.items():
            note = Html(
                "; ".join(
                    self.word("square", share=f"{share:.0%}", area=f"{area:.1%}")
                    for share, area in one.areas(HELD).items()
                )
            )
            shown = wide_image(figures[f"reach-{layer}"], f"receptive field of layer {layer}")
            tiles.append(figure(self.word("after", layer=layer), note, shown))
        intro = "of-image" if self.context.model.config.grid is None else "of-centre"
        return f'{self.say(intro)}{self.say("squares")}<div class="tiles">{"".join(tiles)}</div>'
