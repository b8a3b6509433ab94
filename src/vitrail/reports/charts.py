"""Charts as SVG inside a page. Labels may be markup in both languages."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vitrail.core.html import Html, escape
from vitrail.reports.page_kit import stylesheet
from vitrail.reports.translations import attribute_text, in_language

WIDTH, HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 30, 40
_COLUMN = 4  # width of a column of a line chart that shows its values under the pointer
_ROW = 15  # least height of a row with a name
_NAME = 16  # least distance between the names of lines
_DASHES = ("", ' stroke-dasharray="7 3"', ' stroke-dasharray="2 3"')  # of lines with the colours 0 to 7, 8 to 15, ...

_EMPTY = (
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
    """Whether points are connected. If not, the line is a scatter plot."""
    bars: Sequence[tuple[float, float]] = ()
    """Interval of each point, drawn as a vertical bar."""


class Interval(NamedTuple):
    """A number with its interval and its name."""

    name: str
    value: float
    low: float
    high: float
    colour: int = 0


Point = tuple[float, float]
"""x and y in the units of the data."""


class _Frame(NamedTuple):
    """The axes of a line chart and its size."""

    x_ends: tuple[float, float]
    """Ends of the x axis, as powers of ten if it is logarithmic."""
    y_ends: tuple[float, float]
    right: float
    """Width of the margin at the right, where names of lines are."""
    height: float
    log: bool
    log_x: bool

    @property
    def across(self) -> float:
        """Length of the x axis."""
        return WIDTH - _LEFT - self.right

    def to_pixels(self, x: float, y: float) -> Point:
        """Return the position of a point in the drawing."""
        x, y = math.log10(x) if self.log_x else x, math.log10(y) if self.log else y
        down = self.height - _TOP - _BOTTOM
        return (
            _LEFT + self.across * (x - self.x_ends[0]) / (self.x_ends[1] - self.x_ends[0]),
            _TOP + down * (1 - (y - self.y_ends[0]) / (self.y_ends[1] - self.y_ends[0])),
        )


def line_chart(
    lines: Sequence[Line], x_label: str, y_label: str, *, log: bool = False, log_x: bool = False, dots: bool = False
) -> str:
    """Return a line chart. `log` makes the y axis logarithmic, `log_x` the x axis, `dots` marks every point.

    The name of a line is at its end, or in the right margin if other lines end later. Points that are not finite, or
    not positive on a logarithmic axis, are left out.
    """
    curves: list[tuple[Line, Sequence[Point]]] = [
        (line, [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y) and (y > 0 or not log)])
        for line in lines
    ]
    all_points = [point for _, points in curves for point in points]
    if not all_points:
        return _EMPTY
    frame = _frame(curves, all_points, log=log, log_x=log_x)
    low, high = frame.x_ends
    scale_x = math.log10 if log_x else float
    curves = [
        (line, _thin_out(points, lambda x: WIDTH * (scale_x(x) - low) / (high - low)) if line.joined else points)
        for line, points in curves
    ]
    description = f"{attribute_text(y_label)} over {attribute_text(x_label)}"
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {frame.height}" role="img" aria-label="{description}">',
        *_axes(frame, all_points, x_label, y_label),
    ]
    curves = [(line, points) for line, points in curves if points]
    for line, points in curves:
        parts += _curve(frame, line, points)
    parts += _line_names(frame, curves)
    if not dots:
        parts += _hover_columns(frame, [curve for curve in curves if curve[0].joined], x_label, y_label)
    for line, points in curves:
        if dots or not line.joined or len(points) == 1:
            parts += _dots(frame, line, points)
    return "".join(parts) + "</svg>"


def _frame(
    curves: Sequence[tuple[Line, Sequence[Point]]], all_points: Sequence[Point], *, log: bool, log_x: bool
) -> _Frame:
    """Return axes that hold all points and bars, with a right margin for the names of lines."""
    scale, scale_x = (math.log10 if log else float), (math.log10 if log_x else float)
    bars = [y for line, _ in curves for bar in line.bars for y in bar if math.isfinite(y) and (y > 0 or not log)]
    longest_name = max(1.1 * _text_width(line.name) + 8 if line.name else 0 for line, _ in curves)
    name_count = sum(bool(line.name and points) for line, points in curves)
    return _Frame(
        x_ends=_axis_ends([scale_x(x) for x, _ in all_points], margin=0.0),
        y_ends=_axis_ends([scale(y) for y in [y for _, y in all_points] + bars], margin=0.05),
        right=max(_RIGHT, min(longest_name, 0.4 * WIDTH)),
        height=max(HEIGHT, _TOP + _BOTTOM + _NAME * name_count),
        log=log,
        log_x=log_x,
    )


def _axes(frame: _Frame, all_points: Sequence[Point], x_label: str, y_label: str) -> list[str]:
    """Return grid lines, numbers and labels of both axes."""
    parts = []
    y_ticks = _ticks(*frame.y_ends)
    digits = max(0, -math.floor(math.log10(y_ticks[1] - y_ticks[0]) + 1e-9)) if len(y_ticks) > 1 else 3
    for tick in y_ticks:
        value = 10**tick if frame.log else tick
        _, y = frame.to_pixels(all_points[0][0], value)
        is_short = frame.log or len(y_ticks) == 1 or digits > 6 or abs(value) >= 1e5
        label = f"{value:.3g}" if is_short else f"{value:.{digits}f}"
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="soft" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<text class="soft unit" x="4" y="14">{escape(y_label)}</text>')
    is_integer = all(float(x).is_integer() for x, _ in all_points)
    for tick in _log_ticks(*frame.x_ends) if frame.log_x else _ticks(*frame.x_ends, integers=is_integer):
        x, _ = frame.to_pixels(tick, all_points[0][1])
        parts.append(f'<text class="soft" x="{x:.1f}" y="{frame.height - 22}" text-anchor="middle">{tick:,.6g}</text>')
    middle = f'x="{_LEFT + frame.across / 2:.1f}" y="{frame.height - 5}"'
    parts.append(f'<text class="soft" {middle} text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _colour(line: Line) -> str:
    return f"var(--c{line.colour % 8})"


def _curve(frame: _Frame, line: Line, points: Sequence[Point]) -> list[str]:
    """Return a line and its vertical bars. A line without intervals has no bars."""
    parts = []
    if line.joined:
        dashes = _DASHES[line.colour // 8 % len(_DASHES)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (frame.to_pixels(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(line)}" stroke-width="1.6"{dashes}/>')
    for x, bar in zip(line.xs, line.bars, strict=False):
        (left, low), (_, high) = frame.to_pixels(x, bar[0]), frame.to_pixels(x, bar[1])
        ends = f'x1="{left:.1f}" x2="{left:.1f}" y1="{low:.1f}" y2="{high:.1f}"'
        parts.append(f'<line {ends} stroke="{_colour(line)}" stroke-width="1.2"/>')
    return parts


def _dots(frame: _Frame, line: Line, points: Sequence[Point]) -> list[str]:
    """Return a circle for each point, with its numbers as a tooltip."""
    parts, bars = [], dict(zip(line.xs, line.bars, strict=False))
    for x, y in points:
        left, top = frame.to_pixels(x, y)
        interval = f" {_interval_text(*bars[x])}".rstrip() if x in bars else ""
        name = Html(f"{escape(line.name)}\n") if line.name else ""
        title = _tooltip(Html(f"{name}{_number_text(x)}: {_number_text(y)}{interval}"))
        parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.6" fill="{_colour(line)}">{title}</circle>')
    return parts


def _line_names(frame: _Frame, curves: Sequence[tuple[Line, Sequence[Point]]]) -> list[str]:
    """Return the names of lines at their ends, moved apart where they would overlap."""
    parts, names = [], []
    for line, points in curves:
        if line.name:
            x, y = frame.to_pixels(*points[-1])
            text = f'style="fill:{_colour(line)}">{escape(_shorten(line.name, (frame.right - 7.9) / 1.1))}</text>'
            names.append((y, x, WIDTH - frame.right if line.joined else x, text))
    names.sort(key=lambda name: name[0])
    heights = _move_apart([name[0] for name in names], frame.height - _BOTTOM)
    for height, (y, x, name_x, text) in zip(heights, names, strict=True):
        if name_x - x > _NAME:
            ends = f'x1="{x + 4:.1f}" x2="{name_x + 2:.1f}" y1="{y:.1f}" y2="{height:.1f}"'
            parts.append(f'<line class="axis" {ends} stroke-dasharray="2 2"/>')
        parts.append(f'<text x="{name_x + 5:.1f}" y="{height + 4:.1f}" {text}')
    return parts


def _thin_out(points: Sequence[Point], column: Callable[[float], float]) -> Sequence[Point]:
    """Keep the first, lowest, highest and last point of each pixel column if there are many points."""
    if len(points) <= 2 * WIDTH:
        return points
    columns = (list(group) for _, group in itertools.groupby(points, key=lambda point: round(column(point[0]))))
    return [
        group[index]
        for group in columns
        for heights in [[y for _, y in group]]
        for index in sorted({0, heights.index(min(heights)), heights.index(max(heights)), len(group) - 1})
    ]


def _hover_columns(
    frame: _Frame, curves: Sequence[tuple[Line, Sequence[Point]]], x_label: str, y_label: str
) -> list[str]:
    """Return areas that show the values of all lines in the column under the pointer."""
    points_by_column: dict[int, dict[int, Point]] = {}
    for index, (_, points) in enumerate(curves):
        for point in points:
            points_by_column.setdefault(round(frame.to_pixels(*point)[0] / _COLUMN), {})[index] = point
    if not points_by_column:
        return []
    columns = [points_by_column[key] for key in sorted(points_by_column)]
    middles = [frame.to_pixels(*max(column.values()))[0] for column in columns]
    borders = [(left + right) / 2 for left, right in itertools.pairwise(middles)]
    free_width = WIDTH - _text_width(y_label) - 16
    bottom = frame.height - _BOTTOM
    parts = []
    for column, middle, low, high in zip(
        columns, middles, [_LEFT - 4, *borders], [*borders, middles[-1] + 4], strict=True
    ):
        x = max(column.values())[0]
        values = [
            Html(f"{escape(curves[index][0].name or y_label)} {_number_text(y)}") for index, (_, y) in column.items()
        ]
        entries = [Html(f"{escape(x_label)} {_number_text(x)}"), *values]
        area = f"M{low:.1f} {_TOP}H{high:.1f}V{bottom}H{low:.1f}z"
        tooltips = {
            language: "&#10;".join(attribute_text(entry, language) for entry in entries) for language in ("en", "ko")
        }
        if tooltips["en"] == tooltips["ko"]:
            areas = f'<path class="area" d="{area}"><title>{tooltips["en"]}</title></path>'
        else:
            areas = "".join(
                f'<path class="area {language}" d="{area}"><title>{tooltip}</title></path>'
                for language, tooltip in tooltips.items()
            )
        text = Html(" · ".join(entries))
        has_space = _text_width(text) <= free_width
        readout = f'<text x="{WIDTH - 4}" y="14" text-anchor="end">{text}</text>' if has_space else ""
        circles = "".join(
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3" fill="{_colour(curves[index][0])}"/>'
            for index, point in column.items()
            for left, top in [frame.to_pixels(*point)]
        )
        rule = f'<path class="axis" d="M{middle:.1f} {_TOP}V{bottom}"/>'
        parts.append(f'<g class="column">{areas}<g>{rule}{circles}{readout}</g></g>')
    return parts


def interval_chart(
    rows: Sequence[Interval], label: str, *, ends: tuple[float, float] | None = None, zero: float | None = None
) -> str:
    """Return a chart of numbers with their intervals, one row each, named at the left.

    `ends` sets the ends of the axis, for several charts with equal axes. `zero` marks a value by a vertical line.
    """
    if not rows:
        return _EMPTY
    right = 24
    left = min(max(_LEFT, *(1.1 * _text_width(row.name) + 12 for row in rows)), 0.4 * WIDTH)
    x_ends = ends or _axis_ends([x for row in rows for x in row[1:4]] + ([] if zero is None else [zero]), margin=0.05)
    across, step = WIDTH - left - right, max((HEIGHT - _TOP - _BOTTOM) / len(rows), _ROW)
    height = _TOP + step * len(rows) + _BOTTOM

    def to_pixels(x: float) -> float:
        return left + across * (x - x_ends[0]) / (x_ends[1] - x_ends[0])

    low, high = _TOP - 8, height - _BOTTOM
    parts = [f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{attribute_text(label)}">']
    for tick in _ticks(*x_ends):
        x = f"{to_pixels(tick):.1f}"
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{low}" y2="{high:g}"/>')
        parts.append(f'<text class="soft" x="{x}" y="{height - 22:g}" text-anchor="middle">{tick:.6g}</text>')
    if zero is not None:
        x = f"{to_pixels(zero):.1f}"
        parts.append(f'<line x1="{x}" x2="{x}" y1="{low}" y2="{high:g}" style="stroke:var(--lead)"/>')
    for index, row in enumerate(rows):
        y, colour = _TOP + (index + 0.5) * step, f"var(--c{row.colour % 8})"
        interval = f"{_number_text(row.value)} {_interval_text(row.low, row.high)}".rstrip()
        title = _tooltip(Html(f"{escape(row.name)}\n{interval}"))
        parts.append(f'<g class="row">{title}')
        parts.append(f'<path class="area" d="M0 {y - step / 2:.1f}H{WIDTH}v{step:.1f}H0z"/>')
        line_ends = f'x1="{to_pixels(row.low):.1f}" x2="{to_pixels(row.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {line_ends} stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<circle cx="{to_pixels(row.value):.1f}" cy="{y:.1f}" r="3.4" fill="{colour}"/>')
        position = f'x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f"<text {position}>{escape(_shorten(row.name, (left - 11.9) / 1.1))}</text></g>")
    middle = f'x="{left + across / 2:.1f}" y="{height - 5:g}"'
    parts.append(f'<text class="soft" {middle} text-anchor="middle">{escape(label)}</text>')
    return "".join(parts) + "</svg>"


def matrix_chart(
    values: np.ndarray, colours: np.ndarray, rows: Sequence[str], columns: Sequence[str], x_label: str, y_label: str
) -> str:
    """Return values (rows, columns) as a grid of squares in their colours (rows, columns, 3), first row at the bottom.

    `rows` and `columns` are the labels along the axes.
    """
    side = min((WIDTH - _LEFT - _RIGHT) / len(columns), (HEIGHT - _TOP - _BOTTOM) / len(rows))
    top, high = _TOP, side * len(rows)
    description = f"{attribute_text(y_label)} over {attribute_text(x_label)}"
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{description}">']
    for row, row_colours in enumerate(colours):
        y = top + high - (row + 1) * side
        for column, (red, green, blue) in enumerate(row_colours):
            parts.append(
                f'<rect x="{_LEFT + column * side:.1f}" y="{y:.1f}" width="{side + 0.2:.1f}" height="{side + 0.2:.1f}"'
                f' fill="rgb({red},{green},{blue})">'
                f"{_tooltip(f'{rows[row]} · {columns[column]}: {_number_text(values[row, column])}')}</rect>"
            )
    label_step = max(1, round(16 / side))
    for row in range(0, len(rows), label_step):
        y = top + high - (row + 0.5) * side + 4
        parts.append(f'<text class="soft" x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">{escape(rows[row])}</text>')
    for column in range(0, len(columns), label_step):
        position = f'x="{_LEFT + (column + 0.5) * side:.1f}" y="{top + high + 15:.1f}"'
        parts.append(f'<text class="soft" {position} text-anchor="middle">{escape(columns[column])}</text>')
    parts.append(f'<text class="soft" x="4" y="14">{escape(y_label)}</text>')
    parts.append(f'<text class="soft" x="{_LEFT}" y="{top + high + 32:.1f}">{escape(x_label)}</text>')
    return "".join(parts) + "</svg>"


def standalone_svg(svg: str, language: str = "en") -> str:
    """Return a chart as the text of an SVG file, in one language and in the light colours."""
    colours = dict(reversed(re.findall(r"(--\w+): (#\w+)", stylesheet())))  # the light colours come first in the sheet
    svg = re.sub(r"var\((--\w+)\)", lambda match: colours[match[1]], svg)
    style = (
        f"svg {{ background: {colours['--panel']}; }} text {{ fill: {colours['--ink']}; font: 13px sans-serif; }}"
        f" text.soft {{ fill: {colours['--lead']}; }} .axis {{ stroke: {colours['--line']}; }}"
        f" {_pointer_rules()}"
    )
    other = "ko" if language == "en" else "en"
    svg = re.sub(rf'<tspan class="{other}".*?</tspan>', "", svg)
    svg = re.sub(rf'<path class="area {other}".*?</path>', "", svg)
    head, body = svg.split(">", 1)
    _, _, width, height = map(float, re.findall(r"[\d.]+", head)[:4])
    size = f'xmlns="http://www.w3.org/2000/svg" width="{2 * width:g}" height="{2 * height:g}"'
    return f"{head.replace('<svg', f'<svg {size}', 1)}><style>{style}</style>{body}\n"


def _pointer_rules() -> str:
    """Return the style rules that show values under the pointer."""
    return stylesheet().partition("/* pointer */")[2].partition("/* end */")[0].strip()


def _text_width(text: str) -> float:
    """Estimate the width of a text in its wider language. Korean characters are square."""
    return max(
        sum(13.0 if ord(letter) > 0x10FF else 7.4 for letter in in_language(text, language))
        for language in ("en", "ko")
    )


def _shorten(text: str, width: float) -> str:
    """Shorten a name to a width. Markup stays as it is."""
    if isinstance(text, Html) or _text_width(text) <= width:
        return text
    length = next(end for end in range(len(text) - 1, -1, -1) if _text_width(text[:end]) + 10 <= width or not end)
    return f"{text[:length].rstrip()}…"


def _number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _interval_text(low: float, high: float) -> str:
    """Return an interval as text. An interval of width 0 is unknown and gives no text."""
    return f"({_number_text(low)} … {_number_text(high)})" if low < high else ""


def _tooltip(text: str) -> str:
    return f"<title>{'&#10;'.join(attribute_text(text).splitlines())}</title>"


def _move_apart(heights: Sequence[float], lowest: float, gap: float = _NAME) -> list[float]:
    """Move ascending heights as little as needed to be `gap` apart, none below `lowest` if there is enough space."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], lowest if index == len(moved) - 1 else moved[index + 1] - gap)
    return moved


def _axis_ends(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return low - margin * (high - low), high + margin * (high - low)


def _ticks(low: float, high: float, *, integers: bool = False) -> list[float]:
    """Return two to six round numbers between the ends, only integers if `integers` is set."""
    least_step = max((high - low) / 5, 1 if integers else 0)
    unit = 10 ** math.floor(math.log10(least_step))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least_step)
    first = math.ceil(low / step)
    return [round(index * step, 12) for index in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return ticks between the powers of ten `low` and `high`: one per decade, or two if there are few decades."""
    factors = (1, 3) if high - low <= 3.5 else (1,)
    ticks = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for factor in factors]
    return [tick for tick in ticks if 10**low * 0.999 <= tick <= 10**high * 1.001] or [10**low, 10**high]
