"""`vitrail inspect`: writes an examination as a page that opens from disk, as figures and as numbers.

DIR/index.html      the page; needs no network
DIR/figures/        its figures as PNG and SVG files
DIR/inspect.json    all numbers of its tables, curves and maps
DIR/arrays.npz      with `full`: attention and all other arrays
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.core.files import atomic_folder, write_json
from vitrail.core.notebook import iframe
from vitrail.core.settings import pluralise
from vitrail.data.thumbnail import image_data_url
from vitrail.reports.charts import standalone_svg
from vitrail.reports.inspect.panel import Figure, Panel, rgb
from vitrail.reports.inspect.panel_results import PanelResults, join
from vitrail.reports.inspect.shared_messages import SHARED
from vitrail.reports.page_kit import LANGUAGE_BUTTON, page, table
from vitrail.reports.translations import translator

LIMIT = 6_000_000
"""Maximum bytes of a page; panels are reduced to fit (unless `full`)."""

word = translator(SHARED)
"""A sentence of the page itself, in both languages."""


@dataclasses.dataclass(frozen=True, repr=False)
class Inspection:
    """What `vitrail.inspect` returns: the page, its numbers and its figures. A notebook shows the page."""

    results: PanelResults
    full: bool = False
    """Whether the page has everything, however large it becomes."""
    folder: Path | None = None
    """Where it was written; None if it was not."""
    notes: Sequence[str] = ()
    """What is worth knowing about the model."""

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """All numbers of all panels: the content of `inspect.json`."""
        return self.results.to_json()

    @functools.cached_property
    def figures(self) -> dict[str, Figure]:
        """All figures by name: pixels, uint8 (h, w, 3), or SVG."""
        return render_figures(self.results)

    @functools.cached_property
    def page(self) -> str:
        """The page: one HTML document that needs no network."""
        return _fit_page(self.results, self.figures, full=self.full)

    def save(self, output: str | Path, *, force: bool = False) -> "Inspection":
        """Write the folder atomically, and return this with its `folder`."""
        figures, text, document = self.figures, self.page, self.numbers
        with atomic_folder(Path(output), force=force) as folder:
            (folder / "figures").mkdir()
            for name, figure in figures.items():
                if isinstance(figure, str):
                    (folder / "figures" / f"{name}.svg").write_text(standalone_svg(figure), encoding="utf-8")
                else:
                    Image.fromarray(_enlarge(figure)).save(folder / "figures" / f"{name}.png")
            if self.full:
                arrays = join(panel.arrays() for panel in self.results.panels.values())
                np.savez_compressed(folder / "arrays.npz", **arrays)
            (folder / "index.html").write_text(text, encoding="utf-8")
            write_json(folder / "inspect.json", document)
        return dataclasses.replace(self, folder=Path(output))

    def __repr__(self) -> str:
        context, count = self.results.context, len(self.results.context.shown)
        where = "" if self.folder is None else f", {self.folder / 'index.html'}"
        return f"Inspection({context.name}, {pluralise(count, 'image')}{where})"

    def _repr_html_(self) -> str:
        return iframe(self.page, f"vitrail inspect {self.results.context.name}")


def render_figures(found: PanelResults) -> dict[str, Figure]:
    """All figures of all panels, by file name."""
    return join(dict(panel.figures()) for panel in found.panels.values())


def _fit_page(found: PanelResults, figures: Mapping[str, Figure], *, full: bool) -> str:
    """The page, with panels reduced step by step until it is small enough (or cannot be smaller)."""
    render = functools.cache(lambda panel: panel.html(figures))
    versions = [[panel, *panel.smaller()] for panel in found.panels.values()]
    attempts, text = max(map(len, versions)), ""
    for attempt in range(attempts):
        panels = [some[min(attempt, len(some) - 1)] for some in versions]
        # Packing all of a large model's attention takes minutes: not only to see that it is too large.
        if full or attempt == attempts - 1 or sum(panel.least_bytes() for panel in panels) <= LIMIT:
            text = make_page(found, {panel: render(panel) for panel in panels})
            if full or len(text.encode()) <= LIMIT:
                break
    return text


def make_page(found: PanelResults, contents: Mapping[Panel, str]) -> str:
    """The document, from the contents of its sections; a panel without content has no section."""
    context, config = found.context, found.context.model.config
    shown = [panel for panel in contents if contents[panel]]
    titles = {panel.name: panel.word("title") for panel in shown}
    sections = {panel.name: contents[panel] for panel in shown}
    notices = {panel.name: panel.word(panel.notice) for panel in shown if panel.notice}
    missing = [
        (panel.word(title, **panel.fields()), panel.word(why, **panel.fields()))
        for panel in contents
        for part, title, why in panel.absences()
        if part not in sections
    ]
    if missing:
        titles["absent"] = word("absent")
        sections["absent"] = table((word("panel"), word("why")), missing)
    links = " · ".join(f'<a href="#{name}">{title}</a>' for name, title in titles.items())
    warning = "" if found.is_trained else f'<div class="warn">{word("untrained", "p")}</div>'
    body = "\n".join(
        [
            f"<nav>{LANGUAGE_BUTTON} {links}</nav>{warning}",
            *(_section(name, titles[name], notices.get(name, ""), content) for name, content in sections.items()),
        ]
    )
    # Inside a script element, only this one character could end it.
    known = {"page": {"grid": context.grid, "followed": context.followed}}
    known |= {panel.name: panel.data() for panel in shown if panel.script}
    data = json.dumps(known, separators=(",", ":"))
    data = data.replace("<", "\\u003c")
    body += f'<script type="application/json" id="data">{data}</script>'
    # Each image is in the page once, as the background of whatever shows it.
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    style += "".join(
        f'.p{number} {{ background-image: url("{image_data_url(rgb(context.pixels(number)), photo=True)}"); }}'
        for number in range(len(context.shown))
    )
    title = word("page-title", model=config.name or config.family)
    subtitle = word("parameters", bundle=context.name, count=f"{config.parameters:,}")
    return page(title, subtitle, body, _script(shown), style=style)


_FIRST = ("answers", "walk", "attention")  # what stays unfolded on a phone


def _section(name: str, title: str, notice: str, content: str) -> str:
    """A section that can be folded. On a phone all but the first are folded when the page opens."""
    second = "" if name in _FIRST else ' class="second"'
    notice = f'<p class="notice"><b>{word("notice-label")}</b> {notice}</p>' if notice else ""
    head = f"<summary><h2>{title}</h2></summary>"
    return f'<section id="{name}"><details open{second}>{head}{content}{notice}</details></section>'


def _script(panels: list[Panel]) -> str:
    """The page's script, followed by that of each panel with its `data`."""
    own = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    parts = [
        f"((data) => {{\n{panel.script}}})(pageData[{json.dumps(panel.name)}]);\n" for panel in panels if panel.script
    ]
    return f"{own}{''.join(parts)}start();\n"


def _enlarge(pixels: np.ndarray, least: int = 240) -> np.ndarray:
    """A small image enlarged by an integer factor, for figure files."""
    factor = -(-least // max(pixels.shape[:2]))
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)
