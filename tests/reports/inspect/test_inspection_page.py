"""The page of `vitrail inspect`: numbers, all families, page size, options, and escaping of names."""

import dataclasses
import io
import json
import os
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.reports.inspect.pages import write_page
from vitrail.core.errors import UsageError
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.lab.exact import redraw
from vitrail.reports.inspect.inspection_page import render_figures, render_page
from vitrail.reports.inspect.panel_results import compute_panels
from vitrail.reports.inspect.registry import PANELS
from vitrail.reports.inspect.shared_messages import SHARED_MESSAGES
from vitrail.reports.inspect.walkthrough_steps import colour_by_components, follow_patch

CLOTHES = open_data("fashion-40").splits["test"].images


def clothes(count):
    return list(CLOTHES[:count])


def render(results, version=0):
    """Return the page with panels reduced to a version: 0 is complete, numbers above the last give the smallest."""
    figures = render_figures(results)
    panel_versions = [[panel, *panel.smaller_versions()] for panel in results.panels.values()]
    panels = [versions[min(version, len(versions) - 1)] for versions in panel_versions]
    return render_page(results, {panel: panel.html(figures) for panel in panels})


def test_different_features_have_different_colours():
    features = np.zeros((4, 5))
    features[3, 2] = 1
    colours = colour_by_components(features, (2, 2))
    assert colours.shape == (2, 2, 3)
    assert colours[1, 1, 0] != colours[0, 0, 0]


@pytest.fixture(scope="module")
def results():
    return compute_panels(
        vitrail.load("fashion"), clothes(4), name="fashion", evidence=True, other_images=clothes(16)[4:]
    )


def test_inspect_json_has_the_numbers_of_all_panels(results, tmp_path):
    document = write_page(results, tmp_path / "out")
    assert document == json.loads((tmp_path / "out" / "inspect.json").read_text())
    config = results.context.model.config
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
    assert {"positions.png", "filters.png", "cka.svg", "reach-0.png", "distances.svg", "prefix-mass.svg"} <= figures
    for number in range(4):
        assert {f"picture-{number}-{name}.png" for name in ("attention", "relevance", "occlusion")} <= figures
        assert {f"picture-{number}-{name}.svg" for name in ("path", "dropped")} <= figures
    for curve in (tmp_path / "out" / "figures").glob("*.svg"):
        assert ElementTree.fromstring(curve.read_text()).tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in curve.read_text()
    assert (tmp_path / "out" / "index.html").stat().st_size < 6_000_000


def test_names_and_labels_are_escaped():
    evil = '<img src=x onerror="alert(1)">'
    bundle = vitrail.load("fashion")
    bundle = dataclasses.replace(bundle, labels=[f"{evil}{label}" for label in bundle.labels])
    text = render(compute_panels(bundle, clothes(1), name=evil, names=[evil]))
    assert "<img src=x" not in text
    assert text.count("&lt;img src=x") >= 3  # name of the bundle, name of the image, classes


@pytest.mark.parametrize(
    "name", ["ResNet-Nano", "Mixer-Nano/7", "LSTM-Nano/7", "MLP-Nano", "Hybrid-Nano", "iGPT-Micro"]
)
def test_every_family_has_a_page(name, tmp_path):
    model = redraw(vitrail.create(name, channels=1, classes=10), std=0.05)
    preprocess = Preprocess(resolution=model.config.resolution, mean=(0.5,), std=(0.5,))
    bundle = vitrail.Bundle(model=model, preprocess=preprocess)
    results = compute_panels(bundle, clothes(4), name=name)
    document = write_page(results, tmp_path / "out")
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


def test_variants_of_vit_have_a_page(tmp_path):
    """Other pooling, positions, normalisation and registers; frozen weights; four channels."""
    for changes in (
        {"pool": "gap", "position": "rope-2d"},
        {"pool": "map", "registers": 2, "position": "sincos-2d"},
        {"position": "relative", "norm_order": "post"},
        {"position": "learned-2d", "position_at": "every", "channels": 4},
    ):
        model = redraw(vitrail.create("ViT-Nano/7", classes=10, **changes), std=0.05).requires_grad_(False)
        channels = model.config.channels
        preprocess = Preprocess(resolution=(28, 28), mean=(0.5,) * channels, std=(0.5,) * channels)
        images = [np.random.default_rng(0).integers(0, 256, (28, 28, channels), np.uint8)]
        results = compute_panels(vitrail.Bundle(model=model, preprocess=preprocess), images, evidence=True)
        document = write_page(results, tmp_path / "out", force=True)
        assert document["layers"][3]["heads"][3]["entropy"] > 0
        assert ("positions" in {row["panel"] for row in document["absent"]}) == (
            results.panels["positions"].structure is None
        )
        assert sum(map(sum, document["pictures"][0]["maps"]["relevance"]["values"])) > 0


def test_pixel_model_has_no_predictions(tmp_path):
    model = redraw(vitrail.create("iGPT-Micro", causal=True, output="pixels", classes=16), std=0.05)
    preprocess = Preprocess(resolution=model.config.resolution, mean=(0.5,), std=(0.5,))
    results = compute_panels(vitrail.Bundle(model=model, preprocess=preprocess), clothes(1), evidence=True)
    document = write_page(results, tmp_path / "out")
    assert document["pictures"][0]["predictions"] == []
    reasons = {row["panel"]: row["reason"] for row in document["absent"]}
    assert "has no classes" in reasons["evidence"]
    assert "one position later" in reasons["reach"]
    assert "predicts pixels and has no classes" in (tmp_path / "out" / "index.html").read_text()


def test_every_message_is_in_both_languages():
    for messages in (SHARED_MESSAGES, *(PANELS[name].messages for name in PANELS)):
        for name, message in messages.items():
            assert message.keys() == {"en", "ko"}, name
            fields = [set(re.findall(r"{(\w+)}", text)) for text in message.values()]
            assert fields[0] == fields[1], name
    for name in PANELS:
        assert "title" in PANELS[name].messages
        assert not PANELS[name].messages.keys() & SHARED_MESSAGES.keys()


def test_large_page_is_reduced_to_the_limit(results, monkeypatch, tmp_path):
    sizes = [len(render(results, version).encode()) for version in (0, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)
    for limit, note in (
        (sizes[0], None),
        (sizes[0] - 1, None),
        (sizes[1], "the mean over heads"),
        (1000, "patches cannot be selected"),
    ):
        monkeypatch.setattr("vitrail.reports.inspect.inspection_page.LIMIT", limit)
        write_page(results, tmp_path / "out", force=True)
        text = (tmp_path / "out" / "index.html").read_text()
        assert ("--full" in text) == (note is not None)
        assert f'"levels":{63 if limit == sizes[0] - 1 else 127}' in text
        assert note is None or note in text
    write_page(results, tmp_path / "full", full=True)
    assert len((tmp_path / "full" / "index.html").read_bytes()) == sizes[0]


def test_similarity_of_two_bundles_has_a_row_and_column_per_layer():
    bundle = vitrail.load("fashion")
    model = redraw(vitrail.create("ViT-Micro/4", resolution=28, classes=10, channels=1), std=0.1)
    other = vitrail.Bundle(model=model, preprocess=bundle.preprocess)
    results = compute_panels(bundle, clothes(16), against=("tiny", other))
    comparison = results.panels["layers"].similarity
    assert comparison.table.shape == (bundle.model.config.depth, 6)
    assert comparison.against == "tiny"
    assert comparison.images == 16


def test_number_of_images_is_limited():
    with pytest.raises(UsageError, match="1 to 32, got 33"):
        compute_panels(vitrail.load("fashion"), clothes(33))
    with pytest.raises(UsageError, match="got 0"):
        compute_panels(vitrail.load("fashion"), [])
    with torch.device("meta"):
        model = vitrail.create("ViT-L/16", resolution=384)
    large = vitrail.Bundle(model=model, preprocess=Preprocess(resolution=(384, 384)))
    with pytest.raises(UsageError, match=r"got 20 .* need 10 GB"):
        compute_panels(large, clothes(20))


def test_layers_and_heads_select_the_attention(tmp_path):
    bundle = vitrail.load("fashion")
    results = compute_panels(bundle, clothes(1), layers=[0, -1], heads=[1])
    weights = results.panels["attention"].weights[0]
    assert {layer: weights_HTT.shape for layer, weights_HTT in weights.items()} == {0: (1, 50, 50), 4: (1, 50, 50)}
    assert len(results.to_json()["layers"][2]["heads"]) == 3
    all_results = compute_panels(bundle, clothes(1))
    assert (weights[4][0] == all_results.panels["attention"].weights[0][4][1]).all()
    assert '"heads":[1]' in render(results)
    with pytest.raises(UsageError, match="Head must be from 0 to 2"):
        compute_panels(bundle, clothes(1), heads=[3])
    with pytest.raises(UsageError, match="at least one each"):
        compute_panels(bundle, clothes(1), layers=[])
    without_attention = vitrail.Bundle(
        model=vitrail.create("ResNet-Nano"), preprocess=Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    )
    with pytest.raises(UsageError, match="which has no attention"):
        compute_panels(without_attention, clothes(1), layers=[0])


def test_bundle_trained_for_features_has_no_predictions(tmp_path):
    """Models such as DINO have a zero head: no predictions, relevance or evidence."""
    model = redraw(vitrail.create("ViT-Nano/7", classes=10), std=0.05)
    torch.nn.init.zeros_(model.head.weight)
    preprocess = Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    provenance = {"converted_from": "dino", "objective": "features"}
    results = compute_panels(
        vitrail.Bundle(model=model, preprocess=preprocess, provenance=provenance), clothes(1), evidence=True
    )
    document = write_page(results, tmp_path / "out")
    assert document["trained"]
    assert document["pictures"][0]["predictions"] == []
    assert document["pictures"][0]["path"] == []
    assert document["pictures"][0]["maps"].keys() == {"rollout", "last attention"}
    page = (tmp_path / "out" / "index.html").read_text()
    assert "trained for features, not for classes (objective features)" in page
    assert "how far is the first class" not in page  # the model has no classes


def test_single_patch_has_no_attention_panels(tmp_path):
    model = redraw(vitrail.create("ViT-Nano/7", classes=10, resolution=7), std=0.05)
    preprocess = Preprocess(resolution=(7, 7), mean=(0.5,), std=(0.5,))
    results = compute_panels(vitrail.Bundle(model=model, preprocess=preprocess), clothes(1), evidence=True)
    reasons = {row["panel"]: row["reason"] for row in write_page(results, tmp_path / "out")["absent"]}
    for panel in ("attention", "maps", "distances", "positions", "walk"):
        assert reasons[panel] == "The image is a single patch: there is nothing to compare."


def test_duplicate_images_count_once():
    results = compute_panels(vitrail.load("fashion"), clothes(2), other_images=clothes(20))
    assert results.panels["layers"].similarity.images == 20
    assert results.to_json()["measured_on"] == 20


def test_model_with_steps_is_trained():
    model = redraw(vitrail.create("ViT-Nano/7", classes=10), std=0.05)
    preprocess = Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    for provenance, trained in (({"data": "none yet"}, False), ({"steps": 2}, True)):
        bundle = vitrail.Bundle(model=model, preprocess=preprocess, provenance=provenance)
        assert compute_panels(bundle, clothes(1)).is_trained == trained


def test_inspection_does_not_change_the_model():
    model = redraw(vitrail.create("ViT-Nano/7", classes=10, norm="batch"), std=0.05).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    preprocess = Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    compute_panels(vitrail.Bundle(model=model, preprocess=preprocess), clothes(2), evidence=True)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bfloat16_model_has_a_page():
    model = redraw(vitrail.create("ViT-Nano/7", classes=10), std=0.05).to(torch.bfloat16)
    preprocess = Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,))
    results = compute_panels(vitrail.Bundle(model=model, preprocess=preprocess), clothes(1), evidence=True)
    assert results.panels["attention"].weights[0][0].dtype == np.float32
    assert results.to_json()["layers"][0]["heads"][0]["attention_distance"] > 0


@pytest.mark.parametrize(
    ("changes", "block", "read"),
    [
        ({}, "z_1 = MLP(LN(z')) + z',  z' = MSA(LN(z_0)) + z_0", ("y = LN(z_L^0)", "y W + b")),
        (
            {"norm_order": "post", "layer_scale": 0.1, "pool": "gap"},
            "z_1 = LN(g * MLP(z') + z'),  z' = LN(g * MSA(z_0) + z_0)",
            ("y = mean_n z_L^n", "y W + b"),
        ),
        ({"residual": False}, "z_1 = MLP(LN(z')),  z' = MSA(LN(z_0))", ("y = LN(z_L^0)", "y W + b")),
        ({"norm": "none"}, "z_1 = MLP(z') + z',  z' = MSA(z_0) + z_0", ("y = z_L^0", "y W + b")),
        (
            {"position_at": "every", "norm": "batch", "pool": "map", "representation": "tanh"},
            "z_1 = MLP(BN(z')) + z',  z' = MSA(BN(z_0 + E_pos)) + (z_0 + E_pos)",
            ("y = MAP(BN(z_L))", "tanh(y W_0 + b_0) W + b"),
        ),
    ],
)
def test_equations_follow_the_config(changes, block, read):
    model = vitrail.create("ViT-Nano/7", **changes).eval()
    steps = {step.key: step for step in follow_patch(model, vitrail.look(model, torch.rand(1, 1, 28, 28)), 0)}
    assert steps["blocks.0"].equation == block
    assert (steps["pooled"].equation, steps["logits"].equation) == read
    assert steps["logits"].shape == (10,)


def test_undecodable_file_names_are_replaced(tmp_path):
    name = os.fsdecode(b"a\xff.png")
    Image.fromarray(CLOTHES[0][..., 0]).save(tmp_path / name)
    document = write_page(compute_panels(vitrail.load("fashion"), [str(tmp_path / name)]), tmp_path / "out")
    assert document["pictures"][0]["file"].endswith("a\ufffd.png")


def test_command_with_all_options(call, tmp_path):
    image = tmp_path / "tall.png"
    Image.fromarray(np.zeros((300, 100, 3), np.uint8)).save(image)
    done = call(
        *("inspect", "fashion", image, "--output", tmp_path / "out", "--evidence", "--data", "fashion-40"),
        *("--against", "fashion", "--layers", "-1", "0", "--heads", "2", "--full", "--json"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["pictures"][0]["file"] == str(image)
    assert document["measured_on"] == 41
    assert document["cka"]["against"] == "fashion"
    assert document["faith"]["random"]["deletion"]["interval"] is None  # one image
    assert document["absent"] == []
    arrays = np.load(tmp_path / "out" / "arrays.npz")
    assert arrays["picture-0-attention-4"].shape == (1, 50, 50)
    assert arrays["positions"].shape == (49, 49)
    data = re.search(r'id="data">(.+?)</script>', (tmp_path / "out" / "index.html").read_text())[1]
    attention = json.loads(data)["attention"]
    assert attention["heads"] == [2]
    assert [layer["layer"] for layer in attention["images"][0]["layers"]] == [0, 4]


def test_image_names_are_read_from_stdin(call, tmp_path, monkeypatch):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{broken}\n".encode())))
    done = call("inspect", "fashion", "-", "--output", tmp_path / "out")
    assert done.returncode == 1
    assert "broken.png' cannot be decoded" in done.stderr


def test_bad_input_gives_one_error_line(call, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    for arguments, expected in (
        ((broken,), (1, "broken.png")),
        ((broken, "--layers", "5"), (2, "from 0 to 4")),
        ((broken, "--heads", "7"), (2, "from 0 to 2")),
        ((broken, "--heads", "one"), (2, "--heads must be integers, got 'one'")),
        ((tmp_path / "none.png",), (2, "none.png")),
    ):
        done = call("inspect", "fashion", *arguments, "--output", tmp_path / "out")
        assert done.returncode == expected[0], done.stderr
        assert expected[1] in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "out").exists()
