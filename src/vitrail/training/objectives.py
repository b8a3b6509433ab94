"""What a model is trained to do: a module around it whose forward gives the loss of each picture.

Shapes: B pictures, N patches or pixels, D width, K classes or colours, C channels.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.configs.igpt import IGPTConfig
from vitrail.configs.recipe import Recipe
from vitrail.configs.vit import ViTConfig
from vitrail.errors import UsageError
from vitrail.models.base import AnyModel
from vitrail.models.igpt import IGPT
from vitrail.models.layers import patchify
from vitrail.models.vit import ViT

COLOUR_LEVELS = 8  # 3 bits


class Objective(nn.Module):
    """`forward(images, labels, others, share) -> losses (B)`; `others` are the labels of mixed-in pictures."""

    model: AnyModel
    counts_right = "accuracy"
    """What the share of right answers means."""

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        raise NotImplementedError

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        """For held-out pictures: loss and share of right answers of each (B), without chance in it."""
        raise NotImplementedError


class Classify(Objective):
    """Name the class."""

    def __init__(self, model: AnyModel, recipe: Recipe) -> None:
        super().__init__()
        self.model = model
        self.loss, self.smoothing = recipe.loss, recipe.label_smoothing

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        logits_BK = at_least_single(self.model(images_BCHW))
        losses_B = self._loss(logits_BK, labels_B, self.smoothing)
        if others_B is None or share_B is None:
            return losses_B
        return share_B * losses_B + (1 - share_B) * self._loss(logits_BK, others_B, self.smoothing)

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        logits_BK = at_least_single(self.model(images_BCHW))
        return self._loss(logits_BK, labels_B, 0.0), (logits_BK.argmax(1) == labels_B).float()

    def _loss(self, logits_BK: Tensor, labels_B: Tensor, smoothing: float) -> Tensor:
        if self.loss == "softmax":
            return F.cross_entropy(logits_BK, labels_B, label_smoothing=smoothing, reduction="none")
        classes = logits_BK.shape[1]
        wanted_BK = F.one_hot(labels_B, classes).to(logits_BK.dtype) * (1 - smoothing) + smoothing / classes
        return F.binary_cross_entropy_with_logits(logits_BK, wanted_BK, reduction="none").sum(1)


class MaskedPatches(Objective):
    """The paper's own self-supervision (section 4.6): half of the patches are corrupted, and the mean colour of each of
    them, 3 bits a channel, is to be told from the rest."""

    counts_right = "colours right"
    share = 0.5

    def __init__(self, model: AnyModel, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        config = model.config
        if config.family != "vit" or config.token_drop or config.norm != "layer" or config.step != config.patch:
            raise UsageError("Objective masked must have a ViT with LayerNorm, plain patches and no token drop.")
        if model.config.patches < 2:
            raise UsageError("Objective masked must have two patches or more, got one. Choose a smaller patch.")
        if model.config.channels > 3:
            raise UsageError(f"Objective masked must have pictures of at most 3 channels, got {model.config.channels}.")
        self.model = model
        for name in ("head", "pre_logits", "attn_pool"):  # not used, and ranks wait for every gradient
            getattr(model, name, nn.Identity()).requires_grad_(False)
        width = model.config.width
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.decoder = nn.Linear(width, COLOUR_LEVELS**model.config.channels)
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.zeros_(self.decoder.weight)
        nn.init.zeros_(self.decoder.bias)
        self.register_buffer("mean_C", torch.tensor(mean), persistent=False)
        self.register_buffer("std_C", torch.tensor(std), persistent=False)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        losses_BN, _, corrupted_BN = self.predict(images_BCHW, torch.rand(3, len(images_BCHW), self._patches))
        return (losses_BN * corrupted_BN).sum(1) / corrupted_BN.sum(1)

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        still = torch.Generator().manual_seed(0)
        noise = torch.rand(3, 1, self._patches, generator=still).expand(-1, len(images_BCHW), -1)
        losses_BN, logits_BNK, corrupted_BN = self.predict(images_BCHW, noise)
        right_BN = (logits_BNK.argmax(-1) == self.colours(images_BCHW)).float()
        count_B = corrupted_BN.sum(1)
        return (losses_BN * corrupted_BN).sum(1) / count_B, (right_BN * corrupted_BN).sum(1) / count_B

    def predict(self, images_BCHW: Tensor, noise_3BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses (B, N) and logits (B, N, K) of every patch's colour, and which patches were corrupted (B, N)."""
        model = cast(ViT, self.model)
        order_BN, kind_BN, other_BN = noise_3BN.to(images_BCHW.device)
        x_BND = model.patch_embed(images_BCHW)
        corrupted_BN = order_BN.argsort(1) < round(self.share * self._patches)
        # Of the corrupted, 80 % become the mask token, 10 % another patch of the picture, 10 % stay as they are.
        strangers_BND = x_BND.gather(1, other_BN.argsort(1)[..., None].expand_as(x_BND))
        masked_BN1 = (corrupted_BN & (kind_BN < 0.8))[..., None]
        swapped_BN1 = (corrupted_BN & (kind_BN >= 0.8) & (kind_BN < 0.9))[..., None]
        x_BND = torch.where(masked_BN1, self.mask_token.to(x_BND.dtype), torch.where(swapped_BN1, strangers_BND, x_BND))
        z_BTD = model.encode(model.assemble(x_BND), whole=True)
        logits_BNK = at_least_single(self.decoder(model.norm(z_BTD)[:, model.config.prefix :]))
        wanted_BN = self.colours(images_BCHW)
        losses_BN = F.cross_entropy(logits_BNK.flatten(0, 1), wanted_BN.flatten(), reduction="none").view_as(wanted_BN)
        return losses_BN, logits_BNK, corrupted_BN.float()

    def colours(self, images_BCHW: Tensor) -> Tensor:
        """The class of each patch's mean colour: 8 levels for each channel (B, N)."""
        config = self.model.config
        levels_BCHW = at_least_single(images_BCHW) * self._buffer("std_C") + self._buffer("mean_C")
        means_BNC = patchify(levels_BCHW, config.patch).unflatten(-1, (config.channels, -1)).mean(-1)
        digits_BNC = (means_BNC * COLOUR_LEVELS).long().clamp(0, COLOUR_LEVELS - 1)
        places_C = COLOUR_LEVELS ** torch.arange(config.channels - 1, -1, -1, device=digits_BNC.device)
        return (digits_BNC * places_C).sum(-1)

    def _buffer(self, name: str) -> Tensor:
        return self.get_buffer(name)[:, None, None]

    @property
    def _patches(self) -> int:
        return cast(ViTConfig, self.model.config).patches


class NextPixel(Objective):
    """iGPT: tell each pixel's colour, out of a palette, from the pixels before it."""

    counts_right = "pixels right"

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        if not isinstance(model, IGPT) or model.config.output != "pixels" or not model.config.causal:
            raise UsageError("Objective next-pixel must have an iGPT that is causal and predicts pixels.")
        self.model = model

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        return self._losses(images_BCHW)[0].mean(1)

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        losses_BN, right_BN = self._losses(images_BCHW)
        return losses_BN.mean(1), right_BN.mean(1)

    def _losses(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        model = cast(IGPT, self.model)
        logits_BNK = at_least_single(model(images_BCHW))
        wanted_BN = model.quantise(images_BCHW)
        losses_BN = F.cross_entropy(logits_BNK.flatten(0, 1), wanted_BN.flatten(), reduction="none").view_as(wanted_BN)
        return losses_BN, (logits_BNK.argmax(-1) == wanted_BN).float()


def at_least_single(x: Tensor) -> Tensor:
    """Losses are computed in single precision or better, whatever the model is computed in."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def make_objective(model: AnyModel, recipe: Recipe, mean: tuple[float, ...], std: tuple[float, ...]) -> Objective:
    """The objective that the recipe names."""
    match recipe.objective:
        case "classify":
            if getattr(model.config, "output", "classes") != "classes":
                raise UsageError(
                    "Objective classify must have a model that predicts classes, got one that predicts pixels."
                )
            return Classify(model, recipe)
        case "masked":
            return MaskedPatches(model, mean, std)
        case "next-pixel":
            return NextPixel(model)


def model_settings(recipe: Recipe, config: Any) -> dict[str, Any]:
    """Settings that an objective needs of its model."""
    if recipe.objective == "next-pixel" and isinstance(config, IGPTConfig):
        return {"output": "pixels", "causal": True, "classes": config.palette}
    if recipe.objective == "classify" and isinstance(config, IGPTConfig):
        return {"output": "classes"}
    return {}
