"""The images, cropped for the model, and the predicted classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, rgb
from vitrail.reports.page_kit import figure, table

_TOP = 5  # classes that are listed


class PredictionsPanel(Panel):
    """Each shown image with its most probable classes, or with the reason why the model predicts none."""

    words = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.predictions: dict[int, list[dict[str, Any]]] = {}

    @property
    def notice(self) -> str:
        return "notice" if self.why_absent() is None else ""

    def why_absent(self) -> str | None:
        return self.context.why_no_prediction()

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        best = self.context.bundle.answer.probabilities(activations.logits[0].float()).sort(descending=True)
        labels = self.context.bundle.labels or tuple(map(str, range(len(best.values))))
        top = zip(best.values[:_TOP].tolist(), best.indices[:_TOP].tolist(), strict=True)
        self.predictions[number] = [{"label": labels[index], "score": score} for score, index in top]

    def image_numbers(self, number: int) -> dict[str, Any]:
        return {"predictions": self.predictions.get(number, [])}

    def html(self, figures: Mapping[str, Figure]) -> str:
        numbers = range(len(self.context.shown))
        chooser = "".join(self._thumb(number) for number in numbers) if len(numbers) > 1 else ""
        return (f'<div class="thumbs">{chooser}</div>' if chooser else "") + "".join(map(self._image, numbers))

    def _thumb(self, number: int) -> str:
        name = escape(Path(self.context.names[number]).name)
        image = self.photo(number)
        return f'<button type="button" class="thumb" data-choose="{number}">{image}<span>{name}</span></button>'

    def _image(self, number: int) -> str:
        if (why := self.why_absent()) is not None:
            answer = self.say(why, **self.fields())
        else:
            rows = [(one["label"], f"{one['score']:.3f}") for one in self.predictions[number]]
            answer = table((self.word("class"), self.word("probability")), rows, frozenset({1}))
        pixels = self.context.pixels(number)
        note = self.word("seen", size=" x ".join(map(str, pixels.shape[1::-1])))
        if pixels.shape[2] not in (1, 3):
            note = Html(note + self.word("channels", count=pixels.shape[2], shown=rgb(pixels).shape[2]))
        content = f'<div class="beside">{self.photo(number)}<div>{answer}</div></div>'
        return self.each(number, figure(self.context.names[number], note, content))
