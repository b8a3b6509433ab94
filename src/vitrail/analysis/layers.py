"""Similarity of layers (CKA), and norms of their tokens."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.core.errors import UsageError
from vitrail.models.activations import look
from vitrail.models.base import AnyModel


def cka(ones: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Unbiased linear CKA of two representations of the same images, from batches (arXiv 1905.00414, 2010.15327): 1 is
    equal up to rotation and scaling, about 0 is unrelated.

    Each batch is (m, features) with m of at least 4; the two sides may have different numbers of features. With few
    images it is noise: unrelated representations have 0.6 with 4 images, 0.2 with 8, 0.08 with 16.
    """
    return float(cka_table({"": list(map(gram, ones))}, {"": list(map(gram, others))})[0, 0])


def cka_table(ones: Mapping[str, Sequence[np.ndarray]], others: Mapping[str, Sequence[np.ndarray]]) -> np.ndarray:
    """CKA of every layer of one model with every layer of another (or of itself), (layers, layers), from the `gram` of
    every batch."""
    own = [{name: sum(_hsic(one, one) for one in some) for name, some in side.items()} for side in (ones, others)]
    table = np.zeros((len(ones), len(others)))
    for row, one in enumerate(ones):
        for column, other in enumerate(others):
            both = sum(map(_hsic, ones[one], others[other]))
            table[row, column] = both / np.sqrt(max(own[0][one] * own[1][other], 1e-300))
    return table


def layer_grams(model: AnyModel, images: Tensor, batch: int = 32) -> dict[str, list[np.ndarray]]:
    """The `gram` of what leaves each layer, one for each batch of about so many images."""
    found: dict[str, list[np.ndarray]] = {}
    for part in images.tensor_split(-(-len(images) // batch)):
        for name, tensor in look(model, part, attention=False).steps.items():
            if name.startswith("blocks."):
                found.setdefault(name, []).append(gram(tensor.float().flatten(1).cpu().numpy()))
    return found


def gram(features: np.ndarray) -> np.ndarray:
    """The Gram matrix (m, m) of the images' features, with zeros on the diagonal."""
    flat = np.asarray(features, np.float64).reshape(len(features), -1)
    if len(flat) < 4:
        raise UsageError(f"CKA must have batches of 4 images or more, got {len(flat)}.")
    products = flat @ flat.T
    np.fill_diagonal(products, 0)
    return products


def _hsic(one: np.ndarray, other: np.ndarray) -> float:
    """HSIC_1, the unbiased estimator, of two Gram matrices with zero diagonals."""
    m = len(one)
    products = np.sum(one * other) + one.sum() * other.sum() / ((m - 1) * (m - 2))
    return float((products - 2 / (m - 2) * (one.sum(axis=0) @ other.sum(axis=1))) / (m * (m - 3)))


def token_norms(tokens_BTD: Tensor) -> np.ndarray:
    """Norm of every token, (B, T)."""
    return torch.linalg.vector_norm(tokens_BTD.float(), dim=-1).cpu().numpy()


def outliers(norms_BT: np.ndarray, times: float = 5.0) -> np.ndarray:
    """Which tokens have more than `times` the median norm of their image; such tokens hold global information (arXiv
    2309.16588)."""
    return norms_BT > times * np.median(norms_BT, axis=1, keepdims=True)
