"""Classification: softmax or sigmoid cross-entropy."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vitrail.core.errors import UsageError
from vitrail.models.base import AnyModel
from vitrail.training.objectives.base import Objective, Task, at_least_float32


class Classify(Objective):
    """Classification with softmax or sigmoid cross-entropy."""

    classifies = True
    next_command = "vitrail finetune {bundle} {data} --epochs N --output NEW"

    def __init__(self, model: AnyModel, task: Task) -> None:
        super().__init__(model, task)
        if not model.config.classifies:
            raise UsageError(
                f"Objective {task.recipe.objective} must have a model that predicts classes, got one that predicts"
                f" {model.config.predicts}."
            )
        self.loss, self.smoothing = task.recipe.loss, task.recipe.label_smoothing

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        logits_BK = at_least_float32(self.model(images_BCHW))
        losses_B = self._loss(logits_BK, labels_B, self.smoothing)
        if others_B is None or share_B is None:
            return losses_B
        return share_B * losses_B + (1 - share_B) * self._loss(logits_BK, others_B, self.smoothing)

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        logits_BK = at_least_float32(self.model(images_BCHW))
        is_correct_B = (logits_BK.argmax(1) == labels_B).float()
        return {"loss": self._loss(logits_BK, labels_B, 0.0), "accuracy": is_correct_B}

    def _loss(self, logits_BK: Tensor, labels_B: Tensor, smoothing: float) -> Tensor:
        if self.loss == "softmax":
            return F.cross_entropy(logits_BK, labels_B, label_smoothing=smoothing, reduction="none")
        classes = logits_BK.shape[1]
        targets_BK = F.one_hot(labels_B, classes).to(logits_BK.dtype) * (1 - smoothing) + smoothing / classes
        return F.binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="none").sum(1)

    def goodness(self, metrics: dict[str, Any]) -> float:
        return metrics["accuracy"]
