"""The page of `vitrail explain` in a real browser: every control by keys, pointer and finger, both languages, its
address, files, and what a checker of accessibility finds."""

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
    """One window for the tests of this file; anything that a browser complains about, or asks of others, is kept."""
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
    """The page as it opens, and what changes its state without opening it again."""
    if not desk.url.startswith(address):
        desk.goto(address)
    desk.evaluate("restore('#lang=en'); speak('en'); change()")
    settle(desk)
    yield desk
    assert not desk.complaints


def until(page, condition):
    """Wait for it in the page; Playwright's own waiting evaluates strings there, which the page forbids."""
    page.evaluate(
        f"""async () => {{
          const end = performance.now() + 10000;
          while (!({condition})) {{
            if (performance.now() > end) throw new Error("this never came");
            await new Promise((done) => setTimeout(done, 4));
          }}
        }}"""
    )


def settle(page):
    """Until what was asked for is drawn, and the address holds it."""
    until(page, "!isDue && document.documentElement.dataset.ready")
    page.evaluate("history.replaceState(null, '', address())")


def logits(page):
    settle(page)
    return np.array(page.evaluate("[...now.logits]"))


def see(page, station):
    page.evaluate(f"go('{station}')")
    until(page, f"seen.has('{station}') && !stale.has('{station}')")


def answers(bundle, images):
    with torch.inference_mode():
        return bundle.model(bundle.preprocess(images)).numpy()


def test_it_opens_from_disk_without_a_request(walk, bundle):
    assert walk.locator(".station").count() == len(STEPS) == 20
    assert np.abs(logits(walk) - answers(bundle, CLOTHES[:1])[0]).max() < 1e-4
    assert walk.locator("#best").inner_text() == bundle.labels[int(answers(bundle, CLOTHES[:1])[0].argmax())]
    assert walk.evaluate("performance.getEntriesByType('resource').length") == 0


def test_every_station_shows_its_equation_with_numbers(walk):
    for name in STEPS:
        see(walk, name)
        live = walk.locator(f"#{name}-live")
        assert any(letter.isdigit() for letter in live.inner_text()), name
        assert live.locator("math").count() >= 1
        assert walk.locator(f"#s-{name} details").count() == 1
        assert walk.locator(f"#{name}-control").locator("button, input, select, [role=slider]").count() >= 1


def test_another_image_by_pointer_and_by_keys(walk, bundle):
    see(walk, "image")
    walk.locator(".thumb").nth(4).click()
    assert np.abs(logits(walk) - answers(bundle, CLOTHES[4:5])[0]).max() < 1e-4
    walk.locator(".thumb").nth(15).focus()
    walk.keyboard.press("Enter")
    assert np.abs(logits(walk) - answers(bundle, CLOTHES[15:16])[0]).max() < 1e-4
    walk.locator(".thumb").nth(7).tap()
    assert np.abs(logits(walk) - answers(bundle, CLOTHES[7:8])[0]).max() < 1e-4


def test_moving_the_image(walk, bundle):
    see(walk, "image")
    buttons = walk.locator("#image-control button")
    buttons.nth(1).click()
    buttons.nth(1).tap()
    buttons.nth(3).focus()
    walk.keyboard.press("Enter")
    moved = np.roll(CLOTHES[0], (1, 2), axis=(0, 1))
    assert np.abs(logits(walk) - answers(bundle, [moved])[0]).max() < 1e-4
    assert "moved 1, 2" in walk.locator("#changes").inner_text()


@pytest.mark.parametrize("way", ["keys", "pointer", "touch"])
def test_drawing(walk, way):
    see(walk, "image")
    before, paper = logits(walk), walk.locator(".paper")
    box = paper.bounding_box()
    if way == "keys":
        paper.focus()
        for key in ("ArrowUp", "ArrowLeft", " ", "ArrowLeft", "Enter"):
            walk.keyboard.press(key)
    elif way == "pointer":
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


def test_a_patch_is_taken_in_hand_in_every_way(walk):
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


def test_hiding_patches(walk, bundle):
    see(walk, "patches")
    walk.evaluate("update({ patch: 9 })")
    settle(walk)
    hide = walk.locator("#patches-control input")
    hide.click()
    hidden = logits(walk)
    with torch.inference_mode():
        tokens = bundle.model.embed(bundle.preprocess(CLOTHES[:1]))
        kept = [n for n in range(50) if n != 10]
        assert np.abs(hidden - bundle.model.read(bundle.model.encode(tokens[:, kept])).numpy()[0]).max() < 1e-4
    hide.focus()
    walk.keyboard.press("Space")
    assert np.abs(logits(walk) - answers(bundle, CLOTHES[:1])[0]).max() < 1e-4
    hide.tap()
    assert np.array_equal(logits(walk), hidden)
    see(walk, "mix")
    walk.locator("#mix-control button").click()
    settle(walk)
    assert walk.evaluate("state.hidden.size") == 2
    walk.evaluate("for (let n = 0; n < 48; n++) state.hidden.add(n); state.hidden.delete(48); change({ patch: 48 })")
    see(walk, "patches")
    hide.click()
    settle(walk)
    assert walk.evaluate("state.hidden.size") == 48
    assert walk.locator("#told-words").inner_text() == "One patch must stay."
    walk.evaluate("tell(null)")


def test_shuffling_without_positions_moves_nothing(walk):
    """The invariance of the notes, seen; and with positions, its opposite."""
    see(walk, "positions")
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


def test_equations_stay_true_when_parts_are_changed(walk):
    def told(station):
        see(walk, station)
        settle(walk)
        return "".join(walk.locator(f"#{station}-live").inner_text().split())

    walk.evaluate("toggle(state.heads, `${state.layer}.${state.head}`)")
    assert told("mix").endswith("=0")
    walk.evaluate("toggle(state.heads, `${state.layer}.${state.head}`)")
    walk.evaluate("state.key = PREFIX + 10; hide(10)")
    assert told("scores").endswith("=\N{MINUS SIGN}∞")
    walk.evaluate("hide(10); change({ temperature: -16 })")
    assert re.search(r"\de\W?\d", told("softmax")) is None
    walk.evaluate("change({ temperature: 0, shuffle: 7, patch: 24, pixel: 5 })")
    assert told("image").rpartition("=")[2] == told("flatten").rpartition("=")[2]
    walk.evaluate("change({ positions: 'off', hidden: new Set([24, 25, 31]) })")
    hidden = logits(walk)
    walk.evaluate("change({ shuffle: 0 })")
    assert np.abs(logits(walk) - hidden).max() < 1e-5


SLIDERS = {"flatten": "pixel", "project": "feature", "scores": "key", "mlp": "unit", "read": "feature"}


@pytest.mark.parametrize("station", SLIDERS)
def test_sliders(walk, station):
    see(walk, station)
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


def test_temperature(walk, bundle):
    see(walk, "softmax")
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
def test_choices(walk, station, name):
    see(walk, station)
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


def test_following_the_class_token_shows_its_attention(walk, bundle):
    walk.evaluate("update({ token: 'cls', layer: 4, head: 2 })")
    see(walk, "softmax")
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
def test_parts_of_the_model_are_switched_off(walk, station):
    see(walk, station)
    inside, words = SWITCHES[station]
    switch, before = walk.locator(f"#{station}-control {inside}").first, logits(walk)
    switch.click()
    off = logits(walk)
    assert np.abs(off - before).max() > 1e-3
    assert words in walk.locator("#changes").inner_text()
    switch.focus()
    walk.keyboard.press("Space")
    assert np.array_equal(logits(walk), before)
    switch.tap()
    assert np.array_equal(logits(walk), off)
    walk.locator("#undo").click()
    assert np.array_equal(logits(walk), before)


def test_the_bars_show_now_beside_before(walk):
    walk.evaluate("change({ shuffle: 5 })")
    settle(walk)
    rows = walk.evaluate(
        "[...$('bars').children].map((row) => [row.children[0].textContent, parseFloat(row.children[2].textContent),"
        " parseFloat(row.querySelector('.now').style.width), parseFloat(row.querySelector('.was').style.left)])"
    )
    shares = walk.evaluate("[labels.map((label, k) => [label, 100 * now.shares[k], 100 * before.shares[k]])][0]")
    by_name = {name: (now, before) for name, now, before in shares}
    for name, told, filled, line in rows:
        assert told == pytest.approx(by_name[name][0], abs=0.06)
        assert filled == pytest.approx(by_name[name][0], abs=0.06)
        assert line == pytest.approx(by_name[name][1], abs=0.06)


def test_the_lens_ends_with_the_answer(walk, bundle):
    see(walk, "lens")
    rows = walk.locator("#lens-show tbody tr")
    assert rows.count() == 6
    assert rows.nth(5).locator("td").nth(0).inner_text().startswith(walk.locator("#best").inner_text())
    chosen = walk.locator("#lens-control select")
    chosen.select_option(label="Sneaker")
    settle(walk)
    assert walk.locator("#lens-show thead").inner_text().strip().endswith("probability of Sneaker")
    chosen.focus()
    walk.keyboard.press("ArrowUp")
    settle(walk)
    assert walk.evaluate("labels[state.class]") == "Shirt"


def test_space_and_arrows_step(walk):
    walk.locator("h1").click()
    for key, station in [(" ", "patches"), ("ArrowRight", "flatten"), ("ArrowLeft", "patches"), ("Shift+ ", "image")]:
        walk.keyboard.press(key)
        settle(walk)
        assert walk.evaluate("state.station") == station
    walk.locator("#forth").click()
    walk.locator("#where").select_option("mlp")
    settle(walk)
    assert walk.evaluate("state.station") == "mlp"
    assert 0 <= walk.locator("#s-mlp").bounding_box()["y"] < 300
    walk.locator("#back").tap()
    settle(walk)
    assert walk.evaluate("state.station") == "attended"


def test_the_address_restores_everything(walk, address, browser):
    walk.evaluate(
        "update({ image: 3, patch: 8, token: 'cls', layer: 2, head: 1, key: 5, pixel: 3, feature: 40, unit: 7,"
        " class: 4, lang: 'ko', down: -2, right: 3, shuffle: 77, temperature: 5, positions: 'off' });"
        "state.hidden.add(3).add(30); state.heads.add('1.2'); state.attention.add(4); state.mlp.add(0); speak('ko');"
        "go('mix');"
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
    assert "밸류 섞기" in other.locator("#where").evaluate("(box) => box.selectedOptions[0].textContent")
    # The page may write its former address before it hears of the new one: the new one counts.
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


def test_files_of_every_kind(walk, bundle, tmp_path):
    see(walk, "image")
    choose = walk.locator("input[type=file]")
    Image.fromarray(CLOTHES[15][..., 0]).save(tmp_path / "boot.png")
    choose.set_input_files(tmp_path / "boot.png")
    until(walk, "state.image === 40")
    assert np.abs(logits(walk) - answers(bundle, CLOTHES[15:16])[0]).max() < 1e-4
    told = walk.locator("#told-words").inner_text()
    assert told == "boot.png: 28 \N{MULTIPLICATION SIGN} 28 pixels, in grey: the size that the model reads."

    photo = Image.linear_gradient("L").resize((333, 200)).convert("RGB")
    photo.paste((200, 30, 40), (100, 50, 220, 150))
    photo.save(tmp_path / "photo.png")
    choose.set_input_files(tmp_path / "photo.png")
    until(walk, "state.name === 'photo.png'")
    given = np.array(walk.evaluate("[...images[40].pixels]")).reshape(28, 28, 1)
    assert np.abs(given - bundle.preprocess.crop(tmp_path / "photo.png")).max() <= 1
    assert np.abs(logits(walk) - answers(bundle, [tmp_path / "photo.png"])[0]).max() < 0.05
    assert "333 × 200 pixels, resized and cropped to 28 × 28, in grey" in walk.locator("#told-words").inner_text()  # noqa: RUF001

    before = logits(walk)
    (tmp_path / "text.png").write_text("no image at all")
    choose.set_input_files(tmp_path / "text.png")
    until(walk, "$('told-words').textContent.startsWith('text.png is not an image')")
    assert np.array_equal(logits(walk), before)
    dropped = base64.b64encode((tmp_path / "boot.png").read_bytes()).decode()
    walk.evaluate(
        "(text) => { const given = new DataTransfer(); given.items.add(new File([bytesOf(text)], 'again.png'));"
        " document.body.dispatchEvent(new DragEvent('drop', { bubbles: true, dataTransfer: given })); }",
        dropped,
    )
    until(walk, "state.name === 'again.png'")
    assert np.abs(logits(walk) - answers(bundle, CLOTHES[15:16])[0]).max() < 1e-4
    walk.locator("#told-close").click()
    assert walk.locator("#told").is_hidden()


def test_the_page_speaks_korean(walk):
    walk.locator("#language").click()
    settle(walk)
    text = walk.locator("main").inner_text()
    assert "위치 임베딩" in text
    assert "The model answers" not in text
    assert walk.title() == "ViT-Fashion/4, 한 단계씩"
    walk.locator("#language").tap()
    settle(walk)
    assert "위치 임베딩" not in walk.locator("main").inner_text()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_nothing_serious_for_accessibility_and_nothing_sticks_out(browser, address, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto(f"{address}#positions=off&hidden=3&lang={'ko' if width == 390 else 'en'}")
    settle(page)
    until(page, "page.stations.every((name) => !stale.has(name))")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    found = axe.Axe().run(page).response["violations"]
    bad = {one["id"]: one["nodes"][0]["html"][:120] for one in found if one["impact"] in ("serious", "critical")}
    assert bad == {}
    context.close()


def test_without_javascript_it_says_so(browser, address):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    text = page.locator("main").inner_text()
    assert "it needs JavaScript" in text
    assert "JavaScript가 필요한데" in text
    assert "One matrix E, the same for every patch" in text
    context.close()


def test_hostile_labels_and_a_colour_model_without_class_token(browser, tmp_path):
    """Registers, the mean of patches, colours, a hidden layer in the head, patches that are not square."""
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
    eye = vitrail.Preprocess(resolution=(32, 40), crop_fraction=1.0)
    bundle = vitrail.Bundle(model=model, preprocess=eye, labels=(EVIL, "b", "c"))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 40, 3)).astype(np.uint8)
    (tmp_path / "index.html").write_text(
        make_page(bundle, [ExplainImage(one, EVIL) for one in pixels]), encoding="utf-8"
    )
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], locale="en")
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "index.html").as_uri())
    assert np.abs(logits(page) - answers(bundle, pixels[:1])[0]).max() < 1e-4
    for name in STEPS:
        see(page, name)
    assert page.title() == "ViT-Nano/7, step by step"
    assert page.locator("img[src=x]").count() == 0
    assert EVIL in page.locator("#answer-show").inner_text()
    assert "no [CLS] token" in page.locator("#s-cls").inner_text()
    see(page, "image")
    page.locator(".paper").click()
    settle(page)
    see(page, "answer")
    page.locator("#answer-control button").nth(1).click()
    until(page, "$('told-words').textContent.startsWith('The link holds everything but the pixels of your drawing')")
    link = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(link)
    until(page, "$('told-words').textContent.startsWith('This link does not hold the pixels')")
    assert not complaints
    context.close()
