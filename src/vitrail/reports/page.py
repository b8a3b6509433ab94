"""Building blocks of HTML pages. All untrusted text goes through `escape`."""

import base64
import functools
import hashlib
import html
import itertools
import math
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import NamedTuple

import numpy as np

from vitrail.core.html import Html, escape
from vitrail.data.thumbnail import image_data_url

WIDTH, HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 30, 40
_COLUMN = 4  # width of what the pointer finds in a chart of lines
_ROW = 15  # least height of a row with a name
_NAME = 16  # least distance of the names of lines
_DASHES = ("", ' stroke-dasharray="7 3"', ' stroke-dasharray="2 3"')  # of lines with the colours 0 to 7, 8 to 15, ...


def page(title: str, subtitle: str, body: str, script: str = "", *, style: str = "", refresh: int = 0) -> str:
    """A complete document, with `style` after the common stylesheet; the heading may be markup. The content security
    policy allows only the given script, by its hash. A browser loads it again every `refresh` seconds.
    """
    runs = ""
    if script:
        runs = f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy"'
        f" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'{runs}\">"
        + (f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "")
        + f"<title>{_plain(title)}</title><style>{_style()}{style}</style></head><body>\n"
        f'<header><h1>{escape(title)}</h1><p class="quiet">{escape(subtitle)}</p></header>\n<main>{body}</main>\n'
        + (f"<script>{script}</script>" if script else "")
        + "</body></html>\n"
    )


@functools.cache
def _style() -> str:
    return resources.files("vitrail.reports").joinpath("style.css").read_text(encoding="utf-8")


def _rules_of_pointer() -> str:
    """The rules by which a figure answers the pointer, which a figure in a file of its own needs too."""
    return _style().partition("/* pointer */")[2].partition("/* end */")[0].strip()


def in_language(text: str, language: str) -> str:
    """Plain text; of markup, the part in this language."""
    if not isinstance(text, Html):
        return text
    other = "ko" if language == "en" else "en"
    return html.unescape(re.sub(r"<[^>]*>", "", re.sub(rf'<(\w+) class="{other}".*?</\1>', "", text)))


def _plain(text: str, language: str = "en") -> Html:
    """The same for an attribute or a title."""
    return Html(html.escape(in_language(text, language), quote=True))


def _breadth(text: str) -> float:
    """About how wide a text is in a figure, in the wider of its languages; Korean characters are square."""
    return max(
        sum(13.0 if ord(letter) > 0x10FF else 7.4 for letter in in_language(text, language))
        for language in ("en", "ko")
    )


def _cut(text: str, room: float) -> str:
    """As much of a name as has room."""
    if isinstance(text, Html) or _breadth(text) <= room:
        return text
    kept = next(end for end in range(len(text) - 1, -1, -1) if _breadth(text[:end]) + 10 <= room or not end)
    return f"{text[:kept].rstrip()}…"


def _spoken(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ends_text(low: float, high: float) -> str:
    """An interval; nothing where it is not known, which a point stands for."""
    return f"({_spoken(low)} … {_spoken(high)})" if low < high else ""


def _titled(text: str) -> str:
    """What a browser shows when the pointer rests on an element of a figure."""
    return f"<title>{'&#10;'.join(_plain(text).splitlines())}</title>"


def numbers(pairs: Sequence[tuple[str, str]]) -> Html:
    """A row of large numbers with captions."""
    cells = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in pairs)
    return Html(f'<div class="numbers">{cells}</div>')


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    numeric: frozenset[int] = frozenset(),
    *,
    stacks: bool = False,
) -> Html:
    """A table; `numeric` columns are right-aligned. If it `stacks`, a narrow screen shows each row as a list, below its
    first cell, so that no column is out of sight."""

    def cells(tag: str, row: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=number' if index in numeric else ''}>"
            f"{named(index) if tag == 'td' else ''}{escape(cell)}</{tag}>"
            for index, cell in enumerate(row)
        )

    def named(column: int) -> str:
        return f'<span class="column-name">{escape(headers[column])}</span>' if stacks and column else ""

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    kind = ' class="stacks"' if stacks else ""
    head = f"<thead><tr>{cells('th', headers)}</tr></thead>"
    return Html(f'<div class="scroll"><table{kind}>{head}<tbody>{body}</tbody></table></div>')


def figure(title: str, note: str, content: str) -> Html:
    """A figure with title and note."""
    return Html(f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>{content}</figure>")


def image(pixels_HWC: np.ndarray, text: str) -> str:
    """Pixels as an inline image."""
    return f'<img src="{image_data_url(pixels_HWC)}" alt="{escape(text)}">'


NOTHING = (
    '<p class="quiet"><span class="en" lang="en">Nothing was recorded.</span>'
    '<span class="ko" lang="ko">기록이 없습니다.</span></p>'
)


class Line(NamedTuple):
    """A curve with its name."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    joined: bool = True
    """Whether points are connected; otherwise a scatter plot."""
    bars: Sequence[tuple[float, float]] = ()
    """The interval of each point, drawn as a vertical bar."""


class _Frame(NamedTuple):
    """The axes of a line chart and its size."""

    x_ends: tuple[float, float]
    """Ends of the x axis; of a logarithmic one, as powers of ten."""
    y_ends: tuple[float, float]
    right: float
    """Width at the right, for the names of lines."""
    tall: float
    log: bool
    log_x: bool

    @property
    def across(self) -> float:
        """Width between the axes."""
        return WIDTH - _LEFT - self.right

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is drawn."""
        x, y = math.log10(x) if self.log_x else x, math.log10(y) if self.log else y
        down = self.tall - _TOP - _BOTTOM
        return (
            _LEFT + self.across * (x - self.x_ends[0]) / (self.x_ends[1] - self.x_ends[0]),
            _TOP + down * (1 - (y - self.y_ends[0]) / (self.y_ends[1] - self.y_ends[0])),
        )


_Points = Sequence[tuple[float, float]]


def chart(
    lines: Sequence[Line], x_label: str, y_label: str, *, log: bool = False, log_x: bool = False, dots: bool = False
) -> str:
    """A line chart; each line is named beside its end, or at the right if it ends earlier than others."""
    curves: list[tuple[Line, _Points]] = [
        (line, [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y) and (y > 0 or not log)])
        for line in lines
    ]
    every = [point for _, points in curves for point in points]
    if not every:
        return NOTHING
    frame = _frame(curves, every, log=log, log_x=log_x)
    low, high = frame.x_ends
    scale_x = math.log10 if log_x else float
    curves = [
        (line, _visible(points, lambda x: WIDTH * (scale_x(x) - low) / (high - low)) if line.joined else points)
        for line, points in curves
    ]
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {frame.tall}" role="img" aria-label="{_plain(y_label)} over {_plain(x_label)}">',
        *_axes(frame, every, x_label, y_label),
    ]
    curves = [(line, points) for line, points in curves if points]
    for line, points in curves:
        parts += _curve(frame, line, points)
    parts += _names_of_lines(frame, curves)
    if not dots:
        parts += _columns([curve for curve in curves if curve[0].joined], frame.place, frame.tall, x_label, y_label)
    for line, points in curves:
        if dots or not line.joined or len(points) == 1:
            parts += _dots(frame, line, points)
    return "".join(parts) + "</svg>"


def _frame(curves: Sequence[tuple[Line, _Points]], every: _Points, *, log: bool, log_x: bool) -> _Frame:
    """The axes for these points and their bars. Names stand beside the ends of their lines; what they do not need
    belongs to the lines."""
    scale, scale_x = (math.log10 if log else float), (math.log10 if log_x else float)
    bars = [y for line, _ in curves for bar in line.bars for y in bar if math.isfinite(y) and (y > 0 or not log)]
    widest = max(1.1 * _breadth(line.name) + 8 if line.name else 0 for line, _ in curves)
    named = sum(bool(line.name and points) for line, points in curves)
    return _Frame(
        x_ends=_ends([scale_x(x) for x, _ in every], margin=0.0),
        y_ends=_ends([scale(y) for y in [y for _, y in every] + bars], margin=0.05),
        right=max(_RIGHT, min(widest, 0.4 * WIDTH)),
        tall=max(HEIGHT, _TOP + _BOTTOM + _NAME * named),
        log=log,
        log_x=log_x,
    )


def _axes(frame: _Frame, every: _Points, x_label: str, y_label: str) -> list[str]:
    """Grid lines, numbers and labels of both axes."""
    parts = []
    y_ticks = _ticks(*frame.y_ends)
    digits = max(0, -math.floor(math.log10(y_ticks[1] - y_ticks[0]) + 1e-9)) if len(y_ticks) > 1 else 3
    for tick in y_ticks:
        value = 10**tick if frame.log else tick
        _, y = frame.place(every[0][0], value)
        is_short = frame.log or len(y_ticks) == 1 or digits > 6 or abs(value) >= 1e5
        label = f"{value:.3g}" if is_short else f"{value:.{digits}f}"
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="soft" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<text class="soft unit" x="4" y="14">{escape(y_label)}</text>')
    is_integer = all(float(x).is_integer() for x, _ in every)
    for tick in _decades(*frame.x_ends) if frame.log_x else _ticks(*frame.x_ends, integers=is_integer):
        x, _ = frame.place(tick, every[0][1])
        parts.append(f'<text class="soft" x="{x:.1f}" y="{frame.tall - 22}" text-anchor="middle">{tick:,.6g}</text>')
    middle = f'x="{_LEFT + frame.across / 2:.1f}" y="{frame.tall - 5}"'
    parts.append(f'<text class="soft" {middle} text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _colour(line: Line) -> str:
    return f"var(--c{line.colour % 8})"


def _curve(frame: _Frame, line: Line, points: _Points) -> list[str]:
    """A line and its vertical bars."""
    parts = []
    if line.joined:
        dashed = _DASHES[line.colour // 8 % len(_DASHES)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (frame.place(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(line)}" stroke-width="1.6"{dashed}/>')
    for x, bar in zip(line.xs, line.bars, strict=False):
        (at, low), (_, high) = frame.place(x, bar[0]), frame.place(x, bar[1])
        ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}"'
        parts.append(f'<line {ends} stroke="{_colour(line)}" stroke-width="1.2"/>')
    return parts


def _dots(frame: _Frame, line: Line, points: _Points) -> list[str]:
    """A circle for each point, with its numbers for the pointer."""
    parts, bars = [], dict(zip(line.xs, line.bars, strict=False))
    for x, y in points:
        across, down = frame.place(x, y)
        interval = f" {_ends_text(*bars[x])}".rstrip() if x in bars else ""
        name = Html(f"{escape(line.name)}\n") if line.name else ""
        title = _titled(Html(f"{name}{_spoken(x)}: {_spoken(y)}{interval}"))
        parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="2.6" fill="{_colour(line)}">{title}</circle>')
    return parts


def _names_of_lines(frame: _Frame, curves: Sequence[tuple[Line, _Points]]) -> list[str]:
    """The names of lines beside their ends, moved apart where they would overlap."""
    parts, names = [], []
    for line, points in curves:
        if line.name:
            x, y = frame.place(*points[-1])
            text = f'style="fill:{_colour(line)}">{escape(_cut(line.name, (frame.right - 7.9) / 1.1))}</text>'
            names.append((y, x, WIDTH - frame.right if line.joined else x, text))
    names.sort(key=lambda name: name[0])
    heights = _apart([name[0] for name in names], frame.tall - _BOTTOM)
    for height, (y, x, beside, text) in zip(heights, names, strict=True):
        if beside - x > _NAME:
            ends = f'x1="{x + 4:.1f}" x2="{beside + 2:.1f}" y1="{y:.1f}" y2="{height:.1f}"'
            parts.append(f'<line class="axis" {ends} stroke-dasharray="2 2"/>')
        parts.append(f'<text x="{beside + 5:.1f}" y="{height + 4:.1f}" {text}')
    return parts


def _visible(points: Sequence[tuple[float, float]], column: Callable[[float], float]) -> list[tuple[float, float]]:
    """Of many points in one column of a chart, those that can be seen: first, lowest, highest, last."""
    if len(points) <= 2 * WIDTH:
        return list(points)
    groups = (list(some) for _, some in itertools.groupby(points, key=lambda point: round(column(point[0]))))
    return [
        some[at]
        for some in groups
        for heights in [[y for _, y in some]]
        for at in sorted({0, heights.index(min(heights)), heights.index(max(heights)), len(some) - 1})
    ]


def _columns(
    lines: Sequence[tuple[Line, Sequence[tuple[float, float]]]],
    place: Callable[[float, float], tuple[float, float]],
    tall: float,
    x_label: str,
    y_label: str,
) -> list[str]:
    """What the pointer finds in a chart of lines: in each column, the values of all lines there."""
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for number, (_, some) in enumerate(lines):
        for x, y in some:
            found.setdefault(round(place(x, y)[0] / _COLUMN), {})[number] = (x, y)
    if not found:
        return []
    columns = [found[key] for key in sorted(found)]
    middles = [place(*max(column.values()))[0] for column in columns]
    borders = [(a + b) / 2 for a, b in itertools.pairwise(middles)]
    free = WIDTH - _breadth(y_label) - 16
    parts = []
    for column, middle, low, high in zip(
        columns, middles, [_LEFT - 4, *borders], [*borders, middles[-1] + 4], strict=True
    ):
        x = max(column.values())[0]
        values = [Html(f"{escape(lines[number][0].name or y_label)} {_spoken(y)}") for number, (_, y) in column.items()]
        said = [Html(f"{escape(x_label)} {_spoken(x)}"), *values]
        area = f"M{low:.1f} {_TOP}H{high:.1f}V{tall - _BOTTOM}H{low:.1f}z"
        texts = {language: "&#10;".join(_plain(one, language) for one in said) for language in ("en", "ko")}
        if texts["en"] == texts["ko"]:
            areas = f'<path class="area" d="{area}"><title>{texts["en"]}</title></path>'
        else:
            areas = "".join(
                f'<path class="area {language}" d="{area}"><title>{text}</title></path>'
                for language, text in texts.items()
            )
        line = Html(" · ".join(said))
        read = f'<text x="{WIDTH - 4}" y="14" text-anchor="end">{line}</text>' if _breadth(line) <= free else ""
        points = "".join(
            f'<circle cx="{at:.1f}" cy="{height:.1f}" r="3" fill="var(--c{lines[number][0].colour % 8})"/>'
            for number, spot in column.items()
            for at, height in [place(*spot)]
        )
        rule = f'<path class="axis" d="M{middle:.1f} {_TOP}V{tall - _BOTTOM}"/>'
        parts.append(f'<g class="column">{areas}<g>{rule}{points}{read}</g></g>')
    return parts


def _apart(heights: Sequence[float], lowest: float, gap: float = _NAME) -> list[float]:
    """Ascending heights moved as little as needed for names to stand below each other, none below `lowest` if it can
    be."""
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + gap) if found else height)
    for at in reversed(range(len(found))):
        found[at] = min(found[at], lowest if at == len(found) - 1 else found[at + 1] - gap)
    return found


class Range(NamedTuple):
    """A number with its interval and its name."""

    name: str
    value: float
    low: float
    high: float
    colour: int = 0


def ranges(
    rows: Sequence[Range], label: str, *, ends: tuple[float, float] | None = None, zero: float | None = None
) -> str:
    """Numbers below each other with their intervals, named at the left. `ends` are those of the axis, to make several
    figures alike; a line marks `zero`."""
    if not rows:
        return NOTHING
    right = 24
    left = min(max(_LEFT, *(1.1 * _breadth(row.name) + 12 for row in rows)), 0.4 * WIDTH)
    x_ends = ends or _ends([x for row in rows for x in row[1:4]] + ([] if zero is None else [zero]), margin=0.05)
    across, step = WIDTH - left - right, max((HEIGHT - _TOP - _BOTTOM) / len(rows), _ROW)
    height = _TOP + step * len(rows) + _BOTTOM

    def place(x: float) -> float:
        return left + across * (x - x_ends[0]) / (x_ends[1] - x_ends[0])

    low, high = _TOP - 8, height - _BOTTOM
    parts = [f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{_plain(label)}">']
    for tick in _ticks(*x_ends):
        x = f"{place(tick):.1f}"
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{low}" y2="{high:g}"/>')
        parts.append(f'<text class="soft" x="{x}" y="{height - 22:g}" text-anchor="middle">{tick:.6g}</text>')
    if zero is not None:
        x = f"{place(zero):.1f}"
        parts.append(f'<line x1="{x}" x2="{x}" y1="{low}" y2="{high:g}" style="stroke:var(--lead)"/>')
    for number, row in enumerate(rows):
        y, colour = _TOP + (number + 0.5) * step, f"var(--c{row.colour % 8})"
        interval = f"{_spoken(row.value)} {_ends_text(row.low, row.high)}".rstrip()
        title = _titled(Html(f"{escape(row.name)}\n{interval}"))
        parts.append(f'<g class="row">{title}')
        parts.append(f'<path class="area" d="M0 {y - step / 2:.1f}H{WIDTH}v{step:.1f}H0z"/>')
        at = f'x1="{place(row.low):.1f}" x2="{place(row.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {at} stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<circle cx="{place(row.value):.1f}" cy="{y:.1f}" r="3.4" fill="{colour}"/>')
        name = f'x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f"<text {name}>{escape(_cut(row.name, (left - 11.9) / 1.1))}</text></g>")
    middle = f'x="{left + across / 2:.1f}" y="{height - 5:g}"'
    parts.append(f'<text class="soft" {middle} text-anchor="middle">{escape(label)}</text>')
    return "".join(parts) + "</svg>"


def matrix(
    values: np.ndarray, colours: np.ndarray, rows: Sequence[str], columns: Sequence[str], x_label: str, y_label: str
) -> str:
    """Values (rows, columns) in their colours (rows, columns, 3) as a grid of squares, first row at the bottom, with
    labels on both axes."""
    side = min((WIDTH - _LEFT - _RIGHT) / len(columns), (HEIGHT - _TOP - _BOTTOM) / len(rows))
    top, high = _TOP, side * len(rows)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_plain(y_label)} over {_plain(x_label)}">']
    for row, some in enumerate(colours):
        y = top + high - (row + 1) * side
        for column, (red, green, blue) in enumerate(some):
            parts.append(
                f'<rect x="{_LEFT + column * side:.1f}" y="{y:.1f}" width="{side + 0.2:.1f}" height="{side + 0.2:.1f}"'
                f' fill="rgb({red},{green},{blue})">'
                f"{_titled(f'{rows[row]} · {columns[column]}: {_spoken(values[row, column])}')}</rect>"
            )
    every = max(1, round(16 / side))
    for row in range(0, len(rows), every):
        y = top + high - (row + 0.5) * side + 4
        parts.append(f'<text class="soft" x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">{escape(rows[row])}</text>')
    for column in range(0, len(columns), every):
        at = f'x="{_LEFT + (column + 0.5) * side:.1f}" y="{top + high + 15:.1f}"'
        parts.append(f'<text class="soft" {at} text-anchor="middle">{escape(columns[column])}</text>')
    parts.append(f'<text class="soft" x="4" y="14">{escape(y_label)}</text>')
    parts.append(f'<text class="soft" x="{_LEFT}" y="{top + high + 32:.1f}">{escape(x_label)}</text>')
    return "".join(parts) + "</svg>"


def stand_alone(svg: str, language: str = "en") -> str:
    """A chart as a separate SVG file, in one language and in the light colours."""
    colours = dict(reversed(re.findall(r"(--\w+): (#\w+)", _style())))  # the first of each name: the light ones
    svg = re.sub(r"var\((--\w+)\)", lambda found: colours[found[1]], svg)
    style = (
        f"svg {{ background: {colours['--panel']}; }} text {{ fill: {colours['--ink']}; font: 13px sans-serif; }}"
        f" text.soft {{ fill: {colours['--lead']}; }} .axis {{ stroke: {colours['--line']}; }}"
        f" {_rules_of_pointer()}"
    )
    other = "ko" if language == "en" else "en"
    svg = re.sub(rf'<tspan class="{other}".*?</tspan>', "", svg)
    svg = re.sub(rf'<path class="area {other}".*?</path>', "", svg)
    head, body = svg.split(">", 1)
    _, _, width, height = map(float, re.findall(r"[\d.]+", head)[:4])
    size = f'xmlns="http://www.w3.org/2000/svg" width="{2 * width:g}" height="{2 * height:g}"'
    return f"{head.replace('<svg', f'<svg {size}', 1)}><style>{style}</style>{body}\n"


def _ends(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return low - margin * (high - low), high + margin * (high - low)


def _ticks(low: float, high: float, *, integers: bool = False) -> list[float]:
    """Two to six round numbers between the ends; `integers` only if set."""
    rough = max((high - low) / 5, 1 if integers else 0)
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step)
    return [round(index * step, 12) for index in range(first, math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Round numbers of a logarithmic axis between powers of ten `low` and `high`; of many decades, one each."""
    factors = (1, 3) if high - low <= 3.5 else (1,)
    every = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for factor in factors]
    return [value for value in every if 10**low * 0.999 <= value <= 10**high * 1.001] or [10**low, 10**high]
