"""Chapters of the notes: output of their code, tables of the lab's results, and figures of docs/notes.py."""

import base64
import io
import json
import os
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.blocks import RUNNER, blocks, runnable
from tests.paths import ROOT

DOCS = ROOT / "docs"
CHAPTERS = range(1, 6)
LANGUAGES = {"": "A slip", ".ko": "바로잡기"}
SLIPS = {f"S{number}" for number in range(1, 14)}


@pytest.fixture(scope="module")
def script():
    """Return the functions and constants of docs/notes.py by name."""
    return runpy.run_path(str(DOCS / "notes.py"))


def read_chapter(number, language=""):
    return (DOCS / f"notes-{number}{language}.md").read_text(encoding="utf-8")


def claims_in_tables(text):
    """Return the ids of the claims in the tables of a chapter."""
    return [name for ids in re.findall(r"<!-- lab: ([\w ]+) -->", text) for name in ids.split()]


def test_code_of_chapters_prints_the_output_on_the_page(tmp_path):
    jobs = []
    for number in CHAPTERS:
        (tmp_path / str(number)).mkdir()
        page = DOCS / f"notes-{number}.md"
        jobs.append((page.name, str(tmp_path / str(number)), runnable(page)))
    outputs = [output for _, _, blocks_of_page in jobs for _, _, output in blocks_of_page if output is not None]
    assert len(outputs) >= 40
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUNNER]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, env=one_thread, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "1/boot/index.html").exists()


@pytest.mark.parametrize("number", CHAPTERS)
def test_both_languages_have_the_same_output(number):
    english, korean = (
        [block.output for block in blocks(DOCS / f"notes-{number}{language}.md")] for language in LANGUAGES
    )
    assert english == korean


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_claim_and_every_slip_is_in_a_chapter(language, script):
    texts = [read_chapter(number, language) for number in CHAPTERS]
    names = [name for text in texts for name in claims_in_tables(text)]
    assert len(names) == len(set(names))
    assert set(names) == {name for name in script["claims"]() if name.startswith("C")}
    slips = re.findall(rf"^\*\*{LANGUAGES[language]}[, ]+(S\d+)\.\*\*", "\n".join(texts), re.MULTILINE)
    assert sorted(slips) == sorted(SLIPS)


@pytest.mark.parametrize("language", LANGUAGES)
def test_contents_list_the_claims_and_slips_of_chapters(language):
    text = (DOCS / f"notes{language}.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| \[[^\]]*\]\(notes-(\d){language}\.md\) \|.*\| ([\w ]+) \|$", text, re.MULTILINE)
    assert {int(number): set(claims.split()) for number, claims in rows} == {
        number: set(claims_in_tables(read_chapter(number, language))) for number in CHAPTERS
    }
    slips = re.findall(rf"^\| (S\d+) \|.*\[([\d.]+)\]\(notes-(\d){language}\.md#\S+\) \|$", text, re.MULTILINE)
    assert {name for name, _, _ in slips} == SLIPS
    for name, section, number in slips:
        (text,) = re.findall(rf"^## {section} .*?(?=^## |\Z)", read_chapter(number, language), re.DOTALL | re.MULTILINE)
        assert f" {name}.**" in text


@pytest.mark.parametrize("language", LANGUAGES)
def test_tables_equal_the_results_of_the_lab(language, script):
    report = (script["LAB"] / "index.html").read_text(encoding="utf-8")
    for page in [DOCS / f"notes-{number}{language}.md" for number in CHAPTERS]:
        assert page.read_text(encoding="utf-8") == script["fill_tables"](page), "run `make format`"
    for claim in script["claims"]().values():
        if number := script["claim_number"](claim, "en"):
            value = re.search(r"(?:^|: )([-+][\d.]+)", number)[1]
            assert re.search(rf"<b>{claim['id']}</b>.*?<td[^>]*>{re.escape(value)} ", report, re.DOTALL), claim["id"]


def test_korean_pages_have_korean_figures_of_the_lab():
    """Axes and legends are Korean, except names such as ViT."""
    folders = set()
    for page in DOCS.glob("*.md"):
        for folder, figure in re.findall(r"\((lab/[\w-]+/figures)/([\w.-]+)\.svg\)", page.read_text(encoding="utf-8")):
            assert figure.endswith(".ko") == page.stem.endswith(".ko"), page
            folders.add(DOCS / folder)
    assert folders
    for path in (path for folder in folders for path in folder.glob("*.ko.svg")):
        text = path.read_text(encoding="utf-8")
        assert 'class="en"' not in text, path
        axes = re.findall(r'<text class="soft[^>]*>(<tspan.*?)</text>', text)
        assert axes, path
        assert all(re.search("[가-힣]|R2", axis) for axis in axes), path


def test_figures_on_disk_equal_those_of_the_script(script):
    figures = dict(script["draw_figures"]())
    assert {path.stem for path in script["FIGURES"].iterdir()} == figures.keys()
    for language in LANGUAGES:
        linked = re.findall(r"\(notes/([\w.]+)\.svg\)", "".join(read_chapter(number, language) for number in CHAPTERS))
        names = [figure.__name__ for figure in script["FIGURE_FUNCTIONS"]]
        assert set(linked) == {name + language if name + language in figures else name for name in names}
    for name, svg in figures.items():
        stored = (script["FIGURES"] / f"{name}.svg").read_text(encoding="utf-8")
        assert len(stored) < 80_000
        assert_same_figure(stored, svg, name)
    korean_texts = {
        text for name, svg in figures.items() if name.endswith(".ko") for text in re.findall(r">([^<>]+)</text>", svg)
    }
    assert not {
        text for text in korean_texts if re.search(r"\b(layer|token|accuracy|gradient|trained|mean|tree)", text)
    }


def assert_same_figure(stored, drawn, name):
    """Compare two figures up to rounding differences of processors, in numbers and in colours."""
    image = re.compile(r"data:image/png;base64,([\w+/=]+)")
    number = re.compile(r"(?<![\w#])-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
    texts = [image.sub("", text) for text in (stored, drawn)]
    assert number.sub("", texts[0]) == number.sub("", texts[1]), name
    stored_numbers, drawn_numbers = ([float(value) for value in number.findall(text)] for text in texts)
    np.testing.assert_allclose(stored_numbers, drawn_numbers, atol=1.01, rtol=0.02, err_msg=name)
    for pair in zip(image.findall(stored), image.findall(drawn), strict=True):
        stored_pixels, drawn_pixels = (np.asarray(Image.open(io.BytesIO(base64.b64decode(data))), int) for data in pair)
        assert stored_pixels.shape == drawn_pixels.shape
        assert np.abs(stored_pixels - drawn_pixels).mean() < 2, name
