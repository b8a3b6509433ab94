"""The site that `make docs` builds: no warnings, two languages, no external resources."""

import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.paths import ROOT

# Elements whose resources a browser loads at once, and the attribute with the address.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "embed": "src", "object": "data"}

# Run in a separate process, because packages of Jupyter give warnings.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=600, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[3])
"""


def test_figure_of_layers_equals_the_import_contracts():
    script = ROOT / "docs" / "layers.py"
    figure = runpy.run_path(str(script))["draw"]()
    assert (ROOT / "docs/architecture/layers.svg").read_text(encoding="utf-8") == figure, "run `make format`"
    assert figure.count("<rect") >= 14


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/architecture.ko.md"])
def test_architecture_page_names_existing_objects(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    parts = [name.removeprefix("vitrail.") for layer in layers for name in layer.split(" | ")]
    table = text.split("## ")[1]
    assert [name for name in parts if f"`{name}`" not in table] == []
    names = re.findall(
        r"`([a-z]+(?:\.\w+)+)`", "".join(line for line in text.splitlines(True) if line[:3] in step_rows())
    )
    assert len(names) > 20
    for name in names:
        target = importlib.import_module(f"vitrail.{name.split('.')[0]}")
        for part in name.split(".")[1:]:
            target = getattr(target, part, None) or importlib.import_module(f"{target.__name__}.{part}")


KOREAN = {
    "최신성": "최근성",
    "매개변수": "파라미터",
    "사전학습|사전 훈련|프리트레이닝": "사전 학습",
    "미세조정|파인튜닝": "미세 조정",
    "얼린|얼려": "동결한",
    "선형층|선형 계층": "선형 층",
    "(헤드|모델|층|전체|각각)의? 너비": "폭",
    "내삽|리사이즈하": "보간",
    "스코어": "점수",
    "층 정규화|레이어 정규화": "LayerNorm",
    r"\d%p|퍼센트포인트|%포인트": "5 %p",
    "(?<!과)적합한 곡선": "피팅한(fitted) 곡선",
    "가까이 (보|볼|봅)": "가까운 곳을 보다",
    "가중치로도 따라|재배열해 따라|순서도 따라": "같은 출력을 얻다",
}
"""Preferred Korean terms, by a pattern of the terms to avoid."""


@pytest.mark.parametrize("avoided", KOREAN)
def test_korean_pages_use_one_term_per_concept(avoided):
    pages = [ROOT / "README.ko.md", *(ROOT / "docs").glob("*.ko.md"), *(ROOT / "src").rglob("*.toml")]
    matches = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in pages
        for match in re.finditer(f".{{0,20}}(?:{avoided}).{{0,20}}", path.read_text(encoding="utf-8"))
    ]
    assert matches == [], f"write {KOREAN[avoided]}"


def step_rows():
    """Return the starts of the table rows of numbered steps."""
    return {f"| {number}"[:3] for number in range(1, 20)}


@pytest.mark.parametrize("page", ["docs/extending.md", "docs/extending.ko.md"])
def test_every_example_of_an_extension_is_quoted(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in (ROOT / "tests/extending").glob("*.py"):
        assert f"{{literalinclude}} ../tests/extending/{path.name}" in text, path.name


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("sphinx", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("docs")
    for language, out in (("en", "site"), ("ko", "site/ko")):
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-d", folder / language]
        command += ["-t", "ko", ".", folder / out] if language == "ko" else [".", folder / out]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return folder / "site"


class Page(HTMLParser):
    """Resources that a page loads, targets of its links, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads, self.links, self.names = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.names |= {attributes.get("id"), attributes.get("name")}
        if tag in LOADED:
            self.loads.append(attributes.get(LOADED[tag]) or "")
        elif tag == "link" and attributes.get("rel") not in ("index", "search", "next", "prev", "author"):
            self.loads.append(attributes.get("href") or "")
        elif tag == "a":
            self.links.append(attributes.get("href") or "")


@pytest.mark.slow
def test_site_loads_nothing_from_external_addresses(site):
    outside = re.compile(r"^(https?:)?//", re.IGNORECASE)
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for path in pages:
        page = Page(path)
        assert page.loads
        assert [source for source in page.loads if outside.match(source)] == [], path
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", text), path
    # Scripts may contain external addresses as text, but must not load them.
    loading = re.compile(r"(fetch|import|importScripts|open)\(\s*['\"`](https?:)?//|\.src\s*=\s*['\"`]http")
    for path in site.rglob("*.js"):
        assert not loading.search(path.read_text(encoding="utf-8")), path


@pytest.mark.slow
def test_links_between_pages_and_languages_exist(site):
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    count = 0
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target) or not target:
                continue
            file = (path.parent / target).resolve()
            assert file.exists(), (path, link)
            if anchor and file in pages:
                assert anchor in pages[file].names, (path, link)
            count += 1
    assert count > 1000
    english, korean = (site / "docs/inspect.html").resolve(), (site / "ko/docs/inspect.html").resolve()
    assert "../ko/docs/inspect.html" in pages[english].links
    assert "../../docs/inspect.html" in pages[korean].links


@pytest.mark.slow
def test_every_module_is_in_the_reference(site):
    modules = {
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "src/vitrail").rglob("*.py")
        if path.name != "__main__.py" and "embedded" not in path.parts
    }
    listed = re.findall(r'id="module-(vitrail[\w.]*)"', "".join(p.read_text() for p in site.glob("docs/api/*.html")))
    assert set(listed) >= modules - {"vitrail"}
    assert "vitrail.create" in (site / "docs/api.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_search_works_from_disk_in_both_languages(site):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        urls = []
        page.on("request", lambda request: urls.append(request.url))
        for folder, word in ((site, "rollout"), (site / "ko", "패치")):
            page.goto((folder / "search.html").as_uri() + f"?q={word}")
            page.wait_for_selector("#search-results li a")
            assert "inspect.html" in page.inner_html("#search-results")
        browser.close()
    assert all(url.startswith("file:") for url in urls)


def code_cells(path):
    """Return the code cells of a notebook without comments, each with its output to stdout."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    return [
        (
            re.sub(r" *#.*", "", "".join(cell["source"])),
            "".join(line for output in cell["outputs"] if output.get("name") == "stdout" for line in output["text"]),
        )
        for cell in cells
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 6))
def test_notebooks_of_chapters_print_the_stored_output(site, tmp_path, number):
    pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
    pytest.importorskip("ipykernel", reason="needs the extra `notebooks`")
    notebook = site / f"docs/notes-{number}.ipynb"
    cells = code_cells(notebook)
    assert code_cells(site / f"ko/docs/notes-{number}.ipynb") == cells
    assert sum(bool(output) for _, output in cells) >= 6
    for link in re.findall(r"\]\(([^)#:]+)", notebook.read_text(encoding="utf-8")):
        assert (notebook.parent / link).exists(), link
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-c", EXECUTE, notebook, tmp_path, tmp_path / "done.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for (source, output), (_, printed) in zip(cells, code_cells(tmp_path / "done.ipynb"), strict=True):
        assert not output or printed == output, source
