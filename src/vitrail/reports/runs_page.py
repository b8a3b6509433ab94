"""Write the page of `vitrail runs`: scores, paired tests, curves and settings of several runs."""

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
"""Return a message of the page in both languages."""


def write_runs_page(comparison: RunComparison, output: Path, *, command: str = "", force: bool = False) -> None:
    """Write `index.html` and `runs.json` to the folder `output`, atomically. The page ends with `command`."""
    sections = [
        _score_section(comparison),
        _pair_section(comparison),
        _figure_section(comparison),
        _settings_section(comparison),
        f"<h2>{t('again')}</h2><pre>{escape(command or 'Python')}</pre>",
    ]
    data = sorted({run.data for run in comparison.runs})
    text = bilingual_page(t("title", count=len(comparison.runs)), ", ".join(data), "".join(sections))
    with atomic_folder(output, force=force) as folder:
        write_text(folder / "index.html", text)
        write_json(folder / "runs.json", comparison.to_json())


def _score_section(comparison: RunComparison) -> str:
    """Return a table with the final accuracy, steps and time of each run."""
    rows = []
    for run, name in zip(comparison.runs, comparison.names, strict=True):
        accuracy, interval, images = "-", "-", "-"
        if run.final is not None:
            low, high = run.final["accuracy_interval"]
            accuracy, interval = f"{run.final['accuracy']:.1%}", f"{low:.1%} … {high:.1%}"
            images = f"{run.final['count']:,} ({run.final.get('split', '?')})"
        time = "-" if run.seconds is None else format_duration(run.seconds)
        state = "" if run.is_finished else t("unfinished")
        steps = Html(f"{run.step:,} {state}")
        about = " · ".join(text for text in (run.result, str(run.folder)) if text != name)
        name_cell = Html(f'<span>{escape(name)}<br><small class="quiet">{escape(about)}</small></span>')
        rows.append((name_cell, accuracy, interval, images, steps, time))
    headers = [t(key) for key in ("run", "accuracy", "interval", "images", "steps", "time")]
    scores = table(headers, rows, numeric=frozenset({1, 2, 3, 4, 5}), stacks=True)
    caveat = t("different-images", "p", groups="; ".join(comparison.groups)) if len(comparison.groups) > 1 else ""
    return f"<h2>{t('scores')}</h2>{caveat}{scores}"


def _pair_section(comparison: RunComparison) -> str:
    """Return a table with the paired test of each pair of runs that were tested on the same images."""
    if not comparison.pairs:
        return f"<h2>{t('pairs')}</h2>{t('no-pairs', 'p')}{_missing_prediction_notes(comparison)}"
    rows = [
        (
            f"{pair.first} {100 * pair.paired.accuracies[0]:.1f} %",
            f"{pair.second} {100 * pair.paired.accuracies[1]:.1f} %",
            _verdict_text(pair),
            f"{pair.paired.only_first:,} : {pair.paired.only_second:,}",
            f"{pair.paired.count:,}",
            pair.paired.chance,
        )
        for pair in comparison.pairs
    ]
    headers = [t(key) for key in ("one", "other", "verdict", "only", "images", "chance")]
    about = f"{t('about-pairs', 'p')}{t('about-seeds', 'p')}"
    tests = table(headers, rows, numeric=frozenset({3, 4, 5}), stacks=True)
    return f"<h2>{t('pairs')}</h2>{about}{tests}{_missing_prediction_notes(comparison)}"


def _verdict_text(pair: RunPair) -> Html:
    """Return which run is better, or that the test cannot tell."""
    if pair.paired.p_value >= pair.level:
        return t("cannot-tell")
    return t("better", run=pair.first if pair.paired.only_first > pair.paired.only_second else pair.second)


def _missing_prediction_notes(comparison: RunComparison) -> str:
    """Return a paragraph for each run without saved predictions, with the command that saves them."""
    notes = []
    for run in comparison.runs:
        if run.lacks_predictions:
            name = "missing-run" if run.evaluate_command is None else "missing"
            notes.append(t(name, "p", folder=str(run.folder), command=run.evaluate_command))
    return "".join(notes)


def _figure_section(comparison: RunComparison) -> str:
    """Return final scores and training curves of all runs as charts. Empty if nothing was recorded."""
    colours = family_colours([run.family for run in comparison.runs])

    def curve_chart(kind: str, key: str, axis: str, factor: float) -> str | None:
        """Return the curves of the runs that recorded `key` in events `kind`; None if none did."""
        curves = [
            training_curve(run.events, kind, key, name, colour, factor=factor)
            for run, name, colour in zip(comparison.runs, comparison.names, colours, strict=True)
        ]
        curves = [curve for curve in curves if curve.steps]
        return draw_curves(curves, t(axis, "tspan")) if curves else None

    figures = [
        figure(t(title), t(f"{title}-note"), content)
        for title, content in (
            ("held-out-accuracy", curve_chart("evaluate", "accuracy", "accuracy-axis", 100)),
            ("held-out-loss", curve_chart("evaluate", "loss", "loss-axis", 1)),
            ("training-loss", curve_chart("step", "loss", "loss-axis", 1)),
        )
        if content is not None
    ]
    if any(run.final is not None for run in comparison.runs):
        figures.insert(0, _interval_figure(comparison, colours))
    if not figures:
        return ""
    return f'<h2>{t("course")}</h2>{with_axis_choice(Html(f"""<div class="panes">{"".join(figures)}</div>"""))}'


def _interval_figure(comparison: RunComparison, colours: Sequence[int]) -> Html:
    """Return a chart of the final accuracies with their intervals."""
    rows = []
    for run, name, colour in zip(comparison.runs, comparison.names, colours, strict=True):
        if run.final is not None:
            low, high = run.final["accuracy_interval"]
            rows.append(Interval(name, 100 * run.final["accuracy"], 100 * low, 100 * high, colour))
    title = t("no-best")
    if comparison.have_same_images:
        title = t("best", run=comparison.names[0], accuracy=f"{rows[0].value:.1f}%")
    return figure(title, t("intervals"), interval_chart(rows, t("accuracy-axis", "tspan")))


def _settings_section(comparison: RunComparison) -> str:
    """Return a table of the settings that differ between runs."""
    if not comparison.differences:
        return ""
    rows = [(key, *map(format_setting, values)) for key, values in comparison.differences.items()]
    return f"<h2>{t('settings')}</h2>{table([t('setting'), *comparison.names], rows, stacks=True)}"
