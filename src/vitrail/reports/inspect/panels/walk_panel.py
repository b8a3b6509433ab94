"""The path of an image through a model, step by step: equation, shape and actual values of each."""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.decision import SINGLE_LABEL, DecisionRule
from vitrail.core.errors import UsageError
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.core.settings import Pair
from vitrail.data.thumbnail import image_data_url
from vitrail.models.activations import Activations
from vitrail.models.base import AnyModel
from vitrail.models.device import evaluating
from vitrail.models.walkthrough import WalkthroughStep, walkthrough_of
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.colours import sequential, signed
from vitrail.reports.equations import typeset
from vitrail.reports.inspect.packing import pack, rounded_to
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, place_in
from vitrail.reports.inspect.shared_messages import SHARED
from vitrail.reports.page_kit import figure
from vitrail.reports.translations import LANGUAGES

_NUMBERS = 6  # of each step are printed
_TOP = 5  # classes that are named
_MAPS = 8  # feature maps of a layer that are shown
_FEATURES = 96  # of each vector that the page carries for every patch


class ShownStep(NamedTuple):
    """One step of the walk, for one followed patch."""

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
    """Values for the placeholders of its sentence, whose name is `sentence`."""
    sentence: str = ""
    places: np.ndarray | None = None
    """The first features at every place that can be followed, (N, at most 96)."""
    lengths: np.ndarray | None = None
    """Norms of the whole vectors there, (N)."""
    scale: float = 1.0
    """Largest value of the signed colours of its vectors, the same for all steps of one space."""
    source: WalkthroughStep | None = None
    """The step of the model's walkthrough; None for the probabilities, which the bundle computes."""
    maps: np.ndarray | None = None
    """The strongest channels, (count, h, w)."""

    @property
    def values(self) -> list[float]:
        """The first few values of the vector."""
        return [float(f"{value:.5g}") for value in self.vector[:_NUMBERS]]

    @property
    def grid(self) -> Pair | None:
        """Rows and columns of its places."""
        return None if self.source is None else self.source.grid

    def to_json(self) -> dict[str, Any]:
        """Its entry in `inspect.json`."""
        found = {"key": self.key, "equation": self.equation, "shape": list(self.shape), "values": self.values}
        if self.norms is not None:
            found["norms"] = [[round(float(norm), 5) for norm in row] for row in self.norms]
        return found


class WalkthroughPanel(Panel):
    """The steps of each shown image, and the prediction if each layer were the last."""

    words = load_messages(__file__)
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.features = _FEATURES
        """Number of features that the page carries of every patch; 0: those of the followed patch alone."""
        self.steps: dict[int, list[ShownStep]] = {}
        self.path: dict[int, list[dict[str, Any]]] = {}
        """Of each shown image: `class_path`."""
        self.logits: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Of each shown image that is classified: logits and probabilities."""

    @property
    def notice(self) -> str:
        return "notice" if self.context.followed is not None else "notice-whole"

    def why_absent(self) -> str | None:
        return "one-patch" if self.context.model.config.grid == (1, 1) else None

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        model, answer = self.context.model, self.context.bundle.answer
        self.steps[number] = walk(model, activations, self.context.followed or 0)
        if self.context.why_no_prediction() is not None:
            return
        logits = activations.logits[0].float()
        shares = answer.probabilities(logits)
        self.logits[number] = logits.cpu().numpy(), shares.cpu().numpy()
        best = np.sort(self.logits[number][1])[::-1]
        self.steps[number].append(
            ShownStep("probabilities", answer.equation, best.shape, best, sentence=f"probabilities-{answer.kind}")
        )
        if model.reads_layers:
            self.path[number] = class_path(model, activations, answer, self.context.labels)

    def numbers(self) -> dict[str, Any]:
        if self.context.followed is None:
            return {"followed": None}
        row, column = divmod(self.context.followed, self.context.grid[1])
        return {"followed": {"row": row, "column": column}}

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
                line_chart(lines, self.label("layer"), self.label("probability-cosine"), dots=True),
            )

    # The section

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.steps:
            return ""
        intro = self.say("walk")
        if self.context.followed is not None:
            intro += self.say("choose" if self.features else "chosen")
            intro += '<p id="followed" class="followed" aria-live="polite"></p>'
        parts = []
        for number, steps in self.steps.items():
            content = f'<div class="tiles walk">{"".join(self._figures(number, steps))}</div>'
            if number in self.path:
                content += self._lens(number, str(figures[f"picture-{number}-path"]))
            parts.append(self.each(number, content))
        return intro + "".join(parts)

    def _figures(self, number: int, steps: Sequence[ShownStep]) -> Iterator[Html]:
        """A figure for each step; one for all layers."""
        indexed = list(enumerate(steps))
        for is_layer, some in itertools.groupby(indexed, lambda one: _layer_of(one[1]) is not None):
            if is_layer:
                yield self._layers(number, list(some))
            else:
                yield from (self._step(number, index, step) for index, step in some)

    def _step(self, number: int, index: int, step: ShownStep) -> Html:
        shows = "" if step.source is None else step.source.shows
        shown = ""
        if shows == "image":
            shown = self._image(number)
        elif shows == "patch" and step.sentence == "patches":
            shown = f'<div class="patch p{number}" data-zoom></div>'
        elif step.colours is not None:
            shown = f'<div class="side">{self._map(step.colours, step)}</div>'
        if step.maps is not None and self.features:
            shown += self._tiles(step, rows=2)
        if step.key in ("logits", "probabilities") and number in self.logits:
            return self._titled(step, self.say(step.sentence, **step.words) + self._bars(number, step.key))
        content = f"{shown}{self.say(step.sentence, **step.words)}{self._strip(number, index, step)}"
        return self._titled(step, content)

    def _titled(self, step: ShownStep, content: str) -> Html:
        """A figure under its equation, with what the symbols mean."""
        shape = " x ".join(map(str, step.shape))
        return Html(
            f"<figure><figcaption>{typeset(step.equation)}<small>{shape}</small></figcaption>"
            f"{content}{self.symbols(step.equation)}</figure>"
        )

    def _layers(self, number: int, steps: list[tuple[int, ShownStep]]) -> Html:
        """All layers in one figure: small multiples, then a row with the followed vector of each."""
        kinds = {step.sentence: step for _, step in reversed(steps)}
        numbers = [_layer_of(step) or 0 for _, step in steps]
        title = self.word("layers-title", first=min(numbers), last=max(numbers))
        parts = []
        for _, step in reversed(kinds.items()):
            parts.append(f"{typeset(step.equation)}{self.say(step.sentence, **step.words)}")
        if any(step.colours is not None for _, step in steps):
            parts.append(f'<div class="multiples">{"".join(self._multiple(step) for _, step in steps)}</div>')
        for _, step in steps if self.features else ():
            if step.maps is not None:
                parts.append(f'<div class="channels">{_name(step)}{self._tiles(step)}</div>')
            elif step.source is not None and step.source.shows == "states":
                sheet = image_data_url(signed(_array(step.source.extra)))
                parts.append(f'<div class="channels">{_name(step)}<img class="sheet" src="{sheet}" alt=""></div>')
        reads = "".join(
            f'<div><canvas class="map" aria-hidden="true" data-reads="{number} {index}"></canvas>'
            f"<small>{_name(step)}</small></div>"
            for index, step in steps
            if step.source is not None and step.source.shows == "reads" and self.features
        )
        parts.append(f'<div class="multiples">{reads}</div>' if reads else "")
        wide = max(len(step.vector) for _, step in steps)
        scales = sorted({f"{step.scale:.2g}" for _, step in steps}, key=float)
        fields = {
            "scale": " ... ".join(dict.fromkeys([scales[0], scales[-1]])),
            "shown": min(wide, self.features or _FEATURES),
            "width": wide,
        }
        note = self.say("strips" if self.context.followed is not None else "strips-whole", **fields)
        rows = "".join(
            f'<div class="row-name">{_name(step)}</div>{self._canvas(number, index)}{self._length(number, index, step)}'
            for index, step in steps
        )
        parts.append(f'{note}<div class="strips">{rows}</div>')
        equations = " ".join(step.equation for step in kinds.values())
        return Html(
            f'<figure class="whole"><figcaption>{title}</figcaption>{"".join(parts)}{self.symbols(equations)}</figure>'
        )

    def _multiple(self, step: ShownStep) -> str:
        if step.colours is None:
            return ""
        mean = 0.0 if step.norms is None else float(step.norms.mean())
        note = f"<small>{_name(step)} {self.word('mean-length', mean=_spoken(mean))}</small>"
        return f"<div>{self._map(step.colours, step)}{note}</div>"

    def _map(self, colours: np.ndarray, step: ShownStep) -> str:
        """Colours at every place, with the followed one marked; a click follows another."""
        assert step.grid is not None
        rows, columns = step.grid
        return (
            f'<div class="photo place" style="aspect-ratio: {columns} / {rows}" data-grid="{rows} {columns}">'
            f'<img src="{image_data_url(colours)}" alt="{escape(step.key)}"><div class="mark"></div></div>'
        )

    def _tiles(self, step: ShownStep, rows: int = 1) -> str:
        """The strongest feature maps side by side, on one scale."""
        assert step.maps is not None
        tiles = sequential(step.maps / max(float(step.maps.max()), 1e-12))
        framed = np.pad(tiles, ((0, -len(tiles) % rows), (0, 1), (0, 1), (0, 0)), constant_values=255)
        lines = [np.concatenate(list(line), axis=1) for line in np.split(framed, rows)]
        return f'<img class="sheet" src="{image_data_url(np.concatenate(lines))}" alt="">'

    def _strip(self, number: int, index: int, step: ShownStep) -> str:
        if not step.vector.size:
            return ""
        rest = ", ..." if step.vector.size > len(step.values) else ""
        values = ", ".join(f"{value:.3g}" for value in step.values)
        return f'{self._canvas(number, index)}<code data-values="{number} {index}">{values}{rest}</code>'

    def _canvas(self, number: int, index: int) -> str:
        return f'<canvas class="strip" aria-hidden="true" data-strip="{number} {index}"></canvas>'

    def _length(self, number: int, index: int, step: ShownStep) -> str:
        length = float(np.linalg.norm(step.vector))
        return f'<code data-length="{number} {index}">{_spoken(length)}</code>'

    def _image(self, number: int) -> str:
        """The image with its grid; the followed place is chosen here."""
        if self.context.followed is None:
            return self.photo(number)
        rows, columns = self.context.grid
        lines = f"background-size: {100 / columns:.4f}% {100 / rows:.4f}%"
        inside = f'<div class="lines" style="{lines}"></div><div class="mark"></div>'
        attributes = f'class="photo place" data-grid="{rows} {columns}"'
        if self.features:
            attributes += ' tabindex="0" role="application" aria-describedby="followed"'
        return self.photo(number, inside, attributes=attributes)

    def _bars(self, number: int, key: str) -> str:
        """The most probable classes by name: their logits, or their probabilities as bars. A class keeps its colour."""
        logits, shares = self.logits[number]
        order = np.argsort(-logits, kind="stable")[:_TOP]
        rows = []
        for place, index in enumerate(order):
            value, wide = (logits[index], 0.0) if key == "logits" else (shares[index], float(shares[index]))
            bar = f'<i style="width:{100 * wide:.2f}%;background:var(--c{place})"></i>' if key != "logits" else ""
            dot = f'<span class="dot" style="background:var(--c{place})"></span>'
            rows.append(
                f"<tr><td>{dot}{escape(self.context.labels[int(index)])}</td>"
                f'<td class="number">{value:.3f}</td>{f"<td class=bar>{bar}</td>" if bar else ""}</tr>'
            )
        rest = len(logits) - len(order)
        more = self.say("more-classes", count=f"{rest:,}") if rest > 0 else ""
        return f'<table class="bars">{"".join(rows)}</table>{more}'

    def _lens(self, number: int, curve: str) -> str:
        """What the head would answer after every layer: names and probabilities."""
        logits, _ = self.logits[number]
        colours = {int(index): place for place, index in enumerate(np.argsort(-logits, kind="stable")[:_TOP])}
        rows = []
        for row in self.path[number]:
            cells = "".join(
                f'<td><span class="dot" style="background:var(--c{colours.get(one["class"], 7)})"></span>'
                f"{escape(one['label'])} <b>{one['score']:.2f}</b></td>"
                for one in row["top"][:3]
            )
            rows.append(f'<tr><td class="number">{row["layer"]}</td>{cells}</tr>')
        table = f'<div class="scroll"><table class="lens"><thead><tr><th class="number">{self.word("layer")}</th>'
        table += (
            f'<th colspan="3">{self.word("lens-top")}</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        )
        return figure(self.word("path"), self.word("path-note"), f'<div class="panes">{table}{curve}</div>')

    # What the script reads

    def data(self) -> dict[str, Any]:
        words = {**SHARED, **self.words}
        followed = "followed" if self.context.walkthrough.has_patches else "followed-cell"
        return {
            "words": {language: words[followed][language] for language in LANGUAGES},
            "signed": signed(np.linspace(-1, 1, 255)).tolist(),
            "ramp": sequential(np.linspace(0, 1, 256)).tolist(),
            "all": bool(self.features),
            "images": {number: [self._packed(step) for step in steps] for number, steps in self.steps.items()},
        }

    def _packed(self, step: ShownStep) -> dict[str, Any] | None:
        """A step's vectors: of every place, of the followed one, or of the image as one."""
        if not step.vector.size or step.key in ("logits", "probabilities"):
            return None
        places, lengths = step.vector[None], np.linalg.norm(step.vector[None], axis=-1)
        many = step.places is not None and step.lengths is not None and self.features > 0
        if step.places is not None and step.lengths is not None and many:
            places, lengths = step.places, step.lengths
        first, places = places[:, :_NUMBERS], places[:, : self.features or _FEATURES]
        found: dict[str, Any] = {
            "many": many,
            "width": places.shape[1],
            "of": len(step.vector),
            "rows": pack(places, scale=step.scale),
            "first": rounded_to(first),
            "lengths": rounded_to(lengths),
        }
        if many and step.source is not None and step.source.shows == "reads":
            reads = _array(step.source.extra)
            found["reads"] = pack(reads / np.maximum(reads.max(axis=1, keepdims=True), 1e-30))
        return found

    def smaller(self) -> Iterator[Self]:
        for features in (32, 32, 0) if self.steps and self.context.followed is not None else ():
            less = copy.copy(self)
            less.features = features
            yield less


def _layer_of(step: ShownStep) -> int | None:
    return None if step.source is None else step.source.layer


def _spoken(length: float) -> str:
    return f"{length:,.0f}" if length >= 1000 else f"{length:.3g}"


def _name(step: ShownStep) -> Html:
    """The left side of an equation, as the name of its result."""
    return typeset(step.equation.partition(" = ")[0].partition(",")[0])


def walk(model: AnyModel, activations: Activations, patch: int) -> list[ShownStep]:
    """The steps of the first recorded image; `patch` is the followed one, counted row by row in the model's grid."""
    sources = walkthrough_of(model).steps(activations)
    grid = model.config.grid or (1, 1)
    if not 0 <= patch < grid[0] * grid[1]:
        raise UsageError(f"Patch must be from 0 to {grid[0] * grid[1] - 1}, got {patch}.")
    arrays = [_array(source.values) for source in sources]
    colours = _colours_by_space(sources, arrays)
    steps = []
    for source, values, shown in zip(sources, arrays, colours, strict=True):
        vector, places, lengths, norms, maps = values, None, None, None, None
        if source.grid is not None:
            at = [place_in(one, grid, source.grid) for one in range(grid[0] * grid[1])]
            all_norms = np.linalg.norm(values, axis=-1)
            vector, places, lengths = values[at[patch]], values[at, :_FEATURES], all_norms[at]
            norms = all_norms.reshape(source.grid)
        if source.shows == "maps" and source.grid is not None:
            strongest = np.argsort(-np.abs(values).mean(axis=0), kind="stable")[:_MAPS]
            maps = np.abs(values[:, np.sort(strongest)]).T.reshape(-1, *source.grid)
        if source.key == "logits":
            vector = np.sort(vector)[::-1]
        scale = _scale_of(source, sources, arrays)
        shape = source.shape or values.shape
        named = (source.key, source.equation, shape, vector, shown, norms, source.fields, source.sentence)
        steps.append(ShownStep(*named, places, lengths, scale, source._replace(values=torch.empty(0)), maps))
    return steps


def _colours_by_space(sources: Sequence[WalkthroughStep], arrays: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """Each step's places in colours; those of one space by the same principal components on the same scale."""
    found: list[np.ndarray | None] = [None] * len(sources)
    for space in {source.space for source in sources if source.space and source.grid is not None}:
        members = [at for at, one in enumerate(sources) if one.space == space and one.grid is not None]
        for at, shares in zip(members, _shared_components([arrays[at] for at in members]), strict=True):
            rows, columns = sources[at].grid or (1, 1)
            found[at] = (255 * shares).round().astype(np.uint8).reshape(rows, columns, 3)
    for at, source in enumerate(sources):
        if source.shows == "colours" and source.grid is not None:
            levels = np.clip((arrays[at] + 1) / 2, 0, 1)
            levels = levels[:, :3] if levels.shape[1] >= 3 else np.repeat(levels[:, :1], 3, axis=1)
            found[at] = (255 * levels).round().astype(np.uint8).reshape(*source.grid, 3)
    return found


def _shared_components(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The first three principal components of several sets of vectors together, from 0 to 1. Each set is centred and
    scaled to the same spread first, so that late layers with long tokens do not decide alone."""
    centred = []
    for group in groups:
        x = np.asarray(group, np.float64) - np.mean(group, axis=0, dtype=np.float64)
        centred.append(x / max(float(np.sqrt(np.square(x).sum(axis=1).mean())), 1e-12))
    whole = np.concatenate(centred)
    if whole.shape[1] <= len(whole):
        parts = whole @ np.linalg.eigh(whole.T @ whole)[1][:, ::-1][:, :3]
    else:
        sizes, vectors = np.linalg.eigh(whole @ whole.T)
        parts = (vectors * np.sqrt(np.maximum(sizes, 0)))[:, ::-1][:, :3]
    parts = np.pad(parts, ((0, 0), (0, 3 - parts.shape[1])))
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=0)[None], axis=0)
    parts = parts * np.where(largest < 0, -1, 1)
    low, high = np.percentile(parts, [1, 99], axis=0)
    shares = np.clip((parts - low) / np.maximum(high - low, 1e-12), 0, 1)
    return np.split(shares, np.cumsum([len(one) for one in centred])[:-1])


def _scale_of(source: WalkthroughStep, sources: Sequence[WalkthroughStep], arrays: Sequence[np.ndarray]) -> float:
    """The value of the strongest colour of a strip: the 99.5th percentile over all steps of its space."""
    same = [
        values.ravel()
        for one, values in zip(sources, arrays, strict=True)
        if one is source or (source.space and one.space == source.space)
    ]
    together = np.abs(np.concatenate(same))
    return float(np.percentile(together, 99.5)) if together.size else 1.0


@torch.no_grad()
def class_path(
    model: AnyModel, activations: Activations, answer: DecisionRule = SINGLE_LABEL, labels: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The prediction for the first image if each layer were the last (the "logit lens"): the probability of the final
    prediction, the most probable class, the `top` classes by name, and the cosine similarity of the head's input with
    that of the last layer."""
    final = activations.steps["pooled"][:1].float()
    label = int(activations.logits[0].argmax())
    path = []
    with evaluating(model):
        for layer in sorted(activations.layers):
            early = Activations(frozenset(), with_attention=False)
            shares = answer.probabilities(model.read(activations.steps[f"blocks.{layer}"][:1], early).float())[0]
            cosine = torch.nn.functional.cosine_similarity(early.steps["pooled"].float(), final)
            best = shares.sort(descending=True, stable=True)
            top = zip(best.indices[:_TOP].tolist(), best.values[:_TOP].tolist(), strict=True)
            path.append(
                {
                    "layer": layer,
                    "probability": float(shares[label]),
                    "winner": int(shares.argmax()),
                    "cosine": float(cosine),
                    "top": [
                        {"class": index, "label": str(index) if labels is None else labels[index], "score": score}
                        for index, score in top
                    ],
                }
            )
    return path


def colours_of(features_ND: Tensor | np.ndarray, grid: Pair) -> np.ndarray:
    """The first three principal components of the features of all patches as red, green and blue, uint8 (h, w, 3).

    Each is scaled from its 1st to its 99th percentile; its sign is such that its largest part is positive.
    """
    (shares,) = _shared_components([np.asarray(features_ND)])
    return (255 * shares).round().astype(np.uint8).reshape(*grid, 3)


def _array(tensor: Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.detach().float().cpu().numpy()
