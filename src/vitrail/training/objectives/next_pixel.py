"""Next-pixel prediction, the objective of iGPT ("Generative Pretraining from Pixels", Chen et al. 2020).

Shapes: B images, N pixels, P colours of the palette, C channels.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.errors import UsageError
from vitrail.models.base import AnyModel
from vitrail.models.palette import nearest_colours, paint
from vitrail.training.objectives.base import Illustration, Objective, Task, at_least_float32


class NextPixel(Objective):
    """Predict the palette colour of each pixel from the earlier pixels."""

    output = "pixels"
    watched_name = "pixels predicted correctly"
    illustrated = 7
    korean: ClassVar[Mapping[str, str]] = {
        "pixels predicted correctly": "맞힌 픽셀의 비율",
        "Completion of the lower half": "아래 절반을 이어 그린 결과",
        "image": "이미지",
        "lower half hidden": "아래 절반을 가린 이미지",
        "completed pixel by pixel, sampled from the predictions": "예측한 분포에서 한 픽셀씩 뽑아 완성한 이미지",
    }

    def __init__(self, model: AnyModel, task: Task) -> None:
        super().__init__(model, task)
        if model.config.predicts != "pixels":
            raise UsageError(
                f"Objective next-pixel must have a model that predicts pixels (iGPT), got one that predicts"
                f" {model.config.predicts}."
            )

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        return self._predict(images_BCHW)[0].mean(1)

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        losses_BN, is_correct_BN = self._predict(images_BCHW)
        return {"loss": losses_BN.mean(1), "accuracy": is_correct_BN.mean(1)}

    def _quantise(self, images_BCHW: Tensor) -> Tensor:
        return nearest_colours(images_BCHW, self.model.get_buffer("palette"))

    def _paint(self, colours_BN: Tensor) -> Tensor:
        return paint(colours_BN, self.model.get_buffer("palette"), self.model.config.resolution)

    def _predict(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each pixel (B, N), and 1 where its colour was predicted correctly (B, N)."""
        logits_BNP = at_least_float32(self.model(images_BCHW))
        targets_BN = self._quantise(images_BCHW)
        losses_BN = F.cross_entropy(logits_BNP.flatten(0, 1), targets_BN.flatten(), reduction="none").view_as(
            targets_BN
        )
        return losses_BN, (logits_BNP.argmax(-1) == targets_BN).float()

    def illustrate(self, images_BCHW: Tensor) -> Illustration:
        quantised_BCHW, hidden_BCHW, completed_BCHW = self.complete(images_BCHW)
        return Illustration(
            "Completion of the lower half",
            (
                ("image", quantised_BCHW),
                ("lower half hidden", hidden_BCHW),
                ("completed pixel by pixel, sampled from the predictions", completed_BCHW),
            ),
        )

    def complete(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the images in palette colours, their upper halves, and the upper halves completed pixel by pixel."""
        height, width = self.model.config.resolution
        generator = torch.Generator(images_BCHW.device).manual_seed(0)
        colours_BN = self._quantise(images_BCHW)
        start = height // 2 * width
        completed_BN = colours_BN.clone()
        completed_BN[:, start:] = 0
        hidden_BCHW = self._paint(completed_BN)
        for index in range(start, height * width):
            logits_BP = self.model(self._paint(completed_BN))[:, index].float()
            completed_BN[:, index] = torch.multinomial(logits_BP.softmax(-1), 1, generator=generator)[:, 0]
        return self._paint(colours_BN), hidden_BCHW, self._paint(completed_BN)
