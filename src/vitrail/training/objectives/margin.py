"""Learning an embedding in which images of one person are near each other: softmax over people with a margin.

Shapes: B images, E width of the embedding, K people.

    cos t_k  = <e, w_k> / (|e| |w_k|)                              e: the embedding, w_k: the weights of person k
    logit_y  = s (cos(m_1 t_y + m_2) - m_3)                        of the own person y
    logit_k  = s cos t_k                                           of others
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
    """CosFace, ArcFace or both, over the people of the training images; held-out people are strangers, and tell how
    well pairs are verified."""

    output = "features"
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
            raise UsageError("Objective margin must have images of one person each, got mixup or cutmix above 0.")
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
        # In full precision whatever surrounds it: near 1, a bfloat16 cosine has steps of 0.004.
        with torch.autocast(embedding_BE.device.type, enabled=False):
            embedding_BE = at_least_float32(embedding_BE)
            weight_KE = self.weight.to(embedding_BE.dtype)
            cosine_BK = F.normalize(embedding_BE, dim=1) @ F.normalize(weight_KE, dim=1).T
            logits_BK = margin_logits(cosine_BK, labels_B, self.margin, self.progress)
            return F.cross_entropy(logits_BK, labels_B, label_smoothing=smoothing, reduction="none")

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor, Tensor]], ranks: Ranks) -> dict[str, Any]:
        """How well all pairs of held-out images are told apart, and the loss against the means of the other images of
        each person: the weights know none of these people."""
        embeddings, people = _gather(self.model, batches, ranks)
        found = verify_pairs(lambda: score_all_pairs(embeddings), people, intervals=False)
        loss = _prototype_loss(embeddings, people, self.margin)
        return {"loss": loss, "count": len(people), "verified": 1 - found.curve.at_equal_errors()[0]}

    def goodness(self, found: dict[str, Any]) -> float:
        return found["verified"]

    def judge(self, loader: Loader, ranks: Ranks) -> Judgement | None:
        """How well people are told apart whom training never saw, with intervals over people."""
        batches = (
            (loader.preprocess.scale(batch.pixels.to(ranks.device)), batch.labels, batch.weights)
            for batch in loader.epoch()
        )
        with torch.inference_mode():
            embeddings, people = _gather(partial(_with_mirror, self.model.eval()), batches, ranks)
        if not ranks.is_first:
            return None
        return judge_pairs(
            verify_pairs(lambda: score_all_pairs(embeddings), people), int(people.max()) + 1, loader.split.name
        )


def judge_pairs(verification: Verification, people: int, split: str) -> PairVerification:
    """The final evaluation in the words and numbers of a run."""
    report = verification.report()
    around = ""
    if report["eer_interval"] is not None:
        low, high = report["eer_interval"]
        around = f"95 % interval {low:.1%} to {high:.1%}; "
    kept = {"people": people, "pairs": report["genuine"] + report["impostor"]}
    return PairVerification(
        scores={**kept, **{name: report[name] for name in ("eer", "eer_interval", "tar")}},
        sentence=f"{split} equal error rate {report['eer']:.1%} ({around}{people:,} people, {kept['pairs']:,} pairs)",
    )


def _with_mirror(model: AnyModel, images_BCHW: Tensor) -> Tensor:
    """The sum of the embeddings of images and of their mirror images (B, E), as `faces.embed` has it."""
    return model(images_BCHW) + model(images_BCHW.flip(-1))


def _gather(
    embed: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor, Tensor]], ranks: Ranks
) -> tuple[np.ndarray, np.ndarray]:
    """Unit embeddings (n, E) and the person of each, a number from 0 (n), of the images of all ranks that could be
    read."""
    mine = []
    for images, labels, weights in batches:
        is_read = weights.numpy() > 0
        embeddings = F.normalize(at_least_float32(embed(images)), dim=1)
        mine.append((embeddings.float().cpu().numpy()[is_read], labels.cpu().numpy()[is_read]))
    parts = [part for some in ranks.gather(mine) for part in some]
    embeddings, people = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return embeddings, np.unique(people, return_inverse=True)[1]


def _prototype_loss(embeddings_nE: np.ndarray, people_n: np.ndarray, margin: MarginSettings) -> float:
    """Mean cross-entropy of each image among the people, each known by the mean of their other images."""
    counts = np.bincount(people_n)
    sums = np.zeros((len(counts), embeddings_nE.shape[1]))
    np.add.at(sums, people_n, embeddings_nE)
    means = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    logits = embeddings_nE @ means.T
    rows = np.arange(len(people_n))
    others = sums[people_n] - embeddings_nE
    others /= np.maximum(np.linalg.norm(others, axis=1, keepdims=True), 1e-12)
    logits[rows, people_n] = (embeddings_nE * others).sum(axis=1)
    logits *= margin.scale_for(len(counts))
    losses = np.logaddexp.reduce(logits, axis=1) - logits[rows, people_n]
    return float(losses[counts[people_n] > 1].mean())


def margin_logits(cosine_BK: Tensor, labels_B: Tensor, margin: MarginSettings, progress: Tensor) -> Tensor:
    """Scaled cosines with the margin in each image's own person, after this share of all steps."""
    risen = (progress / margin.warmup).clamp(max=1.0) if margin.warmup else torch.ones_like(progress)
    first = adacos_scale(cosine_BK.shape[1])
    scale = first if margin.scale is None else first + (margin.scale - first) * risen
    own_B1 = labels_B[:, None]
    moved_B1 = with_margin(cosine_BK.gather(1, own_B1), margin, risen)
    return scale * cosine_BK.scatter(1, own_B1, moved_B1)


def with_margin(cosine: Tensor, margin: MarginSettings, risen: Tensor | float = 1.0) -> Tensor:
    """cos(m_1 t + m_2) - m_3 for cos t. Beyond half a turn, where the cosine would rise again, it goes on falling: as
    SphereFace does (arXiv 1704.08063, eq. 7), or without a factor as ArcFace's code does."""
    factor = 1 + (margin.factor - 1) * risen
    angle, less = margin.angle * risen, margin.cosine * risen
    if margin.factor == 1 and margin.angle == 0:
        return cosine - less
    # The floor keeps the gradient of the root finite where the angle is 0 or half a turn.
    sine = ((1 - cosine) * (1 + cosine)).clamp(min=torch.finfo(cosine.dtype).eps ** 2).sqrt()
    turned = factor * torch.atan2(sine, cosine) + angle
    if margin.factor != 1:
        halves = (turned / math.pi).floor().detach()
        return (1 - 2 * (halves % 2)) * turned.cos() - 2 * halves - less
    beyond = cosine - angle * (torch.sin(angle) if isinstance(angle, Tensor) else math.sin(angle))
    return torch.where(turned <= math.pi, turned.cos(), beyond) - less
