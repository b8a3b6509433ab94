"""Code written for timm's models runs with ours: features, head, parameter groups and data settings equal timm's."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vitrail
from tests.peers import import_peer

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


# Written for timm; with Vitrail, the import and the line that creates the model differ.
SCRIPT = """
import {package}
import timm.data
import timm.optim
import torch
from PIL import Image

model = {create}
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.linspace(-0.05, 0.05, parameter.numel()).view_as(parameter))
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
images = torch.stack([transform(Image.new("RGB", (300, 260), color)) for color in ("red", "navy")])
model.eval()
tokens = model.forward_features(images)
features = model.forward_head(tokens, pre_logits=True)
logits = model.forward_head(tokens)
assert features.shape == (2, model.num_features) and model.num_features == model.embed_dim
model.reset_classifier(5)
assert model.num_classes == 5 and model.get_classifier() is model.head
torch.nn.init.constant_(model.head.weight, 0.01)
model.set_grad_checkpointing()
optimiser = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
names = {{id(parameter): name for name, parameter in model.named_parameters()}}
groups = [[names[id(p)] for p in g["params"]] + [g["lr_scale"], g["weight_decay"]] for g in optimiser.param_groups]
model.train()
torch.nn.functional.cross_entropy(model(images), torch.tensor([1, 3])).backward()
optimiser.step()
torch.save(model.state_dict(), path)
model.load_state_dict(torch.load(path, weights_only=True))
"""


def test_a_script_for_timm_runs_after_changing_the_import_and_one_line(tmp_path):
    timm = import_peer("timm")
    folder, bundle = tmp_path / "hub", tmp_path / "bundle"
    folder.mkdir()
    peer = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=2)
    save_file(peer.state_dict(), folder / "model.safetensors")
    settings = {"input_size": [3, 224, 224], "mean": [0.5] * 3, "std": [0.4] * 3, "crop_pct": 0.95}
    document = {"architecture": "vit_tiny_patch16_224", "model_args": {"depth": 2}, "num_classes": 10}
    document["pretrained_cfg"] = {**settings, "interpolation": "bilinear", "num_classes": 10}
    (folder / "config.json").write_text(json.dumps(document))
    vitrail.convert(str(folder), bundle, to="vitrail")
    results = []
    for package, create in (
        ("timm", f'timm.create_model("local-dir:{folder}", pretrained=True)'),
        ("vitrail", f'vitrail.create("{bundle}", pretrained=True)'),
    ):
        names = {"path": tmp_path / package}
        exec(SCRIPT.format(package=package, create=create), names)
        results.append(names)
    theirs, ours = results
    assert sorted(map(str, ours["groups"])) == sorted(map(str, theirs["groups"]))
    assert len(ours["groups"]) == 8  # the embedding, two blocks and the head, each with and without weight decay
    assert torch.equal(ours["images"], theirs["images"])
    for name in ("tokens", "features", "logits"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5)
    weights = [torch.load(tmp_path / package, weights_only=True) for package in ("timm", "vitrail")]
    assert weights[0].keys() == weights[1].keys()
