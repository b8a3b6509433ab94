"""The page of `vitrail faces evaluate`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.files import atomic_folder, write_json, write_text
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.data.preprocess import Preprocess
from vitrail.data.thumbnail import thumbnail_data_url
from vitrail.evaluation.verification_metrics import BINS, DRAWS, RocCurve
from vitrail.faces.embed import Face
from vitrail.faces.recognition import FaceEvaluation
from vitrail.reports.charts import Interval, Line, interval_chart, line_chart
from vitrail.reports.page_kit import bilingual_page, figure, headline_numbers, table
from vitrail.reports.translations import translator

word = translator(load_messages(__file__))
"""A sentence of the page, in both languages."""

_POINTS = 300  # of a curve


def write_page(
    evaluated: FaceEvaluation, output: Path, *, shows_images: bool = False, command: str = "", force: bool = False
) -> None:
    """Write `index.html` and `faces.json` atomically. Images are on it only if that is asked for."""
    report, found = evaluated.report, evaluated.found
    counts = {key: f"{report[key]:,}" for key in ("images", "people", "genuine", "impostor")}
    figures = [
        figure(word("roc-title"), word("roc-note", **counts), _roc(found.curve, report)),
        figure(word("scores-title"), word("scores-note", **counts), _histograms(*found.histograms)),
    ]
    sections = [
        _summary(report),
        f'<div class="panes">{"".join(figures)}</div>',
        f'<p class="quiet">{_intervals(report)}</p>',
        *(f'<p class="quiet">{escape(note)}</p>' for note in report["notes"]),
        _groups(report["groups"]) if "groups" in report else "",
        f"<h2>{word('care-title')}</h2>{word('care', 'p')}",
        _worst(evaluated, shows_images=shows_images),
        f"<h2>{word('again')}</h2><pre>{escape(command or 'Python')}</pre>",
    ]
    title, subtitle = word("title", bundle=report["bundle"]), word("subtitle", data=report["data"], **counts)
    with atomic_folder(output, force=force) as folder:
        write_text(folder / "index.html", bilingual_page(title, subtitle, "".join(sections), style=_STYLE))
        write_json(folder / "faces.json", report)


_STYLE = """
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); gap: var(--space); }
.pairs figure { font-size: .85rem; overflow-wrap: anywhere; } .pairs .side { max-width: none; margin-bottom: .4rem; }
"""


def _summary(report: dict[str, Any]) -> Html:
    shown = [(_within(word("eer"), report["eer_interval"]), _percent(report["eer"]))]
    for name, rows in (("tar", report["tar"]), ("dir", report["dir"])):
        shown += [
            (_within(word(name, far=f"{row['far']:g}"), row["interval"]), _percent(row[name]))
            for row in rows
            if row[name] is not None
        ]
    if report["accuracy"] is not None:
        about = word("accuracy", folds=len(report["accuracy_folds"]))
        shown.append((_within(about, report["accuracy_interval"]), _percent(report["accuracy"])))
    if report["rank1"] is not None:
        shown.append((_within(word("rank1"), report["rank1_interval"]), _percent(report["rank1"])))
    return headline_numbers(shown)


def _within(about: Html, interval: Sequence[float] | None) -> Html:
    """What a number is, and its interval if there is one."""
    if interval is None:
        return about
    low, high = map(_percent, interval)
    return Html(about + word("within", low=low, high=high))


def _intervals(report: dict[str, Any]) -> Html:
    name = "intervals" if report["resampled"] else "no-intervals"
    return word(name, people=f"{report['people']:,}", draws=f"{DRAWS:,}", seed=report["seed"])


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _roc(curve: RocCurve, report: dict[str, Any]) -> str:
    """TAR over FAR. A curve of steps: at each FAR, the highest TAR that it allows."""
    least = 1 / curve.impostor
    fars = np.geomspace(least, 1, _POINTS)
    tars = [100 * curve.at_far(far).tar for far in fars]
    known = [row for row in report["tar"] if row["tar"] is not None]
    points = Line(
        "",
        [row["far"] for row in known],
        [100 * row["tar"] for row in known],
        0,
        joined=False,
        bars=[(100 * low, 100 * high) for low, high in (row["interval"] or [row["tar"]] * 2 for row in known)],
    )
    lines = [Line("", [float(far) for far in fars], tars), points]
    return line_chart(lines, word("far-axis", "tspan"), word("tar-axis", "tspan"), log_x=True)


def _histograms(genuine: np.ndarray, impostor: np.ndarray) -> str:
    used = np.flatnonzero(genuine + impostor)
    shown = slice(max(used[0] - 1, 0), used[-1] + 2)
    middles = ((BINS[1:] + BINS[:-1]) / 2)[shown].round(3).tolist()
    lines = [
        Line(word(name, "tspan"), middles, (100 * counts / max(counts.sum(), 1))[shown].tolist(), colour)
        for name, counts, colour in (("genuine", genuine, 0), ("impostor", impostor, 1))
    ]
    return line_chart(lines, word("score-axis", "tspan"), word("share-axis", "tspan"))


def _groups(rows: Sequence[dict[str, Any]]) -> str:
    drawn = [
        Interval(row["group"], 100 * row["eer"], *(100 * end for end in row["eer_interval"] or [row["eer"]] * 2))
        for row in rows
        if row["eer"] is not None
    ]
    fars = [one["far"] for one in max((row["at"] for row in rows), key=len, default=[])]
    heads = [word("group"), word("people")]
    for far in fars:
        heads += [word("group-far", far=f"{far:g}"), word("group-frr", far=f"{far:g}")]
    cells = []
    for row in rows:
        at = {one["far"]: (f"{one['group_far']:.2%}", f"{1 - one['tar']:.1%}") for one in row["at"]}
        cells.append([row["group"], f"{row['people']:,}", *(cell for far in fars for cell in at.get(far, ("-", "-")))])
    shown = figure(word("groups-title"), word("groups-note"), interval_chart(drawn, word("eer-axis", "tspan")))
    return f'<div class="panes">{shown}{table(heads, cells, frozenset(range(1, len(heads))))}</div>'


def _worst(evaluated: FaceEvaluation, *, shows_images: bool) -> str:
    faces, parts = evaluated.faces, [word("worst-about", "p")]
    show = _thumbnails(faces.images) if shows_images else None
    for kind, block in zip(("genuine", "impostor"), evaluated.found.worst, strict=True):
        parts.append(Html(f"<h2>{word(f'worst-{kind}')}</h2>"))
        rows = [(int(one), int(other), f"{score:.3f}") for one, other, score in zip(*block, strict=True)]
        if show is None:
            cells = [(faces.names[one], faces.names[other], score) for one, other, score in rows]
            parts.append(Html(table([word("one"), word("other"), word("score")], cells, frozenset({2}))))
            continue
        tiles = "".join(
            f'<figure><div class="side">{show(one, faces.names[one])}{show(other, faces.names[other])}</div>'
            f"<b>{score}</b> {escape(faces.names[one])} · {escape(faces.names[other])}</figure>"
            for one, other, score in rows
        )
        parts.append(Html(f'<div class="pairs">{tiles}</div>'))
    return "".join(parts)


def _thumbnails(images: Sequence[Face] | np.ndarray) -> Callable[[int, str], str]:
    """What shows an image in colour, whatever the model takes."""
    colours = Preprocess()

    def show(index: int, name: str) -> str:
        pixels = np.asarray(colours.read(images[index], name=name))
        return f'<img src="{thumbnail_data_url(pixels)}" alt="{escape(name)}">'

    return show
