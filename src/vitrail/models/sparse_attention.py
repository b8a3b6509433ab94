"""Attention that computes only the scores of the groups of a sparse pattern, instead of masking all scores.

Shapes: B images, T tokens (first the prefix: [CLS] and registers), N patches, H heads, K head width, G groups of Q
queries and M keys, L = B * G groups of all images.
"""

from collections.abc import Iterator, Sequence
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
    """What is added to the scores: -inf for masked pairs. A single head applies to all heads."""


class SparsePattern(NamedTuple):
    """The pairs of tokens that attend to each other. Prefix tokens attend to all tokens, and all tokens to them."""

    prefix: int
    parts: tuple[PatternPart, ...]
    """The softmax of a patch is over its keys in all parts, in which no key occurs twice."""
    prefix_bias_HPT: Tensor | None
    """Bias of the scores of prefix tokens."""


def dense_bias(bias: Tensor | SparsePattern | None) -> Tensor | None:
    """Return a bias or a mask as it is, and for a pattern the equal bias of all pairs of tokens (H, T, T). One head
    stands for all."""
    if not isinstance(bias, SparsePattern):
        return bias
    prefix, parts, prefix_bias_HPT = bias
    heads, tokens = parts[0].bias_GHQM.shape[1], prefix + len(parts[0].order_N)
    flat_HL = parts[0].bias_GHQM.new_full((heads, tokens * tokens), -torch.inf)
    for part in parts:
        pairs_GQM = (part.queries_GQ[:, :, None] + prefix) * tokens + part.keys_GM[:, None]
        values_HL = part.bias_GHQM.transpose(0, 1).flatten(1)
        index_HL = pairs_GQM.flatten().expand(heads, -1)
        flat_HL = flat_HL.scatter_reduce(1, index_HL, values_HL, "amax")  # the largest: repeated keys are masked
    patches_HNT = flat_HL.view(heads, tokens, tokens)[:, prefix:]
    if prefix_bias_HPT is None:
        prefix_bias_HPT = patches_HNT.new_zeros(heads, prefix, tokens)
    return torch.cat([prefix_bias_HPT, patches_HNT], dim=1)


def attend(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, pattern: SparsePattern, scale: float | None, *, fused: bool = True
) -> Tensor:
    """Return eq. 7 for all tokens (B, H, T, K), or for prefix tokens if there are no other queries. `fused` allows
    torch's fused kernels."""
    prefix, parts = pattern.prefix, pattern.parts
    scale = q_BHTK.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    if prefix:
        q_BHPK, bias_HPT = q_BHTK[:, :, :prefix], pattern.prefix_bias_HPT
        if bias_HPT is not None:
            bias_HPT = bias_HPT[:, : q_BHPK.shape[2]]
        outputs.append(_attend_all(q_BHPK, k_BHTK, v_BHTK, bias_HPT, scale, fused))
    if q_BHTK.shape[2] > prefix:
        q_BHNK = q_BHTK[:, :, prefix:]
        is_plain_cpu = q_BHNK.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        learns_bias = any(part.bias_GHQM.requires_grad for part in parts)
        if fused and is_plain_cpu and not torch.compiler.is_compiling() and not learns_bias:
            tensors = (tensor for part in parts for tensor in part)
            outputs.append(_CachedGroups.apply(q_BHNK, k_BHTK, v_BHTK, scale, *tensors))
        elif len(parts) > 1:
            outputs.append(_attend_parts(q_BHNK, k_BHTK, v_BHTK, parts, scale))
        else:
            outputs.append(_attend_groups(q_BHNK, k_BHTK, v_BHTK, parts[0], scale, fused))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def _attend_all(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, fused: bool) -> Tensor:
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return _scores(q, k, bias, scale).softmax(-1) @ v


def _attend_groups(
    q_BHNK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, part: PatternPart, scale: float, fused: bool
) -> Tensor:
    """Return the output of patches (B, H, N, K) whose keys are all in one part."""
    q_BGHQK, k_BGHMK, v_BGHMK = (
        _group(x, index) for x, index in ((q_BHNK, part.queries_GQ), (k_BHTK, part.keys_GM), (v_BHTK, part.keys_GM))
    )
    if not fused:
        return _ungroup(_attend_all(q_BGHQK, k_BGHMK, v_BGHMK, part.bias_GHQM, scale, fused), part.order_N)
    bias = part.bias_GHQM.expand(q_BHNK.shape[0], -1, -1, -1, -1).flatten(0, 1)  # the kernel has four dimensions
    y = _attend_all(*(x.flatten(0, 1) for x in (q_BGHQK, k_BGHMK, v_BGHMK)), bias, scale, fused)
    return _ungroup(y.unflatten(0, q_BGHQK.shape[:2]), part.order_N)


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


_CACHED_NUMBERS = 300_000  # numbers of the keys that are copied at a time: with their values, they fit into the cache


class _CachedGroups(torch.autograd.Function):
    """torch's fused CPU kernel on a few groups at a time, so that copies of keys and values stay in the cache.

    Copying them for all groups at once takes up to twice as long and several times the memory. The backward pass copies
    them again and adds their gradients in place. The operators are those behind `scaled_dot_product_attention`, because
    they return the logarithm of the sum of each softmax: it weights the outputs of several parts, and the backward pass
    needs it.
    """

    @staticmethod
    def forward(context: Any, q_BHNK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, scale: float, *tensors: Tensor) -> Tensor:
        outputs = [_part_forward(q_BHNK, k_BHTK, v_BHTK, part, scale) for part in _as_parts(tensors)]
        y_BHNK, log_sum_BHN1 = outputs[0]
        if len(outputs) > 1:
            log_sums = torch.stack([log_sum for _, log_sum in outputs])
            log_sum_BHN1 = log_sums.logsumexp(0)
            shares = (log_sums - log_sum_BHN1).exp().to(y_BHNK.dtype)
            y_BHNK = torch.stack([share * y for share, (y, _) in zip(shares, outputs, strict=True)]).sum(0)
        context.save_for_backward(q_BHNK, k_BHTK, v_BHTK, y_BHNK, log_sum_BHN1, *tensors)
        context.scale = scale
        return y_BHNK

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BHNK, k_BHTK, v_BHTK, y_BHNK, log_sum_BHN1, *tensors = context.saved_tensors
        dk_BTHK, dv_BTHK = (x.new_zeros(x.transpose(1, 2).shape) for x in (k_BHTK, v_BHTK))
        queries = (q_BHNK, gradients[0], y_BHNK, log_sum_BHN1)
        dq_BHNK = torch.zeros_like(q_BHNK)
        for part in _as_parts(tensors):
            dq_BHNK += _part_backward(queries, k_BHTK, v_BHTK, part, context.scale, dk_BTHK, dv_BTHK)
        return dq_BHNK, dk_BTHK.transpose(1, 2), dv_BTHK.transpose(1, 2), *(None,) * (1 + len(tensors))


def _as_parts(tensors: Sequence[Tensor]) -> list[PatternPart]:
    size = len(PatternPart._fields)
    return [PatternPart(*tensors[start : start + size]) for start in range(0, len(tensors), size)]


def _part_forward(
    q_BHNK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, part: PatternPart, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, N, K) of a softmax over the keys of one part, and the logarithm of its sum (B, H, N,
    1)."""
    batch, heads, patches, narrow = q_BHNK.shape
    q_LHQK = _group(q_BHNK, part.queries_GQ).flatten(0, 1)
    images = torch.arange(batch, device=q_BHNK.device)
    rows_LQ = (part.queries_GQ + patches * images[:, None, None]).flatten(0, 1)
    y_RD, log_sums = q_BHNK.new_empty(batch * patches, heads * narrow), []
    for chunk, _, k, v, bias in _chunks(part, k_BHTK, v_BHTK):
        y, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_LHQK[chunk], k, v, attn_mask=bias, scale=scale
        )
        y_RD.index_copy_(0, rows_LQ[chunk].flatten(), y.transpose(1, 2).flatten(0, 1).flatten(1))
        log_sums.append(log_sum)
    y_BHNK = y_RD.view(batch, patches, heads, narrow).transpose(1, 2)
    return y_BHNK, _ungroup(torch.cat(log_sums)[..., None].unflatten(0, (batch, -1)), part.order_N)


def _part_backward(
    queries: tuple[Tensor, Tensor, Tensor, Tensor],
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    part: PatternPart,
    scale: float,
    dk_BTHK: Tensor,
    dv_BTHK: Tensor,
) -> Tensor:
    """Return the gradient of the queries through the keys of one part, and add the gradients of keys and values to
    `dk_BTHK` and `dv_BTHK`. `queries` are the queries, the gradient of the output, the output and the logarithm of the
    sum of its softmax."""
    q_LHQK, dy_LHQK, y_LHQK, log_sum_LHQ1 = (_group(x, part.queries_GQ).flatten(0, 1) for x in queries)
    batch, groups = len(k_BHTK), len(part.queries_GQ)
    is_first = torch.zeros_like(part.queries_GQ, dtype=torch.bool).flatten().index_fill_(0, part.order_N, True)
    if not is_first.all():  # the gradient of repeated queries is zero
        dy_LHQK = (dy_LHQK.unflatten(0, (batch, -1)) * is_first.view(groups, 1, -1, 1)).flatten(0, 1)
    gradients = []
    for chunk, index, k, v, bias in _chunks(part, k_BHTK, v_BHTK):
        dq, *dkv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy_LHQK[chunk], q_LHQK[chunk], k, v, y_LHQK[chunk], log_sum_LHQ1[chunk][..., 0], 0.0, False,
            attn_mask=bias, scale=scale,
        )  # fmt: skip
        gradients.append(dq)
        for total, gradient in zip((dk_BTHK, dv_BTHK), dkv, strict=True):
            rows_LD = gradient.transpose(1, 2).flatten(0, 1).flatten(1)
            total.view(-1, rows_LD.shape[1]).index_add_(0, index, rows_LD)
    return _ungroup(torch.cat(gradients).unflatten(0, (batch, groups)), part.order_N)


def _chunks(
    part: PatternPart, k_BHTK: Tensor, v_BHTK: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yield chunks of the L = B * G groups of all images: their slice, the rows (of B * T) of their keys, copies of the
    keys and the values, and their bias. Every chunk overwrites the copies of the chunk before."""
    batch, heads, tokens, narrow = k_BHTK.shape
    groups, keys = part.keys_GM.shape
    count = max(_CACHED_NUMBERS // (keys * heads * narrow), 1)
    images = min(max(count // groups, 1), batch)
    sources = [x.transpose(1, 2).flatten(2).flatten(0, 1) for x in (k_BHTK, v_BHTK)]
    copies = [x.new_empty(images * min(count, groups) * keys, heads * narrow) for x in sources]
    for image in range(0, batch, images):
        numbers = torch.arange(image, min(image + images, batch), device=k_BHTK.device)
        for group in range(0, groups, count):
            chunk = slice(group, min(group + count, groups))
            index, bias = (part.keys_GM[chunk] + tokens * numbers[:, None, None]).flatten(), part.bias_GHQM[chunk]
            size = len(numbers) * len(bias)
            k, v = (
                torch.index_select(source, 0, index, out=copy[: len(index)]).view(size, keys, heads, narrow)
                for source, copy in zip(sources, copies, strict=True)
            )
            start = image * groups + group
            yield (
                slice(start, start + size),
                index,
                k.transpose(1, 2),
                v.transpose(1, 2),
                bias if len(numbers) == 1 else bias.repeat(len(numbers), 1, 1, 1),
            )
