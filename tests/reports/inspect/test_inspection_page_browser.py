"""The page of `vitrail inspect` in a real browser: pointer, keyboard, touch, both languages, narrow and dark."""

import base64
import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.reports.inspect.pages import write_page
from vitrail.data.sources.registry import open_data
from vitrail.lab.exact import redraw
from vitrail.reports.inspect.inspection_page import render_figures, render_page
from vitrail.reports.inspect.panel_results import compute_panels

EVIL = '<img src=x onerror="document.title=1">'
CLOTHES = open_data("fashion-40").splits["test"].images


@pytest.fixture(scope="module")
def fashion_results():
    names = ["0.png", "a/" + "long_" * 40 + ".png"]
    return compute_panels(
        vitrail.load("fashion"),
        CLOTHES[:2],
        names=names,
        evidence=True,
        other_images=CLOTHES[2:20],
        against=("another", vitrail.load("fashion")),
    )


@pytest.fixture
def opened(browser, fashion_results, tmp_path):
    """Return a function that opens the page of panel results. The test fails on console messages and requests."""
    complaints, contexts = [], []

    def open_page(panel_results=fashion_results, width=1280, scheme="light", **changes):
        folder = tmp_path / "out"
        write_page(panel_results, folder, force=True, **changes)
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda request: complaints.extend([request.url] * (request.url[:5] not in ("file:", "data:")))
        )
        page.goto((folder / "index.html").as_uri())
        page.wait_for_selector(".cell canvas")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


def overlay_colours(page):
    """Return the colours (N, 3) of the attention map over the image."""
    source = page.evaluate("$('laid').toDataURL()")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("RGB"))
    return pixels.reshape(-1, 3).tolist()


def patch_centre(page, row, column):
    """Return the position of a patch on the image of the page."""
    box = page.locator("#stage").bounding_box()
    return {"x": (column + 0.5) * box["width"] / 7, "y": (row + 0.5) * box["height"] / 7}


def test_every_layer_and_head_has_a_map(opened, fashion_results):
    page = opened()
    config = fashion_results.context.model.config
    assert page.locator(".cell").count() == config.depth * config.heads
    assert page.locator("#asked").inner_text().startswith("[CLS] · where it looks · layer 4 · head 0")


def test_pointer_selects_a_patch_and_click_keeps_it(opened, fashion_results):
    page = opened()
    cls_colours = overlay_colours(page)
    page.locator("#stage").hover(position=patch_centre(page, 2, 3))
    page.wait_for_function("$('asked').textContent.startsWith('row 2, column 3 · where it looks')")
    weights = fashion_results.panels["attention"].weights[0][4][0, 1 + 2 * 7 + 3, 1:]
    assert f"largest {weights.max() * 50:.1f}" in page.locator("#asked").inner_text()
    assert overlay_colours(page) != cls_colours
    page.locator("#stage").click(position=patch_centre(page, 5, 1))
    page.locator("h1").hover()
    assert page.locator("#asked").inner_text().startswith("row 5, column 1")
    page.locator("input[value=to]").check()
    page.wait_for_function("$('asked').textContent.startsWith('row 5, column 1 · who looks at it')")
    received = fashion_results.panels["attention"].weights[0][4][0, 1:, 1 + 5 * 7 + 1]
    largest = float(page.locator("#asked").inner_text().split("largest ")[1].split()[0])
    assert largest == pytest.approx(received.max() * 50, abs=0.1, rel=0.02)
    page.locator("#stage").press("ArrowRight")
    page.wait_for_function("$('asked').textContent.startsWith('row 5, column 2')")
    page.locator("#stage").press("Escape")
    page.wait_for_function("$('asked').textContent.startsWith('[CLS]')")


def test_click_on_a_small_map_shows_it_over_the_image(opened, fashion_results):
    page = opened()
    page.locator(".cell").nth(4).click()
    page.wait_for_function("$('asked').textContent.includes('layer 1 · head 1')")
    assert page.locator(".cell[aria-pressed=true]").count() == 1
    weights = fashion_results.panels["attention"].weights[0][1][1, 0, 1:]
    assert overlay_colours(page)[weights.argmax()] == [254, 232, 56]


def test_thumbnail_selects_its_image(opened, fashion_results):
    page = opened()
    before = overlay_colours(page)
    assert page.locator("[data-image='0']").first.is_visible()
    page.locator(".thumb").nth(1).click()
    page.wait_for_function("document.querySelector('.thumb[aria-pressed=true]').dataset.choose === '1'")
    assert not page.locator("[data-image='0']").first.is_visible()
    assert page.locator("[data-image='1']").first.is_visible()
    page.wait_for_function("$('stage').firstChild.className.includes('p1')")
    assert overlay_colours(page) != before
    assert page.locator("#stage").get_attribute("aria-label") == fashion_results.context.image_names[1]


def test_language_button_switches_to_korean(opened):
    page = opened()
    assert "어텐션" not in page.locator("main").inner_text()
    page.locator("#language").click()
    page.wait_for_function("$('asked').textContent.includes('층 4')")
    text = page.locator("main").inner_text()
    assert "어텐션" in text
    assert "Every layer" not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_page_fits_the_window_and_text_is_readable(opened, width, scheme):
    page = opened(width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert contrast(ink, paper) > 7
    font_sizes = page.evaluate(
        "[...document.querySelectorAll('main p, main td, main code')].map("
        "(e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(font_sizes) >= 12


def contrast(first, second):
    """Return the contrast of two CSS colours as defined by WCAG."""
    luminances = []
    for text in (first, second):
        channels = np.array([int(part) for part in text[4:-1].split(",")]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        luminances.append(linear @ [0.2126, 0.7152, 0.0722] + 0.05)
    return max(luminances) / min(luminances)


def test_names_and_labels_are_escaped_in_a_browser(opened):
    bundle = vitrail.load("fashion")
    bundle = dataclasses.replace(bundle, labels=[f"{EVIL}{label}" for label in bundle.labels])
    settings = {"name": EVIL, "names": [EVIL, EVIL], "other_images": CLOTHES[2:20], "against": (EVIL, bundle)}
    page = opened(compute_panels(bundle, CLOTHES[:2], **settings))
    assert EVIL in page.locator("#layers").inner_text()
    assert page.title().startswith("Inside ")
    assert page.locator("img[src=x]").count() == 0
    assert EVIL in page.locator("main").inner_text()


def test_smallest_page_disables_the_selection_of_patches(opened, fashion_results, monkeypatch):
    monkeypatch.setattr("vitrail.reports.inspect.inspection_page.LIMIT", 1000)
    page = opened()
    assert page.locator("input[name=way]").first.is_disabled()
    page.locator("#stage").hover(position=patch_centre(page, 2, 3))
    assert page.locator("#asked").inner_text().startswith("[CLS]")


def test_medium_page_shows_means_over_heads(opened, fashion_results, monkeypatch):
    attention = fashion_results.panels["attention"]
    assert [panel.detail for panel in attention.smaller_versions()][1] == "means"
    figures = render_figures(fashion_results)
    panel_versions = [[panel, *panel.smaller_versions()] for panel in fashion_results.panels.values()]
    panels = [versions[min(2, len(versions) - 1)] for versions in panel_versions]
    page_text = render_page(fashion_results, {panel: panel.html(figures) for panel in panels})
    monkeypatch.setattr("vitrail.reports.inspect.inspection_page.LIMIT", len(page_text.encode()))
    page = opened()
    config = fashion_results.context.model.config
    assert page.locator(".cell").count() == config.depth * config.heads
    page.locator("#stage").click(position=patch_centre(page, 2, 3))
    page.wait_for_function("document.querySelectorAll('.cell').length === 5")
    assert "head" not in page.locator("#asked").inner_text()
    page.locator("#class").click()
    page.wait_for_function("document.querySelectorAll('.cell').length === 15")


def test_model_without_cls_has_a_mean_patch(opened):
    """The mean patch has only outgoing attention. A selected patch has both directions."""
    model = redraw(vitrail.create("ViT-Nano/7", classes=10, pool="gap"), std=0.2)
    preprocess = vitrail.Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    page = opened(compute_panels(vitrail.Bundle(model=model, preprocess=preprocess), CLOTHES[:1]))
    assert page.locator("#asked").inner_text().startswith("mean of patches · where it looks")
    page.locator("input[value=to]").check()
    page.wait_for_timeout(100)
    assert page.locator("#asked").inner_text().startswith("mean of patches · where it looks")
    page.locator("#stage").press("ArrowRight")
    page.wait_for_function("$('asked').textContent.startsWith('row 2, column 2 · who looks at it')")


def test_registers_without_cls_are_called_registers(opened):
    model = redraw(vitrail.create("ViT-Nano/7", classes=10, pool="gap", registers=2), std=0.2)
    preprocess = vitrail.Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    results = compute_panels(vitrail.Bundle(model=model, preprocess=preprocess), CLOTHES[:1], inside=range(4))
    page, largest = opened(results), set()
    for layer in results.to_json()["pictures"][0]["inside"]:
        page.locator("#inside-layer").select_option(str(layer["layer"]))
        for head in layer["heads"]:
            page.locator("#inside-head").select_option(str(head["head"]))
            best = int(np.argmax(head["weights"]))
            name = f"R{best}" if best < 2 else "row {}, column {}".format(*divmod(best - 2, 4))
            note = page.locator("[data-note=weights]").inner_text()
            assert f" for {name}, " in note
            assert "; registers " in note
            largest.add(name)
    assert {"R0", "R1"} <= largest


def test_family_without_attention_has_a_page(browser, tmp_path):
    model = redraw(vitrail.create("ResNet-Nano", classes=10), std=0.05)
    preprocess = vitrail.Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    write_page(compute_panels(vitrail.Bundle(model=model, preprocess=preprocess), CLOTHES[:2]), tmp_path / "out")
    complaints = []
    page = browser.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "out" / "index.html").as_uri())
    page.locator(".thumb").nth(1).click()
    page.locator("#language").click()
    assert "계열에는 패치 사이의 어텐션이 없습니다" in page.locator("#absent").inner_text()
    page.close()
    assert not complaints


def test_touch_selects_a_patch(browser, fashion_results, tmp_path):
    write_page(fashion_results, tmp_path / "out")
    context = browser.new_context(has_touch=True, viewport={"width": 400, "height": 800})
    page = context.new_page()
    page.goto((tmp_path / "out" / "index.html").as_uri())
    page.wait_for_selector(".cell canvas")
    page.locator("#stage").tap(position=patch_centre(page, 3, 3))
    page.wait_for_function("$('asked').textContent.startsWith('row ')")
    assert page.locator("#asked").inner_text().startswith("row 3, column 3")
    context.close()


# The followed patch


def printed_values(page, index):
    """Return the values that the walkthrough prints for a step."""
    texts = page.locator("[data-image='0'] [data-values]").all_inner_texts()
    return [float(text) for text in texts[index].split(",")[:6]]


def test_click_on_the_image_changes_the_followed_patch(opened, fashion_results):
    page = opened()
    activations = vitrail.look(fashion_results.context.model, fashion_results.context.images[:1], inside=[0])

    def check_numbers(patch):
        for index, step in enumerate(("patches", "projected")):
            expected = activations.steps[step][0, patch, :6].tolist()
            assert printed_values(page, index) == pytest.approx(expected, rel=6e-3, abs=1e-3)
        length = float(page.locator("[data-image='0'] [data-length]").nth(2).inner_text())
        assert length == pytest.approx(float(activations.steps["blocks.2"][0, 1 + patch].norm()), rel=6e-3)
        note = page.locator("[data-note=msa]").inner_text()
        assert float(note.split()[-1]) == pytest.approx(
            float(activations.steps["blocks.0.msa"][0, 1 + patch].norm()), rel=6e-3
        )
        scores = activations.steps["blocks.0.scores"][0, 0, 1 + patch]
        note_parts = page.locator("[data-note=scores]").inner_text().split()
        assert float(note_parts[1]) == pytest.approx(float(scores.min()), rel=6e-3)
        assert float(note_parts[3].rstrip(";")) == pytest.approx(float(scores.max()), rel=6e-3)

    check_numbers(24)
    image = page.locator("[data-image='0'] .place").first
    box = image.bounding_box()
    image.click(position={"x": 5.5 * box["width"] / 7, "y": 1.5 * box["height"] / 7})
    assert "row 1, column 5" in page.locator("#followed").inner_text()
    check_numbers(12)
    assert page.locator("#asked").inner_text().startswith("row 1, column 5")  # attention follows, too
    image.press("ArrowDown")
    check_numbers(19)
    page.locator("#stage").click(position=patch_centre(page, 0, 0))
    check_numbers(0)
    page.locator("#inside-layer").select_option("4")
    page.locator("#inside-head").select_option("2")
    assert "layer 4 · head 2" in page.locator("#inside-of").inner_text()
    page.locator("input[value=class]").check()
    assert page.locator("#inside-of").inner_text().startswith("[CLS]")
    page.locator("#language").click()
    assert "따라가는 패치: 0행 0열" in page.locator("#followed").inner_text()


def test_phone_folds_all_but_the_first_sections(opened):
    page = opened(width=390)
    assert page.evaluate("document.documentElement.scrollHeight") < 11_000
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert not page.locator("#layers table").first.is_visible()
    page.locator("nav a[href='#layers']").click()
    assert page.locator("#layers table").first.is_visible()
    assert not page.locator("#positions img").is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # on paper everything is unfolded
    assert page.locator("#positions img").is_visible()
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.locator("#positions img").is_visible()


@pytest.mark.parametrize("name", ["ResNet-Nano", "LSTM-Nano/7", "Mixer-Nano/7", "MLP-Nano", "iGPT-Micro"])
def test_walkthrough_of_every_family_follows_the_patch(browser, name, tmp_path):
    model = redraw(vitrail.create(name, classes=10, channels=1), std=0.1)
    preprocess = vitrail.Preprocess(resolution=model.config.resolution, mean=(0.5,), std=(0.5,))
    write_page(compute_panels(vitrail.Bundle(model=model, preprocess=preprocess), CLOTHES[:1]), tmp_path / "out")
    complaints = []
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "out" / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    if model.config.grid is not None:
        before = page.locator("[data-length]").last.inner_text()
        page.locator(".place").first.press("ArrowUp")
        assert page.locator("[data-length]").last.inner_text() != before
    else:
        assert page.locator("[data-length]").last.inner_text()
    page.close()
    assert not complaints


def test_page_works_in_a_notebook_frame(browser, fashion_results, tmp_path):
    frame_html = vitrail.inspect("fashion", CLOTHES[:1], layers=[0, -1])._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{frame_html}</body>")
    complaints = []
    page = browser.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.locator(".cell canvas").first.wait_for()
    frame.locator("nav a[href='#inside']").click()
    frame.locator(".place").first.press("ArrowLeft")
    assert "row 3, column 2" in frame.locator("#followed").inner_text()
    frame.locator("#language").click()
    assert "따라가는 패치" in frame.locator("#followed").inner_text()
    page.close()
    assert not complaints


def test_masked_scores_are_not_in_the_range(browser, tmp_path):
    model = redraw(vitrail.create("ViT-Micro/4", classes=10, channels=1, resolution=28, attention="local"), std=0.1)
    preprocess = vitrail.Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    results = compute_panels(vitrail.Bundle(model=model, preprocess=preprocess), CLOTHES[:1], inside=[1])
    write_page(results, tmp_path / "out")
    page = browser.new_page()
    page.goto((tmp_path / "out" / "index.html").as_uri())
    note_parts = page.locator("[data-note=scores]").inner_text().split()
    (inside,) = results.to_json()["pictures"][0]["inside"]
    scores = [score for score in inside["heads"][0]["scores"] if score is not None]
    assert len(scores) < model.config.tokens
    assert [float(note_parts[1]), float(note_parts[3].rstrip(";"))] == pytest.approx(
        [min(scores), max(scores)], rel=6e-3, abs=1e-3
    )
    page.close()
