"""The report of a lab: `index.html` and `claims.json`."""

import bisect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.core.files import write_json, write_text
from vitrail.core.html import Html, escape
from vitrail.evaluation.paired import holm
from vitrail.lab.hardware import machine
from vitrail.lab.question import COLOURS, Lab, Question, Score, Verdict, bar, points
from vitrail.lab.statistics import Estimate
from vitrail.reports.families import in_figure
from vitrail.reports.messages import LANGUAGE_BUTTON, language_script, speak_from, words_beside
from vitrail.reports.page import Range, figure, numbers, page, ranges, stand_alone, table

WORDS = words_beside(__file__)
_SUMS = {
    "holds": ("true", "supported"),
    "fails": ("false", "contradicted"),
    "open": ("cannot tell",),
    "reported": ("reported",),
}
_MOST_TIMES = 30  # times as many seeds or test images that anybody would use

word = speak_from(WORDS)
"""A sentence of the page itself, in both languages."""


def write_report(
    output: Path, lab: Lab, questions: Mapping[str, Question], *, machines: Mapping[str, int], commands: Sequence[str]
) -> dict[str, Any]:
    """Write the page and the verdicts; returns the latter. `machines` has the number of cells run on each, `commands`
    every command that the lab has grown by."""
    verdicts = {name: list(question.verdicts()) for name, question in questions.items()}
    trained = {
        f"{name} {one.claim}": one.deciding.p_value
        for name, some in verdicts.items()
        for one in some
        if one.kind == "trained" and one.deciding is not None
    }
    levels = holm(trained)
    rows, document = [], []
    for name, some in verdicts.items():
        for one in some:
            level = levels.get(f"{name} {one.claim}", 0.05)
            rows.append(_row(questions[name], one, level))
            document.append(_entry(lab, questions[name], one, level))
    figures: dict[str, str] = {}
    sections = []
    for name, question in questions.items():
        own = dict(question.figures())
        figures |= own
        content = f"<h2>{question.word('title')}</h2>{question.word('about', 'p')}{question.html(own)}"
        sections.append(f'<section id="{name}">{content}</section>')
    write_figures(output / "figures", figures)
    scores, score_figures = _scores(questions)
    figures |= score_figures
    heads = [word(name) for name in ("claim", "verdict", "number", "rule")]
    states = [one["verdict"] for one in document]
    counted = numbers(
        [(word(f"count-{name}"), str(sum(state in some for state in states))) for name, some in _SUMS.items()]
    )
    listed = f"{counted}{word('about-claims', 'p')}{table(heads, rows)}"
    claims = f'<section id="claims"><h2>{word("claims")}</h2>{listed}</section>'
    all_commands = escape("\n".join(commands))
    body = (
        f"<nav>{LANGUAGE_BUTTON}</nav>{claims}{scores}{''.join(sections)}"
        f'<section id="protocol"><h2>{word("protocol")}</h2>{_protocol(lab, machines)}'
        f"<pre>{all_commands}</pre></section>"
    )
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    title = word("title", data=lab.images.name)
    write_text(output / "index.html", page(title, word("subtitle"), body, language_script(), style=style))
    found = {
        "dataset": lab.images.name,
        "claims": document,
        "numbers": {name: q.numbers() for name, q in questions.items()},
    }
    # What one seed cannot tell, an error for example, is null.
    found = json.loads(json.dumps(found), parse_constant=lambda _: None)
    write_json(output / "claims.json", found)
    return found


def write_figures(folder: Path, figures: Mapping[str, str]) -> None:
    """Write each figure as a file of its own in English, `NAME.svg`, and in Korean, `NAME.ko.svg`."""
    folder.mkdir(exist_ok=True)
    for name, svg in figures.items():
        write_text(folder / f"{name}.svg", stand_alone(svg))
        write_text(folder / f"{name}.ko.svg", stand_alone(svg, "ko"))


def _scores(questions: Mapping[str, Question]) -> tuple[str, dict[str, str]]:
    """Families by bias, as a section and its figures; empty if nothing was measured."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for name, question in questions.items():
        for score in question.scores():
            groups.setdefault((name, score.bias), []).append(score)
    panes, figures = "", {}
    for (name, bias), some in groups.items():
        rows = []
        for score in some:
            rows.append(_score_row(score.family, score.trained, COLOURS.get(score.family, 7)))
            if score.untrained is not None:
                rows.append(_score_row(f"{score.family} 0", score.untrained, 7))
        svg = ranges(rows, word("score", "tspan"), zero=0.0)
        figures[f"bias-{name}-{bias}"] = svg
        panes += figure(questions[name].word(f"score-{bias}"), questions[name].word(f"score-{bias}-note"), svg)
    if not panes:
        return "", {}
    heading = f"<h2>{word('scores')}</h2>{word('about-scores', 'p')}"
    return f'<section id="scores">{heading}<div class="panes">{panes}</div></section>', figures


def _score_row(name: str, one: Estimate, colour: int) -> Range:
    low, high = bar(one)
    return Range(in_figure(name), one.value, low / 100, high / 100, colour)


def _row(question: Question, one: Verdict, level: float) -> list[object]:
    state = one.state(level)
    unit = Html(f" {word('points')}") if one.is_share else Html("")
    said: list[str] = [Html(f"{escape(_number(one, level))}{unit}")] if one.estimate is not None else []
    if one.words:
        said.append(question.word(f"{one.claim}-{one.sentence}", **one.words))
    if (why := _why(question.lab, one, level)) is not None:
        said.append(why.html("small"))
    return [
        Html(f"<b>{escape(one.claim)}</b> {question.word(one.claim)}"),
        Html(f'<span class="verdict {state.replace(" ", "-")}">{word(state)}</span>'),
        Html("<br>".join(map(escape, said)) or "-"),
        question.word(f"{one.claim}-rule"),
    ]


def _number(one: Verdict, level: float) -> str:
    if one.estimate is None:
        return "-"
    say = _say(one)
    if math.isnan(one.estimate.error):
        return say(one.estimate.value)
    low, high = one.estimate.interval(level)
    return f"{say(one.estimate.value)} ({say(low)} … {say(high)})"


def _say(one: Verdict) -> Callable[[float], str]:
    """How the numbers of a verdict are written."""
    return points if one.is_share else "{:+.2f}".format


class Why(NamedTuple):
    """A sentence of the page on why a claim cannot be decided, and what would decide it."""

    name: str
    fields: dict[str, Any]
    """What fills it in; `remedy` is such a sentence itself."""

    def text(self, language: str) -> str:
        """The sentence in one language."""
        return WORDS[self.name][language].format(**self._rendered(lambda why: why.text(language)))

    def html(self, tag: str = "span") -> Html:
        """The sentence in both languages."""
        return word(self.name, tag, **self._rendered(Why.html))

    def _rendered(self, render: Callable[["Why"], str]) -> dict[str, Any]:
        return {name: render(value) if isinstance(value, Why) else value for name, value in self.fields.items()}


def _why(lab: Lab, one: Verdict, level: float) -> Why | None:
    """Why a claim could not be decided; None if it was."""
    if one.state(level) != "cannot tell":
        return None
    if one.kind != "trained" or one.estimate is None:
        return Why("not-run", {})
    if one.deciding is None:
        return Why("one-seed", {})
    low, high = one.deciding.interval(level)
    if one.doubt == "cut-off" or (one.doubt is not None and not low <= 0 <= high):
        return Why(one.doubt, {"halves": " / ".join(map(_say(one), one.estimate.halves))})
    if one.is_one_sided and one.deciding.value <= 0:
        return Why("beyond-range", {})
    remedy = _remedy(lab, one.deciding, level)
    if one.margin is None:
        return remedy
    low, high = one.estimate.interval(level)
    name = "margin-zero" if low <= 0 <= high else "margin-difference"
    return Why(name, {"margin": f"{100 * one.margin:.1f}", "remedy": remedy})


def _remedy(lab: Lab, estimate: Estimate, level: float) -> Why:
    """What would tell an estimate from zero: more seeds, else more test images, else more of both."""
    if seeds := _fewest(lab.seeds, lambda times: estimate.would_tell(level, seeds=times)):
        return Why("more-seeds", {"seeds": seeds})
    if times := _fewest(1, lambda times: estimate.would_tell(level, images=times)):
        return Why("more-images", {"times": times})
    if times := _fewest(1, lambda times: estimate.would_tell(level, seeds=times, images=times)):
        return Why("more-of-both", {"times": times})
    has_images = any(part.lasting for part in estimate.among or (estimate,))
    return Why("far-too-few" if has_images else "far-too-few-seeds", {"times": _MOST_TIMES})


def _fewest(now: int, tells: Callable[[float], bool]) -> int | None:
    """The smallest number that would tell, of which there are `now`; None if not even the most that anybody would
    use."""
    counts = range(now + 1, _MOST_TIMES * now + 1)
    at = bisect.bisect_left(counts, True, key=lambda count: tells(count / now))
    return counts[at] if at < len(counts) else None


def _entry(lab: Lab, question: Question, one: Verdict, level: float) -> dict[str, Any]:
    is_known = one.estimate is not None and not math.isnan(one.estimate.error)
    return {
        "id": one.claim,
        "question": question.name,
        "claim": question.words[one.claim]["en"],
        "verdict": one.state(level),
        "value": one.estimate.value if one.estimate is not None else one.holds,
        "interval": list(one.estimate.interval(level)) if is_known and one.estimate is not None else None,
        **({"margin": one.margin} if one.margin is not None else {}),
        "rule": question.words[f"{one.claim}-rule"]["en"],
        "dataset": lab.images.name,
        **({"result": question.words[f"{one.claim}-{one.sentence}"]["en"].format(**one.words)} if one.words else {}),
        **({"why": why.text("en")} if (why := _why(lab, one, level)) is not None else {}),
    }


def _protocol(lab: Lab, machines: Mapping[str, int]) -> str:
    counts = [f"{len(split):,}" for split in (lab.images.training, lab.images.validation, lab.images.test)]
    rows = [
        (
            word("data"),
            f"{lab.images.name}: {' / '.join(counts)}",
        ),
        (word("models"), ", ".join(lab.images.matched(family).name for family in lab.families)),
        (word("seen"), f"{lab.seen:,}"),
        (word("seeds"), lab.seeds),
        (word("machines"), "; ".join(f"{name}: {count:,}" for name, count in machines.items())),
        *((escape(key), value) for key, value in machine().items() if key in ("python", "torch", "vitrail")),
    ]
    return table(("", ""), rows)
