"""The page of `vitrail runs`."""

from collections.abc import Sequence
from pathlib import Path

from vitrail.core.files import atomic_folder, write_json, write_text
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.core.terminal import format_duration, format_setting
from vitrail.evaluation.compare_runs import RunComparison, RunPair
from vitrail.reports.charts import Interval, interval_chart
from vitrail.reports.curves import draw_curves, training_curve, with_axis_choice
from vitrail.reports.families import family_colours
from vitrail.reports.page_kit import bilingual_page, figure, table
from vitrail.reports.translations import translator

t = translator(load_messages(__file__))
"""A sentence of the page, in both languages."""


def write_runs_page(found: RunComparison, output: Path, *, command: str = "", force: bool = False) -> None:
    """Write `index.html` and `runs.json` atomically."""
    sections = [
        _scores(found),
        _pairs(found),
        _figures(found),
        _differences(found),
        f"<h2>{t('again')}</h2><pre>{escape(command or 'Python')}</pre>",
    ]
    data = sorted({run.data for run in found.runs})
    text = bilingual_page(t("title", count=len(found.runs)), ", ".join(data), "".join(sections))
    with atomic_folder(output, force=force) as folder:
        write_text(folder / "index.html", text)
        write_json(folder / "runs.json", found.to_json())


def _scores(found: RunComparison) -> str:
    rows = []
    for run, name in zip(found.runs, found.names, strict=True):
        accuracy, interval, images = "-", "-", "-"
        if run.final is not None:
            low, high = run.final["accuracy_interval"]
            accuracy, interval = f"{run.final['accuracy']:.1%}", f"{low:.1%} … {high:.1%}"
            images = f"{run.final['count']:,} ({run.final.get('split', '?')})"
        time = "-" if run.seconds is None else format_duration(run.seconds)
        state = "" if run.is_finished else t("unfinished")
        steps = Html(f"{run.step:,} {state}")
        about = " · ".join(text for text in (run.result, str(run.folder)) if text != name)
        named = Html(f'<span>{escape(name)}<br><small class="quiet">{escape(about)}</small></span>')
        rows.append((named, accuracy, interval, images, steps, time))
    heads = [t(key) for key in ("run", "accuracy", "interval", "images", "steps", "time")]
    listed = table(heads, rows, frozenset({1, 2, 3, 4, 5}), stacks=True)
    caveat = t("different-images", "p", groups="; ".join(found.groups)) if len(found.groups) > 1 else ""
    return f"<h2>{t('scores')}</h2>{caveat}{listed}"


def _pairs(found: RunComparison) -> str:
    if not found.pairs:
        return f"<h2>{t('pairs')}</h2>{t('no-pairs', 'p')}{_notes(found)}"
    rows = [
        (
            f"{pair.one} {100 * pair.paired.accuracies[0]:.1f} %",
            f"{pair.other} {100 * pair.paired.accuracies[1]:.1f} %",
            _verdict(pair),
            f"{pair.paired.one:,} : {pair.paired.other:,}",
            f"{pair.paired.count:,}",
            pair.paired.chance,
        )
        for pair in found.pairs
    ]
    heads = [t(key) for key in ("one", "other", "verdict", "only", "images", "chance")]
    about = f"{t('about-pairs', 'p')}{t('about-seeds', 'p')}"
    return f"<h2>{t('pairs')}</h2>{about}{table(heads, rows, frozenset({3, 4, 5}), stacks=True)}{_notes(found)}"


def _verdict(pair: RunPair) -> Html:
    if pair.paired.p_value >= pair.level:
        return t("cannot-tell")
    return t("better", run=pair.one if pair.paired.one > pair.paired.other else pair.other)


def _notes(found: RunComparison) -> str:
    notes = []
    for run in found.runs:
        if run.lacks_answers:
            kind = "missing-run" if run.keeping_command is None else "missing"
            notes.append(t(kind, "p", folder=str(run.folder), command=run.keeping_command))
    return "".join(notes)


def _figures(found: RunComparison) -> str:
    colours = family_colours([run.family for run in found.runs])

    def drawn(kind: str, key: str, axis: str, factor: float) -> str | None:
        lines = [
            training_curve(run.events, kind, key, name, colour, factor=factor)
            for run, name, colour in zip(found.runs, found.names, colours, strict=True)
        ]
        lines = [line for line in lines if line.steps]
        return draw_curves(lines, t(axis, "tspan")) if lines else None

    figures = [
        figure(t(title), t(f"{title}-note"), content)
        for title, content in (
            ("held-out-accuracy", drawn("evaluate", "accuracy", "accuracy-axis", 100)),
            ("held-out-loss", drawn("evaluate", "loss", "loss-axis", 1)),
            ("training-loss", drawn("step", "loss", "loss-axis", 1)),
        )
        if content is not None
    ]
    if any(run.final is not None for run in found.runs):
        figures.insert(0, _intervals(found, colours))
    if not figures:
        return ""
    return f'<h2>{t("course")}</h2>{with_axis_choice(Html(f"""<div class="panes">{"".join(figures)}</div>"""))}'


def _intervals(found: RunComparison, colours: Sequence[int]) -> Html:
    """Final scores with their intervals."""
    drawn = []
    for run, name, colour in zip(found.runs, found.names, colours, strict=True):
        if run.final is not None:
            low, high = run.final["accuracy_interval"]
            drawn.append(Interval(name, 100 * run.final["accuracy"], 100 * low, 100 * high, colour))
    title = t("no-best")
    if found.have_same_images:
        title = t("best", run=found.names[0], accuracy=f"{drawn[0].value:.1f}%")
    return figure(title, t("intervals"), interval_chart(drawn, t("accuracy-axis", "tspan")))


def _differences(found: RunComparison) -> str:
    if not found.differences:
        return ""
    rows = [(key, *map(format_setting, values)) for key, values in found.differences.items()]
    return f"<h2>{t('settings')}</h2>{table([t('setting'), *found.names], rows, stacks=True)}"
