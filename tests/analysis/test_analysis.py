"""Arrays about the inside of models: attention, attribution maps, positions, CKA, filters and evidence."""

import numpy as np
import pytest
import torch

import vitrail
from vitrail.analysis.evidence import evidence_grid, faith, fill_cells, occlusion, patch_drop, to_cells
from vitrail.analysis.heads import entropy, grid_distances, head_input_weights, measure_heads
from vitrail.analysis.layers import cka, cka_table, gram, outliers
from vitrail.analysis.maps import explicit_attention, maps, relevance, rollout
from vitrail.analysis.position_structure import filters, position_table, similarity, structure
from vitrail.analysis.receptive_field import reaches
from vitrail.core.errors import UsageError, VitrailError
from vitrail.lab.exact import redraw


def small_vit(**changes):
    """Return a ViT of 28 px with random weights of standard deviation 0.1."""
    settings = {"resolution": 28, "classes": 10, "channels": 1, **changes}
    return redraw(vitrail.create("ViT-Micro/4", **settings), std=0.1).eval()


def attention_between_patches(config, weights_NN):
    """Return attention of one image and one head in which patches attend to patches only."""
    attention = np.eye(config.tokens)
    attention[config.prefix :, config.prefix :] = weights_NN
    return attention[None, None]


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
def test_attention_distance_equals_value_computed_by_hand(grid, patch, uniform, alone, box, cross, largest):
    model = vitrail.create("ViT-Micro/4", resolution=grid * patch, patch=patch)
    config, layout = model.config, model.layout()
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
        heads = measure_heads(attention_between_patches(config, mask / mask.sum(1, keepdims=True)), layout)
        assert heads.distance[0, 0] == pytest.approx(expected, abs=1e-3)
        assert heads.of_uniform[0, 0] == pytest.approx(expected / uniform, abs=1e-4)
    assert distances.max() == pytest.approx(largest, abs=1e-3)


def test_attention_to_cls_token_is_reported_as_prefix_mass():
    model = small_vit()
    config = model.config
    weights = np.full((1, 1, config.tokens, config.tokens), 0.5 / config.patches)
    weights[..., 0] = 0.5
    heads = measure_heads(weights, model.layout())
    assert heads.prefix_mass[0, 0] == pytest.approx(0.5)
    assert heads.of_uniform[0, 0] == pytest.approx(1)
    assert heads.entropy[0, 0] == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViT-Micro/4", {"attention": "local", "attention_span": 3}),
        ("ViT-Micro/4", {"attention": "strided", "attention_span": 4}),
        ("iGPT-Micro", {"causal": True, "classes": 10}),
    ],
)
def test_uniform_attention_within_mask_has_relative_distance_1(name, changes):
    model = vitrail.create(name, channels=1, **changes)
    layout = model.layout()
    uniform = layout.allowed / layout.allowed.sum(1, keepdims=True)
    tokens = layout.prefix + len(uniform)
    weights = np.zeros((1, 1, tokens, tokens))
    weights[..., layout.prefix :, layout.prefix :] = uniform
    heads = measure_heads(weights, layout)
    assert heads.of_uniform[0, 0] == pytest.approx(1)
    alone = (layout.allowed.sum(1) == 1).mean()  # a patch that may attend to one patch only has entropy 0
    assert heads.entropy[0, 0] == pytest.approx(1 - alone)


def test_entropy_is_1_for_uniform_map_and_0_for_single_position():
    assert entropy(np.ones((7, 7))) == pytest.approx(1)
    assert entropy(np.eye(1, 49)) == pytest.approx(0)
    assert entropy(np.zeros((7, 7))) is None


def test_rollout_rows_sum_to_1_and_single_layer_equals_formula():
    activations = vitrail.look(small_vit(), torch.rand(2, 1, 28, 28))
    flow = rollout([activations.attention[layer] for layer in range(6)])
    np.testing.assert_allclose(flow.sum(-1), 1)
    single_layer = rollout([activations.attention[0]])
    expected = (activations.attention[0].double().mean(1).numpy() + np.eye(50)) / 2
    np.testing.assert_allclose(single_layer, expected, atol=1e-7)
    with pytest.raises(UsageError, match="at least one layer"):
        rollout([])


ATTENTION_MODELS = [
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


def create_with_images(name, changes):
    """Return a model with random weights and two random images."""
    model = redraw(vitrail.create(name, channels=1, classes=10, **changes), std=0.1).eval()
    return model, torch.rand(2, 1, *model.config.resolution)


@pytest.mark.parametrize(("name", "changes"), ATTENTION_MODELS)
def test_explicit_attention_equals_fused_kernel(name, changes):
    model, images = create_with_images(name, changes)
    activations = vitrail.look(model, images)
    assert torch.equal(activations.logits, model(images))
    with torch.no_grad(), explicit_attention(model) as attentions:
        torch.testing.assert_close(model(images), activations.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(attentions[1], activations.attention[1], rtol=0, atol=1e-6)
    if activations.pooling is not None:
        torch.testing.assert_close(attentions[-1], activations.pooling, rtol=0, atol=1e-6)
    elif model.layout().reads == "[CLS]":
        assert attentions[-1].shape[2] == 1  # the last layer computes the query of [CLS] only
    assert not [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize(("name", "changes"), ATTENTION_MODELS)
def test_maps_have_one_value_per_patch_for_every_position_and_pooling(name, changes):
    model, images = create_with_images(name, changes)
    layout = model.layout()
    maps_by_method = maps(model.requires_grad_(False), images)
    assert {method: values.shape for method, values in maps_by_method.items()} == dict.fromkeys(
        ("rollout", "last attention", "relevance"), (2, *layout.grid)
    )
    weights = head_input_weights(vitrail.look(model, images), layout)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
    assert (maps_by_method["relevance"] >= 0).all()
    assert maps_by_method["relevance"].max(axis=(1, 2)).min() > 0
    _, classes = relevance(model, images)
    assert (classes == model(images).argmax(-1).numpy()).all()
    # With zero weights in the head, the gradient and so the relevance is 0.
    torch.nn.init.zeros_(model.head.weight)
    assert not relevance(model, images)[0].any()


def test_relevance_of_one_layer_equals_formula():
    """The map is the row of [CLS] of R = I + E_h[(A * dy/dA)+]."""
    model = small_vit(depth=1)
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
    patch_relevance, _ = relevance(model, image, torch.tensor([7]))
    np.testing.assert_allclose(patch_relevance.ravel(), expected.numpy(), atol=1e-6)


def test_maps_reject_model_without_attention_or_classes():
    model = vitrail.create("ResNet-Nano")
    with pytest.raises(UsageError, match="with attention, got family resnet"):
        maps(model, torch.rand(1, 1, 28, 28))
    pixels = vitrail.create("iGPT-Micro", causal=True, output="pixels", classes=16)
    with pytest.raises(UsageError, match="predicts pixels"):
        relevance(pixels, torch.rand(1, 1, 14, 14))


def test_position_structure_of_sincos_and_random_tables():
    for grid, null, raster in ((14, 0.133, 0.626), (8, 0.222, 0.671), (7, 0.250, 0.690), (4, 0.400, 0.741)):
        structures = {}
        for position in ("sincos-2d", "sincos-1d"):
            model = vitrail.create("ViT-Ti/16", resolution=grid * 16, position=position, depth=1)
            structures[position] = structure(position_table(model), model.config.grid)
        assert structures["sincos-2d"].additive == pytest.approx(1, abs=1e-6)
        assert structures["sincos-1d"].additive == pytest.approx(raster, abs=2e-3)
        assert structures["sincos-2d"].additive_by_chance == pytest.approx(null, abs=1e-3)
    rng = np.random.default_rng(0)
    draws = [structure(rng.normal(size=(196, 192)), (14, 14)) for _ in range(3)]
    assert np.mean([draw.additive for draw in draws]) == pytest.approx(0.133, abs=0.01)
    assert max(max(draw.row, draw.column) for draw in draws) < 0.2
    model = vitrail.create("ViT-Ti/16", position="sincos-2d", depth=1)
    sincos_2d = structure(position_table(model), (14, 14))
    assert min(sincos_2d.row, sincos_2d.column) > 0.99
    model = vitrail.create("ViT-Ti/16", position="sincos-1d", depth=1)
    sincos_1d = structure(position_table(model), (14, 14))
    assert sincos_1d.row > 0.98
    assert sincos_1d.column < 0.8  # the table encodes the raster index, not the column
    assert similarity(rng.normal(size=(9, 5))).shape == (9, 9)


def test_cka_ignores_rotation_and_scale_and_is_0_for_unrelated_features():
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(32, 10)) for _ in range(8)]
    rotation = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    assert cka(x, x) == pytest.approx(1)
    assert cka(x, [batch @ rotation for batch in x]) == pytest.approx(1)
    assert cka(x, [3 * batch for batch in x]) == pytest.approx(1)
    other = [rng.normal(size=(32, 40)) for _ in range(8)]
    assert abs(cka(x, other)) < 0.1  # the biased estimator gives 0.6
    grams, other_grams = list(map(gram, x)), list(map(gram, other))
    table = cka_table({"a": grams, "b": other_grams}, {"a": grams})
    np.testing.assert_allclose(table, [[1], [cka(other, x)]], atol=1e-12)
    with pytest.raises(UsageError, match="4 images or more, got 3"):
        cka([rng.normal(size=(3, 2))], [rng.normal(size=(3, 2))])


def test_token_with_nine_times_the_norm_is_outlier():
    norms = np.ones((2, 10))
    norms[1, 3] = 9
    assert outliers(norms).sum() == 1


def test_filters_are_the_principal_components_of_the_kernels():
    model = small_vit()
    with torch.no_grad():  # every kernel is a multiple of the same pattern
        pattern = torch.randn(1, 1, 4, 4)
        model.patch_embed.proj.weight.copy_(pattern * torch.randn(64, 1, 1, 1))
    components, share = filters(model, 4)
    assert share[0] == pytest.approx(1)
    flat = components[0].ravel() - components[0].mean()
    expected = pattern.ravel().numpy() - pattern.mean().item()
    assert abs(np.corrcoef(flat, expected)[0, 1]) == pytest.approx(1)


# Evidence


def test_removed_cells_have_mean_colour():
    image = torch.arange(16.0).view(1, 4, 4)
    removed = torch.tensor([[1.0, 0, 0, 0]])
    filled = fill_cells(image, removed, (2, 2))
    assert (filled[0, 0, :2, :2] == 7.5).all()
    assert torch.equal(filled[0, 0, 2:], image[0, 2:])
    uneven = fill_cells(image, torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0, 0]]), (3, 3))
    assert (uneven[0, 0] == 7.5).sum() == 4  # two rows and columns of four
    with pytest.raises(UsageError, match="must be within"):
        fill_cells(image, torch.zeros(1, 25), (5, 5))
    np.testing.assert_allclose(to_cells(np.arange(16.0).reshape(4, 4), (2, 2)), [[2.5, 4.5], [10.5, 12.5]])


class CellModel(torch.nn.Module):
    """Model whose first logit depends only on the brightness of one cell relative to the image."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, images, activations=None):
        bright = images[:, 0, 8:12, 12:16].mean(dim=(1, 2)) - images.mean(dim=(1, 2, 3))
        return torch.stack([8 * bright, torch.zeros_like(bright)], dim=1)


def test_correct_map_has_low_deletion_and_high_insertion():
    model = CellModel(small_vit().config)
    image = torch.zeros(1, 28, 28)
    image[0, 8:12, 12:16] = 1
    grid = evidence_grid(model)
    assert grid == (7, 7)
    occlusion_map = occlusion(model, image, 0, grid)
    assert np.unravel_index(occlusion_map.argmax(), grid) == (2, 3)
    correct = faith(model, image, 0, occlusion_map, grid)
    reversed_order = faith(model, image, 0, -occlusion_map, grid)
    # Filled cells have the mean brightness, 16 / 784. The logit is 8 times the cell's brightness minus the image's.
    counts, mean = np.round(np.linspace(0, 49, 21)), 16 / 784
    deleted = np.where(counts == 0, 1 - mean, mean * (1 - counts / 49))
    inserted = np.where(counts == 0, 0, 1 - (1 + mean * (49 - counts)) / 49)
    for score, brightness in ((correct.deletion, deleted), (correct.insertion, inserted)):
        curve = 1 / (1 + np.exp(-8 * brightness))
        assert score == pytest.approx((np.diff(counts) / 49 * (curve[1:] + curve[:-1]) / 2).sum(), abs=1e-5)
    assert correct.deletion < reversed_order.deletion
    assert correct.insertion > reversed_order.insertion
    curve = patch_drop(model, image, 0, grid, shares=(0.0, 1.0), draws=2)
    assert curve[0].tolist() == pytest.approx([torch.sigmoid(torch.tensor(8 * (1 - 16 / 784))).item()] * 2, abs=1e-4)
    assert curve[1].tolist() == pytest.approx([0.5, 0.5])


def test_evidence_grid_is_patches_or_at_most_24_cells_per_side():
    for name, resolution, grid in (
        ("ViT-Ti/16", 224, (14, 14)),
        ("ViT-Ti/16", 384, (24, 24)),
        ("ViT-Ti/16", 512, (11, 11)),
        ("ResNet-Nano", 37, (10, 10)),
        ("MLP-Nano", 28, (14, 14)),
    ):
        with torch.device("meta"):
            assert evidence_grid(vitrail.create(name, resolution=resolution)) == grid


def test_receptive_field_of_a_constant_model_is_empty_and_gradients_must_be_finite():
    model = redraw(vitrail.create("ViT-Pico/2", classes=3))
    with pytest.raises(VitrailError, match="Gradients of a model must be finite, got NaN or infinity"):
        reaches(model, torch.full((1, 1, 8, 8), torch.nan), [0])
    with torch.no_grad():
        model.patch_embed.proj.weight.zero_()
    field = reaches(model, torch.rand(1, 1, 8, 8), [0])[0]
    assert not field.influence.any()
    assert 0 <= field.areas((0.9,))[0.9] <= 1
