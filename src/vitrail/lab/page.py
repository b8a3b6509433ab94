"""The report of a lab: `index.html` and `claims.json`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.lab.plan import machine
from vitrail.lab.question import Lab, Question, Verdict, points
from vitrail.lab.statistics import holm
from vitrail.pages.page import Html, escape, page, stand_alone, table
from vitrail.pages.words import word as say_in
from vitrail.pages.words import words_beside
from vitrail.storage import write_json, write_text

WORDS = words_beside(__file__)


def word(name: str, tag: str = "span", **fields: Any) -> Html:
    """A sentence of the page itself, in both languages."""
    return say_in(name, tag, words=WORDS, **fields)


def write_report(output: Path, lab: Lab, questions: Mapping[str, Question], *, command: str) -> dict[str, Any]:
    """Write the page and the verdicts; returns the latter."""
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
    (output / "figures").mkdir(exist_ok=True)
    for name, svg in figures.items():
        write_text(output / "figures" / f"{name}.svg", stand_alone(svg))
    heads = [word(name) for name in ("claim", "verdict", "number", "rule")]
    claims = f'<section id="claims"><h2>{word("claims")}</h2>{word("about-claims", "p")}{table(heads, rows)}</section>'
    body = (
        f'<nav><button id="language" type="button">English / 한국어</button></nav>{claims}{"".join(sections)}'
        f'<section id="protocol"><h2>{word("protocol")}</h2>{_protocol(lab)}'
        f"<pre>{escape(command or 'Python')}</pre></section>"
    )
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    write_text(output / "index.html", page(word("title", data=lab.images.name), word("subtitle"), body, script))
    found = {
        "dataset": lab.images.name,
        "claims": document,
        "numbers": {name: q.numbers() for name, q in questions.items()},
    }
    # What one seed cannot tell, an error for example, is null.
    found = json.loads(json.dumps(found), parse_constant=lambda _: None)
    write_json(output / "claims.json", found)
    return found


def _row(question: Question, one: Verdict, level: float) -> list[object]:
    state = one.state(level)
    return [
        Html(f"<b>{escape(one.claim)}</b> {question.word(one.claim)}"),
        Html(f'<span class="verdict {state.replace(" ", "-")}">{word(state)}</span>'),
        _number(one, level),
        question.word(f"{one.claim}-rule"),
    ]


def _number(one: Verdict, level: float) -> str:
    extra = "; ".join(str(value) for value in one.words.values())
    if one.estimate is None or math.isnan(one.estimate.error):
        return extra or "-"
    say = points if one.is_share else "{:+.2f}".format
    low, high = one.estimate.interval(level)
    number = f"{say(one.estimate.value)} ({say(low)} … {say(high)})"
    return f"{number}; {extra}" if extra else number


def _entry(lab: Lab, question: Question, one: Verdict, level: float) -> dict[str, Any]:
    is_known = one.estimate is not None and not math.isnan(one.estimate.error)
    return {
        "id": one.claim,
        "question": question.name,
        "verdict": one.state(level),
        "value": one.estimate.value if one.estimate is not None else one.holds,
        "interval": list(one.estimate.interval(level)) if is_known and one.estimate is not None else None,
        "rule": question.words[f"{one.claim}-rule"]["en"],
        "dataset": lab.images.name,
        **one.words,
    }


def _protocol(lab: Lab) -> str:
    counts = [f"{len(split):,}" for split in (lab.images.training, lab.images.validation, lab.images.test)]
    rows = [
        (
            word("data"),
            f"{lab.images.name}: {' / '.join(counts)}",
        ),
        (word("models"), ", ".join(lab.images.matched(family).name for family in lab.families)),
        (word("seen"), f"{lab.seen:,}"),
        (word("seeds"), lab.seeds),
        *((escape(key), value) for key, value in machine().items()),
    ]
    return table(("", ""), rows)
