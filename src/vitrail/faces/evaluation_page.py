"""The HTML report of `vitrail faces evaluate`."""

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
from vitrail.faces.embed import FaceImage
from vitrail.faces.recognition import FaceEvaluation
from vitrail.reports.charts import Interval, Line, interval_chart, line_chart
from vitrail.reports.page_kit import bilingual_page, figure, headline_numbers, table
from vitrail.reports.translations import translator

t = translator(load_messages(__file__))
"""Return a message of the page in both languages."""

_CURVE_POINTS = 300


def write_page(
    evaluation: FaceEvaluation, output: Path, *, shows_images: bool = False, command: str = "", force: bool = False
) -> None:
    """Write the report of a face evaluation, `index.html` and `faces.json`, to the folder `output` atomically.

    The worst pairs are listed by name, with images only if `shows_images`. `command` is printed on the page.
    """
    report, verification = evaluation.report, evaluation.verification
    counts = {key: f"{report[key]:,}" for key in ("images", "people", "genuine", "impostor")}
    figures = [
        figure(t("roc-title"), t("roc-note", **counts), _roc_chart(verification.curve, report)),
        figure(t("scores-title"), t("scores-note", **counts), _score_chart(*verification.histograms)),
    ]
    sections = [
        _headline(report),
        f'<div class="panes">{"".join(figures)}</div>',
        f'<p class="quiet">{_interval_note(report)}</p>',
        *(f'<p class="quiet">{escape(note)}</p>' for note in report["notes"]),
        _group_section(report["groups"]) if "groups" in report else "",
        f"<h2>{t('care-title')}</h2>{t('care', 'p')}",
        _worst_pairs(evaluation, shows_images=shows_images),
        f"<h2>{t('again')}</h2><pre>{escape(command or 'Python')}</pre>",
    ]
    title, subtitle = t("title", bundle=report["bundle"]), t("subtitle", data=report["data"], **counts)
    with atomic_folder(output, force=force) as folder:
        write_text(folder / "index.html", bilingual_page(title, subtitle, "".join(sections), style=_STYLE))
        write_json(folder / "faces.json", report)


_STYLE = """
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); gap: var(--space); }
.pairs figure { font-size: .85rem; overflow-wrap: anywhere; } .pairs .side { max-width: none; margin-bottom: .4rem; }
"""


def _headline(report: dict[str, Any]) -> Html:
    numbers = [(_with_interval(t("eer"), report["eer_interval"]), _percent(report["eer"]))]
    for name, rows in (("tar", report["tar"]), ("dir", report["dir"])):
        numbers += [
            (_with_interval(t(name, far=f"{row['far']:g}"), row["interval"]), _percent(row[name]))
            for row in rows
            if row[name] is not None
        ]
    if report["accuracy"] is not None:
        label = t("accuracy", folds=len(report["accuracy_folds"]))
        numbers.append((_with_interval(label, report["accuracy_interval"]), _percent(report["accuracy"])))
    if report["rank1"] is not None:
        numbers.append((_with_interval(t("rank1"), report["rank1_interval"]), _percent(report["rank1"])))
    return headline_numbers(numbers)


def _with_interval(label: Html, interval: Sequence[float] | None) -> Html:
    """Append the interval of a number to its label, if there is one."""
    if interval is None:
        return label
    low, high = map(_percent, interval)
    return Html(label + t("within", low=low, high=high))


def _interval_note(report: dict[str, Any]) -> Html:
    key = "intervals" if report["resampled"] else "no-intervals"
    return t(key, people=f"{report['people']:,}", draws=f"{DRAWS:,}", seed=report["seed"])


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _roc_chart(curve: RocCurve, report: dict[str, Any]) -> str:
    """Draw TAR over FAR. The curve is a step function: at each FAR, the highest TAR that it allows."""
    lowest_far = 1 / curve.impostor
    fars = np.geomspace(lowest_far, 1, _CURVE_POINTS)
    tars = [100 * curve.at_far(far).tar for far in fars]
    measured = [row for row in report["tar"] if row["tar"] is not None]
    points = Line(
        "",
        [row["far"] for row in measured],
        [100 * row["tar"] for row in measured],
        0,
        joined=False,
        bars=[(100 * low, 100 * high) for low, high in (row["interval"] or [row["tar"]] * 2 for row in measured)],
    )
    lines = [Line("", [float(far) for far in fars], tars), points]
    return line_chart(lines, t("far-axis", "tspan"), t("tar-axis", "tspan"), log_x=True)


def _score_chart(genuine: np.ndarray, impostor: np.ndarray) -> str:
    """Draw the histograms of the scores of genuine and impostor pairs."""
    occupied = np.flatnonzero(genuine + impostor)
    visible = slice(max(occupied[0] - 1, 0), occupied[-1] + 2)
    middles = ((BINS[1:] + BINS[:-1]) / 2)[visible].round(3).tolist()
    lines = [
        Line(t(name, "tspan"), middles, (100 * counts / max(counts.sum(), 1))[visible].tolist(), colour)
        for name, counts, colour in (("genuine", genuine, 0), ("impostor", impostor, 1))
    ]
    return line_chart(lines, t("score-axis", "tspan"), t("share-axis", "tspan"))


def _group_section(rows: Sequence[dict[str, Any]]) -> str:
    """Return a chart and a table of the error rates of each group of people."""
    intervals = [
        Interval(row["group"], 100 * row["eer"], *(100 * end for end in row["eer_interval"] or [row["eer"]] * 2))
        for row in rows
        if row["eer"] is not None
    ]
    fars = [rates["far"] for rates in max((row["at"] for row in rows), key=len, default=[])]
    heads = [t("group"), t("people")]
    for far in fars:
        heads += [t("group-far", far=f"{far:g}"), t("group-frr", far=f"{far:g}")]
    cells = []
    for row in rows:
        rates_at = {rates["far"]: (f"{rates['group_far']:.2%}", f"{1 - rates['tar']:.1%}") for rates in row["at"]}
        rates = (cell for far in fars for cell in rates_at.get(far, ("-", "-")))
        cells.append([row["group"], f"{row['people']:,}", *rates])
    chart = figure(t("groups-title"), t("groups-note"), interval_chart(intervals, t("eer-axis", "tspan")))
    return f'<div class="panes">{chart}{table(heads, cells, numeric=frozenset(range(1, len(heads))))}</div>'


def _worst_pairs(evaluation: FaceEvaluation, *, shows_images: bool) -> str:
    """Return tables of the pairs with the most misleading scores, or thumbnails of them."""
    faces, parts = evaluation.faces, [t("worst-about", "p")]
    thumbnail = _thumbnails(faces.images) if shows_images else None
    for kind, block in zip(("genuine", "impostor"), evaluation.verification.worst, strict=True):
        parts.append(Html(f"<h2>{t(f'worst-{kind}')}</h2>"))
        rows = [(int(first), int(second), f"{score:.3f}") for first, second, score in zip(*block, strict=True)]
        names = faces.names
        if thumbnail is None:
            cells = [(names[first], names[second], score) for first, second, score in rows]
            parts.append(Html(table([t("one"), t("other"), t("score")], cells, numeric=frozenset({2}))))
            continue
        tiles = "".join(
            f'<figure><div class="side">{thumbnail(first, names[first])}{thumbnail(second, names[second])}</div>'
            f"<b>{score}</b> {escape(names[first])} · {escape(names[second])}</figure>"
            for first, second, score in rows
        )
        parts.append(Html(f'<div class="pairs">{tiles}</div>'))
    return "".join(parts)


def _thumbnails(images: Sequence[FaceImage] | np.ndarray) -> Callable[[int, str], str]:
    """Return a function from the index and name of an image to an `<img>` tag, in colour also for grey models."""
    preprocess = Preprocess()

    def thumbnail(index: int, name: str) -> str:
        pixels = np.asarray(preprocess.read(images[index], name=name))
        return f'<img src="{thumbnail_data_url(pixels)}" alt="{escape(name)}">'

    return thumbnail
