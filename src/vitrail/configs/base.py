"""What every model configuration shares: a name, the input, the classes, and what `vitrail info` tells."""

import dataclasses
from typing import Any, ClassVar

from vitrail.errors import UsageError
from vitrail.settings import Pair, Settings, check_whole, jsonable

INFO_KEYS = (
    "name", "family", "parameters", "macs", "tokens", "grid", "patch", "resolution",
    "width", "depth", "heads", "classes", "channels",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """A model in numbers. Families add their own fields; all of them count themselves without torch."""

    title: ClassVar[str] = "Model configuration"
    family: ClassVar[str]

    name: str = ""
    """The name that `vitrail models` lists; it stays when settings change."""
    classes: int = 1000
    """Number of classes of the head."""
    channels: int = 3
    """Input channels: 3 for colour, 1 for grey, any number of bands."""
    resolution: Pair = (224, 224)
    """Height and width of the input in pixels; one number means a square."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isprintable():
            raise UsageError(f"Name must be a printable text, got {self.name!r}.")
        self._set_pair("resolution", low=1, high=65_536)
        check_whole("classes", self.classes, low=1, high=10_000_000)
        check_whole("channels", self.channels, low=1, high=4096)

    @property
    def parameters(self) -> int:
        """Trainable numbers of the model."""
        raise NotImplementedError

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image, counted as the literature does: matrix products and convolutions."""
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        """The row of `vitrail info`, in the contract's keys and order; what a family lacks is null."""
        return jsonable({key: getattr(self, key, None) for key in INFO_KEYS})
