"""Sparse attention: equal to masked attention in values and gradients, with less work."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vitrail
from vitrail.analysis.maps import relevance
from vitrail.core.errors import UsageError
from vitrail.lab.exact import redraw
from vitrail.models import sparse_attention
from vitrail.models.activations import look
from vitrail.models.families.vit import sparsity
from vitrail.models.families.vit.attention_mask import attention_mask
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.model import ViT
from vitrail.models.families.vit.sparsity import Axis, Residues, Tiles
from vitrail.models.layers import separate_


def sparse_vit(grid=(12, 13), dtype=torch.float64, **changes):
    """Return a model with patches of one pixel and random weights, in evaluation mode."""
    config = ViTConfig(
        resolution=grid, patch=1, channels=1, width=16, heads=2, mlp=16, depth=2, classes=3, attention="local"
    )
    return redraw(ViT(config.replace(**changes)).to(dtype), std=0.4)


@pytest.fixture
def always_sparse(monkeypatch):
    """Choose parts even for short sequences, for which a mask is faster."""
    monkeypatch.setattr(sparsity, "_DENSE_TOKENS", 0)
    monkeypatch.setattr(sparsity, "_DENSE_SHARE", 1e9)
    sparsity.local_parts.cache_clear()
    sparsity.strided_parts.cache_clear()
    yield
    sparsity.local_parts.cache_clear()
    sparsity.strided_parts.cache_clear()


def masked(model):
    """Return a copy of a model that masks all scores, as all earlier versions did."""
    copy = ViT(model.config).to(next(model.parameters()).dtype)
    copy.load_state_dict(model.state_dict())
    mask = attention_mask(model.config)

    def attention_terms(layer):
        bias_HTT = copy.position.bias(copy, layer)
        return copy.position.rotation(copy), mask if bias_HTT is None else bias_HTT.masked_fill(~mask, -torch.inf)

    copy.attention_terms = attention_terms
    return copy.eval()


def run(model, images):
    """Return logits and the gradients of all parameters."""
    model.zero_grad()
    logits = model(images)
    logits.square().sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal_to_masked(model, tolerance, count=2):
    images = torch.randn(count, 1, *model.config.resolution, dtype=next(model.parameters()).dtype)
    (logits, gradients), (masked_logits, masked_gradients) = run(model, images), run(masked(model), images)
    assert (logits - masked_logits).abs().max() <= tolerance * masked_logits.abs().max()
    largest = max(gradient.abs().max() for gradient in masked_gradients.values())
    for name, gradient in gradients.items():
        assert (gradient - masked_gradients[name]).abs().max() <= tolerance * largest, name


@pytest.mark.usefixtures("always_sparse")
@settings(max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(3, 19),
    columns=st.integers(3, 19),
    attention=st.sampled_from(["local", "strided"]),
    span=st.integers(1, 6),
    heads=st.sampled_from([1, 2, 4]),
    pool=st.sampled_from(["cls", "gap", "map"]),
    registers=st.integers(0, 3),
    position=st.sampled_from(["learned-1d", "relative", "rope-2d"]),
    wrap=st.booleans(),
)
def test_sparse_attention_equals_masked_attention(
    rows, columns, attention, span, heads, pool, registers, position, wrap
):
    model = sparse_vit(
        (rows, columns),
        attention=attention,
        attention_span=span,
        heads=heads,
        pool=pool,
        registers=registers,
        position=position,
        wrap=wrap and attention == "local" and position != "learned-1d",
    )
    assert model.config.sparse_parts or 2 * span > rows * columns
    assert_equal_to_masked(model, 1e-12)


@pytest.mark.parametrize("attention", ["local", "strided"])
@pytest.mark.parametrize("changes", [{"attention_span": 3}, {"registers": 4, "pool": "gap"}, {"position": "relative"}])
def test_sparse_attention_equals_masked_attention_in_float32(attention, changes):
    model = sparse_vit((32, 32), torch.float32, attention=attention, **changes)
    assert model.config.sparse_parts
    assert_equal_to_masked(model, 1e-6 if changes.get("position") != "relative" else 1e-5)


@pytest.mark.usefixtures("always_sparse")
@pytest.mark.parametrize("attention", ["local", "strided"])
@pytest.mark.parametrize("numbers", [1, 5_000, 50_000])
def test_chunks_of_images_and_groups_do_not_change_the_result(attention, numbers, monkeypatch):
    monkeypatch.setattr(sparse_attention, "_CACHED_NUMBERS", numbers)
    assert_equal_to_masked(sparse_vit(attention=attention), 1e-12, count=5)


@pytest.mark.usefixtures("always_sparse")
@pytest.mark.parametrize("span", [1, 2, 77, 78, 79, 1000])
def test_strides_up_to_the_number_of_patches_have_equal_results(span):
    """A remainder with a single patch would have no keys: strides above 78 are masked."""
    assert_equal_to_masked(sparse_vit(attention="strided", attention_span=span), 1e-12)


def test_a_trained_model_under_autocast_stays_close_to_full_precision():
    model = sparse_vit((16, 16), torch.float32, attention_span=2, position="rope-2d")
    images = torch.randn(2, 1, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
        logits.float().sum().backward()
    assert (logits - model(images)).abs().max() < 0.05 * model(images).abs().max()
    assert model.to(torch.bfloat16)(images.bfloat16()).isfinite().all()


@pytest.mark.usefixtures("always_sparse")
@pytest.mark.parametrize("attention", ["local", "strided"])
def test_graphs_for_export_have_equal_logits(attention):
    model = sparse_vit(dtype=torch.float32, attention=attention, position="relative", registers=1)
    images = torch.randn(3, 1, 12, 13)
    logits = model(images)
    batch = {"images_BCHW": {0: torch.export.Dim("batch", min=1, max=64)}}
    exported = torch.export.export(model, (images[:2],), dynamic_shapes=batch, strict=True)
    torch.testing.assert_close(exported.module()(images), logits, rtol=1e-5, atol=1e-5)
    separate_(model)
    torch.testing.assert_close(model(images), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("always_sparse")
@pytest.mark.parametrize("attention", ["local", "strided"])
def test_compile_makes_one_graph_with_equal_gradients(attention):
    model = sparse_vit(attention=attention, depth=1)
    images = torch.randn(2, 1, 12, 13, dtype=torch.float64)
    logits, gradients = run(model, images)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        model.zero_grad()
        output = compiled(images)
        output.square().sum().backward()
    torch.testing.assert_close(output, logits)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


@pytest.mark.usefixtures("always_sparse")
@pytest.mark.parametrize("attention", ["local", "strided"])
@pytest.mark.parametrize("position", ["none", "relative"])
@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_recording_and_relevance_of_sparse_attention_equal_those_of_masked_attention(attention, position, pool):
    model = sparse_vit((7, 9), attention=attention, attention_span=4, position=position, pool=pool)
    expected, images = masked(model), torch.randn(2, 1, 7, 9, dtype=torch.float64)
    steps, masked_steps = (look(each, images, inside=None) for each in (model, expected))
    for layer, weights in masked_steps.attention.items():
        torch.testing.assert_close(steps.attention[layer], weights)
    for name, step in masked_steps.steps.items():
        torch.testing.assert_close(steps.steps[name], step)
    np.testing.assert_allclose(relevance(model, images)[0], relevance(expected, images)[0], atol=1e-6)


def test_look_records_the_complete_attention_of_sparse_layers():
    model = sparse_vit((12, 12), attention_span=2, registers=1)
    images = torch.randn(2, 1, 12, 12, dtype=torch.float64)
    activations = look(model, images, [-1], inside=[0])
    assert torch.equal(activations.logits, model(images))
    weights = activations.attention[1]
    assert weights.shape == (2, 2, 146, 146)
    assert torch.equal(weights[0, 0] > 0, attention_mask(model.config))
    expected = masked(model)
    torch.testing.assert_close(weights, look(expected, images, [-1]).attention[1])
    torch.testing.assert_close(
        activations.steps["blocks.0.msa"], look(expected, images, inside=[0]).steps["blocks.0.msa"]
    )
    assert model.layout().allowed.sum() == 54**2  # on each axis: 12 x 5 pairs, less 2 x (2 + 1) beyond the edges


def test_resized_models_have_the_parts_of_their_grid():
    model = sparse_vit((12, 12), attention_span=2)
    small, large = model.resize((5, 6)), model.resize((21, 14))
    assert not small.config.sparse_parts
    for resized in (small, large):
        assert_equal_to_masked(resized, 1e-12)
    back = large.resize((12, 12))
    assert [name for name, _ in back.named_buffers()] == [name for name, _ in model.named_buffers()]


def test_short_sequences_and_wide_windows_are_masked():
    for grid, span in (((7, 7), 1), ((14, 14), 7), ((32, 32), 20)):
        config = sparse_vit(grid, attention_span=span).config
        assert not config.sparse_parts
        assert config.tables["mask"].shape == (config.tokens, config.tokens)
        assert config.macs == config.replace(attention="global", attention_span=None).macs


def test_macs_and_tables_grow_with_the_tokens_and_not_with_their_square():
    base = ViTConfig(resolution=512, attention="local", attention_span=3, pool="gap", classes=0)
    sizes = [base.replace(resolution=side) for side in (512, 2048)]  # 1,024 and 16,384 tokens
    small, large = ((config.macs, sum(table.size for table in config.tables.values() if table)) for config in sizes)
    assert large[0] < 16.1 * small[0]
    assert large[1] < 20 * small[1]
    dense = sizes[0].replace(attention="global", attention_span=None)
    linear = dense.macs - 12 * 2 * 1024**2 * 768
    assert (small[0] - linear) * 10 < dense.macs - linear


@given(side=st.integers(1, 40), radius=st.integers(0, 12), block=st.integers(1, 40), wraps=st.booleans())
def test_every_window_contains_the_neighbours_of_its_queries_once(side, radius, block, wraps):
    axis = Axis(side, radius, min(block, side), wraps)
    for start in axis.starts:
        keys = [(axis.first_key(start) + offset) % side for offset in range(axis.window)]
        assert len(set(keys)) == len(keys)
        for query, offset in itertools.product(range(start, min(start + axis.block, side)), range(-radius, radius + 1)):
            neighbour = query + offset
            if wraps or 0 <= neighbour < side:
                assert neighbour % side in keys


def test_strided_attention_has_neighbours_and_residues():
    config = ViTConfig(resolution=512, attention="strided", pool="gap")
    neighbours, residues = config.sparse_parts
    assert isinstance(neighbours, Tiles)
    assert neighbours.columns.radius == 31
    assert residues == Residues(1024, 32)


@pytest.mark.parametrize("changes", [{"merge": 4}, {"token_drop": 0.5}])
def test_sparse_attention_rejects_settings_that_remove_tokens(changes):
    with pytest.raises(UsageError, match="attention is global"):
        vitrail.create("ViT-Ti/16", resolution=512, attention="local", **changes)
