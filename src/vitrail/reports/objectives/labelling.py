"""Show the final evaluation of a multi-label model in the run report."""

from vitrail.core.message_files import load_messages
from vitrail.evaluation.metrics import worst_first
from vitrail.reports.charts import Interval, interval_chart
from vitrail.reports.objectives.classification import split_label
from vitrail.reports.page_kit import figure, table
from vitrail.reports.translations import translator
from vitrail.training.objectives.judgement import Labelling

_MAX_CHART_ROWS = 30
_MAX_TABLE_ROWS = 1000

t = translator(load_messages(__file__))
"""Return a message of the final evaluation in both languages."""


def summary(judgement: Labelling) -> list[tuple[str, str]]:
    """Return the mean average precision."""
    scores = judgement.all_scores
    precision = "-" if scores["map"] is None else f"{scores['map']:.1%}"
    return [(t("map-on", count=scores["count"], split=split_label(judgement.split)), precision)]


def sections(judgement: Labelling) -> str:
    """Return a chart and a table of the average precision of each label, worst first."""
    scores = judgement.all_scores
    per_label = worst_first(scores["per_class"], "average_precision")
    if not per_label:
        return ""
    chart_rows = []
    for row in per_label[:_MAX_CHART_ROWS]:
        percentage = 100 * row["average_precision"]  # a point: no interval of an average precision is computed
        chart_rows.append(Interval(row["label"], percentage, low=percentage, high=percentage))
    title = t(
        "from-to" if len(per_label) > 1 else "one",
        low=f"{per_label[0]['average_precision']:.1%}",
        worst=per_label[0]["label"],
        high=f"{per_label[-1]['average_precision']:.1%}",
        best=per_label[-1]["label"],
    )
    note = t("note", shown=len(chart_rows), classes=len(per_label), count=scores["count"])
    chart = figure(title, note, interval_chart(chart_rows, t("axis", "tspan"), ends=(-2, 102)))
    rows = [
        [row["label"], f"{row['count']:,}", f"{row['average_precision']:.1%}"] for row in per_label[:_MAX_TABLE_ROWS]
    ]
    listing = table([t(name) for name in ("label", "images", "ap")], rows, numeric=frozenset({1, 2}))
    details = f"<details><summary>{t('list')}</summary>{listing}</details>"
    return f'<h2>{t("title")}</h2><div class="panes">{chart}</div>{details}'
