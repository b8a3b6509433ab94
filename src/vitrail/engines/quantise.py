"""Weights and activations of 8 bits: ONNX Runtime's dynamic quantisation of an ONNX file.

Products with weights are computed with integers; attention itself, convolutions, normalisation and a ViT's first
projection stay in float32. Weights have one scale for each output and 7 bits: with 8, products of CPUs without VNNI
overflow. Activations have one scale for each call, so an answer may depend on the other images of its batch.
"""

import logging
from pathlib import Path

from vitrail.engines.base import need


def quantise(source: Path, target: Path, *, is_large: bool) -> None:
    """Write the ONNX file `target` with the matrix products of `source` in 8 bits."""
    tools = need("onnxruntime.quantization", "onnx")
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it advises to preprocess
    try:
        tools.quantize_dynamic(
            source,
            target,
            per_channel=True,
            reduce_range=True,
            op_types_to_quantize=["MatMul", "Gemm"],  # by default also Gather, which reads position embeddings
            weight_type=tools.QuantType.QInt8,
            use_external_data_format=is_large,
        )
    finally:
        logging.disable(level)
