"""A panel of `vitrail inspect`: how bright each grey image is."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from vitrail.core.message_files import Messages
from vitrail.models.activations import Activations
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel
from vitrail.reports.page_kit import figure


class Brightness(Panel):
    """The mean grey of the shown images, from 0 to 255."""

    messages: ClassVar[Messages] = {
        "title": {"en": "Brightness", "ko": "밝기"},
        "grey": {"en": "mean grey", "ko": "평균 밝기"},
        "colour": {"en": "Images of family {family} are coloured.", "ko": "{family} 계열의 이미지에는 색이 있습니다."},
    }

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.greys: list[float] = []

    def why_absent(self) -> str | None:
        return None if self.context.model.config.channels == 1 else "colour"

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        self.greys.append(float(self.context.pixels(number).mean()))

    def numbers(self) -> dict[str, Any]:
        return {"brightness": self.greys}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        if self.greys:
            line = Line(self.svg_label("grey"), range(len(self.greys)), self.greys, 0)
            yield "brightness", line_chart([line], "image", self.svg_label("grey"), dots=True)

    def html(self, figures: Mapping[str, Figure]) -> str:
        return figure(self.t("grey"), "0 - 255", str(figures["brightness"])) if self.greys else ""
