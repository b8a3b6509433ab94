"""The walkthrough of MLP-Mixer."""

import torch

from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.models.families.mixer.model import Mixer
from vitrail.models.walkthrough import Walkthrough, WalkthroughStep


class MixerWalkthrough(Walkthrough[Mixer]):
    """Patches, and both halves of each block."""

    messages = Walkthrough.messages | load_messages(__file__)

    @torch.no_grad()
    def steps(self, activations: Activations) -> list[WalkthroughStep]:
        steps = [self.image_step(), *self.patch_steps(activations)]
        for layer in sorted(activations.layers):
            block = self.model.blocks[layer]
            layer_input = activations.steps[f"blocks.{layer - 1}" if layer else "projected"]
            # How much each position reads from each other position, if the MLP had no non-linearity.
            reads_NN = (block.mlp_tokens.fc2.weight @ block.mlp_tokens.fc1.weight).abs()
            mixed = WalkthroughStep(
                f"blocks.{layer}.tokens",
                f"U_{layer + 1} = X_{layer} + MLP_tokens(LN(X_{layer})^T)^T",
                block.mix_tokens(layer_input[:1])[0],
                "mixed-tokens",
                self.model.config.grid,
                space="z",
                fields={"layer": layer},
                shows="reads",
                extra=reads_NN,
                layer=layer,
            )
            equation = f"X_{layer + 1} = U_{layer + 1} + MLP_channels(LN(U_{layer + 1}))"
            steps += [mixed, self.layer_step(layer, equation, activations, sentence="mixed-channels")]
        return [*steps, *self.head_steps(activations, "mean_n LN(X_L^n)")]
