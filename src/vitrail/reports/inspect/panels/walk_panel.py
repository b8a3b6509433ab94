"""Panel `walk`: the path of an image through a model, step by step, with equation, shape and actual values."""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.data.thumbnail import image_data_url
from vitrail.models.activations import Activations
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.colours import sequential, signed
from vitrail.reports.equations import typeset
from vitrail.reports.inspect.packing import pack, round_significant
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel
from vitrail.reports.inspect.shared_messages import SHARED_MESSAGES
from vitrail.reports.inspect.walkthrough_steps import (
    MAX_FEATURES,
    PRINTED_VALUES,
    TOP_CLASSES,
    FollowedStep,
    apply_logit_lens,
    follow_patch,
)
from vitrail.reports.page_kit import figure
from vitrail.reports.translations import LANGUAGES


class WalkthroughPanel(Panel):
    """The steps of each page image, and the prediction as if each layer were the last (the logit lens)."""

    messages = load_messages(__file__)
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self.features = MAX_FEATURES
        """Number of features in the page for every position. 0: only the features of the followed patch."""
        self.steps: dict[int, list[FollowedStep]] = {}
        self.lens: dict[int, list[dict[str, Any]]] = {}
        """Logit lens of each page image."""
        self.logits: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Logits and probabilities of each page image, if the model classifies."""

    @property
    def notice(self) -> str:
        return "notice" if self.context.followed is not None else "notice-whole"

    def why_absent(self) -> str | None:
        return "one-patch" if self.context.model.config.grid == (1, 1) else None

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        model, rule = self.context.model, self.context.bundle.answer
        self.steps[number] = follow_patch(model, activations, self.context.followed or 0)
        if self.context.why_no_prediction() is not None:
            return
        logits = activations.logits[0].float()
        self.logits[number] = logits.cpu().numpy(), rule.probabilities(logits).cpu().numpy()
        descending = np.sort(self.logits[number][1])[::-1]
        self.steps[number].append(
            FollowedStep(
                "probabilities", rule.equation, descending.shape, descending, message=f"probabilities-{rule.kind}"
            )
        )
        if model.reads_layers:
            self.lens[number] = apply_logit_lens(model, activations, rule, self.context.labels)

    def numbers(self) -> dict[str, Any]:
        if self.context.followed is None:
            return {"followed": None}
        row, column = divmod(self.context.followed, self.context.grid[1])
        return {"followed": {"row": row, "column": column}}

    def image_numbers(self, number: int) -> dict[str, Any]:
        return {
            "walk": [step.to_json() for step in self.steps.get(number, [])],
            "path": self.lens.get(number, []),
        }

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for number, lens in self.lens.items():
            layers = [entry["layer"] for entry in lens]
            lines = [
                Line(self.svg_label("prediction"), layers, [entry["probability"] for entry in lens], 0),
                Line(self.svg_label("cosine"), layers, [entry["cosine"] for entry in lens], 1),
            ]
            labels = self.svg_label("layer"), self.svg_label("probability-cosine")
            yield f"picture-{number}-path", line_chart(lines, *labels, dots=True)

    # HTML

    def html(self, figures: Mapping[str, Figure]) -> str:
        if not self.steps:
            return ""
        intro = self.paragraph("walk")
        if self.context.followed is not None:
            intro += self.paragraph("choose" if self.features else "chosen")
            intro += '<p id="followed" class="followed" aria-live="polite"></p>'
        parts = []
        for number, steps in self.steps.items():
            content = f'<div class="tiles walk">{"".join(self._step_figures(number, steps))}</div>'
            if number in self.lens:
                content += self._lens_figure(number, str(figures[f"picture-{number}-path"]))
            parts.append(self.block_for_image(number, content))
        return intro + "".join(parts)

    def _step_figures(self, number: int, steps: Sequence[FollowedStep]) -> Iterator[Html]:
        """Yield one figure per step, and one figure for all layers."""
        indexed = enumerate(steps)
        for is_layer, group in itertools.groupby(indexed, lambda pair: pair[1].layer is not None):
            if is_layer:
                yield self._layers_figure(number, list(group))
            else:
                yield from (self._step_figure(number, index, step) for index, step in group)

    def _step_figure(self, number: int, index: int, step: FollowedStep) -> Html:
        message = self.paragraph(step.message, **step.fields)
        if step.key in ("logits", "probabilities") and number in self.logits:
            return self._figure_with_equation(step, message + self._class_table(number, step.key))
        image = ""
        if step.shows == "image":
            image = self._image_with_grid(number)
        elif step.shows == "patch" and step.message == "patches":
            image = f'<div class="patch p{number}" data-zoom></div>'
        elif step.colours is not None:
            image = f'<div class="side">{self._colour_map(step.colours, step)}</div>'
        if step.maps is not None and self.features:
            image += self._feature_maps(step, rows=2)
        return self._figure_with_equation(step, f"{image}{message}{self._strip_with_values(number, index, step)}")

    def _figure_with_equation(self, step: FollowedStep, content: str) -> Html:
        """Return a figure with the equation and shape as its caption and the meanings of the symbols."""
        shape = " x ".join(map(str, step.shape))
        return Html(
            f"<figure><figcaption>{typeset(step.equation)}<small>{shape}</small></figcaption>"
            f"{content}{self.symbol_list(step.equation)}</figure>"
        )

    def _layers_figure(self, number: int, steps: list[tuple[int, FollowedStep]]) -> Html:
        """Return one figure for all layers: small maps, then a row with the followed vector of each layer."""
        first_by_message = {step.message: step for _, step in reversed(steps)}
        parts = [
            f"{typeset(step.equation)}{self.paragraph(step.message, **step.fields)}"
            for _, step in reversed(first_by_message.items())
        ]
        if any(step.colours is not None for _, step in steps):
            parts.append(f'<div class="multiples">{"".join(self._small_map(step) for _, step in steps)}</div>')
        if self.features:
            parts += [self._channels(step) for _, step in steps]
        reads = "".join(
            f'<div><canvas class="map" aria-hidden="true" data-reads="{number} {index}"></canvas>'
            f"<small>{_result_symbol(step)}</small></div>"
            for index, step in steps
            if step.shows == "reads" and self.features
        )
        parts.append(f'<div class="multiples">{reads}</div>' if reads else "")
        parts.append(self._strips(number, steps))
        layers = [step.layer or 0 for _, step in steps]
        title = self.t("layers-title", first=min(layers), last=max(layers))
        equations = " ".join(step.equation for step in first_by_message.values())
        content = f"{''.join(parts)}{self.symbol_list(equations)}"
        return Html(f'<figure class="whole"><figcaption>{title}</figcaption>{content}</figure>')

    def _channels(self, step: FollowedStep) -> str:
        """Return the feature maps of a layer, or its states in reading order."""
        if step.maps is not None:
            return f'<div class="channels">{_result_symbol(step)}{self._feature_maps(step)}</div>'
        if step.shows == "states":
            states = image_data_url(signed(step.extra))
            return f'<div class="channels">{_result_symbol(step)}<img class="sheet" src="{states}" alt=""></div>'
        return ""

    def _strips(self, number: int, steps: list[tuple[int, FollowedStep]]) -> str:
        """Return a row for each layer with the followed vector as a strip of colours, and its length."""
        width = max(len(step.vector) for _, step in steps)
        scales = sorted({f"{step.scale:.2g}" for _, step in steps}, key=float)
        fields = {
            "scale": " ... ".join(dict.fromkeys([scales[0], scales[-1]])),
            "shown": min(width, self.features or MAX_FEATURES),
            "width": width,
        }
        note = self.paragraph("strips" if self.context.followed is not None else "strips-whole", **fields)
        rows = "".join(
            f'<div class="row-name">{_result_symbol(step)}</div>{self._strip(number, index)}'
            f'<code data-length="{number} {index}">{_length_text(float(np.linalg.norm(step.vector)))}</code>'
            for index, step in steps
        )
        return f'{note}<div class="strips">{rows}</div>'

    def _small_map(self, step: FollowedStep) -> str:
        if step.colours is None:
            return ""
        mean = 0.0 if step.norms is None else float(step.norms.mean())
        note = f"<small>{_result_symbol(step)} {self.t('mean-length', mean=_length_text(mean))}</small>"
        return f"<div>{self._colour_map(step.colours, step)}{note}</div>"

    def _colour_map(self, colours: np.ndarray, step: FollowedStep) -> str:
        """Return the colours of all positions, with the followed one marked. A click follows another position."""
        assert step.grid is not None
        rows, columns = step.grid
        return (
            f'<div class="photo place" style="aspect-ratio: {columns} / {rows}" data-grid="{rows} {columns}">'
            f'<img src="{image_data_url(colours)}" alt="{escape(step.key)}"><div class="mark"></div></div>'
        )

    def _feature_maps(self, step: FollowedStep, rows: int = 1) -> str:
        """Return the strongest feature maps side by side, on one scale."""
        assert step.maps is not None
        tiles = sequential(step.maps / max(float(step.maps.max()), 1e-12))
        framed = np.pad(tiles, ((0, -len(tiles) % rows), (0, 1), (0, 1), (0, 0)), constant_values=255)
        lines = [np.concatenate(list(line), axis=1) for line in np.split(framed, rows)]
        return f'<img class="sheet" src="{image_data_url(np.concatenate(lines))}" alt="">'

    def _strip_with_values(self, number: int, index: int, step: FollowedStep) -> str:
        if not step.vector.size:
            return ""
        rest = ", ..." if step.vector.size > len(step.values) else ""
        values = ", ".join(f"{value:.3g}" for value in step.values)
        return f'{self._strip(number, index)}<code data-values="{number} {index}">{values}{rest}</code>'

    def _strip(self, number: int, index: int) -> str:
        return f'<canvas class="strip" aria-hidden="true" data-strip="{number} {index}"></canvas>'

    def _image_with_grid(self, number: int) -> str:
        """Return the image with its grid, on which the followed position is selected."""
        if self.context.followed is None:
            return self.photo(number)
        rows, columns = self.context.grid
        lines = f"background-size: {100 / columns:.4f}% {100 / rows:.4f}%"
        overlay = f'<div class="lines" style="{lines}"></div><div class="mark"></div>'
        attributes = f'class="photo place" data-grid="{rows} {columns}"'
        if self.features:
            attributes += ' tabindex="0" role="application" aria-describedby="followed"'
        return self.photo(number, overlay, attributes=attributes)

    def _class_table(self, number: int, key: str) -> str:
        """Return the most probable classes with their logits, or with their probabilities as bars.

        A class has the same colour in both tables and in the logit lens.
        """
        logits, probabilities = self.logits[number]
        order = np.argsort(-logits, kind="stable")[:TOP_CLASSES]
        rows = []
        for place, index in enumerate(order):
            dot = f'<span class="dot" style="background:var(--c{place})"></span>'
            label, value, bar = escape(self.context.labels[int(index)]), logits[index], ""
            if key == "probabilities":
                value = probabilities[index]
                style = f"width:{100 * float(value):.2f}%;background:var(--c{place})"
                bar = f'<td class=bar><i style="{style}"></i></td>'
            rows.append(f'<tr><td>{dot}{label}</td><td class="number">{value:.3f}</td>{bar}</tr>')
        rest = len(logits) - len(order)
        more = self.paragraph("more-classes", count=f"{rest:,}") if rest > 0 else ""
        return f'<table class="bars">{"".join(rows)}</table>{more}'

    def _lens_figure(self, number: int, curve: str) -> str:
        """Return the top classes after every layer, beside the curve of the final prediction."""
        logits, _ = self.logits[number]
        colours = {int(index): place for place, index in enumerate(np.argsort(-logits, kind="stable")[:TOP_CLASSES])}
        rows = []
        for entry in self.lens[number]:
            cells = "".join(
                f'<td><span class="dot" style="background:var(--c{colours.get(top["class"], 7)})"></span>'
                f"{escape(top['label'])} <b>{top['score']:.2f}</b></td>"
                for top in entry["top"][:3]
            )
            rows.append(f'<tr><td class="number">{entry["layer"]}</td>{cells}</tr>')
        head = f'<th class="number">{self.t("layer")}</th><th colspan="3">{self.t("lens-top")}</th>'
        table = (
            f'<div class="scroll"><table class="lens"><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )
        return figure(self.t("path"), self.t("path-note"), f'<div class="panes">{table}{curve}</div>')

    # Data of the script

    def script_data(self) -> dict[str, Any]:
        messages = {**SHARED_MESSAGES, **self.messages}
        followed = "followed" if self.context.walkthrough.has_patches else "followed-cell"
        return {
            "messages": {language: messages[followed][language] for language in LANGUAGES},
            "signed": signed(np.linspace(-1, 1, 255)).tolist(),
            "ramp": sequential(np.linspace(0, 1, 256)).tolist(),
            "all": bool(self.features),
            "images": {number: [self._pack(step) for step in steps] for number, steps in self.steps.items()},
        }

    def _pack(self, step: FollowedStep) -> dict[str, Any] | None:
        """Return the vectors of a step: of every position, of the followed one, or of the whole image."""
        if not step.vector.size or step.key in ("logits", "probabilities"):
            return None
        features, lengths, has_all_positions = step.vector[None], np.linalg.norm(step.vector[None], axis=-1), False
        if step.features is not None and step.lengths is not None and self.features:
            features, lengths, has_all_positions = step.features, step.lengths, True
        packed: dict[str, Any] = {
            "many": has_all_positions,
            "width": min(features.shape[1], self.features or MAX_FEATURES),
            "of": len(step.vector),
            "rows": pack(features[:, : self.features or MAX_FEATURES], scale=step.scale),
            "first": round_significant(features[:, :PRINTED_VALUES]),
            "lengths": round_significant(lengths),
        }
        if has_all_positions and step.shows == "reads":
            reads_NN = step.extra
            packed["reads"] = pack(reads_NN / np.maximum(reads_NN.max(axis=1, keepdims=True), 1e-30))
        return packed

    def smaller_versions(self) -> Iterator[Self]:
        # The first version is repeated, because versions of all panels are combined by their number.
        for features in (32, 32, 0) if self.steps and self.context.followed is not None else ():
            panel = copy.copy(self)
            panel.features = features
            yield panel


def _length_text(length: float) -> str:
    return f"{length:,.0f}" if length >= 1000 else f"{length:.3g}"


def _result_symbol(step: FollowedStep) -> Html:
    """Return the left side of the step's equation, typeset."""
    return typeset(step.equation.partition(" = ")[0].partition(",")[0])
