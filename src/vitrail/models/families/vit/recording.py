"""Recording the steps inside an encoder layer, computed separately from the fused kernel.

Shapes: B images, T tokens, Q computed tokens, D width.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from vitrail.models.activations import Activations
from vitrail.models.families.vit.merging import Groups, spread
from vitrail.models.layers import NoNorm

if TYPE_CHECKING:
    from vitrail.models.families.vit.model import Block


def record_layer(
    activations: Activations,
    layer: int,
    block: "Block",
    input_BTD: Tensor,
    output_BQD: Tensor,
    rope: Tensor | None,
    bias: Tensor | None,
    groups: Groups | None,
    *,
    merges: bool,
) -> None:
    """Record the attention, the steps and the output of a layer in `activations`, if it records them for this layer.

    All tokens are recorded: if the block computed only [CLS], its output is computed again for every token. Merged
    tokens are recorded as equal tokens that share the attention of their group.
    """
    tokens_BTD, token_bias = spread(input_BTD, groups), bias if groups is None else None
    if activations.records_attention(layer):
        activations.attention[layer] = block.attention(tokens_BTD, rope, token_bias)
    if layer in activations.inside:
        if merges:
            activations.steps[f"blocks.{layer}.merged"] = tokens_BTD
        activations.record_steps(layer, block_steps(block, tokens_BTD, rope, token_bias))
    if layer in activations.layers:
        has_all_tokens = output_BQD.shape[1] == input_BTD.shape[1]
        output_BTD = output_BQD if has_all_tokens else block(input_BTD, rope, bias)
        activations.record_output(layer, spread(output_BTD, groups))


def block_steps(block: "Block", z_BTD: Tensor, rope: Tensor | None, bias: Tensor | None) -> dict[str, Tensor]:
    """Compute every step of a layer, by its name in `Activations.steps`.

    In the original encoder (post-norm), `norm1` and `norm2` follow the residual connections. Without norms, they are
    left out.
    """
    if block.pre_norm:
        norm1_BTD = block.norm1(z_BTD)
        attention = block.attn.steps(norm1_BTD, rope, bias)
        middle_BTD = block.add_branch(z_BTD, attention["msa"], block.ls1)
        norm2_BTD = block.norm2(middle_BTD)
        mlp = block.mlp.steps(norm2_BTD)
        if isinstance(block.norm1, NoNorm):
            return {**attention, "middle": middle_BTD, **mlp}
        return {"norm1": norm1_BTD, **attention, "middle": middle_BTD, "norm2": norm2_BTD, **mlp}
    attention = block.attn.steps(z_BTD, rope, bias)
    middle_BTD = block.add_branch(z_BTD, attention["msa"], block.ls1)
    norm1_BTD = block.norm1(middle_BTD)
    mlp = block.mlp.steps(norm1_BTD)
    norm2_BTD = block.norm2(block.add_branch(norm1_BTD, mlp["z2"], block.ls2))
    return {**attention, "middle": middle_BTD, "norm1": norm1_BTD, **mlp, "norm2": norm2_BTD}
