"""Masked patch prediction: the self-supervised objective of the ViT paper (arXiv 2010.11929, section 4.6).

Shapes: B images, N patches, D width, K colours, C channels, F pixels of a patch times channels.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.core.errors import UsageError
from vitrail.models.base import AnyModel
from vitrail.models.layers import patchify, unpatchify
from vitrail.models.roles import Role
from vitrail.training.objectives.base import Illustration, Objective, Task, at_least_float32

COLOUR_LEVELS = 8  # 3 bits


class MaskedPatches(Objective):
    """Corrupt half of the patches and predict their mean colours, with 3 bits per channel."""

    watched_name = "colours predicted correctly"
    head = ("decoder.",)
    illustrated = 7
    korean: ClassVar[Mapping[str, str]] = {
        "colours predicted correctly": "맞힌 색의 비율",
        "Reconstruction of masked patches": "가린 패치를 채운 결과",
        "image": "이미지",
        "half of the patches masked": "패치의 절반을 가린 이미지",
        "filled with the predicted mean colour": "예측한 평균색으로 채운 이미지",
    }
    share = 0.5

    def __init__(self, model: AnyModel, task: Task) -> None:
        super().__init__(model, task)
        config = model.config
        if not config.can_mask_patches:
            raise UsageError("Objective masked must have a ViT with LayerNorm, plain patches and no token drop.")
        if self._patches < 2:
            raise UsageError("Objective masked must have at least two patches, got one. Choose a smaller patch size.")
        if config.channels > 3:
            raise UsageError(f"Objective masked must have images of at most 3 channels, got {config.channels}.")
        # Unused parameters; with several ranks, DDP waits for the gradients of all trainable parameters.
        for name, parameter in model.named_parameters():
            if name.startswith(("head.", "pre_logits.", "attn_pool.")):
                parameter.requires_grad_(False)
        self.mask_token = nn.Parameter(torch.zeros(config.width))
        self.decoder = nn.Linear(config.width, COLOUR_LEVELS**config.channels)
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.zeros_(self.decoder.weight)
        nn.init.zeros_(self.decoder.bias)
        self.register_buffer("mean_C", torch.tensor(task.preprocess.mean), persistent=False)
        self.register_buffer("std_C", torch.tensor(task.preprocess.std), persistent=False)

    def roles(self) -> dict[str, Role]:
        """Return the roles of all parameters. The mask token is part of the embedding, below the first block."""
        roles = super().roles()
        return {**roles, "mask_token": roles["mask_token"]._replace(layer=0)}

    def forward(self, images_BCHW: Tensor, labels_B: Tensor, others_B: Tensor | None, share_B: Tensor | None) -> Tensor:
        losses_BN, _, corrupted_BN = self.predict(images_BCHW, torch.rand(3, len(images_BCHW), self._patches))
        return (losses_BN * corrupted_BN).sum(1) / corrupted_BN.sum(1)

    def score(self, images_BCHW: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(3, 1, self._patches, generator=generator).expand(-1, len(images_BCHW), -1)
        losses_BN, logits_BNK, corrupted_BN = self.predict(images_BCHW, noise)
        is_correct_BN = (logits_BNK.argmax(-1) == self.colours(images_BCHW)).float()
        count_B = corrupted_BN.sum(1)
        metrics = {"loss": losses_BN, "accuracy": is_correct_BN}
        return {name: (values_BN * corrupted_BN).sum(1) / count_B for name, values_BN in metrics.items()}

    def predict(self, images_BCHW: Tensor, noise_3BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses (B, N) and logits (B, N, K) of the colour of every patch, and 1 for corrupted patches (B, N).

        The noise (uniform in 0..1) selects the corrupted patches, the type of corruption and the replacing patches.
        """
        order_BN, type_BN, source_BN = noise_3BN.to(images_BCHW.device)
        corrupted_BN = order_BN.argsort(1) < round(self.share * self._patches)

        def corrupt(x_BND: Tensor) -> Tensor:
            # 80 % of corrupted patches become the mask token, 10 % another patch of the image, and 10 % stay unchanged.
            others_BND = x_BND.gather(1, source_BN.argsort(1)[..., None].expand_as(x_BND))
            masked_BN1 = (corrupted_BN & (type_BN < 0.8))[..., None]
            swapped_BN1 = (corrupted_BN & (type_BN >= 0.8) & (type_BN < 0.9))[..., None]
            unmasked_BND = torch.where(swapped_BN1, others_BND, x_BND)
            return torch.where(masked_BN1, self.mask_token.to(x_BND.dtype), unmasked_BND)

        logits_BNK = at_least_float32(self.decoder(self.model.encode_patches(images_BCHW, corrupt)))
        targets_BN = self.colours(images_BCHW)
        losses_BN = F.cross_entropy(logits_BNK.flatten(0, 1), targets_BN.flatten(), reduction="none").view_as(
            targets_BN
        )
        return losses_BN.view_as(targets_BN), logits_BNK, corrupted_BN.float()

    def colours(self, images_BCHW: Tensor) -> Tensor:
        """Return the class of the mean colour of each patch, with 8 levels per channel (B, N)."""
        config = self.model.config
        mean_C11, std_C11 = (self.get_buffer(name)[:, None, None] for name in ("mean_C", "std_C"))
        levels_BCHW = at_least_float32(images_BCHW) * std_C11 + mean_C11
        means_BNC = patchify(levels_BCHW, config.patch).unflatten(-1, (config.channels, -1)).mean(-1)
        digits_BNC = (means_BNC * COLOUR_LEVELS).long().clamp(0, COLOUR_LEVELS - 1)
        factors_C = COLOUR_LEVELS ** torch.arange(config.channels - 1, -1, -1, device=digits_BNC.device)
        return (digits_BNC * factors_C).sum(-1)

    def illustrate(self, images_BCHW: Tensor) -> Illustration:
        hidden_BCHW, filled_BCHW = self.fill_in(images_BCHW)
        return Illustration(
            "Reconstruction of masked patches",
            (
                ("image", images_BCHW),
                ("half of the patches masked", hidden_BCHW),
                ("filled with the predicted mean colour", filled_BCHW),
            ),
        )

    def fill_in(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images with corrupted patches in grey, and with corrupted patches in the predicted colour."""
        config = self.model.config
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(3, len(images_BCHW), self._patches, generator=generator)
        noise[1] = 0.0  # replace every corrupted patch by the mask token
        _, logits_BNK, corrupted_BN = self.predict(images_BCHW, noise)
        prediction_BN = logits_BNK.argmax(-1)
        digits = [prediction_BN // COLOUR_LEVELS**power % COLOUR_LEVELS for power in range(config.channels - 1, -1, -1)]
        levels_BNC = (torch.stack(digits, dim=-1) + 0.5) / COLOUR_LEVELS
        mean_C, std_C = self.get_buffer("mean_C"), self.get_buffer("std_C")
        patches_BNF = patchify(images_BCHW, config.patch)
        area = math.prod(config.patch)
        colours_BNF = ((levels_BNC - mean_C) / std_C).repeat_interleave(area, dim=-1)
        grey_BNF = ((0.5 - mean_C) / std_C).repeat_interleave(area).expand_as(patches_BNF)
        hidden_BN1 = corrupted_BN.bool()[..., None]
        hidden, filled = (
            unpatchify(torch.where(hidden_BN1, fill_BNF, patches_BNF), config.grid, config.patch)
            for fill_BNF in (grey_BNF, colours_BNF)
        )
        return hidden, filled

    @property
    def _patches(self) -> int:
        return math.prod(self.model.config.grid)
