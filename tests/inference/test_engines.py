"""Engines and precisions: their outputs, their model files, the choice of `auto`, benchmarks and `vitrail bench`."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from PIL import Image

import vitrail
from tests.bundles.test_bundle import FIXTURE, make
from vitrail.core.errors import CorruptFileError, MissingError, UnprovedError, UsageError, VitrailError
from vitrail.core.files import checksum, write_json
from vitrail.core.intervals import wilson_interval
from vitrail.inference import benchmark_store, measure, model_files, openvino_engine, select
from vitrail.inference import build_model_file as build_module
from vitrail.inference import engine as engine_module
from vitrail.inference.benchmark_store import Agreement, BenchmarkStore, Refusal, Speed, Workload
from vitrail.inference.engine import EngineChoice, EngineRequest, batch_for, import_engine_package
from vitrail.inference.model_files import FORMAT, fingerprint
from vitrail.inference.onnx_engine import OnnxEngine
from vitrail.inference.openvino_engine import OpenvinoEngine
from vitrail.inference.proof import crop_embedded_images, run_engine
from vitrail.inference.quantise import quantise, round_weights
from vitrail.inference.registry import ENGINES, PRECISIONS
from vitrail.inference.select import choose_engine, list_choices
from vitrail.inference.targets.base import export
from vitrail.lab.exact import redraw

EXACT = [EngineChoice(name, "float32") for name in ("torch", "onnx", "openvino")]
INT8 = EngineChoice("onnx", "int8")
ROUNDED = [INT8, EngineChoice("openvino", "int8")]
WORKLOAD = Workload(32, 2, 1)


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    """Folder with the user's proofs of the model files of `built_bundle`."""
    return tmp_path_factory.mktemp("proofs") / "proved"


@pytest.fixture(autouse=True)
def home(tmp_path, built_bundle, proved, monkeypatch):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(model_files, "_own_proofs", {})
    shutil.copytree(proved, tmp_path / "home" / "proved")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def built_bundle(tmp_path_factory, proved):
    """A bundle with the model files of all engines, built once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_HOME", str(proved.parent))
        return build_model_files(tmp_path_factory.mktemp("bundles") / "pico")


def build_model_files(folder):
    """Copy a bundle to a folder, and build the model files of all engines."""
    shutil.copytree(FIXTURE, folder)
    for engine in ("onnx", "openvino"):
        for precision in ENGINES[engine].precisions:
            if not (engine == "openvino" and precision == "bfloat16"):
                ENGINES[engine].prepare(folder, precision)
    return folder


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement. Returns the speed of each engine choice in images/s, and the recorded measurements."""
    calls = []
    speeds = {
        EngineChoice("torch", "float32"): 10,
        EngineChoice("torch", "bfloat16"): 2,
        EngineChoice("onnx", "float32"): 30,
        INT8: 20,
    }

    def fake_measurement(path, choices, workload):
        calls.append((choices, workload))
        return {
            choice: Speed(1 / speeds.get(choice, 20), 3.0 if choice.engine == "torch" else 0.5, 10**8, 1)
            for choice in choices
        }

    monkeypatch.setattr(measure, "measure_speeds", fake_measurement)
    return speeds, calls


def forge_own(folder, **changes):
    """Change fields of the user's own proof of a folder, as if other versions had written it."""
    path = model_files._own_proof_path(json.loads((folder / "proof.json").read_text()))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    model_files._own_proofs.clear()


def forge(folder, **changes):
    """Change fields of a proof, and update the manifest. Returns the forged proof."""
    proof = json.loads((folder / "proof.json").read_text()) | changes
    write_json(folder / "proof.json", proof)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["proof.json"] = checksum(folder / "proof.json")
    write_json(folder / "manifest.json", manifest)
    return proof


def choose(path, engine="auto", precision="float32", tolerance=0.02, **options):
    """Resolve a request under the fixed workload."""
    return choose_engine(EngineRequest(engine, precision, tolerance), str(path), workload=WORKLOAD, **options)


def test_precisions_of_every_engine_start_with_float32():
    assert [*ENGINES] == ["torch", "onnx", "openvino"]
    assert {name: ENGINES[name].precisions for name in ENGINES} == {
        "torch": ("float32", "bfloat16"),
        "onnx": ("float32", "int8"),
        "openvino": ("float32", "bfloat16", "int8"),
    }
    assert {choice.precision for choice in list_choices()} == set(PRECISIONS)


def test_engines_agree_with_torch_and_float32_is_exact(built_bundle):
    pixels = crop_embedded_images(vitrail.load(built_bundle).preprocess, 40)
    outputs = {
        choice: run_engine(ENGINES[choice.engine].open(built_bundle, None, choice.precision), pixels)
        for choice in [*EXACT, *ROUNDED]
    }
    exact = outputs[EXACT[0]]
    for choice in EXACT[1:]:
        np.testing.assert_allclose(outputs[choice].logits, exact.logits, rtol=0, atol=1e-5)
        np.testing.assert_allclose(outputs[choice].features, exact.features, rtol=0, atol=1e-5)
    for choice in ROUNDED:
        gap = np.abs(outputs[choice].logits - exact.logits).max()
        assert 1e-4 < gap < 0.1  # 8 bits are used
    reduced = run_engine(ENGINES["torch"].open(built_bundle, None, "bfloat16"), pixels)
    assert 1e-4 < np.abs(reduced.logits - exact.logits).max() < 0.1
    assert reduced.logits.dtype == np.float32


def test_folder_of_an_export_or_bundle_is_not_overwritten_by_model_file(built_bundle, tmp_path, home):
    """An export or a bundle may have the name of the model file's folder."""
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    export(str(built_bundle), tmp_path / "copy.onnx", "onnx")
    shutil.copytree(built_bundle, tmp_path / "copy.openvino")
    before = {
        file: file.read_bytes() for name in ("copy.onnx", "copy.openvino") for file in (tmp_path / name).iterdir()
    }
    for engine in (OnnxEngine, OpenvinoEngine):
        assert home in engine.prepare(bundle, "float32").parents
    assert all(file.read_bytes() == content for file, content in before.items())


def test_file_shared_by_two_precisions_is_proved_in_float32(built_bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(OpenvinoEngine, "check", classmethod(lambda cls, precision: None))
    monkeypatch.setitem(openvino_engine.HINTS, "bfloat16", openvino_engine.HINTS["float32"])  # for CPUs without it
    folder = OpenvinoEngine.prepare(shutil.copytree(built_bundle, tmp_path / "copy"), "bfloat16")
    proof = json.loads((folder / "proof.json").read_text())
    assert (proof["precision"], proof["same_answers"]) == ("float32", proof["pictures"])
    assert proof["reduced"]["bfloat16"]["pictures"] == proof["pictures"]


def test_file_proved_without_bfloat16_is_proved_again_on_request(built_bundle, tmp_path, monkeypatch, capsys):
    """For example if the bundle comes from a machine whose CPU has no bfloat16."""

    def check(cls, precision):
        if precision == "bfloat16" and lacks_bfloat16:
            raise UsageError("This CPU has no bfloat16.")

    monkeypatch.setattr(OpenvinoEngine, "check", classmethod(check))
    monkeypatch.setitem(openvino_engine.HINTS, "bfloat16", openvino_engine.HINTS["float32"])
    lacks_bfloat16, bundle = True, shutil.copytree(built_bundle, tmp_path / "copy")
    folder = OpenvinoEngine.prepare(bundle, "float32")
    assert json.loads((folder / "proof.json").read_text())["reduced"] == {}
    lacks_bfloat16 = False
    capsys.readouterr()
    assert OpenvinoEngine.prepare(bundle, "bfloat16") == folder
    assert "is not verified in bfloat16 with this version and CPU, and is verified again" in capsys.readouterr().err
    for precision in OpenvinoEngine.precisions_of_file("bfloat16"):
        assert OpenvinoEngine.prepare(bundle, precision) == folder
    assert capsys.readouterr().err == ""


def test_openvino_int8_is_proved_again_on_another_cpu_without_rebuilding(built_bundle, tmp_path, monkeypatch, capsys):
    """Without VNNI only weights are rounded, with VNNI also inputs, so a proof holds for one of them only."""
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    folder = OpenvinoEngine.prepare(bundle, "int8")
    before = json.loads((folder / "proof.json").read_text())
    for module in (model_files, build_module):
        monkeypatch.setattr(module, "processor", lambda: ("another", "0123"))
    monkeypatch.setattr(OpenvinoEngine, "write", None)
    assert OpenvinoEngine.prepare(bundle, "int8") == folder
    assert "is not verified in int8 with this version and CPU, and is verified again" in capsys.readouterr().err
    after = json.loads((folder / "proof.json").read_text())
    assert (after["cpu"], after["files"]) == ("0123", before["files"])
    assert OnnxEngine.prepare(bundle, "int8") == OnnxEngine.prepare(bundle, "int8")  # the same on every CPU
    assert OpenvinoEngine.prepare(bundle, "int8") == folder
    assert capsys.readouterr().err.count("verified again") == 0


@pytest.mark.parametrize("reduced", ["bfloat16", ["bfloat16"], None, 3, {"bfloat16": True}, {"bfloat16": {"cpu": []}}])
def test_invalid_proof_of_reduced_precision_is_replaced(built_bundle, tmp_path, reduced, monkeypatch):
    monkeypatch.setattr(OpenvinoEngine, "check", classmethod(lambda cls, precision: None))
    monkeypatch.setitem(openvino_engine.HINTS, "bfloat16", openvino_engine.HINTS["float32"])
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    folder = OpenvinoEngine.prepare(bundle, "float32")
    forge_own(folder, reduced=reduced)
    assert OpenvinoEngine.prepare(bundle, "bfloat16") == folder
    proof = model_files.read_own_proof(folder)
    assert proof["reduced"]["bfloat16"]["pictures"] == proof["pictures"]


def test_engine_that_cannot_run_its_file_is_left_out(built_bundle, tmp_path, monkeypatch, capsys):
    """For example if an engine has no kernel for this CPU: the file is not corrupt, and other choices are measured."""

    def fail(self, threads, callers):
        raise CorruptFileError(path="model.xml", cause="cannot be used by OpenVINO (no kernel)")

    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    monkeypatch.setattr(OpenvinoEngine, "_get_compiled_model", fail)
    usable, refused = select.find_usable(str(bundle), list_choices())
    assert {choice.engine for choice in usable} == {"torch", "onnx"}
    reason = refused[EngineChoice("openvino", "int8")]
    assert reason.text == (
        "Engine openvino cannot run this model in int8 here: cannot be used by OpenVINO (no kernel)."
    )
    assert reason.lasts


def forge_graph(folder, change):
    """Change the graph of an ONNX folder, and update checksums and proof."""
    path = folder / "model.onnx"
    model = onnx.load(path)
    change(model.graph)
    onnx.save(model, path)
    files = {"model.onnx": checksum(path)}
    proof = json.loads((folder / "proof.json").read_text()) | {"files": files}
    write_json(folder / "proof.json", proof)
    write_json(folder / "manifest.json", {"files": files | {"proof.json": checksum(folder / "proof.json")}})


def negate_logits(graph):
    for node in graph.node:
        node.output[:] = ["hidden" if name == "logits" else name for name in node.output]
    graph.node.append(onnx.helper.make_node("Neg", ["hidden"], ["logits"]))


def flatten_logits(graph):
    for node in graph.node:
        node.output[:] = ["hidden" if name == "logits" else name for name in node.output]
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "flat"))
    graph.node.append(onnx.helper.make_node("Reshape", ["hidden", "flat"], ["logits"]))


@pytest.mark.parametrize("change", [negate_logits, flatten_logits])
def test_forged_model_file_of_another_user_is_never_run(change, built_bundle, tmp_path, call):
    """For example if it comes with an untrusted bundle, with correct checksums and a forged proof."""
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    forge_graph(shutil.copytree(built_bundle.with_name("pico.onnx"), tmp_path / "copy.onnx"), change)
    forged = checksum(tmp_path / "copy.onnx" / "model.onnx")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / "copy.png")
    expected = json.loads(call("predict", bundle, tmp_path / "copy.png", "--json").stdout)["predictions"]
    result = call("predict", bundle, tmp_path / "copy.png", "--json", "--engine", "onnx")
    assert result.returncode == 0, result.stderr
    assert "copy.onnx was not built by this user on this machine and is built again" in result.stderr
    predictions = json.loads(result.stdout)["predictions"]
    assert [row["label"] for row in predictions] == [row["label"] for row in expected]
    assert [row["score"] for row in predictions] == pytest.approx([row["score"] for row in expected], abs=1e-5)
    assert checksum(tmp_path / "copy.onnx" / "model.onnx") != forged


def test_model_file_of_another_user_is_rebuilt_once(built_bundle, tmp_path, home, capsys):
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    shutil.copytree(built_bundle.with_name("pico.onnx"), tmp_path / "copy.onnx")
    assert OnnxEngine.prepare(bundle, "float32") == tmp_path / "copy.onnx"
    assert capsys.readouterr().err == ""  # this user built_bundle the original
    shutil.rmtree(home / "proved")
    for message in ("is built again", ""):
        assert OnnxEngine.prepare(bundle, "float32") == tmp_path / "copy.onnx"
        assert message in capsys.readouterr().err
        model_files._own_proofs.clear()
    (own_proof,) = (home / "proved").iterdir()
    own_proof.write_text("[]")
    OnnxEngine.prepare(bundle, "float32")
    assert "was not built by this user on this machine and is built again" in capsys.readouterr().err


def test_failure_within_an_engine_gives_one_line_error(built_bundle):
    for name in ("onnx", "openvino"):
        engine = ENGINES[name].open(built_bundle)
        with (
            pytest.raises(VitrailError, match=f"Engine {name} cannot compute with") as failure,
            engine.running(1) as run,
        ):
            run(np.zeros((1, 9, 9, 1), np.uint8))
        assert "\n" not in str(failure.value)


@pytest.mark.parametrize("field", ["precision", "files"])
def test_forged_proof_causes_rebuild(built_bundle, tmp_path, field, capsys):
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    folder = OnnxEngine.prepare(bundle, "float32")
    proof = forge(folder, **{field: {"precision": "int8", "files": {"proof.json": "0"}}[field]})
    assert OnnxEngine.prepare(bundle, "float32") == folder
    assert "built again" in capsys.readouterr().err
    assert json.loads((folder / "proof.json").read_text())[field] != proof[field]


def test_bundle_replaced_while_loading_is_loaded_again(built_bundle, tmp_path, monkeypatch):
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    vitrail.save(make(), tmp_path / "two")
    load, reads = build_module.load, []

    def load_and_replace_once(path):
        loaded = load(path)
        reads.append(path)
        if len(reads) == 1:
            shutil.rmtree(bundle)
            shutil.copytree(tmp_path / "two", bundle)
        return loaded

    monkeypatch.setattr(build_module, "load", load_and_replace_once)
    source = build_module.open_source(bundle)
    assert len(reads) == 2
    assert source.key == fingerprint(tmp_path / "two") != fingerprint(built_bundle)


@pytest.mark.parametrize("name", ["onnx", "openvino"])
def test_model_file_replaced_under_open_engine_raises(built_bundle, tmp_path, name, monkeypatch):
    """A session is opened for each number of threads, possibly long after the labels were read."""
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(4)), raising=False
    )  # otherwise 3 and 4 are lowered
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    engine = ENGINES[name].open(bundle)
    pixels = crop_embedded_images(engine.info.preprocess, 2)
    expected = run_engine(engine, pixels).logits
    shutil.copytree(engine.folder, tmp_path / "backup")
    shutil.rmtree(engine.folder)
    shutil.copytree(tmp_path / "backup", engine.folder)  # same content
    with engine.running(3) as run:
        np.testing.assert_allclose(run(pixels).logits, expected, rtol=0, atol=1e-6)
    vitrail.save(make(), bundle, force=True)
    assert ENGINES[name].prepare(bundle, "float32") == engine.folder
    for _ in range(2):
        with pytest.raises(CorruptFileError, match="was replaced or changed while engine"), engine.running(4):
            pass


def test_labels_and_model_file_belong_to_same_bundle_after_replacement(built_bundle, tmp_path, monkeypatch):
    """The bundle is replaced after its labels were read."""
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    other = dataclasses.replace(make(), labels=("x", "y", "z"))
    vitrail.save(other, tmp_path / "two")
    prepare, calls = OnnxEngine.prepare, []

    def replaced(path, precision):
        calls.append(path)
        if len(calls) == 1:
            shutil.rmtree(bundle)
            shutil.copytree(tmp_path / "two", bundle)
        return prepare(path, precision)

    monkeypatch.setattr(OnnxEngine, "prepare", replaced)
    engine = OnnxEngine.open(bundle)
    assert (engine.info.labels, len(calls)) == (("x", "y", "z"), 2)
    monkeypatch.setattr(model_files, "belongs_to_bundle", lambda folder, key: False)
    with pytest.raises(CorruptFileError, match="changed each time it was read"):
        OnnxEngine.open(bundle)


def test_file_of_the_user_named_like_a_lock_is_not_touched(built_bundle, tmp_path, home):
    shutil.rmtree(home)
    home.write_text("no folder")
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    (tmp_path / "copy.lock").write_text("mine")
    assert OnnxEngine.prepare(bundle, "float32") == tmp_path / "copy.onnx"
    assert (tmp_path / "copy.lock").read_text() == "mine"


def test_file_is_proved_again_after_upgrade(built_bundle, tmp_path, capsys, monkeypatch):
    bundle = shutil.copytree(built_bundle, tmp_path / "copy")
    folder = OnnxEngine.prepare(bundle, "float32")
    forge_own(folder, versions={"onnxruntime": "1.0"})
    monkeypatch.setattr(OnnxEngine, "write", None)
    assert OnnxEngine.prepare(bundle, "float32") == folder
    assert "is verified again" in capsys.readouterr().err
    assert json.loads((folder / "proof.json").read_text())["versions"]["onnxruntime"] != "1.0"


def test_int8_splits_calls_into_batches_of_predict(built_bundle, monkeypatch):
    monkeypatch.setattr("vitrail.inference.onnx_engine.batch_for", lambda config: 3)
    engine = OnnxEngine.open(built_bundle, None, "int8")
    pixels = crop_embedded_images(engine.info.preprocess, 8)
    with engine.running(1) as run:
        outputs = run(pixels)
        batch_outputs = [run(pixels[start : start + 3]) for start in range(0, 8, 3)]
    for array, batch_arrays in zip(outputs, zip(*batch_outputs, strict=True), strict=True):
        np.testing.assert_array_equal(array, np.concatenate(batch_arrays))


def test_int8_computes_images_of_large_models_one_by_one(built_bundle, monkeypatch):
    """Another image of the batch has extreme contrast, which would set the scale of all images."""
    pixels = crop_embedded_images(vitrail.load(built_bundle).preprocess, 8) // 8
    pixels[7] = np.indices(pixels.shape[1:]).sum(axis=0) % 2 * 255

    def gap():
        with OnnxEngine.open(built_bundle, None, "int8").running(1) as run:
            return np.abs(run(pixels).logits[0] - run(pixels[:1]).logits[0]).max()

    config = vitrail.load(built_bundle).info.config
    assert gap() > 0
    assert OnnxEngine.depends_on_batch(config, "int8")
    monkeypatch.setattr("vitrail.inference.onnx_engine._SINGLE_IMAGE_MACS", config.macs)
    assert gap() == 0
    assert not OnnxEngine.depends_on_batch(config, "int8")
    assert not OnnxEngine.depends_on_batch(config, "float32")


def test_interrupt_within_exporter_raises_keyboard_interrupt(built_bundle, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("\x1b[96mFailed\x1b[0m to export") from error

    monkeypatch.setattr("torch.onnx.export", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OnnxEngine.prepare(shutil.copytree(FIXTURE, tmp_path / "copy"), "float32")


def test_concurrent_openvino_calls_return_their_own_outputs(built_bundle):
    engine = OpenvinoEngine.open(built_bundle)
    pixels = crop_embedded_images(engine.info.preprocess, 40)
    expected = run_engine(engine, pixels).logits
    from vitrail.data.prefetch import prefetch

    with engine.running(1, 3) as run:
        jobs = (lambda index=index: run(pixels[index : index + 1]).logits.copy() for index in range(40))
        logits = np.concatenate(list(prefetch(jobs, 3, ahead=6)))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-6)


_SIMULTANEOUS_CALLS = """
import sys, threading
from vitrail.inference.registry import ENGINES
from vitrail.inference.proof import crop_embedded_images

path, engine, precision = sys.argv[1:]
sys.setswitchinterval(1e-6)
opened = ENGINES[engine].open(path, None, precision)
pixels, barrier = crop_embedded_images(opened.info.preprocess, 1), threading.Barrier(4)

def begin():
    barrier.wait()
    run(pixels)

with opened.running(1, 4) as run:
    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("choice", [*EXACT, *ROUNDED], ids=str)
def test_simultaneous_first_calls_in_new_process_do_not_hang(choice, built_bundle):
    """Without `first_call_alone`, 9 of 30 processes with OpenVINO hung."""
    for _ in range(60):
        command = [sys.executable, "-c", _SIMULTANEOUS_CALLS, str(built_bundle), *choice]
        subprocess.run(command, check=True, timeout=60, capture_output=True)


@pytest.mark.parametrize(
    ("name", "entered"), [("torch", "scale"), ("onnx", "scale_array"), ("openvino", "scale_array")]
)
def test_first_call_of_an_engine_runs_alone(name, entered, built_bundle, monkeypatch):
    monkeypatch.setattr(engine_module, "_USED", set())
    original, spans = getattr(vitrail.Preprocess, entered), []

    def slow(self, pixels):
        began = time.monotonic()
        time.sleep(0.1)
        spans.append((began, time.monotonic()))
        return original(self, pixels)

    engine = ENGINES[name].open(built_bundle)
    pixels, barrier = crop_embedded_images(engine.info.preprocess, 1), threading.Barrier(4)

    def begin(_):
        barrier.wait()
        return run(pixels)

    monkeypatch.setattr(vitrail.Preprocess, entered, slow)
    with engine.running(1, 4) as run, ThreadPoolExecutor(4) as pool:
        list(pool.map(begin, range(4)))
        list(pool.map(begin, range(4)))
    first, *later = sorted(spans)
    assert all(began >= first[1] for began, _ in later)
    last = sorted(spans)[-4:]
    assert max(began for began, _ in last) < min(ended for _, ended in last)  # later calls run at the same time


_USE_IN_FORKS = """
import multiprocessing, sys
import numpy as np, vitrail

path, engine = sys.argv[1:]
images = [np.full((8, 8), 9 * index, np.uint8) for index in range(12)]
classifier = vitrail.Classifier(path, engine=engine)

def predict(_):
    try:
        return [rows[0]["label"] for rows in classifier.predict(images)]
    except vitrail.VitrailError as error:
        return str(error)

expected = predict(0)
with multiprocessing.get_context("fork").Pool(2) as pool:
    for labels in pool.map(predict, range(4)):
        print("same" if labels == expected else labels)
child = multiprocessing.get_context("fork").Process(target=vars().pop, args=("classifier",))
child.start()
child.join()
print(child.exitcode)
"""


@pytest.mark.parametrize("name", ["onnx", "openvino"])
def test_fork_predicts_the_same_or_gives_one_line_error(name, built_bundle):
    command = [sys.executable, "-W", "ignore", "-c", _USE_IN_FORKS, str(built_bundle), name]
    result = subprocess.run(command, timeout=120, capture_output=True, text=True, check=True)
    *rows, exit_code = result.stdout.splitlines()
    assert (len(rows), len({*rows}), exit_code) == (4, 1, "0")
    if name != "openvino":
        assert rows[0] == "same"
        return
    assert rows[0].startswith("Engine openvino must be used in a process that was not forked from one that has used it")
    assert 'Start processes with multiprocessing.get_context("spawn")' in rows[0]


def test_more_threads_than_cores_are_lowered_with_one_note(built_bundle, monkeypatch, capsys):
    count = len(os.sched_getaffinity(0))
    engine_module._note_thread_limit.cache_clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    assert engine_module.thread_count() == engine_module.thread_count() == count
    assert vitrail.Classifier(built_bundle, threads=4096).threads == count
    assert capsys.readouterr().err.splitlines() == [
        f"note: 999 threads are lowered to {count}, the number of cores",
        f"note: 4,096 threads are lowered to {count}, the number of cores",
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert engine_module.thread_count() == 1


def test_proof_of_int8_reports_differences(built_bundle):
    proof = json.loads((built_bundle.with_name("pico.onnx-int8") / "proof.json").read_text())
    assert (proof["precision"], proof["pictures"], proof["format"]) == ("int8", 40, FORMAT)
    assert proof["same_answers"] >= 38
    assert proof["max_logit_difference"] > proof["mean_logit_difference"] > 1e-4
    assert set(proof["versions"]) == {"vitrail", "torch", "onnxruntime"}
    (name,) = proof["files"]
    assert (name, len(proof["files"][name])) == ("model.onnx", 64)
    sizes = [(built_bundle.with_name(f"pico.{kind}") / "model.onnx").stat().st_size for kind in ("onnx", "onnx-int8")]
    assert sizes[1] < sizes[0] + 10_000  # in a model this small, the graph is larger than the weights


@pytest.mark.parametrize("inputs", [1, 2, 7, 64])
def test_pairs_of_8_bit_weights_cannot_overflow_16_bits(inputs):
    """Without VNNI, a CPU adds two products with activations of up to 255 in 16 bits."""
    weights = np.random.default_rng(0).standard_t(3, (inputs, 50)).astype(np.float32)
    weights[:, 0] = 0
    weights[:, 1] = 1
    weights[:, 2] = 1e-44
    steps, scales = round_weights(weights)
    even = np.pad(steps.astype(int), ((0, inputs % 2), (0, 0))).reshape(-1, 2, 50)
    assert 255 * np.maximum(even, 0).sum(axis=1).max() < 2**15
    assert 255 * np.minimum(even, 0).sum(axis=1).min() >= -(2**15)
    assert (np.abs(steps * scales - weights) <= scales * 0.501).all()
    sevens = np.abs(weights).max(axis=0) / 63
    assert (np.delete(scales, [0, 2]) <= np.delete(sevens, [0, 2]) * 1.01).all()


@pytest.mark.parametrize("inputs", [1, 7, 64])
def test_openvino_weights_are_rounded_to_nearest_8_bit_step(inputs):
    weights = np.random.default_rng(0).standard_t(3, (50, inputs)).astype(np.float32)
    weights[0], weights[1] = 0, 1e-44
    steps, scales = openvino_engine.round_outputs(weights)
    assert (steps.dtype, np.abs(steps.astype(int)).max(axis=1)[2:].min()) == (np.int8, 127)
    assert (np.abs(steps * scales - weights) <= scales * 0.501).all()


@pytest.mark.parametrize(
    ("products", "group"), [([(384, 1536)], 128), ([(192, 768)], 64), ([(196, 256), (512, 2048)], 128), ([(6, 5)], 16)]
)
def test_quantisation_group_is_largest_that_divides_most_inputs(products, group):
    """A Mixer has a few products over patches, which must not slow down all other products."""
    ov, build = import_engine_package("openvino", "openvino"), import_engine_package("openvino.opset13", "openvino")
    inputs = [build.parameter([2, size], np.float32) for size, _ in products]
    outputs = [
        build.matmul(tensor, build.constant(np.ones(shape, np.float32)), transpose_a=False, transpose_b=False)
        for tensor, shape in zip(inputs, products, strict=True)
    ]
    model = ov.Model(outputs, inputs, "products")
    openvino_engine._quantise_weights(ov, model)
    assert model.get_rt_info(["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]).astype(str) == str(group)


def test_openvino_int8_stores_integers_and_predictions_are_independent_of_the_batch(built_bundle):
    engine = OpenvinoEngine.open(built_bundle, None, "int8")
    model = import_engine_package("openvino", "openvino").Core().read_model(engine.folder / "model.xml")
    products = [node for node in model.get_ops() if node.get_type_name() == "MatMul"]
    assert not [node for node in products if node.input_value(1).get_node().get_type_name() == "Constant"]
    scaled = [node for node in products if node.input_value(1).get_node().get_type_name() == "Multiply"]
    constants = [node.input_value(1).get_node().input_value(0).get_node().input_value(0) for node in scaled]
    assert [constant.get_element_type().get_type_name() for constant in constants].count("i8") >= 4  # output, MLP, head
    group = int(model.get_rt_info(["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]).astype(str))
    assert group == engine.info.config.width == 16
    pixels = crop_embedded_images(engine.info.preprocess, 8)
    dark = np.concatenate([pixels[:1], np.zeros_like(pixels[1:]), np.full_like(pixels[:1], 255)])
    with engine.running(1) as run:
        np.testing.assert_allclose(run(dark).logits[0], run(pixels).logits[0], rtol=0, atol=1e-5)


def test_large_token_does_not_reduce_precision_of_other_tokens(tmp_path):
    """After an activation function, each token has its own scale."""
    rng = np.random.default_rng(0)
    helper, float_type = onnx.helper, onnx.TensorProto.FLOAT
    weights = rng.normal(size=(16, 8)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])],
        "mlp",
        [helper.make_tensor_value_info("x", float_type, ["batch", 3, 16])],
        [helper.make_tensor_value_info("y", float_type, ["batch", 3, 8])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "exact.onnx")
    quantise(tmp_path / "exact.onnx", tmp_path / "model.onnx", is_large=False)
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    tokens = np.abs(rng.normal(size=(2, 3, 16))).astype(np.float32)
    tokens[0, 0] *= 1000
    session = import_engine_package("onnxruntime", "onnx").InferenceSession(tmp_path / "model.onnx")
    (outputs,) = session.run(None, {"x": tokens})
    gaps = np.abs(outputs - tokens @ weights)
    assert gaps[0, 0].max() > 1
    assert gaps[1].max() < 0.1  # with one scale for all tokens, outputs of the second image would be wrong by ten


@pytest.mark.slow
def test_deit_in_int8_is_a_third_of_the_size(shared, tmp_path):
    from vitrail.bundles.convert import UserHints, convert

    hints, images = UserHints(None, None, (), None), [np.zeros((32, 32, 3), np.uint8)]
    source = str(shared / "deit-ti16" / "model.safetensors")
    convert(source, tmp_path / "deit", "vitrail", told=hints, verifies=False, images=images)
    sizes = []
    for precision in ("float32", "int8"):
        folder = ENGINES["onnx"].prepare(tmp_path / "deit", precision)
        sizes.append((folder / "model.onnx").stat().st_size)
    assert 3 < sizes[0] / sizes[1] < 4


@pytest.mark.slow
def test_openvino_padding_before_pooling_equals_torch(tmp_path):
    """ONNX Runtime fuses the two incorrectly, which the graph prevents. OpenVINO must compute them correctly, too."""
    model = redraw(vitrail.create("BiT-R50x1", base=32, layers=(1,), resolution=32, classes=5), std=0.05)
    preprocess = vitrail.Preprocess(resolution=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess), tmp_path / "bit")
    pixels = crop_embedded_images(preprocess, 8)
    torchs, openvinos = (
        run_engine(ENGINES[name].open(tmp_path / "bit"), pixels).logits for name in ("torch", "openvino")
    )
    assert np.abs(torchs).max() > 0.1
    np.testing.assert_allclose(openvinos, torchs, rtol=0, atol=1e-5)


# Wrong use


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--precision", "int4"],
            "Precision must be float32, bfloat16, int8 or auto, got 'int4'. Did you mean 'int8'?",
        ),
        (["--precision", "int8"], "Precision must be one that engine torch has (float32, bfloat16), got 'int8'."),
        (
            ["--engine", "onnx", "--precision", "bfloat16"],
            "Precision must be one that engine onnx has (float32, int8), got 'bfloat16'.",
        ),
        (["--precision", "auto", "--tolerance", "2"], "Tolerance must be a number from 0 to 1, got 2.0."),
        (
            ["--engine", "openvin"],
            "Engine must be torch, onnx, openvino or auto, got 'openvin'. Did you mean 'openvino'?",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unknown_engine_or_precision_gives_one_line_error(call, built_bundle, tmp_path, flags, message):
    for command in (["predict", built_bundle, __file__], ["evaluate", built_bundle, "digits"]):
        result = call(*command, *flags)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith(f"vitrail: {message}")
        assert result.stderr.count("\n") == 1


def test_precision_that_the_cpu_lacks_gives_one_line_error(built_bundle, monkeypatch):
    openvino = import_engine_package("openvino", "openvino")
    monkeypatch.setattr(openvino.Core, "get_property", lambda *_: ["FP32", "INT8"])
    with pytest.raises(
        UsageError, match=r"that OpenVINO has on this CPU \(float32, int8\), got 'bfloat16', which this"
    ):
        OpenvinoEngine.open(built_bundle, None, "bfloat16")
    monkeypatch.setattr(openvino.Core, "get_property", lambda *_: ["FP32", "BF16"])
    OpenvinoEngine.check("bfloat16")


def test_engine_that_is_not_installed_gives_one_line_error(built_bundle, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    done = call("predict", built_bundle, __file__, "--engine", "openvino")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Engine openvino needs the 'openvino' extra (openvino is missing)." in done.stderr
    with pytest.raises(MissingError):
        vitrail.Classifier(built_bundle, engine="openvino")


def test_feature_protocols_reject_engine_flag(call, built_bundle):
    done = call("evaluate", built_bundle, "digits", "--protocol", "knn", "--engine", "onnx")
    assert done.returncode == 2
    assert done.stderr == "vitrail: Engine and precision must be used with protocol classify, got knn.\n"


# Stored measurements


def test_auto_includes_start_time_and_stores_measurements(built_bundle, measured, capsys):
    speeds, calls = measured
    assert choose(built_bundle, images=[0] * 10) == EngineChoice("onnx", "float32")
    assert capsys.readouterr().err == (
        "auto: onnx float32 30.0 images/s after 0.5 s (openvino float32 20.0 images/s after 0.5 s,"
        " torch float32 10.0 images/s after 3.0 s)\n"
    )
    assert calls == [(EXACT, WORKLOAD)]
    speeds[EXACT[0]] = 40
    assert choose(built_bundle) == EngineChoice("onnx", "float32")
    assert len(calls) == 1
    choose(built_bundle, threads=1)  # the given workload is used, not the number of threads
    assert len(calls) == 1
    choose_engine(EngineRequest("auto"), str(built_bundle), threads=1)
    assert calls[-1] == (EXACT, Workload(batch_for(vitrail.load(built_bundle).info.config), 1, 1))
    assert choose(built_bundle, images=[0] * 10, device="cuda") == EngineChoice("torch", "float32")
    assert len(calls) == 2
    assert choose_engine(EngineRequest("auto", "auto"), vitrail.load(built_bundle)) == EngineChoice("torch", "float32")
    assert len(calls) == 2


def test_auto_chooses_slowly_starting_fast_engine_only_for_many_images(built_bundle, measured):
    speeds, _ = measured
    speeds[EXACT[0]] = 60
    assert [choose(built_bundle, images=[0] * count) for count in (10, 1000)] == [EXACT[1], EXACT[0]]
    assert choose(built_bundle) == EXACT[0]


def test_measurements_of_other_versions_machines_and_bundles_are_ignored(built_bundle, measured, monkeypatch, tmp_path):
    _, calls = measured
    choose(built_bundle)
    for name, value in (("version_of", lambda package: "99"), ("describe_machine", lambda: "another processor")):
        monkeypatch.setattr(benchmark_store, name, value)
        choose(built_bundle)
    assert len(calls) == 3
    choose(built_bundle)
    assert len(calls) == 3
    vitrail.save(make(), tmp_path / "other")
    monkeypatch.setattr(select, "find_usable", lambda path, choices: (choices, {}))
    choose(tmp_path / "other")
    assert len(calls) == 4


def test_machine_description_contains_cpu_flags_and_versions(monkeypatch):
    assert "torch 2." in benchmark_store.describe_machine()
    assert "openvino 20" in benchmark_store.describe_machine()
    monkeypatch.setattr(
        benchmark_store.Path, "read_text", lambda *_, **__: "model name : A\nflags : fpu avx2\nflags : fpu avx2\n"
    )
    description = benchmark_store.describe_machine()
    monkeypatch.setattr(
        benchmark_store.Path, "read_text", lambda *_, **__: "model name : A\nflags : fpu avx2 avx512_vnni\n"
    )
    assert description.startswith("A (")
    assert description != benchmark_store.describe_machine()


@pytest.mark.parametrize(
    "content", ['{"broken', "[]", '{"%s": 3}', '{"%s": {"speeds": {"%s": {"onnx float32": {"x": 1}}}}}']
)
def test_corrupt_benchmark_file_is_measured_again(built_bundle, measured, content):
    _, calls = measured
    choose(built_bundle)
    path = BenchmarkStore.read(built_bundle)._path
    path.write_text(content.replace("%s", benchmark_store.describe_machine(), 1).replace("%s", str(WORKLOAD)))
    assert choose(built_bundle) == EXACT[1]
    assert len(calls) == 2
    assert BenchmarkStore.read(built_bundle).speeds(WORKLOAD)[EXACT[1]].image == pytest.approx(1 / 30)


def test_changed_digit_in_benchmark_file_is_detected(built_bundle, measured):
    _, calls = measured
    assert choose(built_bundle) == EXACT[1]
    path = BenchmarkStore.read(built_bundle)._path
    text = path.read_text()
    assert text.count('"size": 1') >= 3
    path.write_text(text.replace('"size": 1', '"size": 2', 1))
    assert BenchmarkStore.read(built_bundle).speeds(WORKLOAD) == {}
    assert choose(built_bundle) == EXACT[1]
    assert len(calls) == 2


def test_unwritable_home_gives_one_note_and_measures_each_time(built_bundle, measured, home, capsys, monkeypatch):
    _, calls = measured
    shutil.rmtree(home)
    home.write_text("no folder")
    lacking = {EngineChoice("openvino", "bfloat16"): Refusal("this CPU has none", lasts=True)}
    monkeypatch.setattr(select, "find_usable", lambda path, choices: (choices, lacking))
    for count in (1, 2):
        assert choose(built_bundle) == EXACT[1]
        left_out, *notes = capsys.readouterr().err.splitlines()
        assert left_out == "auto: openvino bfloat16 left out: this CPU has none"
        assert len(calls) == count
        assert notes[0].startswith(
            "note: measurements cannot be stored, so they are repeated next time: Output must be in"
        )
        assert len(notes) == 2


def test_auto_skips_engines_that_are_not_installed(built_bundle, measured, monkeypatch, capsys):
    _, calls = measured
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert choose(built_bundle) == EXACT[1]
    assert capsys.readouterr().err.startswith("auto: openvino left out: not installed\nauto: onnx float32 30.0")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert choose(built_bundle) == EXACT[0]
    assert len(calls) == 1  # torch was measured before
    with pytest.raises(
        UsageError, match=r"an engine has on this machine, got 'int8' for torch, onnx, openvino\. Use float32"
    ):
        choose(built_bundle, precision="int8")


def test_auto_skips_engine_whose_file_cannot_be_built(built_bundle, measured, monkeypatch, capsys, tmp_path):
    def fail(*_):
        raise VitrailError("Writing failed (No space left on device).")

    monkeypatch.setattr(OpenvinoEngine, "prepare", fail)
    assert choose(built_bundle) == EXACT[1]
    assert "auto: openvino float32 left out: Writing failed (No space left on device).\n" in capsys.readouterr().err
    assert BenchmarkStore.read(built_bundle).speeds(WORKLOAD).keys() == {*EXACT[:2]}  # the refusal does not last


def test_measured_choice_is_no_longer_refused(built_bundle):
    store = BenchmarkStore.read(built_bundle)
    store.save_speeds(WORKLOAD, {}, {INT8: Refusal("a library was missing", lasts=True)})
    assert BenchmarkStore.read(built_bundle).refused().keys() == {INT8}
    store.save_speeds(WORKLOAD, {INT8: Speed(0.1, 0.1, 1, 1)})
    assert BenchmarkStore.read(built_bundle).refused() == {}


def test_refusal_because_of_missing_package_does_not_last(built_bundle, monkeypatch):
    def fail(cls, precision):
        raise MissingError("Engine onnx needs a library.")

    monkeypatch.setattr(OnnxEngine, "check", classmethod(fail))
    _, refused = select.find_usable(str(built_bundle), [INT8])
    assert refused == {INT8: Refusal("Engine onnx needs a library.", lasts=False)}


def test_choice_that_fails_its_proof_is_built_once(built_bundle, measured, monkeypatch, capsys):
    prepare, attempts = OnnxEngine.prepare, []

    def refuse(path, precision):
        if precision == "float32":
            return prepare(path, precision)
        attempts.append(precision)
        raise UnprovedError("The model in int8 predicts 30 of 40 images differently from torch.")

    monkeypatch.setattr(OnnxEngine, "prepare", refuse)
    for workload in (WORKLOAD, WORKLOAD, Workload(1, 1, 1)):
        assert choose_engine(EngineRequest("onnx", "auto"), str(built_bundle), workload=workload) == EXACT[1]
    assert attempts == ["int8"]
    assert capsys.readouterr().err.count("auto: onnx int8 left out: The model in int8 predicts 30 of 40") == 1
    assert BenchmarkStore.read(built_bundle).refused().keys() == {INT8}
    monkeypatch.setattr(benchmark_store, "version_of", lambda package: "99")
    choose_engine(EngineRequest("onnx", "auto"), str(built_bundle), workload=WORKLOAD)
    assert attempts == ["int8", "int8"]


def test_simultaneous_measurements_are_all_stored(built_bundle):
    stores = [BenchmarkStore.read(built_bundle) for _ in range(8)]
    speed = {EXACT[0]: Speed(0.1, 0.1, 1, 1)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda batch: stores[batch].save_speeds(Workload(batch, 1, 1), speed), range(8)))
    stores[0].save_agreements({INT8: Agreement("photos", 200, 195)})
    store = BenchmarkStore.read(built_bundle)
    assert [store.speeds(Workload(batch, 1, 1)) for batch in range(8)] == [speed] * 8
    assert store.agreements()[INT8].same == 195


@pytest.mark.parametrize("slow_calls", [range(6, 10), range(8, 99)], ids=["temporarily", "permanently"])
def test_other_load_during_measurement_does_not_change_fastest_engine(slow_calls, monkeypatch, built_bundle):
    """Choices are measured in turn, and the fastest round counts. The engines advance a simulated clock."""
    clock, calls = [0.0], []
    seconds = {EXACT[0]: 0.012, EXACT[1]: 0.010}

    class SimulatedEngine:
        info = vitrail.load(built_bundle).info

        def __init__(self, choice):
            self.choice = choice

        @contextlib.contextmanager
        def running(self, threads, callers):
            def run(pixels):
                calls.append(self.choice)
                clock[0] += seconds[self.choice] * len(pixels) * (4 if len(calls) in slow_calls else 1)

            yield run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    fastest_seconds = measure._time_rounds({choice: SimulatedEngine(choice) for choice in seconds}, Workload(4, 1, 1))
    assert fastest_seconds[EXACT[1]] < fastest_seconds[EXACT[0]]
    assert calls[4:12] == [choice for choice in seconds for _ in range(2)] * 2  # the first call of each is not counted


# Precisions


def test_engine_auto_alone_stays_in_float32(built_bundle, measured):
    speeds, calls = measured
    speeds[INT8] = 1000
    assert choose(built_bundle).precision == "float32"
    assert {choice.precision for choices, _ in calls for choice in choices} == {"float32"}


def test_precision_auto_chooses_fastest_within_tolerance(built_bundle, measured, capsys):
    speeds, _ = measured
    speeds[INT8] = 60
    store = BenchmarkStore.read(built_bundle)
    store.save_agreements({INT8: Agreement("photos", 200, 195)})
    assert choose(built_bundle, precision="auto", tolerance=0.025) == INT8
    low, high = wilson_interval(5, 200)
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("auto: onnx int8 60.0 images/s after 0.5 s (onnx float32 30.0 images/s")
    assert message.endswith(f"; 5 of 200 predictions differ from float32 on photos ({low:.1%} to {high:.1%})")
    assert choose(built_bundle, precision="auto", tolerance=0.02) == EXACT[1]
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("auto: onnx float32 30.0 images/s")
    assert (
        "; not onnx int8: 5 of 200 predictions differ from float32 on photos (1.1% to 5.7%), more than 0.02" in message
    )
    assert choose(built_bundle, "onnx", "auto", 0.025) == INT8


def test_message_of_auto_names_rejected_faster_choice(built_bundle, measured, capsys):
    speeds, _ = measured
    speeds[INT8], slower = 60, EngineChoice("torch", "bfloat16")
    speeds[slower] = 50
    BenchmarkStore.read(built_bundle).save_agreements(
        {INT8: Agreement("photos", 200, 180), slower: Agreement("photos", 200, 199)}
    )
    assert choose(built_bundle, precision="auto") == slower
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("auto: torch bfloat16 50.0 images/s")
    assert "; 1 of 200 predictions differ" in message
    rejection = "; not onnx int8: 20 of 200 predictions differ from float32 on photos (6.6% to 14.9%), more than 0.02"
    assert message.endswith(rejection)


def test_auto_compares_predictions_on_given_images_each_time(built_bundle, measured, capsys):
    speeds, _ = measured
    speeds[INT8] = 60
    images = [np.random.default_rng(index).integers(0, 256, (9, 9), dtype=np.uint8) for index in range(5)]
    assert choose(built_bundle, precision="auto", images=[*images, b"none"], tolerance=1) == INT8
    assert "of 40 predictions differ from float32 on 5 given and 35 embedded images (" in capsys.readouterr().err
    assert BenchmarkStore.read(built_bundle).agreements() == {}  # not stored: the next images may be others
    assert choose(built_bundle, precision="auto", images=images * 9, tolerance=1) == INT8
    assert "of 45 predictions differ from float32 on given images (" in capsys.readouterr().err


def test_auto_without_images_compares_predictions_on_embedded_images(built_bundle, measured, capsys):
    speeds, _ = measured
    speeds[INT8] = 60
    choose(built_bundle, precision="auto", tolerance=1)
    assert "of 40 predictions differ from float32 on embedded images (" in capsys.readouterr().err


def test_precision_slower_than_float32_gives_note(built_bundle, measured, capsys):
    assert choose(built_bundle, "torch", "bfloat16") == EngineChoice("torch", "bfloat16")
    assert capsys.readouterr().err == (
        "note: torch bfloat16 takes 5.0 times as long as float32 on this machine (measured)\n"
    )
    assert choose(built_bundle, "onnx", "float32") == EXACT[1]
    assert capsys.readouterr().err == ""


def test_precision_auto_rejects_model_without_classes(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(select, "find_usable", lambda path, choices: (choices, {}))
    model = vitrail.create("ViT-Pico/2", classes=0)
    vitrail.save(
        vitrail.Bundle(model=model, preprocess=vitrail.Preprocess(resolution=8, mean=(0.5,), std=(0.5,))),
        tmp_path / "x",
    )
    with pytest.raises(UsageError, match="Bundle must have a model that predicts classes"):
        choose(tmp_path / "x", precision="auto")


@pytest.mark.parametrize("choice", [*EXACT, *ROUNDED], ids=str)
def test_evaluate_and_predict_run_every_engine_and_precision(choice, built_bundle, call, tmp_path):
    names = dict(zip("012", vitrail.load(built_bundle).labels, strict=False))
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    labels = np.array([names[str(index % 3)] for index in range(12)])
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    flags = ["--engine", choice.engine, "--precision", choice.precision]
    BenchmarkStore.read(built_bundle).save_speeds(
        Workload(64, 1, 1), dict.fromkeys([choice, EngineChoice(choice.engine, "float32")], Speed(0.1, 0.1, 1, 1))
    )
    result = call("evaluate", built_bundle, tmp_path / "data.npz", *flags, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    scores = json.loads(result.stdout)
    assert scores["count"] == 12
    if choice.precision == "float32":
        expected = vitrail.evaluate(built_bundle, tmp_path / "data.npz").scores
        assert scores["confusion"] == expected["confusion"]
        assert scores["negative_log_likelihood"] == pytest.approx(expected["negative_log_likelihood"], abs=1e-5)
    (predictions,) = vitrail.Classifier(built_bundle, **choice._asdict()).predict(images[:1])
    (expected_predictions,) = vitrail.Classifier(built_bundle).predict(images[:1])
    assert [prediction["score"] for prediction in predictions] == pytest.approx(
        [prediction["score"] for prediction in expected_predictions], abs=0.02
    )


# vitrail bench


def test_bench_measures_every_choice_and_auto_reads_results(built_bundle, call, measured, monkeypatch, tmp_path):
    monkeypatch.setattr("vitrail.evaluation.benchmark.measure_speeds", measure.measure_speeds)
    monkeypatch.setattr("vitrail.evaluation.benchmark.thread_count", lambda _: 2)
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8), dtype=np.uint8)
    labels = np.array([vitrail.load(built_bundle).labels[index % 3] for index in range(30)])
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    result = call("bench", built_bundle, "--data", tmp_path / "data.npz", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    rows = {EngineChoice(row["engine"], row["precision"]): row for row in report["ways"]}
    usable = {choice for choice in list_choices() if choice != EngineChoice("openvino", "bfloat16")}
    assert usable <= rows.keys() | {EngineChoice(row["engine"], row["precision"]) for row in report["left_out"]}
    exact = rows[EXACT[0]]
    assert (exact["images_per_second"], exact["same"], exact["images"], exact["p_value"]) == (10, 30, 30, 1.0)
    expected = vitrail.evaluate(built_bundle, tmp_path / "data.npz")
    assert (exact["accuracy"], exact["accuracy_interval"]) == (expected.accuracy, list(expected.accuracy_interval))
    assert all(rows[choice]["same"] == 30 for choice in EXACT)
    assert "same" not in rows[EngineChoice("torch", "bfloat16")]
    assert "note: predictions of torch bfloat16 are not compared: it is too slow on this machine" in result.stderr
    _, calls = measured
    before = len(calls)
    assert choose(built_bundle, precision="auto") == EXACT[1]
    assert len(calls) == before
    agreement = BenchmarkStore.read(built_bundle).agreements()[INT8]
    assert (agreement.data, agreement.images) == (report["data"], 30)
    assert agreement.right_in_float32 == round(30 * expected.accuracy)
    assert call("export", built_bundle, tmp_path / "out", "--to", "onnx", "--precision", "int8").returncode == 0
    assert json.loads((tmp_path / "out" / "proof.json").read_text())["measured"] == agreement._asdict()

    (tmp_path / "unsorted").mkdir()
    for index, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "unsorted" / f"{index:02}.png")
    result = call("bench", built_bundle, "--data", tmp_path / "unsorted", "--json")
    assert result.returncode == 0, result.stderr
    unsorted = json.loads(result.stdout)["ways"]
    assert [row.get("same") for row in unsorted] == [row.get("same") for row in report["ways"]]
    assert not any("accuracy" in row for row in unsorted)

    table = call("bench", built_bundle).stdout.splitlines()
    assert table[0].split() == [
        "engine",
        "precision",
        "images/s",
        "start",
        "s",
        "memory",
        "MB",
        "size",
        "MB",
        "same",
        "predictions",
    ]
    assert table[1].split()[:3] == ["torch", "float32", "10.0"]
    assert "onnx int8: a prediction may depend on the other images of its batch" in table
    assert [choice for choice in rows if rows[choice]["depends_on_batch"]] == [INT8]
    assert "predictions on fashion-40" in table[-2]


def test_wrong_use_of_bench_gives_one_line_error(call, built_bundle, tmp_path):
    for arguments, message in (
        ([built_bundle, "--data", "nowhere"], "nowhere"),
        ([tmp_path / "none"], "Bundle must be a folder that exists"),
        ([built_bundle, "--threads", "0"], "Threads must be an integer from 1"),
    ):
        result = call("bench", *arguments)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert message in result.stderr


@pytest.mark.slow
def test_real_measurement_is_plausible(built_bundle):
    speeds = measure.measure_speeds(str(built_bundle), [*EXACT, INT8], Workload(8, 2, 1))
    assert all(speed.image < 0.1 < speed.start < 60 for speed in speeds.values())
    assert speeds[EXACT[0]].start > speeds[EXACT[1]].start
    assert speeds[EXACT[0]].memory > 1.3 * speeds[EXACT[1]].memory > 10**7
    assert speeds[EXACT[1]].size == sum(
        file.stat().st_size for file in os.scandir(built_bundle.with_name("pico.onnx")) if file.is_file()
    )
