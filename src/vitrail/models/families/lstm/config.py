"""Configuration of an LSTM over patches, which reads them in sequence, unlike attention."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from vitrail.core.settings import Bounds
from vitrail.models.config import PatchedConfig, Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSTMConfig(PatchedConfig):
    """An LSTM over the sequence of patches; its last state is the input of the head."""

    family: ClassVar[str] = "lstm"
    model: ClassVar[str] = "vitrail.models.families.lstm.model:LSTM"
    sizes: ClassVar[str] = "vitrail.models.families.lstm.sizes:SIZES"
    walkthrough: ClassVar[str] = "vitrail.models.families.lstm.walkthrough:LSTMWalkthrough"
    surgery: ClassVar[str] = "vitrail.models.families.lstm.surgery:LSTMSurgery"
    scaled_by: ClassVar[str] = "hidden"

    hidden: Annotated[int, Bounds(1, 65_536)] = 512
    """Width of the recurrent state."""
    depth: Annotated[int, Bounds(1, 100)] = 2
    """Number of recurrent layers, one on top of the other."""
    bidirectional: bool = False
    """Whether a second network reads the sequence from its end."""
    order: Literal["raster", "reversed", "column", "snake", "random", "random-reversed"] = "raster"
    """Order in which the patches are read."""
    order_seed: Annotated[int, Bounds(0, 2**63 - 1)] = 0
    """Seed of the random order."""
    dropout: Annotated[float, Bounds(0, below=1)] = 0.0
    """Probability of zeroing a feature between recurrent layers, in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_tables()

    @property
    def tokens(self) -> int:
        """Length of the sequence: the patches."""
        return self.patches

    @property
    def tables(self) -> dict[str, Table | None]:
        return {"order": Table((self.patches,), "int64")}

    @property
    def directions(self) -> int:
        """Number of directions in which the sequence is read: 1 or 2."""
        return 2 if self.bidirectional else 1

    @property
    def parameters(self) -> int:
        biases = self.directions * self.depth * 8 * self.hidden
        return self._embed_parameters + self._recurrent_weights + biases + self._head_parameters(self._features)

    @property
    def macs(self) -> int:
        return self._embed_macs + self.patches * self._recurrent_weights + self._head_macs(self._features)

    @property
    def _features(self) -> int:
        return self.directions * self.hidden

    @property
    def _recurrent_weights(self) -> int:
        """Number of weights of all layers and directions: 4 gates, each from the layer's input and its own state."""
        inputs = [self.width, *(self.directions * self.hidden for _ in range(self.depth - 1))]
        return self.directions * sum(4 * self.hidden * (size + self.hidden) for size in inputs)
