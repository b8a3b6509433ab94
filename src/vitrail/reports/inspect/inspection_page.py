"""Write the results of `vitrail inspect`: a page that opens from disk, its figures and its numbers.

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
from vitrail.reports.inspect.panel import Figure, InspectionContext, Panel, rgb
from vitrail.reports.inspect.panel_results import PanelResults, merge_entries
from vitrail.reports.inspect.shared_messages import SHARED_MESSAGES
from vitrail.reports.page_kit import LANGUAGE_BUTTON, page, table
from vitrail.reports.translations import translator

LIMIT = 6_000_000
"""Largest size of a page in bytes. Panels are reduced to fit, unless `full` is set."""

_t = translator(SHARED_MESSAGES)


@dataclasses.dataclass(frozen=True, repr=False)
class Inspection:
    """The return value of `vitrail.inspect`: the page, its numbers and its figures. A notebook displays the page."""

    results: PanelResults
    full: bool = False
    """Whether the page contains everything, however large it becomes."""
    folder: Path | None = None
    """Folder to which it was saved, if any."""
    notes: Sequence[str] = ()
    """Remarks about the model and about panels that could not be loaded."""

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """The content of `inspect.json`: the numbers of all panels."""
        return self.results.to_json()

    @functools.cached_property
    def figures(self) -> dict[str, Figure]:
        """All figures by name: pixels, uint8 (h, w, 3), or SVG text."""
        return render_figures(self.results)

    @functools.cached_property
    def page(self) -> str:
        """The page: one HTML document that needs no network."""
        return _fit_page(self.results, self.figures, full=self.full)

    def save(self, output: str | Path, *, force: bool = False) -> "Inspection":
        """Write the folder atomically. Return a copy of this inspection with its `folder` set."""
        figures, text, document = self.figures, self.page, self.numbers
        with atomic_folder(Path(output), force=force) as folder:
            (folder / "figures").mkdir()
            for name, figure in figures.items():
                if isinstance(figure, str):
                    (folder / "figures" / f"{name}.svg").write_text(standalone_svg(figure), encoding="utf-8")
                else:
                    Image.fromarray(_enlarge(figure)).save(folder / "figures" / f"{name}.png")
            if self.full:
                arrays = merge_entries(panel.arrays() for panel in self.results.panels.values())
                np.savez_compressed(folder / "arrays.npz", **arrays)
            (folder / "index.html").write_text(text, encoding="utf-8")
            write_json(folder / "inspect.json", document)
        return dataclasses.replace(self, folder=Path(output))

    def __repr__(self) -> str:
        context, count = self.results.context, len(self.results.context.page_images)
        place = "" if self.folder is None else f", {self.folder / 'index.html'}"
        return f"Inspection({context.name}, {pluralise(count, 'image')}{place})"

    def _repr_html_(self) -> str:
        return iframe(self.page, f"vitrail inspect {self.results.context.name}")


def render_figures(results: PanelResults) -> dict[str, Figure]:
    """Return the figures of all panels by file name without suffix."""
    return merge_entries(dict(panel.figures()) for panel in results.panels.values())


def _fit_page(results: PanelResults, figures: Mapping[str, Figure], *, full: bool) -> str:
    """Render the page. Reduce the panels step by step until the page fits into `LIMIT` or nothing can be reduced."""
    section = functools.cache(lambda panel: panel.html(figures))
    panel_versions = [[panel, *panel.smaller_versions()] for panel in results.panels.values()]
    attempts, text = max(map(len, panel_versions)), ""
    for attempt in range(attempts):
        panels = [versions[min(attempt, len(versions) - 1)] for versions in panel_versions]
        # Packing all attention of a large model takes minutes. Skip a version that is certain to be too large.
        if full or attempt == attempts - 1 or sum(panel.min_bytes() for panel in panels) <= LIMIT:
            text = render_page(results, {panel: section(panel) for panel in panels})
            if full or len(text.encode()) <= LIMIT:
                break
    return text


def render_page(results: PanelResults, sections: Mapping[Panel, str]) -> str:
    """Return the HTML document. `sections` is the HTML of each panel; a panel with empty HTML has no section."""
    context, config = results.context, results.context.model.config
    panels = [panel for panel in sections if sections[panel]]
    titles = {panel.name: panel.t("title") for panel in panels}
    contents = {panel.name: sections[panel] for panel in panels}
    notices = {panel.name: panel.t(panel.notice) for panel in panels if panel.notice}
    missing = [
        (panel.t(title, **panel.message_fields()), panel.t(reason, **panel.message_fields()))
        for panel in sections
        for part, title, reason in panel.missing_parts()
        if part not in contents
    ]
    if missing:
        titles["absent"] = _t("absent")
        contents["absent"] = table((_t("panel"), _t("why")), missing)
    links = " · ".join(f'<a href="#{name}">{title}</a>' for name, title in titles.items())
    warning = "" if results.is_trained else f'<div class="warn">{_t("untrained", "p")}</div>'
    body = "\n".join(
        [
            f"<nav>{LANGUAGE_BUTTON} {links}</nav>{warning}",
            *(_section(name, titles[name], notices.get(name, ""), content) for name, content in contents.items()),
            _script_data(context, panels),
        ]
    )
    title = _t("page-title", model=config.name or config.family)
    subtitle = _t("parameters", bundle=context.name, count=f"{config.parameters:,}")
    return page(title, subtitle, body, _script(panels), style=_style(context))


_FIRST_SECTIONS = ("answers", "walk", "attention")  # these stay unfolded on a phone


def _section(name: str, title: str, notice: str, content: str) -> str:
    """Return a section that can be folded. On a phone, the page opens with all but the first sections folded."""
    second = "" if name in _FIRST_SECTIONS else ' class="second"'
    notice = f'<p class="notice"><b>{_t("notice-label")}</b> {notice}</p>' if notice else ""
    head = f"<summary><h2>{title}</h2></summary>"
    return f'<section id="{name}"><details open{second}>{head}{content}{notice}</details></section>'


def _script_data(context: InspectionContext, panels: Sequence[Panel]) -> str:
    """Return the script element with the JSON data of all scripts."""
    data: dict[str, Any] = {"page": {"grid": context.grid, "followed": context.followed}}
    data |= {panel.name: panel.script_data() for panel in panels if panel.script}
    # A "<" is the only character that could end the script element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'


def _style(context: InspectionContext) -> str:
    """Return the stylesheet. It contains the pixels of each page image once, as the background of a class."""
    return Path(__file__).with_suffix(".css").read_text(encoding="utf-8") + "".join(
        f'.p{number} {{ background-image: url("{image_data_url(rgb(context.pixels(number)), photo=True)}"); }}'
        for number in range(len(context.page_images))
    )


def _script(panels: Sequence[Panel]) -> str:
    """Return the page's script, followed by the script of each panel, called with its data."""
    page_script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    panel_scripts = [
        f"((data) => {{\n{panel.script}}})(pageData[{json.dumps(panel.name)}]);\n" for panel in panels if panel.script
    ]
    return f"{page_script}{''.join(panel_scripts)}start();\n"


def _enlarge(pixels: np.ndarray, min_side: int = 240) -> np.ndarray:
    """Enlarge a small image by an integer factor, so that its longer side has at least `min_side` pixels."""
    factor = -(-min_side // max(pixels.shape[:2]))
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)
