"""The page of `vitrail inspect`: every number in it, every family, names that stay text."""

import dataclasses
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import vitrail
from redraw import redraw
from test_cli import run
from vitrail.data.arrays import built_in
from vitrail.errors import UsageError
from vitrail.images.preprocess import Preprocess
from vitrail.inspection.examine import areas, examine
from vitrail.inspection.figures import draw_curves, draw_pictures
from vitrail.inspection.page import make_page, write_page
from vitrail.inspection.walk import colours_of
from vitrail.inspection.words import words

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
    head = document["layers"][0]["heads"][0]
    assert head["attention_distance_interval"][0] < head["attention_distance"] < head["attention_distance_interval"][1]
    assert document["trained"]
    assert document["positions"]["additive"] > document["positions"]["additive_by_chance"]
    assert np.diag(np.array(document["cka"]["table"])) == pytest.approx(np.ones(config.depth), abs=1e-6)
    assert document["pictures"][0]["predictions"][0]["score"] > 0.3
    maps = document["pictures"][0]["evidence"]["faith"]
    assert maps.keys() == {"rollout", "last attention", "relevance", "occlusion", "random"}
    figures = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"positions.png", "filters.png", "cka.png", "reach-0.png", "distances.svg", "prefix-mass.svg"} <= figures
    for number in range(4):
        assert {f"picture-{number}-{name}.png" for name in ("attention", "relevance", "occlusion")} <= figures
        assert {f"picture-{number}-{name}.svg" for name in ("path", "dropped")} <= figures
    for curve in (tmp_path / "out" / "figures").glob("*.svg"):
        assert ElementTree.fromstring(curve.read_text()).tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in curve.read_text()
    assert (tmp_path / "out" / "index.html").stat().st_size < 6_000_000


def test_names_stay_text(found):
    evil = '<img src=x onerror="alert(1)">'
    views = [dataclasses.replace(found.views[0], name=evil, answers=[{"label": evil, "score": 1.0}])]
    changed = dataclasses.replace(found, views=views, name=evil)
    text = make_page(changed, dict(draw_pictures(changed)), dict(draw_curves(changed)), "heads")
    assert "<img src=x" not in text
    assert "&lt;img src=x" in text


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
    reasons = {row["panel"]: row["reason"] for row in document["absent"]}
    if name in ("Hybrid-Nano", "iGPT-Micro"):
        assert document["layers"][0]["heads"][0]["attention_distance"] > 0
        assert document["pictures"][0]["maps"].keys() == {"rollout", "last attention", "relevance"}
        assert "attention" not in reasons
    else:
        assert reasons["attention"] == f"Family {model.config.family} has no attention between patches."
    assert "--evidence" in reasons["evidence"]
    assert any("reach" in layer for layer in document["layers"])


def test_kinds_of_vit_have_their_pages(tmp_path):
    """Other pools, positions, norms and registers; a model that is frozen; four channels."""
    for changes in (
        {"pool": "gap", "position": "rope-2d"},
        {"pool": "map", "registers": 2, "position": "sincos-2d"},
        {"position": "relative", "norm_order": "post"},
        {"position": "learned-2d", "position_at": "every", "channels": 4},
    ):
        model = redraw(vitrail.create("ViT-Nano/7", classes=10, **changes), std=0.05).requires_grad_(False)
        channels = model.config.channels
        eye = Preprocess(resolution=(28, 28), mean=(0.5,) * channels, std=(0.5,) * channels)
        pictures = [("a", np.random.default_rng(0).integers(0, 256, (28, 28, channels), np.uint8))]
        found = examine(vitrail.Bundle(model=model, preprocess=eye), "one", pictures, evidence=True)
        document = write_page(found, tmp_path / "out", force=True)
        assert document["layers"][3]["heads"][3]["entropy"] > 0
        assert ("positions" in {row["panel"] for row in document["absent"]}) == (found.structure is None)
        assert sum(map(sum, document["pictures"][0]["maps"]["relevance"]["values"])) > 0


def test_a_model_that_predicts_pixels_has_no_answer(tmp_path):
    model = redraw(vitrail.create("iGPT-Micro", causal=True, output="pixels", classes=16), std=0.05)
    eye = Preprocess(resolution=model.config.resolution, mean=(0.5,), std=(0.5,))
    found = examine(vitrail.Bundle(model=model, preprocess=eye), "pixels", some(1), evidence=True)
    document = write_page(found, tmp_path / "out")
    assert document["pictures"][0]["predictions"] == []
    reasons = {row["panel"]: row["reason"] for row in document["absent"]}
    assert "no answer" in reasons["evidence"]
    assert "no answer" in reasons["reach"]
    assert "answers nothing" in (tmp_path / "out" / "index.html").read_text()


def test_every_word_is_in_both_languages():
    for name, sentence in words().items():
        assert sentence.keys() == {"en", "ko"}, name
        fields = [set(re.findall(r"{(\w+)}", text)) for text in sentence.values()]
        assert fields[0] == fields[1], name


def test_a_page_that_would_be_too_large_keeps_less(found, monkeypatch, tmp_path):
    pictures, curves = dict(draw_pictures(found)), dict(draw_curves(found))
    sizes = [len(make_page(found, pictures, curves, detail).encode()) for detail in ("heads", "means", "reads")]
    assert sizes == sorted(sizes, reverse=True)
    for limit, words_of_it in ((sizes[0], None), (sizes[1], "the mean over heads"), (1000, "patches cannot be asked")):
        monkeypatch.setattr("vitrail.inspection.page.LIMIT", limit)
        write_page(found, tmp_path / "out", force=True)
        text = (tmp_path / "out" / "index.html").read_text()
        assert ("--full" in text) == (words_of_it is not None)
        assert words_of_it is None or words_of_it in text
    write_page(found, tmp_path / "full", full=True)
    assert len((tmp_path / "full" / "index.html").read_bytes()) == sizes[0]


def test_two_bundles_are_compared_layer_by_layer():
    bundle = vitrail.load("fashion")
    model = redraw(vitrail.create("ViT-Micro/4", resolution=28, classes=10, channels=1), std=0.1)
    other = vitrail.Bundle(model=model, preprocess=bundle.preprocess)
    found = examine(bundle, "fashion", some(8), against=("tiny", other))
    assert found.cka.shape == (bundle.model.config.depth, 6)
    assert found.against == "tiny"


def test_a_page_has_so_many_pictures_and_no_more():
    with pytest.raises(UsageError, match="1 to 32, got 33"):
        examine(vitrail.load("fashion"), "fashion", some(33))
    with pytest.raises(UsageError, match="got 0"):
        examine(vitrail.load("fashion"), "fashion", [])


def test_layers_and_heads_are_chosen(tmp_path):
    bundle = vitrail.load("fashion")
    found = examine(bundle, "fashion", some(1), layers=[0, -1], heads=[1])
    assert {layer: weights.shape for layer, weights in found.views[0].attention.items()} == {
        0: (1, 50, 50),
        4: (1, 50, 50),
    }
    assert len(found.to_json()["layers"][2]["heads"]) == 3
    everything = examine(bundle, "fashion", some(1))
    assert (found.views[0].attention[4][0] == everything.views[0].attention[4][1]).all()
    assert '"heads":[1]' in make_page(found, dict(draw_pictures(found)), dict(draw_curves(found)), "heads")
    with pytest.raises(UsageError, match="Head must be from 0 to 2"):
        examine(bundle, "fashion", some(1), heads=[3])


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    done = run("inspect", "fashion", tmp_path / "broken.png", "--output", tmp_path / "out")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    for wrong in (("--layers", "5"), ("--heads", "7"), ("--heads", "one")):
        done = run("inspect", "fashion", tmp_path / "broken.png", "--output", tmp_path / "out", *wrong)
        assert done.returncode == 2
        assert wrong[1] in done.stderr
    Image.fromarray(np.zeros((300, 100, 3), np.uint8)).save(tmp_path / "tall.png")
    done = run("inspect", "fashion", tmp_path / "tall.png", "--output", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pictures"][0]["file"].endswith("tall.png")
