"""`vitrail explain`: a page that runs a small ViT and shows every step of it, with its weights inside.

DIR/index.html      the page; opens from disk, fetches nothing
"""

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.bundles.bundle import Bundle
from vitrail.core.errors import UsageError
from vitrail.core.files import atomic_folder
from vitrail.core.html import Html, escape
from vitrail.data.dataset import Split
from vitrail.data.preprocess import ImageLike
from vitrail.data.sources.registry import open_data
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig
from vitrail.reports.equations import typeset
from vitrail.reports.messages import LANGUAGE_BUTTON, LANGUAGES, speak_from, words_beside
from vitrail.reports.page import in_language, page

MOST_IMAGES = 40
EMBEDDED = ("fashion-40", "digits")
"""Data sets of the package that the page shows where no image is given, if they fit."""

_HERE = Path(__file__)
_SCRIPTS = (
    _HERE.parents[1] / "forward.js",
    *(_HERE.with_name(f"{name}.js") for name in ("preprocess", "drawing", "walk", "stations")),
)
WORDS = words_beside(str(_HERE.with_name("words.py")))
TOLD = words_beside(str(_HERE.with_name("stations.py")))
word = speak_from(WORDS)


class Shown(NamedTuple):
    """An image of the page: uint8 pixels (H, W, C) as the model gets them, its name, and its class if that is known."""

    pixels: np.ndarray
    name: str
    truth: str | None = None


class Station(NamedTuple):
    """A step of the walk: its equation, as `reports.equations` reads it, and the shape of its result."""

    name: str
    equation: str
    shape: str


PARTS = {
    "part-embed": (
        Station("image", "x in R^(H x W x C)", "{high} x {wide} x {channels}"),
        Station("patches", "N = H W / P^2", "{count} x {tall} x {broad} x {channels}"),
        Station("flatten", "x_p in R^(N x (P^2 C))", "{count} x {flat}"),
        Station("project", "x_p^i E + b,  E in R^((P^2 C) x D)", "{count} x {width}"),
        Station("cls", "[{first}x_p^1 E; x_p^2 E; ...; x_p^N E]", "{tokens} x {width}"),
        Station("positions", "z_0 = [...]{added}", "{tokens} x {width}"),
    ),
    "part-layer": (
        Station("norm", "LN(z) = (z - mu) / sqrt(sigma^2 + epsilon) * gamma + beta", "{tokens} x {width}"),
        Station("qkv", "[q, k, v] = LN(z_l) U_qkv", "3 x {heads} x {tokens} x {narrow}"),
        Station("scores", "s_(i j) = q_i k_j^T / sqrt(D_h)", "{heads} x {tokens} x {tokens}"),
        Station("softmax", "A_(i j) = exp(s_(i j)) / (sum_m exp(s_(i m)))", "{heads} x {tokens} x {tokens}"),
        Station("mix", "SA_i = sum_j A_(i j) v_j", "{heads} x {tokens} x {narrow}"),
        Station("heads", "MSA = [SA^1; ...; SA^k] U_msa", "{tokens} x {width}"),
        Station("attended", "z' = MSA(LN(z_l)) + z_l", "{tokens} x {width}"),
        Station("mlp", "z1 = LN(z') W_1 + b_1,  z2 = GELU(z1) W_2 + b_2", "{tokens} x {hidden} → {tokens} x {width}"),
        Station("added", "z_(l+1) = MLP(LN(z')) + z'", "{tokens} x {width}"),
    ),
    "part-answer": (
        Station("layers", "z_0 → z_1 → ... → z_L", "{depth} x {tokens} x {width}"),
        Station("lens", "softmax({mean}LN({state_l}) W + b)", "{after} x {classes}"),
        Station("read", "y = {mean}LN({state})", "{width}"),
        Station("logits", "logit_c = {hidden_y} W_c + b_c", "{classes}"),
        Station("answer", "p_c = exp(logit_c) / (sum_m exp(logit_m))", "{classes}"),
    ),
}
STATIONS = tuple(station for part in PARTS.values() for station in part)


def explain(
    bundle: Bundle, images: Iterable[ImageLike] = (), output: str | Path = "explain", *, force: bool = False
) -> Path:
    """Write the page of a bundle and these images, by default embedded ones that fit it, to a folder; returns its path.

    A model that `forward.js` cannot run is refused.
    """
    check_explains(bundle)
    chosen = [images] if isinstance(images, str | Path) else list(images)
    shown = _read(bundle, chosen) if chosen else embedded_images(bundle)
    text = make_page(bundle, shown)
    with atomic_folder(Path(output), force=force) as folder:
        (folder / "index.html").write_text(text, encoding="utf-8")
    return Path(output) / "index.html"


def check_explains(bundle: Bundle) -> None:
    """Refuse a model that cannot run in a page, or that does not answer with one class."""
    bundle.model.config.check_in_page()
    bundle.parts.check_one_class("Explain")


def _read(bundle: Bundle, images: Sequence[ImageLike]) -> list[Shown]:
    if len(images) > MOST_IMAGES:
        raise UsageError(f"Images must be at most {MOST_IMAGES}, got {len(images)}. Choose some of them.")
    named = [Path(one).name if isinstance(one, str | Path) else f"image {n}" for n, one in enumerate(images)]
    return [Shown(bundle.preprocess.crop(one), name) for one, name in zip(images, named, strict=True)]


def embedded_images(bundle: Bundle) -> list[Shown]:
    """Up to forty images that ship with the package, of the model's size, channels and classes."""
    for name in EMBEDDED:
        data = open_data(name)
        split: Split = data.splits["test"].spread(MOST_IMAGES)
        pixels = np.asarray(split.in_memory)
        if bundle.preprocess.keeps(*pixels.shape[1:]) and set(data.labels) == set(bundle.labels or ()):
            truths = [data.labels[label] for label in split.labels]
            return [Shown(one, truth, truth) for one, truth in zip(pixels, truths, strict=True)]
    raise UsageError(
        "IMAGE must be given: the embedded images, of clothes and of digits, are not of this bundle's size and classes."
    )


def page_config(config: ModelConfig) -> dict[str, Any]:
    """The settings that `forward.js` reads."""
    return {**config.to_document(), "grid": config.grid, "prefix": config.prefix, "tokens": config.tokens}


def pack_tensors(model: AnyModel) -> dict[str, np.ndarray]:
    """The tensors that `forward.js` reads, float32, by name."""
    return {
        name: np.ascontiguousarray(tensor.detach().cpu().float().numpy())
        for name, tensor in model.page_tensors().items()
    }


def make_page(bundle: Bundle, shown: Sequence[Shown]) -> str:
    """The document."""
    config = bundle.model.config
    fields, kinds = _numbers(config), _kinds(bundle.model)
    title = word("heading", model=config.name or config.family)
    tensors = pack_tensors(bundle.model)
    data = {
        "config": page_config(config),
        "rules": bundle.preprocess.to_json(),
        "labels": bundle.labels or [f"class {number}" for number in range(config.classes)],
        "stations": [station.name for station in STATIONS],
        "tensors": [[name, tensor.size] for name, tensor in tensors.items()],
        "images": [{"pixels": _text(one.pixels.tobytes()), "name": one.name, "truth": one.truth} for one in shown],
        "start": {"patch": (patch := _first_patch(config, shown[0].pixels)), "key": config.prefix + max(patch - 1, 0)},
        "title": {language: in_language(title, language) for language in LANGUAGES},
        "words": WORDS,
    }
    weights = _text(b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values()))
    warning = "" if bundle.is_trained else f'<div class="warn">{word("untrained", "p")}</div>'
    numbers = iter(range(1, len(STATIONS) + 1))
    parts = "".join(
        f"<h2>{word(part)}</h2>" + "".join(_station(one, next(numbers), fields, kinds) for one in stations)
        for part, stations in PARTS.items()
    )
    body = (
        f'<noscript><div class="warn">{word("no-script", "p")}</div></noscript>{warning}'
        f"{_symbols()}"
        '<div id="told" hidden><p id="told-words" role="status"></p>'
        f'<button type="button" id="told-close">{word("close")}</button></div>'
        f'<div class="walk">{_pane()}<div>{parts}</div></div>'
        # Inside a script element, only this one character could end it.
        f'<script type="application/json" id="data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>'
        f'<script type="text/plain" id="weights">{weights}</script>'
    )
    subtitle = Html(f"{word('intro', parameters=f'{config.parameters:,}')} {word('keys')} {LANGUAGE_BUTTON}")
    script = "\n".join(path.read_text(encoding="utf-8") for path in _SCRIPTS) + "begin();\n"
    return page(title, subtitle, body, script, style=_HERE.with_name("walk.css").read_text(encoding="utf-8"))


def _symbols() -> str:
    """What the letters of the equations stand for."""
    named = {"x": "x", "p": "x_p", "e": "E, b", "z": "z_l", "u": "U_qkv, U_msa, D_h", "w": "W, b"}
    rows = "".join(f"<dt>{typeset(symbol)}</dt><dd>{word(f'symbol-{name}')}</dd>" for name, symbol in named.items())
    return f'<details class="legend"><summary>{word("symbols")}</summary><dl>{rows}</dl></details>'


def _station(station: Station, number: int, fields: dict[str, Any], kinds: dict[str, str]) -> str:
    name = station.name

    def told(part: str, tag: str = "span") -> Html:
        key = f"{name}-{part}"
        return speak_from(TOLD)(f"{key}.{kinds[key]}" if key in kinds else key, tag, **fields)

    equation = typeset(station.equation.format(**kinds))
    shape = station.shape.format(**fields).replace(" x ", " &times; ")
    return (
        f'<section class="station" id="s-{name}" tabindex="-1" aria-labelledby="{name}-title">'
        f'<h3 id="{name}-title"><span class="stop">{number}</span> {told("title")}</h3>{told("says", "p")}'
        f'<div class="formula">{equation}<div class="live" id="{name}-live"></div>'
        f'<p class="shape">{word("shape")} <b>{shape}</b></p></div>'
        f'<div class="show" id="{name}-show"></div><div class="control" id="{name}-control"></div>'
        f"<details><summary>{told('asks')}</summary>{told('answer', 'p')}</details></section>"
    )


def _pane() -> str:
    """What stays in sight: the image, the answer, what is changed, and the way through the stations."""
    titles = {station.name: TOLD[f"{station.name}-title"] for station in STATIONS}
    options = "".join(
        f'<option value="{name}" data-en="{number}. {escape(title["en"])}" data-ko="{number}. {escape(title["ko"])}">'
        f"{number}. {escape(title['en'])}</option>"
        for number, (name, title) in enumerate(titles.items(), 1)
    )

    def button(name: str, words: str, sign: str) -> str:
        return f'<button type="button" id="{name}"><span aria-hidden="true">{sign}</span> {word(words)}</button>'

    return (
        f'<aside class="pane" aria-labelledby="pane-title"><h2 id="pane-title" class="unseen">{word("window")}</h2>'
        '<div id="pane-image"></div><div class="says-now">'
        f'<p class="headline"><span class="quiet">{word("answer-now")}</span> <b id="best"></b>'
        ' <span id="best-share"></span></p><p class="was quiet" id="was"></p><ol class="bars" id="bars"></ol></div>'
        '<p class="truth quiet" id="truth"></p><p class="truth quiet" id="in-hand"></p>'
        '<ul class="changes" id="changes"></ul>'
        f'<button type="button" id="undo" hidden>{word("undo-all")} <span id="undo-count"></span></button>'
        f'<div class="way">{button("back", "previous", "&lsaquo;")}<label><span class="unseen">{word("station")}</span>'
        f'<select id="where">{options}</select></label>{button("forth", "next", "&rsaquo;")}</div></aside>'
    )


def _numbers(config: ModelConfig) -> dict[str, Any]:
    """The numbers that sentences and shapes name."""
    settings = page_config(config)
    (high, wide), (rows, columns), (tall, broad) = settings["resolution"], settings["grid"], settings["patch"]
    count, pixels = rows * columns, high * wide
    plain = {name: settings[name] for name in ("channels", "width", "heads", "depth", "classes", "tokens", "prefix")}
    return plain | {
        "high": high, "wide": wide, "rows": rows, "columns": columns, "tall": tall, "broad": broad, "count": count,
        "flat": settings["channels"] * tall * broad, "hidden": settings["mlp"], "after": settings["depth"] + 1,
        "narrow": settings["width"] // settings["heads"], "pixels": f"{pixels:,}",
        "pixel_pairs": f"{pixels**2:,}", "patch_pairs": f"{count**2:,}",
    }  # fmt: skip


def _kinds(model: AnyModel) -> dict[str, str]:
    """Which of several sentences or symbols belongs to this model."""
    settings = page_config(model.config)
    reads, hides = settings["pool"], settings["representation"] != "none"
    origin = "none" if model.position_table() is None else "fixed" if model.position_origin == "fixed" else "learned"
    of_class = {"state_l": "z_l^0", "state": "z_L^0", "mean": ""}
    of_mean = {"state_l": "z_l", "state": "z_L^n", "mean": "mean_n "}
    return (of_class if reads == "cls" else of_mean) | {
        "image-says": "grey" if settings["channels"] == 1 else "colour",
        "cls-says": reads,
        "cls-answer": reads,
        "read-says": reads,
        "read-answer": reads,
        "positions-says": origin,
        "logits-says": "hidden" if hides else "none",
        "logits-answer": "hidden" if hides else "none",
        "added": "" if origin == "none" else " + E_pos",
        "first": "x_class; " if reads == "cls" else "",
        "hidden_y": f"{settings['representation']}(y W_0 + b_0)" if hides else "y",
    }


def _first_patch(config: ModelConfig, pixels: np.ndarray) -> int:
    """The patch with most to see: that of the largest deviation."""
    settings = page_config(config)
    (rows, columns), (tall, broad) = settings["grid"], settings["patch"]
    cells = pixels.reshape(rows, tall, columns, broad, -1).astype(np.float64)
    return int(cells.std(axis=(1, 3)).mean(axis=-1).argmax())


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
