"""Configuration of MLP-Mixer (arXiv 2105.01601)."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from vitrail.core.settings import Bounds
from vitrail.models.config import PatchedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(PatchedConfig):
    """An MLP-Mixer: MLPs that mix patches alternate with MLPs that mix features."""

    family: ClassVar[str] = "mixer"
    model: ClassVar[str] = "vitrail.models.families.mixer.model:Mixer"
    sizes: ClassVar[str] = "vitrail.models.families.mixer.sizes:SIZES"
    weights: ClassVar[str] = "vitrail.models.families.mixer.weights:MAPPINGS"
    walkthrough: ClassVar[str] = "vitrail.models.families.mixer.walkthrough:MixerWalkthrough"
    surgery: ClassVar[str] = "vitrail.models.families.mixer.surgery:MixerSurgery"
    scaled_by: ClassVar[str] = "channel_mlp"

    depth: Annotated[int, Bounds(1, 1000)] = 12
    """Number of blocks."""
    token_mlp: Annotated[int, Bounds(1, 1_048_576)] = 384
    """Hidden width D_S of the MLP over patches."""
    channel_mlp: Annotated[int, Bounds(1, 1_048_576)] = 3072
    """Hidden width D_C of the MLP over features."""
    norm_epsilon: Annotated[float, Bounds(0, below=1)] = 1e-6
    """Added to the variance in LayerNorm."""
    activation: Literal["gelu", "gelu-tanh"] = "gelu"
    """Non-linearity between the two layers of each MLP: exact GELU, or the tanh form of Google's code."""
    dropout: Annotated[float, Bounds(0, below=1)] = 0.0
    """Probability of zeroing a feature after each MLP layer, in training."""
    drop_path: Annotated[float, Bounds(0, below=1)] = 0.0
    """Probability of skipping the last block in training; earlier blocks less, linearly down to 0 at the first."""

    @property
    def tokens(self) -> int:
        """Length of the sequence: the patches, without [CLS]."""
        return self.patches

    @property
    def parameters(self) -> int:
        d, n, s, c = self.width, self.patches, self.token_mlp, self.channel_mlp
        block = 4 * d + (2 * n * s + s + n) + (2 * d * c + c + d)
        return self._embed_parameters + self.depth * block + 2 * d + self._head_parameters(d)

    @property
    def macs(self) -> int:
        d, n, s, c = self.width, self.patches, self.token_mlp, self.channel_mlp
        return self._embed_macs + self.depth * (2 * n * s * d + 2 * n * d * c) + self._head_macs(d)
