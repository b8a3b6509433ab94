"""Everything of the Vision Transformer but its equations: initial weights, tables, resizing, hooks for other packages.

Shapes: N patches, T tokens with [CLS] and registers.
"""

import copy
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor, nn

from vitrail.core.settings import Pair
from vitrail.models.base import Layout, Model, Reads
from vitrail.models.device import evaluating
from vitrail.models.families.vit.attention_mask import attention_mask, part_tables
from vitrail.models.families.vit.config import ResizeRule, ViTConfig
from vitrail.models.families.vit.merging import chessboard
from vitrail.models.initialise import initialise_attention_, initialise_mlp_, lecun_normal_
from vitrail.models.layers import AttentionPool, PatchEmbed, PreLogits
from vitrail.models.positions.base import Position
from vitrail.models.sparse_attention import PatternPart, SparsePattern

if TYPE_CHECKING:
    from vitrail.models.families.vit.model import Block, ViT


class ViTHooks(Model[ViTConfig]):
    """Base class of `ViT` with everything but the equations."""

    blocks: "list[Block]"  # an nn.ModuleList, which has no element type
    patch_embed: PatchEmbed
    position: Position
    norm: nn.Module
    attn_pool: AttentionPool
    """The pooling layer; only with `pool="map"`."""
    pre_logits: PreLogits
    """The hidden layer of the pre-training head; only with `representation`."""
    reg_token: nn.Parameter
    """The register tokens (1, registers, D); only with `registers`."""
    mask: Tensor | None
    """Boolean mask (T, T) of the tokens that each token attends to; None with global and with sparse attention."""
    board: Tensor | None
    """Order of the patches for token merging (N,), see `chessboard`; None without merging."""
    norm_pre: nn.Module
    """With `embedding_norm`."""
    head_dist: nn.Linear
    """The second head of a distilled model."""
    projection = "patch_embed.proj"
    reads_layers = True
    opens_blocks = True

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise as the paper's code does (vision_transformer, `vit_jax/models_vit.py`); [CLS] stays zero."""
        self.position.init_weights(cast("ViT", self))
        if hasattr(self, "reg_token"):
            nn.init.normal_(self.reg_token, std=1e-6)  # arXiv 2309.16588 starts registers as DINOv2 starts [CLS]
        # Convolutions and pre-logits keep flax's default: lecun_normal, zero bias.
        lecun_normal_(self.patch_embed.proj)
        if self.config.representation != "none":
            lecun_normal_(self.pre_logits.fc)
        for block in self.blocks:
            initialise_attention_(block.attn.qkv, parts=3)
            initialise_attention_(block.attn.proj, parts=1)
            initialise_mlp_(block.mlp)
        if self.config.pool == "map":  # big_vision, MAPHead
            nn.init.xavier_uniform_(self.attn_pool.latent[0])
            for linear, parts in ((self.attn_pool.q, 1), (self.attn_pool.kv, 2), (self.attn_pool.proj, 1)):
                initialise_attention_(linear, parts)
            initialise_mlp_(self.attn_pool.mlp)
        self.zero_head()

    def make_tables(self) -> dict[str, Tensor | None]:
        """Compute the fixed tables of the position embedding, the attention mask, and the order of patches for
        merging."""
        c = self.config
        mask = attention_mask(c) if c.attention != "global" and not c.sparse_parts else None
        sparse = {
            f"part{number}_{name}": table
            for number, part in enumerate(c.sparse_parts)
            for name, table in part_tables(part, c.prefix).items()
        }
        return {**self.position.tables(), "mask": mask, "board": chessboard(c.grid) if c.merge else None, **sparse}

    def sparse_pattern(self, layer: int) -> SparsePattern:
        """Return the pairs of tokens that sparse attention computes, with the bias of `layer`."""
        prefix, parts = self.config.prefix, []
        for number in range(len(self.config.sparse_parts)):
            queries_GQ, keys_GM, order_N, bias_GHQM = (
                self.get_buffer(f"part{number}_{name}") for name in ("queries", "keys", "order", "bias")
            )
            if (bias_HGQM := self._pair_bias(layer, queries_GQ[:, :, None] + prefix, keys_GM[:, None])) is not None:
                bias_GHQM = bias_GHQM + bias_HGQM.transpose(0, 1)
            parts.append(PatternPart(queries_GQ, keys_GM, order_N, bias_GHQM))
        tokens_T = torch.arange(self.config.tokens, device=bias_GHQM.device)
        prefix_bias_HPT = self._pair_bias(layer, tokens_T[:prefix, None], tokens_T) if prefix else None
        return SparsePattern(prefix, tuple(parts), prefix_bias_HPT)

    def _pair_bias(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor | None:
        return self.position.pair_bias(cast("ViT", self), layer, queries, keys)

    @torch.no_grad()
    def resize(self, resolution: int | Pair, rule: ResizeRule | None = None) -> Self:
        """Return a copy of this model for another resolution or aspect ratio, on the same device.

        Learned position embeddings of patches are interpolated by `rule` (default: the configuration's), which the
        copy's configuration records. All other parameters are the same.
        """
        old = self.config
        new = old.replace(resolution=resolution, resize_rule=rule or old.resize_rule)
        self.position.check_resize(new)
        tensors = {}
        for name, tensor in self.state_dict().items():
            leaf = name.rpartition(".")[2]
            is_learned = leaf in self.position.learned
            tensors[name] = self.position.resized(leaf, tensor, new) if is_learned else tensor.clone()
        return self.rebuild(new, tensors)

    # Hooks for other packages

    def layout(self) -> Layout:
        c = self.config
        step = (c.step[0] * c.canvas_scale, c.step[1] * c.canvas_scale)
        reads: dict[str, Reads] = {"cls": "[CLS]", "gap": "mean", "map": "pool"}
        allowed = None if c.attention == "global" else attention_mask(c)[c.prefix :, c.prefix :].numpy()
        return Layout(c.grid, step, c.prefix, reads[c.pool], allowed, merges=bool(c.merge), residual=c.residual)

    def normalise_layer(self, output: Tensor) -> Tensor:
        with evaluating(self.norm):  # analysing a layer must not change the statistics of BatchNorm
            return self.norm(output)

    def replace_head(self, classes: int, *, embedding: int = 0) -> None:
        if self.config.representation != "none":
            self.config = self.config.replace(representation="none")
            del self.pre_logits
        if self.config.distilled:
            self._replace_two_heads(classes, embedding)
            return
        super().replace_head(classes, embedding=embedding)

    def _replace_two_heads(self, classes: int, embedding: int) -> None:
        """Replace both heads of a distilled model; an embedding reads [CLS] alone."""
        del self.head_dist
        self.config = self.config.replace(distilled=False)
        super().replace_head(classes, embedding=embedding)
        if not embedding:
            self.head_dist = copy.deepcopy(self.head)
            self.config = self.config.replace(distilled=True)

    def output_layers(self) -> list[nn.Linear]:
        second = [self.head_dist] if self.config.distilled and isinstance(self.head_dist, nn.Linear) else []
        return [*super().output_layers(), *second]
