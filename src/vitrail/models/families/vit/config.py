"""Configuration of the Vision Transformer (arXiv 2010.11929): settings, rules, parameters and MACs."""

import dataclasses
import functools
import itertools
from typing import Annotated, Any, ClassVar, Literal

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, as_integer, check_integer
from vitrail.models.config import PatchedConfig, Table
from vitrail.models.families.vit.sparsity import Part, count_scores, local_parts, strided_parts
from vitrail.models.positions import POSITIONS
from vitrail.models.positions.base import Placement, Position

# Limits of `vitrail explain`, so that a forward pass in plain JavaScript takes at most half a second.
_PAGE_PARAMETERS, _PAGE_MACS = 3_000_000, 250_000_000

ResizeRule = Literal["google", "huggingface", "timm", "torchvision"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(PatchedConfig):
    """A Vision Transformer. The defaults are ViT-B/16 as the paper describes it."""

    family: ClassVar[str] = "vit"
    model: ClassVar[str] = "vitrail.models.families.vit.model:ViT"
    sizes: ClassVar[str] = "vitrail.models.families.vit.sizes:SIZES"
    weights: ClassVar[str] = "vitrail.models.families.vit.weights:MAPPINGS"
    walkthrough: ClassVar[str] = "vitrail.models.families.vit.walkthrough:ViTWalkthrough"
    surgery: ClassVar[str] = "vitrail.models.families.vit.surgery:ViTSurgery"
    scaled_by: ClassVar[str] = "mlp"

    depth: Annotated[int, Bounds(1, 1000)] = 12
    """Number L of encoder blocks."""
    heads: Annotated[int, Bounds(1, 4096)] = 12
    """Number k of attention heads; each is D / k wide."""
    mlp: Annotated[int, Bounds(1, 1_048_576)] = 3072
    """Width of the hidden layer of the MLP in each block."""
    registers: Annotated[int, Bounds(0, 4096)] = 0
    """Extra learned tokens without a position that attention may use as scratch space (arXiv 2309.16588)."""
    distilled: bool = False
    """Whether a second head reads the first register, DeiT's distillation token (arXiv 2012.12877). The logits are the
    mean of both heads; needs pool cls."""
    pool: Literal["cls", "gap", "map"] = "cls"
    """Input of the head: the [CLS] token, the mean of the patch tokens, or attention pooling over them."""
    representation: Literal["none", "tanh", "gelu"] = "none"
    """Hidden layer of the head, for pre-training; fine-tuning drops it (section 3.1)."""
    position: str = "learned-1d"
    """Position embedding; a package can add others."""
    position_at: Placement | None = None
    """Where position is added (Table 8): once at the input, in every layer, or in every layer with one shared table.
    None means the default: once for tables that are added, every layer for relative and rope-2d."""
    class_position: bool = True
    """Whether [CLS] has a learned position embedding, as in the paper; some later models have none."""
    wrap: bool = False
    """Let relative and rope-2d positions wrap around the edges. Shifts by multiples of a patch then do not change the
    logits (for rope-2d only with pool gap or map, because [CLS] has no angle and depends on absolute angles)."""
    resize_rule: ResizeRule = "google"
    """Library whose interpolation resizes learned position embeddings; published checkpoints differ."""
    attention: Literal["global", "local", "strided"] = "global"
    """Patches that a patch attends to: all, a square window, or the strided pattern of Sparse Transformers."""
    attention_span: Annotated[int | None, Bounds(1, 65_536)] = None
    """Radius of the local window in patches (default 1: 3x3), or the stride (default: one row of the grid)."""
    attention_scale: Annotated[float | None, Bounds(0, below=1e6)] = None
    """Factor of the attention logits of the encoder: none means 1 / sqrt(D / k), 1 means unscaled logits."""
    residual: bool = True
    """Whether each sub-layer adds to its input (eqs. 2-3); false replaces the input."""
    norm: Literal["layer", "batch", "none"] = "layer"
    """LayerNorm per token over D, BatchNorm per feature over images and tokens, or no normalisation: neither in the
    blocks nor after them."""
    norm_order: Literal["pre", "post"] = "pre"
    """Normalise before each sub-layer and once at the end (ViT), or after each residual sum (the original encoder)."""
    norm_epsilon: Annotated[float, Bounds(0, below=1)] = 1e-6
    """Added to the variance; published checkpoints differ (1e-6 Google and timm, 1e-12 Hugging Face)."""
    activation: Literal["gelu", "gelu-tanh", "quick-gelu", "relu", "none"] = "gelu"
    """Non-linearity between the two layers of the MLP: exact GELU, its approximation by tanh or (CLIP) by the sigmoid,
    ReLU, or none, which makes the MLP linear."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias."""
    patch_bias: bool = True
    """Whether the projection of patches has a bias; CLIP's has none."""
    embedding_norm: bool = False
    """Whether the embedded tokens are normalised before the first block, as in CLIP."""
    layer_scale: Annotated[float | None, Bounds(0, below=1e6)] = None
    """Initial value of a learned scale per feature on each residual branch (CaiT); none leaves it out."""
    dropout: Annotated[float, Bounds(0, below=1)] = 0.0
    """Probability of zeroing a feature after embedding, attention and each MLP layer, in training."""
    token_drop: Annotated[float, Bounds(0, below=1)] = 0.0
    """Share of patch tokens dropped at random in training (PatchDropout); needs position_at = once."""
    drop_path: Annotated[float, Bounds(0, below=1)] = 0.0
    """Probability of skipping the last block in training; earlier blocks less, linearly down to 0 at the first."""
    merge: tuple[int, ...] = ()
    """Patch tokens to merge into similar tokens before each layer (token merging, arXiv 2210.09461), at most half of
    the remaining patches; one number applies to every layer, an empty list merges nothing. Needs position_at = once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_drop and (self.placement != "once" or self.attention != "global"):
            raise UsageError("Token drop must be 0 unless position_at is once and attention is global.")
        for name in ("layer_scale", "attention_scale"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))  # a 0 would make a table of integers
        if self.norm == "none" and (self.norm_order != "pre" or self.embedding_norm):
            raise UsageError(
                f"Norm must be layer or batch with norm_order post or embedding_norm, got norm {self.norm}. Leave both"
                " settings at their defaults."
            )
        if self.drop_path and not self.residual:
            raise UsageError(f"Drop path must be 0 without residual connections, got {self.drop_path}.")
        if self.width % self.heads:
            raise UsageError(
                f"Width must be a multiple of heads, got width {self.width} with {self.heads} heads."
                " Change one of the two."
            )
        if self.distilled and (
            self.pool != "cls"
            or not self.registers
            or self.embedding
            or self.head_layers
            or self.representation != "none"
        ):
            raise UsageError(
                "Distilled must go with pool cls, at least one register, and two linear heads: no embedding, no head"
                " layers and no representation layer."
            )
        self._check_position()
        if self.merge != ():
            self._check_merge()
        self._check_tables()

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Return the docstring of each setting, preceded by its allowed values, also for the position."""
        meanings = super().meanings()
        return meanings | {"position": f"{', '.join(POSITIONS)}. {meanings['position']}"}

    # Properties that follow from the settings

    def wider(self, factor: float) -> dict[str, Any]:
        """Return the settings that multiply the width by `factor`. Heads keep their width if their number stays an
        integer."""
        heads = self.heads * factor
        return {
            "width": round(self.width * factor),
            "mlp": round(self.mlp * factor),
            "heads": int(heads) if heads == int(heads) else self.heads,
        }

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches: [CLS] and registers."""
        return int(self.pool == "cls") + self.registers

    @property
    def tokens(self) -> int:
        """Length of the encoder's sequence."""
        return self.prefix + self.patches

    def merge_count(self, layer: int, patches: int) -> int:
        """Number of patch tokens, among `patches`, to merge into others before `layer`: at most half of them, because
        the other half are the targets."""
        return min(self.merge[layer], patches // 2) if self.merge else 0

    @property
    def layer_tokens(self) -> tuple[int, ...]:
        """Length of the sequence in each layer."""
        patches, lengths = self.patches, []
        for layer in range(self.depth):
            patches -= self.merge_count(layer, patches)
            lengths.append(self.prefix + patches)
        return tuple(lengths)

    @functools.cached_property
    def placement(self) -> Placement:
        """`position_at`, with its default filled in. `__post_init__` resolves it: forward passes read it, and a
        registry's import inside of one would break the graph of `torch.compile`."""
        return self.position_at or self.position_embedding.placements[0]

    @property
    def position_embedding(self) -> Position:
        """The position embedding, with its rules, its costs and its computation in a model."""
        return POSITIONS[self.position](self)

    @property
    def span(self) -> int:
        """`attention_span`, with its default filled in."""
        return self.attention_span or (self.grid[1] if self.attention == "strided" else 1)

    @functools.cached_property
    def sparse_parts(self) -> tuple[Part, ...]:
        """The parts of local or strided attention; empty for global attention, and if masking all scores is faster.
        Cached, as `placement` is."""
        match self.attention:
            case "local":
                return local_parts(self.grid, self.span, self.wrap, self.prefix)
            case "strided":
                return strided_parts(self.patches, self.span, self.prefix)
        return ()

    @property
    def extensions(self) -> dict[str, str]:
        package = POSITIONS.provider(self.position)
        position = {} if package is None else {f"position.{self.position}": package}
        return super().extensions | position

    @property
    def positioned_class(self) -> bool:
        """Whether a learned table has a row for [CLS]."""
        return self.pool == "cls" and self.class_position

    @property
    def tables(self) -> dict[str, Table | None]:
        """Tables of the position embedding, of sparse attention (a mask, or indices by parts) and of token merging."""
        is_masked = self.attention != "global" and not self.sparse_parts
        mask = Table((self.tokens, self.tokens), "bool") if is_masked else None
        board = Table((self.patches,), "int64") if self.merge else None
        sparse = {
            f"part{number}_{name}": table
            for number, part in enumerate(self.sparse_parts)
            for name, table in {
                "queries": Table((part.groups, part.queries), "int64"),
                "keys": Table((part.groups, part.keys), "int64"),
                "order": Table((self.patches,), "int64"),
                "bias": Table((part.groups, 1, part.queries, part.keys), "float64"),
            }.items()
        }
        return {**self.position_embedding.table_shapes, "mask": mask, "board": board, **sparse}

    @property
    def can_mask_patches(self) -> bool:
        is_plain = (
            self.canvas == (self.channels, *self.resolution) and self.step == self.patch and self.padding == (0, 0)
        )
        return is_plain and self.norm == "layer" and not self.token_drop

    @property
    def can_merge(self) -> bool:
        only_adds = self.position_embedding.only_adds and self.placement == "once"
        return only_adds and self.attention == "global" and self.norm == "layer"

    @property
    def why_not_in_page(self) -> str | None:
        """The first setting that differs from the ViT in `reports/forward.js`, such as `pool map`; None if all
        agree."""
        if self.family != ViTConfig.family:
            return f"family {self.family}"
        supported = {
            f"{self.channels} channels": self.channels in (1, 3),
            f"{self.classes} classes": self.classes > 0,
            f"{self.parameters:,} parameters, more than {_PAGE_PARAMETERS:,}": self.parameters <= _PAGE_PARAMETERS,
            f"{self.macs:,} multiply-accumulates, more than {_PAGE_MACS:,}": self.macs <= _PAGE_MACS,
            f"position {self.position}": self.position_embedding.only_adds,
            f"position_at {self.placement}": self.placement == "once",
            "patches that overlap or are padded": self.step == self.patch and self.padding == (0, 0),
            f"pool {self.pool}": self.pool in ("cls", "gap"),
            f"attention {self.attention}": self.attention == "global",
            f"attention_scale {self.attention_scale}": self.attention_scale is None,
            f"norm {self.norm}": self.norm == "layer",
            f"norm_order {self.norm_order}": self.norm_order == "pre",
            f"activation {self.activation}": self.activation in ("gelu", "gelu-tanh"),
            f"layer_scale {self.layer_scale}": self.layer_scale is None,
            f"residual {self.residual}": self.residual,
            f"merge {list(self.merge)}": not self.merge,
            "a head of several layers": not self.head_layers,
            "two heads (distilled)": not self.distilled,
            "a norm of the embedded tokens": not self.embedding_norm,
            "a projection without bias": self.patch_bias,
        }
        return next((setting for setting, is_supported in supported.items() if not is_supported), None)

    def info(self) -> dict[str, Any]:
        """Return the row of `vitrail info`, with the length of the sequence in each layer for a model that merges
        tokens."""
        return super().info() | ({"layer_tokens": list(self.layer_tokens)} if self.merge else {})

    # Costs

    @property
    def parameters(self) -> int:
        d, m = self.width, self.mlp
        prefix = self.prefix * d
        qkv = 3 * d * d + (3 * d if self.qkv_bias else 0)
        mlp = 2 * d * m + m + d
        norm = 0 if self.norm == "none" else 2 * d
        scales = 0 if self.layer_scale is None else 2 * d
        blocks = self.depth * (2 * norm + qkv + d * d + d + mlp + scales)
        final_norm = norm if self.norm_order == "pre" else 0
        pool = d + 4 * (d * d + d) + norm + mlp if self.pool == "map" else 0
        representation = 0 if self.representation == "none" else d * d + d
        return (
            self._embed_parameters
            - (0 if self.patch_bias else d)
            + prefix
            + 2 * d * self.embedding_norm
            + self.position_embedding.parameters
            + blocks
            + final_norm
            + pool
            + representation
            + (1 + self.distilled) * self._head_parameters(d)
        )

    @property
    def macs(self) -> int:
        d, m, n = self.width, self.mlp, self.tokens
        blocks = sum(
            tokens * (4 * d * d + 2 * d * m) + 2 * self._count_scores(tokens) * d for tokens in self.layer_tokens
        )
        matches = sum(self._match_macs(*counts) for counts in itertools.pairwise((n, *self.layer_tokens)))
        pool = 2 * d * d + 2 * n * d * d + 2 * n * d + 2 * d * m if self.pool == "map" else 0
        representation = 0 if self.representation == "none" else d * d
        heads = (1 + self.distilled) * self._head_macs(d)
        return self._embed_macs + blocks + matches + pool + representation + heads

    def _count_scores(self, tokens: int) -> int:
        """Count the scores that a head of a layer computes: of all pairs of tokens, or of the parts of sparse
        attention and of the prefix tokens, which attend to all."""
        if not self.sparse_parts:
            return tokens * tokens
        return sum(map(count_scores, self.sparse_parts)) + self.prefix * tokens

    def _match_macs(self, before: int, after: int) -> int:
        """Count the MACs of finding similar tokens (products of sources and targets) and of the attention of [CLS]."""
        if after == before:
            return 0
        patches = before - self.prefix
        cls_attention = 2 * self.width**2 + before * self.width * self.heads if self.pool == "cls" else 0
        return (patches // 2) * (patches - patches // 2) * self.width + cls_attention

    # Rules

    def _check_merge(self) -> None:
        merge = self.merge
        counts = (merge,) * self.depth if as_integer(merge) is not None else merge
        if not isinstance(counts, list | tuple) or len(counts) not in (0, self.depth):
            raise UsageError(
                f"Merge must be empty, one integer, or one for each of the {self.depth} layers, got {merge!r}."
            )
        integers = tuple(check_integer("merge", count, low=0, high=1_000_000) for count in counts)
        object.__setattr__(self, "merge", integers if any(integers) else ())
        if self.merge and not self.can_merge:
            raise UsageError(
                "Merge must be empty unless positions are only added, once, attention is global and norm is layer."
            )

    def _check_position(self) -> None:
        """Raise UsageError for a combination of position embedding, placement, wrap and attention that cannot work."""
        rules = self.position_embedding
        rules.check()
        if self.placement not in rules.placements:
            allowed = " or ".join(rules.placements)
            raise UsageError(f"Position at must be {allowed} for position {self.position}, got {self.position_at!r}.")
        if self.wrap and not rules.can_wrap:
            built_in = [name for name in POSITIONS if name not in POSITIONS.extension_names]
            allowed = " or ".join(name for name in built_in if POSITIONS[name].can_wrap)
            raise UsageError(f"Wrap must go with position {allowed}, got position {self.position}.")
        if self.wrap and (self.attention == "strided" or self.step != self.patch or self.padding != (0, 0)):
            raise UsageError(
                "Wrap must go with attention global or local and with patches that neither overlap nor are padded:"
                " others are not shift-invariant at the edges."
            )
        if self.attention == "global" and self.attention_span is not None:
            raise UsageError(
                f"Attention span must go with attention local or strided, got span {self.attention_span}"
                " with attention global."
            )
