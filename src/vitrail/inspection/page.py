"""`vitrail inspect`: an examination as one page that opens from disk, as figures one by one, and as numbers.

DIR/index.html      everything, for people; no network
DIR/figures/        the same pictures (PNG) and curves (SVG), one by one
DIR/inspect.json    every number
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from vitrail.inspection.colours import heat
from vitrail.inspection.examine import SHARES, Examination, View, areas
from vitrail.inspection.figures import draw_curves, draw_pictures, rgb
from vitrail.inspection.walk import Panel
from vitrail.inspection.weights import Layout, entropy
from vitrail.inspection.words import say, word, words
from vitrail.pages.page import Html, data_image, escape, figure, numbers, page, stand_alone, table
from vitrail.storage import whole_folder, write_json

LIMIT = 6_000_000
"""Bytes of a page, above which it keeps less attention (unless all is asked for)."""

Detail = Literal["heads", "means", "reads"]
"""What follows the pointer: every head of every patch; head means of every patch; only what the head reads."""

_LEVELS = 127  # of attention: 17 % less to carry than with 255, and entropies are right to 0.01
_SCRIPTED = ("layer", "head", "from", "to", "on-patches")  # words that the script needs, too


def write_page(found: Examination, output: Path, *, full: bool = False, force: bool = False) -> dict[str, Any]:
    """Write the folder, whole or not at all; returns what `inspect.json` holds."""
    document = found.to_json()
    pictures, curves = dict(draw_pictures(found)), dict(draw_curves(found))
    text = ""
    for detail in get_args(Detail):
        text = make_page(found, pictures, curves, detail)
        if full or len(text.encode()) <= LIMIT:
            break
    with whole_folder(output, force=force) as folder:
        (folder / "figures").mkdir()
        for name, pixels in pictures.items():
            Image.fromarray(pixels).save(folder / "figures" / f"{name}.png")
        for name, curve in curves.items():
            (folder / "figures" / f"{name}.svg").write_text(stand_alone(curve), encoding="utf-8")
        (folder / "index.html").write_text(text, encoding="utf-8")
        write_json(folder / "inspect.json", document)
    return document


def make_page(found: Examination, pictures: dict[str, np.ndarray], curves: dict[str, str], detail: Detail) -> str:
    """The document, from the figures that `draw_pictures` and `draw_curves` drew."""
    config = found.bundle.model.config
    sections = [
        _summary(found), _walk(found, curves), _attention(found, detail), _maps(found), _distances(found, curves),
        _positions(found, pictures), _filters(found, pictures), _reach(found, pictures), _evidence(found, curves),
        _layers(found, pictures), _absent(found),
    ]  # fmt: skip
    data = {
        "words": {language: {name: words()[name][language] for name in _SCRIPTED} for language in ("en", "ko")},
        "heads": found.shown_heads,
        "levels": _LEVELS,
        "pictures": [_packed_view(view, found.where, detail) for view in found.views] if found.where else [],
    }
    # Inside a script, only this one character could end it.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    body = "\n".join(sections) + f'<script type="application/json" id="data">{embedded}</script>'
    # Each picture is in the page once, as the background of whatever shows it.
    style = "".join(
        f'.p{number} {{ background-image: url("{data_image(rgb(view.pixels))}"); }}'
        for number, view in enumerate(found.views)
    )
    script = resources.files("vitrail.pages").joinpath("inspect.js").read_text(encoding="utf-8")
    title = f"Inside {config.name or config.family}"
    return page(title, f"{found.name}: {config.parameters:,} parameters", body, script, style=style)


def _section(name: str, *parts: str) -> str:
    return f'<section id="{name}"><h2>{word(f"head-{name}")}</h2>{"".join(parts)}</section>'


def _each(number: int, content: str) -> str:
    """A part that is shown while its picture is chosen."""
    return f'<div data-picture="{number}">{content}</div>'


def _photo(number: int, view: View, inside: str = "", kind: str = "") -> Html:
    """The picture, with things laid over it."""
    height, width = view.pixels.shape[:2]
    label = escape(view.name)
    return Html(
        f'<div class="photo p{number} {kind}" style="aspect-ratio: {width} / {height}" role="img"'
        f' aria-label="{label}">{inside}</div>'
    )


def _summary(found: Examination) -> str:
    parts = ['<p><button id="language" type="button">English / 한국어</button></p>']
    if not found.is_trained:
        parts.append(f'<div class="warn">{say("untrained")}</div>')
    if len(found.views) > 1:
        thumbs = "".join(
            f'<button type="button" class="thumb" data-choose="{number}">{_photo(number, view)}'
            f"<span>{escape(Path(view.name).name)}</span></button>"
            for number, view in enumerate(found.views)
        )
        parts.append(f'<div class="thumbs">{thumbs}</div>')
    for number, view in enumerate(found.views):
        rows = [(answer["label"], f"{answer['score']:.3f}") for answer in view.answers]
        answers = table((word("answer"), word("share")), rows, frozenset({1})) if rows else say("no-classes")
        size = " x ".join(map(str, view.pixels.shape[1::-1]))
        content = f'<div class="beside">{_photo(number, view)}<div>{answers}</div></div>'
        parts.append(_each(number, figure(view.name, word("seen", size=size), content)))
    return _section("answers", *parts)


def _walk(found: Examination, curves: dict[str, str]) -> str:
    if not found.views[0].panels:
        return ""
    parts = []
    for number, view in enumerate(found.views):
        tiles = "".join(_station(number, view, panel, found) for panel in view.panels)
        path = figure(word("path"), word("path-note"), curves[f"picture-{number}-path"])
        parts.append(_each(number, f'<div class="tiles">{tiles}</div>{path}'))
    return _section("walk", say("walk"), *parts)


def _station(number: int, view: View, panel: Panel, found: Examination) -> Html:
    assert found.where is not None
    rows, columns = found.where.grid
    row, column = divmod(view.followed, columns)
    shown = ""
    if panel.key == "picture":
        place = (
            f"left: {100 * column / columns:.3f}%; top: {100 * row / rows:.3f}%;"
            f" width: {100 / columns:.3f}%; height: {100 / rows:.3f}%"
        )
        lines = f"background-size: {100 / columns:.4f}% {100 / rows:.4f}%"
        shown = _photo(
            number, view, f'<div class="lines" style="{lines}"></div><div class="mark" style="{place}"></div>'
        )
    elif panel.key == "patches":
        zoom = (
            f"background-size: {100 * columns}% {100 * rows}%; background-position:"
            f" {100 * column / max(columns - 1, 1):.3f}% {100 * row / max(rows - 1, 1):.3f}%"
        )
        shown = f'<div class="photo patch p{number}" style="{zoom}"></div>'
    elif panel.colours is not None:
        images = [panel.colours] if panel.norms is None else [panel.colours, heat(panel.norms)]
        shown = "".join(f'<img src="{data_image(image)}" alt="{escape(panel.key)}">' for image in images)
        shown = f'<div class="side">{shown}</div>'
    shape = " x ".join(map(str, panel.shape))
    strip = ""
    if panel.vector.size:
        low, high = panel.vector.min(), panel.vector.max()
        greys = (255 * (panel.vector - low) / max(high - low, 1e-12)).round().astype(np.uint8)
        values = ", ".join(f"{value:.3g}" for value in panel.values)
        strip = f'<img class="strip" src="{data_image(greys[None, :, None])}" alt=""><code>{values}, ...</code>'
    sentence = say(panel.sentence or panel.key, **panel.words)
    return figure(panel.equation, shape, f"{shown}{sentence}{strip}")


def _attention(found: Examination, detail: Detail) -> str:
    if found.where is None:
        return ""
    intro = say("attention") + ("" if detail == "heads" else say(detail))
    view = found.views[0]
    who = "[CLS]" if found.where.has_class else "mean"
    stage = _photo(0, view, '<canvas id="laid"></canvas><div id="mark" class="mark" hidden></div>', "stage")
    stage = stage.replace("<div ", '<div id="stage" tabindex="0" ', 1)
    return _section(
        "attention", intro,
        '<div class="controls">',
        f'<label><input type="radio" name="way" value="from" checked> {word("from")}</label>',
        f'<label><input type="radio" name="way" value="to"> {word("to")}</label>',
        f'<button id="class" type="button">{who}</button></div>',
        f'<div class="attention"><div class="side-stage">{stage}<p id="asked" aria-live="polite"></p></div>',
        '<div class="scroll"><div id="heads"></div></div></div>',
    )  # fmt: skip


def _packed_view(view: View, where: Layout, detail: Detail) -> dict[str, Any]:
    """What the script reads: 8-bit images of each layer's attention."""
    layers = []
    for layer, weights in view.attention.items():
        read = weights[:, :1] if where.has_class else weights[:, where.prefix :].mean(axis=1, keepdims=True)
        entry = {"layer": layer, "read": _packed(read, where.prefix)}
        if detail == "heads":
            entry["all"] = _packed(weights, where.prefix)
        elif detail == "means":
            entry["all"] = _packed(weights.mean(axis=0, keepdims=True), where.prefix)
        layers.append(entry)
    return {"grid": where.grid, "prefix": where.prefix, "hasClass": where.has_class, "layers": layers}


def _packed(weights_HQT: np.ndarray, prefix: int) -> dict[str, Any]:
    """Attention as an 8-bit image of rows h*Q+q: square roots of shares of the row's largest value, in levels.

    The square root keeps what is small, of which there is much. [CLS] and registers, which often take most, have a
    largest value of their own, so that patches are not lost beside them.
    """
    heads, queries, tokens = weights_HQT.shape
    rows = weights_HQT.reshape(heads * queries, tokens)
    parts, peaks = [], []
    for part in (rows[:, :prefix], rows[:, prefix:]):
        largest = part.max(axis=1, initial=0)
        parts.append(np.round(_LEVELS * np.sqrt(part / np.maximum(largest, 1e-30)[:, None])).astype(np.uint8))
        peaks.append([float(f"{peak:.3g}") for peak in largest])
    image = data_image(np.concatenate(parts, axis=1)[..., None])
    return {"heads": heads, "rows": queries, "image": image, "peaks": peaks}


def _maps(found: Examination) -> str:
    if found.where is None:
        return ""
    parts = []
    for number, view in enumerate(found.views):
        tiles = "".join(
            figure(name, word("entropy", value=f"{entropy(values):.2f}"), _laid(number, view, values))
            for name, values in view.maps.items()
        )
        parts.append(_each(number, f'<div class="tiles">{tiles}</div>'))
    return _section("maps", say("maps"), *parts)


def _laid(number: int, view: View, values: np.ndarray) -> Html:
    """A map over its picture."""
    return _photo(number, view, f'<img class="heat" src="{data_image(heat(values))}" alt="">')


def _distances(found: Examination, curves: dict[str, str]) -> str:
    if not found.heads:
        return ""
    rows = []
    for layer in sorted(found.heads):
        one = found.heads[layer]
        distance = one.distance.mean(axis=0)
        rows.append((
            layer, f"{distance.min():.1f}", f"{distance.max():.1f}", f"{one.of_uniform.mean():.2f}",
            f"{one.entropy.mean():.2f}", f"{one.prefix_mass.mean():.2f}",
        ))  # fmt: skip
    headers = [word(name) for name in ("layer", "nearest", "farthest", "of-uniform", "entropy-column", "mass")]
    drawings = figure(word("distance-title"), word("distance-note"), curves["distances"])
    if "prefix-mass" in curves:
        drawings = Html(drawings + figure(word("mass-title"), word("mass-note"), curves["prefix-mass"]))
    intro = say("distances", count=len(found.heads[0].distance))
    return _section(
        "distances", intro, f'<div class="panes">{drawings}</div>', table(headers, rows, frozenset(range(6)))
    )


def _positions(found: Examination, pictures: dict[str, np.ndarray]) -> str:
    known = found.structure
    if known is None:
        return ""
    pairs = [
        (word("additive", chance=f"{known.additive_by_chance:.2f}"), f"{known.additive:.2f}"),
        (word("row-told"), f"{known.row:.2f}"),
        (word("column-told"), f"{known.column:.2f}"),
    ]
    is_fixed = found.bundle.model.config.position.startswith("sincos")
    return _section(
        "positions", say("table-fixed" if is_fixed else "table"), numbers(pairs),
        figure(word("similarity"), word("similarity-note"), _image(pictures["positions"], "position embeddings")),
    )  # fmt: skip


def _image(pixels: np.ndarray, text: str) -> str:
    return f'<img class="wide" src="{data_image(pixels)}" alt="{escape(text)}">'


def _filters(found: Examination, pictures: dict[str, np.ndarray]) -> str:
    if found.filters is None:
        return ""
    note = word("components-note", count=len(found.filters[0]), share=f"{found.filters[1].sum():.0%}")
    return _section(
        "filters", say("filters"), figure(word("components"), note, _image(pictures["filters"], "patch embedding"))
    )


def _reach(found: Examination, pictures: dict[str, np.ndarray]) -> str:
    tiles = []
    for layer, heard in found.reach.items():
        squares = areas(heard)
        note = word("squares", squares=", ".join(f"{share:.0%}: {squares[share]:.0%}" for share in SHARES))
        tiles.append(figure(word("after", layer=layer), note, _image(pictures[f"reach-{layer}"], f"reach {layer}")))
    return _section("reach", say("reach"), f'<div class="tiles">{"".join(tiles)}</div>') if tiles else ""


def _evidence(found: Examination, curves: dict[str, str]) -> str:
    parts = []
    for number, view in enumerate(found.views):
        if view.evidence is None:
            continue
        worth = np.array(view.evidence["occlusion"])
        faith = sorted(view.evidence["faith"].items(), key=lambda row: row[1]["deletion"] - row[1]["insertion"])
        rows = [(name, f"{one['deletion']:.3f}", f"{one['insertion']:.3f}") for name, one in faith]
        headers = [word(name) for name in ("map", "deletion", "insertion")]
        note = word("occlusion-note", most=f"{worth.max():.2f}")
        panes = (
            figure(word("occlusion"), note, _laid(number, view, np.maximum(worth, 0)))
            + figure(word("truth"), word("truth-note"), table(headers, rows, frozenset({1, 2})))
            + figure(word("dropped"), word("dropped-note"), curves[f"picture-{number}-dropped"])
        )
        parts.append(_each(number, f'<div class="panes">{panes}</div>'))
    return _section("evidence", say("evidence"), *parts) if parts else ""


def _layers(found: Examination, pictures: dict[str, np.ndarray]) -> str:
    parts: list[str] = []
    if found.cka is not None:
        title = word("cka") if found.against is None else word("cka-against", whom=found.against)
        parts.append(figure(title, word("cka-note", count=found.compared), _image(pictures["cka"], "CKA of layers")))
    if found.norms:
        rows = [
            (int(name.rpartition(".")[2]), f"{median:.3g}", f"{largest:.3g}", f"{share:.2%}")
            for name, (median, largest, share) in found.norms.items()
        ]
        headers = [word(name) for name in ("layer", "median-length", "longest", "outliers")]
        parts += [say("lengths"), table(headers, sorted(rows), frozenset(range(4)))]
    return _section("layers", *parts) if parts else ""


def _absent(found: Examination) -> str:
    if not found.absent:
        return ""
    fields = found.fields
    rows = [(word(f"head-{'layers' if panel == 'cka' else panel}"), word(why, **fields)) for panel, why in found.absent]
    return _section("absent", table((word("panel"), word("why")), rows))
