"""Quantisation of an ONNX file: 8-bit weights and activations in matrix products.

Products with weights are computed with integers. Attention itself, convolutions, normalisation and a ViT's first
projection stay in float32. All operators are standard ONNX operators; ONNX Runtime fuses those of a product into one.

Weights have one scale for each output. Without VNNI, a CPU adds the products of two neighbouring inputs in 16 bits,
which can saturate. The scales are chosen such that no pair of weights saturates: every CPU computes the same result,
and most weights have finer steps than with 7 bits, the usual solution.

Activations have one scale for each call. The engine computes one image per call, except with small models, so that a
prediction does not depend on other images. After an activation function, a few tokens are many times larger than the
others. There, each token is divided by its largest value before the product, and the product is multiplied by it.
"""

from pathlib import Path
from typing import Any

import numpy as np

from vitrail.inference.engine import import_engine_package

_MAX_PAIR_SUM = 127  # of a pair's weights of one sign; at most 128 when rounded: times 255, it fits into 16 bits
_ACTIVATIONS = ("Gelu", "Relu")
_MIN_DIVISOR = 0.5  # of a token: with a smaller divisor, GELU's negative values would set the scale of all tokens


def quantise(source: Path, target: Path, *, is_large: bool) -> None:
    """Write the ONNX file `target`, a copy of `source` with matrix products in 8 bits.

    The weights of a large model are written to a second file with the suffix `.data`.
    """
    onnx = import_engine_package("onnx", "onnx")
    model = onnx.load(source)
    _GraphQuantiser(onnx, model.graph).rewrite()
    onnx.save(model, target, save_as_external_data=is_large, location=f"{target.name}.data")


def round_weights(weights_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round weights to 8-bit integers (K, N), and return them with the scale of each output (N)."""
    padded = np.pad(weights_KN, ((0, len(weights_KN) % 2), (0, 0)))
    pairs = padded.reshape(-1, 2, padded.shape[1])
    pair_sums = (np.maximum(sign * pairs, 0).sum(axis=1) for sign in (1, -1))
    largest_N = np.max([sums.max(axis=0) for sums in pair_sums], axis=0)
    scales_N = find_scales(largest_N)
    return np.rint(weights_KN / scales_N).astype(np.int8), scales_N


def find_scales(largest: np.ndarray) -> np.ndarray:
    """Return the scales that map these largest values to 127. A value too small for a float32 scale gets scale 1."""
    return np.where(largest > _MAX_PAIR_SUM * np.finfo(np.float32).tiny, largest / _MAX_PAIR_SUM, 1).astype(np.float32)


class _GraphQuantiser:
    """Replaces the matrix products of an ONNX graph by products in 8 bits."""

    def __init__(self, onnx: Any, graph: Any) -> None:
        self._onnx, self._graph = onnx, graph
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._producers = {name: node.op_type for node in graph.node for name in node.output}
        self._nodes: list[Any] = []
        self._quantised_inputs: dict[str, tuple[str, str, str]] = {}

    def rewrite(self) -> None:
        """Replace the products with weights, and remove weights that are not used any more, in place."""
        for node in self._graph.node:
            weights = self._find_weights(node)
            if weights is None:
                self._nodes.append(node)
            else:
                self._replace_product(node, weights)
        used_names = {name for node in self._nodes for name in node.input}
        initializers = [tensor for name, tensor in self._constants.items() if name in used_names]
        for field, items in ((self._graph.node, self._nodes), (self._graph.initializer, initializers)):
            del field[:]
            field.extend(items)

    def _find_weights(self, node: Any) -> np.ndarray | None:
        """Return the weights (K, N) of a product with a constant matrix, or None for another node."""
        tensor = self._constants.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
        if tensor is None or len(tensor.dims) != 2:
            return None
        weights = self._onnx.numpy_helper.to_array(tensor)
        is_transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        return weights.T if is_transposed else weights

    def _replace_product(self, node: Any, weights_KN: np.ndarray) -> None:
        """Add the nodes that compute a product in 8 bits."""
        inputs, name = node.input[0], node.output[0]
        steps_KN, scales_N = round_weights(weights_KN)
        factors = []
        if self._producers.get(inputs) in _ACTIVATIONS:
            axes = self._add_constant(f"{name}.axes", np.array([-1]))
            largest = self._add_node("ReduceMax", [inputs, axes], f"{name}.largest", keepdims=1)
            least = self._add_constant(f"{name}.least", np.array(_MIN_DIVISOR, np.float32))
            factors.append(self._add_node("Max", [largest, least], f"{name}.divisor"))
            inputs = self._add_node("Div", [inputs, *factors], f"{name}.divided")
        levels, scale, zero = self._quantise_inputs(inputs)
        steps = self._add_constant(f"{name}.steps", steps_KN)
        middle = self._add_constant(f"{name}.middle", np.zeros(len(scales_N), np.int8))
        sums = self._add_node("MatMulInteger", [levels, steps, zero, middle], f"{name}.sums")
        product = self._add_node("Cast", [sums], f"{name}.floats", to=self._onnx.TensorProto.FLOAT)
        scales = self._add_constant(f"{name}.scales", scales_N)
        factors.insert(0, self._add_node("Mul", [scale, scales], f"{name}.both_scales"))
        for index, factor in enumerate(factors):
            product = self._add_node("Mul", [product, factor], f"{name}.product{index}")
        for bias in node.input[2:]:  # only Gemm has a bias
            product = self._add_node("Add", [product, bias], f"{name}.biased")
        self._nodes[-1].output[0] = name

    def _quantise_inputs(self, inputs: str) -> tuple[str, str, str]:
        """Return the names of the 8-bit levels, the scale and the zero point of inputs.

        The node is added once for all products with these inputs.
        """
        if inputs not in self._quantised_inputs:
            outputs = f"{inputs}.levels", f"{inputs}.scale", f"{inputs}.zero"
            self._add_node("DynamicQuantizeLinear", [inputs], *outputs)
            self._quantised_inputs[inputs] = outputs
        return self._quantised_inputs[inputs]

    def _add_constant(self, name: str, array: np.ndarray) -> str:
        self._constants[name] = self._onnx.numpy_helper.from_array(array, name)
        return name

    def _add_node(self, operator: str, inputs: list[str], *outputs: str, **attributes: int) -> str:
        """Add a node that is named after its first output, and return this name."""
        node = self._onnx.helper.make_node(operator, inputs, outputs, name=outputs[0], **attributes)
        self._nodes.append(node)
        return outputs[0]
