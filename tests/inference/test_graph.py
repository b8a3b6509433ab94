"""The exported ONNX graph: checkers, shape inference and quantisers accept it, and it contains no local paths."""

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import vitrail
from vitrail.inference.engine import import_engine_package
from vitrail.inference.onnx_engine import MODEL, OnnxEngine
from vitrail.inference.quantise import quantise
from vitrail.lab.exact import redraw

# One small model of each family.
MODELS = {
    "ViT-Pico/2": {"depth": 1},
    "Hybrid-Pico": {"depth": 1},
    "ResNet-Pico": {"layers": (1, 1)},
    "BiT-R50x1": {"base": 32, "layers": (1,), "resolution": 32},
    "Mixer-Pico/2": {"depth": 1},
    "LSTM-Pico/2": {"depth": 1},
    "iGPT-Micro": {"depth": 1, "resolution": 8},
    "MLP-Pico": {"depth": 1},
}


QUICK = ("ViT-Pico/2", "MLP-Pico")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_onnx_checker_shape_inference_and_quantisers_accept_graph(name, tmp_path):
    model = redraw(vitrail.create(name, classes=5, **MODELS[name]), std=0.05)
    half = (0.5,) * model.config.channels
    preprocess = vitrail.Preprocess(resolution=model.config.resolution, mean=half, std=half)
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess), tmp_path / "one")
    path = OnnxEngine.prepare(tmp_path / "one", "float32") / MODEL
    graph = onnx.load(path)
    onnx.checker.check_model(graph, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True, data_prop=True)
    assert len(inferred.graph.value_info) >= len(graph.graph.node) // 2 > len(graph.graph.value_info) == 0
    assert str(Path(vitrail.__file__).parent).encode() not in path.read_bytes()

    logging.disable()  # the quantiser recommends preprocessing
    import_engine_package("onnxruntime.quantization", "onnx").quantize_dynamic(path, tmp_path / "theirs.onnx")
    logging.disable(logging.NOTSET)
    quantise(path, tmp_path / "ours.onnx", is_large=False)
    onnx.checker.check_model(tmp_path / "ours.onnx", full_check=True)
    images = torch.randn(2, model.config.channels, *model.config.resolution)
    with torch.no_grad():
        expected = model.eval()(images).numpy()
    for file in ("theirs.onnx", "ours.onnx"):
        session = import_engine_package("onnxruntime", "onnx").InferenceSession(
            tmp_path / file, providers=["CPUExecutionProvider"]
        )
        (logits,) = session.run(["logits"], {"pixel_values": images.numpy()})
        assert np.abs(logits - expected).max() < 0.2 * np.abs(expected).max()  # 8 bits
