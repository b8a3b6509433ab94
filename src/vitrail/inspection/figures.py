"""The figures of an examination: pictures as pixels, curves as SVG."""

from collections.abc import Iterator

import numpy as np

from vitrail.inspection.attention import attention_figure
from vitrail.inspection.colours import heat, sequential
from vitrail.inspection.examine import Examination, View
from vitrail.inspection.reach import reach_colours
from vitrail.pages.page import Line, chart

_TILE = 3  # pixels of a cell in similarity tiles
_LAYER = "layer / 층"


def draw_pictures(found: Examination) -> Iterator[tuple[str, np.ndarray]]:
    """Every figure that is a picture, by name, uint8 (h, w, 3)."""
    if found.positions is not None:
        yield "positions", similarity_tiles(found.positions, found.bundle.model.config.grid)
    if found.filters is not None:
        yield "filters", filter_tiles(found.filters[0])
    for layer, heard in found.reach.items():
        yield f"reach-{layer}", reach_colours(heard)
    if found.cka is not None:
        yield "cka", enlarge(sequential(found.cka[::-1]), 12)
    for number, view in enumerate(found.views):
        for name, values in view.maps.items():
            yield f"picture-{number}-{name.replace(' ', '-')}", enlarge(heat(values), 8)
        if view.evidence is not None:
            worth = np.maximum(np.array(view.evidence["occlusion"]), 0)
            yield f"picture-{number}-occlusion", enlarge(heat(worth), 8)
        if found.where is not None:
            read = {layer: found.where.read(weights) for layer, weights in view.attention.items()}
            subject = ", ".join(f"{answer['label']} {answer['score']:.2f}" for answer in view.answers[:1])
            who = "[CLS]" if found.where.has_class else "the mean patch"
            tokens = next(iter(view.attention.values())).shape[-1]
            title = f"Where does {who} look? {subject}"
            figure = attention_figure(rgb(view.pixels), read, tokens, title, found.shown_heads)
            yield f"picture-{number}-attention", np.asarray(figure)


def draw_curves(found: Examination) -> Iterator[tuple[str, str]]:
    """Every figure that is a curve, by name, as SVG inside a page."""
    if found.heads:
        yield "distances", _distances(found)
    if found.where is not None and found.where.prefix:
        layers = sorted(found.heads)
        masses = [float(found.heads[layer].prefix_mass.mean()) for layer in layers]
        yield "prefix-mass", chart([Line("mean", layers, masses, 1)], _LAYER, "share", dots=True)
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
        Line("heads", [x for x, _ in points], [y for _, y in points], 0, joined=False),
        Line("mean", layers, [float(row.mean()) for row in means], 1),
        Line("uniform", [layers[0], layers[-1]], [1.0, 1.0], 7),
    ]
    return chart(lines, _LAYER, "distance, of uniform")


def _path(view: View) -> str:
    layers = [row["layer"] for row in view.path]
    lines = [
        Line("answer", layers, [row["probability"] for row in view.path], 0),
        Line("cosine", layers, [row["cosine"] for row in view.path], 1),
    ]
    return chart(lines, _LAYER, "share", dots=True)


def _dropped(view: View) -> str:
    assert view.evidence is not None
    rows = view.evidence["patch_drop"]
    xs = [0.0, *(row["share"] for row in rows)]
    ys = [view.answers[0]["score"], *(row["probability"] for row in rows)]
    return chart([Line("answer", xs, ys, 0)], "share of cells gone / 지운 칸의 몫", "share", dots=True)


def similarity_tiles(table_NN: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """A tile for each place, where the place stands, with its similarity to all others (Figure 7, centre)."""
    rows, columns = grid
    tiles = sequential((table_NN.reshape(rows, columns, rows, columns) + 1) / 2)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1), (0, 0)), constant_values=255)
    return enlarge(tiles.transpose(0, 2, 1, 3, 4).reshape(rows * (rows + 1), columns * (columns + 1), 3), _TILE)


def filter_tiles(filters: np.ndarray, columns: int = 7) -> np.ndarray:
    """Filters (count, P, P, C) side by side."""
    count, high, wide, channels = filters.shape
    shown = filters if channels == 3 else np.repeat(filters[..., :1], 3, axis=3)
    rows = -(-count // columns)
    blank = np.ones((rows * columns - count, high, wide, 3))
    tiles = np.concatenate([shown, blank]).reshape(rows, columns, high, wide, 3)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1), (0, 0)), constant_values=1.0)
    mosaic = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * (high + 1), columns * (wide + 1), 3)
    return enlarge((255 * mosaic).round().astype(np.uint8), max(64 // high, 1))


def enlarge(pixels: np.ndarray, factor: int) -> np.ndarray:
    """Each pixel as a square."""
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def rgb(pixels_HWC: np.ndarray) -> np.ndarray:
    """What can be shown of a picture's channels: three, else the first."""
    return pixels_HWC[..., :3] if pixels_HWC.shape[2] >= 3 else pixels_HWC[..., :1]
