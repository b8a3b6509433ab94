"""The Transformer on pixels (iGPT, Chen et al. 2020): every pixel is a token, rounded to a colour of a palette.

Shapes: B images, N pixels in raster order, D width, P colours, K classes.

    c_n    = nearest palette colour of pixel n
    z_0    = embed(c) + E_pos                (predicting pixels: shifted by one, a start token first)
    z_l    = z + MLP(norm(z)),  z = z_(l-1) + attention(norm(z_(l-1)))
    logits = norm(z_L) W                     over the palette for each next pixel; or over classes, of the mean token
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from vitrail.core import rng
from vitrail.core.settings import Pair
from vitrail.models.activations import Activations
from vitrail.models.base import Layout, Model
from vitrail.models.families.igpt.config import IGPTConfig
from vitrail.models.layers import MLP, Attention, drop
from vitrail.models.palette import cluster, nearest_colours
from vitrail.models.positions.grid import resize_grid

# Images from which the palette is computed, and pixels sampled from them.
_PALETTE_IMAGES, _PALETTE_PIXELS = 512, 65_536


class PixelBlock(nn.Module):
    """GPT-2's pre-norm block with iGPT's norm (no mean, no shift) and sigmoid GELU."""

    def __init__(self, config: IGPTConfig) -> None:
        super().__init__()
        c = config
        self.norm1 = nn.RMSNorm(c.width, eps=c.norm_epsilon)
        self.attn = Attention(width=c.width, heads=c.heads, qkv_bias=c.bias, proj_bias=c.bias, dropout=c.dropout)
        self.norm2 = nn.RMSNorm(c.width, eps=c.norm_epsilon)
        self.mlp = MLP(width=c.width, hidden=c.mlp, activation="quick-gelu", dropout=c.dropout, bias=c.bias)

    def forward(self, z_BND: Tensor, mask: Tensor | None) -> Tensor:
        z_BND = z_BND + self.attn(self.norm1(z_BND), bias=mask)
        return z_BND + self.mlp(self.norm2(z_BND))

    def steps(self, z_BND: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Compute every step of this layer, by its name in `Activations.steps`."""
        norm1_BND = self.norm1(z_BND)
        attention = self.attn.steps(norm1_BND, bias=mask)
        middle_BND = z_BND + attention["msa"]
        norm2_BND = self.norm2(middle_BND)
        return {"norm1": norm1_BND, **attention, "middle": middle_BND, "norm2": norm2_BND, **self.mlp.steps(norm2_BND)}


class IGPT(Model[IGPTConfig]):
    """`forward(images) -> logits`: (B, K) for classes, (B, N, P) if each next pixel is predicted."""

    blocks: list[PixelBlock]  # an nn.ModuleList, which has no element type
    palette: Tensor
    mask: Tensor | None
    opens_blocks = True
    reads_layers = True

    def __init__(self, config: IGPTConfig) -> None:
        super().__init__(config)
        c = config
        self.colour_embed = nn.Embedding(c.palette + (c.output == "pixels"), c.width)  # the last row is the start token
        self.pos_embed = nn.Parameter(torch.zeros(1, c.tokens, c.width))
        self.blocks = cast(list[PixelBlock], nn.ModuleList(PixelBlock(c) for _ in range(c.depth)))
        self.norm = nn.RMSNorm(c.width, eps=c.norm_epsilon)
        self.head = self.make_head(c.width, bias=c.output == "classes")
        # Colours in preprocessed units; `prepare` replaces them with cluster centres of the training images.
        self.register_buffer("palette", torch.zeros(c.palette, c.channels))
        self.initialise()
        self.fill_tables()

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        self._check_images(images_BCHW)
        c = self.config
        colours_BN = nearest_colours(images_BCHW, self.palette)
        if activations is not None:
            activations.steps["colours"] = colours_BN
        if c.output == "pixels":
            start_B1 = torch.full_like(colours_BN[:, :1], c.palette)
            colours_BN = torch.cat([start_B1, colours_BN[:, :-1]], dim=1)
        z_BND = drop(self.colour_embed(colours_BN) + self.pos_embed, c.dropout, self.training)
        if activations is not None:
            activations.steps["tokens"] = z_BND
        for layer, block in enumerate(self.blocks):
            if activations is not None and activations.records_attention(layer):
                activations.attention[layer] = block.attn.weights(block.norm1(z_BND), bias=self.mask)
            if activations is not None and layer in activations.inside:
                activations.record_steps(layer, block.steps(z_BND, self.mask))
            z_BND = self.run_block(block, z_BND, self.mask)
            if activations is not None:
                activations.record_output(layer, z_BND)
        return self.read(z_BND, activations)

    def read(self, z_BTD: Tensor, activations: Activations | None = None) -> Tensor:
        y = self.norm(z_BTD)
        return self._classify(self.pool(y), activations)

    def pool(self, output: Tensor) -> Tensor:
        return output if self.config.output == "pixels" else output.mean(dim=1)

    def layout(self) -> Layout:
        allowed = None if self.mask is None else self.mask.cpu().numpy()
        return Layout(self.config.grid, (1, 1), 0, "mean", allowed)

    @torch.no_grad()
    def prepare(self, read: Callable[[int], Tensor], seed: int) -> None:
        """Compute the palette: cluster centres of the training images' pixels (section 3.1 of the paper)."""
        images = read(_PALETTE_IMAGES)
        pixels = images.movedim(1, -1).reshape(-1, self.config.channels)
        sample = rng.permutation(len(pixels), seed, stream="palette pixels")[:_PALETTE_PIXELS]
        self.palette.copy_(cluster(pixels[torch.from_numpy(sample)], self.config.palette, seed))

    def normalise_layer(self, output: Tensor) -> Tensor:
        return self.norm(output)

    @torch.no_grad()
    def replace_head(self, classes: int, *, embedding: int = 0) -> None:
        if self.config.output == "pixels":
            self.config = self.config.replace(output="classes", classes=classes)
            # With a start token, each pixel was read one position later, so the learned positions shift by one.
            colours, positions = self.colour_embed.weight, self.pos_embed
            self.colour_embed = nn.Embedding.from_pretrained(colours[:-1].clone(), freeze=not colours.requires_grad)
            shifted = torch.cat([positions[:, 1:], positions[:, -1:]], dim=1)
            self.pos_embed = nn.Parameter(shifted, requires_grad=positions.requires_grad)
        super().replace_head(classes, embedding=embedding)

    @torch.no_grad()
    def resize(self, resolution: int | Pair) -> "IGPT":
        """Return a copy for another resolution; learned positions are interpolated corner to corner."""
        new = self.config.replace(resolution=resolution)
        tensors = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        table_hwD = self.pos_embed[0].unflatten(0, self.config.grid)
        tensors["pos_embed"] = resize_grid(table_hwD, new.grid, "google").flatten(0, 1)[None]
        return self.rebuild(new, tensors)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise by the published code's normals (image-gpt, src/model.py), and the head with zeros."""
        width, depth = self.config.width, self.config.depth
        nn.init.normal_(self.colour_embed.weight, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.01)
        for block in self.blocks:
            for linear, std in (
                (block.attn.qkv, 1 / math.sqrt(width)),
                (block.attn.proj, 1 / math.sqrt(width * depth)),
                (block.mlp.fc1, 0.02),
                (block.mlp.fc2, 0.02),
            ):
                nn.init.normal_(linear.weight, std=std)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        self.zero_head()
        # Palette before training: points spread evenly over [-1, 1] in each channel by the generalised golden ratio.
        step = torch.arange(1, self.config.channels + 1, dtype=torch.float64).neg()
        ratio = _golden_ratio(self.config.channels) ** step
        points = torch.arange(self.config.palette, dtype=torch.float64)[:, None] * ratio + 0.5
        self.palette.copy_(2 * (points % 1) - 1)

    def make_tables(self) -> dict[str, Tensor | None]:
        """Return the attention mask: a pixel attends to itself and to earlier pixels."""
        tokens = self.config.tokens
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device="cpu").tril_() if self.config.causal else None
        return {"mask": causal}


def _golden_ratio(dimensions: int) -> float:
    """Return the root of x^(d+1) = x + 1, whose powers give an evenly spread sequence in d dimensions."""
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (dimensions + 1))
    return root
