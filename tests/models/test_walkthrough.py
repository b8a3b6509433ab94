"""Walkthroughs of all families: their steps, and their messages in English and Korean."""

import re

import pytest
import torch

import vitrail
from vitrail.bundles.pretrained import create
from vitrail.core.registry import load_object
from vitrail.lab.exact import redraw
from vitrail.models.families import FAMILIES
from vitrail.models.families.vit.walkthrough import ViTWalkthrough, attention_equation, mlp_equation, pooling_equation
from vitrail.models.walkthrough import Walkthrough, walkthrough_of

MODELS = [
    ("ViT-Nano/7", {}),
    ("ViT-Nano/7", {"pool": "map", "registers": 2, "position": "sincos-2d", "position_at": "every"}),
    ("ViT-Nano/7", {"norm_order": "post", "classes": 0, "embedding": 8, "position": "learned-2d"}),
    ("ViT-Nano/7", {"pool": "gap", "classes": 0, "position": "none"}),
    ("Hybrid-Nano", {}),
    ("ResNet-Nano", {}),
    ("BiT-R50x1", {"resolution": 32, "layers": (1, 1)}),
    ("Mixer-Nano/7", {}),
    ("LSTM-Nano/7", {}),
    ("iGPT-Micro", {"resolution": 8}),
    ("iGPT-Micro", {"resolution": 8, "output": "pixels", "causal": True, "classes": 16}),
    ("MLP-Nano", {}),
]


@pytest.mark.parametrize("family", tuple(FAMILIES))
def test_every_family_has_a_walkthrough_of_its_own(family):
    walkthrough = load_object(FAMILIES[family].walkthrough)
    assert issubclass(walkthrough, Walkthrough)
    assert walkthrough.__module__ == f"vitrail.models.families.{family}.walkthrough"
    assert walkthrough.messages.items() > Walkthrough.messages.items()


@pytest.mark.parametrize("family", tuple(FAMILIES))
def test_english_and_korean_messages_have_the_same_placeholders(family):
    for name, message in load_object(FAMILIES[family].walkthrough).messages.items():
        assert message.keys() == {"en", "ko"}, name
        placeholders = [sorted(set(re.findall(r"\{(\w+)\}", text))) for text in message.values()]
        assert placeholders[0] == placeholders[1], name


@pytest.mark.parametrize(("name", "changes"), MODELS)
def test_every_message_that_a_walkthrough_names_exists(name, changes):
    model = redraw(create(name, **changes)).eval()
    walkthrough = walkthrough_of(model)
    steps = walkthrough.steps(vitrail.look(model, torch.rand(1, model.config.channels, *model.config.resolution)))
    for step in steps:
        for text in walkthrough.messages[step.sentence].values():
            assert text.format(**step.fields)
    for inner in walkthrough.layer_equations(0):
        assert f"step-{inner}" in walkthrough.messages
    assert f"position-{walkthrough.position_origin}" in walkthrough.messages


def test_no_message_is_unused():
    explained = re.compile(r"(part-|.*-(title|says|asks|answer))")
    for family in FAMILIES:
        walkthrough = load_object(FAMILIES[family].walkthrough)
        used = {
            step.sentence
            for name, changes in MODELS
            if (model := create(name, **changes)).config.family == family
            for step in walkthrough_of(model).steps(
                vitrail.look(model, torch.rand(1, model.config.channels, *model.config.resolution))
            )
        }
        names = set(walkthrough.messages) - set(Walkthrough.messages)
        inherited = set(ViTWalkthrough.messages) if family == "hybrid" else set()
        assert {name for name in names - inherited if not explained.match(name)} <= used, family


def test_a_family_without_a_walkthrough_gets_one_step_per_layer():
    model = redraw(create("MLP-Nano")).eval()
    steps = Walkthrough(model).steps(vitrail.look(model, torch.rand(1, 1, 28, 28)))
    layers = [f"blocks.{layer}" for layer in range(model.config.depth)]
    assert [step.key for step in steps] == ["picture", *layers, "pooled", "logits"]
    assert all(step.sentence in Walkthrough.messages for step in steps)


def test_equations_equal_the_paper():
    assert attention_equation("z_l") == "z' = MSA(LN(z_l)) + z_l"
    assert mlp_equation("z_(l+1)") == "z_(l+1) = MLP(LN(z')) + z'"
    assert pooling_equation("cls") == "LN(z_L^0)"


def test_inspect_and_explain_show_the_same_equations_of_a_block():
    model = redraw(create("ViT-Nano/7")).eval()
    walkthrough = walkthrough_of(model)
    steps = {step.key: step.equation for step in walkthrough.steps(vitrail.look(model, torch.rand(1, 1, 28, 28)))}
    explained = {step.name: step.equation for part in walkthrough.explanation().parts.values() for step in part}
    equations = f"{explained['added']},  {explained['attended']}".replace("z_(l+1)", "z_1").replace("z_l", "z_0")
    assert steps["blocks.0"] == equations
    assert steps["tokens"] == explained["positions"]
    assert steps["pooled"] == explained["read"]
