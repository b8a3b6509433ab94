"""The Vision Transformer (arXiv 2010.11929), equation by equation.

Shapes: B images, C channels, N = h*w patches, T tokens with [CLS] and registers, D width, H heads, K classes.

    z_0  = [x_class; x_1 E; ...; x_N E] + E_pos        eq. 1    ViT.embed
    z'_l = MSA(LN(z_(l-1))) + z_(l-1)                  eq. 2    Block.forward
    z_l  = MLP(LN(z'_l)) + z'_l                        eq. 3    Block.forward
    y    = LN(z_L^0)                                   eq. 4    ViT.read
"""

from collections.abc import Callable
from typing import Self, cast

import torch
from torch import Tensor, nn

from vitrail.core.settings import Pair
from vitrail.models.activations import Activations
from vitrail.models.base import Layout, Model, Reads
from vitrail.models.device import evaluating
from vitrail.models.families.vit.attention_mask import attention_mask
from vitrail.models.families.vit.config import ResizeRule, ViTConfig
from vitrail.models.families.vit.merging import Groups, chessboard, match, merge, spread
from vitrail.models.families.vit.recording import record_layer
from vitrail.models.initialise import initialise_attention_, initialise_mlp_, lecun_normal_
from vitrail.models.layers import (
    MLP,
    Attention,
    AttentionPool,
    LayerScale,
    PatchEmbed,
    PreLogits,
    drop,
    drop_path,
    drop_tokens,
    make_norm,
)
from vitrail.models.positions.base import Position


class Block(nn.Module):
    """One encoder layer: attention across tokens, then an MLP on each token, both with residual connections."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.pre_norm, self.dropout, self.drop_path = config.norm_order == "pre", config.dropout, drop_path
        self.norm1 = make_norm(config.norm, config.width, config.norm_epsilon)
        self.residual = config.residual
        self.attn = Attention(
            width=config.width, heads=config.heads, qkv_bias=config.qkv_bias, scale=config.attention_scale
        )
        self.norm2 = make_norm(config.norm, config.width, config.norm_epsilon)
        self.mlp = MLP(width=config.width, hidden=config.mlp, activation=config.activation, dropout=config.dropout)
        self.ls1 = self.ls2 = None
        if config.layer_scale is not None:
            self.ls1, self.ls2 = (LayerScale(config.width, config.layer_scale) for _ in range(2))

    def forward(
        self, z_BTD: Tensor, rope: Tensor | None = None, bias: Tensor | None = None, queries: int | None = None
    ) -> Tensor:
        """With `queries`, only the first `queries` tokens are computed: (B, queries, D)."""
        asking_BQD = z_BTD if queries is None else z_BTD[:, :queries]
        msa_BQD = self.attn(self.norm1(z_BTD) if self.pre_norm else z_BTD, rope, bias, queries)
        msa_BQD = drop(msa_BQD, self.dropout, self.training)
        z_BQD = self.add(asking_BQD, msa_BQD, self.ls1)  # eq. 2
        if self.pre_norm:
            return self.add(z_BQD, self.mlp(self.norm2(z_BQD)), self.ls2)  # eq. 3
        z_BQD = self.norm1(z_BQD)
        return self.norm2(self.add(z_BQD, self.mlp(z_BQD), self.ls2))

    def add(self, z_BQD: Tensor, branch_BQD: Tensor, scale: LayerScale | None) -> Tensor:
        """The residual connection."""
        if scale is not None:
            branch_BQD = scale(branch_BQD)
        return z_BQD + drop_path(branch_BQD, self.drop_path, self.training) if self.residual else branch_BQD

    def attention(self, z_BTD: Tensor, rope: Tensor | None, bias: Tensor | None) -> Tensor:
        """The attention weights (B, H, T, T) of this layer, computed separately from the fused kernel."""
        return self.attn.weights(self.norm1(z_BTD) if self.pre_norm else z_BTD, rope, bias)

    def cls_attention(self, z_BTD: Tensor) -> Tensor:
        """The attention of the first token to each token (B, T), the mean over heads."""
        return self.attn.cls_attention(self.norm1(z_BTD) if self.pre_norm else z_BTD).mean(dim=1)


class ViT(Model[ViTConfig]):
    """`forward(images) -> logits`. Build one by name with `vitrail.create`."""

    blocks: list[Block]  # a ModuleList, which cannot say what it holds
    mask: Tensor | None
    board: Tensor | None
    projection = "patch_embed.proj"
    reads_layers = True
    opens_blocks = True

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        c = config
        self.patch_embed = self.make_patch_embed()
        if c.pool == "cls":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        if c.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, c.registers, c.width))
        rates = [c.drop_path * layer / max(c.depth - 1, 1) for layer in range(c.depth)]
        self.blocks = cast(list[Block], nn.ModuleList(Block(c, rate) for rate in rates))
        self.position: Position = c.position_embedding
        self.position.add_parameters(self)
        self.norm = make_norm(c.norm, c.width, c.norm_epsilon) if c.norm_order == "pre" else nn.Identity()
        if c.pool == "map":
            self.attn_pool = AttentionPool(
                width=c.width,
                heads=c.heads,
                hidden=c.mlp,
                activation=c.activation,
                norm=nn.LayerNorm(c.width, eps=c.norm_epsilon),
            )
        if c.representation != "none":
            self.pre_logits = PreLogits(c.width, c.representation)
        self.head = self.make_head(c.width)
        self.initialise()
        self.fill_tables()

    def make_patch_embed(self) -> PatchEmbed:
        """x_p E of eq. 1; a hybrid puts convolutions before it."""
        c = self.config
        return PatchEmbed(channels=c.channels, width=c.width, patch=c.patch, stride=c.step, padding=c.padding)

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        """Logits (B, K). `activations` records intermediate results and does not change them."""
        z_BTD = self.embed(images_BCHW, activations)
        z_BTD = self.encode(z_BTD, activations)
        return self.read(z_BTD, activations)

    def embed(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        """Eq. 1: project the patches, prepend [CLS] and registers, add positions."""
        self._check_images(images_BCHW)
        return self.assemble(self.patch_embed(images_BCHW, activations), activations)

    def assemble(self, x_BND: Tensor, activations: Activations | None = None) -> Tensor:
        """The rest of eq. 1: the sequence of tokens from projected patches. Training may drop some tokens."""
        prefix = [getattr(self, name) for name in ("cls_token", "reg_token") if hasattr(self, name)]
        z_BTD = torch.cat([*(token.expand(x_BND.shape[0], -1, -1) for token in prefix), x_BND], dim=1)
        if self.config.placement == "once" and (added_TD := self.position.added(self, 0)) is not None:
            z_BTD = z_BTD + added_TD
        if activations is not None:
            activations.steps["tokens"] = z_BTD
        if self.training and self.config.token_drop:
            z_BTD = drop_tokens(z_BTD, self.config.prefix, self.config.token_drop)
        return drop(z_BTD, self.config.dropout, self.training)

    def encode(self, z_BTD: Tensor, activations: Activations | None = None, all_tokens: bool = False) -> Tensor:
        """Eqs. 2 and 3, `depth` times.

        If the head reads only [CLS], the last block computes only that token: the same logits for less work (7 % of
        ViT-B/16). `all_tokens` computes every token, and so does recording that block in training.
        """
        last = len(self.blocks) - 1
        # BatchNorm draws its statistics from every token, so there none may be left out.
        trim = self.config.pool == "cls" and self.config.norm == "layer" and not all_tokens
        if self.training and activations is not None and last in activations.layers:
            trim = False  # computed once more for all tokens, it would draw another dropout than the head reads
        groups: Groups | None = None
        for layer, block in enumerate(self.blocks):
            if self.config.placement != "once" and (added_TD := self.position.added(self, layer)) is not None:
                z_BTD = z_BTD + added_TD
            if self.config.merge and (count := self.config.merged(layer, z_BTD.shape[1] - self.config.prefix)):
                read_BT = block.cls_attention(z_BTD) if self.config.pool == "cls" else None
                pairs = match(z_BTD, self.config.prefix, count, self.board, groups, read_BT)
                z_BTD, groups = merge(z_BTD, groups, pairs)
            rope, bias = self.position.rotation(self), self.bias(layer)
            if activations is not None and (layer in activations.layers or layer in activations.inside):
                tokens_BTD, merges = spread(z_BTD, groups), bool(self.config.merge)
                record_layer(activations, layer, block, tokens_BTD, rope, bias, merges=merges)
            input_BTD = z_BTD
            sized = bias if groups is None else groups.bias
            z_BTD = self.run_block(block, input_BTD, rope, sized, 1 if trim and layer == last else None)
            if activations is not None and layer in activations.layers:
                is_complete = z_BTD.shape[1] == input_BTD.shape[1]
                activations.keep(layer, spread(z_BTD if is_complete else block(input_BTD, rope, sized), groups))
        return z_BTD if trim else spread(z_BTD, groups)

    def read(self, z_BTD: Tensor, activations: Activations | None = None) -> Tensor:
        """Eq. 4 and the head: normalise, pool, classify."""
        match self.config.pool:
            case "cls":
                y_BD = self.norm(z_BTD)[:, 0] if self.config.norm == "batch" else self.norm(z_BTD[:, 0])
            case "gap":
                y_BD = self.norm(z_BTD)[:, self.config.prefix :].mean(dim=1)
            case "map":
                y_BD = self.attn_pool(self.norm(z_BTD))
                if activations is not None and activations.with_attention:
                    activations.pooling = self.attn_pool.weights(self.norm(z_BTD))
        pooled_BD = y_BD
        if self.config.representation != "none":
            y_BD = self.pre_logits(y_BD)
        logits_BK = self.head(y_BD)
        if activations is not None:
            activations.steps["pooled"], activations.logits = pooled_BD, logits_BK
        return logits_BK

    def bias(self, layer: int) -> Tensor | None:
        """What is added to the attention logits of `layer`, or masks them, (H, T, T) or (T, T)."""
        bias_HTT = self.position.bias(self, layer)
        if bias_HTT is None:
            return self.mask
        return bias_HTT if self.mask is None else bias_HTT.masked_fill(~self.mask, -torch.inf)

    @torch.no_grad()
    def init_weights(self) -> None:
        """As the paper's code does (vision_transformer, `vit_jax/models_vit.py`); [CLS] stays zero."""
        self.position.init_weights(self)
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
        """Fixed position tables, rotations, indices and masks."""
        c = self.config
        mask = attention_mask(c) if c.attention != "global" else None
        return {**self.position.tables(), "mask": mask, "board": chessboard(c.grid) if c.merge else None}

    @torch.no_grad()
    def resize(self, resolution: int | Pair, rule: ResizeRule | None = None) -> Self:
        """A copy of this model for another resolution or aspect ratio, on the same device.

        Learned position embeddings of patches are interpolated by `rule` (default: that of the configuration), which
        the copy's configuration records. All other parameters are the same.
        """
        old = self.config
        new = old.replace(resolution=resolution, resize_rule=rule or old.resize_rule)
        self.position.check_resize(new)
        tensors = {}
        for name, tensor in self.state_dict().items():
            leaf = name.rpartition(".")[2]
            resizes = leaf in self.position.learned
            tensors[name] = self.position.resized(leaf, tensor, new) if resizes else tensor.clone()
        return self.rebuild(new, tensors)

    # Hooks for other packages

    def layout(self) -> Layout:
        c = self.config
        step = (c.step[0] * c.canvas_scale, c.step[1] * c.canvas_scale)
        reads: dict[str, Reads] = {"cls": "[CLS]", "gap": "mean", "map": "pool"}
        allowed = None if self.mask is None else self.mask[c.prefix :, c.prefix :].cpu().numpy()
        return Layout(c.grid, step, c.prefix, reads[c.pool], allowed, merges=bool(c.merge), residual=c.residual)

    def encode_patches(self, images_BCHW: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        z_BTD = self.encode(self.assemble(change(self.patch_embed(images_BCHW))), all_tokens=True)
        return self.norm(z_BTD)[:, self.config.prefix :]

    def normalise_layer(self, output: Tensor) -> Tensor:
        with evaluating(self.norm):  # looking at a layer must not move the statistics of BatchNorm
            return self.norm(output)

    def replace_head(self, classes: int, *, embedding: int = 0) -> None:
        if self.config.representation != "none":
            self.config = self.config.replace(representation="none")
            del self.pre_logits
        super().replace_head(classes, embedding=embedding)
