"""The walkthrough of the Vision Transformer: every equation that `vitrail inspect` and `vitrail explain` show.

`model.py` implements the same equations.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.models.families.vit.model import ViT
from vitrail.models.walkthrough import (
    ACTIVATION_SYMBOLS,
    ExplainStep,
    Explanation,
    Walkthrough,
    WalkthroughStep,
)

_NORMS = {"layer": "LN", "batch": "BN", "none": ""}
_NORM_EQUATIONS = {
    "layer": "gamma * (z - mu) / sqrt(sigma^2 + epsilon) + beta",
    "batch": "gamma * (z - mu_B) / sqrt(sigma_B^2 + epsilon) + beta",
    "none": "",
}
_HIDDEN_LAYERS = {"tanh": "tanh(y W_0 + b_0)", "gelu": "GELU(y W_0 + b_0)"}


def attention_equation(z: str, *, norm: str = "LN", scale: str = "", is_pre: bool = True, residual: bool = True) -> str:
    """Return eq. 2 for an input called `z`. In the original encoder (post-norm) the norm follows the sum."""
    branch = f"{scale}MSA({_normalised(z, norm) if is_pre else z})"
    total = f"{branch} + {_in_sum(z)}" if residual else branch
    return f"z' = {total}" if is_pre else f"z' = {norm}({total})"


def mlp_equation(z: str, *, norm: str = "LN", scale: str = "", is_pre: bool = True, residual: bool = True) -> str:
    """Return eq. 3 for an output called `z`."""
    mlp_input = _normalised("z'", norm) if is_pre else "z'"
    branch = f"{scale}MLP({mlp_input})"
    total = f"{branch} + z'" if residual else branch
    return f"{z} = {total}" if is_pre else f"{z} = {norm}({total})"


def embedding_equation(*, has_positions: bool) -> str:
    """Return the last step of eq. 1."""
    return "z_0 = [...] + E_pos" if has_positions else "z_0 = [...]"


def pooling_equation(pool: str, layer: str = "L", norm: str = "LN") -> str:
    """Return eq. 4, the input of the head, with `layer` as the last layer."""
    match pool:
        case "cls":
            return _normalised(f"z_{layer}^0", norm)
        case "gap":
            return f"mean_n {_normalised(f'z_{layer}^n' if layer == 'L' else f'z_{layer}', norm)}"
    return f"MAP({_normalised(f'z_{layer}', norm)})"


def _normalised(state: str, norm: str) -> str:
    """Return the state inside the norm, or the state alone without a norm."""
    return f"{norm}({state})" if norm else state


def _in_sum(z: str) -> str:
    """Return `z` as a term of a sum, in parentheses if it is a sum itself."""
    return f"({z})" if " + " in z else z


class ViTWalkthrough(Walkthrough[ViT]):
    """Patches, tokens, encoder blocks, pooling and head."""

    messages = Walkthrough.messages | load_messages(__file__)

    def steps(self, activations: Activations) -> list[WalkthroughStep]:
        """Return the steps of patches, [CLS], positions, encoder blocks, pooling and head."""
        c = self.model.config
        positions_ND = self.position_table()
        has_positions = positions_ND is not None and c.placement == "once"
        shape = (c.tokens, c.width)
        steps = [self.image_step(), *self.patch_steps(activations), *self._prefix_steps()]
        if has_positions and positions_ND is not None:
            steps.append(WalkthroughStep("positions", "E_pos", positions_ND, "positions", c.grid, shape, space="z"))
        equation = embedding_equation(has_positions=has_positions)
        patches = activations.steps["tokens"][0, c.prefix :]
        steps.append(WalkthroughStep("tokens", equation, patches, "tokens", c.grid, shape, space="z"))
        for layer in sorted(activations.layers):
            equation = self._block_equation(layer, adds_positions=positions_ND is not None and not has_positions)
            steps.append(self.layer_step(layer, equation, activations, sentence="block"))
        pooled = pooling_equation(c.pool, norm=_NORMS[c.norm] if c.norm_order == "pre" else "")
        logits = f"{_HIDDEN_LAYERS.get(c.representation, 'y')} W + b"
        return [*steps, *self.head_steps(activations, pooled, logits)]

    def _prefix_steps(self) -> list[WalkthroughStep]:
        """Return the step that adds [CLS] and registers; none for a model without them."""
        model, c = self.model, self.model.config
        if not c.prefix:
            return []
        prefix = torch.cat([getattr(model, name)[0] for name in ("cls_token", "reg_token") if hasattr(model, name)])
        symbols = ["x_class"] * (c.pool == "cls") + ["x_reg"] * bool(c.registers)
        sequence, fields = f"[{'; '.join(symbols)}; x_1 E; ...; x_N E]", {"count": c.prefix, "tokens": c.tokens}
        return [WalkthroughStep("prefix", sequence, prefix[0], "prefix", shape=(c.tokens, c.width), fields=fields)]

    def _block_equation(self, layer: int, *, adds_positions: bool) -> str:
        """Return eqs. 2 and 3 of a layer. `adds_positions`: positions are added to the input of every layer."""
        c = self.model.config
        settings: dict[str, Any] = {
            "norm": _NORMS[c.norm],
            "scale": "" if c.layer_scale is None else "g * ",
            "is_pre": c.norm_order == "pre",
            "residual": c.residual,
        }
        layer_input = f"z_{layer} + E_pos" if adds_positions else f"z_{layer}"
        return f"{mlp_equation(f'z_{layer + 1}', **settings)},  {attention_equation(layer_input, **settings)}"

    # The inside of a layer

    def layer_equations(self, layer: int) -> dict[str, str]:
        c = self.model.config
        norm, scale = _NORM_EQUATIONS[c.norm], "" if c.layer_scale is None else "g * "
        norm_of_middle = norm.replace("z", "z'")
        is_pre = c.norm_order == "pre"
        attention_input, mlp_input = ("z", "z'") if c.norm == "none" else ("n", "n'") if is_pre else ("z", "n")
        residual, residual_of_middle = (" + z", " + z'") if c.residual else ("", "")
        bias = "" if self.model.attention_terms(layer)[1] is None else " + B"
        score = "q k^T / sqrt(d)" if c.attention_scale is None else f"{c.attention_scale:g} * q k^T"
        attention = {
            **{part: f"{part} = {attention_input} W_{part}{f' + b_{part}' if c.qkv_bias else ''}" for part in "qkv"},
            "scores": f"s = {score}{bias}",
            "weights": "a = softmax(s)",
            "heads": "h = a v",
            "msa": "m = [h_1; ...; h_k] W_o + b_o",
            "middle": f"z' = {scale}m{residual}",
        }
        activated = "z1" if c.activation == "none" else f"{ACTIVATION_SYMBOLS[c.activation]}(z1)"
        mlp = {"z1": f"z1 = {mlp_input} W_1 + b_1", "activated": activated, "z2": f"z2 = {activated} W_2 + b_2"}
        if is_pre:
            out = f"z'' = {scale}z2{residual_of_middle}"
            if c.norm == "none":
                return {**attention, **mlp, "out": out}
            return {"norm1": f"n = {norm}", **attention, "norm2": f"n' = {norm_of_middle}", **mlp, "out": out}
        out = norm.replace("z", f"({scale}z2{' + n' if c.residual else ''})")
        return {**attention, "norm1": f"n = {norm_of_middle}", **mlp, "norm2": f"z'' = {out}"}

    def layer_input(self, layer: int, activations: Activations) -> Tensor:
        """Return the input of a layer (B, T, D), with a value for every merged token and with the positions that are
        added before the layer."""
        if (merged_BTD := activations.steps.get(f"blocks.{layer}.merged")) is not None:
            return merged_BTD
        z_BTD, model = super().layer_input(layer, activations), self.model
        added_TD = model.position.added(model, layer) if model.config.placement != "once" else None
        return z_BTD if added_TD is None else z_BTD + added_TD

    def norm_statistics(self, z_BTD: Tensor) -> dict[str, Tensor]:
        if self.model.config.norm != "layer":
            return {}
        return {"mean": z_BTD.mean(dim=-1), "deviation": z_BTD.std(dim=-1, correction=0)}

    # Position embeddings

    def position_table(self) -> Tensor | None:
        added_TD = self.model.position.added(self.model, 0)
        return None if added_TD is None else added_TD[self.model.config.prefix :]

    @property
    def position_origin(self) -> Literal["learned", "factored", "fixed"]:
        return self.model.position.origin

    @property
    def position_tables(self) -> int:
        return self.model.config.position_embedding.table_count

    # The page that runs the model

    def explanation(self) -> Explanation:
        return Explanation(
            self._explain_parts(), self._explain_fields(), self._explain_variants(), self._page_tensors()
        )

    def _explain_parts(self) -> dict[str, tuple[ExplainStep, ...]]:
        """Return the steps of `vitrail explain` in three parts: embedding, encoder layer and prediction."""
        c = self.model.config
        first = "x_class; " if c.pool == "cls" else ""
        embedding = embedding_equation(has_positions=self.position_table() is not None)
        hidden = _HIDDEN_LAYERS.get(c.representation, "y")
        tokens = "{tokens} x {width}"
        return {
            "part-embed": (
                ExplainStep("image", "x in R^(H x W x C)", "{high} x {wide} x {channels}"),
                ExplainStep("patches", "N = H W / P^2", "{count} x {tall} x {broad} x {channels}"),
                ExplainStep("flatten", "x_p in R^(N x (P^2 C))", "{count} x {flat}"),
                ExplainStep("project", "x_p^i E + b,  E in R^((P^2 C) x D)", "{count} x {width}"),
                ExplainStep("cls", f"[{first}x_p^1 E; x_p^2 E; ...; x_p^N E]", tokens),
                ExplainStep("positions", embedding, tokens),
            ),
            "part-layer": (
                ExplainStep("norm", "LN(z) = (z - mu) / sqrt(sigma^2 + epsilon) * gamma + beta", tokens),
                ExplainStep("qkv", "[q, k, v] = LN(z_l) U_qkv", "3 x {heads} x {tokens} x {narrow}"),
                ExplainStep("scores", "s_(i j) = q_i k_j^T / sqrt(D_h)", "{heads} x {tokens} x {tokens}"),
                ExplainStep(
                    "softmax", "A_(i j) = exp(s_(i j)) / (sum_m exp(s_(i m)))", "{heads} x {tokens} x {tokens}"
                ),
                ExplainStep("mix", "SA_i = sum_j A_(i j) v_j", "{heads} x {tokens} x {narrow}"),
                ExplainStep("heads", "MSA = [SA^1; ...; SA^k] U_msa", tokens),
                ExplainStep("attended", attention_equation("z_l"), tokens),
                ExplainStep(
                    "mlp", "z1 = LN(z') W_1 + b_1,  z2 = GELU(z1) W_2 + b_2", "{tokens} x {hidden} → {tokens} x {width}"
                ),
                ExplainStep("added", mlp_equation("z_(l+1)"), tokens),
            ),
            "part-answer": (
                ExplainStep("layers", "z_0 → z_1 → ... → z_L", "{depth} x {tokens} x {width}"),
                ExplainStep("lens", f"softmax({pooling_equation(c.pool, 'l')} W + b)", "{after} x {classes}"),
                ExplainStep("read", f"y = {pooling_equation(c.pool)}", "{width}"),
                ExplainStep("logits", f"logit_c = {hidden} W_c + b_c", "{classes}"),
                ExplainStep("answer", "p_c = exp(logit_c) / (sum_m exp(logit_m))", "{classes}"),
            ),
        }

    def _explain_fields(self) -> dict[str, Any]:
        c = self.model.config
        (high, wide), (rows, columns), (tall, broad) = c.resolution, c.grid, c.patch
        pixels = high * wide
        return {
            "channels": c.channels, "width": c.width, "heads": c.heads, "depth": c.depth, "classes": c.classes,
            "tokens": c.tokens, "prefix": c.prefix, "high": high, "wide": wide, "rows": rows, "columns": columns,
            "tall": tall, "broad": broad, "count": c.patches, "flat": c.channels * tall * broad, "hidden": c.mlp,
            "after": c.depth + 1, "narrow": c.width // c.heads, "pixels": f"{pixels:,}",
            "pixel_pairs": f"{pixels**2:,}", "patch_pairs": f"{c.patches**2:,}",
        }  # fmt: skip

    def _explain_variants(self) -> Mapping[str, str]:
        """Return the version of each message that depends on the model's settings."""
        c = self.model.config
        origin = "none" if self.position_table() is None else "fixed" if self.position_origin == "fixed" else "learned"
        hidden = "none" if c.representation == "none" else "hidden"
        return {
            "image-says": "grey" if c.channels == 1 else "colour",
            **dict.fromkeys(("cls-says", "cls-answer", "read-says", "read-answer"), c.pool),
            "positions-says": origin,
            **dict.fromkeys(("logits-says", "logits-answer"), hidden),
        }

    def _page_tensors(self) -> dict[str, Tensor]:
        """Return the state dict, with learned positions of any type as one table `positions` for all tokens (T, D)."""
        model = self.model
        tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in model.position.learned}
        added_TD = model.position.added(model, 0)
        return tensors if added_TD is None else tensors | {"positions": added_TD}
