"""Line charts: names of lines do not overlap, ticks are readable, long curves are thinned out."""

import itertools
import re

import pytest

from vitrail.reports.charts import HEIGHT, WIDTH, Line, line_chart


def test_names_of_lines_that_end_together_do_not_overlap():
    lines = [Line(f"line {index}", [0, 1], [index, 0.1 * index], index) for index in range(8)]
    svg = line_chart(lines, "x", "y")
    heights = [float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)" style', svg)]
    assert len(heights) == 8
    assert min(b - a for a, b in zip(sorted(heights), sorted(heights)[1:], strict=False)) > 13.9
    assert max(heights) < HEIGHT - 30
    order = re.findall(r">(line \d)</text>", svg)
    assert order == [f"line {index}" for index in reversed(range(8))]  # top to bottom, as the ends of the lines


def test_names_of_lines_that_end_early_are_in_the_right_margin():
    lines = [Line(f"run {index}", [0, 1 + index], [0.5, 0.5 + 0.01 * index], index) for index in range(3)]
    svg = line_chart(lines, "seconds", "y")
    assert len(set(re.findall(r'<text x="([\d.]+)" y="[\d.]+" style', svg))) == 1
    ends = [path.split()[-1].split(",")[0] for path in re.findall(r'<polyline points="([^"]+)"', svg)]
    leader_starts = re.findall(r'<line class="axis" x1="([\d.]+)" [^>]*dasharray', svg)
    assert sorted(float(x) - 4 for x in leader_starts) == pytest.approx(sorted(map(float, ends))[:2], abs=0.11)


def test_many_names_make_the_chart_taller():
    lines = [Line(f"run {index}", [0, 1], [0, 1], index) for index in range(20)]
    svg = line_chart(lines, "x", "y")
    (height,) = re.findall(rf'viewBox="0 0 {WIDTH} (\d+)"', svg)
    heights = sorted(float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)" style', svg))
    assert len(heights) == 20
    assert heights[0] > 20
    assert heights[-1] < int(height) - 30
    assert min(b - a for a, b in itertools.pairwise(heights)) > 15.9
    styles = re.findall(r'stroke="(var\(--c\d\))" stroke-width="1.6"( stroke-dasharray="[\d ]+")?', svg)
    assert len(set(styles)) == 20


def test_ticks_have_no_unnecessary_digits():
    svg = line_chart([Line("a", [0, 1], [17.0, 92.0])], "x", "y")
    ticks = re.findall(r'text-anchor="end">([^<]+)<', svg)
    assert ticks[:4] == ["20", "40", "60", "80"]


def test_thinned_out_curve_keeps_its_extremes():
    heights = [0.5] * 20_000
    heights[7_777], heights[13_131] = 3.0, -2.0
    svg = line_chart([Line("loss", range(20_000), heights)], "step", "loss")
    assert len(svg) < 60_000
    (path,) = re.findall(r'<polyline points="([^"]+)"', svg)
    ys = [float(point.split(",")[1]) for point in path.split()]
    assert (min(ys), max(ys)) == (38.2, 201.8)  # 5 % of margin inside 30 to 210
    assert "<title>step 19,999&#10;loss 0.5</title>" in svg


def test_logarithmic_axis_has_ticks_for_few_and_many_decades():
    for low, expected in ((1e-2, ["0.01", "0.03", "0.1", "0.3", "1"]), (5e-5, ["0.0001", "0.001", "0.01", "0.1", "1"])):
        svg = line_chart([Line("", [low, 1], [0, 1])], "x", "y", log_x=True)
        assert re.findall(r'text-anchor="middle">([\d.]+)<', svg) == expected
