"""`vitrail explain`: a page that runs a small ViT and shows every step of it, with its weights inside.

DIR/index.html      the page; opens from disk, fetches nothing
"""

import base64
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.bundles.bundle import Bundle
from vitrail.core.errors import UsageError
from vitrail.core.files import atomic_folder
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.data.dataset import Split
from vitrail.data.preprocess import ImageLike
from vitrail.data.sources.registry import open_data
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig
from vitrail.models.walkthrough import ExplainStep, Explanation, Messages, walkthrough_of
from vitrail.reports.equations import typeset
from vitrail.reports.page_kit import LANGUAGE_BUTTON, page
from vitrail.reports.translations import LANGUAGES, in_language, translator
from vitrail.reports.translations import translate as message

MOST_IMAGES = 40
EMBEDDED = ("fashion-40", "digits")
"""Data sets of the package that the page shows where no image is given, if they fit."""

_HERE = Path(__file__)
_SCRIPTS = (
    _HERE.parents[1] / "forward.js",
    *(_HERE.with_name(f"{name}.js") for name in ("preprocess", "drawing", "walk", "stations")),
)
MESSAGES = load_messages(__file__)
t = translator(MESSAGES)


class ExplainImage(NamedTuple):
    """An image of the page: uint8 pixels (H, W, C) as the model gets them, its name, and its class if that is known."""

    pixels: np.ndarray
    name: str
    truth: str | None = None


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
    bundle.info.check_single_label("Explain")


def _read(bundle: Bundle, images: Sequence[ImageLike]) -> list[ExplainImage]:
    if len(images) > MOST_IMAGES:
        raise UsageError(f"Images must be at most {MOST_IMAGES}, got {len(images)}. Choose some of them.")
    named = [Path(one).name if isinstance(one, str | Path) else f"image {n}" for n, one in enumerate(images)]
    return [ExplainImage(bundle.preprocess.crop(one), name) for one, name in zip(images, named, strict=True)]


def embedded_images(bundle: Bundle) -> list[ExplainImage]:
    """Up to forty images that ship with the package, of the model's size, channels and classes."""
    for name in EMBEDDED:
        data = open_data(name)
        split: Split = data.splits["test"].sample_evenly(MOST_IMAGES)
        pixels = np.asarray(split.in_memory)
        if bundle.preprocess.leaves_unchanged(*pixels.shape[1:]) and set(data.labels) == set(bundle.labels or ()):
            truths = [data.labels[label] for label in split.labels]
            return [ExplainImage(one, truth, truth) for one, truth in zip(pixels, truths, strict=True)]
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
        for name, tensor in walkthrough_of(model).explanation().tensors.items()
    }


def make_page(bundle: Bundle, shown: Sequence[ExplainImage]) -> str:
    """The document."""
    config = bundle.model.config
    walkthrough = walkthrough_of(bundle.model)
    explanation, messages = walkthrough.explanation(), walkthrough.messages
    steps = [step for part in explanation.parts.values() for step in part]
    title = t("heading", model=config.name or config.family)
    tensors = pack_tensors(bundle.model)
    data = {
        "config": page_config(config),
        "rules": bundle.preprocess.to_json(),
        "labels": bundle.labels or [f"class {number}" for number in range(config.classes)],
        "stations": [step.name for step in steps],
        "tensors": [[name, tensor.size] for name, tensor in tensors.items()],
        "images": [{"pixels": _text(one.pixels.tobytes()), "name": one.name, "truth": one.truth} for one in shown],
        "start": {"patch": (patch := _first_patch(config, shown[0].pixels)), "key": config.prefix + max(patch - 1, 0)},
        "title": {language: in_language(title, language) for language in LANGUAGES},
        "words": MESSAGES,
    }
    weights = _text(b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values()))
    warning = "" if bundle.is_trained else f'<div class="warn">{t("untrained", "p")}</div>'
    numbers = itertools.count(1)
    parts = "".join(
        f"<h2>{message(part, messages=messages)}</h2>"
        + "".join(_step(step, next(numbers), explanation, messages) for step in part_steps)
        for part, part_steps in explanation.parts.items()
    )
    body = (
        f'<noscript><div class="warn">{t("no-script", "p")}</div></noscript>{warning}'
        f"{_symbols()}"
        '<div id="told" hidden><p id="told-words" role="status"></p>'
        f'<button type="button" id="told-close">{t("close")}</button></div>'
        f'<div class="walk">{_pane(steps, messages)}<div>{parts}</div></div>'
        # Inside a script element, only this one character could end it.
        f'<script type="application/json" id="data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>'
        f'<script type="text/plain" id="weights">{weights}</script>'
    )
    subtitle = Html(f"{t('intro', parameters=f'{config.parameters:,}')} {t('keys')} {LANGUAGE_BUTTON}")
    script = "\n".join(path.read_text(encoding="utf-8") for path in _SCRIPTS) + "begin();\n"
    return page(title, subtitle, body, script, style=_HERE.with_name("walk.css").read_text(encoding="utf-8"))


def _symbols() -> str:
    """What the letters of the equations stand for."""
    named = {"x": "x", "p": "x_p", "e": "E, b", "z": "z_l", "u": "U_qkv, U_msa, D_h", "w": "W, b"}
    rows = "".join(f"<dt>{typeset(symbol)}</dt><dd>{t(f'symbol-{name}')}</dd>" for name, symbol in named.items())
    return f'<details class="legend"><summary>{t("symbols")}</summary><dl>{rows}</dl></details>'


def _step(step: ExplainStep, number: int, explanation: Explanation, messages: Messages) -> str:
    name = step.name

    def told(part: str, tag: str = "span") -> Html:
        key = f"{name}-{part}"
        variant = explanation.variants.get(key)
        return message(f"{key}.{variant}" if variant else key, tag, messages=messages, **explanation.fields)

    shape = step.shape.format(**explanation.fields).replace(" x ", " &times; ")
    return (
        f'<section class="station" id="s-{name}" tabindex="-1" aria-labelledby="{name}-title">'
        f'<h3 id="{name}-title"><span class="stop">{number}</span> {told("title")}</h3>{told("says", "p")}'
        f'<div class="formula">{typeset(step.equation)}<div class="live" id="{name}-live"></div>'
        f'<p class="shape">{t("shape")} <b>{shape}</b></p></div>'
        f'<div class="show" id="{name}-show"></div><div class="control" id="{name}-control"></div>'
        f"<details><summary>{told('asks')}</summary>{told('answer', 'p')}</details></section>"
    )


def _pane(steps: Sequence[ExplainStep], messages: Messages) -> str:
    """The part that stays in sight: the image, the prediction, the changes, and the list of steps."""
    titles = {step.name: messages[f"{step.name}-title"] for step in steps}
    options = "".join(
        f'<option value="{name}" data-en="{number}. {escape(title["en"])}" data-ko="{number}. {escape(title["ko"])}">'
        f"{number}. {escape(title['en'])}</option>"
        for number, (name, title) in enumerate(titles.items(), 1)
    )

    def button(name: str, words: str, sign: str) -> str:
        return f'<button type="button" id="{name}"><span aria-hidden="true">{sign}</span> {t(words)}</button>'

    return (
        f'<aside class="pane" aria-labelledby="pane-title"><h2 id="pane-title" class="unseen">{t("window")}</h2>'
        '<div id="pane-image"></div><div class="says-now">'
        f'<p class="headline"><span class="quiet">{t("answer-now")}</span> <b id="best"></b>'
        ' <span id="best-share"></span></p><p class="was quiet" id="was"></p><ol class="bars" id="bars"></ol></div>'
        '<p class="truth quiet" id="truth"></p><p class="truth quiet" id="in-hand"></p>'
        '<ul class="changes" id="changes"></ul>'
        f'<button type="button" id="undo" hidden>{t("undo-all")} <span id="undo-count"></span></button>'
        f'<div class="way">{button("back", "previous", "&lsaquo;")}<label><span class="unseen">{t("station")}</span>'
        f'<select id="where">{options}</select></label>{button("forth", "next", "&rsaquo;")}</div></aside>'
    )


def _first_patch(config: ModelConfig, pixels: np.ndarray) -> int:
    """The patch with most to see: that of the largest deviation."""
    settings = page_config(config)
    (rows, columns), (tall, broad) = settings["grid"], settings["patch"]
    cells = pixels.reshape(rows, tall, columns, broad, -1).astype(np.float64)
    return int(cells.std(axis=(1, 3)).mean(axis=-1).argmax())


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
