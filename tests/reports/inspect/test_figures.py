"""Receptive fields, attention figures and colour maps of `vitrail inspect`."""

import numpy as np
import pytest
import torch
from torch import nn

from vitrail.analysis.heads import head_input_weights
from vitrail.analysis.receptive_field import Reach, reach, reaches
from vitrail.bundles.pretrained import create
from vitrail.core.errors import UsageError
from vitrail.models.activations import look
from vitrail.models.base import Model
from vitrail.reports.attention_figure import attention_figure
from vitrail.reports.colours import reach_colours, sequential


def influence(name, layer, **changes):
    """Return which pixels (H, W) reach the centre of a layer in an untrained model."""
    model = create(name, **changes)
    return reach(model, torch.randn(4, 1, *model.config.resolution), layer) > 0


class OneConvolution(Model):
    """A model with a single convolution."""

    def __init__(self):
        super().__init__(create("ResNet-Nano").config)
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, images_BCHW, activations=None):
        features = self.convolution(images_BCHW)
        activations.record_output(0, features)
        return features.mean((2, 3))


def test_receptive_field_of_a_convolution_is_its_kernel():
    inside = reach(OneConvolution(), torch.randn(2, 1, 28, 28), 0) > 0
    assert inside[13:16, 13:16].all()
    assert inside.sum() == 9


def test_receptive_field_of_a_cnn_equals_the_formula():
    """r_l = r_(l-1) + (k - 1) * product of strides: 3 + 2 + 2 = 7 after unit 1, 7 + 2 + 4 = 13 after unit 2."""
    for layer, side in ((0, 7), (1, 13)):
        inside = influence("ResNet-Nano", layer)
        assert inside.sum() == side * side
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        assert len(rows) == len(columns) == side


def test_receptive_field_without_locality_is_the_image():
    for name in ("ViT-Nano/7", "Mixer-Nano/7", "MLP-Nano"):
        assert influence(name, 0).all()


def test_receptive_field_of_a_causal_model_is_what_came_before():
    pixel_indices = np.arange(28 * 28).reshape(28, 28)
    patch = pixel_indices // 28 // 7 * 4 + pixel_indices % 28 // 7  # raster index of each pixel's patch
    assert np.array_equal(influence("LSTM-Nano/7", 1), patch <= 10)
    assert np.array_equal(influence("LSTM-Nano/7", 1, order="reversed"), patch >= 10)
    pixels = np.arange(196).reshape(14, 14)
    assert np.array_equal(influence("iGPT-Micro", 1, causal=True), pixels <= 7 * 14 + 7)
    assert influence("iGPT-Micro", 1).all()


def test_receptive_field_of_local_attention_is_a_window_of_patches():
    inside = influence("ViT-Nano/7", 0, attention="local", pool="gap", patch=4)
    assert inside.sum() == (3 * 4) ** 2


def test_receptive_field_leaves_a_frozen_model_frozen():
    model = create("iGPT-Micro", causal=True).requires_grad_(False)
    influence_map = reach(model, torch.randn(1, 1, 14, 14), 0)
    assert influence_map.any()
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_receptive_field_of_a_missing_layer_is_an_error():
    model = create("ViT-Nano/7").train()
    with pytest.raises(UsageError, match="Layer must be an integer from 0 to 3, got 4"):
        reach(model, torch.randn(1, 1, 28, 28), 4)
    reach(model, torch.randn(1, 1, 28, 28), 3)
    assert model.training
    with pytest.raises(UsageError, match="needs an iGPT with output classes"):
        reach(create("iGPT-Micro", causal=True, output="pixels", classes=16), torch.randn(1, 1, 14, 14), 0)


def test_pixels_without_influence_are_white():
    shares = np.zeros((4, 4))
    shares[1, 2] = 1.0
    colours = reach_colours(shares)
    assert (colours[0] == 255).all()
    assert tuple(colours[1, 2]) == tuple(sequential(np.array(1.0)))


def test_attention_figure_has_a_tile_for_each_layer_and_head():
    maps = {layer: np.random.default_rng(layer).random((4, 2, 4)) for layer in (0, 3)}
    figure = np.asarray(attention_figure(np.zeros((14, 28, 1), np.uint8), maps, 9, "a test"))
    brightest = (figure == sequential(np.array(1.0))).all(-1)
    # One brightest patch in each of 2 layers x 4 heads, with a side of 24 pixels.
    assert 8 * 23 * 23 < brightest.sum() <= 8 * 24 * 24


def test_head_input_weights_are_cls_or_the_mean_of_patches():
    model = create("ViT-Nano/7")
    activations = look(model, torch.rand(2, 1, 28, 28))
    assert (head_input_weights(activations, model.layout()) == np.eye(17)[[0, 0]]).all()
    model = create("ViT-Nano/7", pool="gap", registers=2)
    assert model.layout().prefix == 2
    shares = head_input_weights(look(model, torch.rand(2, 1, 28, 28)), model.layout())
    assert (shares == np.array([0, 0] + [1 / 16] * 16, np.float32)).all()
    assert create("Hybrid-Nano").layout().step == (8, 8)  # pixels, not cells of the stem's map
    assert create("ResNet-Nano").layout() is None


def test_areas_of_a_patch_and_of_a_uniform_map():
    """The patch lies within its own square. The area of a uniform map equals the share."""
    influence_map = np.zeros((224, 224))
    influence_map[112:128, 112:128] = 1
    patch = Reach(influence_map, (120.0, 120.0)).areas((0.25, 0.8, 1.0))
    assert patch == {0.25: 64 / 224**2, 0.8: 256 / 224**2, 1.0: 256 / 224**2}
    uniform = Reach(np.ones((21, 21)), (10.5, 10.5)).areas((0.04, 0.5))
    assert uniform == {0.04: 25 / 441, 0.5: 225 / 441}


@pytest.mark.parametrize("name", ["ViT-Nano/7", "ResNet-Nano", "Mixer-Nano/7"])
def test_influence_is_centred_at_the_middle(name):
    torch.manual_seed(0)
    model = create(name)
    for layer, field in reaches(model, torch.randn(8, 1, 28, 28), [0, 1, 2]).items():
        rows, columns = np.indices(field.influence.shape) + 0.5
        mass = field.influence**4 / (field.influence**4).sum()
        centre = (mass * rows).sum(), (mass * columns).sum()
        assert centre == pytest.approx(field.middle, abs=1.6), layer


def test_sequential_colours_are_monotonic_in_grey():
    luminance = sequential(np.linspace(0, 1, 50)) @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(luminance) > -1).all()
    assert luminance[-1] - luminance[0] > 150
