"""The page of `vitrail explain` in a real browser: every control by keyboard, pointer and touch, both languages, the
address, image files, and accessibility."""

import base64
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.data.sources.registry import open_data
from vitrail.lab.exact import redraw
from vitrail.models.walkthrough import walkthrough_of
from vitrail.reports.explain.explain_page import ExplainImage, explain, make_page

EVIL = '<img src=x onerror="document.title=1">'
CLOTHES = open_data("fashion-40").splits["test"].images
PARTS = walkthrough_of(vitrail.load("fashion").model).explanation().parts.values()
STEPS = [step.name for part in PARTS for step in part]


@pytest.fixture(scope="module")
def bundle():
    return vitrail.load("fashion")


@pytest.fixture(scope="module")
def address(bundle, tmp_path_factory):
    return explain(bundle, output=tmp_path_factory.mktemp("explain") / "walk").as_uri()


@pytest.fixture(scope="module")
def desk(browser):
    """Return one window for the tests of this file. It collects console messages, page errors and network requests."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, has_touch=True, locale="en")
    page = context.new_page()
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.complaints.extend([request.url] * (request.url[:5] != "file:")))
    yield page
    context.close()


@pytest.fixture
def walk(desk, address):
    """Return the page in its initial state, without loading it again. The test fails on collected complaints."""
    if not desk.url.startswith(address):
        desk.goto(address)
    desk.evaluate("restore('#lang=en'); setLanguage('en'); change()")
    settle(desk)
    yield desk
    assert not desk.complaints


def until(page, condition):
    """Wait for a condition in the page. Playwright's own waiting evaluates strings, which the page's policy forbids."""
    page.evaluate(
        f"""async () => {{
          const end = performance.now() + 10000;
          while (!({condition})) {{
            if (performance.now() > end) throw new Error("condition was never true");
            await new Promise((done) => setTimeout(done, 4));
          }}
        }}"""
    )


def settle(page):
    """Wait until the state is drawn, and write it to the address."""
    until(page, "!isScheduled && document.documentElement.dataset.ready")
    page.evaluate("history.replaceState(null, '', address())")


def logits(page):
    settle(page)
    return np.array(page.evaluate("[...now.logits]"))


def show_station(page, station):
    page.evaluate(f"go('{station}')")
    until(page, f"visible.has('{station}') && !stale.has('{station}')")


def torch_logits(bundle, images):
    with torch.inference_mode():
        return bundle.model(bundle.preprocess(images)).numpy()


def test_page_opens_from_disk_without_a_request(walk, bundle):
    assert walk.locator(".station").count() == len(STEPS) == 20
    assert np.abs(logits(walk) - torch_logits(bundle, CLOTHES[:1])[0]).max() < 1e-4
    assert walk.locator("#best").inner_text() == bundle.labels[int(torch_logits(bundle, CLOTHES[:1])[0].argmax())]
    assert walk.evaluate("performance.getEntriesByType('resource').length") == 0


def test_every_station_shows_its_equation_with_numbers(walk):
    for name in STEPS:
        show_station(walk, name)
        live = walk.locator(f"#{name}-live")
        assert any(letter.isdigit() for letter in live.inner_text()), name
        assert live.locator("math").count() >= 1
        assert walk.locator(f"#s-{name} details").count() == 1
        assert walk.locator(f"#{name}-control").locator("button, input, select, [role=slider]").count() >= 1


def test_image_is_chosen_by_pointer_keyboard_and_touch(walk, bundle):
    show_station(walk, "image")
    walk.locator(".thumb").nth(4).click()
    assert np.abs(logits(walk) - torch_logits(bundle, CLOTHES[4:5])[0]).max() < 1e-4
    walk.locator(".thumb").nth(15).focus()
    walk.keyboard.press("Enter")
    assert np.abs(logits(walk) - torch_logits(bundle, CLOTHES[15:16])[0]).max() < 1e-4
    walk.locator(".thumb").nth(7).tap()
    assert np.abs(logits(walk) - torch_logits(bundle, CLOTHES[7:8])[0]).max() < 1e-4


def test_arrow_buttons_shift_the_image(walk, bundle):
    show_station(walk, "image")
    buttons = walk.locator("#image-control button")
    buttons.nth(1).click()
    buttons.nth(1).tap()
    buttons.nth(3).focus()
    walk.keyboard.press("Enter")
    moved = np.roll(CLOTHES[0], (1, 2), axis=(0, 1))
    assert np.abs(logits(walk) - torch_logits(bundle, [moved])[0]).max() < 1e-4
    assert "moved 1, 2" in walk.locator("#changes").inner_text()


@pytest.mark.parametrize("method", ["keys", "pointer", "touch"])
def test_drawing_changes_the_logits_and_can_be_undone(walk, method):
    show_station(walk, "image")
    before, paper = logits(walk), walk.locator(".paper")
    box = paper.bounding_box()
    if method == "keys":
        paper.focus()
        for key in ("ArrowUp", "ArrowLeft", " ", "ArrowLeft", "Enter"):
            walk.keyboard.press(key)
    elif method == "pointer":
        walk.mouse.move(box["x"] + 20, box["y"] + 20)
        walk.mouse.down()
        walk.mouse.move(box["x"] + 90, box["y"] + 30, steps=4)
        walk.mouse.up()
    else:
        paper.tap(position={"x": 40, "y": 40})
    assert np.abs(logits(walk) - before).max() > 0.01
    assert walk.evaluate("state.drawn.length") == 784
    walk.locator("#changes button").click()
    assert np.abs(logits(walk) - before).max() == 0


def test_patch_is_followed_by_pointer_keyboard_and_touch(walk):
    image = walk.locator("#pane-image .map")
    box = image.bounding_box()

    def inside(row, column):
        return {"x": (column + 0.5) * box["width"] / 7, "y": (row + 0.5) * box["height"] / 7}

    image.click(position=inside(2, 3))
    settle(walk)
    assert walk.evaluate("state.patch") == 17
    image.tap(position=inside(6, 1))
    settle(walk)
    assert walk.evaluate("state.patch") == 43
    image.focus()
    walk.keyboard.press("ArrowUp")
    walk.keyboard.press("ArrowRight")
    settle(walk)
    assert walk.evaluate("state.patch") == 37
    assert image.get_attribute("aria-valuetext") == "row 6, column 3"


def test_hidden_patches_are_left_out_of_the_model(walk, bundle):
    show_station(walk, "patches")
    walk.evaluate("update({ patch: 9 })")
    settle(walk)
    hide = walk.locator("#patches-control input")
    hide.click()
    hidden = logits(walk)
    with torch.inference_mode():
        tokens = bundle.model.embed(bundle.preprocess(CLOTHES[:1]))
        visible = [n for n in range(50) if n != 10]
        assert np.abs(hidden - bundle.model.read(bundle.model.encode(tokens[:, visible])).numpy()[0]).max() < 1e-4
    hide.focus()
    walk.keyboard.press("Space")
    assert np.abs(logits(walk) - torch_logits(bundle, CLOTHES[:1])[0]).max() < 1e-4
    hide.tap()
    assert np.array_equal(logits(walk), hidden)
    show_station(walk, "mix")
    walk.locator("#mix-control button").click()
    settle(walk)
    assert walk.evaluate("state.hidden.size") == 2
    walk.evaluate("for (let n = 0; n < 48; n++) state.hidden.add(n); state.hidden.delete(48); change({ patch: 48 })")
    show_station(walk, "patches")
    hide.click()
    settle(walk)
    assert walk.evaluate("state.hidden.size") == 48
    assert walk.locator("#notice-text").inner_text() == "At least one patch must stay visible."
    walk.evaluate("showNotice(null)")


def test_shuffled_patches_change_logits_only_with_positions(walk):
    show_station(walk, "positions")
    positions, shuffle = walk.locator("#positions-control input"), walk.locator("#positions-control button").first
    with_positions = logits(walk)
    shuffle.click()
    assert np.abs(logits(walk) - with_positions).max() > 0.1
    shuffle.focus()
    walk.keyboard.press("Enter")
    positions.tap()
    shuffled = logits(walk)
    walk.locator("#positions-control button").nth(1).click()
    assert np.abs(logits(walk) - shuffled).max() < 1e-5
    positions.focus()
    walk.keyboard.press("Space")
    assert np.array_equal(logits(walk), with_positions)


def test_equations_follow_changes_of_the_model(walk):
    def equation(station):
        show_station(walk, station)
        settle(walk)
        return "".join(walk.locator(f"#{station}-live").inner_text().split())

    walk.evaluate("toggle(state.heads, `${state.layer}.${state.head}`)")
    assert equation("mix").endswith("=0")
    walk.evaluate("toggle(state.heads, `${state.layer}.${state.head}`)")
    walk.evaluate("state.key = PREFIX + 10; toggleHidden(10)")
    assert equation("scores").endswith("=\N{MINUS SIGN}∞")
    walk.evaluate("toggleHidden(10); change({ temperature: -16 })")
    assert re.search(r"\de\W?\d", equation("softmax")) is None
    walk.evaluate("change({ temperature: 0, shuffle: 7, patch: 24, pixel: 5 })")
    assert equation("image").rpartition("=")[2] == equation("flatten").rpartition("=")[2]
    walk.evaluate("change({ positions: 'off', hidden: new Set([24, 25, 31]) })")
    hidden = logits(walk)
    walk.evaluate("change({ shuffle: 0 })")
    assert np.abs(logits(walk) - hidden).max() < 1e-5


SLIDERS = {"flatten": "pixel", "project": "feature", "scores": "key", "mlp": "unit", "read": "feature"}


@pytest.mark.parametrize("station", SLIDERS)
def test_slider_changes_state_and_equation(walk, station):
    show_station(walk, station)
    slider, live = walk.locator(f"#{station}-control input"), walk.locator(f"#{station}-live")
    before = logits(walk), live.inner_text()
    slider.focus()
    walk.keyboard.press("End")
    settle(walk)
    end = walk.evaluate(f"state.{SLIDERS[station]}")
    assert end == int(slider.get_attribute("max"))
    assert live.inner_text() != before[1]
    box = slider.bounding_box()
    slider.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    settle(walk)
    middle = walk.evaluate(f"state.{SLIDERS[station]}")
    assert abs(middle - end / 2) <= 1 + end / 20
    slider.tap(position={"x": box["width"] / 4, "y": box["height"] / 2})
    settle(walk)
    assert walk.evaluate(f"state.{SLIDERS[station]}") < middle
    assert np.array_equal(logits(walk), before[0])


def test_temperature_changes_the_logits(walk, bundle):
    show_station(walk, "softmax")
    slider = walk.locator("#softmax-control input")
    before = logits(walk)
    slider.focus()
    walk.keyboard.press("End")
    assert np.abs(logits(walk) - before).max() > 0.01
    assert walk.locator("#softmax-control output").inner_text() == "16.0"
    assert "temperature 16.0" in walk.locator("#changes").inner_text()
    slider.tap(position={"x": 5, "y": slider.bounding_box()["height"] / 2})
    settle(walk)
    assert walk.evaluate("state.temperature") < 0
    slider.click(position={"x": slider.bounding_box()["width"] / 2, "y": slider.bounding_box()["height"] / 2})
    settle(walk)
    assert abs(walk.evaluate("state.temperature")) <= 1


@pytest.mark.parametrize(("station", "name"), [("norm", "layer"), ("qkv", "head"), ("cls", "token")])
def test_choice_by_pointer_keyboard_and_touch(walk, station, name):
    show_station(walk, station)
    options, before = walk.locator(f"#{station}-control input"), walk.evaluate(f"state.{name}")
    options.nth(1).click()
    settle(walk)
    clicked = walk.evaluate(f"state.{name}")
    assert clicked != before
    walk.keyboard.press("ArrowLeft")
    settle(walk)
    assert walk.evaluate(f"state.{name}") == before
    options.nth(1).tap()
    settle(walk)
    assert walk.evaluate(f"state.{name}") == clicked


def test_following_cls_shows_its_attention(walk, bundle):
    walk.evaluate("update({ token: 'cls', layer: 4, head: 2 })")
    show_station(walk, "softmax")
    expected = vitrail.look(bundle.model, bundle.preprocess(CLOTHES[:1])).attention[4][0, 2, 0]
    assert np.abs(np.array(walk.evaluate("[...headRow('weights', 0, TOKENS)]")) - expected.numpy()).max() < 1e-5
    assert f"{100 * expected.max():.1f} %" in walk.locator("#softmax-show").inner_text()


SWITCHES = {
    "heads": ("input", "head 0 of layer 0 off"),
    "attended": ("input", "attention of layer 0 off"),
    "added": ("input", "MLP of layer 0 off"),
    "layers": ("input", "layer 0 off"),
}


@pytest.mark.parametrize("station", SWITCHES)
def test_switched_off_parts_change_the_logits(walk, station):
    show_station(walk, station)
    selector, change = SWITCHES[station]
    switch, before = walk.locator(f"#{station}-control {selector}").first, logits(walk)
    switch.click()
    off = logits(walk)
    assert np.abs(off - before).max() > 1e-3
    assert change in walk.locator("#changes").inner_text()
    switch.focus()
    walk.keyboard.press("Space")
    assert np.array_equal(logits(walk), before)
    switch.tap()
    assert np.array_equal(logits(walk), off)
    walk.locator("#undo").click()
    assert np.array_equal(logits(walk), before)


def test_bars_show_current_and_unchanged_probabilities(walk):
    walk.evaluate("change({ shuffle: 5 })")
    settle(walk)
    rows = walk.evaluate(
        "[...$('bars').children].map((row) => [row.children[0].textContent, parseFloat(row.children[2].textContent),"
        " parseFloat(row.querySelector('.now').style.width), parseFloat(row.querySelector('.was').style.left)])"
    )
    shares = walk.evaluate("[labels.map((label, k) => [label, 100 * now.shares[k], 100 * before.shares[k]])][0]")
    by_name = {name: (now, before) for name, now, before in shares}
    for name, percentage, bar, line in rows:
        assert percentage == pytest.approx(by_name[name][0], abs=0.06)
        assert bar == pytest.approx(by_name[name][0], abs=0.06)
        assert line == pytest.approx(by_name[name][1], abs=0.06)


def test_logit_lens_ends_with_the_prediction(walk, bundle):
    show_station(walk, "lens")
    rows = walk.locator("#lens-show tbody tr")
    assert rows.count() == 6
    assert rows.nth(5).locator("td").nth(0).inner_text().startswith(walk.locator("#best").inner_text())
    select = walk.locator("#lens-control select")
    select.select_option(label="Sneaker")
    settle(walk)
    assert walk.locator("#lens-show thead").inner_text().strip().endswith("probability of Sneaker")
    select.focus()
    walk.keyboard.press("ArrowUp")
    settle(walk)
    assert walk.evaluate("labels[state.class]") == "Shirt"


def test_space_and_arrow_keys_change_the_station(walk):
    walk.locator("h1").click()
    for key, station in [(" ", "patches"), ("ArrowRight", "flatten"), ("ArrowLeft", "patches"), ("Shift+ ", "image")]:
        walk.keyboard.press(key)
        settle(walk)
        assert walk.evaluate("state.station") == station
    walk.locator("#next").click()
    walk.locator("#station-select").select_option("mlp")
    settle(walk)
    assert walk.evaluate("state.station") == "mlp"
    assert 0 <= walk.locator("#s-mlp").bounding_box()["y"] < 300
    walk.locator("#previous").tap()
    settle(walk)
    assert walk.evaluate("state.station") == "attended"


def test_address_restores_the_state(walk, address, browser):
    walk.evaluate(
        "update({ image: 3, patch: 8, token: 'cls', layer: 2, head: 1, key: 5, pixel: 3, feature: 40, unit: 7,"
        " class: 4, lang: 'ko', down: -2, right: 3, shuffle: 77, temperature: 5, positions: 'off' });"
        "state.hidden.add(3).add(30); state.heads.add('1.2'); state.attention.add(4); state.mlp.add(0);"
        "setLanguage('ko'); go('mix');"
        "change({ drawn: images[3].pixels.map((level, i) => (i % 7 ? level : 255 - level)) })"
    )
    expected = logits(walk)
    context = browser.new_context(viewport={"width": 390, "height": 800}, locale="en")
    other = context.new_page()
    other.goto(address + walk.evaluate("location.hash"))
    assert np.array_equal(logits(other), expected)
    state = "JSON.stringify(state, (name, value) => (value instanceof Set ? [...value].sort() : value))"
    assert json.loads(other.evaluate(state)) == json.loads(walk.evaluate(state))
    assert other.evaluate("document.documentElement.lang") == "ko"
    assert "밸류 섞기" in other.locator("#station-select").evaluate("(box) => box.selectedOptions[0].textContent")
    # The page may replace the new address by the previous one before the event arrives. The new one must win.
    other.evaluate(
        "location.hash = '#image=99&patch=-1&layer=x&heads=9.9_0.0&hidden=7_700&drawn=AAAA&station=nowhere';"
        "history.replaceState(null, '', address())"
    )
    until(other, "state.image === 0")
    settle(other)
    assert other.evaluate("[state.image, state.layer, state.hidden.size, state.drawn, state.station]") == [
        0, 0, 1, None, "image",
    ]  # fmt: skip
    context.close()


def test_image_files_are_read_like_in_python(walk, bundle, tmp_path):
    show_station(walk, "image")
    file_input = walk.locator("input[type=file]")
    Image.fromarray(CLOTHES[15][..., 0]).save(tmp_path / "boot.png")
    file_input.set_input_files(tmp_path / "boot.png")
    until(walk, "state.image === 40")
    assert np.abs(logits(walk) - torch_logits(bundle, CLOTHES[15:16])[0]).max() < 1e-4
    notice = walk.locator("#notice-text").inner_text()
    assert notice == "boot.png: 28 \N{MULTIPLICATION SIGN} 28 pixels, in grey, the input size of the model."

    photo = Image.linear_gradient("L").resize((333, 200)).convert("RGB")
    photo.paste((200, 30, 40), (100, 50, 220, 150))
    photo.save(tmp_path / "photo.png")
    file_input.set_input_files(tmp_path / "photo.png")
    until(walk, "state.name === 'photo.png'")
    pixels = np.array(walk.evaluate("[...images[40].pixels]")).reshape(28, 28, 1)
    assert np.abs(pixels - bundle.preprocess.crop(tmp_path / "photo.png")).max() <= 1
    assert np.abs(logits(walk) - torch_logits(bundle, [tmp_path / "photo.png"])[0]).max() < 0.05
    assert "333 × 200 pixels, resized and cropped to 28 × 28, in grey" in walk.locator("#notice-text").inner_text()  # noqa: RUF001

    before = logits(walk)
    (tmp_path / "text.png").write_text("no image at all")
    file_input.set_input_files(tmp_path / "text.png")
    until(walk, "$('notice-text').textContent.startsWith('text.png is not an image')")
    assert np.array_equal(logits(walk), before)
    dropped = base64.b64encode((tmp_path / "boot.png").read_bytes()).decode()
    walk.evaluate(
        "(text) => { const transfer = new DataTransfer(); transfer.items.add(new File([bytesOf(text)], 'again.png'));"
        " document.body.dispatchEvent(new DragEvent('drop', { bubbles: true, dataTransfer: transfer })); }",
        dropped,
    )
    until(walk, "state.name === 'again.png'")
    assert np.abs(logits(walk) - torch_logits(bundle, CLOTHES[15:16])[0]).max() < 1e-4
    walk.locator("#notice-close").click()
    assert walk.locator("#notice").is_hidden()


def test_language_button_switches_to_korean_and_back(walk):
    walk.locator("#language").click()
    settle(walk)
    text = walk.locator("main").inner_text()
    assert "위치 임베딩" in text
    assert "Choose an image" not in text
    assert walk.title() == "ViT-Fashion/4, 한 단계씩"
    walk.locator("#language").tap()
    settle(walk)
    assert "위치 임베딩" not in walk.locator("main").inner_text()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page_is_accessible_and_fits_the_window(browser, address, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto(f"{address}#positions=off&hidden=3&lang={'ko' if width == 390 else 'en'}")
    settle(page)
    until(page, "page.stations.every((name) => !stale.has(name))")
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    violations = axe.Axe().run(page).response["violations"]
    serious = [entry for entry in violations if entry["impact"] in ("serious", "critical")]
    assert {entry["id"]: entry["nodes"][0]["html"][:120] for entry in serious} == {}
    context.close()


def test_page_without_javascript_says_that_it_is_needed(browser, address):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    text = page.locator("main").inner_text()
    assert "it needs JavaScript" in text
    assert "JavaScript가 필요한데" in text
    assert "One matrix E, the same for every patch" in text
    context.close()


def test_hostile_labels_and_colour_model_without_cls(browser, tmp_path):
    """Also registers, mean pooling, three channels, a hidden layer in the head, and patches that are not square."""
    torch.manual_seed(0)
    model = redraw(
        vitrail.create(
            "ViT-Nano/7",
            classes=3,
            channels=3,
            resolution=(32, 40),
            patch=(8, 10),
            pool="gap",
            registers=2,
            position="sincos-2d",
            representation="tanh",
            activation="gelu-tanh",
            qkv_bias=False,
        ),
        std=0.3,
    )
    preprocess = vitrail.Preprocess(resolution=(32, 40), crop_fraction=1.0)
    bundle = vitrail.Bundle(model=model, preprocess=preprocess, labels=(EVIL, "b", "c"))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 40, 3)).astype(np.uint8)
    (tmp_path / "index.html").write_text(
        make_page(bundle, [ExplainImage(image, EVIL) for image in pixels]), encoding="utf-8"
    )
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], locale="en")
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "index.html").as_uri())
    assert np.abs(logits(page) - torch_logits(bundle, pixels[:1])[0]).max() < 1e-4
    for name in STEPS:
        show_station(page, name)
    assert page.title() == "ViT-Nano/7, step by step"
    assert page.locator("img[src=x]").count() == 0
    assert EVIL in page.locator("#answer-show").inner_text()
    assert "no [CLS] token" in page.locator("#s-cls").inner_text()
    show_station(page, "image")
    page.locator(".paper").click()
    settle(page)
    show_station(page, "answer")
    page.locator("#answer-control button").nth(1).click()
    until(
        page,
        "$('notice-text').textContent.startsWith('The link contains everything except the pixels of your drawing')",
    )
    link = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(link)
    until(page, "$('notice-text').textContent.startsWith('This link does not contain the pixels')")
    assert not complaints
    context.close()
