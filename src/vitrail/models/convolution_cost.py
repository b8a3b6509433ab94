"""Counting parameters and multiply-accumulates of convolutional networks, layer by layer."""

from vitrail.core.settings import Pair


class Tally:
    """Cost of the layers counted so far, and the size of their output."""

    def __init__(self, channels: int, side: Pair) -> None:
        self.channels, self.side = channels, side
        self.parameters = self.macs = 0

    def shrink(self, stride: int) -> None:
        """Apply a stride with `same` padding: sizes are rounded up."""
        self.side = (-(-self.side[0] // stride), -(-self.side[1] // stride))

    def convolve(self, outputs: int, kernel: int, stride: int = 1) -> None:
        """Count a square convolution without bias."""
        self.shrink(stride)
        weights = kernel * kernel * self.channels * outputs
        self.parameters += weights
        self.macs += weights * self.side[0] * self.side[1]
        self.channels = outputs

    def norm(self) -> None:
        """Count a scale and a shift for each channel."""
        self.parameters += 2 * self.channels

    def shortcut(self, outputs: int, stride: int, *, norm: bool) -> None:
        """Count a 1x1 convolution on the shortcut; the size stays that of the main branch."""
        channels, side = self.channels, self.side
        self.convolve(outputs, kernel=1, stride=stride)
        if norm:
            self.norm()
        self.channels, self.side = channels, side

    def bottlenecks(self, base: int, layers: tuple[int, ...], *, pre_activation: bool) -> None:
        """Count stages of bottleneck units (1x1, 3x3, 1x1, four times wider outside), each after the first at half the
        size.

        With pre-activation (BiT), a norm precedes each convolution and the shortcut has none; without (the trunk of
        hybrids), a norm follows each convolution, also on the shortcut.
        """
        for stage, units in enumerate(layers):
            middle = base * 2**stage
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                if pre_activation:
                    self.norm()
                if unit == 0:
                    self.shortcut(4 * middle, stride, norm=not pre_activation)
                self.convolve(middle, kernel=1)
                self.norm()
                self.convolve(middle, kernel=3, stride=stride)
                self.norm()
                self.convolve(4 * middle, kernel=1)
                if not pre_activation:
                    self.norm()
