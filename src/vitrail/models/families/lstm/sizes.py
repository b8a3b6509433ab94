"""Sizes of the LSTM: presets for small images."""

from vitrail.models.families.lstm.config import LSTMConfig
from vitrail.models.sizes import Sizes

_SMALL = LSTMConfig(classes=10, channels=1, resolution=(28, 28), patch=(7, 7), width=64)

SIZES = Sizes(
    small=(
        _SMALL.replace(name="LSTM-Pico/2", resolution=8, patch=2, width=48, hidden=76),
        _SMALL.replace(name="LSTM-Nano/7", hidden=100),
        _SMALL.replace(name="LSTM-Nano/8", patch=8, hidden=101, channels=3, resolution=32),
        _SMALL.replace(name="LSTM-Micro/4", patch=4, hidden=130),
    )
)
