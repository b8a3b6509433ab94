"""Recording the inside of an encoder layer, computed separately from the fused kernel.

Shapes: B images, T tokens, D width, H heads.
"""

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from vitrail.models.activations import Activations

if TYPE_CHECKING:
    from vitrail.models.families.vit.model import Block


def record_layer(
    activations: Activations,
    layer: int,
    block: "Block",
    z_BTD: Tensor,
    rope: Tensor | None,
    bias: Tensor | None,
    *,
    merges: bool,
) -> None:
    """Record the attention and the steps of a layer, as far as they are asked for, from its input of all tokens.

    Merged tokens are equal tokens in it: each gets the share of the group's attention that log(size) gives it.
    """
    if activations.wants_attention(layer):
        activations.attention[layer] = block.attention(z_BTD, rope, bias)
    if layer in activations.inside and merges:
        activations.steps[f"blocks.{layer}.merged"] = z_BTD
    activations.keep_inside(layer, functools.partial(block_steps, block, z_BTD, rope, bias))


def block_steps(block: "Block", z_BTD: Tensor, rope: Tensor | None, bias: Tensor | None) -> dict[str, Tensor]:
    """Every step of a layer by its name (see `Activations.steps`).

    In the original encoder (post-norm), `norm1` and `norm2` follow the residual connections.
    """
    if block.pre_norm:
        norm1_BTD = block.norm1(z_BTD)
        attention = block.attn.steps(norm1_BTD, rope, bias)
        middle_BTD = block.add(z_BTD, attention["msa"], block.ls1)
        norm2_BTD = block.norm2(middle_BTD)
        mlp = block.mlp.steps(norm2_BTD)
        return {"norm1": norm1_BTD, **attention, "middle": middle_BTD, "norm2": norm2_BTD, **mlp}
    attention = block.attn.steps(z_BTD, rope, bias)
    middle_BTD = block.add(z_BTD, attention["msa"], block.ls1)
    norm1_BTD = block.norm1(middle_BTD)
    mlp = block.mlp.steps(norm1_BTD)
    norm2_BTD = block.norm2(block.add(norm1_BTD, mlp["z2"], block.ls2))
    return {**attention, "middle": middle_BTD, "norm1": norm1_BTD, **mlp, "norm2": norm2_BTD}
