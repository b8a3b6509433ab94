"""Counting the parameters and multiply-accumulates of convolutional networks, layer by layer."""

from vitrail.core.settings import Pair


class CostCounter:
    """Counts the parameters and MACs of the layers added so far, and the channels and size of their output."""

    def __init__(self, channels: int, size: Pair) -> None:
        self.channels, self.size = channels, size
        self.parameters = self.macs = 0

    def apply_stride(self, stride: int) -> None:
        """Divide the size of the feature map by a stride with `same` padding: sizes are rounded up."""
        self.size = (-(-self.size[0] // stride), -(-self.size[1] // stride))

    def add_convolution(self, outputs: int, kernel: int, stride: int = 1) -> None:
        """Count a convolution with a square kernel and without bias."""
        self.apply_stride(stride)
        weights = kernel * kernel * self.channels * outputs
        self.parameters += weights
        self.macs += weights * self.size[0] * self.size[1]
        self.channels = outputs

    def add_norm(self) -> None:
        """Count a scale and a shift for each channel."""
        self.parameters += 2 * self.channels

    def add_shortcut(self, outputs: int, stride: int, *, norm: bool) -> None:
        """Count a 1x1 convolution on the shortcut; the size stays that of the main branch."""
        channels, size = self.channels, self.size
        self.add_convolution(outputs, kernel=1, stride=stride)
        if norm:
            self.add_norm()
        self.channels, self.size = channels, size

    def add_bottlenecks(self, base: int, layers: tuple[int, ...], *, pre_activation: bool) -> None:
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
                    self.add_norm()
                if unit == 0:
                    self.add_shortcut(4 * middle, stride, norm=not pre_activation)
                self.add_convolution(middle, kernel=1)
                self.add_norm()
                self.add_convolution(middle, kernel=3, stride=stride)
                self.add_norm()
                self.add_convolution(4 * middle, kernel=1)
                if not pre_activation:
                    self.add_norm()
