"""Building blocks of Vision Transformers: patches, attention, MLP, norms."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vitrail.lab.exact import redraw
from vitrail.models.layers import (
    MLP,
    Attention,
    PatchEmbed,
    SeparateAttention,
    TokenBatchNorm,
    activate,
    drop_path,
    patchify,
    separate_,
    unpatchify,
)

small = st.integers(1, 5)


@given(batch=small, channels=small, rows=small, columns=small, high=small, wide=small)
def test_patchify_round_trip(batch, channels, rows, columns, high, wide):
    images = torch.randn(batch, channels, rows * high, columns * wide)
    patches = patchify(images, (high, wide))
    assert patches.shape == (batch, rows * columns, channels * high * wide)
    assert torch.equal(unpatchify(patches, (rows, columns), (high, wide)), images)
    # Raster order: the second patch is the one to the right of the first, or below it in a grid of one column.
    second = images[0, :, :high, wide : 2 * wide] if columns > 1 else images[0, :, high : 2 * high, :wide]
    if rows * columns > 1:
        assert torch.equal(patches[0, 1], second.flatten())


@given(
    channels=st.integers(1, 5),
    patch=st.tuples(small, small),
    stride=st.tuples(small, small),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    grid=st.tuples(small, small),
)
def test_patch_embedding_equals_the_strided_convolution(channels, patch, stride, padding, grid):
    sides = zip(grid, patch, stride, padding, strict=True)
    height, width = (max((n - 1) * s + p - 2 * pad, 1) for n, p, s, pad in sides)
    if height + 2 * padding[0] < patch[0] or width + 2 * padding[1] < patch[1]:
        return
    embed = PatchEmbed(channels=channels, width=6, patch=patch, stride=stride, padding=padding).double()
    images = torch.randn(2, channels, height, width, dtype=torch.float64)
    convolved = embed.proj(images).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embed(images), convolved, rtol=0, atol=1e-12)


def test_plain_patch_embedding_equals_the_convolution_of_checkpoints():
    embed = PatchEmbed(channels=3, width=192, patch=(16, 16), stride=(16, 16), padding=(0, 0))
    images = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(embed(images), embed.proj(images).flatten(2).transpose(1, 2), rtol=0, atol=1e-5)


def test_patch_embedding_and_mlp_commute_with_every_token_permutation():
    """Both process each token separately. Attention does not: a changed token changes all other outputs."""
    order = torch.randperm(16)
    embed = redraw(PatchEmbed(channels=3, width=8, patch=(4, 4), stride=(4, 4), padding=(0, 0)))
    images = torch.randn(2, 3, 16, 16)
    shuffled = unpatchify(patchify(images, (4, 4))[:, order], (4, 4), (4, 4))
    torch.testing.assert_close(embed(shuffled), embed(images)[:, order], rtol=0, atol=1e-5)
    tokens = torch.randn(2, 16, 8)
    mlp = redraw(MLP(width=8, hidden=32, activation="gelu", dropout=0.0))
    torch.testing.assert_close(mlp(tokens[:, order]), mlp(tokens)[:, order], rtol=0, atol=1e-5)
    changed = tokens.clone()
    changed[:, 3] += 1
    other_tokens = [index for index in range(16) if index != 3]
    attention = redraw(Attention(width=8, heads=2, qkv_bias=True))
    assert torch.equal(mlp(changed)[:, other_tokens], mlp(tokens)[:, other_tokens])
    assert (attention(changed) - attention(tokens))[:, other_tokens].abs().max() > 1e-2


@pytest.mark.parametrize("bias", [None, "additive", "mask"])
def test_attention_weights_reproduce_the_fused_kernel(bias):
    attention = redraw(Attention(width=32, heads=4, qkv_bias=True))
    x = torch.randn(2, 11, 32)
    table = {None: None, "additive": torch.randn(4, 11, 11), "mask": torch.rand(11, 11) > 0.3}[bias]
    if bias == "mask":
        table.fill_diagonal_(True)
    weights = attention.weights(x, bias=table)
    values = attention.qkv(x).chunk(3, dim=-1)[2].unflatten(-1, (4, 8)).transpose(1, 2)
    by_hand = attention.proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 11), rtol=0, atol=1e-5)
    torch.testing.assert_close(by_hand, attention(x, bias=table), rtol=0, atol=1e-5)
    torch.testing.assert_close(attention(x, bias=table, queries=3), attention(x, bias=table)[:, :3], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gelu", "gelu-tanh", "relu", "tanh"])
def test_activation_is_the_same_with_and_without_gradient(name):
    x = torch.randn(50)
    reference = {
        "gelu": 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        "gelu-tanh": 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        "relu": x.clamp(min=0),
        "tanh": torch.tanh(x),
    }[name]
    leaf = x.clone().requires_grad_()
    with_gradient = activate(leaf, name, fresh=True)
    torch.testing.assert_close(with_gradient, reference, rtol=0, atol=1e-6)
    assert torch.equal(leaf, x)
    assert torch.equal(activate(x.clone(), name, fresh=True), with_gradient)
    assert torch.equal(activate(unchanged := x.clone(), name, fresh=False), with_gradient)
    assert torch.equal(unchanged, x)


def test_batch_norm_normalises_each_feature_over_images_and_tokens():
    norm = TokenBatchNorm(8)
    x = 3 + 2 * torch.randn(4, 10, 8)
    reference = F.batch_norm(x.transpose(1, 2), None, None, norm.weight, norm.bias, training=True).transpose(1, 2)
    torch.testing.assert_close(norm(x), reference, rtol=0, atol=1e-5)


def test_drop_path_drops_complete_images_and_keeps_the_expectation():
    out = drop_path(torch.ones(4000, 2, 3), 0.25, training=True)
    is_kept = out[:, 0, 0] > 0
    assert torch.equal(out, is_kept[:, None, None] * torch.full((4000, 2, 3), 1 / 0.75))
    assert abs(is_kept.float().mean().item() - 0.75) < 0.03
    assert drop_path(out, 0.25, training=False) is out


@pytest.mark.parametrize("bias", [None, "mask", "numbers"])
@pytest.mark.parametrize("queries", [None, 1])
def test_unfused_attention_in_training_equals_the_fused_kernel(bias, queries):
    attention = Attention(width=24, heads=3, qkv_bias=True).double()
    tokens = torch.randn(4, 9, 24, dtype=torch.float64)
    table = {None: None, "mask": torch.rand(9, 9) < 0.7, "numbers": torch.randn(3, 9, 9, dtype=torch.float64)}[bias]
    if bias == "mask":
        table.fill_diagonal_(True)
    results = []
    for training in (True, False):
        attention.train(training).zero_grad()
        y = attention(tokens, bias=table, queries=queries)
        y.square().sum().backward()
        results.append((y.detach(), attention.qkv.weight.grad.clone()))
    for unfused, fused in zip(*results, strict=True):
        torch.testing.assert_close(unfused, fused, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("queries", [None, 1])
@pytest.mark.parametrize("bias", [None, "mask", "numbers"])
@pytest.mark.parametrize(("qkv_bias", "scale", "rotates"), [(True, None, False), (False, 0.3, True)])
def test_separate_attention_equals_fused_attention(bias, queries, qkv_bias, scale, rotates):
    fused = redraw(Attention(width=24, heads=3, qkv_bias=qkv_bias, scale=scale)).double().eval()
    tokens = torch.randn(4, 9, 24, dtype=torch.float64)
    table = {None: None, "mask": torch.rand(9, 9) < 0.7, "numbers": torch.randn(3, 9, 9, dtype=torch.float64)}[bias]
    if bias == "mask":
        table.fill_diagonal_(True)
    rope = torch.randn(2, 9, 4, dtype=torch.float64) if rotates else None
    separate = SeparateAttention(fused)
    expected = fused(tokens, rope, table, queries)
    torch.testing.assert_close(separate(tokens, rope, table, queries), expected, rtol=1e-10, atol=1e-10)
    cls_attention = fused.weights(tokens)[:, :, 0]
    for attention in (fused, separate):
        torch.testing.assert_close(attention.cls_attention(tokens), cls_attention, rtol=1e-10, atol=1e-10)
    assert separate.v.weight.data_ptr() == fused.qkv.weight[48:].data_ptr()  # no second copy


def test_separate_skips_subclasses_and_modules_with_hooks():
    """A subclass or a hook in the place of a layer is still called."""

    class Normalised(Attention):
        def qkv_heads(self, x_BND, rope, queries=None):
            q, k, v = super().qkv_heads(x_BND, rope, queries)
            return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v

    types = (Attention, Attention, Attention, Normalised)
    blocks = torch.nn.ModuleList(block_type(width=8, heads=2, qkv_bias=True) for block_type in types)
    blocks[0].qkv.register_forward_hook(lambda module, inputs, output: output * 2)
    blocks[1].register_forward_hook(lambda module, inputs, output: output * 2)
    separate_(blocks)
    assert [type(block) for block in blocks] == [Attention, Attention, SeparateAttention, Normalised]
