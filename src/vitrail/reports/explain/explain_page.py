"""Write the page of `vitrail explain`, which runs a small ViT in the browser and shows every step.

DIR/index.html      the page with the weights of the model; opens from disk, needs no network
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

MAX_IMAGES = 40
"""Largest number of images on a page."""
EMBEDDED = ("fashion-40", "digits")
"""Data sets of the package. The page shows the first that fits the model if the user names no image."""

_HERE = Path(__file__)
_SCRIPTS = (
    _HERE.parents[1] / "forward.js",
    *(_HERE.with_name(f"{name}.js") for name in ("preprocess", "drawing", "walk", "stations")),
)
MESSAGES = load_messages(__file__)
t = translator(MESSAGES)
"""Return a message of the page in both languages."""


class ExplainImage(NamedTuple):
    """An image of the page."""

    pixels: np.ndarray
    """Pixels cropped for the model, uint8 (H, W, C)."""
    name: str
    truth: str | None = None
    """Name of its true class, if there is a label."""


def explain(
    bundle: Bundle, images: Iterable[ImageLike] = (), output: str | Path = "explain", *, force: bool = False
) -> Path:
    """Write the page to the folder `output`, atomically, and return its path.

    The default images are embedded ones that fit the model. Raise UsageError for a model that `forward.js` cannot run.
    """
    check_explains(bundle)
    sources = [images] if isinstance(images, str | Path) else list(images)
    page_images = _read_images(bundle, sources) if sources else embedded_images(bundle)
    text = make_page(bundle, page_images)
    with atomic_folder(Path(output), force=force) as folder:
        (folder / "index.html").write_text(text, encoding="utf-8")
    return Path(output) / "index.html"


def check_explains(bundle: Bundle) -> None:
    """Raise UsageError for a model that cannot run in a page or does not predict one class."""
    bundle.model.config.check_in_page()
    bundle.info.check_single_label("Explain")


def _read_images(bundle: Bundle, images: Sequence[ImageLike]) -> list[ExplainImage]:
    """Decode and crop images. Raise UsageError if there are too many."""
    if len(images) > MAX_IMAGES:
        raise UsageError(f"Images must be at most {MAX_IMAGES}, got {len(images)}. Choose fewer images.")
    names = [
        Path(image).name if isinstance(image, str | Path) else f"image {index}" for index, image in enumerate(images)
    ]
    return [ExplainImage(bundle.preprocess.crop(image), name) for image, name in zip(images, names, strict=True)]


def embedded_images(bundle: Bundle) -> list[ExplainImage]:
    """Return embedded images of the model's size, channels and classes. Raise UsageError if there are none."""
    for name in EMBEDDED:
        data = open_data(name)
        split: Split = data.splits["test"].sample_evenly(MAX_IMAGES)
        pixels_BHWC = np.asarray(split.in_memory)
        if bundle.preprocess.leaves_unchanged(*pixels_BHWC.shape[1:]) and set(data.labels) == set(bundle.labels or ()):
            truths = [data.labels[label] for label in split.labels]
            return [ExplainImage(pixels, truth, truth) for pixels, truth in zip(pixels_BHWC, truths, strict=True)]
    raise UsageError(
        "IMAGE must be given, because no embedded image (clothes or digits) has the size and classes of this bundle."
    )


def page_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config that `forward.js` reads."""
    return {**config.to_document(), "grid": config.grid, "prefix": config.prefix, "tokens": config.tokens}


def pack_tensors(model: AnyModel) -> dict[str, np.ndarray]:
    """Return the tensors that `forward.js` reads, float32, by name."""
    return {
        name: np.ascontiguousarray(tensor.detach().cpu().float().numpy())
        for name, tensor in walkthrough_of(model).explanation().tensors.items()
    }


def make_page(bundle: Bundle, images: Sequence[ExplainImage]) -> str:
    """Return the HTML document, with the images and the weights of the bundle."""
    config = bundle.model.config
    walkthrough = walkthrough_of(bundle.model)
    explanation, messages = walkthrough.explanation(), walkthrough.messages
    steps = [step for part in explanation.parts.values() for step in part]
    title = t("heading", model=config.name or config.family)
    tensors = pack_tensors(bundle.model)
    patch = _start_patch(config, images[0].pixels)
    data = {
        "config": page_config(config),
        "preprocess": bundle.preprocess.to_json(),
        "labels": bundle.labels or [f"class {number}" for number in range(config.classes)],
        "stations": [step.name for step in steps],
        "tensors": [[name, tensor.size] for name, tensor in tensors.items()],
        "images": [
            {"pixels": _base64(image.pixels.tobytes()), "name": image.name, "truth": image.truth} for image in images
        ],
        "start": {"patch": patch, "key": config.prefix + max(patch - 1, 0)},
        "title": {language: in_language(title, language) for language in LANGUAGES},
        "messages": MESSAGES,
    }
    weights = _base64(b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values()))
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
        '<div id="notice" hidden><p id="notice-text" role="status"></p>'
        f'<button type="button" id="notice-close">{t("close")}</button></div>'
        f'<div class="walk">{_pane(steps, messages)}<div>{parts}</div></div>'
        # Without "<" in the JSON, nothing can end the script element.
        f'<script type="application/json" id="data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>'
        f'<script type="text/plain" id="weights">{weights}</script>'
    )
    subtitle = Html(f"{t('intro', parameters=f'{config.parameters:,}')} {t('keys')} {LANGUAGE_BUTTON}")
    script = "\n".join(path.read_text(encoding="utf-8") for path in _SCRIPTS) + "begin();\n"
    return page(title, subtitle, body, script, style=_HERE.with_name("walk.css").read_text(encoding="utf-8"))


def _symbols() -> str:
    """Return a folded list of the meanings of the symbols in equations."""
    symbols = {"x": "x", "p": "x_p", "e": "E, b", "z": "z_l", "u": "U_qkv, U_msa, D_h", "w": "W, b"}
    rows = "".join(f"<dt>{typeset(symbol)}</dt><dd>{t(f'symbol-{name}')}</dd>" for name, symbol in symbols.items())
    return f'<details class="legend"><summary>{t("symbols")}</summary><dl>{rows}</dl></details>'


def _step(step: ExplainStep, number: int, explanation: Explanation, messages: Messages) -> str:
    """Return the section of a step: title, text, equation, and empty elements that the script fills."""
    name = step.name

    def step_message(part: str, tag: str = "span") -> Html:
        key = f"{name}-{part}"
        variant = explanation.variants.get(key)
        return message(f"{key}.{variant}" if variant else key, tag, messages=messages, **explanation.fields)

    shape = step.shape.format(**explanation.fields).replace(" x ", " &times; ")
    return (
        f'<section class="station" id="s-{name}" tabindex="-1" aria-labelledby="{name}-title">'
        f'<h3 id="{name}-title"><span class="stop">{number}</span> {step_message("title")}</h3>'
        f"{step_message('says', 'p')}"
        f'<div class="formula">{typeset(step.equation)}<div class="live" id="{name}-live"></div>'
        f'<p class="shape">{t("shape")} <b>{shape}</b></p></div>'
        f'<div class="show" id="{name}-show"></div><div class="control" id="{name}-control"></div>'
        f"<details><summary>{step_message('asks')}</summary>{step_message('answer', 'p')}</details></section>"
    )


def _pane(steps: Sequence[ExplainStep], messages: Messages) -> str:
    """Return the part that stays in view: the image, the prediction, the changes, and the list of steps."""
    titles = {step.name: messages[f"{step.name}-title"] for step in steps}
    options = "".join(
        f'<option value="{name}" data-en="{number}. {escape(title["en"])}" data-ko="{number}. {escape(title["ko"])}">'
        f"{number}. {escape(title['en'])}</option>"
        for number, (name, title) in enumerate(titles.items(), 1)
    )

    def button(name: str, sign: str) -> str:
        return f'<button type="button" id="{name}"><span aria-hidden="true">{sign}</span> {t(name)}</button>'

    return (
        f'<aside class="pane" aria-labelledby="pane-title"><h2 id="pane-title" class="visually-hidden">{t("pane")}</h2>'
        '<div id="pane-image"></div><div>'
        f'<p class="headline"><span class="quiet">{t("prediction-now")}</span> <b id="best"></b>'
        ' <span id="best-share"></span></p><p class="was quiet" id="was"></p><ol class="bars" id="bars"></ol></div>'
        '<p class="truth quiet" id="truth"></p><p class="truth quiet" id="followed"></p>'
        '<ul class="changes" id="changes"></ul>'
        f'<button type="button" id="undo" hidden>{t("undo-all")} <span id="undo-count"></span></button>'
        f'<div class="step-buttons">{button("previous", "&lsaquo;")}'
        f'<label><span class="visually-hidden">{t("station")}</span>'
        f'<select id="station-select">{options}</select></label>{button("next", "&rsaquo;")}</div></aside>'
    )


def _start_patch(config: ModelConfig, pixels_HWC: np.ndarray) -> int:
    """Return the raster index of the patch with the largest standard deviation, which has the most detail."""
    settings = page_config(config)
    (rows, columns), (height, width) = settings["grid"], settings["patch"]
    patches = pixels_HWC.reshape(rows, height, columns, width, -1).astype(np.float64)
    return int(patches.std(axis=(1, 3)).mean(axis=-1).argmax())


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
