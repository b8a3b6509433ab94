"""The Vision Transformer (arXiv 2010.11929), equation by equation.

Shapes: B images, C channels, N = h*w patches, T tokens with [CLS] and registers, D width, H heads, K classes.

    z_0  = [x_class; x_1 E; ...; x_N E] + E_pos        eq. 1    ViT.embed
    z'_l = MSA(LN(z_(l-1))) + z_(l-1)                  eq. 2    Block.forward
    z_l  = MLP(LN(z'_l)) + z'_l                        eq. 3    Block.forward
    y    = LN(z_L^0)                                   eq. 4    ViT.read
"""

from typing import Self, cast

import torch
from torch import Tensor, nn

from vitrail.configs.vit import ResizeRule, ViTConfig
from vitrail.errors import UsageError
from vitrail.models.base import Model, Seen
from vitrail.models.initialise import initialise_attention_, initialise_mlp_, lecun_normal_
from vitrail.models.layers import (
    MLP,
    Attention,
    AttentionPool,
    LayerScale,
    PatchEmbed,
    activate,
    drop,
    drop_path,
    drop_tokens,
    is_plain,
    make_norm,
)
from vitrail.models.positions import (
    LEARNED_TABLES,
    attention_mask,
    relative_index,
    resize_table,
    rope_table,
    sincos_grid,
)
from vitrail.settings import Pair


class Block(nn.Module):
    """One encoder layer: attention mixes tokens, the MLP works on each alone; both add to what was there."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.pre_norm, self.dropout, self.drop_path = config.norm_order == "pre", config.dropout, drop_path
        self.norm1 = make_norm(config.norm, config.width, config.norm_epsilon)
        self.attn = Attention(width=config.width, heads=config.heads, qkv_bias=config.qkv_bias)
        self.norm2 = make_norm(config.norm, config.width, config.norm_epsilon)
        self.mlp = MLP(width=config.width, hidden=config.mlp, activation=config.activation, dropout=config.dropout)
        self.ls1 = self.ls2 = None
        if config.layer_scale is not None:
            self.ls1, self.ls2 = (LayerScale(config.width, config.layer_scale) for _ in range(2))
        if config.position == "relative" and config.placement == "every":
            self.relative_bias = nn.Parameter(torch.zeros(config.heads, config.relative_offsets))

    def forward(
        self, z_BTD: Tensor, rope: Tensor | None = None, bias: Tensor | None = None, queries: int | None = None
    ) -> Tensor:
        """With `queries`, only the first so many tokens are carried on: (B, queries, D)."""
        asking_BQD = z_BTD if queries is None else z_BTD[:, :queries]
        if self.pre_norm:
            z_BQD = self._add(asking_BQD, self._attend(self.norm1(z_BTD), rope, bias, queries), self.ls1)  # eq. 2
            return self._add(z_BQD, self.mlp(self.norm2(z_BQD)), self.ls2)  # eq. 3
        z_BQD = self.norm1(self._add(asking_BQD, self._attend(z_BTD, rope, bias, queries), self.ls1))
        return self.norm2(self._add(z_BQD, self.mlp(z_BQD), self.ls2))

    def _attend(self, x_BTD: Tensor, rope: Tensor | None, bias: Tensor | None, queries: int | None) -> Tensor:
        return drop(self.attn(x_BTD, rope, bias, queries), self.dropout, self.training)

    def _add(self, z_BQD: Tensor, branch_BQD: Tensor, scale: LayerScale | None) -> Tensor:
        if scale is not None:
            branch_BQD = scale(branch_BQD)
        return z_BQD + drop_path(branch_BQD, self.drop_path, self.training)

    def attention(self, z_BTD: Tensor, rope: Tensor | None, bias: Tensor | None) -> Tensor:
        """The attention weights (B, H, T, T) of this layer, computed beside the fused kernel."""
        return self.attn.weights(self.norm1(z_BTD) if self.pre_norm else z_BTD, rope, bias)


class PreLogits(nn.Module):
    """The hidden layer of the pre-training head (section 3.1)."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.fc = nn.Linear(width, width)

    def forward(self, y_BD: Tensor) -> Tensor:
        return activate(self.fc(y_BD), self.activation, fresh=is_plain(self.fc))


class ViT(Model[ViTConfig]):
    """`forward(images) -> logits`. Build one by name with `vitrail.create`."""

    blocks: list[Block]  # a ModuleList, which cannot say what it holds
    sincos: Tensor | None
    rope: Tensor | None
    relative: Tensor | None
    mask: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        c = config
        self.patch_embed = self.make_patch_embed()
        if c.pool == "cls":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        if c.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, c.registers, c.width))
        # One table where position enters once or is shared, one per layer otherwise: (tables, rows, D).
        tables = c.depth if c.placement == "every" else 1
        if c.position == "learned-1d":
            self.pos_embed = nn.Parameter(torch.zeros(tables, c.positioned_class + c.patches, c.width))
        elif c.position == "learned-2d":
            self.pos_embed_row = nn.Parameter(torch.zeros(tables, c.grid[0], c.width // 2))
            self.pos_embed_column = nn.Parameter(torch.zeros(tables, c.grid[1], c.width // 2))
            if c.positioned_class:
                self.pos_embed_cls = nn.Parameter(torch.zeros(tables, 1, c.width))
        elif c.position == "relative" and c.placement == "shared":
            self.relative_bias = nn.Parameter(torch.zeros(c.heads, c.relative_offsets))
        rates = [c.drop_path * layer / max(c.depth - 1, 1) for layer in range(c.depth)]
        self.blocks = cast(list[Block], nn.ModuleList(Block(c, rate) for rate in rates))
        self.norm = make_norm(c.norm, c.width, c.norm_epsilon) if c.norm_order == "pre" else nn.Identity()
        if c.pool == "map":
            self.attn_pool = AttentionPool(
                width=c.width, heads=c.heads, hidden=c.mlp, activation=c.activation,
                norm=nn.LayerNorm(c.width, eps=c.norm_epsilon),
            )  # fmt: skip
        if c.representation != "none":
            self.pre_logits = PreLogits(c.width, c.representation)
        self.head = nn.Linear(c.width, c.classes)
        self.draw()
        self.fill_tables()

    def make_patch_embed(self) -> PatchEmbed:
        """x_p E of eq. 1; a hybrid puts convolutions before it."""
        c = self.config
        return PatchEmbed(channels=c.channels, width=c.width, patch=c.patch, stride=c.step, padding=c.padding)

    def forward(self, images_BCHW: Tensor, seen: Seen | None = None) -> Tensor:
        """Logits (B, K). `seen` collects what passes by; it never changes the way."""
        z_BTD = self.embed(images_BCHW, seen)
        z_BTD = self.encode(z_BTD, seen)
        return self.read(z_BTD, seen)

    def embed(self, images_BCHW: Tensor, seen: Seen | None = None) -> Tensor:
        """Eq. 1: patches, projected, with [CLS] and registers before them and their positions added."""
        self._check_images(images_BCHW)
        return self.assemble(self.patch_embed(images_BCHW, seen), seen)

    def assemble(self, x_BND: Tensor, seen: Seen | None = None) -> Tensor:
        """The rest of eq. 1: the sequence of tokens from projected patches. Training may drop some of them."""
        prefix = [getattr(self, name) for name in ("cls_token", "reg_token") if hasattr(self, name)]
        z_BTD = torch.cat([*(token.expand(x_BND.shape[0], -1, -1) for token in prefix), x_BND], dim=1)
        if self.config.placement == "once" and (position := self.position(0)) is not None:
            z_BTD = z_BTD + position
        if seen is not None:
            seen.steps["tokens"] = z_BTD
        if self.training and self.config.token_drop:
            z_BTD = drop_tokens(z_BTD, self.config.prefix, self.config.token_drop)
        return drop(z_BTD, self.config.dropout, self.training)

    def encode(self, z_BTD: Tensor, seen: Seen | None = None, whole: bool = False) -> Tensor:
        """Eqs. 2 and 3, `depth` times.

        The head reads [CLS] alone, so the last block asks, projects and runs its MLP for that one token: the same
        logits for less work (7 % of ViT-B/16). `whole` carries all tokens to the end.
        """
        last = len(self.blocks) - 1
        # BatchNorm draws its statistics from every token, so there none may be left out.
        trim = self.config.pool == "cls" and self.config.norm == "layer" and not whole
        for layer, block in enumerate(self.blocks):
            if self.config.placement != "once" and (position := self.position(layer)) is not None:
                z_BTD = z_BTD + position
            rope, bias = self.rope, self.bias(layer)
            if seen is not None and seen.wants_attention(layer):
                seen.attention[layer] = block.attention(z_BTD, rope, bias)
            entering_BTD = z_BTD
            z_BTD = self.through(block, entering_BTD, rope, bias, 1 if trim and layer == last else None)
            if seen is not None and layer in seen.layers:
                is_whole = z_BTD.shape[1] == entering_BTD.shape[1]
                seen.keep(layer, z_BTD if is_whole else block(entering_BTD, rope, bias))
        return z_BTD

    def read(self, z_BTD: Tensor, seen: Seen | None = None) -> Tensor:
        """Eq. 4 and the head: normalise, pool, classify."""
        match self.config.pool:
            case "cls":
                y_BD = self.norm(z_BTD)[:, 0] if self.config.norm == "batch" else self.norm(z_BTD[:, 0])
            case "gap":
                y_BD = self.norm(z_BTD)[:, self.config.prefix :].mean(dim=1)
            case "map":
                y_BD = self.attn_pool(self.norm(z_BTD))
                if seen is not None and seen.weighs:
                    seen.pooling = self.attn_pool.weights(self.norm(z_BTD))
        pooled_BD = y_BD
        if self.config.representation != "none":
            y_BD = self.pre_logits(y_BD)
        logits_BK = self.head(y_BD)
        if seen is not None:
            seen.finish(pooled_BD, logits_BK)
        return logits_BK

    def position(self, layer: int) -> Tensor | None:
        """What is added to the tokens (T, D) before `layer`; None for kinds that act inside attention."""
        c = self.config
        table = layer if c.placement == "every" else 0
        if c.position == "learned-1d":
            own = self.pos_embed[table]
            if c.positioned_class + c.patches == c.tokens:
                return own
            class_row, grid = own[: c.positioned_class], own[c.positioned_class :]
        elif c.position == "learned-2d":
            rows = self.pos_embed_row[table][:, None].expand(-1, c.grid[1], -1)
            columns = self.pos_embed_column[table][None].expand(c.grid[0], -1, -1)
            grid = torch.cat([rows, columns], dim=-1).flatten(0, 1)
            class_row = self.pos_embed_cls[table] if c.positioned_class else grid[:0]
        elif c.position in ("sincos-1d", "sincos-2d"):
            return self.sincos
        else:
            return None
        nowhere = grid.new_zeros(c.tokens - len(class_row) - len(grid), c.width)
        return torch.cat([class_row, nowhere, grid])

    def bias(self, layer: int) -> Tensor | None:
        """What is added to the attention logits of `layer`, or masks them, (H, T, T) or (T, T).

        A learned bias needs a gradient, for which the CPU has no fused kernel: relative positions train slower.
        """
        if self.config.position != "relative":
            return self.mask
        shared = self.config.placement == "shared"
        bias_HTT = (self if shared else self.blocks[layer]).relative_bias[:, self.relative]
        return bias_HTT if self.mask is None else bias_HTT.masked_fill(~self.mask, -torch.inf)

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw the parameters as the paper's code does (vision_transformer, `vit_jax/models_vit.py`)."""
        for name, parameter in self.named_parameters():
            if name.startswith("pos_embed"):
                nn.init.normal_(parameter, std=0.02)  # AddPositionEmbs: normal(stddev=0.02); [CLS] stays zero
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
        # The head starts at zero, so that a new one does not disturb what was pre-trained (section 3.2).
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def fill_tables(self) -> None:
        """Compute what follows from the configuration alone: fixed positions, angles, indices, masks."""
        c = self.config
        sincos = None
        if c.position in ("sincos-1d", "sincos-2d"):
            grid = sincos_grid(c.position, c.grid, c.width)
            sincos = torch.cat([grid.new_zeros(c.prefix, c.width), grid])
        self.set_table("sincos", sincos)
        self.set_table("rope", rope_table(c) if c.position == "rope-2d" else None)
        self.set_table("relative", relative_index(c) if c.position == "relative" else None)
        self.set_table("mask", attention_mask(c) if c.attention != "global" else None)

    @torch.no_grad()
    def resize(self, resolution: int | Pair, rule: ResizeRule | None = None) -> Self:
        """A copy of this model for another resolution or aspect ratio, on the same device.

        Learned positions are interpolated on the grid they were learned on, under the named rule (default: the one
        in the configuration, which then remembers it); [CLS] keeps its own; all other parameters are the same.
        """
        old = self.config
        new = old.replace(resolution=resolution, resize_rule=rule or old.resize_rule)
        if old.position == "relative" and old.wrap and new.grid != old.grid:
            raise UsageError("Resize must keep the grid of wrap-around relative positions: a circle has no between.")
        tensors = {}
        for name, tensor in self.state_dict().items():
            leaf = name.rpartition(".")[2]
            tensors[name] = resize_table(leaf, tensor, old, new) if leaf in LEARNED_TABLES else tensor.clone()
        return self._rebuild(new, tensors)
