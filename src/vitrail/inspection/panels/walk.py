"""The path of an image through a ViT, step by step: equation, shape and actual values of each."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.inspection.colours import heat
from vitrail.inspection.panel import Context, Figure, Panel
from vitrail.models.base import AnyModel, Seen
from vitrail.models.look import evaluating
from vitrail.pages.page import Html, Line, chart, data_image, escape, figure
from vitrail.pages.words import words_beside
from vitrail.settings import Pair
from vitrail.weights.answers import ONE_CLASS, Answer

_NUMBERS = 6  # of each step are printed


class Step(NamedTuple):
    """One step of the walk."""

    key: str
    equation: str
    shape: tuple[int, ...]
    """Shape of the result of this step; `vector` is the part that belongs to the followed patch."""
    vector: np.ndarray
    colours: np.ndarray | None = None
    """The result as an image, uint8 (h, w, 3)."""
    norms: np.ndarray | None = None
    """Norms of the patches' tokens, (h, w)."""
    words: Mapping[str, Any] = {}
    """Values for the placeholders of its sentence, whose name is `sentence`, otherwise the key."""
    sentence: str = ""

    @property
    def values(self) -> list[float]:
        """The first few values of the vector."""
        return [float(f"{value:.5g}") for value in self.vector[:_NUMBERS]]

    def to_json(self) -> dict[str, Any]:
        """Its entry in `inspect.json`."""
        found = {"key": self.key, "equation": self.equation, "shape": list(self.shape), "values": self.values}
        if self.norms is not None:
            found["norms"] = [[round(float(norm), 5) for norm in row] for row in self.norms]
        return found


class Walk(Panel):
    """The steps of each shown image, and the prediction if each layer were the last."""

    words = words_beside(__file__)

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.steps: dict[int, list[Step]] = {}
        self.path: dict[int, list[dict[str, float]]] = {}
        """Of each shown image: `class_path`."""

    def why_absent(self) -> str | None:
        if self.context.model.equations() is None:
            return "no-walk"
        return self.context.why_no_attention()

    @property
    def _patch(self) -> int:
        """The followed patch: the one at the centre."""
        return self.context.model.centre_token()

    def observe(self, number: int, image_CHW: Tensor, seen: Seen) -> None:
        self.steps[number] = walk(self.context.model, seen, self._patch)
        if self.context.why_no_prediction() is None:
            self.path[number] = class_path(self.context.model, seen, self.context.bundle.answer)

    def image_numbers(self, number: int) -> dict[str, Any]:
        return {
            "walk": [step.to_json() for step in self.steps.get(number, [])],
            "path": self.path.get(number, []),
        }

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for number, path in self.path.items():
            layers = [row["layer"] for row in path]
            lines = [
                Line(self.label("prediction"), layers, [row["probability"] for row in path], 0),
                Line(self.label("cosine"), layers, [row["cosine"] for row in path], 1),
            ]
            yield (
                f"picture-{number}-path",
                chart(lines, self.label("layer"), self.label("probability-cosine"), dots=True),
            )

    def html(self, figures: Mapping[str, Figure]) -> str:
        parts = []
        for number, steps in self.steps.items():
            content = f'<div class="tiles">{"".join(self._step(number, step) for step in steps)}</div>'
            if number in self.path:
                curve = str(figures[f"picture-{number}-path"])
                content += figure(self.word("path"), self.word("path-note"), curve)
            parts.append(self.each(number, content))
        return self.say("walk") + "".join(parts) if parts else ""

    def _step(self, number: int, step: Step) -> Html:
        shown = ""
        if step.key == "picture":
            shown = self._image(number)
        elif step.key == "patches":
            shown = self._zoomed_patch(number)
        elif step.colours is not None:
            images = [step.colours] if step.norms is None else [step.colours, heat(step.norms)]
            shown = "".join(f'<img src="{data_image(image)}" alt="{escape(step.key)}">' for image in images)
            shown = f'<div class="side">{shown}</div>'
        strip = ""
        if step.vector.size:
            rest = ", ..." if step.vector.size > len(step.values) else ""
            low, high = step.vector.min(), step.vector.max()
            greys = (255 * (step.vector - low) / max(high - low, 1e-12)).round().astype(np.uint8)
            values = ", ".join(f"{value:.3g}" for value in step.values)
            strip = f'<img class="strip" src="{data_image(greys[None, :, None])}" alt=""><code>{values}{rest}</code>'
        sentence = self.say(step.sentence or step.key, **step.words)
        return figure(step.equation, " x ".join(map(str, step.shape)), f"{shown}{sentence}{strip}")

    def _image(self, number: int) -> str:
        """The image with its grid and the followed patch marked."""
        rows, columns = self.context.model.config.grid
        row, column = divmod(self._patch, columns)
        place = (
            f"left: {100 * column / columns:.3f}%; top: {100 * row / rows:.3f}%;"
            f" width: {100 / columns:.3f}%; height: {100 / rows:.3f}%"
        )
        lines = f"background-size: {100 / columns:.4f}% {100 / rows:.4f}%"
        inside = f'<div class="lines" style="{lines}"></div><div class="mark" style="{place}"></div>'
        return self.photo(number, inside)

    def _zoomed_patch(self, number: int) -> str:
        rows, columns = self.context.model.config.grid
        row, column = divmod(self._patch, columns)
        zoom = (
            f"background-size: {100 * columns}% {100 * rows}%; background-position:"
            f" {100 * column / max(columns - 1, 1):.3f}% {100 * row / max(rows - 1, 1):.3f}%"
        )
        return f'<div class="patch p{number}" style="{zoom}"></div>'


def walk(model: AnyModel, seen: Seen, patch: int) -> list[Step]:
    """The steps of the first image in `seen`; `patch` is the followed one."""
    c, equations = model.config, model.equations()
    if equations is None:
        raise UsageError(f"Walk needs a ViT or a hybrid, got family {c.family}.")
    computed = {name: _array(tensor[0]) for name, tensor in seen.steps.items()}
    patches, projected = computed["patches"], computed["projected"]
    steps = [
        Step(
            "picture",
            "x in R^(H x W x C)",
            (*c.resolution, c.channels),
            patches[patch][:0],
            words={"rows": c.grid[0], "columns": c.grid[1], "count": len(patches)},
        ),
        Step(
            "patches",
            "x_p in R^(N x P^2 C)",
            patches.shape,
            patches[patch],
            words={"numbers": patches.shape[1], "patch": patch},
            sentence="features" if model.pixel_kernels() is None else "patches",
        ),
        Step(
            "projected",
            "x_p E",
            projected.shape,
            projected[patch],
            colours_of(projected, c.grid),
            words={"width": c.width},
        ),
    ]
    if (prefix := model.prefix_tokens()) is not None:
        words = {"count": len(prefix), "tokens": c.tokens}
        steps.append(Step("prefix", equations.sequence, (c.tokens, c.width), _array(prefix[0]), words=words))
    if equations.adds_once and (added := model.position_table()) is not None:
        table = _array(added)
        steps.append(Step("positions", "E_pos", (c.tokens, c.width), table[patch], colours_of(table, c.grid)))
    steps.append(_state("tokens", equations.embedded, computed["tokens"], model, patch))
    steps += [
        _state(f"blocks.{layer}", equations.blocks[layer], computed[f"blocks.{layer}"], model, patch, layer)
        for layer in sorted(seen.layers)
    ]
    steps.append(Step("pooled", equations.read, computed["pooled"].shape, computed["pooled"]))
    if c.classes:
        logits = _array(seen.logits[0])
        steps.append(Step("logits", equations.logits, logits.shape, np.sort(logits)[::-1]))
    return steps


def _state(
    key: str, equation: str, state_TD: np.ndarray, model: AnyModel, patch: int, layer: int | None = None
) -> Step:
    """The step of the input of the first layer, or of the output of `layer`."""
    grid, places = model.config.grid, state_TD[model.config.prefix :]
    norms = np.linalg.norm(places, axis=-1)
    words = {"mean": f"{norms.mean():.3g}", "largest": f"{norms.max():.3g}", "layer": layer}
    return Step(
        key,
        equation,
        state_TD.shape,
        places[patch],
        colours_of(places, grid),
        norms.reshape(grid),
        words,
        sentence="tokens" if layer is None else "block",
    )


@torch.no_grad()
def class_path(model: AnyModel, seen: Seen, answer: Answer = ONE_CLASS) -> list[dict[str, float]]:
    """The prediction for the first image if each layer were the last: the probability of the final prediction, the most
    probable class, and the cosine similarity of the head's input with that of the last layer."""
    final = seen.steps["pooled"][:1].float()
    label = int(seen.logits[0].argmax())
    path = []
    with evaluating(model):
        for layer in sorted(seen.layers):
            early = Seen(frozenset(), with_attention=False)
            shares = answer.probabilities(model.read(seen.steps[f"blocks.{layer}"][:1], early).float())[0]
            cosine = torch.nn.functional.cosine_similarity(early.steps["pooled"].float(), final)
            path.append(
                {
                    "layer": layer,
                    "probability": float(shares[label]),
                    "winner": int(shares.argmax()),
                    "cosine": float(cosine),
                }
            )
    return path


def colours_of(features_ND: Tensor | np.ndarray, grid: Pair) -> np.ndarray:
    """The first three principal components of the features of all patches as red, green and blue, uint8 (h, w, 3).

    Each is scaled from its minimum to its maximum; its sign is such that its largest part is positive.
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


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
