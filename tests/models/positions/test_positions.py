"""Position embeddings: properties of sinusoids, geometry, and resizing by the rules of four libraries."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.peers import import_peer
from vitrail.models.families.vit.attention_mask import attention_mask
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.positions import POSITIONS
from vitrail.models.positions.grid import resize_grid, sinusoids
from vitrail.models.positions.sincos_2d import SinCos2D

grids = st.tuples(st.integers(1, 9), st.integers(1, 9))
widths = st.integers(1, 24).map(lambda n: 8 * n)


def small(**changes):
    return ViTConfig(resolution=(16, 24), patch=(4, 4), width=16, heads=2, mlp=16, depth=2, **changes)


@given(width=widths, length=st.integers(2, 300))
def test_sinusoids_are_bounded_unique_and_independent_of_length(width, length):
    table = sinusoids(torch.arange(length), width)
    assert table.abs().max() <= 1
    distances = torch.cdist(table, table) + 10 * torch.eye(length, dtype=torch.float64)
    assert distances.min() > 1e-3
    assert torch.equal(sinusoids(torch.arange(length + 50), width)[:length], table)


@given(width=widths, start=st.integers(0, 500), other_start=st.integers(0, 500), offset=st.integers(0, 500))
def test_sinusoids_at_equal_offsets_have_equal_distances(width, start, other_start, offset):
    table = sinusoids(torch.tensor([start, start + offset, other_start, other_start + offset]), width)
    distance, other_distance = (table[1] - table[0]).norm(), (table[3] - table[2]).norm()
    assert math.isclose(distance, other_distance, abs_tol=1e-9)


@given(grid=grids, width=widths)
def test_two_dimensional_sinusoids_concatenate_row_and_column(grid, width):
    config = ViTConfig(resolution=grid, patch=(1, 1), width=width, heads=1, position="sincos-2d")
    table = SinCos2D(config).grid_table().unflatten(0, grid)
    assert torch.equal(table[..., : width // 2], table[:, :1, : width // 2].expand(-1, grid[1], -1))
    assert torch.equal(table[..., width // 2 :], table[:1, :, width // 2 :].expand(grid[0], -1, -1))
    assert torch.equal(table[:, 0, : width // 2], sinusoids(torch.arange(grid[0]), width // 2))


def test_relative_index_depends_only_on_the_offset():
    config = small(position="relative")
    index = config.position_embedding.tables()["relative"][1:, 1:].reshape(4, 6, 4, 6)
    assert index[0, 0, 1, 2] == index[2, 3, 3, 5]
    assert index[0, 0, 1, 2] != index[1, 2, 0, 0]
    assert index.unique().numel() == 7 * 11
    index_TT = config.position_embedding.tables()["relative"]
    assert index_TT.max() == config.position_embedding.offsets - 1
    assert index_TT[0, 1:].unique().numel() == index_TT[1:, 0].unique().numel() == 1
    assert len({index_TT[0, 0].item(), index_TT[0, 1].item(), index_TT[1, 0].item()}) == 3
    wrapped = (
        small(position="relative", wrap=True, pool="gap").position_embedding.tables()["relative"].reshape(4, 6, 4, 6)
    )
    assert wrapped[0, 0, 0, 5] == wrapped[2, 1, 2, 0]
    assert wrapped.unique().numel() == 24


def test_rope_angles_are_proportional_to_positions_and_zero_for_prefix_tokens():
    config = small(position="rope-2d", registers=2)
    cos, sin = config.position_embedding.tables()["rope"]
    assert torch.equal(cos[:3], torch.ones(3, 4, dtype=torch.float64))
    assert torch.equal(sin[:3], torch.zeros(3, 4, dtype=torch.float64))
    angles = torch.atan2(sin, cos)[3:].unflatten(0, (4, 6))
    torch.testing.assert_close(angles[1, :, 0], torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(angles[:, 1, 2], torch.ones(4, dtype=torch.float64))


def test_attention_masks_match_hand_computed_entries():
    local = attention_mask(small(attention="local"))[1:, 1:].reshape(4, 6, 4, 6)
    assert local[0, 0].sum() == 4
    assert local[2, 3].sum() == 9
    assert local[2, 3, 1:4, 2:5].all()
    strided = attention_mask(small(attention="strided"))[1:, 1:].reshape(4, 6, 4, 6)
    assert strided[1, 2, :, 2].all()
    assert strided[1, 2, 1].all()
    assert not strided[1, 2, 3, 3]
    mask = attention_mask(small(attention="local", registers=1))
    assert mask[:2].all()
    assert mask[:, :2].all()
    assert torch.equal(mask, mask.T)


RULES = ["google", "huggingface", "timm", "torchvision"]


@given(grid=grids, width=st.integers(1, 5), rule=st.sampled_from(RULES))
def test_resize_to_the_same_grid_is_the_identity(grid, width, rule):
    table = torch.randn(*grid, width)
    assert torch.equal(resize_grid(table, grid, rule), table)


@given(old=grids, new=grids, rule=st.sampled_from(RULES))
def test_resize_keeps_a_constant_table_constant(old, new, rule):
    resized = resize_grid(torch.full((*old, 2), 0.75), new, rule)
    torch.testing.assert_close(resized, torch.full((*new, 2), 0.75), rtol=0, atol=1e-5)


SIZES = [((14, 14), (24, 24)), ((14, 14), (32, 32)), ((14, 14), (10, 10)), ((16, 16), (37, 37)), ((14, 14), (7, 28))]


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_google_resize_rule_equals_scipy_zoom(old, new):
    from scipy.ndimage import zoom

    table = torch.randn(*old, 8)
    theirs = zoom(table.numpy(), (new[0] / old[0], new[1] / old[1], 1), order=1)
    np.testing.assert_allclose(resize_grid(table, new, "google"), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("old", "new"), [*SIZES, ((8, 32), (16, 24))])
def test_timm_resize_rule_equals_timm(old, new):
    layers = import_peer("timm.layers")
    table = torch.randn(*old, 8)
    theirs = layers.resample_abs_pos_embed(table.reshape(1, -1, 8), list(new), old_size=list(old), num_prefix_tokens=0)
    torch.testing.assert_close(resize_grid(table, new, "timm").reshape(1, -1, 8), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_huggingface_resize_rule_equals_transformers(old, new):
    vit = import_peer("transformers.models.vit.modeling_vit")
    transformers = import_peer("transformers")
    config = transformers.ViTConfig(
        hidden_size=8,
        num_attention_heads=1,
        num_hidden_layers=1,
        intermediate_size=8,
        patch_size=16,
        image_size=(old[0] * 16, old[1] * 16),
    )
    embeddings = vit.ViTEmbeddings(config)
    table = torch.randn(*old, 8)
    with torch.no_grad():
        embeddings.position_embeddings[0, 1:] = table.reshape(-1, 8)
        tokens = torch.empty(1, new[0] * new[1] + 1, 8)
        theirs = embeddings.interpolate_pos_encoding(tokens, new[0] * 16, new[1] * 16)[:, 1:]
    torch.testing.assert_close(resize_grid(table, new, "huggingface").reshape(1, -1, 8), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), [size for size in SIZES if size[1][0] == size[1][1]])
def test_torchvision_resize_rule_equals_torchvision(old, new):
    vit = import_peer("torchvision.models.vision_transformer")
    table = torch.randn(*old, 8)
    state = {"encoder.pos_embedding": torch.cat([torch.zeros(1, 8), table.reshape(-1, 8)])[None]}
    theirs = vit.interpolate_embeddings(new[0] * 16, 16, state)["encoder.pos_embedding"][0, 1:]
    torch.testing.assert_close(resize_grid(table, new, "torchvision").reshape(-1, 8), theirs, rtol=0, atol=1e-6)


def test_resize_rules_give_different_tables():
    table = torch.randn(14, 14, 8)
    results = [resize_grid(table, (24, 24), rule) for rule in RULES]
    for table, other_table in itertools.combinations(results, 2):
        assert (table - other_table).pow(2).mean().sqrt() > 0.02


def test_rules_and_counts_of_every_position_need_no_torch():
    code = """
import sys
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.positions import POSITIONS
for name in POSITIONS:
    config = ViTConfig(position=name)
    print(name, config.parameters, config.macs, len(config.tables))
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert [line.split()[0] for line in process.stdout.splitlines()] == list(POSITIONS)
