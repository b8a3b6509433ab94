"""The report of a bias lab: `index.html` and `claims.json`."""

import bisect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.core.files import write_json, write_text
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.evaluation.paired import holm_levels
from vitrail.lab.hardware import describe_machine
from vitrail.lab.published import PUBLISHED, published_t
from vitrail.lab.question import COLOURS, Lab, Question, Score, State, Verdict, percent_interval, points_text
from vitrail.lab.recommendation import Advice, recommend
from vitrail.lab.recommendation import t as recommendation_t
from vitrail.lab.statistics import Estimate
from vitrail.reports.charts import Interval, interval_chart, standalone_svg
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import bilingual_page, figure, headline_numbers, table
from vitrail.reports.translations import translator

MESSAGES = load_messages(__file__)
_COUNTED_STATES: tuple[State, ...] = (
    "supported",
    "contradicted",
    "cannot tell",
    "true",
    "false",
    "not run",
    "reported",
)
"""Verdicts in the order of the headline: about these images, about any images, without a verdict."""
_NONE = Html('<span class="none">-</span>')  # the row of a narrow screen leaves it out
_MAX_FACTOR = 30  # largest multiple of the seeds or test images that is suggested

t = translator(MESSAGES)
"""Return a message of the page in both languages."""


def write_report(
    output: Path, lab: Lab, questions: Mapping[str, Question], *, machines: Mapping[str, int], commands: Sequence[str]
) -> dict[str, Any]:
    """Write `index.html` and `claims.json` and return the content of the latter.

    `machines` holds the number of trials by machine, `commands` all commands that have extended the lab.
    """
    verdicts = {name: list(question.verdicts()) for name, question in questions.items()}
    trained = {
        f"{name} {verdict.claim}": verdict.deciding.p_value
        for name, question_verdicts in verdicts.items()
        for verdict in question_verdicts
        if verdict.kind == "trained" and verdict.deciding is not None
    }
    levels = holm_levels(trained)
    rows, entries = [], []
    for name, question_verdicts in verdicts.items():
        for verdict in question_verdicts:
            level = levels.get(f"{name} {verdict.claim}", 0.05)
            rows.append(_claim_row(questions[name], verdict, level))
            entries.append(_claim_to_json(lab, questions[name], verdict, level))
    figures: dict[str, str] = {}
    sections = []
    for name, question in questions.items():
        question_figures = dict(question.figures())
        figures |= question_figures
        content = f"<h2>{question.t('title')}</h2>{question.t('about', 'p')}{question.html(question_figures)}"
        sections.append(f'<section id="{name}">{content}</section>')
    write_figures(output / "figures", figures)
    scores, score_figures = _score_section(questions)
    figures |= score_figures
    counts = {state: sum(entry["verdict"] == state for entry in entries) for state in _COUNTED_STATES}
    advice = recommend(questions)
    all_commands = escape("\n".join(commands))
    body = (
        f"{_claims_section(rows, counts)}{scores}{''.join(sections)}{_recommendation_section(advice)}"
        f'<section id="protocol"><h2>{t("protocol")}</h2>{_protocol_table(lab, machines)}'
        f"<pre>{all_commands}</pre></section>"
    )
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    title = t("title", data=lab.images.name)
    write_text(output / "index.html", bilingual_page(title, t("subtitle"), body, style=style))
    document = {
        "dataset": lab.images.name,
        "counts": counts,
        "summary": [MESSAGES[name]["en"].format(**_count_fields(counts)) for name in _summary_names(counts)],
        "recommendation": {language: [sentence.text(language) for sentence in advice] for language in ("en", "ko")},
        "claims": entries,
        "numbers": {name: q.numbers() for name, q in questions.items()},
    }
    # NaN, such as the error of a single seed, becomes null.
    document = json.loads(json.dumps(document), parse_constant=lambda _: None)
    write_json(output / "claims.json", document)
    return document


def _claims_section(rows: Sequence[Sequence[object]], counts: Mapping[State, int]) -> str:
    """Return the section with the table of claims."""
    heads = [t(name) for name in ("claim", "verdict", "number", "rates", "published")]
    headline = headline_numbers([(t(f"count {state}"), str(count)) for state, count in counts.items() if count])
    notes = f"{t('about-rates', 'p')}{t('estimator', 'p')}"
    content = f"{headline}{t('about-claims', 'p')}{table(heads, rows, stacks=True)}{notes}"
    return f'<section id="claims"><h2>{t("claims")}</h2>{content}</section>'


def _recommendation_section(advice: Sequence[Advice]) -> str:
    """Return the section with the recommendation. Empty without one."""
    sentences = "".join(f"<li>{sentence.html()}</li>" for sentence in advice[:-1])
    content = f"<ul>{sentences}</ul>{advice[-1].html('p')}" if advice else ""
    return f'<section id="recommendation"><h2>{recommendation_t("title")}</h2>{content}</section>' if content else ""


def _summary_names(counts: Mapping[State, int]) -> list[str]:
    """Return the names of the sentences that count the verdicts: about these images, about any, and without one."""
    groups: dict[str, tuple[State, ...]] = {
        "summary-these": ("supported", "contradicted", "cannot tell"),
        "summary-any": ("true", "false"),
        "summary-not-run": ("not run",),
    }
    return [name for name, states in groups.items() if any(counts[state] for state in states)]


def _count_fields(counts: Mapping[State, int]) -> dict[str, int]:
    return {state.replace(" ", "_"): count for state, count in counts.items()}


def write_figures(folder: Path, figures: Mapping[str, str]) -> None:
    """Write each figure in English as `NAME.svg` and in Korean as `NAME.ko.svg`."""
    folder.mkdir(exist_ok=True)
    for name, svg in figures.items():
        write_text(folder / f"{name}.svg", standalone_svg(svg))
        write_text(folder / f"{name}.ko.svg", standalone_svg(svg, "ko"))


def _score_section(questions: Mapping[str, Question]) -> tuple[str, dict[str, str]]:
    """Return the section that compares families by bias, and its figures. Both are empty without measurements."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for name, question in questions.items():
        for score in question.scores():
            groups.setdefault((name, score.bias), []).append(score)
    panes, figures = "", {}
    for (name, bias), family_scores in groups.items():
        rows = []
        for score in family_scores:
            rows.append(_score_interval(score.family, score.trained, COLOURS.get(score.family, 7)))
            if score.untrained is not None:
                rows.append(_score_interval(f"{score.family} 0", score.untrained, 7))
        svg = interval_chart(rows, t("score", "tspan"), zero=0.0)
        figures[f"bias-{name}-{bias}"] = svg
        panes += figure(questions[name].t(f"score-{bias}"), questions[name].t(f"score-{bias}-note"), svg)
    if not panes:
        return "", {}
    heading = f"<h2>{t('scores')}</h2>{t('about-scores', 'p')}"
    return f'<section id="scores">{heading}<div class="panes">{panes}</div></section>', figures


def _score_interval(name: str, estimate: Estimate, colour: int) -> Interval:
    low, high = percent_interval(estimate)
    return Interval(family_label(name), estimate.value, low / 100, high / 100, colour)


def _claim_row(question: Question, verdict: Verdict, level: float) -> list[object]:
    state = verdict.state(level)
    unit = Html(f" {t('points')}") if verdict.is_share else Html("")
    texts: list[str] = [Html(f"{escape(_number_text(verdict, level))}{unit}")] if verdict.estimate is not None else []
    if verdict.fields:
        texts.append(question.t(f"{verdict.claim}-{verdict.message}", **verdict.fields))
    if (reason := _undecided_reason(question.lab, verdict, level)) is not None:
        texts.append(reason.html("small"))
    rule = question.t(f"{verdict.claim}-rule")
    rule = t("rule", "small", rule=rule) if verdict.kind == "trained" else Html(f"<small>{rule}</small>")
    return [
        Html(f"<b>{escape(verdict.claim)}</b> {question.t(verdict.claim)}<br>{rule}"),
        Html(f'<span class="verdict {state.replace(" ", "-")}">{t(state)}</span>'),
        Html("<br>".join(map(escape, texts)) or "-"),
        _rates_text(verdict) or _NONE,
        published_t(verdict.claim) if verdict.claim in PUBLISHED else _NONE,
    ]


def _rates(verdict: Verdict) -> tuple[float, float] | None:
    """Return the smallest and largest value over all learning rates that may be the best ones."""
    return None if verdict.estimate is None else verdict.estimate.rates


def _rates_text(verdict: Verdict) -> str:
    return " … ".join(map(_number_format(verdict), _rates(verdict) or ()))


def _number_text(verdict: Verdict, level: float) -> str:
    if verdict.estimate is None:
        return "-"
    number_format = _number_format(verdict)
    if math.isnan(verdict.estimate.error):
        return number_format(verdict.estimate.value)
    low, high = verdict.estimate.interval(level)
    return f"{number_format(verdict.estimate.value)} ({number_format(low)} … {number_format(high)})"


def _number_format(verdict: Verdict) -> Callable[[float], str]:
    """Return the function that formats the numbers of a verdict."""
    return points_text if verdict.is_share else "{:+.2f}".format


class Reason(NamedTuple):
    """Message that states why a claim is undecided and how many seeds or images would decide it."""

    name: str
    fields: dict[str, Any]
    """Values of its placeholders. `remedy` is a `Reason` itself."""
    needs: Mapping[str, float] | None = None
    """What would decide the claim: `seeds` in all, further `trainings` and their `cpu_hours`, `image_factor`."""

    def text(self, language: str) -> str:
        """Return the message in one language."""
        return MESSAGES[self.name][language].format(**self._render_fields(lambda reason: reason.text(language)))

    def html(self, tag: str = "span") -> Html:
        """Return the message in both languages."""
        return t(self.name, tag, **self._render_fields(Reason.html))

    def _render_fields(self, render: Callable[["Reason"], str]) -> dict[str, Any]:
        return {name: render(value) if isinstance(value, Reason) else value for name, value in self.fields.items()}


def _undecided_reason(lab: Lab, verdict: Verdict, level: float) -> Reason | None:
    """Return why a claim is undecided. None if it is decided."""
    state = verdict.state(level)
    if state == "not run":
        return Reason("not-run", {})
    if state != "cannot tell" or verdict.estimate is None:
        return None
    if verdict.deciding is None:
        return Reason("one-seed", {})
    low, high = verdict.deciding.interval(level)
    if verdict.doubt == "cut-off" or (verdict.doubt is not None and not low <= 0 <= high):
        ends = verdict.deciding.rates or (math.nan, math.nan)
        return Reason(verdict.doubt, dict(zip(("low", "high"), map(_number_format(verdict), ends), strict=True)))
    if verdict.is_one_sided and verdict.deciding.value <= 0:
        return Reason("beyond-range", {})
    remedy = _with_hours(_remedy(lab, verdict.deciding, level), verdict.deciding)
    if verdict.margin is None:
        return remedy
    low, high = verdict.estimate.interval(level)
    name = "margin-zero" if low <= 0 <= high else "margin-difference"
    return Reason(name, {"margin": f"{100 * verdict.margin:.1f}", "remedy": remedy}, remedy.needs)


def _remedy(lab: Lab, estimate: Estimate, level: float) -> Reason:
    """Return the message on how the interval would exclude zero: more seeds, else more test images, else both."""
    current = min((training.seeds for training in estimate.trainings), default=lab.seeds)
    if seeds := _smallest_sufficient(current, lambda times: estimate.would_exclude_zero(level, seeds=times)):
        return Reason("more-seeds", {"seeds": seeds}, {"seeds": seeds})
    if times := _smallest_sufficient(1, lambda times: estimate.would_exclude_zero(level, images=times)):
        return Reason("more-images", {"times": times}, {"image_factor": times})
    if times := _smallest_sufficient(1, lambda times: estimate.would_exclude_zero(level, seeds=times, images=times)):
        return Reason("more-of-both", {"times": times}, {"seeds": times * current, "image_factor": times})
    has_images = any(part.image_error for part in estimate.parts or (estimate,))
    return Reason("far-too-few" if has_images else "far-too-few-seeds", {"times": _MAX_FACTOR})


def _with_hours(remedy: Reason, estimate: Estimate) -> Reason:
    """Return the message with the processor time of the further seeds, if it was measured."""
    needs = remedy.needs or {}
    seeds = needs.get("seeds", 0)
    missing = {training: seeds - training.seeds for training in estimate.trainings if training.seeds < seeds}
    hours = sum(count * training.seconds for training, count in missing.items()) / 3600
    if not missing or math.isnan(hours):
        return remedy
    trainings = sum(missing.values())
    text = f"{hours:,.1f}" if hours >= 0.1 else f"{max(hours, 0.01):.2f}"
    fields = {"remedy": remedy, "hours": text, "trainings": f"{trainings:,}"}
    return Reason("hours", fields, {**needs, "trainings": trainings, "cpu_hours": hours})


def _smallest_sufficient(current: int, is_enough: Callable[[float], bool]) -> int | None:
    """Return the smallest number above `current` that is enough. None if `_MAX_FACTOR * current` is not enough."""
    counts = range(current + 1, _MAX_FACTOR * current + 1)
    index = bisect.bisect_left(counts, True, key=lambda count: is_enough(count / current))
    return counts[index] if index < len(counts) else None


def _claim_to_json(lab: Lab, question: Question, verdict: Verdict, level: float) -> dict[str, Any]:
    has_interval = verdict.estimate is not None and not math.isnan(verdict.estimate.error)
    reason = _undecided_reason(lab, verdict, level)
    return {
        "id": verdict.claim,
        "question": question.name,
        "kind": verdict.kind,
        "claim": question.messages[verdict.claim]["en"],
        "verdict": verdict.state(level),
        "unit": "share" if verdict.is_share else "number",
        "value": verdict.estimate.value if verdict.estimate is not None else verdict.holds,
        "interval": list(verdict.estimate.interval(level)) if has_interval and verdict.estimate is not None else None,
        "rates": None if (rates := _rates(verdict)) is None else list(rates),
        **({"margin": verdict.margin} if verdict.margin is not None else {}),
        "rule": question.messages[f"{verdict.claim}-rule"]["en"],
        "dataset": lab.images.name,
        **(
            {"result": question.messages[f"{verdict.claim}-{verdict.message}"]["en"].format(**verdict.fields)}
            if verdict.fields
            else {}
        ),
        **({"why": reason.text("en")} if reason is not None else {}),
        **({"needs": dict(reason.needs)} if reason is not None and reason.needs else {}),
        **({"published": PUBLISHED[verdict.claim]["en"]} if verdict.claim in PUBLISHED else {}),
    }


def _protocol_table(lab: Lab, machines: Mapping[str, int]) -> str:
    counts = [f"{len(split):,}" for split in (lab.images.training, lab.images.validation, lab.images.test)]
    rows = [
        (
            t("data"),
            f"{lab.images.name}: {' / '.join(counts)}",
        ),
        (t("models"), ", ".join(lab.images.matched_config(family).name for family in lab.families)),
        (t("seen"), f"{lab.seen:,}"),
        (t("seeds"), lab.seeds),
        (t("machines"), "; ".join(f"{name}: {count:,}" for name, count in machines.items())),
        *((escape(key), value) for key, value in describe_machine().items() if key in ("python", "torch", "vitrail")),
    ]
    return table(("", ""), rows)
