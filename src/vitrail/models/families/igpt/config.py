"""Configuration of the Transformer on pixels: iGPT ("Generative Pretraining from Pixels", Chen et al. 2020)."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, Pair
from vitrail.models.config import ModelConfig, Output, Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class IGPTConfig(ModelConfig):
    """An iGPT. Every pixel is a token: its colour, rounded to a palette, in raster order."""

    family: ClassVar[str] = "igpt"
    model: ClassVar[str] = "vitrail.models.families.igpt.model:IGPT"
    sizes: ClassVar[str] = "vitrail.models.families.igpt.sizes:SIZES"
    walkthrough: ClassVar[str] = "vitrail.models.families.igpt.walkthrough:IGPTWalkthrough"
    surgery: ClassVar[str] = "vitrail.models.families.igpt.surgery:IGPTSurgery"
    scaled_by: ClassVar[str] = "mlp"

    palette: Annotated[int, Bounds(2, 1_048_576)] = 512
    """Number of colours; the colours themselves are a tensor of the model."""
    width: Annotated[int, Bounds(1, 65_536)] = 512
    """Width D of a token."""
    depth: Annotated[int, Bounds(1, 1000)] = 24
    """Number L of blocks."""
    heads: Annotated[int, Bounds(1, 4096)] = 8
    """Number of attention heads."""
    mlp: Annotated[int, Bounds(1, 1_048_576)] = 2048
    """Width of the hidden layer of the MLP in each block."""
    causal: bool = True
    """Whether a pixel attends only to itself and earlier pixels."""
    output: Literal["pixels", "classes"] = "pixels"
    """Prediction of the head: each pixel's colour from the earlier pixels, or the class from the mean of all tokens."""
    bias: bool = False
    """Whether linear layers have a bias, as in Hugging Face's port; the published code has none."""
    norm_epsilon: Annotated[float, Bounds(0, below=1)] = 1e-5
    """Added to the mean square in the norm."""
    dropout: Annotated[float, Bounds(0, below=1)] = 0.0
    """Probability of zeroing a feature after embedding, attention and the MLP, in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise UsageError(
                f"Width must be a multiple of heads, got width {self.width} with {self.heads} heads."
                " Change one of the two."
            )
        if self.output == "pixels" and not self.causal:
            raise UsageError(
                "Causal must be true for output pixels: otherwise a pixel could attend to the colour that it predicts."
            )
        if self.output == "pixels" and self.classes != self.palette:
            raise UsageError(
                f"Classes must be the palette's {self.palette} colours for output pixels, got {self.classes}."
                " Set output to classes for labels."
            )
        self._check_tables()

    @property
    def predicts(self) -> Output:
        return "pixels" if self.output == "pixels" else super().predicts

    def predicting(self, output: Output) -> Self:
        if output == "pixels":
            return self.replace(output="pixels", causal=True, classes=self.palette)
        return self.replace(output="classes")

    def for_data(
        self, *, classes: int, channels: int, resolution: Pair | None, settings: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the configuration for a data set, at the same resolution: every pixel is a token, so a larger
        resolution would be expensive."""
        classes = self.palette if self.predicts == "pixels" else classes
        return super().for_data(classes=classes, channels=channels, resolution=None, settings=settings)

    @property
    def grid(self) -> Pair:
        """Rows and columns of tokens: the pixels."""
        return self.resolution

    @property
    def patch(self) -> Pair:
        """Height and width of a token: one pixel."""
        return (1, 1)

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self.resolution[0] * self.resolution[1]

    @property
    def tables(self) -> dict[str, Table | None]:
        return {"mask": Table((self.tokens, self.tokens), "bool") if self.causal else None}

    @property
    def parameters(self) -> int:
        d, m = self.width, self.mlp
        embed = (self.palette + (self.output == "pixels")) * d + self.tokens * d
        biases = 5 * d + m if self.bias else 0
        block = 2 * d + 4 * d * d + 2 * d * m + biases
        head = self._head_parameters(d) if self.output == "classes" else d * self.classes
        return embed + self.depth * block + d + head

    @property
    def macs(self) -> int:
        d, m, n = self.width, self.mlp, self.tokens
        block = n * (4 * d * d + 2 * d * m) + 2 * n * n * d
        quantise = n * self.channels * self.palette
        return quantise + self.depth * block + self._head_macs(d) * (n if self.output == "pixels" else 1)
