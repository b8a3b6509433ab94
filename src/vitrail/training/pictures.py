"""What a self-supervised model has learned, as pictures for the report."""

import contextlib
from typing import cast

import numpy as np
import torch
from torch import Tensor

from vitrail.data.dataset import Split
from vitrail.errors import DamagedError
from vitrail.images.preprocess import Preprocess
from vitrail.models.igpt import IGPT
from vitrail.models.layers import patchify, unpatchify
from vitrail.pages.page import escape, picture
from vitrail.training.objectives import COLOUR_LEVELS, MaskedPatches, NextPixel, Objective

_SHOWN = 7


@torch.inference_mode()
def objective_pictures(objective: Objective, preprocess: Preprocess, split: Split) -> str:
    """A section of the report: what is hidden, and what the model puts there. Empty for classifiers."""
    if not isinstance(objective, MaskedPatches | NextPixel):
        return ""
    device = next(objective.parameters()).device
    crops = []
    for index in range(0, len(split), max(len(split) // _SHOWN, 1))[:_SHOWN]:
        with contextlib.suppress(DamagedError):
            crops.append(preprocess.crop(split.pictures[index]))
    if not crops:
        return ""
    images_BCHW = preprocess.scale(torch.from_numpy(np.stack(crops))).to(device)
    objective.eval()
    if isinstance(objective, MaskedPatches):
        title, rows = "What it fills in", fill_in(objective, images_BCHW)
        names = ("picture", "half of the patches hidden", "filled in by the mean colour it predicts")
    else:
        title, rows = "How it goes on", complete(objective, images_BCHW)
        names = ("picture", "lower half hidden", "went on pixel by pixel, drawn by chance")
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (preprocess.mean, preprocess.std))
    lines = []
    for name, row_BCHW in zip(names, rows, strict=True):
        levels = ((row_BCHW * std + mean).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).cpu().numpy()
        tiles = "".join(f"<figure>{picture(tile, name)}</figure>" for tile in levels)
        lines.append(f'<p class="quiet">{escape(name)}</p><div class="pictures">{tiles}</div>')
    return f"<h2>{escape(title)}</h2>{''.join(lines)}"


def fill_in(objective: MaskedPatches, images_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures; the same with the corrupted patches grey; the same with those in the predicted colour."""
    config = objective.model.config
    still = torch.Generator().manual_seed(0)
    noise = torch.rand(3, len(images_BCHW), config.patches, generator=still)
    noise[1] = 0.0  # for eyes, every corrupted patch is hidden
    _, logits_BNK, corrupted_BN = objective.predict(images_BCHW, noise)
    guess_BN = logits_BNK.argmax(-1)
    digits = [guess_BN // COLOUR_LEVELS**place % COLOUR_LEVELS for place in range(config.channels - 1, -1, -1)]
    levels_BNC = (torch.stack(digits, dim=-1) + 0.5) / COLOUR_LEVELS
    mean, std = objective.get_buffer("mean_C"), objective.get_buffer("std_C")
    area = config.patch[0] * config.patch[1]
    patches_BNF = patchify(images_BCHW, config.patch)
    colours_BNF = ((levels_BNC - mean) / std).repeat_interleave(area, dim=-1)
    grey_BNF = ((0.5 - mean) / std).repeat_interleave(area).expand_as(patches_BNF)
    hidden_BN1 = corrupted_BN.bool()[..., None]
    pictures = [
        unpatchify(torch.where(hidden_BN1, fill, patches_BNF), config.grid, config.patch)
        for fill in (grey_BNF, colours_BNF)
    ]
    return images_BCHW, pictures[0], pictures[1]


def complete(objective: NextPixel, images_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures in the palette; their upper halves; the same, gone on pixel by pixel."""
    model = cast(IGPT, objective.model)
    height, width = model.config.resolution
    still = torch.Generator(images_BCHW.device).manual_seed(0)
    colours_BN = model.quantise(images_BCHW)
    start = height // 2 * width

    def paint(words_BN: Tensor) -> Tensor:
        return model.palette[words_BN].movedim(-1, 1).unflatten(2, (height, width)).to(images_BCHW.dtype)

    words_BN = colours_BN.clone()
    words_BN[:, start:] = 0
    hidden_BCHW = paint(words_BN)
    for place in range(start, height * width):
        logits_BP = model(paint(words_BN))[:, place].float()
        words_BN[:, place] = torch.multinomial(logits_BP.softmax(-1), 1, generator=still)[:, 0]
    return paint(colours_BN), hidden_BCHW, paint(words_BN)
