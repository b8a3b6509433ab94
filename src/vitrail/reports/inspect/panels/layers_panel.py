"""CKA between layers, and norms of their tokens."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vitrail.analysis.layers import cka_table, layer_grams, outliers, token_norms
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.models.device import evaluating
from vitrail.reports.charts import matrix_chart
from vitrail.reports.colours import sequential
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, prepare, rounded
from vitrail.reports.page_kit import figure, table

FEW = 16
"""Minimum number of images for CKA; with fewer it is noise."""


class Comparison(NamedTuple):
    """CKA of every layer with every layer of the same or another bundle."""

    table: np.ndarray
    rows: list[str]
    columns: list[str]
    images: int
    against: str | None
    """The other bundle, whose layers are the columns."""


class LayersPanel(Panel):
    """CKA between layers (or with another bundle's), and norms of patch tokens with their outliers."""

    words = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self._norms: dict[int, list[np.ndarray]] = {}
        self.norms: dict[int, dict[str, float]] = {}
        """Of each layer: median and largest norm of patch tokens, share of outliers."""
        self.comparison: Comparison | None = None

    def absences(self) -> Iterator[tuple[str, str, str]]:
        if len(self.context.images) < FEW:
            yield "cka", "cka-title", "few"

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "few": FEW}

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        prefix = 0 if self.context.layout is None else self.context.layout.prefix
        for layer in sorted(activations.layers):
            tokens = activations.steps[f"blocks.{layer}"]
            if tokens.ndim == 3:
                self._norms.setdefault(layer, []).append(token_norms(tokens[:, prefix:]))

    def finish(self) -> None:
        for layer, found in self._norms.items():
            norms_BN = np.concatenate(found)
            self.norms[layer] = {
                "median": float(np.median(norms_BN)),
                "largest": float(norms_BN.max()),
                "outliers": float(outliers(norms_BN).mean()),
            }
        if len(self.context.images) >= FEW:
            self.comparison = self._compare()

    def _compare(self) -> Comparison:
        context = self.context
        one = two = layer_grams(context.model, context.images)
        name = None
        if context.against is not None:
            name, other = context.against
            with evaluating(other.model):
                crops = [other.preprocess.crop(image) for image in context.sources]
                two = layer_grams(other.model, prepare(other, crops))
        return Comparison(cka_table(one, two), list(one), list(two), len(context.images), name)

    def layer_numbers(self, layer: int) -> dict[str, Any]:
        return {"norms": self.norms[layer]} if layer in self.norms else {}

    def numbers(self) -> dict[str, Any]:
        compared = self.comparison
        if compared is None:
            return {"cka": None}
        numbers = {
            "against": compared.against,
            "pictures": compared.images,
            "rows": compared.rows,
            "columns": compared.columns,
            "table": rounded(compared.table),
        }
        return {"cka": numbers}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        if (compared := self.comparison) is not None:
            rows, columns = (
                [name.removeprefix("blocks.") for name in side] for side in (compared.rows, compared.columns)
            )
            own = self.context.name
            across, up = (Html(f"{self.label('layer')}: {escape(name)}") for name in (compared.against or own, own))
            yield "cka", matrix_chart(compared.table, sequential(compared.table), rows, columns, across, up)

    def html(self, figures: Mapping[str, Figure]) -> str:
        parts: list[str] = []
        if (compared := self.comparison) is not None:
            title = self.word("cka") if compared.against is None else self.word("cka-against", other=compared.against)
            parts.append(figure(title, self.word("cka-note", count=compared.images), str(figures["cka"])))
        if self.norms:
            rows = [
                (layer, f"{one['median']:.3g}", f"{one['largest']:.3g}", f"{one['outliers']:.2%}")
                for layer, one in sorted(self.norms.items())
            ]
            headers = [self.word(name) for name in ("layer", "median", "largest-norm", "outliers")]
            parts += [self.say("norms"), table(headers, rows, frozenset(range(4)))]
        return "".join(parts)
