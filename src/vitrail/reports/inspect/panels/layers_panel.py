"""Panel `layers`: similarity of layers (CKA), and norms of their tokens."""

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
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, make_batch, rounded
from vitrail.reports.page_kit import figure, table

MIN_IMAGES = 16
"""Minimum number of images for CKA. With fewer images it is noise."""


class LayerSimilarity(NamedTuple):
    """CKA of every layer with every layer of the same or another bundle."""

    table: np.ndarray
    """CKA (rows, columns)."""
    rows: list[str]
    """Names of the layers of this bundle."""
    columns: list[str]
    """Names of the layers of the other bundle, or again of this one."""
    images: int
    """Number of images."""
    against: str | None
    """Name of the other bundle."""


class LayersPanel(Panel):
    """CKA between layers of one or two bundles, and norms of patch tokens with their outliers."""

    messages = load_messages(__file__)

    def __init__(self, name: str, context: InspectionContext) -> None:
        super().__init__(name, context)
        self._norms_by_image: dict[int, list[np.ndarray]] = {}
        self.norms: dict[int, dict[str, float]] = {}
        """For each layer, the median and largest norm of patch tokens and the share of outliers."""
        self.similarity: LayerSimilarity | None = None

    def missing_parts(self) -> Iterator[tuple[str, str, str]]:
        if len(self.context.images) < MIN_IMAGES:
            yield "cka", "cka-title", "few"

    def message_fields(self) -> dict[str, Any]:
        return {**super().message_fields(), "few": MIN_IMAGES}

    def record(self, number: int, image_CHW: Tensor, activations: Activations) -> None:
        prefix = 0 if self.context.layout is None else self.context.layout.prefix
        for layer in sorted(activations.layers):
            tokens = activations.steps[f"blocks.{layer}"]
            if tokens.ndim == 3:
                self._norms_by_image.setdefault(layer, []).append(token_norms(tokens[:, prefix:]))

    def finish(self) -> None:
        for layer, norms_by_image in self._norms_by_image.items():
            norms_BN = np.concatenate(norms_by_image)
            self.norms[layer] = {
                "median": float(np.median(norms_BN)),
                "largest": float(norms_BN.max()),
                "outliers": float(outliers(norms_BN).mean()),
            }
        if len(self.context.images) >= MIN_IMAGES:
            self.similarity = self._measure_similarity()

    def _measure_similarity(self) -> LayerSimilarity:
        context = self.context
        row_grams = column_grams = layer_grams(context.model, context.images)
        name = None
        if context.against is not None:
            name, other = context.against
            with evaluating(other.model):
                crops = [other.preprocess.crop(image) for image in context.sources]
                column_grams = layer_grams(other.model, make_batch(other, crops))
        table = cka_table(row_grams, column_grams)
        return LayerSimilarity(table, list(row_grams), list(column_grams), len(context.images), name)

    def layer_numbers(self, layer: int) -> dict[str, Any]:
        return {"norms": self.norms[layer]} if layer in self.norms else {}

    def numbers(self) -> dict[str, Any]:
        similarity = self.similarity
        if similarity is None:
            return {"cka": None}
        numbers = {
            "against": similarity.against,
            "pictures": similarity.images,
            "rows": similarity.rows,
            "columns": similarity.columns,
            "table": rounded(similarity.table),
        }
        return {"cka": numbers}

    def figures(self) -> Iterator[tuple[str, Figure]]:
        if (similarity := self.similarity) is not None:
            rows, columns = (
                [name.removeprefix("blocks.") for name in side] for side in (similarity.rows, similarity.columns)
            )
            bundle = self.context.name
            x_label, y_label = (
                Html(f"{self.svg_label('layer')}: {escape(name)}") for name in (similarity.against or bundle, bundle)
            )
            yield "cka", matrix_chart(similarity.table, sequential(similarity.table), rows, columns, x_label, y_label)

    def html(self, figures: Mapping[str, Figure]) -> str:
        parts: list[str] = []
        if (similarity := self.similarity) is not None:
            title = self.t("cka") if similarity.against is None else self.t("cka-against", other=similarity.against)
            parts.append(figure(title, self.t("cka-note", count=similarity.images), str(figures["cka"])))
        if self.norms:
            rows = [
                (layer, f"{norms['median']:.3g}", f"{norms['largest']:.3g}", f"{norms['outliers']:.2%}")
                for layer, norms in sorted(self.norms.items())
            ]
            headers = [self.t(name) for name in ("layer", "median", "largest-norm", "outliers")]
            parts += [self.paragraph("norms"), table(headers, rows, numeric=frozenset(range(4)))]
        return "".join(parts)
