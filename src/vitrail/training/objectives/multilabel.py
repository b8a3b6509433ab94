"""Multi-label classification: any number of labels per image, by sigmoid cross-entropy.

Labels of a batch are (B, K): 1 for each label of an image, 0 for the other labels.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.bundles.decision import DecisionRule, MultiLabel
from vitrail.data.loader import Loader
from vitrail.evaluation.metrics import best_thresholds, score_labels
from vitrail.evaluation.split_predictions import SplitPredictions, predict_split
from vitrail.training.objectives.base import at_least_float32
from vitrail.training.objectives.classify import Classify
from vitrail.training.objectives.judgement import Judgement, Labelling
from vitrail.training.ranks import Ranks


class Multilabel(Classify):
    """Multi-label classification with sigmoid cross-entropy for each label."""

    is_multilabel = True
    next_command = f"{Classify.next_command} --set objective=multilabel"
    watched, watched_name = "map", "mAP"

    def _loss(self, logits_BK: Tensor, labels_B: Tensor, smoothing: float) -> Tensor:
        targets_BK = labels_B.to(logits_BK.dtype) * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="none").sum(1)

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        logits_BK = at_least_float32(self.model(images_BCHW))
        return {"loss": self._loss(logits_BK, labels_B, 0.0)}

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor, Tensor]], ranks: Ranks) -> dict[str, Any]:
        """Return the loss and the mean average precision (mAP), which is not a mean over images."""
        local_parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for images, labels, weights in batches:
            logits_BK = at_least_float32(self.model(images))
            losses_B = self._loss(logits_BK, labels, 0.0)
            is_readable = weights.numpy() > 0
            local_parts.append(
                tuple(tensor.detach().cpu().numpy()[is_readable] for tensor in (losses_B, labels, logits_BK))
            )
        parts = [part for rank_parts in ranks.gather(local_parts) for part in rank_parts]
        if not parts:
            return {"loss": 0.0, "map": 0.0, "count": 0}
        losses, labels, logits = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        mean_precision = score_labels(logits, labels, self.labels)["map"]
        return {"loss": float(losses.mean()), "map": mean_precision or 0.0, "count": len(losses)}

    def goodness(self, metrics: dict[str, Any]) -> float:
        return metrics["map"]

    def decision_rule(self, loader: Loader | None, ranks: Ranks) -> DecisionRule:
        """Return the multi-label rule whose thresholds have the best F1 on the held-out images (0.5 without them)."""
        default_rule = MultiLabel(thresholds=(0.5,) * len(self.labels))
        if loader is None:
            return default_rule
        predictions = SplitPredictions.join(ranks.gather(predict_split(self.model, loader, torch.sigmoid)))
        return MultiLabel(thresholds=best_thresholds(predictions.probabilities, predictions.labels))

    def judge(self, loader: Loader, ranks: Ranks) -> Judgement | None:
        predictions = SplitPredictions.join(ranks.gather(predict_split(self.model, loader, torch.sigmoid)))
        if not ranks.is_first:
            return None
        split_name = loader.split.name
        scores = score_labels(predictions.probabilities, predictions.labels, self.labels)
        map_text = "-" if scores["map"] is None else f"{scores['map']:.1%}"
        return Labelling(
            scores={"count": scores["count"], "map": scores["map"]},
            sentence=f"{split_name} mAP {map_text} ({scores['count']:,} images, {len(self.labels):,} labels)",
            all_scores=scores,
            split=split_name,
        )
