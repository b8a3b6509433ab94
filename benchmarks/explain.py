"""Speed of the page of `vitrail explain` with the embedded model, in Chromium.

Measured in the page: its size, the first paint, a forward pass, and the time from an event to the frame that shows it,
for events that only redraw and for events that run the model.

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

LAST_DURATION = "(name) => performance.getEntriesByName(name).at(-1)?.duration ?? null"


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
        image_box, drawing_box = (page.locator(name).bounding_box() for name in ("#pane-image .map", ".paper"))
        times = {"forward": [], "redrawn": [], "computed": []}

        def move_pointer(box, number, name):
            """Move the pointer within a box and append the duration of the event to `times[name]`."""
            page.evaluate("(name) => performance.clearMeasures(name)", name)
            # With its button down, the pointer selects patches in the image or draws.
            page.mouse.move(box["x"] + box["width"] * (0.1 + 0.8 * (number * 7 % 10) / 10), box["y"] + 20 + 4 * number)
            page.wait_for_timeout(120)
            if (duration := page.evaluate(LAST_DURATION, name)) is not None:
                times[name].append(duration)

        for box, name in ((image_box, "redrawn"), (drawing_box, "computed")):
            page.mouse.move(box["x"] + 8, box["y"] + 8)
            page.mouse.down()
            page.wait_for_timeout(300)
            for number in range(rounds):
                move_pointer(box, number, name)
                if name == "computed":
                    times["forward"].append(page.evaluate(LAST_DURATION, "forward"))
            page.mouse.up()
        browser.close()
    print("| measure | median | 95th percentile | limit |")
    print("|---|---|---|---|")
    print(f"| size of the page | {size / 1e6:.2f} MB | | 2.5 MB |")
    limits = {"forward": 100, "redrawn": 50, "computed": 150}
    names = {
        "forward": "forward pass",
        "redrawn": "event to frame, redrawing only",
        "computed": "event to frame, with a forward pass",
    }
    print(f"| first paint | {statistics.median(paints):.0f} ms | {max(paints):.0f} ms | 1000 ms |")
    for name, durations in times.items():
        percentile = sorted(durations)[int(0.95 * (len(durations) - 1))]
        print(f"| {names[name]} | {statistics.median(durations):.0f} ms | {percentile:.0f} ms | {limits[name]} ms |")
    print(f"({', '.join(f'{name}: {len(durations)}' for name, durations in times.items())} events)")


if __name__ == "__main__":
    main()
