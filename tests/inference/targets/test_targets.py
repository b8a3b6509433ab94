"""`vitrail export`: targets are proved, read by other runtimes, and run by run.py."""

import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image, ImageOps

import vitrail
from tests.bundles.test_bundle import FIXTURE
from tests.inference.test_graph import MODELS
from vitrail.bundles.folder import check_folder
from vitrail.core.files import checksum, verify_checksums
from vitrail.inference.engine import import_engine_package
from vitrail.inference.model_files import fingerprint
from vitrail.inference.proof import crop_embedded_images
from vitrail.inference.registry import ENGINES, TARGETS
from vitrail.inference.targets.program import format_program, preprocessing_lines, required_packages
from vitrail.lab.exact import redraw

FILES = {"README.md", "labels.txt", "manifest.json", "preprocess.json", "proof.json", "run.py"}
MODEL_FILES = {
    "onnx": {"model.onnx"},
    "openvino": {"model.xml", "model.bin"},
    "torch": {"model.pt2"},
    "triton": {"vit-pico-2/config.pbtxt", "vit-pico-2/labels.txt", "vit-pico-2/1/model.onnx"},
}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle with a model file of engine onnx, whose graph is reused by exports."""
    folder = tmp_path_factory.mktemp("bundles") / "pico"
    shutil.copytree(FIXTURE, folder)
    ENGINES["onnx"].prepare(folder, "float32")
    return folder


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def link_packages(folder, names):
    """Link installed packages and their requirements into a folder, as `pip install` would fill a new environment."""
    pending, linked = [*names], set()
    while pending:
        name = canonicalize_name(pending.pop())
        if name in linked:
            continue
        linked.add(name)
        package = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in package.files if ".." not in file.parts}:
            if not (folder / top).exists():  # some packages share a folder
                (folder / top).symlink_to(package.locate_file(top))
        requirements = map(Requirement, package.requires or ())
        pending += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return folder


def run_program(folder, image, cwd=None):
    """Run run.py of an export in an environment with only the packages that README.md names. Return its lines.

    `cwd` is the working folder, by default that of the export.
    """
    readme, program = ((folder / name).read_text(encoding="utf-8") for name in ("README.md", "run.py"))
    assert re.findall(r"```python\n(.*?)```", readme, re.S) == [program]
    body = program.split('"""', 2)[2]
    assert len([line for line in body.splitlines() if line and "import" not in line]) <= 20
    (packages,) = re.findall(r"^pip install (.+)$", readme, re.M)
    site = folder.parent / f"site-of-{folder.name}"
    if not site.exists():
        site.mkdir()
        link_packages(site, packages.split())
    result = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", folder / "run.py", image],
        cwd=cwd or folder, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return [line.split(" ", 1) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("target", [*TARGETS])
def test_export_is_complete_proved_and_runs_without_vitrail(target, bundle, call, tmp_path):
    out = tmp_path / "out"
    result = call("export", bundle, out, "--to", target, "--json")
    assert result.returncode == 0, result.stderr
    assert files_of(out) == FILES | MODEL_FILES[target]
    proof = json.loads((out / "proof.json").read_text())
    assert proof == json.loads(result.stdout)
    assert (proof["pictures"], proof["same_answers"], proof["precision"], proof["batch"]) == (40, 40, "float32", "any")
    assert proof["max_logit_difference"] < 1e-5
    assert proof["files"] == {name: checksum(out / name) for name in MODEL_FILES[target]}
    verify_checksums(out, FILES - {"manifest.json"})
    assert (out / "labels.txt").read_text(encoding="utf-8") == "cat\ndog\n새\n"
    loaded = vitrail.load(bundle)
    assert vitrail.Preprocess.from_json(json.loads((out / "preprocess.json").read_text())) == loaded.preprocess

    pixels = np.random.default_rng(1).integers(0, 256, (5, 6), dtype=np.uint8)
    Image.fromarray(pixels).resize((61, 47)).save(tmp_path / "image.png")
    printed = run_program(out, "image.png", cwd=tmp_path)
    (expected,) = vitrail.Classifier(bundle).predict([tmp_path / "image.png"])
    assert [label for _, label in printed] == [prediction["label"] for prediction in expected]
    assert [float(score) for score, _ in printed] == pytest.approx(
        [prediction["score"] for prediction in expected], abs=1e-4
    )


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        ((61, 47), {"resize": "shorter", "crop_fraction": 0.9}),
        ((40, 97), {"resize": "squash", "crop_fraction": 0.8, "interpolation": "bilinear"}),
        ((61, 47), {"resize": "pad", "crop_fraction": 1.0, "background": (0, 0, 255)}),
        ((13, 95), {"resize": "pad", "crop_fraction": 0.9}),
    ],
    ids=str,
)
def test_program_preprocesses_like_the_bundle(size, changes):
    preprocess = vitrail.Preprocess(resolution=(24, 20), **changes)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize(size)
    scope = {"image": image, "np": np, "Image": Image}
    exec("\n".join(preprocessing_lines(preprocess)[1:]), scope)  # without the line that opens a file
    np.testing.assert_allclose(
        scope["pixels"][0], preprocess.scale_array(preprocess.crop(image)[None])[0], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("channels", "resize"), [(1, "pad"), (3, "shorter")])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_program_reads_every_image_mode_like_the_bundle(mode, channels, resize, tmp_path):
    preprocess = vitrail.Preprocess(
        resolution=(24, 20), resize=resize, background=(0, 60, 255), mean=(0.5,) * channels, std=(0.5,) * channels
    )
    pixels = np.random.default_rng(0).integers(0, 256, (31, 43, 4), dtype=np.uint8)
    path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
    if mode == "P":
        Image.fromarray(pixels[..., :3]).quantize(16).save(path, transparency=3)
    else:
        Image.fromarray(pixels).convert(mode).save(path)
    scope = {"np": np, "Image": Image, "ImageOps": ImageOps, "sys": SimpleNamespace(argv=["", path])}
    exec("\n".join(preprocessing_lines(preprocess)), scope)
    np.testing.assert_allclose(
        scope["pixels"][0], preprocess.scale_array(preprocess.crop(path)[None])[0], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_program_rejects_more_than_8_bits_in_one_line(dtype, tmp_path):
    Image.fromarray(np.full((31, 43), 999, dtype)).save(tmp_path / "image.tiff")
    scope = {"Image": Image, "ImageOps": ImageOps}
    scope["sys"] = SimpleNamespace(argv=["", tmp_path / "image.tiff"], exit=sys.exit)
    with pytest.raises(SystemExit, match=r"Image must have 8 bits per channel\. Save it as 8-bit PNG first\.$"):
        exec("\n".join(preprocessing_lines(vitrail.Preprocess())), scope)


def test_program_without_image_prints_its_usage_in_one_line(tmp_path):
    text = format_program(vitrail.load(FIXTURE).info, TARGETS["onnx"], "model.onnx", "float32", 1)
    (tmp_path / "run.py").write_text(text)
    result = subprocess.run([sys.executable, tmp_path / "run.py"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "usage: python run.py IMAGE\n")


def test_program_of_a_model_of_four_channels_needs_no_pillow():
    model = vitrail.create("ViT-Pico/2", channels=4, classes=0)
    half = (0.5,) * 4
    bundle = vitrail.Bundle(model=model, preprocess=vitrail.Preprocess(resolution=(8, 8), mean=half, std=half))
    text = format_program(bundle.info, TARGETS["openvino"], "model.xml", "float32", 1)
    assert required_packages(bundle.preprocess, TARGETS["openvino"]) == ["numpy", "openvino"]
    assert text.startswith('"""Print the features of an image: python run.py PIXELS.npy\n')
    assert "PIL" not in text


def test_fixed_batch_is_the_input_shape_of_the_model(bundle, call, tmp_path):
    for target, model in (("onnx", "model.onnx"), ("triton", "vit-pico-2/1/model.onnx")):
        result = call("export", bundle, tmp_path / target, "--to", target, "--batch", "3", "--json")
        assert (result.returncode, json.loads(result.stdout)["pictures"]) == (0, 39), result.stderr
        session = import_engine_package("onnxruntime", "onnx").InferenceSession(tmp_path / target / model)
        assert [port.shape for port in (*session.get_inputs(), *session.get_outputs())] == [
            [3, 1, 8, 8],
            [3, 3],
            [3, 16],
        ]
    Image.new("L", (9, 9), 99).save(tmp_path / "image.png")
    assert len(run_program(tmp_path / "onnx", tmp_path / "image.png")) == 3
    settings = (tmp_path / "triton" / "vit-pico-2" / "config.pbtxt").read_text()
    assert "max_batch_size: 0\n" in settings
    assert "dims: [ 3, 1, 8, 8 ]" in settings


def test_int8_export_has_integer_products_and_readme_names_precision(bundle, call, tmp_path):
    result = call("export", bundle, tmp_path / "out", "--to", "onnx", "--precision", "int8", "--json")
    proof = json.loads(result.stdout)
    assert (proof["precision"], proof["same_answers"] >= 38) == ("int8", True)
    operators = {node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
    assert {"MatMulInteger", "DynamicQuantizeLinear"} <= operators
    assert "The model computes in int8." in (tmp_path / "out" / "README.md").read_text()


def test_openvino_int8_program_sets_no_precision_hint(bundle, call, tmp_path):
    result = call("export", bundle, tmp_path / "out", "--to", "openvino", "--precision", "int8", "--json")
    proof = json.loads(result.stdout)
    assert (proof["precision"], proof["same_answers"] >= 38) == ("int8", True)
    assert proof["max_logit_difference"] > 1e-4
    assert 'compile_model("model.xml", "CPU", {})' in (tmp_path / "out" / "README.md").read_text()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / "image.png")
    printed = run_program(tmp_path / "out", tmp_path / "image.png")
    (expected,) = vitrail.Classifier(bundle, engine="openvino", precision="int8").predict([tmp_path / "image.png"])
    assert [float(score) for score, _ in printed] == pytest.approx(
        [prediction["score"] for prediction in expected], abs=1e-4
    )


def test_openvino_export_keeps_float32_and_stores_metadata(bundle, call, tmp_path):
    assert call("export", bundle, tmp_path / "out", "--to", "openvino", "--batch", "2").returncode == 0
    model = import_engine_package("openvino", "openvino").Core().read_model(tmp_path / "out" / "model.xml")
    assert list(model.input("pixel_values").get_shape()) == [2, 1, 8, 8]
    assert json.loads(model.get_rt_info(["vitrail", "labels"]).astype(str)) == ["cat", "dog", "새"]
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    assert not [node for node in constants if node.get_element_type().get_type_name() == "f16"]


def reference_logits(path, images):
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(str(path)).run(["logits"], {"pixel_values": images})[0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_every_family_exports_to_every_runtime(name, tmp_path, call):
    model = redraw(vitrail.create(name, classes=5, **MODELS[name]), std=0.05).eval()
    half = (0.5,) * model.config.channels
    preprocess = vitrail.Preprocess(resolution=model.config.resolution, mean=half, std=half)
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess), tmp_path / "one")
    ENGINES["onnx"].prepare(tmp_path / "one", "float32")  # exports reuse its graph, the slowest step
    for target in ("onnx", "openvino", "torch"):
        result = call("export", tmp_path / "one", tmp_path / target, "--to", target, "--json")
        assert result.returncode == 0, result.stderr
        proof = json.loads(result.stdout)
        assert (proof["pictures"], proof["same_answers"]) == (40, 40)
        assert proof["max_logit_difference"] < 1e-4
    images = preprocess.scale_array(crop_embedded_images(preprocess, 3))
    path = tmp_path / "onnx" / "model.onnx"
    openvino = (
        import_engine_package("openvino", "openvino")
        .Core()
        .compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    )
    runtime = import_engine_package("onnxruntime", "onnx").InferenceSession(path)
    (expected,) = runtime.run(["logits"], {"pixel_values": images})
    for logits in (openvino({"pixel_values": images})["logits"], reference_logits(path, images)):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * max(np.abs(expected).max(), 1))


# Triton


def triton_schema():
    """Triton's own message ModelConfig. No extra installs its client, which needs protobuf below 7."""
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="tritonclient is not installed")
    return messages.ModelConfig()


def partial_schema():
    """The fields of the message ModelConfig that vitrail writes, with their published names."""
    file = descriptor_pb2.FileDescriptorProto(name="part.proto", package="part", syntax="proto3")
    data_types = file.enum_type.add(name="DataType")
    for number, name in enumerate(("TYPE_INVALID", "TYPE_FP32")):
        data_types.value.add(name=name, number=number)
    string_type, int_type, repeated, single = 9, 3, 3, 1
    port = [
        ("name", string_type, single, ""),
        ("data_type", 14, single, ".part.DataType"),
        ("dims", int_type, repeated, ""),
    ]
    for name, fields in {
        "ModelInput": port,
        "ModelOutput": [*port, ("label_filename", string_type, single, "")],
        "ModelDynamicBatching": [],
        "ModelConfig": [
            ("name", string_type, single, ""),
            ("backend", string_type, single, ""),
            ("max_batch_size", 5, single, ""),
            ("input", 11, repeated, ".part.ModelInput"),
            ("output", 11, repeated, ".part.ModelOutput"),
            ("dynamic_batching", 11, single, ".part.ModelDynamicBatching"),
        ],
    }.items():
        message = file.message_type.add(name=name)
        for number, (field, field_type, label, type_name) in enumerate(fields, 1):
            message.field.add(name=field, number=number, type=field_type, label=label, type_name=type_name or None)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("part.ModelConfig"))()


@pytest.mark.parametrize("schema", [triton_schema, partial_schema])
def test_triton_schema_parses_config(schema, bundle, call, tmp_path):
    assert call("export", bundle, tmp_path / "out", "--to", "triton").returncode == 0
    config = text_format.Parse((tmp_path / "out" / "vit-pico-2" / "config.pbtxt").read_text(), schema())
    assert (config.name, config.backend, config.max_batch_size) == ("vit-pico-2", "onnxruntime", 64)
    assert [(port.name, list(port.dims)) for port in (*config.input, *config.output)] == [
        ("pixel_values", [1, 8, 8]),
        ("logits", [3]),
        ("features", [16]),
    ]
    assert [port.label_filename for port in config.output] == ["labels.txt", ""]


# Wrong use and full disks


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "coreml"], "Target must be one of onnx, openvino, torch, triton, got 'coreml'."),
        (
            ["--to", "torch", "--precision", "int8"],
            "Precision must be one that target torch has (float32), got 'int8'.",
        ),
        (["--to", "onnx", "--precision", "auto"], "Precision must be one that target onnx has (float32, int8), got"),
        (["--to", "onnx", "--batch", "many"], "Batch must be a number of images or any, got 'many'."),
        (["--to", "onnx", "--batch", "0"], "Batch must be an integer from 1 to 4,096, got 0."),
        ([], "vitrail export needs --to"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_of_export_gives_one_line_error_and_writes_nothing(bundle, call, tmp_path, flags, message):
    result = call("export", bundle, tmp_path / "out", *flags)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_existing_output_is_rejected_or_replaced_completely(bundle, call, tmp_path):
    out = tmp_path / "out"
    assert call("export", bundle, out, "--to", "onnx").returncode == 0
    result = call("export", bundle, out, "--to", "torch")
    assert (result.returncode, "Output must not exist yet" in result.stderr) == (2, True)
    assert call("export", bundle, out, "--to", "torch", "--force").returncode == 0
    assert files_of(out) == FILES | MODEL_FILES["torch"]
    (out / "notes.txt").write_text("what I found")
    result = call("export", bundle, out, "--to", "onnx", "--force")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert f"Output must contain only files that vitrail wrote, got '{out / 'notes.txt'}' in it." in result.stderr
    assert files_of(out) == FILES | MODEL_FILES["torch"] | {"notes.txt"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("x")
    result = call("export", bundle, tmp_path / "mine", "--to", "onnx", "--force")
    assert (result.returncode, files_of(tmp_path / "mine")) == (2, {"precious.txt"})


def test_missing_package_gives_one_line_error(bundle, call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    result = call("export", bundle, tmp_path / "out", "--to", "openvino")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "needs the 'openvino' extra (openvino is missing)" in result.stderr


@pytest.mark.parametrize("target", [*TARGETS])
def test_full_disk_leaves_no_files(target, bundle, call, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))
    try:
        result = call("export", bundle, tmp_path / "out", "--to", target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (result.returncode, result.stdout) == (1, "")
    start_line, error_line = result.stderr.splitlines()
    assert start_line == f"writing {tmp_path / 'out'}, and comparing it with torch on 40 images"
    assert re.search("File too large|disk full", error_line)
    assert not list(tmp_path.iterdir())


def test_export_that_predicts_differently_is_not_written(bundle, call, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.inference.proof.TOLERANCE", -1.0)
    result = call("export", bundle, tmp_path / "out", "--to", "onnx")
    assert result.returncode == 1
    assert "predicts 0 of 40 images differently from torch" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_line_breaks_in_labels_are_replaced(tmp_path):
    from vitrail.inference.targets.base import write_labels

    loaded = vitrail.load(FIXTURE)
    bundle = vitrail.Bundle(model=loaded.model, preprocess=loaded.preprocess, labels=("a\nb", "c\u2028d", "e"))
    write_labels(tmp_path / "labels.txt", bundle.info)
    assert (tmp_path / "labels.txt").read_text(encoding="utf-8") == "a b\nc d\ne\n"


@pytest.mark.slow
def test_export_merges_tokens_as_the_flag_says(tmp_path, call):
    command = ("export", "fashion", tmp_path / "out", "--to", "onnx", "--data", "fashion-40", "--json")
    proof = json.loads(call(*command, "--merge", "0,4,0,0,0").stdout)
    (cost,) = proof["merging"]["curve"]
    assert cost["merge"] == proof["merging"]["merge"] == [0, 4, 0, 0, 0]
    assert (cost["count"], proof["same_answers"]) == (40, 40)
    assert proof["merging"]["bundle"] == fingerprint(check_folder("fashion")) != proof["bundle"]


@pytest.mark.slow
def test_export_with_merge_auto_stays_within_tolerance(tmp_path, call):
    command = ("export", "fashion", tmp_path / "out", "--to", "onnx", "--data", "fashion-40", "--json")
    proof = json.loads(call(*command, "--merge", "auto", "--tolerance", "0.05").stdout)
    first, last = (proof["merging"]["curve"][index] for index in (0, -1))
    assert (first["changed"], first["count"]) == (0, 40)
    assert last["macs"] < first["macs"] / 2
    assert 0 <= last["share"] <= 0.05
    # A layer cannot merge more than half of its tokens.
    assert all(count <= setting for count, setting in zip(proof["merging"]["merge"], last["merge"], strict=True))
    assert proof["same_answers"] == 40
    assert (
        "of 40 predictions differ from the model without merging on fashion-40"
        in (tmp_path / "out" / "README.md").read_text()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--merge", "auto"], "Merge auto must have images"),
        (["--merge", "some"], "Merge must be auto, a number"),
        (["--merge", "1,2"], "one for each of the 5 layers"),
        (["--data", "fashion-40"], "Data must be given with --merge"),
        (["--merge", "auto", "--data", "fashion-40", "--tolerance", "2"], "Tolerance"),
    ],
)
def test_wrong_merge_flag_is_rejected(options, message, tmp_path, call):
    result = call("export", "fashion", tmp_path / "out", "--to", "onnx", *options)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_export_never_overwrites_a_bundle(bundle, tmp_path, call):
    for output in (bundle, bundle / "out", bundle.parent):
        result = call("export", bundle, output, "--to", "onnx", "--force")
        assert result.returncode == 2
        assert "utput must" in result.stderr
    other = tmp_path / "other"
    shutil.copytree(FIXTURE, other)
    result = call("export", bundle, other, "--to", "onnx", "--force")
    assert "new or an earlier export" in result.stderr
    assert (other / "model.safetensors").exists()
    assert (bundle / "model.safetensors").exists()


def test_export_next_to_bundle_is_not_used_as_model_file(tmp_path, call):
    bundle = tmp_path / "pico"
    shutil.copytree(FIXTURE, bundle)
    options = ("--to", "onnx", "--precision", "int8", "--batch", "2")
    assert call("export", bundle, tmp_path / "pico.onnx", *options).returncode == 0
    assert json.loads((tmp_path / "pico.onnx" / "proof.json").read_text())["pictures"] == 40
    from vitrail.inference.registry import ENGINES

    folder = ENGINES["onnx"].prepare(bundle, "float32")
    assert json.loads((folder / "proof.json").read_text())["precision"] == "float32"
