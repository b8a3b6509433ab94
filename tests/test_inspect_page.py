"""The page of `vitrail inspect`: every number in it, every family, names that stay text."""

import dataclasses
import json
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

import vitrail
from redraw import redraw
from test_cli import run
from vitrail.data.arrays import built_in
from vitrail.images.preprocess import Preprocess
from vitrail.inspection.examine import areas, examine
from vitrail.inspection.page import make_figures, make_page, write_page
from vitrail.inspection.walk import colours_of

CLOTHES = built_in("fashion-40").splits["test"].pictures


def some(count):
    return [(f"picture {index}", np.asarray(CLOTHES[index])) for index in range(count)]


def test_areas_of_known_maps():
    flat = np.full((21, 21), 1.0)
    assert areas(flat, (0.5,))[0.5] == pytest.approx(0.5, abs=0.12)
    point = np.zeros((21, 21))
    point[10, 10] = 1
    assert areas(point, (0.2, 0.99)) == {0.2: 1 / 441, 0.99: 1 / 441}


def test_colours_tell_places_apart():
    features = np.zeros((4, 5))
    features[3, 2] = 1
    shown = colours_of(features, (2, 2))
    assert shown.shape == (2, 2, 3)
    assert shown[1, 1, 0] != shown[0, 0, 0]


@pytest.fixture(scope="module")
def found():
    return examine(vitrail.load("fashion"), "fashion", some(4), evidence=True)


def test_everything_is_in_the_numbers(found, tmp_path):
    document = write_page(found, tmp_path / "out")
    assert document == json.loads((tmp_path / "out" / "inspect.json").read_text())
    config = found.bundle.model.config
    assert len(document["layers"]) == config.depth
    assert all(len(layer["heads"]) == config.heads for layer in document["layers"])
    assert document["layers"][0]["heads"][0]["attention_distance"] > 0
    assert document["trained"]
    assert document["positions"]["additive"] > document["positions"]["additive_by_chance"]
    assert np.diag(np.array(document["cka"]["table"])) == pytest.approx(np.ones(config.depth), abs=1e-6)
    assert document["pictures"][0]["predictions"][0]["score"] > 0.3
    maps = document["pictures"][0]["evidence"]["faith"]
    assert maps.keys() == {"rollout", "last attention", "relevance", "occlusion", "random"}
    assert (tmp_path / "out" / "positions.png").is_file()
    assert (tmp_path / "out" / "index.html").stat().st_size < 6_000_000


def test_names_stay_text(found):
    evil = '<img src=x onerror="alert(1)">'
    views = [dataclasses.replace(found.views[0], name=evil, answers=[{"label": evil, "score": 1.0}])]
    changed = dataclasses.replace(found, views=views, name=evil)
    text = make_page(changed, dict(make_figures(changed)), every_head=True)
    assert "<img src=x" not in text


@pytest.mark.parametrize(
    "name", ["ResNet-Nano", "Mixer-Nano/7", "LSTM-Nano/7", "MLP-Nano", "Hybrid-Nano", "iGPT-Micro"]
)
def test_every_family_has_its_page(name, tmp_path):
    model = redraw(vitrail.create(name, channels=1, classes=10), std=0.05)
    eye = Preprocess(resolution=model.config.resolution, mean=(0.5,), std=(0.5,))
    bundle = vitrail.Bundle(model=model, preprocess=eye)
    found = examine(bundle, name, some(4))
    document = write_page(found, tmp_path / "out")
    assert not document["trained"]
    text = (tmp_path / "out" / "index.html").read_text()
    assert "may be random" in text
    if name not in ("Hybrid-Nano",):
        assert {
            "panel": "attention",
            "reason": f"family {model.config.family} has no attention between patches",
        } in document["absent"]
    assert any("reach" in layer for layer in document["layers"])


def test_a_page_that_would_be_too_large_keeps_head_means(found, monkeypatch, tmp_path):
    monkeypatch.setattr("vitrail.inspection.page.LIMIT", 1000)
    write_page(found, tmp_path / "small")
    write_page(found, tmp_path / "full", full=True)
    small, full = ((tmp_path / name / "index.html").read_text() for name in ("small", "full"))
    assert "mean of heads" in small
    assert "mean of heads" not in full
    assert len(small) < len(full)


def test_two_bundles_are_compared_layer_by_layer():
    bundle = vitrail.load("fashion")
    model = redraw(vitrail.create("ViT-Micro/4", resolution=28, classes=10, channels=1), std=0.1)
    other = vitrail.Bundle(model=model, preprocess=bundle.preprocess)
    found = examine(bundle, "fashion", some(8), against=("tiny", other))
    assert found.cka.shape == (bundle.model.config.depth, 6)
    assert found.against == "tiny"


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    done = run("inspect", "fashion", tmp_path / "broken.png", "--output", tmp_path / "out")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    Image.fromarray(np.zeros((300, 100, 3), np.uint8)).save(tmp_path / "tall.png")
    done = run("inspect", "fashion", tmp_path / "tall.png", "--output", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pictures"][0]["file"].endswith("tall.png")


def test_the_script_draws_every_head_in_a_browser(found, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("there is no Chromium here")
    write_page(found, tmp_path / "out")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom",
         "--virtual-time-budget=8000", (tmp_path / "out" / "index.html").as_uri()],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.count('class="map"') == found.bundle.model.config.heads
    assert "[CLS] · layer 5" in done.stdout
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
