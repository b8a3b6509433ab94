"""Building blocks of Vision Transformers.

Shapes: B images, C channels, N tokens, D width, H heads, K = D/H head width, Q queries, R remaining
patches, F = C*P*P flattened patch.
State-dict names are timm's.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.core.settings import Pair
from vitrail.models.activations import Activations
from vitrail.models.device import evaluating
from vitrail.models.sparse_attention import SparsePattern, attend

Bias = Tensor | SparsePattern | None
"""What changes attention logits: numbers to add, a boolean mask, or the pairs of tokens to compute."""


def patchify(images_BCHW: Tensor, patch: Pair) -> Tensor:
    """Cut images into patches without overlap and flatten each: (B, N, C*P*P), in raster order."""
    batch, channels, height, width = images_BCHW.shape
    rows, columns = height // patch[0], width // patch[1]
    cells = images_BCHW.reshape(batch, channels, rows, patch[0], columns, patch[1])
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * patch[0] * patch[1])


def unpatchify(patches_BNF: Tensor, grid: Pair, patch: Pair) -> Tensor:
    """Put flattened patches (B, N, C*P*P) together to images (B, C, H, W): the inverse of `patchify`."""
    batch, _, flat = patches_BNF.shape
    channels = flat // (patch[0] * patch[1])
    cells = patches_BNF.reshape(batch, *grid, channels, *patch)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, grid[0] * patch[0], grid[1] * patch[1])


class PatchEmbed(nn.Module):
    """x_p E of eq. 1: cut the image into patches, flatten each, project it with one matrix."""

    def __init__(
        self, *, channels: int, width: int, patch: Pair, stride: Pair, padding: Pair, bias: bool = True
    ) -> None:
        super().__init__()
        # E is stored as the kernel of the equivalent strided convolution, as in published checkpoints.
        self.proj = nn.Conv2d(channels, width, patch, stride, padding, bias=bias)
        self.patch, self.stride, self.padding = patch, stride, padding
        self.is_plain = stride == patch and padding == (0, 0)  # every pixel belongs to exactly one patch

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        if self.is_plain:
            patches_BNF = patchify(images_BCHW, self.patch)
        else:
            patches_BFN = F.unfold(images_BCHW, self.patch, padding=self.padding, stride=self.stride)
            patches_BNF = patches_BFN.transpose(1, 2)
        x_BND = F.linear(patches_BNF, self.proj.weight.flatten(1), self.proj.bias)
        if activations is not None:
            activations.steps["patches"], activations.steps["projected"] = patches_BNF, x_BND
        return x_BND


_SHORT_SEQUENCE = 128  # tokens


class Attention(nn.Module):
    """Multi-head self-attention (appendix A) on torch's fused kernel.

        [q, k, v] = x U_qkv                     eq. 5    qkv_heads
        A         = softmax(q k^T / sqrt(K))    eq. 6    attention_weights
        SA        = A v                         eq. 7    forward
        MSA       = [SA_1; ...; SA_H] U_msa     eq. 8    forward

    On a CPU the backward pass of the fused kernel is slow for short sequences (at 17 tokens three times slower than
    eqs. 6 and 7 without fusion), so training on small images does not use it.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        qkv_bias: bool,
        proj_bias: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.scale, self.dropout = heads, scale, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width, bias=proj_bias)

    def forward(
        self, x_BND: Tensor, rope: Tensor | None = None, bias: Bias = None, queries: int | None = None
    ) -> Tensor:
        """Return MSA (B, Q, D). `rope` rotates queries and keys by their position; `bias` is added to the logits,
        masks them (if boolean) or says which ones to compute. With `queries`, only the first `queries` tokens are
        queries; all tokens are keys and values."""
        q_BHQK, k_BHNK, v_BHNK = self.qkv_heads(x_BND, rope, queries)
        if isinstance(bias, Tensor) and queries is not None:
            bias = bias[..., :queries, :]
        if isinstance(bias, SparsePattern):
            y_BHQK = attend(q_BHQK, k_BHNK, v_BHNK, bias, self.scale)
        elif (
            self.training
            and q_BHQK.requires_grad
            and q_BHQK.device.type == "cpu"
            and k_BHNK.shape[2] <= _SHORT_SEQUENCE
        ):
            y_BHQK = attention_weights(q_BHQK, k_BHNK, bias, self.scale) @ v_BHNK
        else:
            y_BHQK = F.scaled_dot_product_attention(q_BHQK, k_BHNK, v_BHNK, attn_mask=bias, scale=self.scale)
        msa_BQD = self.proj(y_BHQK.transpose(1, 2).flatten(2))
        return drop(msa_BQD, self.dropout, self.training)

    def weights(self, x_BND: Tensor, rope: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the attention weights of eq. 6 (B, H, N, N), which the fused kernel does not return."""
        q_BHNK, k_BHNK, _ = self.qkv_heads(x_BND, rope)
        return attention_weights(q_BHNK, k_BHNK, bias, self.scale)

    def cls_attention(self, x_BND: Tensor) -> Tensor:
        """Return the attention weights of the first token (B, H, N), without rotation and bias."""
        if not is_plain(self.qkv):
            return self.weights(x_BND)[:, :, 0]
        width = x_BND.shape[-1]
        q_bias = None if self.qkv.bias is None else self.qkv.bias[:width]
        q_BHK = F.linear(x_BND[:, 0], self.qkv.weight[:width], q_bias).unflatten(-1, (self.heads, -1))
        scale = q_BHK.shape[-1] ** -0.5 if self.scale is None else self.scale
        return _cls_attention(q_BHK * scale, self.qkv.weight[width : 2 * width], x_BND)

    def steps(self, x_BND: Tensor, rope: Tensor | None = None, bias: Tensor | None = None) -> dict[str, Tensor]:
        """Compute eqs. 5 to 8 one by one, separately from the fused kernel; names as in `Activations.steps`."""
        q_BHNK, k_BHNK, v_BHNK = self.qkv_heads(x_BND, rope)
        scores_BHNN = attention_scores(q_BHNK, k_BHNK, bias, self.scale)
        weights_BHNN = scores_BHNN.softmax(-1)
        heads_BHNK = weights_BHNN @ v_BHNK
        msa_BND = self.proj(heads_BHNK.transpose(1, 2).flatten(2))
        return {
            "q": q_BHNK,
            "k": k_BHNK,
            "v": v_BHNK,
            "scores": scores_BHNN,
            "weights": weights_BHNN,
            "heads": heads_BHNK,
            "msa": msa_BND,
        }

    def qkv_heads(
        self, x_BND: Tensor, rope: Tensor | None, queries: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of all heads, (B, H, Q or N, K)."""
        batch, tokens, width = x_BND.shape
        heads = (self.heads, width // self.heads)
        if queries is None or not is_plain(self.qkv):
            qkv_BNE = self.qkv(x_BND)
            q_BHQK, k_BHNK, v_BHNK = qkv_BNE.view(batch, tokens, 3, *heads).permute(2, 0, 3, 1, 4).unbind(0)
            q_BHQK = q_BHQK[:, :, :queries]
        else:
            weight, bias = self.qkv.weight, self.qkv.bias
            q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
            q_BHQK = F.linear(x_BND[:, :queries], weight[:width], q_bias).unflatten(-1, heads).transpose(1, 2)
            kv_BNE = F.linear(x_BND, weight[width:], kv_bias)
            k_BHNK, v_BHNK = kv_BNE.view(batch, tokens, 2, *heads).permute(2, 0, 3, 1, 4).unbind(0)
        if rope is not None:
            q_BHQK, k_BHNK = rotate(q_BHQK, rope[:, :queries]), rotate(k_BHNK, rope)
        return q_BHQK, k_BHNK, v_BHNK


class SeparateAttention(nn.Module):
    """`Attention` for export and inference: separate matrices for queries, keys and values, and eqs. 6 and 7 without
    fusion. The scale of eq. 6 is part of the query matrix.

    ONNX Runtime and OpenVINO fuse these steps themselves, and need not copy queries, keys and values out of one tensor.
    """

    def __init__(self, fused: Attention) -> None:
        super().__init__()
        self.heads, self.proj = fused.heads, fused.proj
        width = fused.qkv.in_features
        scale = (width // self.heads) ** -0.5 if fused.scale is None else fused.scale
        weights = fused.qkv.weight.detach().split(width)
        biases = (None,) * 3 if fused.qkv.bias is None else fused.qkv.bias.detach().split(width)
        self.q, self.k, self.v = map(_frozen_linear, weights, biases, (scale, 1, 1))

    def forward(
        self, x_BND: Tensor, rope: Tensor | None = None, bias: Bias = None, queries: int | None = None
    ) -> Tensor:
        """Return MSA (B, Q, D); arguments as in `Attention.forward`."""
        q_BHQK, k_BHNK, v_BHNK = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, x in ((self.q, x_BND[:, :queries]), (self.k, x_BND), (self.v, x_BND))
        )
        if rope is not None:
            q_BHQK, k_BHNK = rotate(q_BHQK, rope[:, :queries]), rotate(k_BHNK, rope)
        if isinstance(bias, SparsePattern):
            y_BHQK = attend(q_BHQK, k_BHNK, v_BHNK, bias, scale=1, fused=False)
        else:
            rows = bias[..., :queries, :] if bias is not None and queries is not None else bias
            y_BHQK = attention_weights(q_BHQK, k_BHNK, rows, scale=1) @ v_BHNK
        return self.proj(y_BHQK.transpose(1, 2).flatten(2))

    def cls_attention(self, x_BND: Tensor) -> Tensor:
        """Return the attention weights of the first token (B, H, N), without rotation and bias."""
        q_BHK = self.q(x_BND[:, 0]).unflatten(-1, (self.heads, -1))
        return _cls_attention(q_BHK, self.k.weight, x_BND)


def separate_(model: nn.Module) -> None:
    """Replace every `Attention` by a `SeparateAttention`, in place. Subclasses and modules with hooks stay."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, Attention) and is_plain(child, Attention) and is_plain(child.qkv):
                setattr(parent, name, SeparateAttention(child))


def _frozen_linear(weight: Tensor, bias: Tensor | None, scale: float) -> nn.Linear:
    """Create a linear layer with scaled weights and without gradients. With scale 1 it shares the weights."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            setattr(linear, name, nn.Parameter(tensor if scale == 1 else tensor * scale, requires_grad=False))
    return linear


def _cls_attention(q_BHK: Tensor, keys_DD: Tensor, x_BND: Tensor) -> Tensor:
    """Return the attention of one token to all tokens (B, H, N) from its scaled queries, without computing keys: q (W
    x) = (W^T q) x. The bias of the keys adds the same number to all logits, so the softmax does not depend on it."""
    keys_HKD = keys_DD.unflatten(0, (q_BHK.shape[1], -1))
    projected_BHD = (q_BHK.transpose(0, 1) @ keys_HKD).transpose(0, 1)
    return (projected_BHD @ x_BND.transpose(1, 2)).softmax(dim=-1)


def attention_weights(q_BHQK: Tensor, k_BHNK: Tensor, bias: Tensor | None, scale: float | None = None) -> Tensor:
    """Return the attention weights of eq. 6 (B, H, Q, N); rows sum to 1."""
    return attention_scores(q_BHQK, k_BHNK, bias, scale).softmax(-1)


def attention_scores(q_BHQK: Tensor, k_BHNK: Tensor, bias: Tensor | None, scale: float | None = None) -> Tensor:
    """Return the scores q k^T / sqrt(K) of eq. 6 before the softmax (B, H, Q, N), with a bias or a mask."""
    scale = q_BHQK.shape[-1] ** -0.5 if scale is None else scale
    scores_BHQN = (q_BHQK if scale == 1 else q_BHQK * scale) @ k_BHNK.transpose(-2, -1)
    if bias is not None:
        is_mask = bias.dtype == torch.bool
        scores_BHQN = scores_BHQN.masked_fill(~bias, -torch.inf) if is_mask else scores_BHQN + bias
    return scores_BHQN


def rotate(x_BHNK: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair of features (i, i + K/2) by the angle of its token; `rope` is cosines and sines, (2, N, K/2)."""
    a, b = x_BHNK.chunk(2, dim=-1)
    cos, sin = rope
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class MLP(nn.Module):
    """Two linear layers with one non-linearity between them (section 3.1), applied to each token."""

    def __init__(self, *, width: int, hidden: int, activation: str, dropout: float, bias: bool = True) -> None:
        super().__init__()
        self.activation = activation
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.dropout = dropout
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BND: Tensor) -> Tensor:
        hidden_BNM = activate(self.fc1(x_BND), self.activation, fresh=is_plain(self.fc1))
        hidden_BNM = drop(hidden_BNM, self.dropout, self.training)
        return drop(self.fc2(hidden_BNM), self.dropout, self.training)

    def steps(self, x_BND: Tensor) -> dict[str, Tensor]:
        """Compute the hidden layer, its activation and the output; names as in `Activations.steps`."""
        z1_BNM = self.fc1(x_BND)
        activated_BNM = activate(z1_BNM, self.activation, fresh=False)
        return {"z1": z1_BNM, "activated": activated_BNM, "z2": self.fc2(activated_BNM)}


class AttentionPool(nn.Module):
    """Attention pooling (the MAP head of arXiv 2106.04560): one learned query attends to all tokens; then an MLP."""

    def __init__(self, *, width: int, heads: int, hidden: int, activation: str, norm: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = norm
        self.mlp = MLP(width=width, hidden=hidden, activation=activation, dropout=0.0)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.project(F.scaled_dot_product_attention(*self.qkv_heads(x_BND)))

    def qkv_heads(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the learned query, the keys and the values, (B, H, 1 or N, K)."""
        query = self.q(self.latent).expand(x_BND.shape[0], -1, -1)
        key, value = self.kv(x_BND).chunk(2, dim=-1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (query, key, value))
        return q, k, v

    def project(self, heads_BH1K: Tensor) -> Tensor:
        """Project the outputs of the heads and apply the MLP. Return the pooled features (B, D)."""
        y_B1D = self.proj(heads_BH1K.transpose(1, 2).flatten(2))
        return (y_B1D + self.mlp(self.norm(y_B1D)))[:, 0]

    def weights(self, x_BND: Tensor) -> Tensor:
        """Return the attention weights of the query (B, H, 1, N), computed separately from the fused kernel."""
        q, k, _ = self.qkv_heads(x_BND)
        return attention_weights(q, k, None)


class PreLogits(nn.Module):
    """The hidden layer of the pre-training head (section 3.1)."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.fc = nn.Linear(width, width)

    def forward(self, y_BD: Tensor) -> Tensor:
        return activate(self.fc(y_BD), self.activation, fresh=is_plain(self.fc))


class LayerScale(nn.Module):
    """A learned factor per feature on a residual branch (arXiv 2103.17239, eq. 4)."""

    def __init__(self, width: int, initial_value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial_value))

    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND * self.gamma


def drop(x: Tensor, probability: float, training: bool) -> Tensor:
    """Apply dropout in training. The condition exists because an inactive `F.dropout` takes as long as a small
    layer."""
    return F.dropout(x, probability) if training and probability else x


def drop_path(x_BND: Tensor, probability: float, training: bool) -> Tensor:
    """Stochastic depth (arXiv 1603.09382): in training, skip the branch for random images."""
    if not training or probability == 0:
        return x_BND
    keep = 1 - probability
    return x_BND * x_BND.new_empty(x_BND.shape[0], 1, 1).bernoulli_(keep).div_(keep)


def drop_tokens(z_BTD: Tensor, prefix: int, share: float) -> Tensor:
    """Drop a random share of each image's patch tokens; [CLS] and registers stay (arXiv 2208.07220)."""
    patches = z_BTD.shape[1] - prefix
    remaining = max(round((1 - share) * patches), 1)
    noise_BN = torch.rand(z_BTD.shape[0], patches, device=z_BTD.device)
    index_BR = noise_BN.topk(remaining, dim=1).indices.sort(dim=1).values + prefix
    patches_BRD = z_BTD.gather(1, index_BR[..., None].expand(-1, -1, z_BTD.shape[2]))
    return torch.cat([z_BTD[:, :prefix], patches_BRD], dim=1)


class TokenBatchNorm(nn.BatchNorm1d):
    """BatchNorm of tokens: statistics per feature over all images and tokens, unlike LayerNorm's per token."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(0, -2)).view_as(input)


class NoNorm(nn.Identity):
    """No normalisation, with the arguments of a norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()


NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "batch": TokenBatchNorm, "none": NoNorm}
"""Norm classes of tokens, by the values of the setting `norm`."""


def is_plain(layer: nn.Module, layer_type: type[nn.Module] = nn.Linear) -> bool:
    """Whether `layer` is exactly of this type (no adapter, no quantised layer) and has no hooks. Only the weights of
    such a layer may be used without calling it, and only its output may be overwritten."""
    has_hooks = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
    return type(layer) is layer_type and not has_hooks


def activate(x: Tensor, name: str, *, fresh: bool) -> Tensor:
    """Apply the non-linearity `name`, in place if `x` is `fresh` (not used elsewhere) and no gradient needs it.

    The page faults of a new tensor as large as the MLP's hidden layer cost more than the non-linearity itself.
    """
    in_place = fresh and not (torch.is_grad_enabled() and x.requires_grad)
    match name:
        case "relu":
            return F.relu(x, inplace=in_place)
        case "tanh":
            return x.tanh_() if in_place else x.tanh()
        case "gelu" | "gelu-tanh":
            approximate = "tanh" if name == "gelu-tanh" else "none"
            gelu = torch.ops.aten.gelu_ if in_place else F.gelu
            return gelu(x, approximate=approximate)
        case "none":
            return x
        case "quick-gelu":  # the sigmoid approximation of iGPT and CLIP
            return x * torch.sigmoid(1.702 * x)
    raise ValueError(name)


class EmbeddingHead(nn.Sequential):
    """A linear layer to the width of the embedding, and BatchNorm, which removes the features that all images share
    (the last two layers of arXiv 1801.07698)."""

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__(nn.Linear(width, embedding, bias=False), nn.BatchNorm1d(embedding))

    @property
    def parts(self) -> tuple[nn.Linear, nn.BatchNorm1d]:
        """The linear layer and the norm."""
        return cast(tuple[nn.Linear, nn.BatchNorm1d], tuple(self))

    def forward(self, input: Tensor) -> Tensor:
        """Return embeddings (B, E). In training, a batch of one image, which has no variance, is normalised by the
        running statistics."""
        linear, norm = self.parts
        if not self.training or len(input) > 1:
            return norm(linear(input))
        with evaluating(norm):
            return norm(linear(input))

    @torch.no_grad()
    def initialise(self) -> None:
        """Initialise so that the embedding has the scale of the features and the norm is the identity."""
        linear, norm = self.parts
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        norm.reset_parameters()
