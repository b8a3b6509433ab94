"""Attribution maps: the patches that a prediction comes from, by three methods.

Shapes: B images, H heads, T tokens of which the first are [CLS] and registers, N = h*w patches.
"""

import contextlib
import functools
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.heads import reading
from vitrail.core.errors import UsageError
from vitrail.models.activations import Activations, look
from vitrail.models.base import AnyModel, Layout
from vitrail.models.device import evaluating
from vitrail.models.layers import Attention, AttentionPool, attention_weights


def maps(model: AnyModel, images: Tensor, activations: Activations | None = None) -> dict[str, np.ndarray]:
    """All maps of the model, (B, h, w) each: rollout, last attention and, if it classifies, relevance.

    `activations` is the result of `look` for these images, if it is available.
    """
    layout = _layout(model)
    activations = look(model, images) if activations is None else activations
    if len(activations.logits) != len(images):
        raise UsageError(
            f"Activations must be the result of look for these {len(images)} images, got {len(activations.logits)}."
        )
    shares_BT = reading(activations, layout)
    last = activations.attention[model.config.depth - 1].float().mean(dim=1).cpu().numpy()
    flow = rollout([activations.attention[layer] for layer in sorted(activations.attention)], residual=layout.residual)
    found = {
        name: np.einsum("bt,bts->bs", shares_BT, weights_BTT)[:, layout.prefix :].reshape(-1, *layout.grid)
        for name, weights_BTT in (("rollout", flow), ("last attention", last))
    }
    if model.config.classifies and not layout.merges:
        found["relevance"] = relevance(model, images)[0]
    return found


def rollout(attentions: Sequence[Tensor], *, residual: bool = True) -> np.ndarray:
    """Attention rollout (arXiv 2005.00928), how much of each input token reaches each output token (B, T, T): the
    product over layers of (mean over heads + identity), with rows normalised to 1. The identity stands for the residual
    connections; a model without them has none."""
    if not attentions:
        raise UsageError("Rollout must have the attention of at least one layer, got none.")
    flow = None
    for attention_BHTT in attentions:
        step = attention_BHTT.cpu().double().mean(dim=1)  # not every GPU has 64-bit reals
        step = step + residual * torch.eye(step.shape[-1], dtype=step.dtype)
        step = step / step.sum(dim=-1, keepdim=True)
        flow = step if flow is None else step @ flow
    assert flow is not None
    return flow.numpy()


def relevance(model: AnyModel, images: Tensor, classes: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Relevance of each patch for a class (B, h, w), and the classes (B): attention weighted by the gradient of the
    class's logit, negative parts set to 0, accumulated over the layers (arXiv 2103.15679, eqs. 5 and 6).

    By default for the predicted class. The map is the row of the head's input: of [CLS]; the mean over patches, each
    without itself; or of the query of attention pooling. A class with zero weights has a map of zeros.
    """
    layout = _layout(model)
    if not model.config.classifies:
        raise UsageError(f"Relevance needs a model that classifies, got one that predicts {model.config.predicts}.")
    if layout.merges:
        raise UsageError(
            "Relevance needs a model that merges no tokens. Use vitrail.evaluation.merge_search.with_merge(model, 0),"
            " whose logits are close."
        )
    with evaluating(model), torch.enable_grad(), attention_written_out(model) as kept:
        logits = model(images)
        classes = logits.argmax(dim=-1) if classes is None else classes.to(logits.device)
        gradients = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), kept)
    identity, is_residual = torch.eye(kept[0].shape[-1], dtype=torch.float64), layout.residual
    flow = identity.expand(len(images), -1, -1).clone()
    steps = [
        (weights * gradient).clamp(min=0).detach().cpu().double().mean(dim=1)
        for weights, gradient in zip(kept, gradients, strict=True)
    ]
    for step in steps[: model.config.depth]:  # (B, Q, T): the last layer may ask for [CLS] alone
        flow[:, : step.shape[1]] = flow[:, : step.shape[1]] * is_residual + step @ flow
    match layout.reads:
        case "[CLS]":
            row = flow[:, 0]
        case "mean":
            row = (flow - is_residual * identity)[:, layout.prefix :].mean(dim=1)
        case "pool":
            row = (steps[-1] @ flow)[:, 0]
    found = row[:, layout.prefix :].float().numpy()
    return found.reshape(-1, *layout.grid), classes.cpu().numpy()


@contextlib.contextmanager
def attention_written_out(model: AnyModel) -> Generator[list[Tensor]]:
    """Context in which attention is computed without the fused kernel, so that its weights have gradients. They are
    appended to the yielded list, layer by layer and attention pooling last."""
    kept: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Attention | AttentionPool)]
    for layer in layers:
        written_out: Any = _attend if isinstance(layer, Attention) else _pool
        layer.forward = functools.partial(written_out, layer, kept)
    try:
        yield kept
    finally:
        for layer in layers:
            del layer.forward


def _attend(
    layer: Attention,
    kept: list[Tensor],
    x_BND: Tensor,
    rope: Tensor | None = None,
    bias: Tensor | None = None,
    queries: int | None = None,
) -> Tensor:
    q, k, v = layer.qkv_heads(x_BND, rope, queries)
    weights = attention_weights(q, k, bias if bias is None or queries is None else bias[..., :queries, :], layer.scale)
    return layer.proj((_keep(weights, kept) @ v).transpose(1, 2).flatten(2))


def _pool(layer: AttentionPool, kept: list[Tensor], x_BND: Tensor) -> Tensor:
    q, k, v = layer.qkv_heads(x_BND)
    return layer.project(_keep(attention_weights(q, k, None), kept) @ v)


def _keep(weights: Tensor, kept: list[Tensor]) -> Tensor:
    if not weights.requires_grad and torch.is_grad_enabled():
        weights = weights.detach().requires_grad_()  # in a frozen model, gradients begin here
    kept.append(weights)
    return weights


def _layout(model: AnyModel) -> Layout:
    layout = model.layout()
    if layout is None:
        raise UsageError(f"Maps need a model with attention, got family {model.config.family}.")
    return layout
