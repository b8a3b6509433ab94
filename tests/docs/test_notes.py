"""The route from the notes: code prints what its chapters say; tables are the lab's, figures the script's."""

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
    return runpy.run_path(str(DOCS / "notes.py"))


def chapter(number, language=""):
    return (DOCS / f"notes-{number}{language}.md").read_text(encoding="utf-8")


def in_tables(text):
    """The claims whose tables a chapter has."""
    return [name for found in re.findall(r"<!-- lab: ([\w ]+) -->", text) for name in found.split()]


def test_chapters_print_what_they_say(tmp_path):
    jobs = []
    for number in CHAPTERS:
        (tmp_path / str(number)).mkdir()
        page = DOCS / f"notes-{number}.md"
        jobs.append((page.name, str(tmp_path / str(number)), runnable(page)))
    told = [output for _, _, some in jobs for _, _, output in some if output is not None]
    assert len(told) >= 40
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", RUNNER]
    done = subprocess.run(words, input=json.dumps(jobs), capture_output=True, text=True, env=one_thread, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "1/boot/index.html").exists()


@pytest.mark.parametrize("number", CHAPTERS)
def test_both_languages_print_the_same(number):
    english, korean = ([one.output for one in blocks(DOCS / f"notes-{number}{language}.md")] for language in LANGUAGES)
    assert english == korean


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_claim_and_every_slip_has_its_section(language, script):
    texts = [chapter(number, language) for number in CHAPTERS]
    told = [name for text in texts for name in in_tables(text)]
    assert len(told) == len(set(told))
    assert set(told) == {name for name in script["claims"]() if name.startswith("C")}
    named = re.findall(rf"^\*\*{LANGUAGES[language]}[, ]+(S\d+)\.\*\*", "\n".join(texts), re.MULTILINE)
    assert sorted(named) == sorted(SLIPS)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_contents_list_what_chapters_have(language):
    text = (DOCS / f"notes{language}.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| \[[^\]]*\]\(notes-(\d){language}\.md\) \|.*\| ([\w ]+) \|$", text, re.MULTILINE)
    assert {int(number): set(claims.split()) for number, claims in rows} == {
        number: set(in_tables(chapter(number, language))) for number in CHAPTERS
    }
    slips = re.findall(rf"^\| (S\d+) \|.*\[([\d.]+)\]\(notes-(\d){language}\.md#\S+\) \|$", text, re.MULTILINE)
    assert {name for name, _, _ in slips} == SLIPS
    for name, section, number in slips:
        (found,) = re.findall(rf"^## {section} .*?(?=^## |\Z)", chapter(number, language), re.DOTALL | re.MULTILINE)
        assert f" {name}.**" in found


@pytest.mark.parametrize("language", LANGUAGES)
def test_tables_are_what_the_lab_found(language, script):
    report = (script["LAB"] / "index.html").read_text(encoding="utf-8")
    for page in [DOCS / f"notes-{number}{language}.md" for number in CHAPTERS]:
        assert page.read_text(encoding="utf-8") == script["filled"](page), "run `make format`"
    for claim in script["claims"]().values():
        if shown := script["number"](claim, "en"):
            value = re.search(r"(?:^|: )([-+][\d.]+)", shown)[1]
            assert re.search(rf"<b>{claim['id']}</b>.*?<td[^>]*>{re.escape(value)} ", report, re.DOTALL), claim["id"]


def test_korean_pages_show_the_figures_of_the_lab_in_korean():
    """Axes and legends, but for names such as ViT."""
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


def test_the_script_draws_the_figures(script):
    drawn = dict(script["drawings"]())
    assert {path.stem for path in script["FIGURES"].iterdir()} == drawn.keys()
    for language in LANGUAGES:
        shown = re.findall(r"\(notes/([\w.]+)\.svg\)", "".join(chapter(number, language) for number in CHAPTERS))
        names = [figure.__name__ for figure in script["DRAWN"]]
        assert set(shown) == {name + language if name + language in drawn else name for name in names}
    for name, svg in drawn.items():
        kept = (script["FIGURES"] / f"{name}.svg").read_text(encoding="utf-8")
        assert len(kept) < 80_000
        differences(kept, svg, name)
    words = {
        found for name, svg in drawn.items() if name.endswith(".ko") for found in re.findall(r">([^<>]+)</text>", svg)
    }
    assert not {text for text in words if re.search(r"\b(layer|token|accuracy|gradient|trained|mean|tree)", text)}


def differences(kept, drawn, name):
    """The same figure but for what another processor rounds otherwise: numbers by a little, colours by some levels."""
    image = re.compile(r"data:image/png;base64,([\w+/=]+)")
    number = re.compile(r"(?<![\w#])-?\d+(?:\.\d+)?(?:e-\d+)?")
    texts = [image.sub("", text) for text in (kept, drawn)]
    assert number.sub("", texts[0]) == number.sub("", texts[1]), name
    one, other = ([float(found) for found in number.findall(text)] for text in texts)
    np.testing.assert_allclose(one, other, atol=1.01, rtol=0.02, err_msg=name)
    for first, second in zip(image.findall(kept), image.findall(drawn), strict=True):
        here, there = (np.asarray(Image.open(io.BytesIO(base64.b64decode(data))), int) for data in (first, second))
        assert here.shape == there.shape
        assert np.abs(here - there).mean() < 2, name
