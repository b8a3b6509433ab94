"""Contact sheets, pages of mistakes and the page of `runs` in a real browser: both languages, narrow and dark."""

import numpy as np
import pytest

from tests.evaluation.test_compare_runs import make_run
from vitrail.data.sources.registry import open_data

EVIL = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return a folder with a contact sheet of several pages, pages of mistakes and a page of runs."""
    from vitrail.cli import main

    folder = tmp_path_factory.mktemp("pages")
    clothes = open_data("fashion-40")
    names = np.array(clothes.labels)
    np.savez(
        folder / "wrong.npz", images=clothes.splits["test"].images, labels=names[::-1][clothes.splits["test"].labels]
    )
    for name, family in ((EVIL, "vit"), ("ResNet-Pico", "resnet")):
        make_run(folder / "runs" / family, name.replace('"', "'"), family, correct=250 if family == "vit" else 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.reports.contact_sheet.IMAGES_PER_PAGE", 15)
        patch.setattr("vitrail.reports.contact_sheet._PREVIEWS_PER_GROUP", 2)
        main(["predict", "fashion", "fashion-40", "--page", str(folder / "sheet")])
        main(["evaluate", "fashion", str(folder / "wrong.npz"), "--page", str(folder / "mistakes")])
        main(["runs", str(folder / "runs"), "--page", str(folder / "compared")])
    return folder


@pytest.fixture
def opened(browser, pages):
    """Return a function that opens a page. The test fails on console messages, page errors and network requests."""
    complaints, contexts = [], []

    def open_page(name, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda request: complaints.extend([request.url] * (request.url[:5] not in ("file:", "data:")))
        )
        page.goto((pages / name / "index.html").as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


@pytest.mark.parametrize("name", ["sheet", "mistakes", "compared"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page_fits_the_window(opened, name, width, scheme):
    page = opened(name, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth)"
    assert page.evaluate(f"{wide}.map((box) => box.textContent)") == []


def test_narrow_screen_shows_table_rows_as_lists(opened):
    wide, narrow = opened("compared").locator("table").first, opened("compared", 390).locator("table").first
    assert wide.locator("th").first.is_visible()
    assert not wide.locator(".column-name").first.is_visible()
    assert not narrow.locator("th").first.is_visible()
    cells = narrow.locator("tbody tr").first.locator("td")
    assert cells.count() == 6
    assert "ResNet-Pico" in cells.first.inner_text()
    assert cells.nth(1).inner_text().split() == ["accuracy", "75.0%"]


def test_contact_sheet_links_all_images_of_a_class_and_keeps_the_language(opened):
    page = opened("sheet")
    assert page.locator("img").count() == 20
    page.wait_for_function("document.images[0].complete && document.images[0].naturalWidth === 28")
    page.locator("#language").click()
    page.locator("h2 a.ko").first.click()
    page.wait_for_url("**/answer-1-1.html#ko")
    assert page.locator("h1").inner_text() in open_data("fashion-40").labels
    assert "예측" in page.locator("header").inner_text()
    assert page.locator("img").count() >= 4
    page.locator("nav a.ko").first.click()
    page.wait_for_url("**/index.html#ko")


def test_pages_of_mistakes_are_linked(opened):
    page = opened("mistakes")
    assert page.locator(".images img").count() == 15
    assert page.locator("text=wrong label?").count() > 0
    page.locator("nav a.en", has_text="page 2").first.click()
    page.wait_for_url("**/mistakes-2.html")
    assert page.locator(".images img").count() == 15
    page.locator("nav a.en", has_text="next page").first.click()
    page.wait_for_url("**/mistakes-3.html")


def test_page_of_runs_has_curves_over_steps_and_over_time(opened):
    page = opened("compared")
    assert page.locator(".by-step").first.is_visible()
    assert not page.locator(".by-seconds").first.is_visible()
    page.locator("input[value=seconds]").check()
    assert page.locator(".by-seconds").first.is_visible()
    assert not page.locator(".by-step").first.is_visible()
    column = page.locator(".by-seconds svg .column").first
    column.locator("path").first.hover()
    page.wait_for_function(
        "[...document.querySelectorAll('.by-seconds .column > g')].some((g) => getComputedStyle(g).opacity === '1')"
    )
    assert "ResNet-Pico" in column.locator("title").first.text_content()
    text = page.locator("main").inner_text()
    assert EVIL.replace('"', "'") in text
    assert "ResNet-Pico is better" in text
    assert page.locator("img").count() == 0
    page.locator("#language").click()
    assert "차이를 우연과 구별할 수 있을까요?" in page.locator("main").inner_text()
    assert "Which model" not in page.locator("main").inner_text()
