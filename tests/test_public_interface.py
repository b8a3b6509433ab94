"""The Python interface: heads, features, names, types and docstrings, as users of other libraries expect them."""

import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Never

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitrail
from tests.docs.test_readme import blocks
from tests.models.families.test_contract import ONE_PER_FAMILY, random_images
from tests.paths import ROOT
from tests.peers import import_peer, timm_with_weights
from vitrail.api.predictions import Evaluation, Prediction
from vitrail.bundles.pretrained import create
from vitrail.core.errors import UsageError
from vitrail.lab.exact import redraw
from vitrail.models.activations import Activations
from vitrail.models.base import Model
from vitrail.models.create import build
from vitrail.models.families import FAMILIES
from vitrail.models.sizes import Alias
from vitrail.models.surgery import surgery_of
from vitrail.models.zoo import MODELS, TIMM, find
from vitrail.training.callback import Step
from vitrail.training.run import Result

slow = pytest.mark.slow
WITH_PLACES = [name for name in ONE_PER_FAMILY if name != "MLP-Nano"]


# Heads


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_reset_classifier_gives_a_zero_head_in_place(name):
    model = redraw(create(name)).double().eval()
    images = random_images(model.config).double()
    features, body = model.features(images), model.head
    model.reset_classifier(4)
    assert (model.head.weight.dtype, model.head.training, model.config.classes) == (torch.float64, False, 4)
    assert model.head is not body
    assert torch.equal(model(images), torch.zeros(2, 4, dtype=torch.float64))
    assert torch.equal(model.features(images), features)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.parameters
    model.reset_classifier(0)
    assert torch.equal(model(images), features)
    assert (type(model.head), model.config.predicts) == (torch.nn.Identity, "features")
    model.reset_classifier(3)
    assert model(images).shape == (2, 3)
    for wrong in (-1, 2.5, "two", True):
        with pytest.raises(UsageError, match="Classes must be an integer from 0"):
            model.reset_classifier(wrong)
    assert model.config.classes == 3


def test_reset_classifier_drops_the_hidden_layer_of_pre_training(tmp_path):
    vit = redraw(create("ViT-Nano/7", representation="tanh"))
    images = random_images(vit.config)
    features = vit.features(images)
    vit.reset_classifier(2)
    assert (vit.config.representation, "pre_logits.fc.weight" in vit.state_dict()) == ("none", False)
    assert torch.equal(vit.features(images), features)

    painter = redraw(create("iGPT-Micro", output="pixels", causal=True, classes=16))
    copy, notes = surgery_of(painter).with_new_head(5)
    painter.colour_embed.weight.requires_grad_(False)
    painter.reset_classifier(5)
    assert notes == ["the start token is dropped and positions shift by one"]
    assert painter.config == copy.config
    for key, tensor in copy.state_dict().items():
        assert torch.equal(painter.state_dict()[key], tensor), key
    assert not painter.colour_embed.weight.requires_grad
    assert painter.pos_embed.requires_grad
    assert painter(random_images(painter.config)).shape == (2, 5)


def test_assigned_head_changes_the_number_of_classes_only_if_it_fits():
    model = create("ViT-Nano/7")
    for head, classes in (
        (torch.nn.Linear(64, 3), 3),
        (torch.nn.Linear(63, 5), 3),
        (torch.nn.Sequential(torch.nn.Linear(64, 7)), 7),
        (torch.nn.Sequential(torch.nn.Linear(64, 9), torch.nn.Flatten()), 9),
        (torch.nn.Identity(), 0),
    ):
        model.head = head
        assert model.config.classes == classes
    painter = create("iGPT-Micro", output="pixels", causal=True, classes=16)
    painter.head = torch.nn.Linear(32, 5)
    assert painter.config.classes == 16


# Features, tokens and feature maps


@pytest.fixture(scope="module")
def vit_and_timms():
    model = redraw(create("ViT-Ti/16", depth=3, resolution=64, classes=5, registers=2, class_position=False), std=0.05)
    timm = import_peer("timm")
    peer = timm.models.VisionTransformer(
        img_size=64, embed_dim=192, depth=3, num_heads=3, num_classes=5, reg_tokens=2, no_embed_class=True
    )
    peer.load_state_dict(model.state_dict(), strict=True)
    return model.eval(), peer.eval(), torch.randn(2, 3, 64, 64)


def test_vit_features_and_tokens_equal_timm(vit_and_timms):
    model, peer, images = vit_and_timms
    close = {"rtol": 0, "atol": 1e-5}
    theirs = peer.forward_features(images)
    torch.testing.assert_close(model.features(images), peer.forward_head(theirs, pre_logits=True), **close)
    torch.testing.assert_close(model.layer_tokens(images)[-1], theirs, **close)
    for normalise in (True, False):
        options = {"indices": [0, 1, 2], "norm": normalise, "return_prefix_tokens": True, "intermediates_only": True}
        ours = model.layer_tokens(images, layers=(0, 1, 2), normalise=normalise)
        maps = model.feature_maps(images, layers=None, normalise=normalise)
        for layer, (patches, prefix) in enumerate(peer.forward_intermediates(images, output_fmt="NLC", **options)):
            torch.testing.assert_close(ours[layer], torch.cat([prefix, patches], dim=1), **close)
        for layer, (theirs, _) in enumerate(peer.forward_intermediates(images, **options)):
            assert maps[layer].shape == (2, 192, 4, 4)
            torch.testing.assert_close(maps[layer], theirs, **close)
    # In the order asked for, twice where asked twice.
    last, first, again = model.layer_tokens(images, layers=[-1, 0, 2])
    assert torch.equal(last, again)
    assert not torch.equal(last, first)


def test_deit_features_and_tokens_equal_timm(shared):
    """With published weights: within 1e-5 of the largest value, and far closer in double precision."""
    timm, name = import_peer("timm"), "deit_tiny_patch16_224"
    weights = load_file(shared / "deit-ti16" / "model.safetensors")
    models = create(name).eval(), timm.create_model(name).eval()
    for model in models:
        model.load_state_dict(weights)
    images = torch.randn(1, 3, 224, 224)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        ours, peer = (model.to(dtype) for model in models)
        with torch.no_grad():
            theirs = peer.forward_features(images.to(dtype))
            (patches,) = peer.forward_intermediates(images.to(dtype), [5], norm=True, intermediates_only=True)
            for features, expected in (
                (ours.layer_tokens(images.to(dtype))[0], theirs),
                (ours.features(images.to(dtype)), peer.forward_head(theirs, pre_logits=True)),
                (ours.feature_maps(images.to(dtype), layers=(5,))[0], patches),
            ):
                assert (features - expected).abs().max() <= tolerance * expected.abs().max()


def test_gradients_of_features_equal_timm(vit_and_timms):
    model, peer, images = vit_and_timms
    weights = torch.randn(2, 192)
    gradients = []
    for run in (model.features, lambda images: peer.forward_head(peer.forward_features(images), pre_logits=True)):
        inputs = images.clone().requires_grad_()
        (run(inputs) * weights).sum().backward()
        gradients.append(inputs.grad)
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["R+ViT-Ti/16", "Mixer-S/32", pytest.param("BiT-R50x1", marks=slow)])
def test_features_of_other_families_equal_timm(name):
    import_peer("timm")
    model = create(name, classes=3).eval()
    model.head = torch.nn.Linear(model.head_width, 3)
    peer = timm_with_weights(name, model)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        theirs = peer.forward_features(images)
        features = model.feature_maps(images)[0] if theirs.ndim == 4 else model.layer_tokens(images)[0]
        pooled = peer.forward_head(theirs, pre_logits=True).flatten(1)
        assert theirs.std() > 0.1
        torch.testing.assert_close(features, theirs, rtol=0, atol=1e-5)
        torch.testing.assert_close(model.features(images), pooled, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", WITH_PLACES)
def test_feature_maps_and_tokens_agree_and_have_gradients(name):
    model = redraw(create(name)).eval()
    images = random_images(model.config).requires_grad_()
    tokens, maps = (run(images, layers=None) for run in (model.layer_tokens, model.feature_maps))
    assert len(tokens) == len(maps) == model.config.depth
    for sequence, places in zip(tokens, maps, strict=True):
        assert places.flatten(2).transpose(1, 2).shape == sequence[:, model.config.prefix :].shape
        torch.testing.assert_close(places.flatten(2).transpose(1, 2), sequence[:, model.config.prefix :])
    assert maps[-1].shape[2:] == model.config.grid
    with torch.no_grad():
        model.features(images)
    maps[0].square().sum().backward()
    first = next(parameter for parameter in model.parameters() if parameter.grad is not None)
    assert first.grad.abs().max() > 0


def test_lstm_tokens_are_at_their_positions_in_the_image():
    model = redraw(create("LSTM-Nano/7", order="snake", depth=1)).eval()
    images = torch.zeros(1, 1, 28, 28)
    changed = images.clone()
    changed[..., 7:14, 14:21] = 1  # the second row is read from its end: this is the second place of it
    before, after = (model.feature_maps(inputs)[0] for inputs in (images, changed))
    differs = (before != after).any(dim=1)[0]
    assert differs.tolist() == [[False] * 4, [True, True, True, False], [True] * 4, [True] * 4]
    before, after = (model.layer_tokens(inputs)[0] for inputs in (images, changed))
    assert (before != after).any(dim=2)[0].tolist() == [False] * 5 + [True] * 11
    # A snake is its own inverse; a random order is not.
    model = redraw(create("LSTM-Nano/7", order="random", order_seed=1, depth=1)).eval()
    assert model.order.tolist()[9:] == [6, 15, 12, 2, 7, 10, 1]
    before, after = (model.feature_maps(inputs)[0] for inputs in (images, changed))
    assert (before != after).any(dim=1)[0].flatten().nonzero().flatten().tolist() == [1, 2, 6, 7, 10, 12, 15]


def test_features_follow_the_mode_and_looking_does_not_change_the_model():
    model = redraw(create("ViT-Nano/7", norm="batch", dropout=0.5)).train()
    images = random_images(model.config, 8)
    assert not torch.equal(model.features(images), model.features(images))
    model.eval()
    assert torch.equal(model.features(images), model.features(images))
    model.train()
    before = model.norm.num_batches_tracked.clone()
    model.layer_tokens(images, layers=None)
    assert model.norm.num_batches_tracked == before + 1  # of the forward pass itself
    assert model.norm.training


def test_feature_maps_without_positions_or_layer_are_rejected():
    mlp, vit = create("MLP-Nano"), create("ViT-Nano/7", token_drop=0.5)
    images = torch.zeros(1, 1, 28, 28)
    for run in (mlp.layer_tokens, mlp.feature_maps):
        with pytest.raises(UsageError, match=r"have positions in the image, got family mlp. Use features\(\)"):
            run(images)
    assert mlp.features(images).shape == (1, 1200)
    with pytest.raises(UsageError, match="Layer must be from 0 to 3"):
        vit.layer_tokens(images, layers=[4])
    with pytest.raises(UsageError, match="Layers must be a list of integers, got 3"):
        vit.feature_maps(images, layers=3)
    with pytest.raises(UsageError, match=r"must have all 16 patches, got 8 .* Call model.eval"):
        vit.train().feature_maps(images)


def test_look_keeps_gradients_on_request():
    model = redraw(create("ViT-Nano/7"))
    images = random_images(model.config).requires_grad_()
    assert not vitrail.look(model, images).logits.requires_grad
    with torch.no_grad():
        seen = vitrail.look(model, images, gradients=True)
    assert torch.equal(seen.logits, vitrail.look(model, images).logits)
    for result in (seen.logits, seen.steps["pooled"], seen.steps["blocks.1"], seen.attention[2]):
        (gradient,) = torch.autograd.grad(result.square().sum(), images, retain_graph=True)
        assert gradient.abs().max() > 0


# Names


def test_models_are_listed_by_pattern(call):
    assert vitrail.list_models() == [*MODELS]
    assert vitrail.list_models("vit-?/32") == ["ViT-S/32", "ViT-B/32", "ViT-L/32"]
    assert vitrail.list_models("perceiver*") == []
    with pytest.raises(UsageError, match="Pattern must be a text"):
        vitrail.list_models(3)
    listed = call("models", "BiT*").stdout.splitlines()[1:]
    assert [line.split()[0] for line in listed if "BiT" in line] == vitrail.list_models("BiT*")
    assert call("models", "ViT-B").stdout == call("models", "ViT-B*").stdout
    done = call("models", "ViT-B16")
    assert (done.returncode, done.stderr) == (
        2,
        "vitrail: Pattern must match the name of a model, got 'ViT-B16'. Did you mean 'ViT-B/16'?\n",
    )


LONG = re.compile("large|huge|gi|384|101|152|x3|base_r|deit")


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow) if LONG.search(name) else name for name in TIMM])
def test_timm_names_refer_to_models_of_equal_size(name):
    timm = import_peer("timm")
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=1000)
        ours = build(find(name))
    shapes = sorted(tuple(parameter.shape) for parameter in ours.parameters())
    # Its convolutional head is a matrix here.
    assert shapes == sorted(
        tuple(parameter.shape[:2]) if key == "head.fc.weight" else tuple(parameter.shape)
        for key, parameter in theirs.named_parameters()
    )
    assert find(name).parameters == sum(parameter.numel() for parameter in theirs.parameters())
    if hasattr(theirs, "pos_embed"):
        assert find(name).tokens == theirs.pos_embed.shape[1]


def test_commands_print_one_note_about_a_timm_name(call, tmp_path, monkeypatch):
    note = "note: vit_base_patch16_384 is timm's name for ViT-B/16 at 384 px; timm's weights are not loaded\n"
    done = call("info", "vit_base_patch16_384", "--json")
    assert (done.returncode, done.stderr) == (0, note)
    assert '"name": "ViT-B/16"' in done.stdout
    # A tag names weights; a bundle whose folder has such a name is itself.
    tagged = call("info", "vit_base_patch16_384.augreg_in21k", "--json")
    assert (tagged.stdout, tagged.stderr) == (done.stdout, note.replace(" is", ".augreg_in21k is", 1))
    assert find("vit_base_patch16_384.augreg_in21k") == find("vit_base_patch16_384")
    monkeypatch.setitem(TIMM, "vit_pico_patch2_8", Alias("ViT-Pico/2", 8))
    run = call("train", "digits", "--model", "vit_pico_patch2_8", "--output", tmp_path / "run", "--steps", "1")
    assert run.returncode == 0
    assert run.stderr.count("note: vit_pico_patch2_8 is timm's name for ViT-Pico/2 at 8 px") == 1


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("num_classes", "classes"), ("img_size", "resolution"), ("image_size", "resolution"), ("in_chans", "channels"),
     ("drop_rate", "dropout"), ("drop_path_rate", "drop_path"), ("global_pool", "pool"), ("patch_size", "patch"),
     ("num_heads", "heads"), ("embed_dim", "width"), ("reslution", "resolution")],
)  # fmt: skip
def test_keywords_of_other_libraries_get_a_suggestion(theirs, ours):
    with pytest.raises(UsageError, match=f"^Setting must be one of .*, got '{theirs}'. Did you mean '{ours}'?"):
        create("ViT-B/16", **{theirs: 3})


def test_suggested_keywords_exist_in_the_family():
    with pytest.raises(UsageError, match="got 'global_pool'") as caught:
        create("MLP-Nano", global_pool="avg")
    assert "'pool'" not in str(caught.value)
    with pytest.raises(UsageError, match=r"Name must be that of one public checkpoint, got 'ViT-B/16', which has vit-"):
        create("ViT-B/16", pretrained=True)
    with pytest.raises(UsageError, match="Settings must keep the shapes of pretrained weights, got depth=3"):
        create("fashion", pretrained=True, depth=3)


# Types


def members(hint):
    """Return the types that a hint allows, with the values of a `Literal`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return set().union(*map(members, typing.get_args(hint)))
    return set(typing.get_args(hint)) if typing.get_origin(hint) is Literal else {hint}


def test_the_keywords_of_create_are_the_settings_of_the_families():
    expected = {}
    for family in FAMILIES:
        hints = typing.get_type_hints(FAMILIES[family])
        for field in dataclasses.fields(FAMILIES[family]):
            expected.setdefault(field.name, set()).update(members(hints[field.name]))
    del expected["name"]
    expected["merge"].add(int)  # one number stands for every layer
    expected["pretrained"] = {bool}
    pair, row = tuple[int, int], tuple[int, ...]
    for allowed in expected.values():
        if pair in allowed:
            allowed.add(int)  # one number stands for both sides
        if row in allowed:
            allowed ^= {row, Sequence[int]}
    parameters = inspect.signature(create).parameters
    hints = typing.get_type_hints(create)
    keywords = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert {name: members(hints[name]) for name in keywords} == expected
    assert parameters["others"].annotation is Never
    assert str(parameters["classes"]) == "classes: int = as named"


def test_type_checker_accepts_valid_calls_only():
    ty = Path(sys.executable).with_name("ty")
    if not ty.exists():
        pytest.skip("needs ty")
    path = ROOT / "tests" / "typed_calls.py"
    command = [ty, "check", "--output-format", "concise", "--python", sys.prefix, "--extra-search-path", "src", path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    error_lines = {int(line) for line in re.findall(r"typed_calls\.py:(\d+):\d+: error", done.stdout)}
    lines = path.read_text(encoding="utf-8").splitlines()
    assert error_lines == {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}, done.stdout


# Names and their documentation


def test_public_names_are_few_and_not_modules():
    assert vitrail.__all__ == sorted(vitrail.__all__)
    assert len(vitrail.__all__) < 25
    for name in vitrail.__all__:
        assert importlib.util.find_spec(f"vitrail.{name}") is None, name
        assert getattr(vitrail, name).__module__.startswith("vitrail.")


@pytest.mark.parametrize("page", ["docs/api.md", "docs/api.ko.md"])
def test_the_reference_lists_the_public_names(page):
    listed = re.findall(r"`vitrail\.(\w+)[`(.]", (ROOT / page).read_text(encoding="utf-8"))
    assert {name for name in listed if importlib.util.find_spec(f"vitrail.{name}") is None} == set(vitrail.__all__)


@pytest.mark.parametrize("page", ["docs/api.md", "docs/api.ko.md"])
def test_the_reference_states_the_modules_of_result_classes(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for kind in (Result, Evaluation, Prediction, Activations, Step):
        assert f"`{kind.__module__}.{kind.__name__}`" in text


@pytest.mark.parametrize("settings", [{"dropout": 0.3}, {"drop_path": 0.5}])
def test_training_mode_tokens_are_the_input_of_the_head(settings):
    model = vitrail.create("ViT-Nano/7", pool="cls", **settings).train()
    seen = model.record(torch.randn(8, 1, 28, 28), [-1])
    assert torch.equal(model.norm(seen.steps["blocks.3"][:, 0]), seen.steps["pooled"])


METHODS = ["reset_classifier", "features", "layer_tokens", "feature_maps"]
DOCUMENTED = {
    **{f"vitrail.{name}": getattr(vitrail, name) for name in vitrail.__all__},
    **{f"vitrail.faces.{name}": getattr(vitrail.faces, name) for name in vitrail.faces.__all__},
    **{f"model.{name}": getattr(Model, name) for name in METHODS},
}


def draw_people(folder, names, images=3):
    """Write a folder of images for each name."""
    rng = np.random.default_rng(len(names))
    for name in names:
        (folder / name).mkdir(parents=True)
        pattern = rng.integers(0, 256, (28, 28))
        for number in range(images):
            pixels = (0.7 * pattern + 0.3 * rng.integers(0, 256, (28, 28))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name.startswith("vitrail.faces"):
        draw_people(tmp_path / "people", ["Ann", "Ben", "Cid", "Dee"])
        draw_people(tmp_path / "strangers", ["Eva", "Fay", "Gus", "Hal", "Ida"])
    # Six processes would measure the start of an engine each; the page docs/python.md runs this measurement.
    monkeypatch.setattr("vitrail.inference.measure._measure_start", lambda *_: (1.0, 10**8))
    names = {"vitrail": vitrail, "torch": torch, "np": np, "dataclasses": dataclasses}
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(DOCUMENTED[name], name, globs=names)
    assert test.examples
    failures = []
    doctest.DocTestRunner().run(test, out=failures.append)
    assert "".join(failures) == ""


@pytest.mark.slow
def test_custom_training_loop_runs(shared, tmp_path):
    """The training loop of docs/python.md, on real weights and photos."""
    (script,) = [block.text for block in blocks(ROOT / "docs" / "python.md") if block.reason]
    assert len([line for line in script.splitlines() if line.strip()]) <= 40
    for name in ("deit-ti16", "hymenoptera"):
        (tmp_path / name).symlink_to(shared / name)
    one_core = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=one_core, check=False)
    assert done.returncode == 0, done.stderr
    held_out, test = map(int, re.findall(r"(\d+) of", done.stdout))
    assert held_out >= 234
    assert test >= 146
