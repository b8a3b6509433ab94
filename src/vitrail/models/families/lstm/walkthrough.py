"""The walkthrough of the LSTM over patches."""

from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.models.families.lstm.model import LSTM
from vitrail.models.walkthrough import Walkthrough, WalkthroughStep


class LSTMWalkthrough(Walkthrough[LSTM]):
    """Patches, the states of each layer in the order of reading, and the last state."""

    messages = Walkthrough.messages | load_messages(__file__)

    def steps(self, activations: Activations) -> list[WalkthroughStep]:
        c = self.model.config
        steps = [self.image_step(), *self.patch_steps(activations)]
        for layer in sorted(activations.layers):
            states_NS = activations.steps[f"blocks.{layer}"][0]
            layer_input = f"h_n^{layer}" if layer else "x_n"
            equation = f"h_n^{layer + 1}, c_n = LSTM({layer_input}, h_(n-1)^{layer + 1}, c_(n-1))"
            fields = {"width": states_NS.shape[1], "count": len(states_NS), "order": c.order}
            figure = {"fields": fields, "space": f"states {layer}", "shows": "states", "extra": states_NS}
            steps.append(self.layer_step(layer, equation, activations, sentence="states", **figure))
        pooled = f"[h_N^{c.depth}; h_1^{c.depth}]" if c.bidirectional else f"h_N^{c.depth}"
        return [*steps, *self.head_steps(activations, pooled)]
