"""An engine: torch in double precision, a reference for what rounding changes."""

import copy

from vitrail.inference.torch_engine import TorchEngine


class Double(TorchEngine):
    name = "double"
    precisions = ("float32",)

    @classmethod
    def open(cls, bundle, device=None, precision="float32"):
        engine = super().open(bundle, device, precision)
        engine.model = copy.deepcopy(engine.model).double()
        return engine
