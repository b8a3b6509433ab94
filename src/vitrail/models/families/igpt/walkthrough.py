"""The walkthrough of the Transformer on pixels."""

from typing import Literal

from torch import Tensor

from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.models.families.igpt.model import IGPT
from vitrail.models.walkthrough import Walkthrough, WalkthroughStep


class IGPTWalkthrough(Walkthrough[IGPT]):
    """Colours of the palette, tokens, blocks with RMSNorm, and the mean token or the next pixels."""

    messages = Walkthrough.messages | load_messages(__file__)

    def steps(self, activations: Activations) -> list[WalkthroughStep]:
        """Return the steps of colours, positions, blocks and, according to `output`, the head or the next pixels."""
        model, c = self.model, self.model.config
        colours_N, tokens, grid = activations.steps["colours"][0], activations.steps["tokens"][0], c.grid
        steps = [
            self.image_step(),
            WalkthroughStep(
                "colours", "c_n = argmin_k |x_n - p_k|", model.palette[colours_N], "palette", grid,
                fields={"count": c.palette}, shows="colours",
            ),
            WalkthroughStep("positions", "E_pos", model.pos_embed[0], "positions", grid, space="z"),
            WalkthroughStep("tokens", "z_0 = embed(c) + E_pos", tokens, "tokens", grid, space="z"),
        ]  # fmt: skip
        for layer in sorted(activations.layers):
            equation = f"z_{layer + 1} = MLP(RMS(z')) + z',  z' = MSA(RMS(z_{layer})) + z_{layer}"
            steps.append(self.layer_step(layer, equation, activations, sentence="block"))
        if c.output == "pixels":
            pooled = activations.steps["pooled"][0]
            return [*steps, WalkthroughStep("pooled", "y_n = RMS(z_L^n)", pooled, "next-pixels", grid, space="y")]
        return [*steps, *self.head_steps(activations, "mean_n RMS(z_L^n)")]

    def layer_equations(self, layer: int) -> dict[str, str]:
        c = self.model.config
        norm, norm_of_middle = (f"gamma * {z} / sqrt(mean({z}^2) + epsilon)" for z in ("z", "z'"))
        offset = " + b_{}" if c.bias else ""
        mask = " + B" if c.causal else ""
        return {
            "norm1": f"n = {norm}",
            **{part: f"{part} = n W_{part}{offset.format(part)}" for part in "qkv"},
            "scores": f"s = q k^T / sqrt(d){mask}",
            "weights": "a = softmax(s)",
            "heads": "h = a v",
            "msa": f"m = [h_1; ...; h_k] W_o{offset.format('o')}",
            "middle": "z' = m + z",
            "norm2": f"n' = {norm_of_middle}",
            "z1": f"z1 = n' W_1{offset.format(1)}",
            "activated": "GELU(z1)",
            "z2": f"z2 = GELU(z1) W_2{offset.format(2)}",
            "out": "z'' = z2 + z'",
        }

    def norm_statistics(self, z_BTD: Tensor) -> dict[str, Tensor]:
        return {"rms": z_BTD.square().mean(dim=-1).sqrt()}

    def position_table(self) -> Tensor:
        return self.model.pos_embed[0]

    @property
    def position_origin(self) -> Literal["learned"]:
        return "learned"
