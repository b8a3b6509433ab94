"""Classification with a learned temperature: logits are divided by one number, which belongs to the objective."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.base import AnyModel
from vitrail.training.objectives.base import Objective, Task


class Tempered(Objective):
    """Cross-entropy at a temperature that is learned with the model."""

    classifies = True

    def __init__(self, model: AnyModel, task: Task) -> None:
        super().__init__(model, task)
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        logits_BK = self.logits(images_BCHW)
        losses_B = F.cross_entropy(logits_BK, labels_B, reduction="none")
        if others_B is None or share_B is None:
            return losses_B
        return share_B * losses_B + (1 - share_B) * F.cross_entropy(logits_BK, others_B, reduction="none")

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        logits_BK = self.logits(images_BCHW)
        losses_B = F.cross_entropy(logits_BK, labels_B, reduction="none")
        return {"loss": losses_B, "accuracy": (logits_BK.argmax(1) == labels_B).float()}

    def logits(self, images_BCHW: Tensor) -> Tensor:
        return self.model(images_BCHW) / self.log_temperature.exp()
