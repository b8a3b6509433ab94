"""The page of a bias profile: `index.html` and `profile.json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.core.errors import UsageError
from vitrail.core.files import atomic_folder, write_json, write_text
from vitrail.core.html import Html, escape
from vitrail.data.dataset import Split
from vitrail.lab import perturbations
from vitrail.lab.hardware import machine
from vitrail.lab.page import word as lab_word
from vitrail.lab.page import write_figures
from vitrail.lab.profile import Contrast, Number, Profile, document
from vitrail.reports.colours import sequential
from vitrail.reports.families import colours_of
from vitrail.reports.messages import LANGUAGE_BUTTON, language_script, speak_from, words_beside
from vitrail.reports.page import Line, chart, figure, matrix, page, table

WORDS = words_beside(__file__)
_SHARES = frozenset({"accuracy", "shift", "shuffle", "drop", "low", "high", "nearest", "first", "last", "area"})

word = speak_from(WORDS)
"""A sentence of the page, in both languages."""


def check_profile_output(output: Path) -> None:
    """An output is new, or a profile, which is written anew."""
    if output.is_dir() and any(output.iterdir()) and not (output / "profile.json").is_file():
        raise UsageError(f"Output must be a new folder or one that compare --bundles wrote, got {str(output)!r}.")


def write_profile(
    output: Path, found: Sequence[Profile], pairs: Sequence[Contrast], *, data: str, split: Split, command: str
) -> dict[str, Any]:
    """Write the page and the numbers; returns the latter."""
    figures = dict(_figures(found))
    body = (
        f"<nav>{LANGUAGE_BUTTON}</nav>"
        f'<section id="numbers"><h2>{word("numbers")}</h2>{word("about-numbers", "p")}{_numbers(found)}</section>'
    )
    if pairs:
        body += f'<section id="pairs"><h2>{word("pairs")}</h2>{word("about-pairs", "p")}{_pairs(pairs)}</section>'
    panes = "".join(
        figure(_title(name, found), word(f"{name.partition('-')[0]}-note"), svg) for name, svg in figures.items()
    )
    body += f'<section id="figures"><h2>{word("figures")}</h2><div class="panes">{panes}</div></section>'
    rows = [
        (word("images"), f"{data}, {split.name}: {len(split):,}"),
        *((one.name, one.bundle.model.config.name or one.bundle.model.config.family) for one in found),
        *((escape(key), value) for key, value in machine().items()),
    ]
    body += (
        f'<section id="protocol"><h2>{lab_word("protocol")}</h2>{table(("", ""), rows)}'
        f"<pre>{escape(command or 'Python')}</pre></section>"
    )
    numbers = document(found, pairs, data, split)
    with atomic_folder(output, force=True) as aside:
        write_text(aside / "index.html", page(word("title", data=data), word("subtitle"), body, language_script()))
        write_json(aside / "profile.json", numbers)
        write_figures(aside / "figures", figures)
    return numbers


def _title(name: str, found: Sequence[Profile]) -> Html:
    kind, _, number = name.partition("-")
    return word(f"{kind}-title", bundle=found[int(number or 0)].name)


def _numbers(found: Sequence[Profile]) -> str:
    names = list(dict.fromkeys(name for one in found for name in one.numbers))
    heads = [word("measure"), *(head for one in found for head in (one.name, word("reference")))]
    rows: list[list[object]] = []
    for name in names:
        row: list[object] = [word(name)]
        for one in found:
            number = one.numbers.get(name)
            row += ["-", ""] if number is None else [_text(name, number), _reference(name, number)]
        rows.append(row)
    for name, digits in (("parameters", 0), ("macs", 0), ("milliseconds", 2)):
        rows.append([word(name), *(cell for one in found for cell in (f"{one.cost[name]:,.{digits}f}", ""))])
    return table(heads, rows, frozenset(range(1, len(heads))))


def _text(name: str, number: Number) -> str:
    low, high = number.interval
    scale, digits = (100, 1) if name in _SHARES else (1, 3)
    return f"{_value(name, number.estimate.value)} ({scale * low:.{digits}f} … {scale * high:.{digits}f})"


def _value(name: str, value: float) -> str:
    return f"{100 * value:.1f} %" if name in _SHARES else f"{value:.3f}"


def _reference(name: str, number: Number) -> Html:
    if number.reference is None:
        return Html("")
    return word(f"is-{number.kind}", value=_value(name, number.reference))


def _pairs(pairs: Sequence[Contrast]) -> str:
    rows: list[list[object]] = []
    for pair in pairs:
        low, high = pair.difference.interval(pair.level)
        scale, digits = (100, 1) if pair.measure in _SHARES else (1, 3)
        ends = [f"{scale * value:+.{digits}f}" for value in (pair.difference.value, low, high)]
        said = word("above" if low > 0 else "below", one=pair.one, other=pair.other) if pair.tells else word("unclear")
        rows.append([word(pair.measure), f"{pair.one} - {pair.other}", f"{ends[0]} ({ends[1]} … {ends[2]})", said])
    heads = [word(name) for name in ("measure", "pair", "difference", "said")]
    return table(heads, rows, frozenset({2}))


def _figures(found: Sequence[Profile]) -> list[tuple[str, str]]:
    families = [one.bundle.model.config.family for one in found]
    colours = colours_of(families)
    percent = word("percent", "tspan")
    made = []
    shifts = [_line(one, colour, _shift_points(one)) for one, colour in zip(found, colours, strict=True)]
    made.append(("shifts", chart(shifts, word("shift-axis", "tspan"), percent, dots=True)))
    for kind in perturbations.CURVES:
        lines = [
            _line(one, colour, perturbations.curve(kind, one.asked)) for one, colour in zip(found, colours, strict=True)
        ]
        across = word(f"{kind}-axis", "tspan")
        made.append((f"{kind}s", chart(lines, across, percent, dots=True, log_x=kind == "shuffle")))
    for kind in ("distances", "areas"):
        lines = []
        for one, colour in zip(found, colours, strict=True):
            for state, name in (("trained", one.name), ("untrained", f"{one.name} 0")):
                points = getattr(one, kind).get(state, [])
                if points:
                    own = colour if state == "trained" else 7
                    joined = kind == "areas" and state == "trained"
                    ys = [100 * y for _, y in points]
                    lines.append(Line(name, [x for x, _ in points], ys, own, joined=joined))
        if lines:
            up = word(f"{kind}-axis", "tspan")
            made.append((kind, chart(lines, word("depth-axis", "tspan"), up, dots=kind == "areas")))
    sure = [
        Line(
            one.name,
            [100 * sure for some, sure, _ in one.bins if some],
            [100 * share for some, _, share in one.bins if some],
            colour,
        )
        for one, colour in zip(found, colours, strict=True)
    ]
    sure.append(Line("=", [0, 100], [0, 100], 7))
    made.append(("reliability", chart(sure, word("sure-axis", "tspan"), percent, dots=True)))
    for number, one in enumerate(found):
        if one.similarity is not None:
            layers = [str(layer) for layer in range(len(one.similarity))]
            axis = word("layer-axis", "tspan")
            made.append(
                (f"similarity-{number}", matrix(one.similarity, sequential(one.similarity), layers, layers, axis, axis))
            )
    return made


def _shift_points(one: Profile) -> list[tuple[float, str]]:
    shifts = [(float(name.partition(" ")[2]), name) for name in one.asked if name.startswith("shift ")]
    return [(0.0, ""), *sorted(shifts)]


def _line(one: Profile, colour: int, points: Sequence[tuple[float, str]]) -> Line:
    some = [one.asked[name] for _, name in points]
    bars = [(100 * low, 100 * high) for low, high in (number.interval for number in some)]
    return Line(one.name, [x for x, _ in points], [100 * number.estimate.value for number in some], colour, bars=bars)
