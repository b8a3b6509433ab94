"""The page of `vitrail inspect` in a real browser: the pointer, the keys, both languages, narrow and dark."""

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
def found():
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
def opened(browser, found, tmp_path):
    """Opens the page of an examination; anything that a browser complains about fails the test."""
    complaints, contexts = [], []

    def show(examination=found, width=1280, scheme="light", **changes):
        folder = tmp_path / "out"
        write_page(examination, folder, force=True, **changes)
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

    yield show
    for context in contexts:
        context.close()
    assert not complaints


def shown(page):
    """The colours of the map that is laid over the image, a row for each patch."""
    source = page.evaluate("$('laid').toDataURL()")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("RGB"))
    return pixels.reshape(-1, 3).tolist()


def point(page, row, column):
    box = page.locator("#stage").bounding_box()
    return {"x": (column + 0.5) * box["width"] / 7, "y": (row + 0.5) * box["height"] / 7}


def test_every_layer_and_head_is_drawn(opened, found):
    page = opened()
    config = found.context.model.config
    assert page.locator(".cell").count() == config.depth * config.heads
    assert page.locator("#asked").inner_text().startswith("[CLS] · where it looks · layer 4 · head 0")


def test_the_pointer_asks_and_a_click_holds(opened, found):
    page = opened()
    of_class = shown(page)
    page.locator("#stage").hover(position=point(page, 2, 3))
    page.wait_for_function("$('asked').textContent.startsWith('row 2, column 3 · where it looks')")
    weights = found.panels["attention"].weights[0][4][0, 1 + 2 * 7 + 3, 1:]
    assert f"largest {weights.max() * 50:.1f}" in page.locator("#asked").inner_text()
    assert shown(page) != of_class
    page.locator("#stage").click(position=point(page, 5, 1))
    page.locator("h1").hover()
    assert page.locator("#asked").inner_text().startswith("row 5, column 1")
    page.locator("input[value=to]").check()
    page.wait_for_function("$('asked').textContent.startsWith('row 5, column 1 · who looks at it')")
    received = found.panels["attention"].weights[0][4][0, 1:, 1 + 5 * 7 + 1]
    told = float(page.locator("#asked").inner_text().split("largest ")[1].split()[0])
    assert told == pytest.approx(received.max() * 50, abs=0.1, rel=0.02)
    page.locator("#stage").press("ArrowRight")
    page.wait_for_function("$('asked').textContent.startsWith('row 5, column 2')")
    page.locator("#stage").press("Escape")
    page.wait_for_function("$('asked').textContent.startsWith('[CLS]')")


def test_a_small_map_is_laid_over_the_image(opened, found):
    page = opened()
    page.locator(".cell").nth(4).click()
    page.wait_for_function("$('asked').textContent.includes('layer 1 · head 1')")
    assert page.locator(".cell[aria-pressed=true]").count() == 1
    weights = found.panels["attention"].weights[0][1][1, 0, 1:]
    assert shown(page)[weights.argmax()] == [254, 232, 56]


def test_another_image_is_chosen(opened, found):
    page = opened()
    before = shown(page)
    assert page.locator("[data-image='0']").first.is_visible()
    page.locator(".thumb").nth(1).click()
    page.wait_for_function("document.querySelector('.thumb[aria-pressed=true]').dataset.choose === '1'")
    assert not page.locator("[data-image='0']").first.is_visible()
    assert page.locator("[data-image='1']").first.is_visible()
    page.wait_for_function("$('stage').firstChild.className.includes('p1')")
    assert shown(page) != before
    assert page.locator("#stage").get_attribute("aria-label") == found.context.image_names[1]


def test_the_page_speaks_korean(opened):
    page = opened()
    assert "어텐션" not in page.locator("main").inner_text()
    page.locator("#language").click()
    page.wait_for_function("$('asked').textContent.includes('층 4')")
    text = page.locator("main").inner_text()
    assert "어텐션" in text
    assert "Every layer" not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_sticks_out_and_text_is_readable(opened, width, scheme):
    page = opened(width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert contrast(ink, paper) > 7
    small = page.evaluate(
        "[...document.querySelectorAll('main p, main td, main code')].map("
        "(e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(small) >= 12


def contrast(one, other):
    """Of two colours, as WCAG counts it."""
    lights = []
    for text in (one, other):
        channels = np.array([int(part) for part in text[4:-1].split(",")]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        lights.append(linear @ [0.2126, 0.7152, 0.0722] + 0.05)
    return max(lights) / min(lights)


def test_names_stay_text_in_a_browser(opened):
    bundle = vitrail.load("fashion")
    bundle = dataclasses.replace(bundle, labels=[f"{EVIL}{label}" for label in bundle.labels])
    settings = {"name": EVIL, "names": [EVIL, EVIL], "other_images": CLOTHES[2:20], "against": (EVIL, bundle)}
    page = opened(compute_panels(bundle, CLOTHES[:2], **settings))
    assert EVIL in page.locator("#layers").inner_text()
    assert page.title().startswith("Inside ")
    assert page.locator("img[src=x]").count() == 0
    assert EVIL in page.locator("main").inner_text()


def test_a_small_page_says_what_it_left_out(opened, found, monkeypatch):
    monkeypatch.setattr("vitrail.reports.inspect.inspection_page.LIMIT", 1000)
    page = opened()
    assert page.locator("input[name=way]").first.is_disabled()
    page.locator("#stage").hover(position=point(page, 2, 3))
    assert page.locator("#asked").inner_text().startswith("[CLS]")


def test_head_means_follow_the_pointer_on_a_middling_page(opened, found, monkeypatch):
    attention = found.panels["attention"]
    assert [panel.detail for panel in attention.smaller_versions()][1] == "means"
    figures, panels = render_figures(found), [[panel, *panel.smaller_versions()] for panel in found.panels.values()]
    contents = {some[min(2, len(some) - 1)]: "" for some in panels}
    contents = {panel: panel.html(figures) for panel in contents}
    monkeypatch.setattr("vitrail.reports.inspect.inspection_page.LIMIT", len(render_page(found, contents).encode()))
    page = opened()
    config = found.context.model.config
    assert page.locator(".cell").count() == config.depth * config.heads
    page.locator("#stage").click(position=point(page, 2, 3))
    page.wait_for_function("document.querySelectorAll('.cell').length === 5")
    assert "head" not in page.locator("#asked").inner_text()
    page.locator("#class").click()
    page.wait_for_function("document.querySelectorAll('.cell').length === 15")


def test_a_model_without_class_token(opened):
    """Nobody looks at a mean; a held patch can be asked both ways."""
    model = redraw(vitrail.create("ViT-Nano/7", classes=10, pool="gap"), std=0.2)
    eye = vitrail.Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    page = opened(compute_panels(vitrail.Bundle(model=model, preprocess=eye), CLOTHES[:1]))
    assert page.locator("#asked").inner_text().startswith("mean of patches · where it looks")
    page.locator("input[value=to]").check()
    page.wait_for_timeout(100)
    assert page.locator("#asked").inner_text().startswith("mean of patches · where it looks")
    page.locator("#stage").press("ArrowRight")
    page.wait_for_function("$('asked').textContent.startsWith('row 2, column 2 · who looks at it')")


def test_registers_without_class_token_are_called_registers(opened):
    model = redraw(vitrail.create("ViT-Nano/7", classes=10, pool="gap", registers=2), std=0.2)
    eye = vitrail.Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    examination = compute_panels(vitrail.Bundle(model=model, preprocess=eye), CLOTHES[:1], inside=range(4))
    page, largest = opened(examination), set()
    for layer in examination.to_json()["pictures"][0]["inside"]:
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


def test_a_family_without_attention_has_a_page(browser, tmp_path):
    model = redraw(vitrail.create("ResNet-Nano", classes=10), std=0.05)
    eye = vitrail.Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    write_page(compute_panels(vitrail.Bundle(model=model, preprocess=eye), CLOTHES[:2]), tmp_path / "out")
    complaints = []
    page = browser.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "out" / "index.html").as_uri())
    page.locator(".thumb").nth(1).click()
    page.locator("#language").click()
    assert "계열에는 패치 사이의 어텐션이 없습니다" in page.locator("#absent").inner_text()
    page.close()
    assert not complaints


def test_a_finger_asks_by_a_touch(browser, found, tmp_path):
    write_page(found, tmp_path / "out")
    context = browser.new_context(has_touch=True, viewport={"width": 400, "height": 800})
    page = context.new_page()
    page.goto((tmp_path / "out" / "index.html").as_uri())
    page.wait_for_selector(".cell canvas")
    page.locator("#stage").tap(position=point(page, 3, 3))
    page.wait_for_function("$('asked').textContent.startsWith('row ')")
    assert page.locator("#asked").inner_text().startswith("row 3, column 3")
    context.close()


# The patch in hand


def numbers_of(page, key):
    """What the walk prints of a step's vector."""
    texts = page.locator("[data-image='0'] [data-values]").all_inner_texts()
    return [float(text) for text in texts[key].split(",")[:6]]


def test_a_click_on_the_image_follows_another_patch(opened, found):
    page = opened()
    seen = vitrail.look(found.context.model, found.context.images[:1], inside=[0])

    def check(patch):
        for at, step in enumerate(("patches", "projected")):
            expected = seen.steps[step][0, patch, :6].tolist()
            assert numbers_of(page, at) == pytest.approx(expected, rel=6e-3, abs=1e-3)
        length = float(page.locator("[data-image='0'] [data-length]").nth(2).inner_text())
        assert length == pytest.approx(float(seen.steps["blocks.2"][0, 1 + patch].norm()), rel=6e-3)
        inner = page.locator("[data-note=msa]").inner_text()
        assert float(inner.split()[-1]) == pytest.approx(
            float(seen.steps["blocks.0.msa"][0, 1 + patch].norm()), rel=6e-3
        )
        scores = seen.steps["blocks.0.scores"][0, 0, 1 + patch]
        told = page.locator("[data-note=scores]").inner_text().split()
        assert float(told[1]) == pytest.approx(float(scores.min()), rel=6e-3)
        assert float(told[3].rstrip(";")) == pytest.approx(float(scores.max()), rel=6e-3)

    check(24)
    place = page.locator("[data-image='0'] .place").first
    box = place.bounding_box()
    place.click(position={"x": 5.5 * box["width"] / 7, "y": 1.5 * box["height"] / 7})
    assert "row 1, column 5" in page.locator("#followed").inner_text()
    check(12)
    assert page.locator("#asked").inner_text().startswith("row 1, column 5")  # attention follows, too
    place.press("ArrowDown")
    check(19)
    page.locator("#stage").click(position=point(page, 0, 0))
    check(0)
    page.locator("#inside-layer").select_option("4")
    page.locator("#inside-head").select_option("2")
    assert "layer 4 · head 2" in page.locator("#inside-of").inner_text()
    page.locator("input[value=class]").check()
    assert page.locator("#inside-of").inner_text().startswith("[CLS]")
    page.locator("#language").click()
    assert "따라가는 패치: 0행 0열" in page.locator("#followed").inner_text()


def test_a_phone_folds_what_is_secondary(opened):
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
def test_every_family_has_a_walk_that_follows(browser, name, tmp_path):
    model = redraw(vitrail.create(name, classes=10, channels=1), std=0.1)
    eye = vitrail.Preprocess(resolution=model.config.resolution, mean=(0.5,), std=(0.5,))
    write_page(compute_panels(vitrail.Bundle(model=model, preprocess=eye), CLOTHES[:1]), tmp_path / "out")
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


def test_a_page_lives_inside_of_a_notebook(browser, found, tmp_path):
    shown = vitrail.inspect("fashion", CLOTHES[:1], layers=[0, -1])._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{shown}</body>")
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


def test_masked_scores_are_left_out(browser, tmp_path):
    model = redraw(vitrail.create("ViT-Micro/4", classes=10, channels=1, resolution=28, attention="local"), std=0.1)
    eye = vitrail.Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    found = compute_panels(vitrail.Bundle(model=model, preprocess=eye), CLOTHES[:1], inside=[1])
    write_page(found, tmp_path / "out")
    page = browser.new_page()
    page.goto((tmp_path / "out" / "index.html").as_uri())
    told = page.locator("[data-note=scores]").inner_text().split()
    (inside,) = found.to_json()["pictures"][0]["inside"]
    scores = [score for score in inside["heads"][0]["scores"] if score is not None]
    assert len(scores) < model.config.tokens
    assert [float(told[1]), float(told[3].rstrip(";"))] == pytest.approx([min(scores), max(scores)], rel=6e-3, abs=1e-3)
    page.close()
