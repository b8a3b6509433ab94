"""Surgery: supported changes of weights by family, and the defaults of a family without its own subclass."""

import pytest
import torch

from vitrail import create
from vitrail.lab.exact import redraw
from vitrail.models.surgery import Surgery, share_weights, split_order, surgery_of


def test_a_family_without_surgery_supports_no_change():
    model = redraw(create("ResNet-Nano"))
    assert type(surgery_of(model)) is Surgery
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not surgery_of(model).permute_input_weights(torch.arange(28 * 28).flip(0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert surgery_of(model).with_mean_pooling() == (model, None)
    assert surgery_of(model).resize_note == ""


def test_shared_weights_change_in_both_models():
    model = redraw(create("ViT-Nano/7")).eval()
    merged = share_weights(model, merge=2)
    assert merged.config.merge == (2, 2, 2, 2)
    images = torch.rand(1, 1, 28, 28)
    with torch.no_grad():
        before = merged(images)
        model.head.bias.add_(1)
        torch.testing.assert_close(merged(images), before + 1)


@pytest.mark.parametrize(
    ("name", "changes", "notes"),
    [
        ("ViT-Nano/7", {}, []),
        ("ViT-Nano/7", {"representation": "tanh"}, ["the hidden layer of the pre-training head is dropped"]),
        ("ResNet-Nano", {"classes": 0, "embedding": 8}, ["the embedding of 8 is dropped"]),
        (
            "iGPT-Micro",
            {"output": "pixels", "causal": True, "classes": 16},
            ["the start token is dropped and positions shift by one"],
        ),
    ],
)
def test_new_head_returns_notes_about_dropped_modules(name, changes, notes):
    model = create(name, **changes)
    copy, dropped_notes = surgery_of(model).with_new_head(3)
    assert (copy.config.classes, copy.config.embedding, dropped_notes) == (3, 0, notes)
    assert copy(torch.rand(1, 1, *copy.config.resolution)).tolist() == [[0, 0, 0]]
    assert model.config.replace() == create(name, **changes).config


def test_split_order_rejects_an_order_that_mixes_patches():
    raster = torch.arange(16).view(4, 4)
    patches, inside = split_order(raster.flip(0).flatten(), (4, 4), (2, 2))
    assert (patches.tolist(), inside.tolist()) == ([2, 3, 0, 1], [2, 3, 0, 1])
    assert split_order(torch.cat([raster.flatten()[1:], raster.flatten()[:1]]), (4, 4), (2, 2)) is None
