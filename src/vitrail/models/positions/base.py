"""The interface of position embeddings.

Shapes: h x w grid of patches, N = h*w, T = prefix + N tokens, D width, H heads, K head width.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from vitrail.core.errors import UsageError
from vitrail.models.config import Table

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models.families.vit.config import ViTConfig
    from vitrail.models.families.vit.model import ViT

Placement = Literal["once", "every", "shared"]


@dataclasses.dataclass(frozen=True, eq=False)
class Position:
    """A position embedding of a ViT: its rules and costs, the table that it adds to the tokens, its rotation of queries
    and keys, its bias of attention, and its resizing to another grid.

    The default rules fit a table that is added to the tokens; the default methods add nothing. Parameters are
    registered in the model and its blocks, under timm's names. Fixed tables are pure functions of the grid, computed in
    double precision on the CPU (not every device has that).
    """

    # Rules and costs, without torch

    placements: ClassVar[tuple[Placement, ...]] = ("once", "every", "shared")
    """Allowed values of `position_at` (Table 8), the default first."""
    can_wrap: ClassVar[bool] = False
    """Whether positions may wrap around the edges."""
    width_multiple: ClassVar[int] = 1
    """The width must be a multiple of this."""
    only_adds: ClassVar[bool] = False
    """Whether positions at most add a table to the tokens, and leave attention unchanged."""
    origin: ClassVar[Literal["learned", "factored", "fixed"]] = "fixed"
    """Origin of the table: learned, learned as a row part and a column part, or fixed."""
    learned: ClassVar[tuple[str, ...]] = ()
    """Name endings of the parameters whose shape depends on the grid."""

    config: "ViTConfig"

    def check(self) -> None:
        """Raise `UsageError` for a configuration that this position embedding does not support."""
        if self.config.width % self.width_multiple:
            raise UsageError(
                f"Width must be a multiple of {self.width_multiple} for position {self.config.position},"
                f" got {self.config.width}."
            )

    @property
    def table_count(self) -> int:
        """Number of learned tables: one for each layer, or one for all."""
        return self.config.depth if self.config.placement == "every" else 1

    @property
    def parameters(self) -> int:
        """Number of learned parameters."""
        return 0

    @property
    def table_shapes(self) -> dict[str, Table]:
        """Shape and dtype of each of `tables`."""
        return {}

    # In a model

    def add_parameters(self, model: "ViT") -> None:
        """Register the parameters in the model or its blocks."""

    def init_weights(self, model: "ViT") -> None:
        """Initialise the parameters of `add_parameters`."""

    def tables(self) -> "dict[str, Tensor]":
        """Return the fixed tables, by their attribute names in the model."""
        return {}

    def added(self, model: "ViT", layer: int) -> "Tensor | None":
        """Return the table (T, D) that is added to the tokens before `layer`; None if nothing is added."""
        return None

    def rotation(self, model: "ViT") -> "Tensor | None":
        """Return the cosines and sines (2, T, K/2) that rotate queries and keys; None without rotation."""
        return None

    def bias(self, model: "ViT", layer: int) -> "Tensor | None":
        """Return the bias (H, T, T) that is added to the attention logits of `layer`; None if nothing is added."""
        return None

    def pair_bias(self, model: "ViT", layer: int, queries: "Tensor", keys: "Tensor") -> "Tensor | None":
        """Return the bias (H, ...) of pairs of tokens, for sparse attention. The indices of queries and keys are
        broadcast. Override it together with `bias` if the bias of all pairs is not needed."""
        bias_HTT = self.bias(model, layer)
        return None if bias_HTT is None else bias_HTT[:, queries, keys]

    def permute_patches(self, model: "ViT", order_N: "Tensor") -> bool:
        """Permute the parameters in place for patches that are permuted by `order_N`. Return False, and change nothing,
        if this type of position cannot be permuted."""
        return False

    def without_class(self, tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
        """Return the state dict `tensors` without the position of [CLS]."""
        return dict(tensors)

    def check_resize(self, new: "ViTConfig") -> None:
        """Raise `UsageError` for a grid to which the parameters cannot be resized."""

    def resized(self, name: str, table: "Tensor", new: "ViTConfig") -> "Tensor":
        """Return one of the `learned` parameters, resized to the grid of the configuration `new`."""
        raise NotImplementedError
