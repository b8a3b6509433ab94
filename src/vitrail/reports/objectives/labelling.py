"""The final evaluation of a model of several labels in the report."""

from vitrail.core.message_files import load_messages
from vitrail.reports.charts import Interval, interval_chart
from vitrail.reports.objectives.classification import split_label
from vitrail.reports.page_kit import figure, table
from vitrail.reports.translations import translator
from vitrail.training.objectives.judgement import Labelling

_SHOWN = 30  # labels in the figure
_LISTED = 1000

t = translator(load_messages(__file__))
"""A sentence of the final evaluation, in both languages."""


def summary(judgement: Labelling) -> list[tuple[str, str]]:
    """The mean average precision."""
    scores = judgement.full
    precision = "-" if scores["map"] is None else f"{scores['map']:.1%}"
    return [(t("map-on", count=scores["count"], split=split_label(judgement.split)), precision)]


def sections(judgement: Labelling) -> str:
    """The average precision of each label, worst first."""
    scores = judgement.full
    known = sorted((row for row in scores["per_class"] if row["count"]), key=lambda row: row["average_precision"])
    if not known:
        return ""
    drawn = [
        Interval(row["label"], *[100 * row["average_precision"]] * 3)  # no interval is known
        for row in known[:_SHOWN]
    ]
    title = t(
        "from-to" if len(known) > 1 else "one",
        low=f"{known[0]['average_precision']:.1%}",
        worst=known[0]["label"],
        high=f"{known[-1]['average_precision']:.1%}",
        best=known[-1]["label"],
    )
    note = t("note", shown=len(drawn), classes=len(known), count=scores["count"])
    picture = figure(title, note, interval_chart(drawn, t("axis", "tspan"), ends=(-2, 102)))
    rows = [[r["label"], f"{r['count']:,}", f"{r['average_precision']:.1%}"] for r in known[:_LISTED]]
    listed = table([t(name) for name in ("label", "images", "ap")], rows, frozenset({1, 2}))
    every = f"<details><summary>{t('list')}</summary>{listed}</details>"
    return f'<h2>{t("title")}</h2><div class="panes">{picture}</div>{every}'
