"""The walk of a picture through a ViT, panel by panel: each names its equation, its shape and its real numbers."""

from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.models.base import Seen
from vitrail.models.vit import ViT

_NUMBERS = 6  # of each panel are shown


class Panel(NamedTuple):
    """One station of the walk."""

    key: str
    equation: str
    shape: tuple[int, ...]
    values: list[float]
    """The first few numbers of what the panel shows."""
    colours: np.ndarray | None
    """A picture of it, uint8 (h, w, 3)."""
    words: dict[str, Any]
    """What fills in its sentence on the page; the sentence is called by `sentence`, else by the key."""
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        """What a program would want to know of it."""
        return {"key": self.key, "equation": self.equation, "shape": list(self.shape), "values": self.values}


def walk(model: ViT, seen: Seen, patch: int) -> list[Panel]:
    """The stations of the first picture that `seen` holds; `patch` is the one that is followed."""
    c = model.config
    steps = {name: tensor[0].detach().float().cpu() for name, tensor in seen.steps.items()}
    patches, projected, tokens = steps["patches"], steps["projected"], steps["tokens"]
    prefix = [name for name in ("cls_token", "reg_token") if hasattr(model, name)]
    one = patches[patch]
    rows, columns = c.grid
    panels = [
        Panel(
            "patches", "x_p in R^(N x P^2 C)", tuple(patches.shape), _first(one), None,
            {"rows": rows, "columns": columns, "count": c.patches, "numbers": patches.shape[1], "patch": patch},
        ),
        Panel(
            "projected", "x_p E", tuple(projected.shape), _first(projected[patch]), colours_of(projected, c.grid),
            {"width": c.width},
        ),
    ]  # fmt: skip
    if prefix:
        token = getattr(model, prefix[0])[0, 0].detach().float().cpu()
        panels.append(Panel(
            "prefix", "[x_class; x_1 E; ...; x_N E]", (c.tokens, c.width), _first(token), None,
            {"count": c.prefix, "tokens": c.tokens},
        ))  # fmt: skip
    position = model.position(0) if c.placement == "once" else None
    if position is not None:
        table = position.detach().float().cpu()[c.prefix :]
        panels.append(Panel(
            "positions", "z_0 = [...] + E_pos", tuple(position.shape), _first(table[patch]), colours_of(table, c.grid),
            {},
        ))  # fmt: skip
    panels.append(Panel(
        "tokens", "z_0", tuple(tokens.shape), _first(tokens[c.prefix + patch]), colours_of(tokens[c.prefix :], c.grid),
        {},
    ))  # fmt: skip
    for layer in sorted(seen.layers):
        state = steps[f"blocks.{layer}"]
        norms = torch.linalg.vector_norm(state[c.prefix :], dim=-1)
        panels.append(Panel(
            f"blocks.{layer}", f"z_{layer + 1} = MLP(LN(z')) + z',  z' = MSA(LN(z_{layer})) + z_{layer}",
            tuple(state.shape), _first(state[c.prefix + patch]), colours_of(state[c.prefix :], c.grid),
            {"layer": layer + 1, "mean": f"{norms.mean():.3g}", "longest": f"{norms.max():.3g}"}, "block",
        ))  # fmt: skip
    pooled, logits = steps["pooled"], seen.logits[0].detach().float().cpu()
    reads = {"cls": "LN(z_L^0)", "gap": "mean_n LN(z_L^n)", "map": "MAP(LN(z_L))"}[c.pool]
    panels.append(Panel(
        "pooled", f"y = {reads}", tuple(pooled.shape), _first(pooled), None, {},
    ))  # fmt: skip
    panels.append(Panel(
        "logits", "y W + b", tuple(logits.shape), _first(logits.sort(descending=True).values), None,
        {},
    ))  # fmt: skip
    return panels


@torch.no_grad()
def class_path(model: ViT, seen: Seen) -> list[dict[str, float]]:
    """What the head would say if the walk ended after each layer, of the first picture: the probability of the final
    answer, the number of the class that would win, and how near what is read is to its last state (cosine)."""
    last = model.config.depth - 1
    layers = sorted(seen.layers)
    answer = int(seen.logits[0].argmax())
    final = _read_token(model, seen.steps[f"blocks.{last}"][:1])
    path = []
    for layer in layers:
        state = seen.steps[f"blocks.{layer}"][:1]
        shares = model.read(state).float().softmax(-1)[0]
        near = torch.nn.functional.cosine_similarity(_read_token(model, state), final, dim=-1)
        path.append(
            {
                "layer": layer,
                "probability": float(shares[answer]),
                "winner": int(shares.argmax()),
                "cosine": float(near),
            }
        )
    return path


def _read_token(model: ViT, state_1TD: torch.Tensor) -> torch.Tensor:
    c = model.config
    return state_1TD[0, 0] if c.pool == "cls" else state_1TD[0, c.prefix :].mean(dim=0)


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


def _first(values: torch.Tensor) -> list[float]:
    return [round(float(value), 5) for value in values.flatten()[:_NUMBERS]]
