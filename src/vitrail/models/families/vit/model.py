"""The Vision Transformer (arXiv 2010.11929), equation by equation.

Shapes: B images, C channels, N = h*w patches, T tokens with [CLS] and registers, Q computed tokens, D width, K classes.

    z_0  = [x_class; x_1 E; ...; x_N E] + E_pos        eq. 1    ViT.embed
    z'_l = MSA(LN(z_(l-1))) + z_(l-1)                  eq. 2    Block.forward, ViT.encode
    z_l  = MLP(LN(z'_l)) + z'_l                        eq. 3    Block.forward, ViT.encode
    y    = LN(z_L^0)                                   eq. 4    ViT.read

Eqs. 5 to 8 are `Attention` in `models/layers.py`. `hooks.py` has the initial weights, the tables and the resizing.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from vitrail.models.activations import Activations
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.hooks import ViTHooks
from vitrail.models.families.vit.merging import Groups, merge_similar, spread
from vitrail.models.families.vit.recording import record_layer
from vitrail.models.layers import (
    MLP,
    NORMS,
    Attention,
    AttentionPool,
    Bias,
    LayerScale,
    NoNorm,
    PatchEmbed,
    PreLogits,
    drop,
    drop_path,
    drop_tokens,
)
from vitrail.models.sparse_attention import dense_bias


class Block(nn.Module):
    """One encoder layer: attention across tokens, then an MLP on each token, both with residual connections."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        c, norm = config, NORMS[config.norm]
        self.pre_norm, self.residual, self.drop_path = c.norm_order == "pre", c.residual, drop_path
        self.norm1 = norm(c.width, eps=c.norm_epsilon)
        self.attn = Attention(
            width=c.width, heads=c.heads, qkv_bias=c.qkv_bias, scale=c.attention_scale, dropout=c.dropout
        )
        self.norm2 = norm(c.width, eps=c.norm_epsilon)
        self.mlp = MLP(width=c.width, hidden=c.mlp, activation=c.activation, dropout=c.dropout)
        self.ls1 = self.ls2 = None
        if c.layer_scale is not None:
            self.ls1, self.ls2 = (LayerScale(c.width, c.layer_scale) for _ in range(2))

    def forward(
        self, z_BTD: Tensor, rope: Tensor | None = None, bias: Bias = None, queries: int | None = None
    ) -> Tensor:
        """Apply eqs. 2 and 3. In the original encoder (post-norm), the norms follow the sums instead.

        With `queries`, only the first `queries` tokens are computed: (B, queries, D).
        """
        z_BQD = z_BTD if queries is None else z_BTD[:, :queries]
        if self.pre_norm:
            z_BQD = self.add_branch(z_BQD, self.attn(self.norm1(z_BTD), rope, bias, queries), self.ls1)  # eq. 2
            return self.add_branch(z_BQD, self.mlp(self.norm2(z_BQD)), self.ls2)  # eq. 3
        z_BQD = self.norm1(self.add_branch(z_BQD, self.attn(z_BTD, rope, bias, queries), self.ls1))
        return self.norm2(self.add_branch(z_BQD, self.mlp(z_BQD), self.ls2))

    def add_branch(self, z_BQD: Tensor, branch_BQD: Tensor, scale: LayerScale | None) -> Tensor:
        """Apply the residual connection, with LayerScale and stochastic depth."""
        if scale is not None:
            branch_BQD = scale(branch_BQD)
        return z_BQD + drop_path(branch_BQD, self.drop_path, self.training) if self.residual else branch_BQD

    def attention(self, z_BTD: Tensor, rope: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the attention weights (B, H, T, T) of this layer, computed separately from the fused kernel."""
        return self.attn.weights(self.norm1(z_BTD) if self.pre_norm else z_BTD, rope, bias)

    def cls_attention(self, z_BTD: Tensor) -> Tensor:
        """Return the attention of the first token to each token (B, T), the mean over heads."""
        return self.attn.cls_attention(self.norm1(z_BTD) if self.pre_norm else z_BTD).mean(dim=1)


class ViT(ViTHooks):
    """The Vision Transformer: `forward(images) -> logits`. `vitrail.create` builds a model by its name."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        c, norm = config, NORMS[config.norm]
        self.patch_embed = self.make_patch_embed()
        if c.pool == "cls":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        if c.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, c.registers, c.width))
        rates = [c.drop_path * layer / max(c.depth - 1, 1) for layer in range(c.depth)]
        self.blocks = cast(list[Block], nn.ModuleList(Block(c, rate) for rate in rates))
        self.position = c.position_embedding
        self.position.add_parameters(self)
        if c.embedding_norm:
            self.norm_pre = norm(c.width, eps=c.norm_epsilon)
        self.norm = norm(c.width, eps=c.norm_epsilon) if c.norm_order == "pre" else nn.Identity()
        if c.pool == "map":
            self.attn_pool = AttentionPool(
                width=c.width,
                heads=c.heads,
                hidden=c.mlp,
                activation=c.activation,
                norm=(NoNorm if c.norm == "none" else nn.LayerNorm)(c.width, eps=c.norm_epsilon),
            )
        if c.representation != "none":
            self.pre_logits = PreLogits(c.width, c.representation)
        self.head = self.make_head(c.width)
        if c.distilled:
            self.head_dist = self.make_head(c.width)
        self.initialise()
        self.fill_tables()

    def make_patch_embed(self) -> PatchEmbed:
        """Create the module that computes x_p E of eq. 1. A hybrid overrides this method to add convolutions."""
        c = self.config
        return PatchEmbed(
            channels=c.channels,
            width=c.width,
            patch=c.patch,
            stride=c.step,
            padding=c.padding,
            bias=c.patch_bias,
        )

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        """Return logits (B, K). `activations` records intermediate results and does not change them."""
        z_BTD = self.embed(images_BCHW, activations)
        z_BTD = self.encode(z_BTD, activations)
        return self.read(z_BTD, activations)

    def embed(
        self,
        images_BCHW: Tensor,
        activations: Activations | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Eq. 1: project the patches, prepend [CLS] and registers, add positions. Training may drop patches.

        `change` is applied to the projected patches (B, N, D).
        """
        self._check_images(images_BCHW)
        x_BND = self.patch_embed(images_BCHW, activations)
        if change is not None:
            x_BND = change(x_BND)
        prefix = [getattr(self, name) for name in ("cls_token", "reg_token") if hasattr(self, name)]
        z_BTD = torch.cat([*(token.expand(x_BND.shape[0], -1, -1) for token in prefix), x_BND], dim=1)
        if self.config.placement == "once" and (added_TD := self.position.added(self, 0)) is not None:
            z_BTD = z_BTD + added_TD
        if self.config.embedding_norm:
            z_BTD = self.norm_pre(z_BTD)
        if activations is not None:
            activations.steps["tokens"] = z_BTD
        if self.training and self.config.token_drop:
            z_BTD = drop_tokens(z_BTD, self.config.prefix, self.config.token_drop)
        return drop(z_BTD, self.config.dropout, self.training)

    def encode(self, z_BTD: Tensor, activations: Activations | None = None, all_tokens: bool = False) -> Tensor:
        """Apply eqs. 2 and 3 `depth` times.

        The last block computes only the tokens that the head reads (often only [CLS]), unless `all_tokens` is set: the
        same logits for less work (7 % of ViT-B/16).
        """
        c, last = self.config, self.config.depth - 1
        queries = None if all_tokens else self.tokens_read
        if self.training and activations is not None and last in activations.layers:
            queries = None  # recording would compute the last block a second time, with another dropout
        groups: Groups | None = None
        for layer, block in enumerate(self.blocks):
            if c.placement != "once" and (added_TD := self.position.added(self, layer)) is not None:
                z_BTD = z_BTD + added_TD
            if c.merge:
                z_BTD, groups = merge_similar(z_BTD, groups, c, layer, block.cls_attention, self.board)
            rope, bias = self.attention_terms(layer)
            if groups is not None:
                bias = groups.bias  # a model that merges has no mask and no other bias
            input_BTD = z_BTD
            z_BTD = self.run_block(block, input_BTD, rope, bias, queries if layer == last else None)
            if activations is not None and (layer in activations.layers or layer in activations.inside):
                dense = dense_bias(bias)
                record_layer(activations, layer, block, input_BTD, z_BTD, rope, dense, groups, merges=bool(c.merge))
        return spread(z_BTD, groups) if queries is None else z_BTD

    @property
    def tokens_read(self) -> int | None:
        """Number of tokens, from the first, that the head reads; None for all. BatchNorm's statistics need all."""
        return 1 + self.config.distilled if self.config.pool == "cls" and self.config.norm != "batch" else None

    def attention_terms(self, layer: int) -> tuple[Tensor | None, Bias]:
        """Return the rotation of queries and keys in `layer` (2, T, K/2), and the bias of its attention logits (H, T,
        T), their mask (T, T) or the pairs to compute."""
        rope = self.position.rotation(self)
        if self.config.sparse_parts:
            return rope, self.sparse_pattern(layer)
        bias_HTT = self.position.bias(self, layer)
        if bias_HTT is None:
            return rope, self.mask
        return rope, bias_HTT if self.mask is None else bias_HTT.masked_fill(~self.mask, -torch.inf)

    def read(self, z_BTD: Tensor, activations: Activations | None = None) -> Tensor:
        """Apply eq. 4 and the head: normalise, pool, classify."""
        y_BTD = self.norm(z_BTD[:, : self.tokens_read])
        pooled_BD = self.pool(y_BTD)
        logits_BK = self._classify_tokens(y_BTD, pooled_BD)
        if activations is not None:
            activations.steps["pooled"], activations.logits = pooled_BD, logits_BK
            if self.config.pool == "map" and activations.with_attention:
                activations.pooling = self.attn_pool.weights(y_BTD)
        return logits_BK

    def pool(self, output: Tensor) -> Tensor:
        match self.config.pool:
            case "cls":
                return output[:, :2].mean(dim=1) if self.config.distilled else output[:, 0]
            case "gap":
                return output[:, self.config.prefix :].mean(dim=1)
        return self.attn_pool(output)

    def forward_features(self, images: Tensor) -> Tensor:
        return self.norm(self.encode(self.embed(images), all_tokens=True))

    def _classify_tokens(self, y_BTD: Tensor, pooled_BD: Tensor) -> Tensor:
        """Apply the head to the pooled tokens; of two heads, apply each to its own token."""
        if self.config.distilled:
            return (self.head(y_BTD[:, 0]) + self.head_dist(y_BTD[:, 1])) / 2
        return self.head(self.pre_logits(pooled_BD) if self.config.representation != "none" else pooled_BD)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        pooled_BD = self.pool(features)
        return pooled_BD if pre_logits else self._classify_tokens(features, pooled_BD)

    def encode_patches(self, images_BCHW: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        z_BTD = self.encode(self.embed(images_BCHW, change=change), all_tokens=True)
        return self.norm(z_BTD)[:, self.config.prefix :]
