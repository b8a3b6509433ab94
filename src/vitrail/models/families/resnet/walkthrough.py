"""The walkthrough of residual convolutional networks."""

from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.models.families.resnet.model import ResNet
from vitrail.models.walkthrough import Walkthrough, WalkthroughStep


class ResNetWalkthrough(Walkthrough[ResNet]):
    """The stem, the feature maps of each residual unit, and their mean."""

    messages = Walkthrough.messages | load_messages(__file__)
    has_patches = False

    def steps(self, activations: Activations) -> list[WalkthroughStep]:
        is_bit = self.model.config.kind == "bit"
        units = [unit for stage in self.model.stages for unit in stage.blocks]
        steps = [self.image_step(), self._stem_step(activations)]
        for layer in sorted(activations.layers):
            shortcut = f"x_{layer}" if getattr(units[layer], "downsample", None) is None else f"W_s x_{layer}"
            total = f"F_{layer + 1}(x_{layer}) + {shortcut}"
            equation = f"x_{layer + 1} = {total}" if is_bit else f"x_{layer + 1} = ReLU({total})"
            channels, rows, columns = activations.steps[f"blocks.{layer}"].shape[1:]
            fields = {"channels": channels, "rows": rows, "columns": columns}
            steps.append(self.layer_step(layer, equation, activations, sentence="unit", fields=fields))
        pooled = "mean_n ReLU(GN(x_L^n))" if is_bit else "mean_n x_L^n"
        return [*steps, *self.head_steps(activations, pooled)]

    def _stem_step(self, activations: Activations) -> WalkthroughStep:
        stem = activations.steps["stem"][0]
        return WalkthroughStep(
            "stem",
            "x_0 = maxpool(conv_7x7(x))" if self.model.config.kind == "bit" else "x_0 = ReLU(BN(conv_3x3(x)))",
            stem.flatten(1).T,
            "stem",
            (stem.shape[1], stem.shape[2]),
            tuple(stem.shape),
            space=f"{len(stem)} channels",
            fields={"channels": len(stem)},
            shows="maps",
        )
