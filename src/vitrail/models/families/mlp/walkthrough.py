"""The walkthrough of the MLP on pixels."""

from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.models.families.mlp.model import PixelMLP
from vitrail.models.walkthrough import ACTIVATION_SYMBOLS, Walkthrough, WalkthroughStep


class MLPWalkthrough(Walkthrough[PixelMLP]):
    """The hidden layers h_1 = act(flatten(x) W_1 + b_1), h_2, ..., and the logits."""

    messages = Walkthrough.messages | load_messages(__file__)

    def steps(self, activations: Activations) -> list[WalkthroughStep]:
        """Return a step for each hidden layer, with the share of its values above 0."""
        c = self.model.config
        hidden_steps = []
        for layer in sorted(activations.layers):
            layer_input = f"h_{layer}" if layer else "flatten(x)"
            equation = (
                f"h_{layer + 1} = {ACTIVATION_SYMBOLS[c.activation]}({layer_input} W_{layer + 1} + b_{layer + 1})"
            )
            positive_share = float((activations.steps[f"blocks.{layer}"] > 0).float().mean())
            fields = {"width": c.width, "share": f"{positive_share:.0%}"}
            hidden_steps.append(
                self.layer_step(layer, equation, activations, sentence="hidden", space="h", fields=fields)
            )
        return [self.image_step(), *hidden_steps, *self.head_steps(activations, "h_L")]
