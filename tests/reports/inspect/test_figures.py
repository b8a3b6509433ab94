"""Figures and the numbers behind them."""

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
    """Which pixels reach the centre of a freshly built model: (H, W) booleans."""
    model = create(name, **changes)
    return reach(model, torch.randn(4, 1, *model.config.resolution), layer) > 0


class OneConvolution(Model):
    """The smallest CNN there is."""

    def __init__(self):
        super().__init__(create("ResNet-Nano").config)
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, images_BCHW, activations=None):
        features = self.convolution(images_BCHW)
        activations.record_output(0, features)
        return features.mean((2, 3))


def test_one_convolution_hears_exactly_its_kernel():
    inside = reach(OneConvolution(), torch.randn(2, 1, 28, 28), 0) > 0
    assert inside[13:16, 13:16].all()
    assert inside.sum() == 9


def test_a_cnn_hears_exactly_its_receptive_field():
    """r_l = r_(l-1) + (k - 1) * product of strides: stem and first unit 3 + 2 + 2 = 7; then 2 + 4 more: 13."""
    for layer, side in ((0, 7), (1, 13)):
        inside = influence("ResNet-Nano", layer)
        assert inside.sum() == side * side
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        assert len(rows) == len(columns) == side


def test_families_without_locality_hear_everything_at_once():
    for name in ("ViT-Nano/7", "Mixer-Nano/7", "MLP-Nano"):
        assert influence(name, 0).all()


def test_sequences_hear_only_what_came_before():
    before = np.arange(28 * 28).reshape(28, 28)
    patch = before // 28 // 7 * 4 + before % 28 // 7  # raster number of each pixel's patch
    assert np.array_equal(influence("LSTM-Nano/7", 1), patch <= 10)
    assert np.array_equal(influence("LSTM-Nano/7", 1, order="reversed"), patch >= 10)
    pixels = np.arange(196).reshape(14, 14)
    assert np.array_equal(influence("iGPT-Micro", 1, causal=True), pixels <= 7 * 14 + 7)
    assert influence("iGPT-Micro", 1).all()


def test_local_attention_hears_a_ring_of_patches_a_layer():
    inside = influence("ViT-Nano/7", 0, attention="local", pool="gap", patch=4)
    assert inside.sum() == (3 * 4) ** 2


def test_a_frozen_pixel_model_hears_and_stays_frozen():
    model = create("iGPT-Micro", causal=True).requires_grad_(False)
    influence_map = reach(model, torch.randn(1, 1, 14, 14), 0)
    assert influence_map.any()
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_reach_refuses_a_layer_that_does_not_exist():
    model = create("ViT-Nano/7").train()
    with pytest.raises(UsageError, match="Layer must be an integer from 0 to 3, got 4"):
        reach(model, torch.randn(1, 1, 28, 28), 4)
    reach(model, torch.randn(1, 1, 28, 28), 3)
    assert model.training
    with pytest.raises(UsageError, match="needs an iGPT with output classes"):
        reach(create("iGPT-Micro", causal=True, output="pixels", classes=16), torch.randn(1, 1, 14, 14), 0)


def test_colours_of_reach_leave_silent_pixels_white():
    shares = np.zeros((4, 4))
    shares[1, 2] = 1.0
    colours = reach_colours(shares)
    assert (colours[0] == 255).all()
    assert tuple(colours[1, 2]) == tuple(sequential(np.array(1.0)))


def test_attention_figure_shows_each_layer_and_head():
    maps = {layer: np.random.default_rng(layer).random((4, 2, 4)) for layer in (0, 3)}
    figure = np.asarray(attention_figure(np.zeros((14, 28, 1), np.uint8), maps, 9, "a test"))
    brightest = (figure == sequential(np.array(1.0))).all(-1)
    # One brightest patch in each of 2 layers x 4 heads, 24 pixels a side, the image's shape being kept.
    assert 8 * 23 * 23 < brightest.sum() <= 8 * 24 * 24


def test_what_the_head_reads():
    model = create("ViT-Nano/7")
    activations = look(model, torch.rand(2, 1, 28, 28))
    assert (head_input_weights(activations, model.layout()) == np.eye(17)[[0, 0]]).all()
    model = create("ViT-Nano/7", pool="gap", registers=2)
    assert model.layout().prefix == 2
    shares = head_input_weights(look(model, torch.rand(2, 1, 28, 28)), model.layout())
    assert (shares == np.array([0, 0] + [1 / 16] * 16, np.float32)).all()
    assert create("Hybrid-Nano").layout().step == (8, 8)  # pixels, not cells of the stem's map
    assert create("ResNet-Nano").layout() is None


def test_areas_of_known_maps():
    """A patch off the middle: all of it within its own square, and a uniform map by its area."""
    influence_map = np.zeros((224, 224))
    influence_map[112:128, 112:128] = 1
    patch = Reach(influence_map, (120.0, 120.0)).areas((0.25, 0.8, 1.0))
    assert patch == {0.25: 64 / 224**2, 0.8: 256 / 224**2, 1.0: 256 / 224**2}
    flat = Reach(np.ones((21, 21)), (10.5, 10.5)).areas((0.04, 0.5))
    assert flat == {0.04: 25 / 441, 0.5: 225 / 441}


@pytest.mark.parametrize("name", ["ViT-Nano/7", "ResNet-Nano", "Mixer-Nano/7"])
def test_the_middle_is_where_the_reach_is_strongest(name):
    torch.manual_seed(0)
    model = create(name)
    for layer, one in reaches(model, torch.randn(8, 1, 28, 28), [0, 1, 2]).items():
        rows, columns = np.indices(one.influence.shape) + 0.5
        mass = one.influence**4 / (one.influence**4).sum()
        found = (mass * rows).sum(), (mass * columns).sum()
        assert found == pytest.approx(one.middle, abs=1.6), layer


def test_colours_keep_their_order_in_grey():
    luminance = sequential(np.linspace(0, 1, 50)) @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(luminance) > -1).all()
    assert luminance[-1] - luminance[0] > 150
