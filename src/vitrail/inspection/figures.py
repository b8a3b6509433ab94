"""The figures of an examination: pictures as pixels, curves and tables as SVG."""

from collections.abc import Iterator

import numpy as np

from vitrail.inspection.attention import attention_figure
from vitrail.inspection.colours import heat, sequential, signed
from vitrail.inspection.examine import Examination, View
from vitrail.inspection.reach import reach_colours
from vitrail.inspection.words import word
from vitrail.pages.page import Html, Line, chart, escape, matrix


def _label(name: str) -> Html:
    """A word inside a drawing, in both languages."""
    return word(name, "tspan")


def draw_pictures(found: Examination) -> Iterator[tuple[str, np.ndarray]]:
    """Every figure that is a picture, by name, uint8 (h, w, 3), a pixel for each number."""
    if found.positions is not None:
        yield "positions", similarity_tiles(found.positions, found.bundle.model.config.grid)
    if found.filters is not None:
        yield "filters", filter_tiles(found.filters[0])
    for layer, one in found.reach.items():
        yield f"reach-{layer}", reach_colours(one.heard)
    for number, view in enumerate(found.views):
        for name, values in view.maps.items():
            yield f"picture-{number}-{name.replace(' ', '-')}", heat(values)
        if view.evidence is not None:
            yield f"picture-{number}-occlusion", signed(np.array(view.evidence["occlusion"]))
        if view.attention:
            yield f"picture-{number}-attention", _attention(found, view)


def _attention(found: Examination, view: View) -> np.ndarray:
    assert found.where is not None
    prefix, grid = found.where.prefix, found.where.grid
    read = {layer: view.read(layer)[:, prefix:].reshape(-1, *grid) for layer in view.attention}
    title = {"[CLS]": "[CLS]", "mean": "the mean patch", "pool": "what the pooling reads"}[found.where.reads]
    return np.asarray(
        attention_figure(rgb(view.pixels), read, len(view.reading), f"Where does {title} look?", found.shown_heads)
    )


def draw_curves(found: Examination) -> Iterator[tuple[str, str]]:
    """Every figure that is a drawing, by name, as SVG inside a page."""
    if found.heads:
        yield "distances", _distances(found)
    if found.where is not None and found.where.prefix:
        layers = sorted(found.heads)
        masses = [float(found.heads[layer].prefix_mass.mean()) for layer in layers]
        yield (
            "prefix-mass",
            chart([Line(_label("mean"), layers, masses, 1)], _label("layer"), _label("share"), dots=True),
        )
    if (compared := found.comparison) is not None:
        names = [[name.removeprefix("blocks.") for name in side] for side in (compared.columns, compared.rows)]
        across, up = (
            Html(f"{_label('layer')}: {escape(name)}") for name in (compared.against or found.name, found.name)
        )
        yield "cka", matrix(sequential(compared.table), names[1], names[0], across, up)
    for number, view in enumerate(found.views):
        if view.path:
            yield f"picture-{number}-path", _path(view)
        if view.evidence is not None:
            yield f"picture-{number}-dropped", _dropped(view)


def _distances(found: Examination) -> str:
    layers = sorted(found.heads)
    means = [found.heads[layer].of_uniform.mean(axis=0) for layer in layers]
    points = [(layer, float(value)) for layer, row in zip(layers, means, strict=True) for value in row]
    lines = [
        Line(_label("heads"), [x for x, _ in points], [y for _, y in points], 0, joined=False),
        Line(_label("mean"), layers, [float(row.mean()) for row in means], 1),
        Line(_label("uniform"), [layers[0], layers[-1]], [1.0, 1.0], 7),
    ]
    return chart(lines, _label("layer"), _label("of-uniform"))


def _path(view: View) -> str:
    layers = [row["layer"] for row in view.path]
    lines = [
        Line(_label("answer"), layers, [row["probability"] for row in view.path], 0),
        Line(_label("cosine"), layers, [row["cosine"] for row in view.path], 1),
    ]
    return chart(lines, _label("layer"), _label("probability-cosine"), dots=True)


def _dropped(view: View) -> str:
    assert view.evidence is not None
    rows = view.evidence["patch_drop"]
    start = view.answers[0]["score"]
    xs = [0.0, *(row["share"] for row in rows)]
    lines = [Line(_label("answer"), xs, [start, *(row["probability"] for row in rows)], 0)]
    ends = [[start, *(min(max(row["interval"][end], 0), 1) for row in rows)] for end in (0, 1)]
    lines += [Line(name, xs, ys, 7) for name, ys in zip(("95 %", ""), ends, strict=True)]
    return chart(lines, _label("gone"), _label("probability"), dots=True)


def similarity_tiles(table_NN: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """A tile for each place, where the place stands, with its similarity to all others (Figure 7, centre)."""
    rows, columns = grid
    tiles = sequential((table_NN.reshape(rows, columns, rows, columns) + 1) / 2)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1), (0, 0)), constant_values=255)
    return tiles.transpose(0, 2, 1, 3, 4).reshape(rows * (rows + 1), columns * (columns + 1), 3)


def filter_tiles(filters: np.ndarray, columns: int = 7) -> np.ndarray:
    """Filters (count, P, P, C) side by side, in their first three channels (or their first)."""
    shown = filters[..., :3] if filters.shape[3] >= 3 else np.repeat(filters[..., :1], 3, axis=3)
    count, high, wide, _ = shown.shape
    rows = -(-count // columns)
    blank = np.ones((rows * columns - count, high, wide, 3))
    tiles = np.concatenate([shown, blank]).reshape(rows, columns, high, wide, 3)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1), (0, 0)), constant_values=1.0)
    mosaic = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * (high + 1), columns * (wide + 1), 3)
    return (255 * mosaic).round().astype(np.uint8)


def enlarge(pixels: np.ndarray, least: int = 240) -> np.ndarray:
    """A small picture with each pixel as a square, for files that are looked at alone."""
    factor = -(-least // max(pixels.shape[:2]))
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def rgb(pixels_HWC: np.ndarray) -> np.ndarray:
    """What can be shown of a picture's channels: the first three, else the first."""
    return pixels_HWC[..., :3] if pixels_HWC.shape[2] >= 3 else pixels_HWC[..., :1]
