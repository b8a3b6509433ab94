"""Margin objective: learn an embedding of faces by a softmax over identities with a margin.

Shapes: B images, E width of the embedding, K identities.

    cos t_k  = <e, w_k> / (|e| |w_k|)                              e: the embedding, w_k: the weights of identity k
    logit_y  = s (cos(m_1 t_y + m_2) - m_3)                        of the identity y of the image
    logit_k  = s cos t_k                                           of other identities
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.core.errors import UsageError
from vitrail.data.loader import Loader
from vitrail.evaluation.verification_metrics import Verification, score_all_pairs, verify_pairs
from vitrail.models.base import AnyModel
from vitrail.training.margin_settings import MarginSettings, adacos_scale
from vitrail.training.objectives.base import Objective, Task, at_least_float32
from vitrail.training.objectives.judgement import Judgement, PairVerification
from vitrail.training.ranks import Ranks


class Margin(Objective):
    """CosFace, ArcFace or both, over the identities of the training images.

    Held-out images have other identities, on which the verification of pairs is evaluated.
    """

    output = "features"
    next_command = "vitrail faces train {data} --from {bundle} --epochs N --output NEW"
    watched, watched_name = "verified", "1 - equal error rate"
    korean: ClassVar = {"1 - equal error rate": "1 - 동일 오류율"}
    head = ("model.head.", "weight")
    progress: Tensor

    def __init__(self, model: AnyModel, task: Task) -> None:
        super().__init__(model, task)
        if model.config.predicts != "features":
            raise UsageError(
                f"Objective margin must have a model without a head (classes=0), got one of {model.config.classes}"
                " classes."
            )
        if task.recipe.augment.mixes:
            raise UsageError("Objective margin must have images of one identity each, got mixup or cutmix above 0.")
        self.margin, self.smoothing = task.recipe.margin, task.recipe.label_smoothing
        width = model.config.embedding or model.head_width
        self.weight = nn.Parameter(torch.empty(len(task.labels), width))
        nn.init.normal_(self.weight, std=width**-0.5)
        adacos_scale(len(task.labels))
        self.register_buffer("progress", torch.ones(()), persistent=False)

    def set_progress(self, done: float) -> None:
        self.progress.fill_(done)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        return self._loss(self.model(images_BCHW), labels_B, self.smoothing)

    def _loss(self, embedding_BE: Tensor, labels_B: Tensor, smoothing: float) -> Tensor:
        # Always in full precision: near 1, cosines in bfloat16 have steps of 0.004.
        with torch.autocast(embedding_BE.device.type, enabled=False):
            embedding_BE = at_least_float32(embedding_BE)
            weight_KE = self.weight.to(embedding_BE.dtype)
            cosine_BK = F.normalize(embedding_BE, dim=1) @ F.normalize(weight_KE, dim=1).T
            logits_BK = margin_logits(cosine_BK, labels_B, self.margin, self.progress)
            return F.cross_entropy(logits_BK, labels_B, label_smoothing=smoothing, reduction="none")

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor, Tensor]], ranks: Ranks) -> dict[str, Any]:
        """Return the verification score of all pairs of held-out images, and a prototype loss.

        The weights of the objective do not cover held-out identities. The loss therefore compares each image with the
        mean embeddings of the identities.
        """
        embeddings, identities = _embed_batches(self.model, batches, ranks)
        verification = verify_pairs(lambda: score_all_pairs(embeddings), identities, intervals=False)
        loss = _prototype_loss(embeddings, identities, self.margin)
        return {"loss": loss, "count": len(identities), "verified": 1 - verification.curve.at_equal_errors()[0]}

    def goodness(self, metrics: dict[str, Any]) -> float:
        return metrics["verified"]

    def judge(self, loader: Loader, ranks: Ranks) -> Judgement | None:
        """Verify all pairs of images with confidence intervals; each embedding includes the mirror image."""
        batches = (
            (loader.preprocess.scale(batch.pixels.to(ranks.device)), batch.labels, batch.weights)
            for batch in loader.epoch()
        )
        with torch.inference_mode():
            embeddings, identities = _embed_batches(partial(_embed_with_mirror, self.model.eval()), batches, ranks)
        if not ranks.is_first:
            return None
        return judge_pairs(
            verify_pairs(lambda: score_all_pairs(embeddings), identities), int(identities.max()) + 1, loader.split.name
        )


def judge_pairs(verification: Verification, people: int, split: str) -> PairVerification:
    """Return the verification of pairs as the final evaluation of a run, with scores and a sentence."""
    report = verification.report()
    interval = ""
    if report["eer_interval"] is not None:
        low, high = report["eer_interval"]
        interval = f"95 % interval {low:.1%} to {high:.1%}; "
    counts = {"people": people, "pairs": report["genuine"] + report["impostor"]}
    return PairVerification(
        scores={**counts, **{name: report[name] for name in ("eer", "eer_interval", "tar")}},
        sentence=f"{split} equal error rate {report['eer']:.1%}"
        f" ({interval}{people:,} people, {counts['pairs']:,} pairs)",
    )


def _embed_with_mirror(model: AnyModel, images_BCHW: Tensor) -> Tensor:
    """Return the sum of the embeddings of images and of their mirror images (B, E), as in `faces.embed`."""
    return model(images_BCHW) + model(images_BCHW.flip(-1))


def _embed_batches(
    embed: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor, Tensor]], ranks: Ranks
) -> tuple[np.ndarray, np.ndarray]:
    """Return unit embeddings (n, E) and identities (n, numbered from 0) of all readable images of all ranks."""
    local_parts = []
    for images, labels, weights in batches:
        is_read = weights.numpy() > 0
        embeddings = F.normalize(at_least_float32(embed(images)), dim=1)
        local_parts.append((embeddings.float().cpu().numpy()[is_read], labels.cpu().numpy()[is_read]))
    parts = [part for rank_parts in ranks.gather(local_parts) for part in rank_parts]
    embeddings, identities = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return embeddings, np.unique(identities, return_inverse=True)[1]


def _prototype_loss(embeddings_nE: np.ndarray, identities_n: np.ndarray, margin: MarginSettings) -> float:
    """Return the mean cross-entropy of images over identities, whose weights are mean embeddings.

    The mean of the identity of an image excludes that image. Identities with a single image are not counted.
    """
    counts = np.bincount(identities_n)
    sums = np.zeros((len(counts), embeddings_nE.shape[1]))
    np.add.at(sums, identities_n, embeddings_nE)
    means = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    logits = embeddings_nE @ means.T
    rows = np.arange(len(identities_n))
    others = sums[identities_n] - embeddings_nE
    others /= np.maximum(np.linalg.norm(others, axis=1, keepdims=True), 1e-12)
    logits[rows, identities_n] = (embeddings_nE * others).sum(axis=1)
    logits *= margin.scale_for(len(counts))
    losses = np.logaddexp.reduce(logits, axis=1) - logits[rows, identities_n]
    return float(losses[counts[identities_n] > 1].mean())


def margin_logits(cosine_BK: Tensor, labels_B: Tensor, margin: MarginSettings, progress: Tensor) -> Tensor:
    """Return scaled cosines, with the margin at the identity of each image, after the share `progress` of all steps."""
    warmup_share = (progress / margin.warmup).clamp(max=1.0) if margin.warmup else torch.ones_like(progress)
    initial_scale = adacos_scale(cosine_BK.shape[1])
    scale = initial_scale
    if margin.scale is not None:
        scale = initial_scale + (margin.scale - initial_scale) * warmup_share
    labels_B1 = labels_B[:, None]
    with_margin_B1 = with_margin(cosine_BK.gather(1, labels_B1), margin, warmup_share)
    return scale * cosine_BK.scatter(1, labels_B1, with_margin_B1)


def with_margin(cosine: Tensor, margin: MarginSettings, warmup_share: Tensor | float = 1.0) -> Tensor:
    """Return cos(m_1 t + m_2) - m_3 for cos t, with the margin multiplied by `warmup_share`.

    Beyond half a turn, where the cosine would rise again, the function continues to fall: as in SphereFace (arXiv
    1704.08063, eq. 7), or without a factor as in the code of ArcFace.
    """
    factor = 1 + (margin.factor - 1) * warmup_share
    angle, offset = margin.angle * warmup_share, margin.cosine * warmup_share
    if margin.factor == 1 and margin.angle == 0:
        return cosine - offset
    # The minimum keeps the gradient of the square root finite at angles of 0 and half a turn.
    sine = ((1 - cosine) * (1 + cosine)).clamp(min=torch.finfo(cosine.dtype).eps ** 2).sqrt()
    new_angle = factor * torch.atan2(sine, cosine) + angle
    if margin.factor != 1:
        half_turns = (new_angle / math.pi).floor().detach()
        return (1 - 2 * (half_turns % 2)) * new_angle.cos() - 2 * half_turns - offset
    beyond = cosine - angle * (torch.sin(angle) if isinstance(angle, Tensor) else math.sin(angle))
    return torch.where(new_angle <= math.pi, new_angle.cos(), beyond) - offset
