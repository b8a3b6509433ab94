"""`report.html` in a real browser: tooltips, both axes, both languages, narrow and dark screens, no requests."""

import re

import numpy as np
import pytest

from tests.training.runs import train
from vitrail.data.dataset import Dataset
from vitrail.data.sources.registry import open_data
from vitrail.training.options import Options
from vitrail.training.recipe import Recipe

READ_VISIBLE_TEXT = """text => [...text.childNodes]
    .filter((node) => node.nodeType === Node.TEXT_NODE || getComputedStyle(node).display !== "none")
    .map((node) => node.textContent).join("")"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    split = open_data("digits").splits["test"].select(np.arange(80))
    digits = Dataset("digits", tuple("0123456789"), {"train": split, "test": split.select(np.arange(30), "test")})
    folder = tmp_path_factory.mktemp("report") / "run"
    train(digits, "ViT-Pico/2", folder, Recipe(epochs=6, batch=16), Options(workers=0), quiet=True)
    return folder / "report.html"


@pytest.fixture
def opened(browser, report):
    """Return a function that opens the report. The test fails on console messages, page errors and network requests."""
    complaints, contexts = [], []

    def open_report(width=1280, scheme="light", path=report, fragment=""):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda request: complaints.extend([request.url] * (request.url[:5] not in ("file:", "data:")))
        )
        page.goto(path.as_uri() + fragment)
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert not complaints


def test_pointer_shows_values_of_all_curves(opened):
    page = opened()
    chart = page.locator(".by-step svg").first
    box = chart.bounding_box()
    position = {"x": box["width"] / 2, "y": box["height"] / 2}
    readout = chart.locator(".column:hover text")
    assert readout.count() == 0
    chart.hover(position=position)
    assert readout.evaluate("text => getComputedStyle(text.parentElement).opacity") == "1"
    text = readout.evaluate(READ_VISIBLE_TEXT)
    assert re.fullmatch(r"step \d+ · training \d\.\d+( · held out \d\.\d+)?", text)
    title = page.evaluate(
        "([x, y]) => document.elementFromPoint(x, y).querySelector('title').textContent",
        [box["x"] + position["x"], box["y"] + position["y"]],
    )
    assert title.split("\n") == text.split(" · ")
    cells = page.locator("table.matrix td[title]")
    assert cells.count() == 100
    assert re.fullmatch(r"0 → 0: \d+ / \d+ \([\d.]+%\)", cells.first.get_attribute("title"))


def test_time_axis_is_selected_without_a_script(opened):
    page = opened()
    charts = {name: page.locator(f".by-{name} svg").first for name in ("step", "seconds")}
    assert [charts[name].is_visible() for name in charts] == [True, False]
    page.get_by_text("over time").click()
    assert [charts[name].is_visible() for name in charts] == [False, True]
    assert "seconds" in charts["seconds"].text_content()


def test_korean_report_fits_a_dark_narrow_screen(opened):
    page = opened(width=390, scheme="dark", fragment="#ko")
    text = page.locator("main").inner_text()
    assert "혼동 행렬" in text
    assert "Confusion" not in text
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    # A scrolling element would hide columns, for instance of the confusion matrix of ten classes.
    wide = (
        "[...document.querySelectorAll('.scroll, pre')].filter((element) => element.scrollWidth > element.clientWidth)"
    )
    assert page.evaluate(f"{wide}.map((element) => element.textContent)") == []
    chart = page.locator(".by-step svg").first
    chart.hover()
    assert chart.locator(".column:hover text").evaluate(READ_VISIBLE_TEXT).startswith("스텝 ")
    page.locator("#language").click()
    assert "Confusion matrix" in page.locator("main").inner_text()


def test_reloaded_report_keeps_language_and_axis(opened, report, tmp_path):
    live = tmp_path / "report.html"
    live.write_text(report.read_text().replace("<title>", '<meta http-equiv="refresh" content="1"><title>', 1))
    page = opened(path=live)
    page.locator("#language").click()
    page.locator("input[value=seconds]").check()
    live.write_text(report.read_text())
    with page.expect_navigation():
        pass
    page.wait_for_function("document.documentElement.lang === 'ko'")
    assert page.locator("input[value=seconds]").is_checked()
