"""Rules and costs of each kind of position embedding, without torch.

The modules are in `models.positions.modules`. A kind is a class here, one there, and a line of `POSITIONS`.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from vitrail.core.errors import UsageError
from vitrail.core.registry import Registry
from vitrail.models.config import Table

if TYPE_CHECKING:
    from vitrail.models.families.vit.config import ViTConfig

Placement = Literal["once", "every", "shared"]


class PositionRules:
    """Rules of one kind of position embedding. The defaults are those of a table that is added to the tokens."""

    model: ClassVar[str]
    """The class of its module, as `package.module:Class`."""
    placements: ClassVar[tuple[Placement, ...]] = ("once", "every", "shared")
    """Allowed values of `position_at` (Table 8), the default first."""
    can_wrap: ClassVar[bool] = False
    """Whether positions may wrap around the edges."""
    width_multiple: ClassVar[int] = 1
    """The width must be a multiple of this."""
    only_adds: ClassVar[bool] = False
    """Whether a table is added to the tokens, if anything, and attention is as without positions."""

    def __init__(self, config: "ViTConfig") -> None:
        self.config = config

    def check(self) -> None:
        """Refuse a configuration that this kind does not support."""
        if self.config.width % self.width_multiple:
            raise UsageError(
                f"Width must be a multiple of {self.width_multiple} for position {self.config.position},"
                f" got {self.config.width}."
            )

    @property
    def tables(self) -> int:
        """Number of learned tables: one for each layer, or one for all."""
        return self.config.depth if self.config.placement == "every" else 1

    @property
    def parameters(self) -> int:
        """Number of learned parameters."""
        return 0

    @property
    def fixed_tables(self) -> dict[str, Table]:
        """Fixed tables that follow from the configuration, by their names in `models.positions.modules`."""
        return {}


class NoPosition(PositionRules):
    """No position: the order of tokens does not matter."""

    model = "vitrail.models.positions.modules:NoPosition"
    only_adds = True
    placements = ("once",)


class Learned1D(PositionRules):
    """One learned row for each patch in raster order, and one for [CLS] (the paper's choice)."""

    model = "vitrail.models.positions.modules:Learned1D"
    only_adds = True

    @property
    def parameters(self) -> int:
        return self.tables * (self.config.patches + self.config.positioned_class) * self.config.width


class Learned2D(PositionRules):
    """Half of the features by row, half by column."""

    model = "vitrail.models.positions.modules:Learned2D"
    only_adds = True
    width_multiple = 2

    @property
    def parameters(self) -> int:
        c = self.config
        return self.tables * (sum(c.grid) * c.width // 2 + c.positioned_class * c.width)


class SinCos1D(PositionRules):
    """Fixed sinusoids of the raster index ("Attention Is All You Need", section 3.5)."""

    model = "vitrail.models.positions.modules:SinCos1D"
    only_adds = True
    width_multiple = 2

    @property
    def fixed_tables(self) -> dict[str, Table]:
        return {"sincos": Table((self.config.tokens, self.config.width), "float64")}


class SinCos2D(SinCos1D):
    """Fixed sinusoids, half of the features by row and half by column."""

    model = "vitrail.models.positions.modules:SinCos2D"
    width_multiple = 4


class Relative(PositionRules):
    """A learned number for each offset between two patches and each head, added to the attention logits."""

    model = "vitrail.models.positions.modules:Relative"
    placements = ("every", "shared")
    can_wrap = True

    @property
    def parameters(self) -> int:
        return self.tables * self.config.heads * self.offsets

    @property
    def offsets(self) -> int:
        """Entries of the table per head: one for each offset between two patches, and three for prefix tokens (patch to
        prefix, prefix to patch, prefix to prefix)."""
        rows, columns = self.config.grid
        offsets = rows * columns if self.config.wrap else (2 * rows - 1) * (2 * columns - 1)
        return offsets + (3 if self.config.prefix else 0)

    @property
    def fixed_tables(self) -> dict[str, Table]:
        return {"relative": Table((self.config.tokens, self.config.tokens), "int64")}


class Rope2D(PositionRules):
    """Queries and keys are rotated, half of the angles by row and half by column (arXiv 2403.13298)."""

    model = "vitrail.models.positions.modules:Rope2D"
    placements = ("every",)
    can_wrap = True

    @property
    def fixed_tables(self) -> dict[str, Table]:
        angles = self.config.width // self.config.heads // 2
        return {"rope": Table((2, self.config.tokens, angles), "float64")}

    def check(self) -> None:
        width, heads = self.config.width, self.config.heads
        if width // heads % 4:
            raise UsageError(
                f"Width / heads must be a multiple of 4 for position {self.config.position}, got {width} / {heads} ="
                f" {width // heads}."
            )


POSITIONS: Registry[type[PositionRules]] = Registry(
    "position",
    {
        "none": "vitrail.models.positions.rules:NoPosition",
        "learned-1d": "vitrail.models.positions.rules:Learned1D",
        "learned-2d": "vitrail.models.positions.rules:Learned2D",
        "sincos-1d": "vitrail.models.positions.rules:SinCos1D",
        "sincos-2d": "vitrail.models.positions.rules:SinCos2D",
        "relative": "vitrail.models.positions.rules:Relative",
        "rope-2d": "vitrail.models.positions.rules:Rope2D",
    },
    base="vitrail.models.positions.rules:PositionRules",
)
