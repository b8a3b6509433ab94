"""The walkthrough of the MLP on pixels."""

from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.models.families.mlp.model import PixelMLP
from vitrail.models.walkthrough import ACTIVATION_SYMBOLS, Walkthrough, WalkthroughStep


class MLPWalkthrough(Walkthrough[PixelMLP]):
    """The hidden layers h_1 = act(flatten(x) W_1 + b_1), h_2, ..., and the logits."""

    messages = Walkthrough.messages | load_messages(__file__)

    def steps(self, activations: Activations) -> list[WalkthroughStep]:
        c = self.model.config
        steps = [self.image_step()]
        for layer in sorted(activations.layers):
            layer_input = f"h_{layer}" if layer else "flatten(x)"
            equation = (
                f"h_{layer + 1} = {ACTIVATION_SYMBOLS[c.activation]}({layer_input} W_{layer + 1} + b_{layer + 1})"
            )
            share = float((activations.steps[f"blocks.{layer}"] > 0).float().mean())
            fields = {"width": c.width, "share": f"{share:.0%}"}
            steps.append(self.layer_step(layer, equation, activations, sentence="hidden", space="h", fields=fields))
        return [*steps, *self.head_steps(activations, "h_L")]
