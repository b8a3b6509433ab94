"""Looking inside, in numbers: exact values where there are some."""

import numpy as np
import pytest
import torch

import vitrail
from redraw import redraw
from vitrail.errors import UsageError
from vitrail.inspection.evidence import evidence_grid, faith, fill, occlusion, patch_drop, to_cells
from vitrail.inspection.layers import cka, cka_table, outliers
from vitrail.inspection.places import filters, position_table, similarity, structure
from vitrail.inspection.weights import (
    attention_written_out,
    entropy,
    grid_distances,
    layout,
    measure_heads,
    relevance,
    rollout,
)  # fmt: skip


def tiny(**changes):
    settings = {"resolution": 28, "classes": 10, "channels": 1, **changes}
    return redraw(vitrail.create("ViT-Micro/4", **settings), std=0.1).eval()


def attention_of(config, weights_NN):
    """Attention of one picture and one head that [CLS] takes no part in."""
    whole = np.eye(config.tokens)
    whole[config.prefix :, config.prefix :] = weights_NN
    return whole[None, None]


@pytest.mark.parametrize(
    ("grid", "patch", "uniform", "alone", "box", "cross", "largest"),
    [
        (14, 16, 116.4922, 117.0896, 16.6981, 12.5605, 294.156),
        (7, 32, 115.5029, 117.9092, 32.4355, 24.5986, 271.529),
        (7, 4, 14.4379, 14.7387, 4.0544, 3.0748, 33.941),
        (8, 4, 16.5459, 16.8086, 4.0847, 3.0917, 39.598),
        (4, 7, 14.0561, 14.9932, 6.7714, 5.1917, 29.698),
        (4, 2, 4.0160, 4.2838, 1.9347, 1.4833, 8.485),
    ],
)
def test_distances_of_known_attention(grid, patch, uniform, alone, box, cross, largest):
    model = vitrail.create("ViT-Micro/4", resolution=grid * patch, patch=patch)
    config, where = model.config, layout(model)
    distances = grid_distances((grid, grid), (patch, patch))
    count = grid * grid
    rows, columns = np.divmod(np.arange(count), grid)
    down, across = np.abs(rows[:, None] - rows), np.abs(columns[:, None] - columns)
    masks = {
        uniform: np.ones((count, count)),
        alone: 1 - np.eye(count),
        box: (np.maximum(down, across) <= 1).astype(float),
        cross: (down + across <= 1).astype(float),
        0.0: np.eye(count),
    }
    for expected, mask in masks.items():
        found = measure_heads(attention_of(config, mask / mask.sum(1, keepdims=True)), where)
        assert found.distance[0, 0] == pytest.approx(expected, abs=1e-3)
        assert found.of_uniform[0, 0] == pytest.approx(expected / uniform, abs=1e-4)
    assert distances.max() == pytest.approx(largest, abs=1e-3)


def test_attention_to_the_class_token_is_told_apart():
    model = tiny()
    config = model.config
    weights = np.full((1, 1, config.tokens, config.tokens), 0.5 / config.patches)
    weights[..., 0] = 0.5
    found = measure_heads(weights, layout(model))
    assert found.prefix_mass[0, 0] == pytest.approx(0.5)
    assert found.of_uniform[0, 0] == pytest.approx(1)
    assert found.entropy[0, 0] == pytest.approx(1)


def test_entropy_says_how_flat_a_map_is():
    assert entropy(np.ones((7, 7))) == pytest.approx(1)
    assert entropy(np.eye(1, 49)) == pytest.approx(0)


def test_rollout_rows_sum_to_one_and_one_layer_is_known():
    seen = vitrail.look(tiny(), torch.rand(2, 1, 28, 28))
    flow = rollout([seen.attention[layer] for layer in range(6)])
    torch.testing.assert_close(flow.sum(-1), torch.ones_like(flow[..., 0]))
    one = rollout([seen.attention[0]])
    expected = (seen.attention[0].double().mean(1) + torch.eye(50)) / 2
    torch.testing.assert_close(one, expected)
    with pytest.raises(UsageError, match="at least one layer"):
        rollout([])


def test_attention_beside_the_fused_kernel_reproduces_its_output():
    model = tiny()
    images = torch.rand(2, 1, 28, 28)
    seen = vitrail.look(model, images)
    assert torch.equal(seen.logits, model(images))
    with torch.no_grad(), attention_written_out(model) as kept:
        torch.testing.assert_close(model(images), seen.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(kept[2], seen.attention[2], rtol=0, atol=1e-6)
    assert kept[-1].shape[2] == 1  # only [CLS] asks in the last layer
    assert "forward" not in vars(model.blocks[0].attn)


def test_relevance_is_zero_for_what_a_logit_does_not_feel():
    model = tiny()
    images = torch.rand(2, 1, 28, 28)
    maps, classes = relevance(model, images)
    assert maps.shape == (2, 49)
    assert torch.equal(classes, model(images).argmax(-1))
    assert (maps >= 0).all()
    assert maps.max() > 0
    torch.nn.init.zeros_(model.head.weight)
    assert not relevance(model, images)[0].any()
    # Frozen weights and mean pooling, too.
    other = tiny(pool="gap").requires_grad_(False)
    assert relevance(other, images, torch.tensor([3, 3]))[0].max() > 0


def test_position_structure_of_known_tables():
    for grid, null, raster in ((14, 0.133, 0.626), (8, 0.222, 0.671), (7, 0.250, 0.690), (4, 0.400, 0.741)):
        both = {}
        for kind in ("sincos-2d", "sincos-1d"):
            model = vitrail.create("ViT-Ti/16", resolution=grid * 16, position=kind, depth=1)
            both[kind] = structure(position_table(model), model.config.grid)
        assert both["sincos-2d"].additive == pytest.approx(1, abs=1e-6)
        assert both["sincos-1d"].additive == pytest.approx(raster, abs=2e-3)
        assert both["sincos-2d"].additive_by_chance == pytest.approx(null, abs=1e-3)
    rng = np.random.default_rng(0)
    draws = [structure(rng.normal(size=(196, 192)), (14, 14)) for _ in range(3)]
    assert np.mean([one.additive for one in draws]) == pytest.approx(0.133, abs=0.01)
    assert max(max(one.row, one.column) for one in draws) < 0.2
    model = vitrail.create("ViT-Ti/16", position="sincos-2d", depth=1)
    known = structure(position_table(model), (14, 14))
    assert min(known.row, known.column) > 0.99
    model = vitrail.create("ViT-Ti/16", position="sincos-1d", depth=1)
    known = structure(position_table(model), (14, 14))
    assert known.row > 0.98
    assert known.column < 0.8  # it knows the raster order, not the columns
    assert similarity(rng.normal(size=(9, 5))).shape == (9, 9)


def test_cka_identities():
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(32, 10)) for _ in range(8)]
    turn = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    assert cka(x, x) == pytest.approx(1)
    assert cka(x, [batch @ turn for batch in x]) == pytest.approx(1)
    assert cka(x, [3 * batch for batch in x]) == pytest.approx(1)
    other = [rng.normal(size=(32, 40)) for _ in range(8)]
    assert abs(cka(x, other)) < 0.1  # the usual estimate would say 0.6
    table = cka_table({"a": x, "b": other}, {"a": x})
    np.testing.assert_allclose(table, [[1], [cka(other, x)]], atol=1e-12)
    with pytest.raises(UsageError, match="4 pictures or more, got 3"):
        cka([rng.normal(size=(3, 2))], [rng.normal(size=(3, 2))])


def test_long_tokens_are_found():
    norms = np.ones((2, 10))
    norms[1, 3] = 9
    assert outliers(norms).sum() == 1


def test_filters_are_the_principal_components_of_the_kernels():
    model = tiny()
    with torch.no_grad():  # every kernel a multiple of one pattern
        pattern = torch.randn(1, 1, 4, 4)
        model.patch_embed.proj.weight.copy_(pattern * torch.randn(64, 1, 1, 1))
    shown, share = filters(model, 4)
    assert share[0] == pytest.approx(1)
    flat = shown[0].ravel() - shown[0].mean()
    expected = pattern.ravel().numpy() - pattern.mean().item()
    assert abs(np.corrcoef(flat, expected)[0, 1]) == pytest.approx(1)


# Evidence


def test_cells_are_filled_with_the_mean_colour():
    image = torch.arange(16.0).view(1, 4, 4)
    gone = torch.tensor([[1.0, 0, 0, 0]])
    filled = fill(image, gone, (2, 2))
    assert (filled[0, 0, :2, :2] == 7.5).all()
    assert torch.equal(filled[0, 0, 2:], image[0, 2:])
    with pytest.raises(UsageError, match="must divide"):
        fill(image, torch.zeros(1, 9), (3, 3))
    np.testing.assert_allclose(to_cells(np.arange(16.0).reshape(4, 4), (2, 2)), [[2.5, 4.5], [10.5, 12.5]])


class OneCell(torch.nn.Module):
    """Answers by the brightness of one cell alone."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, images, seen=None):
        bright = images[:, 0, 8:12, 12:16].mean(dim=(1, 2)) - images.mean(dim=(1, 2, 3))
        return torch.stack([8 * bright, torch.zeros_like(bright)], dim=1)


def test_a_true_map_has_low_deletion_and_high_insertion():
    model = OneCell(tiny().config)
    image = torch.zeros(1, 28, 28)
    image[0, 8:12, 12:16] = 1
    grid = evidence_grid(model)
    assert grid == (7, 7)
    worth = occlusion(model, image, 0, grid)
    assert np.unravel_index(worth.argmax(), grid) == (2, 3)
    true = faith(model, image, 0, worth, grid)
    false = faith(model, image, 0, -worth, grid)
    assert true.deletion < false.deletion
    assert true.insertion > false.insertion
    curve = patch_drop(model, image, 0, grid, shares=(0.0, 1.0), draws=2)
    assert curve[0].tolist() == pytest.approx([torch.sigmoid(torch.tensor(8 * (1 - 16 / 784))).item()] * 2, abs=1e-4)
    assert curve[1].tolist() == pytest.approx([0.5, 0.5])
