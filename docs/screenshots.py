"""Take the screenshots of docs/inspect.md and docs/explain.md: pages of the embedded model in Chromium.

.venv/bin/python docs/screenshots.py            (needs Chromium, and Playwright from the test extra)
"""

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

import vitrail
from vitrail.data.sources.registry import open_data
from vitrail.reports.explain.explain_page import explain
from vitrail.reports.inspect.inspection_page import Inspection
from vitrail.reports.inspect.panel_results import compute_panels

INSPECT_FOLDER = Path(__file__).parent / "inspect"
EXPLAIN_SCREENSHOT = Path(__file__).parent / "explain" / "walk.png"
STEPS, SNAPSHOTS = 200, 8  # of the run in the panel `growth`
IMAGES = {"ankle boot": 15, "sandal": 4, "coat": 7, "bag": 20}


def main() -> None:
    clothes = open_data("fashion-40").splits["test"]
    results = compute_panels(
        vitrail.load("fashion"),
        [clothes.images[index] for index in IMAGES.values()],
        names=list(IMAGES),
        name="fashion",
        evidence=True,
        other_images=list(clothes.images),
    )
    INSPECT_FOLDER.mkdir(exist_ok=True)
    digits = open_data("digits").splits["test"].images
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        Inspection(results).save(Path(folder) / "page")
        run, run_page = Path(folder) / "run", Path(folder) / "run-page"
        vitrail.train("digits", "ViT-Pico/2", steps=STEPS, snapshots=SNAPSHOTS, output=run, quiet=True)
        vitrail.inspect(run, digits[:16], output=run_page)
        address = (Path(folder) / "page" / "index.html").as_uri()
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, scheme, parts in (
            (1280, "light", ("walk", "inside", "attention", "distances", "positions", "evidence")),
            (400, "dark", ("attention",)),
        ):
            page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
            page.goto(address)
            page.wait_for_selector(".cell canvas")
            page.locator("#stage").click(position={"x": 150, "y": 60})
            page.locator("h1").hover()
            for part in parts:
                name = part if width == 1280 else f"{part}-narrow"
                page.locator(f"#{part}").screenshot(path=INSPECT_FOLDER / f"{name}.png")
        take_explain_screenshot(browser, Path(folder))
        page = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light").new_page()
        page.goto((run_page / "index.html").as_uri())
        page.locator("#growth").screenshot(path=INSPECT_FOLDER / "growth.png")
        browser.close()


def take_explain_screenshot(browser: Browser, folder: Path) -> None:
    """Take the screenshot of the softmax step on the page of `vitrail explain`, without position embeddings."""
    address = explain(vitrail.load("fashion"), output=folder / "walk").as_uri()
    page = browser.new_context(viewport={"width": 1160, "height": 760}, color_scheme="light").new_page()
    page.goto(f"{address}#lang=en&image=15&patch=24&layer=1&head=1&key=32&positions=off&station=softmax")
    page.wait_for_timeout(500)
    EXPLAIN_SCREENSHOT.parent.mkdir(exist_ok=True)
    page.screenshot(path=EXPLAIN_SCREENSHOT)


if __name__ == "__main__":
    main()
