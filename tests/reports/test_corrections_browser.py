"""Corrections of labels on pages in a real browser, and a run that is trained with the saved file."""

import csv
import os

import pytest
from PIL import Image

import vitrail
from vitrail.core.files import escape_surrogates
from vitrail.data.sources.registry import CorrectedData, open_data

EVIL = ["=1+1.png", 'a"b,c.png', "two\nlines.png", "a b#1%?.png", os.fsdecode(b"caf\xe9.png"), "<b>.png", "개미.png"]
NO_STORAGE = "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name, { get() { throw new Error(name); } });"  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with `photos`, in which seven labels are wrong, and the pages of `evaluate` and `predict`."""
    root = tmp_path_factory.mktemp("corrections")
    clothes = open_data("fashion-40")
    split = clothes.splits["test"]
    names = [name.replace("T-shirt/top", "Dress") for name in clothes.labels]
    for index in range(40):
        wrong = index < len(EVIL)
        label = "Ankle boot" if wrong and split.labels[index] else "Bag" if wrong else names[split.labels[index]]
        (root / "photos" / label).mkdir(parents=True, exist_ok=True)
        file = root / "photos" / label / (EVIL[index] if wrong else f"{index}.png")
        Image.fromarray(split.images[index][..., 0]).save(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("vitrail.reports.contact_sheet.IMAGES_PER_PAGE", 5)
        vitrail.evaluate("fashion", "photos", page="mistakes")
        vitrail.predict("fashion", ["photos"], page="sheet")
    return root


@pytest.fixture
def opened(browser, folder):
    """Return a function that opens a page. The test fails on messages, errors and requests to other hosts."""
    complaints, contexts = [], []

    def open_page(name, fragment="", *, script="", **options):
        context = browser.new_context(accept_downloads=True, **options)
        contexts.append(context)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: complaints.extend([request.url] * (request.url[:5] not in ("file:", "data:", "blob:"))),
        )
        page.goto((folder / name).as_uri() + fragment)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


def choose(page, index, label):
    """Choose a label for a tile, by mouse, and return the tile's file."""
    tile = page.locator("[data-file]").nth(index)
    if tile.locator("select").count() == 0:
        tile.locator(".control button").click()
    tile.locator("select").select_option(label=label)
    return tile.get_attribute("data-file")


def save(page, path):
    with page.expect_download() as download:
        page.locator("#save").click()
    assert download.value.suggested_filename == "corrections.csv"
    download.value.save_as(path)
    assert path.read_bytes().startswith(b"\xef\xbb\xbffile,label\r\n")
    with path.open(newline="", encoding="utf-8-sig") as file:
        return dict(list(csv.reader(file))[1:])


def test_saved_corrections_are_the_labels_of_the_next_run(opened, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    page = opened("mistakes/index.html")
    assert page.locator("#corrections").is_hidden()
    changed, left_out = choose(page, 0, "Coat"), choose(page, 1, "leave out")
    kept = choose(page, 2, "Coat")
    choose(page, 2, "no change")
    assert page.locator("#corrections output").inner_text() == "corrections: 2"
    rows = save(page, tmp_path / "corrections.csv")
    assert sorted(rows.values()) == ["", "Coat"]
    before = {escape_surrogates(path): label for path, label in labels_of(open_data("photos")).items()}
    after = {
        escape_surrogates(path): label
        for path, label in labels_of(open_data(CorrectedData("photos", tmp_path / "corrections.csv"))).items()
    }
    assert after == {**{path: label for path, label in before.items() if path != left_out}, changed: "Coat"}
    assert after[kept] == before[kept]
    run = vitrail.finetune("fashion", "photos", steps=1, batch=8, corrections=tmp_path / "corrections.csv")
    counts = run.bundle.provenance["corrections"]
    assert (counts["changed"], counts["left_out"]) == (1, 1)


def labels_of(dataset):
    (split,) = dataset.splits.values()
    return {
        os.path.relpath(path, dataset.root): dataset.labels[label]
        for path, label in zip(split.images, split.labels, strict=True)
    }


def test_names_with_special_characters_survive_page_and_file(opened, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    page = opened("mistakes/index.html")
    files = []
    while True:
        count = page.locator("[data-file]").count()
        files += [choose(page, index, "Coat") for index in range(count)]
        following = page.locator("nav a.en", has_text="next page" if "mistakes-" in page.url else "page 2")
        if not following.count():
            break
        following.first.click()
        page.wait_for_load_state()
    assert {escape_surrogates(name) for name in EVIL} <= {file.partition("/")[2] for file in files}
    rows = save(page, tmp_path / "corrections.csv")
    assert rows == dict.fromkeys(files, "Coat")
    dataset = open_data(CorrectedData("photos", tmp_path / "corrections.csv"))
    assert {escape_surrogates(name) for name, label in labels_of(dataset).items() if label == "Coat"} >= set(files)
    vitrail.evaluate("fashion", "photos", corrections=tmp_path / "corrections.csv", page=tmp_path / "again")
    page.goto((tmp_path / "again/index.html").as_uri())
    file = choose(page, 0, "Bag")
    assert save(page, tmp_path / "more.csv") == {**rows, file: "Bag"}  # one file has the earlier corrections, too


def test_file_saved_from_contact_sheet_is_data_and_corrections(opened, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    page = opened("sheet/index.html")
    tiles = page.locator("[data-file]")
    names = tiles.evaluate_all("tiles => tiles.map((tile) => tile.dataset.file)")
    plain = [index for index, name in enumerate(names) if name.endswith("0.png") or name.endswith("5.png")]
    labels = dict(zip([choose(page, index, ["Coat", "Bag"][index % 2]) for index in plain], plain, strict=True))
    rows = save(page, tmp_path / "corrections.csv")
    assert rows == {name: ["Coat", "Bag"][index % 2] for name, index in labels.items()}
    assert all(os.path.isabs(name) for name in rows)  # noqa: PTH117
    data = open_data("corrections.csv")
    assert len(data.first_split) == len(rows)
    corrected = open_data(CorrectedData(folder / "photos", "corrections.csv"))
    assert corrected.corrections.rows.keys() == {os.path.relpath(name, folder / "photos") for name in rows}


@pytest.mark.parametrize("script", ["", NO_STORAGE], ids=["storage", "no-storage"])
def test_choices_are_kept_on_other_pages_of_the_folder(opened, folder, script):
    page = opened("mistakes/index.html", script=script)
    file = choose(page, 0, "Coat")
    page.locator("nav a.en", has_text="page 2").first.click()
    page.wait_for_url("**/mistakes-2.html#en")
    assert page.locator("#corrections b").inner_text() == "1"
    choose(page, 0, "Coat")
    page.locator("nav a.en", has_text="overview").first.click()
    page.wait_for_url("**/index.html#en")
    assert page.locator("#corrections b").inner_text() == "2"
    first = page.locator(".corrected")
    assert first.get_attribute("data-file") == file
    assert first.locator("select").evaluate("select => select.value") == "Coat"
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator("#clear").click()
    assert page.locator("#corrections").is_hidden()
    page.locator("nav a.en", has_text="page 2").first.click()
    page.wait_for_url("**/mistakes-2.html#en")
    assert page.locator("#corrections").is_hidden()
    assert page.locator(".corrected").count() == 0


def test_choices_survive_a_reload_and_appear_in_another_tab(opened, folder):
    page = opened("mistakes/index.html")
    choose(page, 0, "Coat")
    page.reload()
    assert page.locator("#corrections b").inner_text() == "1"
    other = page.context.new_page()
    other.goto((folder / "mistakes/mistakes-1.html").as_uri())
    choose(other, 1, "Coat")
    page.wait_for_function("document.querySelector('#corrections b').textContent === '2'")


def test_image_links_to_its_photo(opened, folder):
    page = opened("mistakes/mistakes-1.html")
    links = page.locator("figure a")
    assert links.count() == 5
    for index in range(5):
        name = page.locator("[data-file]").nth(index).get_attribute("data-file")
        assert links.nth(index).locator("img").get_attribute("alt").endswith(name)
        with page.expect_navigation():
            links.nth(index).click()
        assert page.evaluate("document.images[0].naturalWidth") == 28
        page.go_back()


def test_label_is_chosen_by_keyboard_in_korean_on_a_phone(opened, folder):
    options = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}
    page = opened("mistakes/index.html", "#ko", script="HTMLSelectElement.prototype.showPicker = undefined;", **options)
    assert "레이블이 잘못되었으면" in page.locator("main").inner_text()
    page.locator("figure a").first.focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "레이블 변경"
    assert page.evaluate("document.getElementById(document.activeElement.getAttribute('aria-describedby')).className")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.tagName") == "SELECT"
    page.keyboard.press("ArrowDown")  # the predicted class is first
    tile = page.locator("[data-file]").first
    assert tile.locator("select").evaluate("select => select.value") == tile.get_attribute("data-guess")
    assert page.locator("#corrections").inner_text().split("\n") == [
        "수정한 이미지: 1",
        "corrections.csv 저장",
        "모두 지우기",
    ]
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    options = tile.locator("option[data-choice]").all_text_contents()
    assert options == ["그대로 두기", "이미지 빼기"]
    page.locator("#language").click()
    assert tile.locator("option[data-choice]").all_text_contents() == ["no change", "leave out"]
    page.keyboard.press("Tab")
    page.emulate_media(media="print")
    assert page.locator("#corrections").is_hidden()
    assert page.locator(".control button").first.is_hidden()
    assert tile.locator("select").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_with_corrections_has_no_accessibility_violations(browser, folder, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto((folder / "mistakes/index.html").as_uri())
    choose(page, 0, "Coat")
    violations = {violation["id"] for violation in axe.Axe().run(page).response["violations"]}
    assert violations <= {"landmark-unique"}  # the links to other pages come twice
    context.close()
