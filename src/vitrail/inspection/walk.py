"""The walk of a picture through a ViT, panel by panel: each names its equation, its shape and its real numbers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.configs.vit import ViTConfig
from vitrail.models.base import Seen
from vitrail.models.look import evaluating
from vitrail.models.vit import ViT

_NUMBERS = 6  # of each panel are printed


class Panel(NamedTuple):
    """One station of the walk."""

    key: str
    equation: str
    shape: tuple[int, ...]
    """Of all that passes here; `vector` is the part that is followed."""
    vector: np.ndarray
    colours: np.ndarray | None = None
    """What passes here, as a picture, uint8 (h, w, 3)."""
    norms: np.ndarray | None = None
    """Lengths of the patches' tokens, (h, w)."""
    words: Mapping[str, Any] = {}
    """What fills in its sentence on the page; the sentence is called by `sentence`, else by the key."""
    sentence: str = ""

    @property
    def values(self) -> list[float]:
        """The first few numbers of what is followed."""
        return [float(f"{value:.5g}") for value in self.vector[:_NUMBERS]]

    def to_json(self) -> dict[str, Any]:
        """What a program would want to know of it."""
        found = {"key": self.key, "equation": self.equation, "shape": list(self.shape), "values": self.values}
        if self.norms is not None:
            found["norms"] = [[round(float(norm), 5) for norm in row] for row in self.norms]
        return found


def walk(model: ViT, seen: Seen, patch: int) -> list[Panel]:
    """The stations of the first picture that `seen` holds; `patch` is the one that is followed."""
    c = model.config
    steps = {name: tensor[0].detach().float().cpu().numpy() for name, tensor in seen.steps.items()}
    patches, projected, tokens = steps["patches"], steps["projected"], steps["tokens"]
    rows, columns = c.grid
    height, width = c.resolution
    panels = [
        Panel(
            "picture", "x in R^(H x W x C)", (height, width, c.channels), patches[patch][:0],
            words={"rows": rows, "columns": columns, "count": c.patches},
        ),
        Panel(
            "patches", "x_p in R^(N x P^2 C)", patches.shape, patches[patch],
            words={"numbers": patches.shape[1], "patch": patch},
            sentence="patches" if c.family == "vit" else "features",
        ),
        Panel(
            "projected", "x_p E", projected.shape, projected[patch], colours_of(projected, c.grid),
            words={"width": c.width},
        ),
    ]  # fmt: skip
    if c.prefix:
        name = "cls_token" if c.pool == "cls" else "reg_token"
        panels.append(Panel(
            "prefix", _sequence(c), (c.tokens, c.width), _array(getattr(model, name)[0, 0]),
            words={"count": c.prefix, "tokens": c.tokens},
        ))  # fmt: skip
    position = model.position.added(model, 0) if c.placement == "once" else None
    if position is not None:
        table = _array(position)[c.prefix :]
        panels.append(Panel(
            "positions", "E_pos", tuple(position.shape), table[patch], colours_of(table, c.grid)
        ))  # fmt: skip
    panels.append(_station("tokens", "z_0 = [...]" if position is None else "z_0 = [...] + E_pos", tokens, c, patch))
    panels += [
        _station(f"blocks.{layer}", _block(c, layer), steps[f"blocks.{layer}"], c, patch, layer)
        for layer in sorted(seen.layers)
    ]
    logits = _array(seen.logits[0])
    panels.append(Panel("pooled", f"y = {_read(c)}", steps["pooled"].shape, steps["pooled"]))
    hidden = {"none": "y W + b", "tanh": "tanh(y W_0 + b_0) W + b", "gelu": "GELU(y W_0 + b_0) W + b"}
    panels.append(Panel("logits", hidden[c.representation], logits.shape, np.sort(logits)[::-1]))
    return panels


def _sequence(config: ViTConfig) -> str:
    tokens = ["x_class"] * (config.pool == "cls") + ["x_reg"] * bool(config.registers)
    return f"[{'; '.join(tokens)}; x_1 E; ...; x_N E]"


def _block(config: ViTConfig, layer: int) -> str:
    """Eqs. 2 and 3 as this model has them."""
    norm = {"layer": "LN", "batch": "BN"}[config.norm]
    scale = "g * " if config.layer_scale is not None else ""
    entering = f"z_{layer}"
    has_table = config.position.startswith(("learned", "sincos"))
    placed = f"({entering} + E_pos)" if has_table and config.placement != "once" else entering
    if config.norm_order == "pre":
        inner = placed.strip("()")
        return f"z_{layer + 1} = {scale}MLP({norm}(z')) + z',  z' = {scale}MSA({norm}({inner})) + {placed}"
    return f"z_{layer + 1} = {norm}({scale}MLP(z') + z'),  z' = {norm}({scale}MSA({placed.strip('()')}) + {placed})"


def _read(config: ViTConfig) -> str:
    """Eq. 4 as this model has it."""
    norm = {"layer": "LN", "batch": "BN"}[config.norm]
    state = {"cls": "z_L^0", "gap": "z_L^n", "map": "z_L"}[config.pool]
    state = f"{norm}({state})" if config.norm_order == "pre" else state
    return {"cls": state, "gap": f"mean_n {state}", "map": f"MAP({state})"}[config.pool]


def _station(
    key: str, equation: str, state_TD: np.ndarray, config: ViTConfig, patch: int, layer: int | None = None
) -> Panel:
    places = state_TD[config.prefix :]
    norms = np.linalg.norm(places, axis=-1)
    words = {"mean": f"{norms.mean():.3g}", "longest": f"{norms.max():.3g}", "layer": layer}
    return Panel(
        key, equation, state_TD.shape, places[patch], colours_of(places, config.grid), norms.reshape(config.grid),
        words, "tokens" if layer is None else "block",
    )  # fmt: skip


@torch.no_grad()
def class_path(model: ViT, seen: Seen) -> list[dict[str, float]]:
    """What the head would say if the walk ended after each layer, of the first picture: the probability of the final
    answer, the number of the class that would win, and how near what is read is to its last state (cosine)."""
    answer = int(seen.logits[0].argmax())
    final = seen.steps["pooled"][:1]
    path = []
    with evaluating(model):
        for layer in sorted(seen.layers):
            aside = Seen(frozenset(), weighs=False)
            shares = model.read(seen.steps[f"blocks.{layer}"][:1], aside).float().softmax(-1)[0]
            near = torch.nn.functional.cosine_similarity(aside.steps["pooled"].float(), final.float())
            path.append(
                {
                    "layer": layer,
                    "probability": float(shares[answer]),
                    "winner": int(shares.argmax()),
                    "cosine": float(near),
                }
            )
    return path


def colours_of(features_ND: torch.Tensor | np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The first three principal components of the features of all places as red, green and blue, uint8 (h, w, 3).

    Each is scaled from its smallest to its largest; which way round is fixed by its largest part being positive.
    """
    x = np.asarray(features_ND, np.float64)
    x = x - x.mean(axis=0)
    left, size, _ = np.linalg.svd(x, full_matrices=False)
    parts = np.zeros((len(x), 3))
    count = min(3, left.shape[1])
    parts[:, :count] = left[:, :count] * size[:count]
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=0)[None], axis=0)
    parts = parts * np.where(largest < 0, -1, 1)
    low, high = parts.min(axis=0), parts.max(axis=0)
    shares = (parts - low) / np.maximum(high - low, 1e-12)
    return (255 * shares).round().astype(np.uint8).reshape(*grid, 3)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
