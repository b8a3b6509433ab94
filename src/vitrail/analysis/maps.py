"""Attribution maps by rollout, last attention and relevance: how much each patch contributes to a prediction.

Shapes: B images, H heads, T tokens of which the first are [CLS] and registers, N = h*w patches.
"""

import contextlib
import functools
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.heads import head_input_weights
from vitrail.core.errors import UsageError
from vitrail.models.activations import Activations, look
from vitrail.models.base import AnyModel, Layout
from vitrail.models.device import evaluating
from vitrail.models.layers import Attention, AttentionPool, Bias, attention_weights
from vitrail.models.sparse_attention import dense_bias


def maps(model: AnyModel, images: Tensor, activations: Activations | None = None) -> dict[str, np.ndarray]:
    """Return the attribution maps of images by method, (B, h, w) each.

    The methods are rollout, last attention and, if the model classifies, relevance. `activations` is the result of
    `vitrail.look` for these images, if it is available.
    """
    layout = _attention_layout(model)
    activations = look(model, images) if activations is None else activations
    if len(activations.logits) != len(images):
        raise UsageError(
            f"Activations must be the result of look for these {len(images)} images, got {len(activations.logits)}."
        )
    weights_BT = head_input_weights(activations, layout)
    last = activations.attention[model.config.depth - 1].float().mean(dim=1).cpu().numpy()
    flow = rollout([activations.attention[layer] for layer in sorted(activations.attention)], residual=layout.residual)
    maps_by_method = {
        method: np.einsum("bt,bts->bs", weights_BT, flow_BTT)[:, layout.prefix :].reshape(-1, *layout.grid)
        for method, flow_BTT in (("rollout", flow), ("last attention", last))
    }
    if model.config.classifies and not layout.merges:
        maps_by_method["relevance"] = relevance(model, images)[0]
    return maps_by_method


def rollout(attentions: Sequence[Tensor], *, residual: bool = True) -> np.ndarray:
    """Return the attention rollout (B, T, T): how much of each input token reaches each output token.

    It is the product over layers of (mean attention over heads + identity), with rows normalised to sum 1 (arXiv
    2005.00928). The identity represents the residual connections; `residual=False` leaves it out.
    """
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
    """Return the relevance of each patch for a class of each image, (B, h, w), and the classes, (B).

    Relevance is attention weighted by the gradient of the class's logit, with negative values set to 0, accumulated
    over the layers (arXiv 2103.15679, eqs. 5 and 6). The classes are by default the predicted ones. The map is the row
    of the head's input: the row of [CLS], the mean row of the patches without their diagonal, or the row of the query
    of attention pooling. A class whose weights in the head are zero has a map of zeros.
    """
    layout = _attention_layout(model)
    if not model.config.classifies:
        raise UsageError(f"Relevance needs a model that classifies, got one that predicts {model.config.predicts}.")
    if layout.merges:
        raise UsageError(
            "Relevance needs a model that merges no tokens. Use vitrail.evaluation.merge_search.with_merge(model, 0),"
            " whose logits are close."
        )
    with evaluating(model), torch.enable_grad(), explicit_attention(model) as attentions:
        logits = model(images)
        classes = logits.argmax(dim=-1) if classes is None else classes.to(logits.device)
        gradients = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), attentions)
    identity, is_residual = torch.eye(attentions[0].shape[-1], dtype=torch.float64), layout.residual
    flow = identity.expand(len(images), -1, -1).clone()
    steps = [
        (weights * gradient).clamp(min=0).detach().cpu().double().mean(dim=1)
        for weights, gradient in zip(attentions, gradients, strict=True)
    ]
    for step in steps[: model.config.depth]:  # (B, Q, T): the last layer may compute the query of [CLS] only
        flow[:, : step.shape[1]] = flow[:, : step.shape[1]] * is_residual + step @ flow
    match layout.reads:
        case "[CLS]":
            row = flow[:, 0]
        case "mean":
            row = (flow - is_residual * identity)[:, layout.prefix :].mean(dim=1)
        case "pool":
            row = (steps[-1] @ flow)[:, 0]
    patch_relevance = row[:, layout.prefix :].float().numpy()
    return patch_relevance.reshape(-1, *layout.grid), classes.cpu().numpy()


@contextlib.contextmanager
def explicit_attention(model: AnyModel) -> Generator[list[Tensor]]:
    """Context in which a model computes attention without the fused kernel, so that attention weights have gradients.

    Yields a list to which a forward pass appends the attention weights of each layer, those of attention pooling last.
    The methods `forward` of the layers are replaced within the context and restored at its end.
    """
    attentions: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Attention | AttentionPool)]
    for layer in layers:
        explicit_forward: Any = _attend if isinstance(layer, Attention) else _pool
        layer.forward = functools.partial(explicit_forward, layer, attentions)
    try:
        yield attentions
    finally:
        for layer in layers:
            del layer.forward


def _attend(
    layer: Attention,
    attentions: list[Tensor],
    x_BND: Tensor,
    rope: Tensor | None = None,
    bias: Bias = None,
    queries: int | None = None,
) -> Tensor:
    """Compute `layer(x_BND, ...)` without the fused kernel and append the attention weights to `attentions`."""
    q, k, v = layer.qkv_heads(x_BND, rope, queries)
    bias = dense_bias(bias)
    weights = attention_weights(q, k, bias if bias is None or queries is None else bias[..., :queries, :], layer.scale)
    return layer.proj((_record_weights(weights, attentions) @ v).transpose(1, 2).flatten(2))


def _pool(layer: AttentionPool, attentions: list[Tensor], x_BND: Tensor) -> Tensor:
    """Compute `layer(x_BND)` without the fused kernel and append the attention weights to `attentions`."""
    q, k, v = layer.qkv_heads(x_BND)
    return layer.project(_record_weights(attention_weights(q, k, None), attentions) @ v)


def _record_weights(weights: Tensor, attentions: list[Tensor]) -> Tensor:
    """Append attention weights to a list and return them; they require gradients if gradients are enabled."""
    if not weights.requires_grad and torch.is_grad_enabled():
        weights = weights.detach().requires_grad_()  # in a frozen model, no parameter requires gradients
    attentions.append(weights)
    return weights


def _attention_layout(model: AnyModel) -> Layout:
    """Return the layout of the tokens of a model. Raises UsageError for a family without attention."""
    layout = model.layout()
    if layout is None:
        raise UsageError(f"Maps need a model with attention, got family {model.config.family}.")
    return layout
