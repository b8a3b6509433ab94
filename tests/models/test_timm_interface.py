"""Code written for timm's models runs with ours: features, head, parameter groups and data settings equal timm's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vitrail
from tests.peers import import_peer
from vitrail.bundles.timm_names import timm_preprocess
from vitrail.core.errors import UsageError
from vitrail.models.timm_interface import TimmInterface, timm_data_config
from vitrail.models.zoo import TIMM, find

SMALL = {"depth": 3, "width": 48, "heads": 3, "mlp": 96, "patch": 8, "resolution": 32, "classes": 5}
PEER = {
    "depth": 3,
    "embed_dim": 48,
    "num_heads": 3,
    "mlp_ratio": 2,
    "patch_size": 8,
    "img_size": 32,
    "num_classes": 5,
}


def make_pair(ours=None, theirs=None):
    """Our ViT and timm's with the same random weights."""
    timm = import_peer("timm")
    model = vitrail.create("ViT-Ti/16", **{**SMALL, **(ours or {})}).eval()
    peer = timm.models.VisionTransformer(**{**PEER, **(theirs or {})}).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    peer.load_state_dict(model.state_dict())
    return model, peer


def named_groups(groups, model):
    """The groups of an optimiser as sets of names with their decay and scale."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return sorted(
        (sorted(names[id(parameter)] for parameter in group["params"]), group["weight_decay"], group.get("lr_scale"))
        for group in groups
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"registers": 2, "class_position": False}, {"reg_tokens": 2, "no_embed_class": True}),
        ({"pool": "gap"}, {"global_pool": "avg", "fc_norm": False, "class_token": False}),
        ({"pool": "map"}, {"global_pool": "map", "class_token": False}),
        (
            {"embedding_norm": True, "patch_bias": False, "activation": "quick-gelu", "norm_epsilon": 1e-5},
            {"pre_norm": True, "act_layer": "quick_gelu", "norm_layer": torch.nn.LayerNorm},
        ),
    ],
)
def test_features_and_logits_equal_timms(ours, theirs):
    model, peer = make_pair(ours, theirs)
    images = torch.randn(2, 3, 32, 32)
    tokens = model.forward_features(images)
    assert torch.allclose(tokens, peer.forward_features(images), atol=1e-5)
    for pre_logits in (False, True):
        pooled = model.forward_head(tokens, pre_logits=pre_logits)
        assert torch.allclose(pooled, peer.forward_head(tokens, pre_logits=pre_logits), atol=1e-6)
    assert torch.allclose(model(images), peer(images), atol=1e-5)
    assert torch.allclose(model.forward_head(tokens), model(images), atol=1e-6)
    assert torch.allclose(model.features(images), model.forward_head(tokens, pre_logits=True), atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"indices": 2, "norm": True},
        {"indices": [-1, 0], "return_prefix_tokens": True},
        {"indices": [1], "stop_early": True, "output_fmt": "NLC"},
        {"indices": [0, 2], "intermediates_only": True},
    ],
)
@pytest.mark.parametrize("has_prefix", [True, False])
def test_intermediates_equal_timms(options, has_prefix):
    pair = ({"registers": 2, "class_position": False}, {"reg_tokens": 2, "no_embed_class": True})
    if not has_prefix:
        pair = ({"pool": "gap"}, {"global_pool": "avg", "fc_norm": False, "class_token": False})
    model, peer = make_pair(*pair)
    images = torch.randn(2, 3, 32, 32)
    outputs, expected = (net.forward_intermediates(images, **options) for net in (model, peer))
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match="Output format must be NCHW or NLC, got 'NHWC'"):
        model.forward_intermediates(images, output_fmt="NHWC")


@pytest.mark.parametrize("indices", [0, 4, -1])
def test_impossible_numbers_of_intermediates_are_errors(indices):
    model = vitrail.create("ViT-Ti/16", **SMALL)
    with pytest.raises(UsageError, match=f"Indices must be an integer from 1 to 3, got {indices}"):
        model.forward_intermediates(torch.zeros(1, 3, 32, 32), indices)


def test_intermediates_of_a_cnn_are_its_maps():
    model = vitrail.create("ResNet-Nano").eval()
    features, maps = model.forward_intermediates(torch.randn(2, 1, 28, 28), [0, 2])
    assert [list(grid.shape) for grid in maps] == [[2, 8, 28, 28], [2, 32, 7, 7]]
    assert features.shape == (2, 32, 7, 7)


def test_the_interface_has_only_names_of_timm():
    timm = import_peer("timm")
    with torch.device("meta"):
        peer = timm.create_model("vit_tiny_patch16_224")
    names = {name for name in vars(TimmInterface) if not name.startswith("_")}
    assert {name for name in names if not hasattr(peer, name)} == {"preprocess"}


def test_models_under_timms_names_have_timms_preprocessing():
    timm, data = import_peer("timm"), import_peer("timm.data")
    for name in TIMM:
        tags = {full.partition(".")[2] for full in timm.list_pretrained(f"{name}.*")}
        for full in (name, *(f"{name}.{tag}" for tag in sorted(tags))):
            expected = timm.get_pretrained_cfg(full)
            preprocess = timm_preprocess(full, find(full))
            if preprocess is None:
                assert name.startswith("resnetv2_") or full.partition(".")[2].startswith(("bamboo", "miil")), full
                continue
            settings = timm_data_config(preprocess)
            assert settings == {key: getattr(expected, key) for key in settings}, full
    model = vitrail.create("vit_tiny_patch16_384", classes=2)
    assert data.resolve_model_data_config(model)["mean"] == (0.5, 0.5, 0.5)
    assert vitrail.create("vit_tiny_patch16_384", channels=1).preprocess is None
    assert vitrail.create("ViT-Ti/16").preprocess is None


def test_a_pretrained_model_keeps_its_preprocessing_at_another_resolution(tmp_path):
    data = import_peer("timm.data")
    preprocess = vitrail.Preprocess(resolution=(32, 32), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    vitrail.save(vitrail.Bundle(model=vitrail.create("ViT-Ti/16", **SMALL), preprocess=preprocess), tmp_path / "bundle")
    model = vitrail.create(str(tmp_path / "bundle"), pretrained=True, resolution=48, drop_path=0.1, classes=2)
    settings = data.resolve_model_data_config(model)
    assert settings["input_size"] == (3, 48, 48)
    assert settings["mean"] == (0.1, 0.2, 0.3)


def test_a_distilled_vit_equals_timms_with_two_heads():
    import_peer("timm")
    from timm.models.deit import VisionTransformerDistilled

    model = vitrail.create("ViT-Ti/16", **SMALL, registers=1, distilled=True).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    peer = VisionTransformerDistilled(**PEER).eval()
    tensors = dict(model.state_dict())
    position = torch.randn(1, 1, 48)  # of the distillation token: ours has it in the token
    tensors["dist_token"] = tensors.pop("reg_token") - position
    table = tensors["pos_embed"]
    tensors["pos_embed"] = torch.cat([table[:, :1], position, table[:, 1:]], dim=1)
    peer.load_state_dict(tensors)
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(model(images), peer(images), atol=1e-5)
    assert torch.allclose(model.features(images), peer.forward_head(peer.forward_features(images), True), atol=1e-5)
    assert model.config.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert len(model.output_layers()) == 2
    model.reset_classifier(3)
    assert model.config.distilled
    assert model(images).tolist() == [[0.0] * 3] * 2
    model.replace_head(0, embedding=8)
    assert not model.config.distilled
    assert model(images).shape == (2, 8)


@pytest.mark.parametrize("layer_decay", [None, 0.75])
def test_timms_optimiser_factory_makes_the_same_groups(layer_decay):
    model, peer = make_pair({"registers": 2, "class_position": False}, {"reg_tokens": 2, "no_embed_class": True})
    optim = import_peer("timm.optim")
    groups = [
        named_groups(optim.create_optimizer_v2(net, "adamw", 1e-3, 0.05, layer_decay=layer_decay).param_groups, net)
        for net in (model, peer)
    ]
    assert groups[0] == groups[1]
    assert len(groups[0]) == (2 if layer_decay is None else 10)
    model.set_grad_checkpointing()
    assert model.checkpoints_activations


@pytest.mark.parametrize("name", ["BiT-R50x1", "Mixer-S/16", "R+ViT-Ti/16", "LSTM-Nano/7", "iGPT-Micro", "MLP-Nano"])
def test_every_family_has_timms_interface(name):
    optim = import_peer("timm.optim")
    model = vitrail.create(name, classes=4).eval()
    images = torch.randn(2, *model.default_cfg["input_size"])
    features = model.forward_features(images)
    logits = model.forward_head(features)
    assert torch.allclose(logits, model(images), atol=1e-5)
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
    assert model.get_classifier() is model.head
    assert model.num_classes == 4
    groups = optim.create_optimizer_v2(model, "adamw", 1e-3, 0.05, layer_decay=0.5).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    scales = {group["lr_scale"] for group in groups}
    assert max(scales) == 1
    names = {name.partition(".")[0] for name, _ in model.named_parameters()}
    has_stem = bool(names - {"blocks", "layers", "stages", "norm", "head"})
    assert len(scales) == 1 + has_stem + len(set(layer_numbers(model)))


def layer_numbers(model):
    """The names of the blocks of a model, as far as their numbers."""
    for name, _ in model.named_parameters():
        first, *rest = name.split(".")
        if first == "stages":
            yield first, rest[0], rest[2]
        elif first in ("blocks", "layers"):
            yield first, rest[0]


def test_timm_reads_the_preprocessing_of_a_bundle():
    data = import_peer("timm.data")
    preprocess = vitrail.Preprocess(resolution=(32, 32), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop_fraction=0.8)
    model = vitrail.create("ViT-Ti/16", **SMALL)
    assert data.resolve_model_data_config(model)["input_size"] == (3, 32, 32)
    vitrail.Bundle(model=model, preprocess=preprocess)
    settings = data.resolve_model_data_config(model)
    assert settings == {
        "input_size": (3, 32, 32),
        "interpolation": "bicubic",
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
        "crop_pct": 0.8,
        "crop_mode": "center",
    }
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))
    transform = data.create_transform(**settings)
    assert torch.equal(transform(image), preprocess([image])[0])


# A script that was written for timm.
SCRIPT = Path(__file__).parents[1] / "fixtures" / "timm_script.py"
# The lines that docs/python.md names, as they are for timm and for Vitrail.
LINES = (
    ("import timm\n", "import vitrail\n"),
    (
        'model = timm.create_model("deit_tiny_patch16_224", num_classes=1000)\n',
        'model = vitrail.create("deit_tiny_patch16_224", classes=1000)\n',
    ),
    ("model.reset_classifier(num_classes=2)\n", "model.reset_classifier(2)\n"),
)


def change_lines(script):
    for theirs, ours in LINES:
        assert script.count(theirs) == 1
        script = script.replace(theirs, ours)
    return script


def run_both(changed_script, arguments, folder, monkeypatch):
    """Run the script with timm and with Vitrail, and return their variables."""
    results = []
    for package, script in (("timm", SCRIPT.read_text()), ("vitrail", changed_script)):
        names = {}
        monkeypatch.setattr("sys.argv", [package, str(arguments[0]), str(folder / package), *arguments[1:]])
        exec(script, names)
        results.append(names)
    return results


@pytest.fixture
def files(tmp_path):
    """Random weights of timm's model, and two photos."""
    timm = import_peer("timm")
    import_peer("timm.data")
    torch.manual_seed(0)
    peer = timm.create_model("deit_tiny_patch16_224")
    torch.nn.init.normal_(peer.head.weight)
    save_file(peer.state_dict(), tmp_path / "model.safetensors")
    photos = [str(tmp_path / f"{name}.png") for name in ("wide", "tall")]
    for photo, shape in zip(photos, ((250, 400, 3), (333, 250, 3)), strict=True):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)).save(photo)
    return [tmp_path / "model.safetensors", *photos]


def check_equal(theirs, ours):
    """Assert that data settings, transforms, features, logits, parameter groups and a step are those of timm."""
    assert ours["config"] == theirs["config"]
    assert torch.equal(ours["images"], theirs["images"])
    for name in ("augment", "transform"):
        assert str(ours[name]) == str(theirs[name])
    for name in ("logits", "tokens", "features", "last", "maps"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-4)
    groups = [named_groups(names["optimiser"].param_groups, names["model"]) for names in (ours, theirs)]
    assert groups[0] == groups[1]
    assert len(groups[0]) == 2 * 14  # the embedding, twelve blocks and the head, each with and without weight decay
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), abs=1e-4)
    assert ours["model"].state_dict().keys() == theirs["model"].state_dict().keys()


def test_a_script_for_timm_runs_after_changing_the_import_and_two_lines(tmp_path, files, monkeypatch):
    script = SCRIPT.read_text()
    assert sum(bool(line.strip()) for line in script.splitlines()) == 30
    theirs, ours = run_both(change_lines(script), files, tmp_path, monkeypatch)
    check_equal(theirs, ours)
    theirs["model"].load_state_dict(torch.load(tmp_path / "vitrail", weights_only=True))  # timm reads our checkpoint


def test_a_script_for_timm_runs_with_the_weights_of_a_bundle(tmp_path, files, monkeypatch):
    settings = {"input_size": [3, 224, 224], "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    settings |= {"crop_pct": 0.9, "interpolation": "bicubic", "num_classes": 1000}
    document = {"architecture": "deit_tiny_patch16_224", "num_classes": 1000, "pretrained_cfg": settings}
    (tmp_path / "config.json").write_text(json.dumps(document))
    vitrail.convert(str(tmp_path), tmp_path / "bundle", to="vitrail")
    script = change_lines(SCRIPT.read_text())
    line = LINES[1][1]
    assert line in script
    script = script.replace(line, f'model = vitrail.create("{tmp_path / "bundle"}", pretrained=True)\n')
    check_equal(*run_both(script, files, tmp_path, monkeypatch))


@pytest.mark.parametrize("language", ["", ".ko"])
def test_the_docs_name_the_lines_that_change(language):
    page = (SCRIPT.parents[2] / "docs" / f"python{language}.md").read_text(encoding="utf-8")
    for theirs, ours in LINES:
        assert f"-{theirs}" in page
        assert f"+{ours}" in page
