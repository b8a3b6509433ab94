"""Panel `answers`: the images, cropped for the model, and the predicted classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, rgb
from vitrail.reports.page_kit import figure, table

_TOP_K = 5


class PredictionsPanel(Panel):
    """Each page image with its most probable classes, or with the reason why the model predicts none."""

    messages = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.predictions: dict[int, list[dict[str, Any]]] = {}
        """The top classes of each page image, as `label` and `score`."""

    @property
    def notice(self) -> str:
        return "notice" if self.why_absent() is None else ""

    def why_absent(self) -> str | None:
        return self.context.why_no_prediction()

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        best = self.context.bundle.answer.probabilities(activations.logits[0].float()).sort(descending=True)
        labels = self.context.labels
        top = zip(best.values[:_TOP_K].tolist(), best.indices[:_TOP_K].tolist(), strict=True)
        self.predictions[number] = [{"label": labels[index], "score": score} for score, index in top]

    def image_numbers(self, number: int) -> dict[str, Any]:
        return {"predictions": self.predictions.get(number, [])}

    def html(self, figures: Mapping[str, Figure]) -> str:
        numbers = range(len(self.context.page_images))
        chooser = "".join(self._thumbnail(number) for number in numbers) if len(numbers) > 1 else ""
        return (f'<div class="thumbs">{chooser}</div>' if chooser else "") + "".join(map(self._image, numbers))

    def _thumbnail(self, number: int) -> str:
        name = escape(Path(self.context.image_names[number]).name)
        image = self.photo(number)
        return f'<button type="button" class="thumb" data-choose="{number}">{image}<span>{name}</span></button>'

    def _image(self, number: int) -> str:
        """Return the image as the model sees it, beside its most probable classes."""
        if (reason := self.why_absent()) is not None:
            prediction = self.paragraph(reason, **self.message_fields())
        else:
            rows = [(row["label"], f"{row['score']:.3f}") for row in self.predictions[number]]
            prediction = table((self.t("class"), self.t("probability")), rows, numeric=frozenset({1}))
        pixels = self.context.pixels(number)
        note = self.t("seen", size=" x ".join(map(str, pixels.shape[1::-1])))
        if pixels.shape[2] not in (1, 3):
            note = Html(note + self.t("channels", count=pixels.shape[2], shown=rgb(pixels).shape[2]))
        content = f'<div class="beside">{self.photo(number)}<div>{prediction}</div></div>'
        return self.block_for_image(number, figure(self.context.image_names[number], note, content))
