"""`vitrail export`: each target proved, read by others, and run by the program in its README without vitrail."""

import json
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
from vitrail.lab.exact import redraw

FILES = {"README.md", "labels.txt", "manifest.json", "preprocess.json", "proof.json"}
OWN = {
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
    """A bundle whose ONNX graph is kept, so that exports take it from there."""
    folder = tmp_path_factory.mktemp("bundles") / "pico"
    shutil.copytree(FIXTURE, folder)
    ENGINES["onnx"].prepare(folder, "float32")
    return folder


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def run_readme(folder, image, without):
    """What the program in the README prints, in a process in which some packages cannot be imported."""
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.S)
    assert len([line for line in program.splitlines() if line and "import" not in line]) <= 18
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in without)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys\n{blocked}{program}", str(image)],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.split(" ", 1) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", [*TARGETS])
def test_an_export_is_complete_proved_and_runs_without_vitrail(target, bundle, call, tmp_path):
    out = tmp_path / "out"
    done = call("export", bundle, out, "--to", target, "--json")
    assert done.returncode == 0, done.stderr
    assert files_of(out) == FILES | OWN[target]
    proof = json.loads((out / "proof.json").read_text())
    assert proof == json.loads(done.stdout)
    assert (proof["pictures"], proof["same_answers"], proof["precision"], proof["batch"]) == (40, 40, "float32", "any")
    assert proof["max_logit_difference"] < 1e-5
    assert proof["files"] == {name: checksum(out / name) for name in OWN[target]}
    verify_checksums(out, FILES - {"manifest.json"})
    assert (out / "labels.txt").read_text(encoding="utf-8") == "cat\ndog\n새\n"
    loaded = vitrail.load(bundle)
    assert vitrail.Preprocess.from_json(json.loads((out / "preprocess.json").read_text())) == loaded.preprocess

    pixels = np.random.default_rng(1).integers(0, 256, (5, 6), dtype=np.uint8)
    Image.fromarray(pixels).resize((61, 47)).save(tmp_path / "image.png")
    said = run_readme(out, tmp_path / "image.png", ("vitrail",) if target == "torch" else ("vitrail", "torch"))
    (expected,) = vitrail.Classifier(bundle).predict([tmp_path / "image.png"])
    assert [label for _, label in said] == [one["label"] for one in expected]
    assert [float(score) for score, _ in said] == pytest.approx([one["score"] for one in expected], abs=1e-4)


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
def test_the_program_preprocesses_as_the_bundle_does(size, changes):
    from vitrail.inference.targets.readme import _pixels

    eye = vitrail.Preprocess(resolution=(24, 20), **changes)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize(size)
    scope = {"image": image, "np": np, "Image": Image}
    exec("\n".join(_pixels(eye)[1:]), scope)  # all but the opening of a file
    np.testing.assert_allclose(scope["pixels"][0], eye.scale_array(eye.crop(image)[None])[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("channels", "resize"), [(1, "pad"), (3, "shorter")])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_the_program_reads_any_kind_of_image_as_the_bundle_does(mode, channels, resize, tmp_path):
    from vitrail.inference.targets.readme import _pixels

    eye = vitrail.Preprocess(
        resolution=(24, 20), resize=resize, background=(0, 60, 255), mean=(0.5,) * channels, std=(0.5,) * channels
    )
    pixels = np.random.default_rng(0).integers(0, 256, (31, 43, 4), dtype=np.uint8)
    path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
    if mode == "P":
        Image.fromarray(pixels[..., :3]).quantize(16).save(path, transparency=3)
    else:
        Image.fromarray(pixels).convert(mode).save(path)
    scope = {"np": np, "Image": Image, "ImageOps": ImageOps, "sys": SimpleNamespace(argv=["", path])}
    exec("\n".join(_pixels(eye)), scope)
    np.testing.assert_allclose(scope["pixels"][0], eye.scale_array(eye.crop(path)[None])[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_the_program_refuses_more_than_8_bits_in_one_line(dtype, tmp_path):
    from vitrail.inference.targets.readme import _pixels

    Image.fromarray(np.full((31, 43), 999, dtype)).save(tmp_path / "image.tiff")
    scope = {"Image": Image, "ImageOps": ImageOps}
    scope["sys"] = SimpleNamespace(argv=["", tmp_path / "image.tiff"], exit=sys.exit)
    with pytest.raises(SystemExit, match=r"Image must have 8 bits per channel\. Convert it first\.$"):
        exec("\n".join(_pixels(vitrail.Preprocess())), scope)


def test_a_fixed_batch_is_what_the_model_takes(bundle, call, tmp_path):
    for target, model in (("onnx", "model.onnx"), ("triton", "vit-pico-2/1/model.onnx")):
        done = call("export", bundle, tmp_path / target, "--to", target, "--batch", "3", "--json")
        assert (done.returncode, json.loads(done.stdout)["pictures"]) == (0, 39), done.stderr
        session = import_engine_package("onnxruntime", "onnx").InferenceSession(tmp_path / target / model)
        assert [port.shape for port in (*session.get_inputs(), *session.get_outputs())] == [
            [3, 1, 8, 8],
            [3, 3],
            [3, 16],
        ]
    Image.new("L", (9, 9), 99).save(tmp_path / "image.png")
    assert len(run_readme(tmp_path / "onnx", tmp_path / "image.png", ("vitrail", "torch"))) == 3
    settings = (tmp_path / "triton" / "vit-pico-2" / "config.pbtxt").read_text()
    assert "max_batch_size: 0\n" in settings
    assert "dims: [ 3, 1, 8, 8 ]" in settings


def test_int8_is_written_and_said(bundle, call, tmp_path):
    done = call("export", bundle, tmp_path / "out", "--to", "onnx", "--precision", "int8", "--json")
    proof = json.loads(done.stdout)
    assert (proof["precision"], proof["same_answers"] >= 38) == ("int8", True)
    kinds = {node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
    assert {"MatMulInteger", "DynamicQuantizeLinear"} <= kinds
    assert "The model computes in int8." in (tmp_path / "out" / "README.md").read_text()


def test_the_program_of_openvino_in_int8_leaves_the_rest_to_it(bundle, call, tmp_path):
    done = call("export", bundle, tmp_path / "out", "--to", "openvino", "--precision", "int8", "--json")
    proof = json.loads(done.stdout)
    assert (proof["precision"], proof["same_answers"] >= 38) == ("int8", True)
    assert proof["max_logit_difference"] > 1e-4
    assert 'compile_model("model.xml", "CPU", {})' in (tmp_path / "out" / "README.md").read_text()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / "image.png")
    said = run_readme(tmp_path / "out", tmp_path / "image.png", ("vitrail", "torch"))
    (expected,) = vitrail.Classifier(bundle, engine="openvino", precision="int8").predict([tmp_path / "image.png"])
    assert [float(score) for score, _ in said] == pytest.approx([one["score"] for one in expected], abs=1e-4)


def test_openvino_keeps_float32_and_says_what_it_is(bundle, call, tmp_path):
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
    eye = vitrail.Preprocess(resolution=model.config.resolution, mean=half, std=half)
    vitrail.save(vitrail.Bundle(model=model, preprocess=eye), tmp_path / "one")
    ENGINES["onnx"].prepare(tmp_path / "one", "float32")  # exports take its graph, which takes the most time
    for target in ("onnx", "openvino", "torch"):
        done = call("export", tmp_path / "one", tmp_path / target, "--to", target, "--json")
        assert done.returncode == 0, done.stderr
        proof = json.loads(done.stdout)
        assert (proof["pictures"], proof["same_answers"]) == (40, 40)
        assert proof["max_logit_difference"] < 1e-4
    images = eye.scale_array(crop_embedded_images(eye, 3))
    path = tmp_path / "onnx" / "model.onnx"
    openvino = (
        import_engine_package("openvino", "openvino")
        .Core()
        .compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    )
    runtime = import_engine_package("onnxruntime", "onnx").InferenceSession(path)
    (expected,) = runtime.run(["logits"], {"pixel_values": images})
    for found in (openvino({"pixel_values": images})["logits"], reference_logits(path, images)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * max(np.abs(expected).max(), 1))


# Triton


def their_schema():
    """Triton's message ModelConfig. No extra installs its client, which pins protobuf below 7."""
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="tritonclient is not installed")
    return messages.ModelConfig()


def part_of_schema():
    """The part of it that we write, by the published field names."""
    file = descriptor_pb2.FileDescriptorProto(name="part.proto", package="part", syntax="proto3")
    kinds = file.enum_type.add(name="DataType")
    for number, name in enumerate(("TYPE_INVALID", "TYPE_FP32")):
        kinds.value.add(name=name, number=number)
    texts, numbers, many, single = 9, 3, 3, 1
    port = [("name", texts, single, ""), ("data_type", 14, single, ".part.DataType"), ("dims", numbers, many, "")]
    for name, fields in {
        "ModelInput": port,
        "ModelOutput": [*port, ("label_filename", texts, single, "")],
        "ModelDynamicBatching": [],
        "ModelConfig": [
            ("name", texts, single, ""),
            ("backend", texts, single, ""),
            ("max_batch_size", 5, single, ""),
            ("input", 11, many, ".part.ModelInput"),
            ("output", 11, many, ".part.ModelOutput"),
            ("dynamic_batching", 11, single, ".part.ModelDynamicBatching"),
        ],
    }.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, label, of) in enumerate(fields, 1):
            message.field.add(name=field, number=number, type=kind, label=label, type_name=of or None)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("part.ModelConfig"))()


@pytest.mark.parametrize("schema", [their_schema, part_of_schema])
def test_triton_can_parse_the_repository(schema, bundle, call, tmp_path):
    assert call("export", bundle, tmp_path / "out", "--to", "triton").returncode == 0
    config = text_format.Parse((tmp_path / "out" / "vit-pico-2" / "config.pbtxt").read_text(), schema())
    assert (config.name, config.backend, config.max_batch_size) == ("vit-pico-2", "onnxruntime", 64)
    assert [(port.name, list(port.dims)) for port in (*config.input, *config.output)] == [
        ("pixel_values", [1, 8, 8]),
        ("logits", [3]),
        ("features", [16]),
    ]
    assert [port.label_filename for port in config.output] == ["labels.txt", ""]


# Wrong use, and disks


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_wrong_use_is_one_line_and_nothing_is_written(bundle, call, tmp_path, words, message):
    done = call("export", bundle, tmp_path / "out", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_refused_or_replaced_as_a_whole(bundle, call, tmp_path):
    out = tmp_path / "out"
    assert call("export", bundle, out, "--to", "onnx").returncode == 0
    done = call("export", bundle, out, "--to", "torch")
    assert (done.returncode, "Output must not exist yet" in done.stderr) == (2, True)
    assert call("export", bundle, out, "--to", "torch", "--force").returncode == 0
    assert files_of(out) == FILES | OWN["torch"]
    (out / "notes.txt").write_text("what I found")
    done = call("export", bundle, out, "--to", "onnx", "--force")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"Output must contain only files that vitrail wrote, got '{out / 'notes.txt'}' in it." in done.stderr
    assert files_of(out) == FILES | OWN["torch"] | {"notes.txt"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("x")
    done = call("export", bundle, tmp_path / "mine", "--to", "onnx", "--force")
    assert (done.returncode, files_of(tmp_path / "mine")) == (2, {"precious.txt"})


def test_a_missing_package_is_one_line(bundle, call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    done = call("export", bundle, tmp_path / "out", "--to", "openvino")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "needs the 'openvino' extra (openvino is missing)" in done.stderr


@pytest.mark.parametrize("target", [*TARGETS])
def test_a_full_disk_leaves_nothing(target, bundle, call, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))
    try:
        done = call("export", bundle, tmp_path / "out", "--to", target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (done.returncode, done.stdout) == (1, "")
    begun, failed = done.stderr.splitlines()
    assert begun == f"writing {tmp_path / 'out'}, and comparing it with torch on 40 images"
    assert re.search("File too large|disk full", failed)
    assert not list(tmp_path.iterdir())


def test_what_answers_otherwise_is_not_written(bundle, call, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.inference.proof.TOLERANCE", -1.0)
    done = call("export", bundle, tmp_path / "out", "--to", "onnx")
    assert done.returncode == 1
    assert "predicts 0 of 40 images differently from torch" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_labels_are_lines_whatever_they_hold(tmp_path):
    from vitrail.inference.targets.base import write_labels

    loaded = vitrail.load(FIXTURE)
    strange = vitrail.Bundle(model=loaded.model, preprocess=loaded.preprocess, labels=("a\nb", "c\u2028d", "e"))
    write_labels(tmp_path / "labels.txt", strange.info)
    assert (tmp_path / "labels.txt").read_text(encoding="utf-8") == "a b\nc d\ne\n"


@pytest.mark.slow
def test_an_export_merges_as_many_tokens_as_are_given(tmp_path, call):
    words = ("export", "fashion", tmp_path / "out", "--to", "onnx", "--data", "fashion-40", "--json")
    proof = json.loads(call(*words, "--merge", "0,4,0,0,0").stdout)
    (price,) = proof["merging"]["curve"]
    assert price["merge"] == proof["merging"]["merge"] == [0, 4, 0, 0, 0]
    assert (price["count"], proof["same_answers"]) == (40, 40)
    assert proof["merging"]["bundle"] == fingerprint(check_folder("fashion")) != proof["bundle"]


@pytest.mark.slow
def test_an_export_merges_as_many_tokens_as_a_search_finds(tmp_path, call):
    words = ("export", "fashion", tmp_path / "out", "--to", "onnx", "--data", "fashion-40", "--json")
    proof = json.loads(call(*words, "--merge", "auto", "--tolerance", "0.05").stdout)
    first, last = (proof["merging"]["curve"][at] for at in (0, -1))
    assert (first["changed"], first["count"]) == (0, 40)
    assert last["macs"] < first["macs"] / 2
    assert 0 <= last["share"] <= 0.05
    # A layer cannot merge more than half of what earlier ones leave.
    assert all(done <= asked for done, asked in zip(proof["merging"]["merge"], last["merge"], strict=True))
    assert proof["same_answers"] == 40
    assert (
        "of 40 answers differ from the model without merging on fashion-40"
        in (tmp_path / "out" / "README.md").read_text()
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--merge", "auto"], "Merge auto must have images"),
        (["--merge", "some"], "Merge must be auto, a number"),
        (["--merge", "1,2"], "one for each of the 5 layers"),
        (["--data", "fashion-40"], "Data must be given with --merge"),
        (["--merge", "auto", "--data", "fashion-40", "--tolerance", "2"], "Tolerance"),
    ],
)
def test_a_wrong_merge_is_one_line(options, words, tmp_path, call):
    refused = call("export", "fashion", tmp_path / "out", "--to", "onnx", *options)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert not (tmp_path / "out").exists()


def test_an_export_never_touches_the_bundle(bundle, tmp_path, call):
    for place in (bundle, bundle / "out", bundle.parent):
        refused = call("export", bundle, place, "--to", "onnx", "--force")
        assert refused.returncode == 2
        assert "utput must" in refused.stderr
    other = tmp_path / "other"
    shutil.copytree(FIXTURE, other)
    refused = call("export", bundle, other, "--to", "onnx", "--force")
    assert "new or an earlier export" in refused.stderr
    assert (other / "model.safetensors").exists()
    assert (bundle / "model.safetensors").exists()


def test_an_export_beside_the_bundle_is_not_taken_for_the_engines_file(tmp_path, call):
    bundle = tmp_path / "pico"
    shutil.copytree(FIXTURE, bundle)
    options = ("--to", "onnx", "--precision", "int8", "--batch", "2")
    assert call("export", bundle, tmp_path / "pico.onnx", *options).returncode == 0
    assert json.loads((tmp_path / "pico.onnx" / "proof.json").read_text())["pictures"] == 40
    from vitrail.inference.registry import ENGINES

    folder = ENGINES["onnx"].prepare(bundle, "float32")
    assert json.loads((folder / "proof.json").read_text())["precision"] == "float32"
