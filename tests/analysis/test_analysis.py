"""Looking inside, in numbers: exact values where there are some."""

import numpy as np
import pytest
import torch

import vitrail
from vitrail.analysis.evidence import evidence_grid, faith, fill, occlusion, patch_drop, to_cells
from vitrail.analysis.heads import entropy, grid_distances, measure_heads, reading
from vitrail.analysis.layers import cka, cka_table, gram, outliers
from vitrail.analysis.maps import attention_written_out, maps, relevance, rollout
from vitrail.analysis.position_structure import filters, position_table, similarity, structure
from vitrail.core.errors import UsageError
from vitrail.lab.exact import redraw


def tiny(**changes):
    settings = {"resolution": 28, "classes": 10, "channels": 1, **changes}
    return redraw(vitrail.create("ViT-Micro/4", **settings), std=0.1).eval()


def attention_of(config, weights_NN):
    """Attention of one image and one head that [CLS] takes no part in."""
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
    config, where = model.config, model.layout()
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
    found = measure_heads(weights, model.layout())
    assert found.prefix_mass[0, 0] == pytest.approx(0.5)
    assert found.of_uniform[0, 0] == pytest.approx(1)
    assert found.entropy[0, 0] == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViT-Micro/4", {"attention": "local", "attention_span": 3}),
        ("ViT-Micro/4", {"attention": "strided", "attention_span": 4}),
        ("iGPT-Micro", {"causal": True, "classes": 10}),
    ],
)
def test_uniform_attention_within_a_mask_is_uniform(name, changes):
    model = vitrail.create(name, channels=1, **changes)
    where = model.layout()
    uniform = where.allowed / where.allowed.sum(1, keepdims=True)
    tokens = where.prefix + len(uniform)
    weights = np.zeros((1, 1, tokens, tokens))
    weights[..., where.prefix :, where.prefix :] = uniform
    found = measure_heads(weights, where)
    assert found.of_uniform[0, 0] == pytest.approx(1)
    alone = (where.allowed.sum(1) == 1).mean()  # who may look at one place only, looks at one place
    assert found.entropy[0, 0] == pytest.approx(1 - alone)


def test_entropy_says_how_flat_a_map_is():
    assert entropy(np.ones((7, 7))) == pytest.approx(1)
    assert entropy(np.eye(1, 49)) == pytest.approx(0)
    assert entropy(np.zeros((7, 7))) is None


def test_rollout_rows_sum_to_one_and_one_layer_is_known():
    activations = vitrail.look(tiny(), torch.rand(2, 1, 28, 28))
    flow = rollout([activations.attention[layer] for layer in range(6)])
    np.testing.assert_allclose(flow.sum(-1), 1)
    one = rollout([activations.attention[0]])
    np.testing.assert_allclose(one, (activations.attention[0].double().mean(1).numpy() + np.eye(50)) / 2, atol=1e-7)
    with pytest.raises(UsageError, match="at least one layer"):
        rollout([])


KINDS = [
    ("ViT-Micro/4", {}),
    ("ViT-Micro/4", {"position": "rope-2d", "pool": "gap"}),
    ("ViT-Micro/4", {"position": "relative", "registers": 2}),
    ("ViT-Micro/4", {"attention": "local", "attention_span": 3, "pool": "gap"}),
    ("ViT-Micro/4", {"pool": "map", "registers": 1}),
    ("ViT-Micro/4", {"norm_order": "post", "layer_scale": 0.5}),
    ("ViT-Micro/4", {"residual": False, "attention_scale": 1}),
    ("Hybrid-Nano", {}),
    ("iGPT-Micro", {"causal": True}),
]


def kind(name, changes):
    model = redraw(vitrail.create(name, channels=1, classes=10, **changes), std=0.1).eval()
    return model, torch.rand(2, 1, *model.config.resolution)


@pytest.mark.parametrize(("name", "changes"), KINDS)
def test_attention_beside_the_fused_kernel_reproduces_its_output(name, changes):
    model, images = kind(name, changes)
    activations = vitrail.look(model, images)
    assert torch.equal(activations.logits, model(images))
    with torch.no_grad(), attention_written_out(model) as kept:
        torch.testing.assert_close(model(images), activations.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(kept[1], activations.attention[1], rtol=0, atol=1e-6)
    if activations.pooling is not None:
        torch.testing.assert_close(kept[-1], activations.pooling, rtol=0, atol=1e-6)
    elif model.layout().reads == "[CLS]":
        assert kept[-1].shape[2] == 1  # only [CLS] asks in the last layer
    assert not [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize(("name", "changes"), KINDS)
def test_maps_of_every_kind(name, changes):
    model, images = kind(name, changes)
    where = model.layout()
    found = maps(model.requires_grad_(False), images)
    assert {method: values.shape for method, values in found.items()} == dict.fromkeys(
        ("rollout", "last attention", "relevance"), (2, *where.grid)
    )
    shares = reading(vitrail.look(model, images), where)
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    assert (found["relevance"] >= 0).all()
    assert found["relevance"].max(axis=(1, 2)).min() > 0
    _, classes = relevance(model, images)
    assert (classes == model(images).argmax(-1).numpy()).all()
    # A head without weights feels nothing: then nothing is relevant.
    torch.nn.init.zeros_(model.head.weight)
    assert not relevance(model, images)[0].any()


def test_relevance_of_one_layer_by_hand():
    """R = I + E_h[(A * dy/dA)+]; of it the row of [CLS]."""
    model = tiny(depth=1)
    image = torch.rand(1, 1, 28, 28)
    block = model.blocks[0]
    with torch.no_grad():
        z_BTD = model.embed(image)
        q, k, v = block.attn.qkv_heads(block.norm1(z_BTD), None)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)[:, :, :1]
    weights.requires_grad_()
    z_B1D = z_BTD[:, :1] + block.attn.proj((weights @ v).transpose(1, 2).flatten(2))
    logits = model.read(z_B1D + block.mlp(block.norm2(z_B1D)))
    (gradient,) = torch.autograd.grad(logits[0, 7], weights)
    expected = (weights * gradient).clamp(min=0).mean(1)[0, 0, 1:].detach()
    found, _ = relevance(model, image, torch.tensor([7]))
    np.testing.assert_allclose(found.ravel(), expected.numpy(), atol=1e-6)


def test_maps_are_refused_where_there_is_no_attention():
    model = vitrail.create("ResNet-Nano")
    with pytest.raises(UsageError, match="with attention, got family resnet"):
        maps(model, torch.rand(1, 1, 28, 28))
    pixels = vitrail.create("iGPT-Micro", causal=True, output="pixels", classes=16)
    with pytest.raises(UsageError, match="predicts pixels"):
        relevance(pixels, torch.rand(1, 1, 14, 14))


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
    ones, others = list(map(gram, x)), list(map(gram, other))
    table = cka_table({"a": ones, "b": others}, {"a": ones})
    np.testing.assert_allclose(table, [[1], [cka(other, x)]], atol=1e-12)
    with pytest.raises(UsageError, match="4 images or more, got 3"):
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
    uneven = fill(image, torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0, 0]]), (3, 3))
    assert (uneven[0, 0] == 7.5).sum() == 4  # two rows and columns of four
    with pytest.raises(UsageError, match="must be within"):
        fill(image, torch.zeros(1, 25), (5, 5))
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
    # Filled cells are as bright as the mean, 16 / 784; the logit is 8 times what the cell is brighter than the image.
    taken, mean = np.round(np.linspace(0, 49, 21)), 16 / 784
    gone = np.where(taken == 0, 1 - mean, mean * (1 - taken / 49))
    back = np.where(taken == 0, 0, 1 - (1 + mean * (49 - taken)) / 49)
    for found, bright in ((true.deletion, gone), (true.insertion, back)):
        curve = 1 / (1 + np.exp(-8 * bright))
        assert found == pytest.approx((np.diff(taken) / 49 * (curve[1:] + curve[:-1]) / 2).sum(), abs=1e-5)
    assert true.deletion < false.deletion
    assert true.insertion > false.insertion
    curve = patch_drop(model, image, 0, grid, shares=(0.0, 1.0), draws=2)
    assert curve[0].tolist() == pytest.approx([torch.sigmoid(torch.tensor(8 * (1 - 16 / 784))).item()] * 2, abs=1e-4)
    assert curve[1].tolist() == pytest.approx([0.5, 0.5])


def test_cells_of_every_family():
    for name, resolution, grid in (
        ("ViT-Ti/16", 224, (14, 14)),
        ("ViT-Ti/16", 384, (24, 24)),
        ("ViT-Ti/16", 512, (11, 11)),
        ("ResNet-Nano", 37, (10, 10)),
        ("MLP-Nano", 28, (14, 14)),
    ):
        with torch.device("meta"):
            assert evidence_grid(vitrail.create(name, resolution=resolution)) == grid
