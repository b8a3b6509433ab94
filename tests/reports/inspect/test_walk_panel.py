"""Panels `walk`, `inside` and `growth`: their numbers equal those of the model; notebook displays of results."""

import importlib.util
import json
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.reports.inspect.pages import unpack
from vitrail.analysis.heads import measure_heads
from vitrail.analysis.position_structure import position_table, structure
from vitrail.core.errors import UsageError
from vitrail.data.sources.registry import open_data
from vitrail.lab.exact import redraw
from vitrail.models.layers import NoNorm, TokenBatchNorm
from vitrail.models.walkthrough import walkthrough_of
from vitrail.reports.equations import symbols, typeset
from vitrail.reports.inspect.packing import pack
from vitrail.reports.inspect.panel import position_in_grid
from vitrail.reports.inspect.panel_results import compute_panels
from vitrail.reports.inspect.shared_messages import SYMBOL_MEANINGS
from vitrail.reports.inspect.walkthrough_steps import apply_logit_lens, follow_patch

CLOTHES = open_data("fashion-40").splits["test"].images
VARIANTS = [
    ("ViT-Nano/7", {}),
    ("ViT-Nano/7", {"norm_order": "post", "pool": "map", "registers": 1, "layer_scale": 0.5}),
    ("ViT-Nano/7", {"norm": "batch", "position": "relative", "pool": "gap"}),
    ("ViT-Nano/7", {"norm": "none", "activation": "none"}),
    ("ViT-Nano/7", {"attention": "local", "patch": 2, "depth": 2}),
    ("ViT-Nano/7", {"position_at": "every", "residual": False, "attention_scale": 1, "representation": "tanh"}),
    ("Hybrid-Nano", {}),
    ("ResNet-Nano", {}),
    ("Mixer-Nano/7", {}),
    ("LSTM-Nano/7", {"order": "snake", "bidirectional": True}),
    ("MLP-Nano", {}),
    ("iGPT-Micro", {}),
]


def random_model(name, changes):
    """Return a model with random weights, and a random image."""
    model = redraw(vitrail.create(name, **{"channels": 1, "classes": 10, **changes}), std=0.1).eval()
    return model, torch.rand(1, 1, *model.config.resolution)


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_walkthrough_values_equal_those_of_the_model(name, changes):
    model, image = random_model(name, changes)
    activations = vitrail.look(model, image)
    grid = model.config.grid or (1, 1)
    patch = grid[0] * grid[1] - 2 if grid != (1, 1) else 0
    steps = {step.key: step for step in follow_patch(model, activations, patch)}
    assert next(iter(steps)) == "picture"
    assert list(steps)[-2:] == ["pooled", "logits"]
    np.testing.assert_array_equal(steps["pooled"].vector, activations.steps["pooled"][0].numpy())
    np.testing.assert_array_equal(steps["logits"].vector, np.sort(activations.logits[0].numpy())[::-1])
    for layer in range(model.config.depth):
        step, vector = steps[f"blocks.{layer}"], activations.steps[f"blocks.{layer}"][0].numpy()
        if model.config.grid is not None:
            with torch.no_grad():
                (features,) = model.feature_maps(image, [layer], normalise=False)
            rows, columns = features.shape[2:]
            row, column = divmod(position_in_grid(patch, grid, (rows, columns)), columns)
            vector = features[0, :, row, column].numpy()
            assert step.norms[row, column] == pytest.approx(np.linalg.norm(vector), rel=1e-5)
            assert step.colours.shape == (rows, columns, 3)
        np.testing.assert_allclose(step.vector, vector, atol=1e-6)


def test_colours_of_a_pixel_model_are_the_nearest_in_the_palette():
    model, image = random_model("iGPT-Micro", {"output": "pixels", "causal": True, "classes": 16})
    steps = {step.key: step for step in walkthrough_of(model).steps(vitrail.look(model, image))}
    distances = (image.flatten(1).T - model.palette.T).abs()
    torch.testing.assert_close((image.flatten(1).T - steps["colours"].values).abs()[:, 0], distances.amin(dim=1))


def test_walkthrough_without_classes_ends_with_features_or_embedding():
    for changes, last_steps in (
        ({"embedding": 8}, [("pooled", "pooled-embedded"), ("embedding", "embedding")]),
        ({}, [("blocks.3", "block"), ("pooled", "pooled-last")]),
    ):
        model, image = random_model("ViT-Nano/7", {"classes": 0, **changes})
        steps = follow_patch(model, vitrail.look(model, image), 0)
        assert [(step.key, step.message) for step in steps[-2:]] == last_steps
        with torch.no_grad():
            np.testing.assert_allclose(steps[-1].vector, model(image)[0].numpy(), atol=1e-6)


def test_position_in_another_grid_is_at_the_centre():
    assert [position_in_grid(patch, (2, 2), (4, 4)) for patch in range(4)] == [5, 7, 13, 15]
    assert [position_in_grid(patch, (4, 4), (2, 2)) for patch in (0, 3, 12, 15)] == [0, 1, 2, 3]
    assert [position_in_grid(patch, (3, 5), (3, 5)) for patch in range(15)] == list(range(15))


def test_equal_tokens_have_equal_colours_in_all_layers():
    """Layers with zero weights pass tokens on unchanged, so their colours must be the same."""
    model, image = random_model("ViT-Nano/7", {})
    with torch.no_grad():
        for block in model.blocks[1:]:
            for linear in (block.attn.proj, block.mlp.fc2):
                torch.nn.init.zeros_(linear.weight)
                torch.nn.init.zeros_(linear.bias)
    steps = {step.key: step for step in follow_patch(model, vitrail.look(model, image), 0)}
    assert np.array_equal(steps["blocks.0"].colours, steps["blocks.3"].colours)
    assert not np.array_equal(steps["tokens"].colours, steps["blocks.0"].colours)
    assert steps["tokens"].scale == steps["blocks.3"].scale


def test_mixer_shows_token_and_channel_mixing():
    model, image = random_model("Mixer-Nano/7", {})
    activations = vitrail.look(model, image)
    steps = {step.key: step for step in follow_patch(model, activations, 5)}
    block = model.blocks[1]
    with torch.no_grad():
        layer_input = activations.steps["blocks.0"]
        u = layer_input + block.mlp_tokens(block.norm1(layer_input).transpose(1, 2)).transpose(1, 2)
        y = u + block.mlp_channels(block.norm2(u))
    np.testing.assert_allclose(steps["blocks.1.tokens"].vector, u[0, 5].numpy(), atol=1e-6)
    np.testing.assert_allclose(steps["blocks.1"].vector, y[0, 5].numpy(), atol=1e-6)


@pytest.mark.parametrize(("name", "changes"), [variant for variant in VARIANTS if variant[0] != "ResNet-Nano"])
def test_logit_lens_of_the_last_layer_equals_the_prediction(name, changes):
    model, image = random_model(name, changes)
    activations = vitrail.look(model, image)
    lens = apply_logit_lens(model, activations, labels=list("abcdefghij"))
    shares = activations.logits[0].softmax(-1)
    assert [row["layer"] for row in lens] == list(range(model.config.depth))
    assert lens[-1]["probability"] == pytest.approx(float(shares.max()), abs=1e-5)
    assert lens[-1]["cosine"] == pytest.approx(1, abs=1e-5)
    best = shares.sort(descending=True)
    assert [entry["label"] for entry in lens[-1]["top"]] == ["abcdefghij"[index] for index in best.indices[:5]]
    assert lens[0]["top"][0]["class"] == lens[0]["winner"]


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_every_equation_is_typeset_and_its_symbols_have_meanings(name, changes):
    model, image = random_model(name, changes)
    walkthrough = walkthrough_of(model)
    equations = [step.equation for step in walkthrough.steps(vitrail.look(model, image))]
    equations += walkthrough.layer_equations(0).values()
    for equation in equations:
        markup = typeset(equation)
        assert ElementTree.fromstring(markup.replace("&times;", "x").replace("&prime;", "'")).tag == "div"
        for symbol in symbols(equation):
            base = symbol.partition("_")[0]
            meanings = {symbol, base, base.rstrip("'")} & (SYMBOL_MEANINGS.keys() | {"sqrt", "argmin", "sum"})
            assert meanings, (equation, symbol)


def test_typeset_gives_fractions_roots_and_scripts():
    assert typeset("q k^T / sqrt(d)").count("<mfrac><mrow><mi>q</mi><msup><mi>k</mi><mi>T</mi></msup></mrow>") == 1
    assert "<msqrt><mi>d</mi></msqrt>" in typeset("q k^T / sqrt(d)")
    assert "<msubsup><mi>z</mi><mi>L</mi><mn>0</mn></msubsup>" in typeset("y = LN(z_L^0)")
    assert typeset("a = b,  c = d").count("<math") == 2
    assert "<b>" not in typeset("<b> = 1")
    assert symbols("x in R^(H x W x C)") == ["x", "R", "H", "W", "C"]


def test_symbol_meanings_are_in_both_languages():
    assert {tuple(message) for message in SYMBOL_MEANINGS.values()} == {("en", "ko")}


def test_unpack_inverts_pack():
    values = np.random.default_rng(0).normal(size=(5, 7))
    for bits, tolerance in ((8, 0.02), (16, 1e-4)):
        packed = pack(values, bits=bits)
        np.testing.assert_allclose(unpack(packed), values.ravel(), atol=tolerance)
        json.dumps(packed)
    assert np.abs(unpack(pack(values, scale=0.5))).max() == pytest.approx(0.5)
    assert not unpack(pack(np.zeros(3))).any()


# The followed patch


def test_patch_option_selects_the_followed_patch(call, tmp_path):
    Image.fromarray(CLOTHES[0][..., 0]).save(tmp_path / "one.png")
    arguments = ("inspect", "fashion", tmp_path / "one.png", "--output", tmp_path / "out")
    done = call(*arguments, "--patch", 1, 5, "--inside", "-1", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["followed"] == {"row": 1, "column": 5}
    bundle = vitrail.load("fashion")
    activations = vitrail.look(bundle.model, bundle.preprocess([CLOTHES[0]]))
    values = {step["key"]: step["values"] for step in document["pictures"][0]["walk"]}
    expected = activations.steps["blocks.2"][0, 1 + 1 * 7 + 5, :6]
    assert values["blocks.2"] == pytest.approx(expected.tolist(), rel=1e-4)
    assert [entry["layer"] for entry in document["pictures"][0]["inside"]] == [4]
    for wrong, message in (
        (("--patch", 7, 0), "a row from 0 to 6 and a column from 0 to 6, got 7 0."),
        (("--patch", -1, 0), "got -1 0"),
        (("--patch", 3), "--patch must be two integers, ROW COLUMN, got '3'."),
        (("--patch",), "--patch must be two integers, ROW COLUMN, got nothing."),
        (("--inside", 5), "Layer must be from 0 to 4"),
    ):
        done = call(*arguments, "--force", *wrong)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert message in done.stderr


def test_patch_and_inside_are_rejected_for_other_families():
    with pytest.raises(UsageError, match="Patch must be omitted for family mlp"):
        vitrail.inspect("MLP-Nano", CLOTHES[:1], patch=(0, 0))
    with pytest.raises(UsageError, match="Inside must be omitted for family resnet"):
        vitrail.inspect("ResNet-Nano", CLOTHES[:1], inside=[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch": 5}, "Patch must be a row and a column, got 5."),
        ({"inside": 3}, "Layers must be a list of integers, got 3."),
        ({"inside": ["0"]}, "Layer must be an integer, got '0'."),
        ({"inside": [1.5]}, "Layer must be an integer, got 1.5."),
        ({"inside": []}, "Inside must be at least one layer, got none."),
        ({"heads": 0}, "Heads must be a list of integers, got 0."),
    ],
)
def test_wrong_types_of_options_are_rejected(settings, message):
    with pytest.raises(UsageError) as error:
        vitrail.inspect("ViT-Nano/7", CLOTHES[:1], **settings)
    assert str(error.value) == message


# The inside of a layer


@pytest.mark.parametrize(
    ("name", "changes"), [variant for variant in VARIANTS if variant[0].startswith(("ViT", "Hybrid", "iGPT"))]
)
def test_inside_values_equal_those_of_the_model(name, changes):
    model, _ = random_model(name, changes)
    height, width = model.config.resolution
    preprocess = vitrail.Preprocess(resolution=(height, width), mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    bundle = vitrail.Bundle(model=model, preprocess=preprocess)
    results = compute_panels(bundle, CLOTHES[:1], inside=[1], patch=(1, 0))
    (inside,) = results.to_json()["pictures"][0]["inside"]
    activations = vitrail.look(model, preprocess([CLOTHES[0]]), inside=[1])
    token = model.config.prefix + model.config.grid[1]
    attention = activations.attention[1][0, :, token].numpy()
    for head, row in enumerate(inside["heads"]):
        scores = np.array([-np.inf if score is None else score for score in row["scores"]])
        shares = np.exp(scores - scores.max())
        np.testing.assert_allclose(row["weights"], shares / shares.sum(), atol=1e-3)
        np.testing.assert_allclose(row["weights"], attention[head], atol=1e-4)
    for step in ("msa", "z1", "z2"):
        length = activations.steps[f"blocks.1.{step}"][0, token].norm()
        assert inside["lengths"][step] == pytest.approx(float(length), rel=1e-4)
    assert inside["lengths"]["out"] == pytest.approx(float(activations.steps["blocks.1"][0, token].norm()), rel=1e-4)
    walkthrough, norm1 = walkthrough_of(model), model.blocks[1].norm1
    if isinstance(norm1, NoNorm):
        assert inside["norms"] == {}
        return
    is_pre_norm = next(iter(walkthrough.layer_equations(1))) == "norm1"
    norm_input = (
        walkthrough.layer_input(1, activations) if is_pre_norm else activations.steps["blocks.1.middle"]
    ).detach()
    torch.testing.assert_close(norm1(norm_input), activations.steps["blocks.1.norm1"])
    numbers = norm_input[0, token]
    statistics = {
        torch.nn.LayerNorm: {"mean": float(numbers.mean()), "deviation": float(numbers.std(correction=0))},
        torch.nn.RMSNorm: {"rms": float(numbers.square().mean().sqrt())},
        TokenBatchNorm: None,
    }[type(norm1)]
    assert inside["norms"].get("norm1") == (statistics and pytest.approx(statistics, rel=1e-4, abs=1e-6))


def test_equations_have_biases_if_the_model_has():
    for name, setting in (("ViT-Nano/7", "qkv_bias"), ("iGPT-Micro", "bias")):
        for has_bias in (True, False):
            model, _ = random_model(name, {setting: has_bias})
            equations, attention = walkthrough_of(model).layer_equations(0), model.blocks[0].attn
            for part, linear in {**dict.fromkeys("qkv", attention.qkv), "msa": attention.proj}.items():
                assert (" + b_" in equations[part]) == (linear.bias is not None)


def test_only_selected_layers_are_recorded_inside(monkeypatch):
    recorded = []
    original = vitrail.models.activations.look

    def recording_look(model, images, **settings):
        recorded.append(set(settings["inside"]))
        return original(model, images, **settings)

    monkeypatch.setattr("vitrail.reports.inspect.panel_results.look", recording_look)
    compute_panels(vitrail.load("fashion"), CLOTHES[:2], other_images=CLOTHES[2:4], inside=[0, -1])
    assert recorded == [{0, 4}, {0, 4}, set(), set()]


# Runs and names


def test_snapshots_of_a_run_are_in_the_growth_panel(call, tmp_path):
    run = tmp_path / "run"
    vitrail.train("digits", "ViT-Pico/2", steps=4, batch=16, snapshots=3, output=run)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "one.png")
    done = call("inspect", run, tmp_path / "one.png", "--output", tmp_path / "out", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    growth = json.loads(done.stdout)["growth"]
    assert [row["step"] for row in growth] == [0, 1, 2, 4]
    for row in growth:
        bundle = vitrail.load(run / "snapshots" / f"step-{row['step']:09d}")
        model = bundle.model
        assert row["positions"] == structure(position_table(model), (4, 4))._asdict()
        attention = vitrail.look(model, bundle.preprocess([np.zeros((8, 8, 1), np.uint8)])).attention
        expected = [measure_heads(attention[layer], model.layout()).of_uniform[0] for layer in range(4)]
        np.testing.assert_allclose(row["attention_distance_of_uniform"], expected, atol=1e-5)
    assert (tmp_path / "out" / "figures" / "growth-positions.svg").exists()
    inspection = vitrail.inspect(run / "bundle", str(tmp_path / "one.png"))
    assert "growth" not in inspection.numbers
    for folder in (run / "snapshots").iterdir():
        folder.rename(tmp_path / folder.name)
    (note,) = vitrail.inspect(run, str(tmp_path / "one.png")).notes
    assert note.endswith("train with --snapshots N to see how it changes")


def test_model_name_gives_an_untrained_model():
    inspection = vitrail.inspect("ViT-Nano/7", CLOTHES[:1])
    assert not inspection.numbers["trained"]
    assert inspection.notes == ["ViT-Nano/7 is the name of a model: its weights are new and random"]
    assert inspection.numbers["pictures"] == vitrail.inspect("ViT-Nano/7", CLOTHES[:1]).numbers["pictures"]


# Notebooks

EVIL = "<script>alert(1)</script>"


def test_notebook_displays_escape_labels():
    bundle = vitrail.load("fashion")
    bundle = vitrail.Bundle(
        model=bundle.model, preprocess=bundle.preprocess, labels=[f"{EVIL}{label}" for label in bundle.labels]
    )
    predictions = vitrail.predict(bundle, CLOTHES[:25])
    activations = vitrail.look(bundle.model, bundle.preprocess([CLOTHES[0]]), inside=[0])
    scores = vitrail.evaluate("fashion", "fashion-40")
    result = vitrail.train("digits", "ViT-Pico/2", steps=1, batch=16)
    for display, expected in (
        (bundle._repr_html_(), ("ViT-Fashion/4", "381,610", "&lt;script&gt;", "and 5 more")),
        (predictions._repr_html_(), ("&lt;script&gt;", "and 5 more", "image 0", f"{predictions[0].score:.3f}")),
        (activations._repr_html_(), ("blocks.0.q", "1 x 3 x 50 x 32", "attention[4]")),
        (scores._repr_html_(), (f"{scores.accuracy:.1%}",)),
        (result._repr_html_(), ("1 step in", "ViT-Pico/2", result.sentence.split(" (")[0])),
    ):
        assert "<script" not in display
        for text in expected:
            assert text in display
    assert isinstance(predictions, list)
    assert len(predictions[:2]) == 2


def test_inspection_saves_its_page_and_numbers(tmp_path):
    inspection = vitrail.inspect("fashion", CLOTHES[:1], layers=[0], heads=[0])
    assert inspection.folder is None
    assert repr(inspection) == "Inspection(fashion, 1 image)"
    assert inspection._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    saved = inspection.save(tmp_path / "out")
    assert repr(saved).endswith("out/index.html)")
    assert (tmp_path / "out" / "index.html").read_text() == inspection.page
    assert json.loads((tmp_path / "out" / "inspect.json").read_text()) == inspection.numbers
    with pytest.raises(UsageError, match="must not exist yet"):
        vitrail.inspect("fashion", CLOTHES[:1], output=tmp_path / "out")
    with pytest.raises(UsageError, match=r"got 'patches'\. Did you mean 'patch'"):
        vitrail.inspect("fashion", CLOTHES[:1], patches=(0, 0))


NOTEBOOK = """
import json, sys, nbformat
from nbclient import NotebookClient

cells = [
    "import vitrail; from vitrail.data.sources.registry import open_data; vitrail.load('fashion')",
    "clothes = open_data('fashion-40').splits['test'].images; vitrail.predict('fashion', clothes[:3])",
    "vitrail.train('digits', 'ViT-Pico/2', steps=3, batch=16)",
    "vitrail.inspect('fashion', clothes[:1], patch=(2, 3))",
]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(notebook, timeout=300).execute()
json.dump([[dict(output) for output in cell.outputs] for cell in notebook.cells], open(sys.argv[1], "w"))
"""


@pytest.mark.slow
def test_jupyter_notebook_shows_the_displays(tmp_path):
    """Runs a notebook with the kernel of Jupyter, without widgets."""
    for package in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    outputs = tmp_path / "outputs.json"
    # Run in a separate process, because packages of Jupyter give warnings.
    subprocess.run([sys.executable, "-c", NOTEBOOK, str(outputs)], check=True, capture_output=True)
    bundle, predictions, result, page = json.loads(outputs.read_text())
    assert "ViT-Fashion/4" in bundle[-1]["data"]["text/html"]
    assert predictions[-1]["data"]["text/html"].count("<tr>") == 4
    assert '<progress value="1.0000"' in result[-2]["data"]["text/html"]
    assert "3 steps in" in result[-1]["data"]["text/html"]
    assert page[-1]["data"]["text/html"].startswith("<iframe srcdoc=")
