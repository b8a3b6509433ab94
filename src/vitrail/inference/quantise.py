"""Weights and activations of 8 bits in an ONNX file.

Products with weights are computed with integers; attention itself, convolutions, normalisation and a ViT's first
projection stay in float32. All operators are ONNX's own; ONNX Runtime fuses those of a product into one.

Weights have one scale for each output. Without VNNI, a CPU adds the products of two neighbouring inputs in 16 bits,
which saturate. Scales are such that no pair of weights can: every CPU computes the same, and most weights have finer
steps than those of 7 bits, the usual remedy.

Activations have one scale for each call. So that a prediction does not depend on other images, the engine computes one
image a call, except of small models. After an activation function a few tokens are many times larger than the others.
There, each token is divided by its largest value before the product, and the product multiplied by it.
"""

from pathlib import Path
from typing import Any

import numpy as np

from vitrail.inference.engine import import_engine_package

_LARGEST = 127  # sum of a pair's weights of one sign, at most 128 when rounded: times 255, it fits into 16 bits
_ACTIVATIONS = ("Gelu", "Relu")
_LEAST = 0.5  # divisor of a token: with a smaller one, GELU's negative values would set the scale of all


def quantise(source: Path, target: Path, *, is_large: bool) -> None:
    """Write the ONNX file `target` with the matrix products of `source` in 8 bits; of a large model, weights go to a
    file beside it."""
    onnx = import_engine_package("onnx", "onnx")
    model = onnx.load(source)
    _Draft(onnx, model.graph).rewrite()
    onnx.save(model, target, save_as_external_data=is_large, location=f"{target.name}.data")


def round_weights(weights_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights as 8-bit integers (K, N), and the scale of each output (N)."""
    even = np.pad(weights_KN, ((0, len(weights_KN) % 2), (0, 0)))
    pairs = even.reshape(-1, 2, even.shape[1])
    sums = (np.maximum(sign * pairs, 0).sum(axis=1) for sign in (1, -1))
    largest_N = np.max([side.max(axis=0) for side in sums], axis=0)
    scales_N = find_scales(largest_N)
    return np.rint(weights_KN / scales_N).astype(np.int8), scales_N


def find_scales(largest: np.ndarray) -> np.ndarray:
    """The steps with which these largest values are 127 steps; 1 where they are too small for a step in float32."""
    return np.where(largest > _LARGEST * np.finfo(np.float32).tiny, largest / _LARGEST, 1).astype(np.float32)


class _Draft:
    """A graph whose products are replaced one by one."""

    def __init__(self, onnx: Any, graph: Any) -> None:
        self._onnx, self._graph = onnx, graph
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = {name: node.op_type for node in graph.node for name in node.output}
        self._nodes: list[Any] = []
        self._rounded: dict[str, tuple[str, str, str]] = {}

    def rewrite(self) -> None:
        """Replace the products, and remove the weights that nobody needs any more."""
        for node in self._graph.node:
            weights = self._weights(node)
            if weights is None:
                self._nodes.append(node)
            else:
                self._replace(node, weights)
        needed = {name for node in self._nodes for name in node.input}
        kept = [tensor for name, tensor in self._constants.items() if name in needed]
        for field, content in ((self._graph.node, self._nodes), (self._graph.initializer, kept)):
            del field[:]
            field.extend(content)

    def _weights(self, node: Any) -> np.ndarray | None:
        """The weights (K, N) of a product with a matrix of constants."""
        tensor = self._constants.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
        if tensor is None or len(tensor.dims) != 2:
            return None
        weights = self._onnx.numpy_helper.to_array(tensor)
        is_turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        return weights.T if is_turned else weights

    def _replace(self, node: Any, weights_KN: np.ndarray) -> None:
        """Add the nodes that compute a product in 8 bits."""
        inputs, name = node.input[0], node.output[0]
        steps_KN, scales_N = round_weights(weights_KN)
        factors = []
        if self._makers.get(inputs) in _ACTIVATIONS:
            axes = self._constant(f"{name}.axes", np.array([-1]))
            largest = self._add("ReduceMax", [inputs, axes], f"{name}.largest", keepdims=1)
            least = self._constant(f"{name}.least", np.array(_LEAST, np.float32))
            factors.append(self._add("Max", [largest, least], f"{name}.divisor"))
            inputs = self._add("Div", [inputs, *factors], f"{name}.divided")
        levels, scale, zero = self._round(inputs)
        steps = self._constant(f"{name}.steps", steps_KN)
        middle = self._constant(f"{name}.middle", np.zeros(len(scales_N), np.int8))
        sums = self._add("MatMulInteger", [levels, steps, zero, middle], f"{name}.sums")
        product = self._add("Cast", [sums], f"{name}.floats", to=self._onnx.TensorProto.FLOAT)
        scales = self._constant(f"{name}.scales", scales_N)
        factors.insert(0, self._add("Mul", [scale, scales], f"{name}.both_scales"))
        for at, factor in enumerate(factors):
            product = self._add("Mul", [product, factor], f"{name}.product{at}")
        for bias in node.input[2:]:  # of Gemm
            product = self._add("Add", [product, bias], f"{name}.biased")
        self._nodes[-1].output[0] = name

    def _round(self, inputs: str) -> tuple[str, str, str]:
        """Add the rounding of inputs, once for all products with them: their levels, scale and zero point."""
        if inputs not in self._rounded:
            found = f"{inputs}.levels", f"{inputs}.scale", f"{inputs}.zero"
            self._add("DynamicQuantizeLinear", [inputs], *found)
            self._rounded[inputs] = found
        return self._rounded[inputs]

    def _constant(self, name: str, content: np.ndarray) -> str:
        self._constants[name] = self._onnx.numpy_helper.from_array(content, name)
        return name

    def _add(self, operator: str, inputs: list[str], *outputs: str, **attributes: int) -> str:
        """Add a node, named as its first output. Returns that name."""
        node = self._onnx.helper.make_node(operator, inputs, outputs, name=outputs[0], **attributes)
        self._nodes.append(node)
        return outputs[0]
