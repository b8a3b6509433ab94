"""Attention that computes only the scores of the groups of a sparse pattern, instead of masking all scores.

Shapes: B images, T tokens (first the prefix: [CLS] and registers), N patches, H heads, K head width, Q queries and M
keys of a group, G groups.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class PatternPart(NamedTuple):
    """Groups of queries with common keys."""

    queries_GQ: Tensor
    """Patches of each group, from 0. The last ones may be repeated."""
    keys_GM: Tensor
    """Tokens to which the queries of each group attend."""
    order_N: Tensor
    """For each patch, its index in `queries_GQ`."""
    bias_GHQM: Tensor
    """What is added to the scores: -inf for masked pairs. One head stands for all."""


class SparsePattern(NamedTuple):
    """The pairs of tokens that attend to each other. Prefix tokens attend to all tokens, and all tokens to them."""

    prefix: int
    parts: tuple[PatternPart, ...]
    """The softmax of a patch is over its keys in all parts, in which no key occurs twice."""
    prefix_bias_HPT: Tensor | None
    """Bias of the scores of prefix tokens."""


def attend(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, pattern: SparsePattern, scale: float | None, *, fused: bool = True
) -> Tensor:
    """Return eq. 7 for all tokens (B, H, T, K), or for prefix tokens if there are no other queries. `fused` allows
    torch's fused kernel."""
    prefix = pattern.prefix
    scale = q_BHTK.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    if prefix:
        q_BHPK, bias_HPT = q_BHTK[:, :, :prefix], pattern.prefix_bias_HPT
        if bias_HPT is not None:
            bias_HPT = bias_HPT[:, : q_BHPK.shape[2]]
        outputs.append(_attend_all(q_BHPK, k_BHTK, v_BHTK, bias_HPT, scale, fused))
    if q_BHTK.shape[2] > prefix:
        q_BHNK = q_BHTK[:, :, prefix:]
        several = len(pattern.parts) > 1
        outputs.append(
            _attend_parts(q_BHNK, k_BHTK, v_BHTK, pattern.parts, scale)
            if several
            else _attend_groups(q_BHNK, k_BHTK, v_BHTK, pattern.parts[0], scale, fused)
        )
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def _attend_all(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, fused: bool) -> Tensor:
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return _scores(q, k, bias, scale).softmax(-1) @ v


def _attend_groups(
    q_BHNK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, part: PatternPart, scale: float, fused: bool
) -> Tensor:
    """Return the output of patches (B, H, N, K) whose keys are all in one part."""
    bias_GHQM = part.bias_GHQM
    is_plain_cpu = q_BHNK.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if fused and is_plain_cpu and not torch.compiler.is_compiling() and not bias_GHQM.requires_grad:
        return _CachedGroups.apply(q_BHNK, k_BHTK, v_BHTK, *part, scale)
    q_BGHQK, k_BGHMK, v_BGHMK = (
        _group(x, index) for x, index in ((q_BHNK, part.queries_GQ), (k_BHTK, part.keys_GM), (v_BHTK, part.keys_GM))
    )
    if not fused:
        return _ungroup(_attend_all(q_BGHQK, k_BGHMK, v_BGHMK, bias_GHQM, scale, fused), part.order_N)
    bias = bias_GHQM.expand(q_BHNK.shape[0], -1, -1, -1, -1).flatten(0, 1)  # the kernel has four dimensions
    y = _attend_all(*(x.flatten(0, 1) for x in (q_BGHQK, k_BGHMK, v_BGHMK)), bias, scale, fused)
    return _ungroup(y.unflatten(0, q_BGHQK.shape[:2]), part.order_N)


_CACHED_NUMBERS = 300_000  # keys of the groups that are computed together: with their values, they fit into the cache


class _CachedGroups(torch.autograd.Function):
    """torch's fused CPU kernel on a few groups at a time, so that copies of keys and values stay in the cache.

    Copying them for all groups at once takes up to twice as long and several times the memory. The backward pass copies
    them again and adds their gradients in place. The two operators are those behind `scaled_dot_product_attention`,
    which does not return the logarithm of the sums that the backward pass needs.
    """

    @staticmethod
    def forward(
        context: Any,
        q_BHNK: Tensor,
        k_BHTK: Tensor,
        v_BHTK: Tensor,
        queries_GQ: Tensor,
        keys_GM: Tensor,
        order_N: Tensor,
        bias_GHQM: Tensor,
        scale: float,
    ) -> Tensor:
        batch, heads, _, narrow = q_BHNK.shape
        y_BGQHK = q_BHNK.new_empty(batch, *queries_GQ.shape, heads, narrow)
        chunks, kernels = list(_chunks(batch, keys_GM, heads * narrow)), []
        for images, groups in chunks:
            q, k, v = (
                _group(x[images], index[groups]).flatten(0, 1)
                for x, index in ((q_BHNK, queries_GQ), (k_BHTK, keys_GM), (v_BHTK, keys_GM))
            )
            y, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, attn_mask=_repeat(bias_GHQM[groups], len(q)), scale=scale
            )
            part = y_BGQHK[images, groups]
            part.copy_(y.transpose(1, 2).view_as(part))
            kernels += [y, log_sums]
        context.save_for_backward(q_BHNK, k_BHTK, v_BHTK, queries_GQ, keys_GM, order_N, bias_GHQM, *kernels)
        context.chunks, context.scale = chunks, scale
        return y_BGQHK.flatten(1, 2).index_select(1, order_N).transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BHNK, k_BHTK, v_BHTK, queries_GQ, keys_GM, order_N, bias_GHQM, *kernels = context.saved_tensors
        (dy_BHNK,) = gradients
        (groups_count, queries), (batch, heads, tokens, narrow) = queries_GQ.shape, k_BHTK.shape
        rows = dy_BHNK.new_zeros(batch, groups_count * queries, heads, narrow)  # zero for repeated queries
        dy_BGHQK = rows.index_copy_(1, order_N, dy_BHNK.transpose(1, 2)).unflatten(1, queries_GQ.shape).transpose(2, 3)
        dq_BGQHK = torch.empty_like(rows).unflatten(1, queries_GQ.shape)
        dk_BTHK, dv_BTHK = (dy_BHNK.new_zeros(batch, tokens, heads, narrow) for _ in range(2))
        for number, (images, groups) in enumerate(context.chunks):
            q, k, v = (
                _group(x[images], index[groups]).flatten(0, 1)
                for x, index in ((q_BHNK, queries_GQ), (k_BHTK, keys_GM), (v_BHTK, keys_GM))
            )
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy_BGHQK[images, groups].flatten(0, 1),
                q,
                k,
                v,
                *kernels[2 * number : 2 * number + 2],
                0.0,
                False,
                attn_mask=_repeat(bias_GHQM[groups], len(q)),
                scale=context.scale,
            )
            part = dq_BGQHK[images, groups]
            part.copy_(dq.transpose(1, 2).view_as(part))
            index = keys_GM[groups].flatten()
            for total_BTHK, gradient in ((dk_BTHK, dk), (dv_BTHK, dv)):
                addend = gradient.transpose(1, 2).reshape(part.shape[0], len(index), heads, narrow)
                total_BTHK[images].index_add_(1, index, addend)
        dq_BHNK = dq_BGQHK.flatten(1, 2).index_select(1, order_N).transpose(1, 2)
        return dq_BHNK, dk_BTHK.transpose(1, 2), dv_BTHK.transpose(1, 2), *(None,) * 5


def _chunks(batch: int, keys_GM: Tensor, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of images and of groups that are computed together."""
    groups, keys = keys_GM.shape
    count = max(_CACHED_NUMBERS // (keys * width), 1)
    images = max(count // groups, 1)
    for image in range(0, batch, images):
        for group in range(0, groups, min(count, groups)):
            yield slice(image, image + images), slice(group, group + count)


def _repeat(bias_GHQM: Tensor, count: int) -> Tensor:
    """Return the bias of `count` groups: those of all images."""
    images = count // len(bias_GHQM)
    return bias_GHQM if images == 1 else bias_GHQM.repeat(images, 1, 1, 1)


def _attend_parts(
    q_BHNK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, parts: tuple[PatternPart, ...], scale: float
) -> Tensor:
    """Return the output of patches (B, H, N, K), with one softmax over the keys of all parts."""
    scores = [
        _ungroup(
            _scores(_group(q_BHNK, part.queries_GQ), _group(k_BHTK, part.keys_GM), part.bias_GHQM, scale),
            part.order_N,
        )
        for part in parts
    ]
    weights = torch.cat(scores, dim=-1).softmax(-1).split([part.keys_GM.shape[1] for part in parts], dim=-1)
    outputs = [
        _ungroup(_group(weights_BHNM, part.queries_GQ) @ _group(v_BHTK, part.keys_GM), part.order_N)
        for weights_BHNM, part in zip(weights, parts, strict=True)
    ]
    return torch.stack(outputs).sum(0)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = (q if scale == 1 else q * scale) @ k.transpose(-2, -1)
    return scores if bias is None else scores + bias


def _group(x_BHTK: Tensor, index_GM: Tensor) -> Tensor:
    """Copy the rows of each group: (B, G, H, M, K)."""
    rows_BLHK = x_BHTK.transpose(1, 2).index_select(1, index_GM.flatten())  # the features of all heads are contiguous
    return rows_BLHK.unflatten(1, index_GM.shape).transpose(2, 3)


def _ungroup(y_BGHQK: Tensor, order_N: Tensor) -> Tensor:
    """Return the rows of groups in the order of the patches: (B, H, N, K)."""
    return y_BGHQK.transpose(2, 3).flatten(1, 2).index_select(1, order_N).transpose(1, 2)
