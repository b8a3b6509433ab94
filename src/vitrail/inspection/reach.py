"""What reaches what: how strongly each pixel moves the state at the centre of a layer, in any family.

An architecture's bias is visible before any training: in which pixels a place *can* hear.
"""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitrail.configs.base import ModelConfig
from vitrail.configs.lstm import LSTMConfig
from vitrail.errors import UsageError
from vitrail.inspection.colours import INK, LEAD, PAPER, sequential
from vitrail.models.base import AnyModel, Seen
from vitrail.models.look import evaluating
from vitrail.models.lstm import sequence_order
from vitrail.settings import check_whole

_DECADES = 4  # of the logarithmic colour scale


def reach(model: AnyModel, images: Tensor, layer: int, draws: int = 8) -> np.ndarray:
    """Mean |gradient| of the centre's state after `layer` with respect to each pixel: (H, W), largest value 1.

    The state is read through random signs, several draws of them: a plain sum of features would be blind to whatever a
    norm removes. A pixel model rounds colours, so there the gradient stops at the embedded tokens, one for each pixel.
    """
    config = model.config
    check_whole("layer", layer, low=0, high=config.depth - 1)
    is_pixels = config.family == "igpt"
    if is_pixels and (config.output == "pixels" or not model.pos_embed.requires_grad):
        raise UsageError("Reach into a pixel model must be asked with output classes and weights that are not frozen.")
    images = images.detach().clone().requires_grad_()
    seen = Seen(frozenset([layer]))
    with torch.enable_grad(), evaluating(model):
        model(images, seen)
        state_BD = _centre(seen.steps[f"blocks.{layer}"], model.config)
        source = seen.steps["tokens"] if is_pixels else images
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros_like(source)
        for _ in range(draws):
            signs = torch.randint(0, 2, state_BD.shape, generator=generator).to(state_BD.device) * 2 - 1
            (gradient,) = torch.autograd.grad((state_BD * signs).sum(), source, retain_graph=True)
            total += gradient.abs()
    per_pixel = total.sum(-1).unflatten(1, config.resolution) if is_pixels else total.sum(1)
    heard = per_pixel.mean(0).detach().cpu().double().numpy()
    return heard / heard.max()


def _centre(output: Tensor, config: ModelConfig) -> Tensor:
    """The state (B, D) that stands for the middle of the picture in what left a layer."""
    if output.ndim == 4:  # a feature map
        return output[:, :, output.shape[2] // 2, output.shape[3] // 2]
    if output.ndim == 2:  # no places at all
        return output
    rows, columns = config.info()["grid"]
    place = rows // 2 * columns + columns // 2
    if isinstance(config, LSTMConfig):
        place = sequence_order(config.order, config.grid, config.order_seed).tolist().index(place)
    return output[:, output.shape[1] - rows * columns + place]


def reach_colours(heard: np.ndarray) -> np.ndarray:
    """Shares of the strongest on a logarithmic scale; what is exactly 0 is left white."""
    with np.errstate(divide="ignore"):
        colours = sequential(1 + np.log10(heard) / _DECADES)
    colours[heard == 0] = 255
    return colours


def reach_figure(name: str, maps: dict[int, np.ndarray]) -> Image.Image:
    """Maps side by side, one for each layer, on a logarithmic scale; pixels that do not reach at all are left white."""
    tile, gap, top = 168, 14, 52
    figure = Image.new("RGB", (gap + len(maps) * (tile + gap), top + tile + 46), PAPER)
    draw = ImageDraw.Draw(figure)
    font, small = ImageFont.load_default(14), ImageFont.load_default(11)
    draw.text((gap, 8), f"{name}: which pixels reach the centre?", INK, font)
    for column, (layer, heard) in enumerate(maps.items()):
        left = gap + column * (tile + gap)
        figure.paste(Image.fromarray(reach_colours(heard)).resize((tile, tile), Image.Resampling.NEAREST), (left, top))
        draw.rectangle((left - 1, top - 1, left + tile, top + tile), outline=LEAD)
        draw.text((left, top - 18), f"after layer {layer}", INK, small)
        draw.text((left, top + tile + 4), f"{(heard > 0).mean():.0%} of pixels reach it", INK, small)
    draw.text((gap, top + tile + 24), f"bright 1, dark 1e-{_DECADES} of the strongest; white: exactly 0", INK, small)
    return figure
