"""Engines and precisions: what each has, what `auto` takes and why, what is kept, and `vitrail bench`."""

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
from vitrail.inference import build_model_file as engine_making
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
LOAD = Workload(32, 2, 1)


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    """The user's proofs of the files of `made`."""
    return tmp_path_factory.mktemp("proofs") / "proved"


@pytest.fixture(autouse=True)
def home(tmp_path, made, proved, monkeypatch):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(model_files, "_own_proofs", {})
    shutil.copytree(proved, tmp_path / "home" / "proved")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def made(tmp_path_factory, proved):
    """A bundle with the files of all engines, made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_HOME", str(proved.parent))
        return make_all(tmp_path_factory.mktemp("bundles") / "pico")


def make_all(folder):
    """Copy a bundle to a folder, and make the files of all engines."""
    shutil.copytree(FIXTURE, folder)
    for engine in ("onnx", "openvino"):
        for precision in ENGINES[engine].precisions:
            if not (engine == "openvino" and precision == "bfloat16"):
                ENGINES[engine].prepare(folder, precision)
    return folder


@pytest.fixture
def measured(monkeypatch):
    """The speed of each engine choice, images/s, instead of a measurement; and every measurement that was asked for."""
    asked = []
    speeds = {
        EngineChoice("torch", "float32"): 10,
        EngineChoice("torch", "bfloat16"): 2,
        EngineChoice("onnx", "float32"): 30,
        INT8: 20,
    }

    def fake(path, choices, load):
        asked.append((choices, load))
        return {
            choice: Speed(1 / speeds.get(choice, 20), 3.0 if choice.engine == "torch" else 0.5, 10**8, 1)
            for choice in choices
        }

    monkeypatch.setattr(measure, "measure_speeds", fake)
    return speeds, asked


def forge_own(folder, **changes):
    """Change fields of the user's own proof of a folder, as if it were of another time."""
    path = model_files._proof_path(json.loads((folder / "proof.json").read_text()))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    model_files._own_proofs.clear()


def forge(folder, **changes):
    """Change fields of a proof, and make the manifest agree. Returns the forged proof."""
    proof = json.loads((folder / "proof.json").read_text()) | changes
    write_json(folder / "proof.json", proof)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["proof.json"] = checksum(folder / "proof.json")
    write_json(folder / "manifest.json", manifest)
    return proof


def pick(path, engine="auto", precision="float32", tolerance=0.02, **more):
    return choose_engine(EngineRequest(engine, precision, tolerance), str(path), load=LOAD, **more)


def test_every_engine_begins_with_float32_and_states_what_it_has():
    assert [*ENGINES] == ["torch", "onnx", "openvino"]
    assert {name: ENGINES[name].precisions for name in ENGINES} == {
        "torch": ("float32", "bfloat16"),
        "onnx": ("float32", "int8"),
        "openvino": ("float32", "bfloat16", "int8"),
    }
    assert {choice.precision for choice in list_choices()} == set(PRECISIONS)


def test_all_ways_answer_alike_and_float32_is_exact(made):
    pixels = crop_embedded_images(vitrail.load(made).preprocess, 40)
    outputs = {
        choice: run_engine(ENGINES[choice.engine].open(made, None, choice.precision), pixels)
        for choice in [*EXACT, *ROUNDED]
    }
    exact = outputs[EXACT[0]]
    for choice in EXACT[1:]:
        np.testing.assert_allclose(outputs[choice].logits, exact.logits, rtol=0, atol=1e-5)
        np.testing.assert_allclose(outputs[choice].features, exact.features, rtol=0, atol=1e-5)
    for choice in ROUNDED:
        gap = np.abs(outputs[choice].logits - exact.logits).max()
        assert 1e-4 < gap < 0.1  # 8 bits, and really so
    reduced = run_engine(ENGINES["torch"].open(made, None, "bfloat16"), pixels)
    assert 1e-4 < np.abs(reduced.logits - exact.logits).max() < 0.1
    assert reduced.logits.dtype == np.float32


def test_a_folder_that_no_engine_wrote_is_left_alone(made, tmp_path, home):
    """An export or a bundle may have the name that the file of an engine would get."""
    bundle = shutil.copytree(made, tmp_path / "one")
    export(str(made), tmp_path / "one.onnx", "onnx")
    shutil.copytree(made, tmp_path / "one.openvino")
    before = {file: file.read_bytes() for name in ("one.onnx", "one.openvino") for file in (tmp_path / name).iterdir()}
    for engine in (OnnxEngine, OpenvinoEngine):
        assert home in engine.prepare(bundle, "float32").parents
    assert all(file.read_bytes() == content for file, content in before.items())


def test_a_file_of_two_precisions_is_proved_in_the_exact_one(made, tmp_path, monkeypatch):
    monkeypatch.setattr(OpenvinoEngine, "check", classmethod(lambda cls, precision: None))
    monkeypatch.setitem(openvino_engine.HINTS, "bfloat16", openvino_engine.HINTS["float32"])  # for CPUs without it
    folder = OpenvinoEngine.prepare(shutil.copytree(made, tmp_path / "one"), "bfloat16")
    proof = json.loads((folder / "proof.json").read_text())
    assert (proof["precision"], proof["same_answers"]) == ("float32", proof["pictures"])
    assert proof["reduced"]["bfloat16"]["pictures"] == proof["pictures"]


def test_a_file_that_was_proved_without_bfloat16_is_proved_again_for_it(made, tmp_path, monkeypatch, capsys):
    """As when a bundle comes from a machine whose CPU has none."""

    def check(cls, precision):
        if precision == "bfloat16" and lacks:
            raise UsageError("This CPU has none.")

    monkeypatch.setattr(OpenvinoEngine, "check", classmethod(check))
    monkeypatch.setitem(openvino_engine.HINTS, "bfloat16", openvino_engine.HINTS["float32"])
    lacks, bundle = True, shutil.copytree(made, tmp_path / "one")
    folder = OpenvinoEngine.prepare(bundle, "float32")
    assert json.loads((folder / "proof.json").read_text())["reduced"] == {}
    lacks = False
    capsys.readouterr()
    assert OpenvinoEngine.prepare(bundle, "bfloat16") == folder
    assert "is not proved in bfloat16 with this version and CPU, and is proved again" in capsys.readouterr().err
    for precision in OpenvinoEngine.sharing("bfloat16"):
        assert OpenvinoEngine.prepare(bundle, precision) == folder
    assert capsys.readouterr().err == ""


def test_int8_of_openvino_is_proved_again_on_another_cpu_and_the_file_stays(made, tmp_path, monkeypatch, capsys):
    """Without VNNI only weights are rounded, with it inputs, too: one proof does not speak for both."""
    bundle = shutil.copytree(made, tmp_path / "one")
    folder = OpenvinoEngine.prepare(bundle, "int8")
    before = json.loads((folder / "proof.json").read_text())
    for module in (model_files, engine_making):
        monkeypatch.setattr(module, "processor", lambda: ("another", "0123"))
    monkeypatch.setattr(OpenvinoEngine, "write", None)
    assert OpenvinoEngine.prepare(bundle, "int8") == folder
    assert "is not proved in int8 with this version and CPU, and is proved again" in capsys.readouterr().err
    after = json.loads((folder / "proof.json").read_text())
    assert (after["cpu"], after["files"]) == ("0123", before["files"])
    assert OnnxEngine.prepare(bundle, "int8") == OnnxEngine.prepare(bundle, "int8")  # the same on every CPU
    assert OpenvinoEngine.prepare(bundle, "int8") == folder
    assert capsys.readouterr().err.count("proved again") == 0


@pytest.mark.parametrize("reduced", ["bfloat16", ["bfloat16"], None, 3, {"bfloat16": True}, {"bfloat16": {"cpu": []}}])
def test_damaged_proofs_of_reduced_precision_are_not_believed(made, tmp_path, reduced, monkeypatch):
    monkeypatch.setattr(OpenvinoEngine, "check", classmethod(lambda cls, precision: None))
    monkeypatch.setitem(openvino_engine.HINTS, "bfloat16", openvino_engine.HINTS["float32"])
    bundle = shutil.copytree(made, tmp_path / "one")
    folder = OpenvinoEngine.prepare(bundle, "float32")
    forge_own(folder, reduced=reduced)
    assert OpenvinoEngine.prepare(bundle, "bfloat16") == folder
    proof = model_files.own_proof(folder)
    assert proof["reduced"]["bfloat16"]["pictures"] == proof["pictures"]


def test_a_file_that_cannot_be_run_here_is_left_out(made, tmp_path, monkeypatch, capsys):
    """As when an engine has no kernel for this CPU: nothing is damaged, and other engine choices are still measured."""

    def fail(self, threads, callers):
        raise CorruptFileError(path="model.xml", cause="cannot be used by OpenVINO (no kernel)")

    bundle = shutil.copytree(made, tmp_path / "one")
    monkeypatch.setattr(OpenvinoEngine, "_model", fail)
    usable, refused = select.find_usable(str(bundle), list_choices())
    assert {choice.engine for choice in usable} == {"torch", "onnx"}
    reason = refused[EngineChoice("openvino", "int8")]
    assert reason.text == (
        "Engine openvino cannot run this model in int8 here: cannot be used by OpenVINO (no kernel)."
    )
    assert reason.lasts


def forge_graph(folder, change):
    """Change the graph of an ONNX folder; checksums and proof agree with it."""
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


def give_other_shapes(graph):
    for node in graph.node:
        node.output[:] = ["hidden" if name == "logits" else name for name in node.output]
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "flat"))
    graph.node.append(onnx.helper.make_node("Reshape", ["hidden", "flat"], ["logits"]))


@pytest.mark.parametrize("change", [negate_logits, give_other_shapes])
def test_an_engine_file_of_somebody_else_is_never_run(change, made, tmp_path, call):
    """As when it comes beside a stranger's bundle, with right checksums and a forged proof."""
    bundle = shutil.copytree(made, tmp_path / "one")
    forge_graph(shutil.copytree(made.with_name("pico.onnx"), tmp_path / "one.onnx"), change)
    forged = checksum(tmp_path / "one.onnx" / "model.onnx")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / "one.png")
    expected = json.loads(call("predict", bundle, tmp_path / "one.png", "--json").stdout)["predictions"]
    done = call("predict", bundle, tmp_path / "one.png", "--json", "--engine", "onnx")
    assert done.returncode == 0, done.stderr
    assert "one.onnx was not made by this user on this machine and is made again" in done.stderr
    found = json.loads(done.stdout)["predictions"]
    assert [row["label"] for row in found] == [row["label"] for row in expected]
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in expected], abs=1e-5)
    assert checksum(tmp_path / "one.onnx" / "model.onnx") != forged


def test_a_file_that_came_from_another_user_is_made_again_once(made, tmp_path, home, capsys):
    bundle = shutil.copytree(made, tmp_path / "one")
    shutil.copytree(made.with_name("pico.onnx"), tmp_path / "one.onnx")
    assert OnnxEngine.prepare(bundle, "float32") == tmp_path / "one.onnx"
    assert capsys.readouterr().err == ""  # this user made the original
    shutil.rmtree(home / "proved")
    for said in ("is made again", ""):
        assert OnnxEngine.prepare(bundle, "float32") == tmp_path / "one.onnx"
        assert said in capsys.readouterr().err
        model_files._own_proofs.clear()
    (kept,) = (home / "proved").iterdir()
    kept.write_text("[]")
    OnnxEngine.prepare(bundle, "float32")
    assert "was not made by this user on this machine and is made again" in capsys.readouterr().err


def test_a_failure_within_an_engine_is_one_line(made):
    for name in ("onnx", "openvino"):
        engine = ENGINES[name].open(made)
        with (
            pytest.raises(VitrailError, match=f"Engine {name} cannot compute with") as failure,
            engine.running(1) as run,
        ):
            run(np.zeros((1, 9, 9, 1), np.uint8))
        assert "\n" not in str(failure.value)


@pytest.mark.parametrize("field", ["precision", "files"])
def test_a_proof_of_something_else_is_not_believed(made, tmp_path, field, capsys):
    bundle = shutil.copytree(made, tmp_path / "one")
    folder = OnnxEngine.prepare(bundle, "float32")
    proof = forge(folder, **{field: {"precision": "int8", "files": {"proof.json": "0"}}[field]})
    assert OnnxEngine.prepare(bundle, "float32") == folder
    assert "made again" in capsys.readouterr().err
    assert json.loads((folder / "proof.json").read_text())[field] != proof[field]


def test_a_bundle_that_is_replaced_while_it_is_read_is_read_again(made, tmp_path, monkeypatch):
    bundle = shutil.copytree(made, tmp_path / "one")
    vitrail.save(make(), tmp_path / "two")
    load, reads = engine_making.load, []

    def replaced_once(path):
        found = load(path)
        reads.append(path)
        if len(reads) == 1:
            shutil.rmtree(bundle)
            shutil.copytree(tmp_path / "two", bundle)
        return found

    monkeypatch.setattr(engine_making, "load", replaced_once)
    source = engine_making.open_source(bundle)
    assert len(reads) == 2
    assert source.key == fingerprint(tmp_path / "two") != fingerprint(made)


@pytest.mark.parametrize("name", ["onnx", "openvino"])
def test_a_file_that_is_replaced_behind_an_open_engine_is_noticed(made, tmp_path, name):
    """A session is opened for each number of threads, perhaps long after labels were read."""
    bundle = shutil.copytree(made, tmp_path / "one")
    engine = ENGINES[name].open(bundle)
    pixels = crop_embedded_images(engine.info.preprocess, 2)
    expected = run_engine(engine, pixels).logits
    shutil.copytree(engine.folder, tmp_path / "copy")
    shutil.rmtree(engine.folder)
    shutil.copytree(tmp_path / "copy", engine.folder)  # the same again
    with engine.running(3) as run:
        np.testing.assert_allclose(run(pixels).logits, expected, rtol=0, atol=1e-6)
    vitrail.save(make(), bundle, force=True)
    assert ENGINES[name].prepare(bundle, "float32") == engine.folder
    for _ in range(2):
        with pytest.raises(CorruptFileError, match="was replaced or changed while engine"), engine.running(4):
            pass


def test_labels_and_file_are_of_the_same_bundle(made, tmp_path, monkeypatch):
    """Though the bundle is replaced between the two."""
    bundle = shutil.copytree(made, tmp_path / "one")
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
    monkeypatch.setattr(model_files, "is_of", lambda folder, key: False)
    with pytest.raises(CorruptFileError, match="changes all the time"):
        OnnxEngine.open(bundle)


def test_a_users_file_that_is_called_lock_is_not_touched(made, tmp_path, home):
    shutil.rmtree(home)
    home.write_text("no folder")
    bundle = shutil.copytree(made, tmp_path / "one")
    (tmp_path / "one.lock").write_text("mine")
    assert OnnxEngine.prepare(bundle, "float32") == tmp_path / "one.onnx"
    assert (tmp_path / "one.lock").read_text() == "mine"


def test_after_an_upgrade_a_file_is_proved_again(made, tmp_path, capsys, monkeypatch):
    bundle = shutil.copytree(made, tmp_path / "one")
    folder = OnnxEngine.prepare(bundle, "float32")
    forge_own(folder, versions={"onnxruntime": "1.0"})
    monkeypatch.setattr(OnnxEngine, "write", None)
    assert OnnxEngine.prepare(bundle, "float32") == folder
    assert "is proved again" in capsys.readouterr().err
    assert json.loads((folder / "proof.json").read_text())["versions"]["onnxruntime"] != "1.0"


def test_in_int8_as_many_images_share_scales_as_predict_gives(made, monkeypatch):
    monkeypatch.setattr("vitrail.inference.onnx_engine.batch_for", lambda config: 3)
    engine = OnnxEngine.open(made, None, "int8")
    pixels = crop_embedded_images(engine.info.preprocess, 8)
    with engine.running(1) as run:
        whole = run(pixels)
        pieces = [run(pixels[at : at + 3]) for at in range(0, 8, 3)]
    for ours, theirs in zip(whole, zip(*pieces, strict=True), strict=True):
        np.testing.assert_array_equal(ours, np.concatenate(theirs))


def test_in_int8_an_image_of_a_large_model_is_computed_alone(made, monkeypatch):
    """One of its mates has extreme contrast, which would set the scale of all."""
    pixels = crop_embedded_images(vitrail.load(made).preprocess, 8) // 8
    pixels[7] = np.indices(pixels.shape[1:]).sum(axis=0) % 2 * 255

    def gap():
        with OnnxEngine.open(made, None, "int8").running(1) as run:
            return np.abs(run(pixels).logits[0] - run(pixels[:1]).logits[0]).max()

    config = vitrail.load(made).info.config
    assert gap() > 0
    assert OnnxEngine.depends_on_batch(config, "int8")
    monkeypatch.setattr("vitrail.inference.onnx_engine._ALONE_MACS", config.macs)
    assert gap() == 0
    assert not OnnxEngine.depends_on_batch(config, "int8")
    assert not OnnxEngine.depends_on_batch(config, "float32")


def test_an_interrupt_is_no_failure_of_the_exporter(made, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("\x1b[96mFailed\x1b[0m to export") from error

    monkeypatch.setattr("torch.onnx.export", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OnnxEngine.prepare(shutil.copytree(FIXTURE, tmp_path / "one"), "float32")


def test_threads_that_call_openvino_at_the_same_time_get_their_own_answers(made):
    engine = OpenvinoEngine.open(made)
    pixels = crop_embedded_images(engine.info.preprocess, 40)
    expected = run_engine(engine, pixels).logits
    from vitrail.data.prefetch import prefetch

    with engine.running(1, 3) as run:
        jobs = (lambda at=at: run(pixels[at : at + 1]).logits.copy() for at in range(40))
        found = np.concatenate(list(prefetch(jobs, 3, ahead=6)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


_BEGIN_TOGETHER = """
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
def test_threads_that_begin_together_in_a_new_process_do_not_hang(choice, made):
    """Without `first_call_alone`, 9 of 30 processes with OpenVINO waited for ever."""
    for _ in range(60):
        words = [sys.executable, "-c", _BEGIN_TOGETHER, str(made), *choice]
        subprocess.run(words, check=True, timeout=60, capture_output=True)


@pytest.mark.parametrize(
    ("name", "entered"), [("torch", "scale"), ("onnx", "scale_array"), ("openvino", "scale_array")]
)
def test_the_first_call_of_an_engine_is_computed_alone(name, entered, made, monkeypatch):
    monkeypatch.setattr(engine_module, "_USED", set())
    original, spans = getattr(vitrail.Preprocess, entered), []

    def slow(self, pixels):
        began = time.monotonic()
        time.sleep(0.1)
        spans.append((began, time.monotonic()))
        return original(self, pixels)

    engine = ENGINES[name].open(made)
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
    assert max(began for began, _ in last) < min(ended for _, ended in last)  # afterwards, all at a time


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
def test_a_fork_predicts_the_same_or_says_in_one_line_that_it_cannot(name, made):
    words = [sys.executable, "-W", "ignore", "-c", _USE_IN_FORKS, str(made), name]
    done = subprocess.run(words, timeout=120, capture_output=True, text=True, check=True)
    *rows, exit_code = done.stdout.splitlines()
    assert (len(rows), len({*rows}), exit_code) == (4, 1, "0")
    if name != "openvino":
        assert rows[0] == "same"
        return
    assert rows[0].startswith("Engine openvino must be used in a process that was not forked from one that has used it")
    assert 'Start processes with multiprocessing.get_context("spawn")' in rows[0]


def test_more_threads_than_cores_are_lowered_with_one_note(made, monkeypatch, capsys):
    count = len(os.sched_getaffinity(0))
    engine_module._note_limit.cache_clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    assert engine_module.cores() == engine_module.cores() == count
    assert vitrail.Classifier(made, threads=4096).threads == count
    assert capsys.readouterr().err.splitlines() == [
        f"note: 999 threads are lowered to {count}, the number of cores",
        f"note: 4,096 threads are lowered to {count}, the number of cores",
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert engine_module.cores() == 1


def test_the_proof_of_int8_says_what_changed(made):
    proof = json.loads((made.with_name("pico.onnx-int8") / "proof.json").read_text())
    assert (proof["precision"], proof["pictures"], proof["format"]) == ("int8", 40, FORMAT)
    assert proof["same_answers"] >= 38
    assert proof["max_logit_difference"] > proof["mean_logit_difference"] > 1e-4
    assert set(proof["versions"]) == {"vitrail", "torch", "onnxruntime"}
    (name,) = proof["files"]
    assert (name, len(proof["files"][name])) == ("model.onnx", 64)
    sizes = [(made.with_name(f"pico.{kind}") / "model.onnx").stat().st_size for kind in ("onnx", "onnx-int8")]
    assert sizes[1] < sizes[0] + 10_000  # so small a model has more graph than weights


@pytest.mark.parametrize("inputs", [1, 2, 7, 64])
def test_weights_of_8_bits_cannot_overflow_16_in_pairs(inputs):
    """Without VNNI, two products with activations of up to 255 are added in 16 bits."""
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
def test_weights_of_openvino_are_rounded_to_the_nearest_of_8_bits(inputs):
    weights = np.random.default_rng(0).standard_t(3, (50, inputs)).astype(np.float32)
    weights[0], weights[1] = 0, 1e-44
    steps, scales = openvino_engine.round_outputs(weights)
    assert (steps.dtype, np.abs(steps.astype(int)).max(axis=1)[2:].min()) == (np.int8, 127)
    assert (np.abs(steps * scales - weights) <= scales * 0.501).all()


@pytest.mark.parametrize(
    ("products", "group"), [([(384, 1536)], 128), ([(192, 768)], 64), ([(196, 256), (512, 2048)], 128), ([(6, 5)], 16)]
)
def test_groups_are_as_large_as_divides_most_inputs(products, group):
    """A Mixer's few products over patches do not make all others slow."""
    ov, build = import_engine_package("openvino", "openvino"), import_engine_package("openvino.opset13", "openvino")
    inputs = [build.parameter([2, size], np.float32) for size, _ in products]
    outputs = [
        build.matmul(one, build.constant(np.ones(shape, np.float32)), transpose_a=False, transpose_b=False)
        for one, shape in zip(inputs, products, strict=True)
    ]
    model = ov.Model(outputs, inputs, "products")
    openvino_engine._compress(ov, model)
    assert model.get_rt_info(["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]).astype(str) == str(group)


def test_openvino_in_int8_stores_integers_and_an_answer_does_not_depend_on_the_batch(made):
    engine = OpenvinoEngine.open(made, None, "int8")
    model = import_engine_package("openvino", "openvino").Core().read_model(engine.folder / "model.xml")
    products = [node for node in model.get_ops() if node.get_type_name() == "MatMul"]
    assert not [node for node in products if node.input_value(1).get_node().get_type_name() == "Constant"]
    scaled = [node for node in products if node.input_value(1).get_node().get_type_name() == "Multiply"]
    stored = [node.input_value(1).get_node().input_value(0).get_node().input_value(0) for node in scaled]
    assert [one.get_element_type().get_type_name() for one in stored].count("i8") >= 4  # output, MLP, head
    group = int(model.get_rt_info(["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]).astype(str))
    assert group == engine.info.config.width == 16
    pixels = crop_embedded_images(engine.info.preprocess, 8)
    dark = np.concatenate([pixels[:1], np.zeros_like(pixels[1:]), np.full_like(pixels[:1], 255)])
    with engine.running(1) as run:
        np.testing.assert_allclose(run(dark).logits[0], run(pixels).logits[0], rtol=0, atol=1e-5)


def test_a_large_token_does_not_take_the_precision_of_others(tmp_path):
    """After an activation function, each token has a scale of its own."""
    rng = np.random.default_rng(0)
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weights = rng.normal(size=(16, 8)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])],
        "mlp",
        [helper.make_tensor_value_info("x", kind, ["batch", 3, 16])],
        [helper.make_tensor_value_info("y", kind, ["batch", 3, 8])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "exact.onnx")
    quantise(tmp_path / "exact.onnx", tmp_path / "model.onnx", is_large=False)
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    tokens = np.abs(rng.normal(size=(2, 3, 16))).astype(np.float32)
    tokens[0, 0] *= 1000
    session = import_engine_package("onnxruntime", "onnx").InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {"x": tokens})
    gaps = np.abs(found - tokens @ weights)
    assert gaps[0, 0].max() > 1
    assert gaps[1].max() < 0.1  # with one scale for all, an answer of the second image would be off by ten


@pytest.mark.slow
def test_deit_in_int8_is_a_third_of_the_size(shared, tmp_path):
    from vitrail.bundles.convert import UserHints, convert

    told, images = UserHints(None, None, (), None), [np.zeros((32, 32, 3), np.uint8)]
    source = str(shared / "deit-ti16" / "model.safetensors")
    convert(source, tmp_path / "deit", "vitrail", told=told, verifies=False, images=images)
    sizes = []
    for precision in ("float32", "int8"):
        folder = ENGINES["onnx"].prepare(tmp_path / "deit", precision)
        sizes.append((folder / "model.onnx").stat().st_size)
    assert 3 < sizes[0] / sizes[1] < 4


@pytest.mark.slow
def test_openvino_pads_before_pooling_as_torch_does(tmp_path):
    """ONNX Runtime fuses the two wrongly; the graph prevents it, and OpenVINO must not fall into the same trap."""
    model = redraw(vitrail.create("BiT-R50x1", base=32, layers=(1,), resolution=32, classes=5), std=0.05)
    eye = vitrail.Preprocess(resolution=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    vitrail.save(vitrail.Bundle(model=model, preprocess=eye), tmp_path / "bit")
    pixels = crop_embedded_images(eye, 8)
    torchs, openvinos = (
        run_engine(ENGINES[name].open(tmp_path / "bit"), pixels).logits for name in ("torch", "openvino")
    )
    assert np.abs(torchs).max() > 0.1
    np.testing.assert_allclose(openvinos, torchs, rtol=0, atol=1e-5)


# Wrong use


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_what_does_not_exist_is_one_line(call, made, tmp_path, words, message):
    for command in (["predict", made, __file__], ["evaluate", made, "digits"]):
        done = call(*command, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"vitrail: {message}")
        assert done.stderr.count("\n") == 1


def test_a_precision_that_this_cpu_lacks_is_one_line(made, monkeypatch):
    openvino = import_engine_package("openvino", "openvino")
    monkeypatch.setattr(openvino.Core, "get_property", lambda *_: ["FP32", "INT8"])
    with pytest.raises(
        UsageError, match=r"that OpenVINO has on this CPU \(float32, int8\), got 'bfloat16', which this"
    ):
        OpenvinoEngine.open(made, None, "bfloat16")
    monkeypatch.setattr(openvino.Core, "get_property", lambda *_: ["FP32", "BF16"])
    OpenvinoEngine.check("bfloat16")


def test_an_engine_that_is_not_installed_is_one_line(made, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    done = call("predict", made, __file__, "--engine", "openvino")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Engine openvino needs the 'openvino' extra (openvino is missing)." in done.stderr
    with pytest.raises(MissingError):
        vitrail.Classifier(made, engine="openvino")


def test_protocols_on_features_have_one_engine(call, made):
    done = call("evaluate", made, "digits", "--protocol", "knn", "--engine", "onnx")
    assert done.returncode == 2
    assert done.stderr == "vitrail: Engine and precision must come with protocol classify, got knn.\n"


# What is measured and kept


def test_auto_counts_the_start_and_keeps_what_it_measured(made, measured, capsys):
    speeds, asked = measured
    assert pick(made, images=[0] * 10) == EngineChoice("onnx", "float32")
    assert capsys.readouterr().err == (
        "auto: onnx float32 30.0 images/s after 0.5 s (openvino float32 20.0 images/s after 0.5 s,"
        " torch float32 10.0 images/s after 3.0 s)\n"
    )
    assert asked == [(EXACT, LOAD)]
    speeds[EXACT[0]] = 40
    assert pick(made) == EngineChoice("onnx", "float32")
    assert len(asked) == 1
    pick(made, threads=1)  # a load that is given counts
    assert len(asked) == 1
    choose_engine(EngineRequest("auto"), str(made), threads=1)
    assert asked[-1] == (EXACT, Workload(batch_for(vitrail.load(made).info.config), 1, 1))
    assert pick(made, images=[0] * 10, device="cuda") == EngineChoice("torch", "float32")
    assert len(asked) == 2
    assert choose_engine(EngineRequest("auto", "auto"), vitrail.load(made)) == EngineChoice("torch", "float32")
    assert len(asked) == 2


def test_a_fast_engine_that_starts_slowly_is_for_many_images(made, measured):
    speeds, _ = measured
    speeds[EXACT[0]] = 60
    assert [pick(made, images=[0] * count) for count in (10, 1000)] == [EXACT[1], EXACT[0]]
    assert pick(made) == EXACT[0]


def test_measurements_of_other_versions_flags_and_bundles_are_not_read(made, measured, monkeypatch, tmp_path):
    _, asked = measured
    pick(made)
    for name, value in (("version_of", lambda package: "99"), ("machine", lambda: "another processor")):
        monkeypatch.setattr(benchmark_store, name, value)
        pick(made)
    assert len(asked) == 3
    pick(made)
    assert len(asked) == 3
    vitrail.save(make(), tmp_path / "other")
    monkeypatch.setattr(select, "find_usable", lambda path, choices: (choices, {}))
    pick(tmp_path / "other")
    assert len(asked) == 4


def test_flags_and_versions_name_the_machine(monkeypatch):
    assert "torch 2." in benchmark_store.machine()
    assert "openvino 20" in benchmark_store.machine()
    monkeypatch.setattr(
        benchmark_store.Path, "read_text", lambda *_, **__: "model name : A\nflags : fpu avx2\nflags : fpu avx2\n"
    )
    one = benchmark_store.machine()
    monkeypatch.setattr(
        benchmark_store.Path, "read_text", lambda *_, **__: "model name : A\nflags : fpu avx2 avx512_vnni\n"
    )
    assert one.startswith("A (")
    assert one != benchmark_store.machine()


@pytest.mark.parametrize(
    "content", ['{"broken', "[]", '{"%s": 3}', '{"%s": {"speeds": {"%s": {"onnx float32": {"x": 1}}}}}']
)
def test_a_damaged_file_of_measurements_holds_nothing(made, measured, content):
    _, asked = measured
    pick(made)
    path = BenchmarkStore.read(made)._path
    path.write_text(content.replace("%s", benchmark_store.machine(), 1).replace("%s", str(LOAD)))
    assert pick(made) == EXACT[1]
    assert len(asked) == 2
    assert BenchmarkStore.read(made).speeds(LOAD)[EXACT[1]].image == pytest.approx(1 / 30)


def test_a_changed_digit_of_a_measurement_is_noticed(made, measured):
    _, asked = measured
    assert pick(made) == EXACT[1]
    path = BenchmarkStore.read(made)._path
    text = path.read_text()
    assert text.count('"size": 1') >= 3
    path.write_text(text.replace('"size": 1', '"size": 2', 1))
    assert BenchmarkStore.read(made).speeds(LOAD) == {}
    assert pick(made) == EXACT[1]
    assert len(asked) == 2


def test_a_home_that_cannot_be_written_is_one_line_and_measured_again(made, measured, home, capsys, monkeypatch):
    _, asked = measured
    shutil.rmtree(home)
    home.write_text("no folder")
    lacking = {EngineChoice("openvino", "bfloat16"): Refusal("this CPU has none", lasts=True)}
    monkeypatch.setattr(select, "find_usable", lambda path, choices: (choices, lacking))
    for count in (1, 2):
        assert pick(made) == EXACT[1]
        left_out, *said = capsys.readouterr().err.splitlines()
        assert left_out == "auto: openvino bfloat16 left out: this CPU has none"
        assert len(asked) == count
        assert said[0].startswith(
            "note: measurements cannot be kept, so they are made again next time: Output must be in"
        )
        assert len(said) == 2


def test_auto_goes_on_with_what_is_installed(made, measured, monkeypatch, capsys):
    _, asked = measured
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert pick(made) == EXACT[1]
    assert capsys.readouterr().err.startswith("auto: openvino left out: not installed\nauto: onnx float32 30.0")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert pick(made) == EXACT[0]
    assert len(asked) == 1  # torch alone was among those measured
    with pytest.raises(
        UsageError, match=r"an engine has on this machine, got 'int8' for torch, onnx, openvino\. Use float32"
    ):
        pick(made, precision="int8")


def test_auto_leaves_out_an_engine_whose_file_cannot_be_made(made, measured, monkeypatch, capsys, tmp_path):
    def fail(*_):
        raise VitrailError("Writing failed (No space left on device).")

    monkeypatch.setattr(OpenvinoEngine, "prepare", fail)
    assert pick(made) == EXACT[1]
    assert "auto: openvino float32 left out: Writing failed (No space left on device).\n" in capsys.readouterr().err
    assert BenchmarkStore.read(made).speeds(LOAD).keys() == {*EXACT[:2]}  # it may work the next time


def test_what_is_measured_is_no_longer_refused(made):
    kept = BenchmarkStore.read(made)
    kept.keep_speeds(LOAD, {}, {INT8: Refusal("some library was missing", lasts=True)})
    assert BenchmarkStore.read(made).refused().keys() == {INT8}
    kept.keep_speeds(LOAD, {INT8: Speed(0.1, 0.1, 1, 1)})
    assert BenchmarkStore.read(made).refused() == {}


def test_what_is_missing_now_may_be_there_the_next_time(made, monkeypatch):
    def fail(cls, precision):
        raise MissingError("Engine onnx needs a library.")

    monkeypatch.setattr(OnnxEngine, "check", classmethod(fail))
    _, refused = select.find_usable(str(made), [INT8])
    assert refused == {INT8: Refusal("Engine onnx needs a library.", lasts=False)}


def test_a_way_that_its_proof_refuses_is_made_once(made, measured, monkeypatch, capsys):
    prepare, tried = OnnxEngine.prepare, []

    def refuse(path, precision):
        if precision == "float32":
            return prepare(path, precision)
        tried.append(precision)
        raise UnprovedError("The model in int8 predicts 30 of 40 images differently from torch.")

    monkeypatch.setattr(OnnxEngine, "prepare", refuse)
    for load in (LOAD, LOAD, Workload(1, 1, 1)):
        assert choose_engine(EngineRequest("onnx", "auto"), str(made), load=load) == EXACT[1]
    assert tried == ["int8"]
    assert capsys.readouterr().err.count("auto: onnx int8 left out: The model in int8 predicts 30 of 40") == 1
    assert BenchmarkStore.read(made).refused().keys() == {INT8}
    monkeypatch.setattr(benchmark_store, "version_of", lambda package: "99")
    choose_engine(EngineRequest("onnx", "auto"), str(made), load=LOAD)
    assert tried == ["int8", "int8"]


def test_processes_that_measure_at_the_same_time_keep_what_both_found(made):
    found = [BenchmarkStore.read(made) for _ in range(8)]
    speed = {EXACT[0]: Speed(0.1, 0.1, 1, 1)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda batch: found[batch].keep_speeds(Workload(batch, 1, 1), speed), range(8)))
    found[0].keep_agreements({INT8: Agreement("photos", 200, 195)})
    kept = BenchmarkStore.read(made)
    assert [kept.speeds(Workload(batch, 1, 1)) for batch in range(8)] == [speed] * 8
    assert kept.agreements()[INT8].same == 195


@pytest.mark.parametrize("busy", [range(6, 10), range(8, 99)], ids=["a moment", "from then on"])
def test_a_machine_that_is_busy_meanwhile_does_not_change_who_wins(busy, monkeypatch, made):
    """Choices are measured in turn, and the fastest round counts; here, in seconds of a clock that the choices move."""
    clock, calls = [0.0], []
    seconds = {EXACT[0]: 0.012, EXACT[1]: 0.010}

    class Busy:
        info = vitrail.load(made).info

        def __init__(self, choice):
            self.choice = choice

        @contextlib.contextmanager
        def running(self, threads, callers):
            def run(pixels):
                calls.append(self.choice)
                clock[0] += seconds[self.choice] * len(pixels) * (4 if len(calls) in busy else 1)

            yield run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    found = measure._race({choice: Busy(choice) for choice in seconds}, Workload(4, 1, 1))
    assert found[EXACT[1]] < found[EXACT[0]]
    assert calls[4:12] == [choice for choice in seconds for _ in range(2)] * 2  # the first call of each is not counted


# Precisions


def test_auto_alone_stays_in_float32(made, measured):
    speeds, asked = measured
    speeds[INT8] = 1000
    assert pick(made).precision == "float32"
    assert {choice.precision for choices, _ in asked for choice in choices} == {"float32"}


def test_precision_auto_takes_the_fastest_within_the_tolerance(made, measured, capsys):
    speeds, _ = measured
    speeds[INT8] = 60
    kept = BenchmarkStore.read(made)
    kept.keep_agreements({INT8: Agreement("photos", 200, 195)})
    assert pick(made, precision="auto", tolerance=0.025) == INT8
    low, high = wilson_interval(5, 200)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("auto: onnx int8 60.0 images/s after 0.5 s (onnx float32 30.0 images/s")
    assert said.endswith(f"; 5 of 200 answers differ from float32 on photos ({low:.1%} to {high:.1%})")
    assert pick(made, precision="auto", tolerance=0.02) == EXACT[1]
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("auto: onnx float32 30.0 images/s")
    assert "; not onnx int8: 5 of 200 answers differ from float32 on photos (1.1% to 5.7%), more than 0.02" in said
    assert pick(made, "onnx", "auto", 0.025) == INT8


def test_a_faster_way_that_is_not_taken_is_named_beside_the_one_that_is(made, measured, capsys):
    speeds, _ = measured
    speeds[INT8], slower = 60, EngineChoice("torch", "bfloat16")
    speeds[slower] = 50
    BenchmarkStore.read(made).keep_agreements(
        {INT8: Agreement("photos", 200, 180), slower: Agreement("photos", 200, 199)}
    )
    assert pick(made, precision="auto") == slower
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("auto: torch bfloat16 50.0 images/s")
    assert "; 1 of 200 answers differ" in said
    refused = "; not onnx int8: 20 of 200 answers differ from float32 on photos (6.6% to 14.9%), more than 0.02"
    assert said.endswith(refused)


def test_answers_are_compared_on_the_images_at_hand_each_time(made, measured, capsys):
    speeds, _ = measured
    speeds[INT8] = 60
    images = [np.random.default_rng(index).integers(0, 256, (9, 9), dtype=np.uint8) for index in range(5)]
    assert pick(made, precision="auto", images=[*images, b"none"], tolerance=1) == INT8
    assert "of 40 answers differ from float32 on 5 given and 35 embedded images (" in capsys.readouterr().err
    assert BenchmarkStore.read(made).agreements() == {}  # the next images are others
    assert pick(made, precision="auto", images=images * 9, tolerance=1) == INT8
    assert "of 45 answers differ from float32 on given images (" in capsys.readouterr().err


def test_without_images_answers_to_embedded_ones_are_compared(made, measured, capsys):
    speeds, _ = measured
    speeds[INT8] = 60
    pick(made, precision="auto", tolerance=1)
    assert "of 40 answers differ from float32 on embedded images (" in capsys.readouterr().err


def test_a_precision_that_is_slower_here_is_said_to_be(made, measured, capsys):
    assert pick(made, "torch", "bfloat16") == EngineChoice("torch", "bfloat16")
    assert capsys.readouterr().err == (
        "note: torch bfloat16 takes 5.0 times as long as float32 on this machine (measured)\n"
    )
    assert pick(made, "onnx", "float32") == EXACT[1]
    assert capsys.readouterr().err == ""


def test_a_model_without_classes_has_no_answers_to_compare(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(select, "find_usable", lambda path, choices: (choices, {}))
    model = vitrail.create("ViT-Pico/2", classes=0)
    vitrail.save(
        vitrail.Bundle(model=model, preprocess=vitrail.Preprocess(resolution=8, mean=(0.5,), std=(0.5,))),
        tmp_path / "x",
    )
    with pytest.raises(UsageError, match="Bundle must have a model that predicts classes"):
        pick(tmp_path / "x", precision="auto")


@pytest.mark.parametrize("choice", [*EXACT, *ROUNDED], ids=str)
def test_evaluate_and_predict_run_any_way(choice, made, call, tmp_path):
    names = dict(zip("012", vitrail.load(made).labels, strict=False))
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    labels = np.array([names[str(index % 3)] for index in range(12)])
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    flags = ["--engine", choice.engine, "--precision", choice.precision]
    BenchmarkStore.read(made).keep_speeds(
        Workload(64, 1, 1), dict.fromkeys([choice, EngineChoice(choice.engine, "float32")], Speed(0.1, 0.1, 1, 1))
    )
    done = call("evaluate", made, tmp_path / "data.npz", *flags, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    scores = json.loads(done.stdout)
    assert scores["count"] == 12
    if choice.precision == "float32":
        expected = vitrail.evaluate(made, tmp_path / "data.npz").scores
        assert scores["confusion"] == expected["confusion"]
        assert scores["negative_log_likelihood"] == pytest.approx(expected["negative_log_likelihood"], abs=1e-5)
    (found,) = vitrail.Classifier(made, **choice._asdict()).predict(images[:1])
    (exact,) = vitrail.Classifier(made).predict(images[:1])
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in exact], abs=0.02)


# vitrail bench


def test_bench_measures_every_way_and_auto_reads_it(made, call, measured, monkeypatch, tmp_path):
    monkeypatch.setattr("vitrail.evaluation.benchmark.measure_speeds", measure.measure_speeds)
    monkeypatch.setattr("vitrail.evaluation.benchmark.cores", lambda: 2)
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8), dtype=np.uint8)
    labels = np.array([vitrail.load(made).labels[index % 3] for index in range(30)])
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    done = call("bench", made, "--data", tmp_path / "data.npz", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {EngineChoice(row["engine"], row["precision"]): row for row in found["ways"]}
    usable = {choice for choice in list_choices() if choice != EngineChoice("openvino", "bfloat16")}
    assert usable <= rows.keys() | {EngineChoice(one["engine"], one["precision"]) for one in found["left_out"]}
    exact = rows[EXACT[0]]
    assert (exact["images_per_second"], exact["same"], exact["images"], exact["p_value"]) == (10, 30, 30, 1.0)
    expected = vitrail.evaluate(made, tmp_path / "data.npz")
    assert (exact["accuracy"], exact["accuracy_interval"]) == (expected.accuracy, list(expected.accuracy_interval))
    assert all(rows[choice]["same"] == 30 for choice in EXACT)
    assert "same" not in rows[EngineChoice("torch", "bfloat16")]
    assert "note: answers of torch bfloat16 are not compared: it is too slow here" in done.stderr
    _, asked = measured
    before = len(asked)
    assert pick(made, precision="auto") == EXACT[1]
    assert len(asked) == before
    kept = BenchmarkStore.read(made).agreements()[INT8]
    assert (kept.data, kept.images) == (found["data"], 30)
    assert kept.right_in_float32 == round(30 * expected.accuracy)
    assert call("export", made, tmp_path / "out", "--to", "onnx", "--precision", "int8").returncode == 0
    assert json.loads((tmp_path / "out" / "proof.json").read_text())["measured"] == kept._asdict()

    (tmp_path / "unsorted").mkdir()
    for index, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "unsorted" / f"{index:02}.png")
    done = call("bench", made, "--data", tmp_path / "unsorted", "--json")
    assert done.returncode == 0, done.stderr
    unsorted = json.loads(done.stdout)["ways"]
    assert [row.get("same") for row in unsorted] == [row.get("same") for row in found["ways"]]
    assert not any("accuracy" in row for row in unsorted)

    table = call("bench", made).stdout.splitlines()
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
        "answers",
    ]
    assert table[1].split()[:3] == ["torch", "float32", "10.0"]
    assert "onnx int8: a prediction may depend on the other images of its batch" in table
    assert [choice for choice in rows if rows[choice]["depends_on_batch"]] == [INT8]
    assert "answers to fashion-40" in table[-2]


def test_bench_refuses_what_it_cannot_measure(call, made, tmp_path):
    for words, message in (
        ([made, "--data", "nowhere"], "nowhere"),
        ([tmp_path / "none"], "Bundle must be a folder that exists"),
        ([made, "--threads", "0"], "Threads must be an integer from 1"),
    ):
        done = call("bench", *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert message in done.stderr


@pytest.mark.slow
def test_a_real_measurement_is_plausible(made):
    found = measure.measure_speeds(str(made), [*EXACT, INT8], Workload(8, 2, 1))
    assert all(speed.image < 0.1 < speed.start < 60 for speed in found.values())
    assert found[EXACT[0]].start > found[EXACT[1]].start
    assert found[EXACT[0]].memory > 1.3 * found[EXACT[1]].memory > 10**7
    assert found[EXACT[1]].size == sum(
        file.stat().st_size for file in os.scandir(made.with_name("pico.onnx")) if file.is_file()
    )
