"""`vitrail inspect`: an examination as one page that opens from disk, as figures one by one, and as numbers.

DIR/index.html      everything, for people; no network
DIR/figures/        the same pictures (PNG) and curves (SVG), one by one
DIR/inspect.json    every number of its tables, curves and maps
DIR/arrays.npz      if asked for: attention and all other arrays
"""

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from vitrail.evaluation.metrics import mean_interval
from vitrail.inspection.colours import heat, sequential, signed
from vitrail.inspection.examine import DRAWS, HELD, Examination, View
from vitrail.inspection.figures import draw_curves, draw_pictures, enlarge, rgb
from vitrail.inspection.walk import Panel
from vitrail.inspection.weights import Layout, entropy
from vitrail.inspection.words import say, word, words
from vitrail.pages.page import Html, data_image, escape, figure, numbers, page, stand_alone, table
from vitrail.storage import whole_folder, write_json

LIMIT = 6_000_000
"""Bytes of a page, above which it keeps less attention (unless all is asked for)."""

Detail = Literal["heads", "means", "reads"]
"""What follows the pointer: every head of every patch; head means of every patch; only what the head reads."""

# What a page keeps, if the choice before it is too large. The levels are those of attention: with 127, entropies are
# right to 0.01; with 63, to 0.02, at 20 % less to carry.
_CHOICES: tuple[tuple[Detail, int], ...] = (("heads", 127), ("heads", 63), ("means", 127), ("reads", 127))
_SCRIPTED = (  # words that the script needs, too
    "layer", "head", "from", "to", "on-patches", "largest", "uniform", "entropy-column", "row", "column",
)  # fmt: skip
_FAITH = ("deletion", "insertion")
_SEVERAL = 5  # pictures, of which an interval says something


def write_page(found: Examination, output: Path, *, full: bool = False, force: bool = False) -> dict[str, Any]:
    """Write the folder, whole or not at all; returns what `inspect.json` holds."""
    document = found.to_json()
    pictures, curves = dict(draw_pictures(found)), dict(draw_curves(found))
    sections, text = make_sections(found, pictures, curves), ""
    for detail, levels in _CHOICES:
        if full or _is_worth_trying(found, detail):
            text = make_page(found, sections, detail, levels)
            if full or len(text.encode()) <= LIMIT:
                break
    with whole_folder(output, force=force) as folder:
        (folder / "figures").mkdir()
        for name, pixels in pictures.items():
            Image.fromarray(enlarge(pixels)).save(folder / "figures" / f"{name}.png")
        for name, curve in curves.items():
            (folder / "figures" / f"{name}.svg").write_text(stand_alone(curve), encoding="utf-8")
        if full:
            np.savez_compressed(folder / "arrays.npz", **_arrays(found))
        (folder / "index.html").write_text(text, encoding="utf-8")
        write_json(folder / "inspect.json", document)
    return document


def _arrays(found: Examination) -> dict[str, Any]:
    """Everything that is an array, by the names of the figures."""
    arrays = {"positions": found.positions, "filters": None if found.filters is None else found.filters[0]}
    arrays |= {f"reach-{layer}": one.heard for layer, one in found.reach.items()}
    for number, view in enumerate(found.views):
        arrays |= {f"picture-{number}-{name.replace(' ', '-')}": values for name, values in view.maps.items()}
        arrays |= {f"picture-{number}-attention-{layer}": weights for layer, weights in view.attention.items()}
    return {name: array for name, array in arrays.items() if array is not None}


def make_sections(found: Examination, pictures: dict[str, np.ndarray], curves: dict[str, str]) -> tuple[str, str]:
    """What stands before and after the attention under the pointer, from the figures that were drawn."""
    before = [_summary(found), _walk(found, curves)]
    after = [
        _maps(found), _distances(found, curves), _positions(found, pictures), _filters(found, pictures),
        _reach(found, pictures), _evidence(found, curves), _layers(found, curves), _absent(found),
    ]  # fmt: skip
    return "\n".join(before), "\n".join(after)


def make_page(found: Examination, sections: tuple[str, str], detail: Detail, levels: int = 127) -> str:
    """The document; attention is carried in so many levels."""
    config, where = found.bundle.model.config, found.where
    data: dict[str, Any] = {
        "words": {language: {name: words()[name][language] for name in _SCRIPTED} for language in ("en", "ko")},
        "heads": found.shown_heads, "levels": levels,
        "ramp": sequential(np.linspace(0, 1, 256)).tolist(), "pictures": [],
    }  # fmt: skip
    if where is not None:
        data["grid"], data["prefix"], data["reads"] = where.grid, where.prefix, where.reads
        if where.allowed is not None:  # how many patches each one may look at, and is looked at by
            data["allowed"] = {"from": where.allowed.sum(axis=1).tolist(), "to": where.allowed.sum(axis=0).tolist()}
        data["pictures"] = [_packed_view(view, where, detail, levels) for view in found.views]
    # Inside a script, only this one character could end it.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    before, after = sections
    content = f"{before}{_attention(found, detail)}{after}"
    body = f'{_top(found, content)}{content}<script type="application/json" id="data">{embedded}</script>'
    # Each picture is in the page once, as the background of whatever shows it.
    style = "".join(
        f'.p{number} {{ background-image: url("{data_image(rgb(view.pixels), photo=True)}"); }}'
        for number, view in enumerate(found.views)
    )
    script = resources.files("vitrail.pages").joinpath("inspect.js").read_text(encoding="utf-8")
    title = word("inside", model=config.name or config.family)
    return page(title, word("parameters", bundle=found.name, count=f"{config.parameters:,}"), body, script, style=style)


def _is_worth_trying(found: Examination, detail: Detail) -> bool:
    """Whether the page may be small enough: packing all of a large model's attention only to see that takes minutes.
    A number of it takes most of a byte, and a tenth of one where almost all are zero."""
    count = sum(weights.size for view in found.views for weights in view.attention.values())
    return detail == "reads" or count / (1 if detail == "heads" else len(found.shown_heads)) <= 10 * LIMIT


def _section(name: str, *parts: str) -> str:
    return f'<section id="{name}"><h2>{word(f"head-{name}")}</h2>{"".join(parts)}</section>'


def _each(number: int, content: str) -> str:
    """A part that is shown while its picture is chosen."""
    return f'<div data-picture="{number}">{content}</div>'


def _photo(number: int, view: View, inside: str = "", *, attributes: str = 'class="photo" role="img"') -> Html:
    """The picture, with things laid over it."""
    height, width = view.pixels.shape[:2]
    return Html(
        f'<div style="aspect-ratio: {width} / {height}" aria-label="{escape(view.name)}" {attributes}>'
        f'<div class="under p{number}"></div>{inside}</div>'
    )


def _top(found: Examination, content: str) -> str:
    """The language, the way to each section, and what must be known before any of them."""
    links = " · ".join(
        f'<a href="#{name}">{word(f"head-{name}")}</a>' for name in re.findall(r'<section id="(\w+)">', content)
    )
    warning = "" if found.is_trained else f'<div class="warn">{say("untrained")}</div>'
    return f'<nav><button id="language" type="button">English / 한국어</button> {links}</nav>{warning}'


def _summary(found: Examination) -> str:
    parts = []
    if len(found.views) > 1:
        thumbs = "".join(
            f'<button type="button" class="thumb" data-choose="{number}">{_photo(number, view)}'
            f"<span>{escape(Path(view.name).name)}</span></button>"
            for number, view in enumerate(found.views)
        )
        parts.append(f'<div class="thumbs">{thumbs}</div>')
    for number, view in enumerate(found.views):
        rows = [(answer["label"], f"{answer['score']:.3f}") for answer in view.answers]
        why = next((reason for panel, reason in found.absent if panel == "answers"), "")
        headers = (word("answer"), word("probability"))
        answers = table(headers, rows, frozenset({1})) if rows else say(why, **found.fields)
        note = word("seen", size=" x ".join(map(str, view.pixels.shape[1::-1])))
        if view.pixels.shape[2] not in (1, 3):
            note = Html(note + word("channels", count=view.pixels.shape[2], shown=rgb(view.pixels).shape[2]))
        content = f'<div class="beside">{_photo(number, view)}<div>{answers}</div></div>'
        parts.append(_each(number, figure(view.name, note, content)))
    return _section("answers", *parts)


def _walk(found: Examination, curves: dict[str, str]) -> str:
    if not found.views[0].panels:
        return ""
    parts = []
    for number, view in enumerate(found.views):
        tiles = "".join(_station(number, view, panel, found) for panel in view.panels)
        path = f"picture-{number}-path"
        end = figure(word("path"), word("path-note"), curves[path]) if path in curves else ""
        parts.append(_each(number, f'<div class="tiles">{tiles}</div>{end}'))
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
        shown = f'<div class="patch p{number}" style="{zoom}"></div>'
    elif panel.colours is not None:
        images = [panel.colours] if panel.norms is None else [panel.colours, heat(panel.norms)]
        shown = "".join(f'<img src="{data_image(image)}" alt="{escape(panel.key)}">' for image in images)
        shown = f'<div class="side">{shown}</div>'
    shape = " x ".join(map(str, panel.shape))
    strip = ""
    if panel.vector.size:
        rest = ", ..." if panel.vector.size > len(panel.values) else ""
        low, high = panel.vector.min(), panel.vector.max()
        greys = (255 * (panel.vector - low) / max(high - low, 1e-12)).round().astype(np.uint8)
        values = ", ".join(f"{value:.3g}" for value in panel.values)
        strip = f'<img class="strip" src="{data_image(greys[None, :, None])}" alt=""><code>{values}{rest}</code>'
    sentence = say(panel.sentence or panel.key, **panel.words)
    return figure(panel.equation, shape, f"{shown}{sentence}{strip}")


def _attention(found: Examination, detail: Detail) -> str:
    if found.where is None:
        return ""
    intro = say("attention") + ("" if detail == "heads" else say(detail))
    overlay = '<canvas id="laid"></canvas><div id="mark" class="mark" hidden></div>'
    stage = _photo(
        0, found.views[0], overlay, attributes='id="stage" class="photo laid" tabindex="0" role="application"'
    )
    who = word(f"reads-{found.where.reads.strip('[]').lower()}")
    return _section(
        "attention", intro,
        '<form class="controls" autocomplete="off">',
        f'<label><input type="radio" name="way" value="from" checked> {word("from")}</label>',
        f'<label><input type="radio" name="way" value="to"> {word("to")}</label>',
        f'<button id="class" type="button">{who}</button></form>',
        f'<div class="attention"><div class="side-stage">{stage}<p id="asked" aria-live="polite"></p></div>',
        '<div class="scroll"><div id="heads"></div></div></div>',
    )  # fmt: skip


def _packed_view(view: View, where: Layout, detail: Detail, levels: int) -> dict[str, Any]:
    """What the script reads: 8-bit images of each layer's attention."""
    layers = []
    for layer, weights in view.attention.items():
        entry = {"layer": layer, "read": _packed(view.read(layer)[:, None], where.prefix, levels)}
        if detail == "heads":
            entry["all"] = _packed(weights, where.prefix, levels)
        elif detail == "means":
            entry["all"] = _packed(weights.mean(axis=0, keepdims=True), where.prefix, levels)
        layers.append(entry)
    return {"name": view.name, "layers": layers}


def _packed(weights_HQT: np.ndarray, prefix: int, levels: int) -> dict[str, Any]:
    """Attention as an 8-bit image of rows h*Q+q: square roots of shares of the row's largest value, in levels.

    The square root keeps what is small, of which there is much. [CLS] and registers, which often take most, have a
    largest value of their own, so that patches are not lost beside them.
    """
    heads, queries, tokens = weights_HQT.shape
    rows = weights_HQT.reshape(heads * queries, tokens)
    parts, peaks = [], []
    for part in (rows[:, :prefix], rows[:, prefix:]):
        largest = part.max(axis=1, initial=0)
        parts.append(np.round(levels * np.sqrt(part / np.maximum(largest, 1e-30)[:, None])).astype(np.uint8))
        peaks.append([float(f"{peak:.4g}") for peak in largest])
    image = data_image(np.concatenate(parts, axis=1)[..., None])
    return {"heads": heads, "rows": queries, "image": image, "peaks": peaks}


def _maps(found: Examination) -> str:
    if found.where is None:
        return ""
    parts = []
    for number, view in enumerate(found.views):
        tiles = "".join(
            figure(word(f"map-{name}"), _entropy(values), _laid(number, view, heat(values)))
            for name, values in view.maps.items()
        )
        parts.append(_each(number, f'<div class="tiles">{tiles}</div>'))
    return _section("maps", say("maps"), *parts)


def _entropy(values: np.ndarray) -> Html:
    found = entropy(values)
    return word("empty") if found is None else word("entropy", value=f"{found:.2f}")


def _laid(number: int, view: View, colours: np.ndarray) -> Html:
    """A map over its picture."""
    return _photo(
        number,
        view,
        f'<img class="heat" src="{data_image(colours)}" alt="">',
        attributes='class="photo laid" role="img"',
    )


def _distances(found: Examination, curves: dict[str, str]) -> str:
    if not found.heads:
        return ""
    rows = []
    for layer in sorted(found.heads):
        one = found.heads[layer]
        distance = one.distance.mean(axis=0)
        rows.append([
            layer, _spread(one.distance[:, distance.argmin()]), _spread(one.distance[:, distance.argmax()]),
            f"{one.of_uniform.mean():.2f}", f"{one.entropy.mean():.2f}", f"{one.prefix_mass.mean():.2f}",
        ])  # fmt: skip
    headers = [word(name) for name in ("layer", "nearest", "farthest", "of-uniform", "entropy-column", "mass")]
    if found.where is not None and not found.where.prefix:
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    drawings = figure(word("distance-title"), word("distance-note"), curves["distances"])
    if "prefix-mass" in curves:
        drawings = Html(drawings + figure(word("mass-title"), word("mass-note"), curves["prefix-mass"]))
    intro = say("distances", count=len(found.heads[0].distance))
    return _section(
        "distances", intro, f'<div class="panes">{drawings}</div>', table(headers, rows, frozenset(range(6)))
    )


def _spread(values: np.ndarray) -> str:
    """A mean over pictures, with its interval if there are several."""
    ends = mean_interval(values.tolist())
    return f"{values.mean():.1f}" if ends is None else f"{values.mean():.1f} ({ends[0]:.1f} .. {ends[1]:.1f})"


def _positions(found: Examination, pictures: dict[str, np.ndarray]) -> str:
    known = found.structure
    if known is None:
        return ""
    pairs = [
        (word("additive", chance=f"{known.additive_by_chance:.2f}"), f"{known.additive:.2f}"),
        (word("row-told"), f"{known.row:.2f}"),
        (word("column-told"), f"{known.column:.2f}"),
    ]
    config = found.bundle.model.config
    kind = getattr(config, "position", "learned-1d")
    intro = {"learned-1d": "table", "learned-2d": "table-built-in"}.get(kind, "table-fixed")
    every = say("table-first") if getattr(config, "placement", "once") == "every" else ""
    return _section(
        "positions", say(intro), every, numbers(pairs),
        figure(word("similarity"), word("similarity-note"), _image(pictures["positions"], "position embeddings")),
    )  # fmt: skip


def _image(pixels: np.ndarray, text: str) -> str:
    return f'<img class="wide" src="{data_image(pixels)}" alt="{escape(text)}">'


def _filters(found: Examination, pictures: dict[str, np.ndarray]) -> str:
    if found.filters is None:
        return ""
    note = word("components-note", count=len(found.filters[0]), share=f"{found.filters[1].sum():.0%}")
    channels = found.filters[0].shape[3]
    if channels not in (1, 3):
        note = Html(note + word("channels", count=channels, shown=3 if channels > 3 else 1))
    return _section(
        "filters", say("filters"), figure(word("components"), note, _image(pictures["filters"], "patch embedding"))
    )


def _reach(found: Examination, pictures: dict[str, np.ndarray]) -> str:
    tiles = []
    for layer, one in found.reach.items():
        held = one.areas(HELD).items()
        note = Html("; ".join(word("square", share=f"{share:.0%}", area=f"{area:.1%}") for share, area in held))
        tiles.append(figure(word("after", layer=layer), note, _image(pictures[f"reach-{layer}"], f"reach {layer}")))
    intro = "reach-all" if found.bundle.model.config.family == "mlp" else "reach"
    return _section("reach", say(intro), f'<div class="tiles">{"".join(tiles)}</div>') if tiles else ""


def _evidence(found: Examination, curves: dict[str, str]) -> str:
    parts = []
    for number, view in enumerate(found.views):
        if view.evidence is None:
            continue
        worth = np.array(view.evidence["occlusion"])
        chance = view.evidence["faith"]["random"]["deviation"]
        rows = [
            (word(f"map-{name}"), *(f"{one[key]:.2f}" for key in _FAITH))
            for name, one in sorted(view.evidence["faith"].items(), key=lambda row: row[1]["deletion"])
        ]
        note = word("occlusion-note", most=f"{max(worth.max(), 0):.2g}", least=f"{max(-worth.min(), 0):.2g}")
        panes = (
            figure(word("map-occlusion"), note, _laid(number, view, signed(worth)))
            + figure(
                word("truth"), word("truth-note", draws=DRAWS, deviation=f"{chance:.2f}"),
                table([word(name) for name in ("map", *_FAITH)], rows, frozenset({1, 2})),
            )
            + figure(word("dropped"), word("dropped-note", draws=DRAWS), curves[f"picture-{number}-dropped"])
        )  # fmt: skip
        parts.append(_each(number, f'<div class="panes">{panes}</div>'))
    return _section("evidence", say("evidence"), *parts, _faith(found)) if parts else ""


def _faith(found: Examination) -> str:
    """All pictures together, which say more than one."""
    means = found.faith()
    if means is None or len(found.views) < _SEVERAL:
        return ""

    def cell(one: dict[str, Any]) -> str:
        low, high = np.clip(one["interval"], 0, 1)
        return f"{one['mean']:.2f} ({low:.2f} .. {high:.2f})"

    rows = [
        (word(f"map-{name}"), *(cell(one[key]) for key in _FAITH))
        for name, one in sorted(means.items(), key=lambda row: row[1]["deletion"]["mean"])
    ]
    headers = [word(name) for name in ("map", *_FAITH)]
    note = word("truth-all-note", count=len(found.views))
    return figure(word("truth-all"), note, table(headers, rows, frozenset({1, 2})))


def _layers(found: Examination, curves: dict[str, str]) -> str:
    parts: list[str] = []
    if (compared := found.comparison) is not None:
        title = word("cka") if compared.against is None else word("cka-against", whom=compared.against)
        parts.append(figure(title, word("cka-note", count=compared.pictures), curves["cka"]))
    if found.norms:
        rows = [
            (layer, f"{median:.3g}", f"{largest:.3g}", f"{share:.2%}")
            for layer, (median, largest, share) in sorted(found.norms.items())
        ]
        headers = [word(name) for name in ("layer", "median-length", "longest", "outliers")]
        parts += [say("lengths"), table(headers, rows, frozenset(range(4)))]
    return _section("layers", *parts) if parts else ""


def _absent(found: Examination) -> str:
    if not found.absent:
        return ""
    rows = [(word(f"head-{panel}"), word(why, **found.fields)) for panel, why in found.absent if panel != "answers"]
    return _section("absent", table((word("panel"), word("why")), rows)) if rows else ""
