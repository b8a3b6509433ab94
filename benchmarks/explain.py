"""The page of `vitrail explain` with the embedded model in Chromium: size, first paint, a forward pass, and the time
from an event to the frame that shows it, where nothing is computed and where the model runs. Measured in the page.

    .venv/bin/python benchmarks/explain.py [--rounds 40]          (needs Chromium; about 20 seconds)
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import vitrail
from vitrail.reports.explain.explain_page import explain

LAST = "(name) => performance.getEntriesByName(name).at(-1)?.duration ?? null"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = explain(vitrail.load("fashion"), output=Path(folder) / "walk")
        size = page_file.stat().st_size
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        paints = []
        for _ in range(5):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(page_file.as_uri())
            page.wait_for_timeout(600)
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        image, paper = page.locator("#pane-image .map").bounding_box(), page.locator(".paper").bounding_box()
        times = {"forward": [], "redrawn": [], "computed": []}

        def move(box, number, name):
            page.evaluate("(name) => performance.clearMeasures(name)", name)
            # The pointer walks through the box with its button down: it takes patches in hand, or draws.
            page.mouse.move(box["x"] + box["width"] * (0.1 + 0.8 * (number * 7 % 10) / 10), box["y"] + 20 + 4 * number)
            page.wait_for_timeout(120)
            if (duration := page.evaluate(LAST, name)) is not None:
                times[name].append(duration)

        for box, name in ((image, "redrawn"), (paper, "computed")):
            page.mouse.move(box["x"] + 8, box["y"] + 8)
            page.mouse.down()
            page.wait_for_timeout(300)
            for number in range(rounds):
                move(box, number, name)
                if name == "computed":
                    times["forward"].append(page.evaluate(LAST, "forward"))
            page.mouse.up()
        browser.close()
    print("| measure | median | 95 % are below | limit |")
    print("|---|---|---|---|")
    print(f"| size of the page | {size / 1e6:.2f} MB | | 2.5 MB |")
    limits = {"forward": 100, "redrawn": 50, "computed": 150}
    names = {
        "forward": "forward pass",
        "redrawn": "event to frame, nothing computed",
        "computed": "event to frame, the model runs",
    }
    print(f"| first paint | {statistics.median(paints):.0f} ms | {max(paints):.0f} ms | 1000 ms |")
    for name, found in times.items():
        late = sorted(found)[int(0.95 * (len(found) - 1))]
        print(f"| {names[name]} | {statistics.median(found):.0f} ms | {late:.0f} ms | {limits[name]} ms |")
    print(f"({', '.join(f'{name}: {len(found)}' for name, found in times.items())} events)")


if __name__ == "__main__":
    main()
