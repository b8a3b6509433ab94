"""Similarity of layers by CKA, and norms of the tokens of a layer."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.core.errors import UsageError
from vitrail.models.activations import look
from vitrail.models.base import AnyModel


def cka(features: Sequence[np.ndarray], other_features: Sequence[np.ndarray]) -> float:
    """Return the unbiased linear CKA of two representations of the same images (arXiv 1905.00414, 2010.15327).

    1 means equal up to rotation and scaling, about 0 means unrelated. Each argument is a list of batches (m, features)
    with m of at least 4; the two representations may have different numbers of features. The estimate is noisy for few
    images: unrelated representations have a CKA of 0.6 with 4 images, 0.2 with 8 and 0.08 with 16.
    """
    return float(cka_table({"": list(map(gram, features))}, {"": list(map(gram, other_features))})[0, 0])


def cka_table(grams: Mapping[str, Sequence[np.ndarray]], other_grams: Mapping[str, Sequence[np.ndarray]]) -> np.ndarray:
    """Return the CKA of every layer of a model with every layer of another model or of itself, (layers, layers).

    `grams` and `other_grams` map the name of a layer to the Gram matrices of its batches (see `layer_grams`).
    """
    own_hsic, other_hsic = (
        {layer: sum(_hsic(matrix, matrix) for matrix in matrices) for layer, matrices in grams_by_layer.items()}
        for grams_by_layer in (grams, other_grams)
    )
    table = np.zeros((len(grams), len(other_grams)))
    for row, layer in enumerate(grams):
        for column, other_layer in enumerate(other_grams):
            shared_hsic = sum(map(_hsic, grams[layer], other_grams[other_layer]))
            table[row, column] = shared_hsic / np.sqrt(max(own_hsic[layer] * other_hsic[other_layer], 1e-300))
    return table


def layer_grams(model: AnyModel, images: Tensor, batch: int = 32) -> dict[str, list[np.ndarray]]:
    """Return the Gram matrices of the output of each layer, one matrix for each batch of about `batch` images."""
    grams: dict[str, list[np.ndarray]] = {}
    for part in images.tensor_split(-(-len(images) // batch)):
        for name, tensor in look(model, part, attention=False).steps.items():
            if name.startswith("blocks."):
                grams.setdefault(name, []).append(gram(tensor.float().flatten(1).cpu().numpy()))
    return grams


def gram(features: np.ndarray) -> np.ndarray:
    """Return the Gram matrix (m, m) of the features (m, ...) of m images, with zeros on the diagonal."""
    flat = np.asarray(features, np.float64).reshape(len(features), -1)
    if len(flat) < 4:
        raise UsageError(f"CKA must have batches of 4 images or more, got {len(flat)}.")
    products = flat @ flat.T
    np.fill_diagonal(products, 0)
    return products


def _hsic(gram: np.ndarray, other_gram: np.ndarray) -> float:
    """Return HSIC_1, the unbiased estimator of HSIC, of two Gram matrices with zero diagonals."""
    m = len(gram)
    products = np.sum(gram * other_gram) + gram.sum() * other_gram.sum() / ((m - 1) * (m - 2))
    return float((products - 2 / (m - 2) * (gram.sum(axis=0) @ other_gram.sum(axis=1))) / (m * (m - 3)))


def token_norms(tokens_BTD: Tensor) -> np.ndarray:
    """Return the norm of every token, (B, T)."""
    return torch.linalg.vector_norm(tokens_BTD.float(), dim=-1).cpu().numpy()


def outliers(norms_BT: np.ndarray, times: float = 5.0) -> np.ndarray:
    """Return a mask (B, T) of the tokens whose norm is more than `times` the median norm of their image.

    Such tokens hold global information (arXiv 2309.16588).
    """
    return norms_BT > times * np.median(norms_BT, axis=1, keepdims=True)
