"""`vitrail inspect`: an examination as one page that opens from disk, as figures one by one, and as numbers.

DIR/index.html      everything, for people; no network
DIR/figures/*.png   the figures one by one
DIR/inspect.json    every number
"""

import functools
import json
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.inspection.colours import sequential
from vitrail.inspection.examine import SHARES, Examination, View, areas
from vitrail.inspection.weights import entropy
from vitrail.models.vit import ViT
from vitrail.pages.page import Line, chart, data_image, escape, figure, numbers, page, table
from vitrail.storage import whole_folder, write_json

LIMIT = 6_000_000
"""Bytes of a page, above which only head means follow the pointer (unless all is asked for)."""
_TILE = 3  # pixels of a cell in similarity tiles


def write_page(found: Examination, output: Path, *, full: bool = False, force: bool = False) -> dict[str, Any]:
    """Write the folder, whole or not at all; returns what `inspect.json` holds."""
    document = found.to_json()
    figures = dict(make_figures(found))
    with whole_folder(output, force=force) as folder:
        for name, pixels in figures.items():
            Image.fromarray(pixels).save(folder / f"{name}.png")
        text = make_page(found, figures, every_head=True)
        if len(text.encode()) > LIMIT and not full:
            text = make_page(found, figures, every_head=False)
        (folder / "index.html").write_text(text, encoding="utf-8")
        write_json(folder / "inspect.json", document)
    return document


def make_figures(found: Examination) -> Iterable[tuple[str, np.ndarray]]:
    """Every figure that is a picture, by name, uint8 (h, w, 3)."""
    if found.positions is not None:
        yield "positions", similarity_tiles(found.positions, found.bundle.model.config.grid)
    if found.filters is not None:
        yield "filters", filter_tiles(found.filters[0])
    for layer, heard in found.reach.items():
        yield f"reach-{layer + 1}", _reach_colours(heard)
    if found.cka is not None:
        yield "cka", _enlarge(sequential(found.cka[::-1]), 12)
    for number, view in enumerate(found.views):
        for name, values in view.maps.items():
            yield f"{number + 1}-{name.replace(' ', '-')}", _enlarge(_map_colours(values), 8)


def similarity_tiles(table_NN: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """A tile for each place, where the place stands, with its similarity to all others (Figure 7, centre)."""
    rows, columns = grid
    tiles = sequential((table_NN.reshape(rows, columns, rows, columns) + 1) / 2)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1), (0, 0)), constant_values=255)
    return _enlarge(tiles.transpose(0, 2, 1, 3, 4).reshape(rows * (rows + 1), columns * (columns + 1), 3), _TILE)


def filter_tiles(filters: np.ndarray, columns: int = 7) -> np.ndarray:
    """Filters (count, P, P, C) side by side."""
    count, high, wide, channels = filters.shape
    shown = filters if channels == 3 else np.repeat(filters[..., :1], 3, axis=3)
    rows = -(-count // columns)
    blank = np.ones((rows * columns - count, high, wide, 3))
    tiles = np.concatenate([shown, blank]).reshape(rows, columns, high, wide, 3)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1), (0, 0)), constant_values=1.0)
    mosaic = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * (high + 1), columns * (wide + 1), 3)
    return _enlarge((255 * mosaic).round().astype(np.uint8), max(64 // high, 1))


def make_page(found: Examination, figures: dict[str, np.ndarray], *, every_head: bool) -> str:
    """The document. With `every_head`, all maps follow the pointer; else those of [CLS], and head means."""
    config = found.bundle.model.config
    sections = [_summary(found)]
    has_attention = bool(found.views[0].attention)
    if has_attention:
        sections += [_walk(found), _attention(found, every_head=every_head), _distances(found)]
    if "positions" in figures:
        sections.append(_positions(found, figures["positions"]))
    if "filters" in figures:
        sections.append(_filters(found, figures["filters"]))
    if found.reach:
        sections.append(_reach(found, figures))
    if any(view.evidence for view in found.views):
        sections.append(_evidence(found))
    sections.append(_layers(found, figures))
    if found.absent:
        rows = [(panel, reason) for panel, reason in found.absent]
        sections.append("<h2>What is not here</h2>" + table(("panel", "why"), rows))
    title = f"Inside {config.name or config.family}"
    subtitle = f"{found.name}: {config.parameters:,} parameters"
    data = {
        "hasClass": getattr(config, "pool", "") == "cls",
        "pictures": [_maps_of(view, found, every_head=every_head) for view in found.views] if has_attention else [],
    }
    # Inside a script, only this one character could end it.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    script = resources.files("vitrail.pages").joinpath("inspect.js").read_text(encoding="utf-8")
    body = "\n".join(sections) + f'<script type="application/json" id="data">{embedded}</script>'
    return page(title, subtitle, body, script=script)


@functools.cache
def _words() -> dict[str, dict[str, str]]:
    return tomllib.loads(resources.files("vitrail.inspection").joinpath("words.toml").read_text(encoding="utf-8"))


def say(sentence: str, **fields: Any) -> str:
    """A sentence of the page in both languages, of which one is shown."""
    words = {language: escape(text.format(**fields)) for language, text in _words()[sentence].items()}
    return f'<p class="en" lang="en">{words["en"]}</p><p class="ko" lang="ko">{words["ko"]}</p>'


def _summary(found: Examination) -> str:
    parts = ['<p><button id="language" type="button">English / 한국어</button></p>']
    if not found.is_trained:
        parts.append(f'<div class="warn">{say("untrained")}</div>')
    for view in found.views:
        rows = [(answer["label"], f"{answer['score']:.3f}") for answer in view.answers]
        content = (
            f'<div class="attention">{_shown(view)}<div>{table(("answer", "share"), rows, frozenset({1}))}</div></div>'
        )
        parts.append(figure(view.name, "as the model sees it", content))
    return "".join(parts)


def _shown(view: View) -> str:
    return f'<img class="seen" src="{data_image(_rgb(view.pixels))}" alt="{escape(view.name)}">'


def _walk(found: Examination) -> str:
    view = found.views[0]
    tiles = []
    for panel in view.panels:
        image = ""
        if panel.colours is not None:
            image = f'<img src="{data_image(panel.colours)}" alt="{escape(panel.key)}">'
        shape = " x ".join(map(str, panel.shape))
        values = ", ".join(f"{value:.3g}" for value in panel.values)
        tiles.append(
            f"<figure><figcaption>{escape(panel.equation)}<small>{escape(shape)}</small></figcaption>{image}"
            f"{say(panel.sentence or panel.key, **panel.words)}<code>{escape(values)}, ...</code></figure>"
        )
    path = [
        Line(
            "answer",
            [row["layer"] + 1 for row in view.path],
            [row["probability"] for row in view.path],
            0,
        ),
        Line("cosine", [row["layer"] + 1 for row in view.path], [row["cosine"] for row in view.path], 1),
    ]
    curve = figure(
        "The path of what the head reads",
        "if the walk ended after each layer",
        chart(path, "layer", "share", dots=True),
    )
    intro = say("walk", name=view.name)
    return f'<h2>The walk</h2>{intro}<div class="tiles">{"".join(tiles)}</div>{curve}'


def _attention(found: Examination, *, every_head: bool) -> str:
    depth = len(found.views[0].attention)
    options = "".join(f'<option value="{i}">{escape(view.name)}</option>' for i, view in enumerate(found.views))
    has_class = getattr(found.bundle.model.config, "pool", "") == "cls"
    back = '<button id="class" type="button">[CLS]</button>' if has_class else ""
    intro = say("attention")
    if not every_head:
        intro += say("means")
    first = found.views[0]
    return (
        f"<h2>Attention</h2>{intro}<div class=controls>"
        f'<label>picture <select id="which">{options}</select></label>'
        f'<label>layer <input id="layer" data-word="layer" type="range" min="0" max="{depth - 1}"></label>'
        '<label><input type="radio" name="way" value="from" checked> where it looks</label>'
        '<label><input type="radio" name="way" value="to"> who looks at it</label>'
        f'{back}<b id="asked"></b></div><div class="attention"><div id="stage" tabindex="0" role="application"'
        f' aria-label="patches of the picture"><img id="shown" src="{data_image(_rgb(first.pixels))}" alt="">'
        '<div id="mark" hidden></div></div><div id="heads"></div></div>' + _map_tiles(found)
    )


def _map_tiles(found: Examination) -> str:
    tiles = []
    for view in found.views:
        for name, values in view.maps.items():
            image = f'<img src="{data_image(_map_colours(values))}" alt="{escape(name)}">'
            tiles.append(figure(f"{name}: {view.name}", f"entropy {entropy(values):.2f}", image))
    return f'<h3>Whole-model maps</h3><div class="tiles">{"".join(tiles)}</div>'


def _maps_of(view: View, found: Examination, *, every_head: bool) -> dict[str, Any]:
    """What the script reads: one image for each layer."""
    model = found.bundle.model
    assert isinstance(model, ViT)
    c = model.config
    layers = []
    for weights in view.attention.values():
        names = [f"head {head + 1}" for head in range(len(weights))]
        if every_head:
            layers.append({"all": _packed(names, weights)})
        else:
            entry = {"all": _packed(["mean of heads"], weights.mean(axis=0, keepdims=True))}
            if c.pool == "cls":
                entry["first"] = _packed(names, weights[:, :1])
            layers.append(entry)
    return {
        "name": view.name, "source": data_image(_rgb(view.pixels)), "grid": list(c.grid), "tokens": c.tokens,
        "prefix": c.prefix, "layers": layers,
    }  # fmt: skip


def _packed(names: list[str], weights_HQT: np.ndarray) -> dict[str, Any]:
    """Attention as an 8-bit image of rows h*Q+q, each a share of its largest value."""
    heads, queries, tokens = weights_HQT.shape
    rows = weights_HQT.reshape(heads * queries, tokens)
    peaks = rows.max(axis=1)
    image = np.round(255 * rows / np.maximum(peaks, 1e-30)[:, None]).astype(np.uint8)
    return {
        "heads": names, "rows": queries, "image": data_image(image[..., None]),
        "peaks": [float(f"{peak:.3g}") for peak in peaks],
    }  # fmt: skip


def _distances(found: Examination) -> str:
    layers = sorted(found.heads)
    count = len(found.heads[layers[0]].distance)
    by_rank = np.stack([np.sort(found.heads[layer].of_uniform) for layer in layers])
    xs = [layer + 1 for layer in layers]
    lines = [
        Line(_rank(rank, count), xs, by_rank[:, rank].tolist(), rank) for rank in sorted({0, count // 2, count - 1})
    ]
    rows = [
        (
            layer + 1, f"{found.heads[layer].distance.min():.1f}", f"{found.heads[layer].distance.max():.1f}",
            f"{found.heads[layer].of_uniform.mean():.2f}", f"{found.heads[layer].entropy.mean():.2f}",
            f"{found.heads[layer].prefix_mass.mean():.2f}",
        )
        for layer in layers
    ]  # fmt: skip
    headers = (
        "layer",
        "nearest head, px",
        "farthest head, px",
        "mean, of uniform",
        "entropy",
        "to [CLS] and registers",
    )
    intro = say("distances")
    drawing = figure(
        "Mean attention distance by depth", "heads sorted in each layer", chart(lines, "layer", "of uniform", dots=True)
    )
    return f"<h2>How far heads look</h2>{intro}{drawing}{table(headers, rows, frozenset(range(6)))}"


def _rank(rank: int, count: int) -> str:
    return "nearest" if rank == 0 else "farthest" if rank == count - 1 else "middle"


def _positions(found: Examination, tiles: np.ndarray) -> str:
    known = found.structure
    assert known is not None
    pairs = [
        ("of the variance is row + column (by chance " + f"{known.additive_by_chance:.2f})", f"{known.additive:.2f}"),
        ("R2, the row told from a place left out", f"{known.row:.2f}"),
        ("R2, the column", f"{known.column:.2f}"),
    ]
    intro = say("table")
    image = f'<img class="wide" src="{data_image(tiles)}" alt="similarity of position embeddings">'
    return (
        f"<h2>Position embeddings</h2>{intro}{numbers(pairs)}{figure('Cosine similarity', 'dark -1, bright 1', image)}"
    )


def _filters(found: Examination, tiles: np.ndarray) -> str:
    assert found.filters is not None
    share = found.filters[1].sum()
    intro = say("filters")
    image = f'<img class="wide" src="{data_image(tiles)}" alt="principal components of the patch embedding">'
    note = f"{len(found.filters[0])} components, {share:.0%} of the variance"
    return f"<h2>Patch filters</h2>{intro}{figure('Principal components', note, image)}"


def _reach(found: Examination, figures: dict[str, np.ndarray]) -> str:
    tiles = []
    for layer, heard in found.reach.items():
        squares = areas(heard)
        words = ", ".join(f"{share:.0%} in {squares[share]:.0%}" for share in SHARES)
        image = f'<img src="{data_image(figures[f"reach-{layer + 1}"])}" alt="reach after layer {layer + 1}">'
        tiles.append(figure(f"after layer {layer + 1}", f"{words} of the picture", image))
    intro = say("reach")
    return f'<h2>Receptive field</h2>{intro}<div class="tiles">{"".join(tiles)}</div>'


def _evidence(found: Examination) -> str:
    parts = []
    for view in found.views:
        if view.evidence is None:
            continue
        worth = np.array(view.evidence["occlusion"])
        image = f'<img src="{data_image(_map_colours(np.maximum(worth, 0)))}" alt="occlusion">'
        rows = sorted(
            (
                (name, f"{one['deletion']:.3f}", f"{one['insertion']:.3f}")
                for name, one in view.evidence["faith"].items()
            ),
            key=lambda row: float(row[1]),
        )
        dropped = ", ".join(f"{row['share']:.0%} gone: {row['probability']:.2f}" for row in view.evidence["patch_drop"])
        parts.append(figure(f"Occlusion: {view.name}", dropped, image))
        parts.append(figure(
            f"Which map tells the truth? {view.name}", "deletion low and insertion high is good",
            table(("map", "deletion", "insertion"), rows, frozenset({1, 2})),
        ))  # fmt: skip
    intro = say("evidence")
    return f'<h2>Evidence</h2>{intro}<div class="panes">{"".join(parts)}</div>'


def _layers(found: Examination, figures: dict[str, np.ndarray]) -> str:
    rows = [
        (name.removeprefix("blocks."), f"{median:.3g}", f"{largest:.3g}", f"{share:.2%}")
        for name, (median, largest, share) in sorted(
            found.norms.items(), key=lambda row: int(row[0].rpartition(".")[2])
        )
    ]
    rows = [(int(layer) + 1, *rest) for layer, *rest in rows]
    parts = ["<h2>Layers</h2>"]
    if found.cka is not None:
        image = f'<img class="wide" src="{data_image(figures["cka"])}" alt="CKA of layers">'
        whom = "itself" if found.against is None else found.against
        note = "dark 0, bright 1; first layers at the bottom left"
        parts.append(figure(f"Similarity of layers (CKA) with {whom}", note, image))
    if rows:
        headers = ("layer", "median length of tokens", "longest", "outliers")
        parts.append(table(headers, rows, frozenset(range(4))))
    return "".join(parts) if len(parts) > 1 else ""


def _map_colours(values: np.ndarray) -> np.ndarray:
    return sequential(values / max(float(values.max()), 1e-12))


def _reach_colours(heard: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        colours = sequential(1 + np.log10(heard) / 4)
    colours[heard == 0] = 255
    return colours


def _enlarge(pixels: np.ndarray, factor: int) -> np.ndarray:
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def _rgb(pixels_HWC: np.ndarray) -> np.ndarray:
    return pixels_HWC if pixels_HWC.shape[2] == 3 else pixels_HWC[..., :1]
