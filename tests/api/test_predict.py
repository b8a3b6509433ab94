"""`vitrail predict`: engines and their files, devices, and all forms of the image arguments."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.bundles.test_bundle import FIXTURE, GREY_8, make, tiny
from tests.models.families.test_contract import ONE_PER_FAMILY
from vitrail.api import output_predictions
from vitrail.api.output_predictions import prediction_table
from vitrail.bundles.decision import SINGLE_LABEL, MultiLabel
from vitrail.cli import main
from vitrail.core import watchdog
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.core.files import MANIFEST, _write_manifest, atomic_file, atomic_folder, user_folder
from vitrail.inference import build_model_file as making
from vitrail.inference import model_files
from vitrail.inference.benchmark_store import BenchmarkStore, Speed, Workload
from vitrail.inference.engine import EngineChoice, EngineOutputs, batch_for, import_engine_package, thread_count
from vitrail.inference.onnx_engine import MODEL, OnnxEngine
from vitrail.inference.proof import compare_outputs, crop_embedded_images
from vitrail.lab.exact import redraw
from vitrail.models.activations import look
from vitrail.models.convolutions import bake_


def ready(path):
    """Return the folder of a bundle's ONNX file in float32, which is built if missing."""
    return OnnxEngine.prepare(path, "float32")


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    """Return the path of the user's own verification of the ONNX folder of `bundle`."""
    return tmp_path_factory.mktemp("proofs") / "proved"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, proved):
    """Return a bundle with its ONNX folder, built once for all tests of this module."""
    folder = tmp_path_factory.mktemp("bundles") / "pico"
    shutil.copytree(FIXTURE, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_HOME", str(proved.parent))
        assert ready(folder) == folder.with_name("pico.onnx")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return a folder of twelve images in two folders; one file is not an image."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "more").mkdir()
    for index in range(12):
        place = folder / "more" if index % 3 == 0 else folder
        pixels = np.random.default_rng(index).integers(0, 256, (5, 6), dtype=np.uint8)
        Image.fromarray(pixels).resize((60, 40 + index)).save(place / f"{index:02d}.png")
    (folder / "07.png").write_bytes(b"not a picture")
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path, bundle, proved, monkeypatch):
    """Use a cache folder of the tests in place of the user's."""
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    shutil.copytree(proved, tmp_path / "home" / "proved")
    return tmp_path / "home"


@pytest.fixture
def copied(bundle, tmp_path):
    """Return a copy of the bundle and its ONNX folder, which tests may change."""
    for name in ("pico", "pico.onnx"):
        shutil.copytree(bundle.with_name(name), tmp_path / name)
    return tmp_path / "pico"


@pytest.fixture
def exports(bundle, monkeypatch):
    """Record the ONNX folders that are built, and copy them instead, because an export takes seconds."""
    targets = []

    def copy(path, target, engine, precision, earlier):
        assert (engine, precision, earlier) == (OnnxEngine, "float32", None)
        targets.append(target)
        with atomic_folder(target, force=True, owned=True) as folder:
            shutil.copy(bundle.with_name("pico.onnx") / MODEL, folder)
            proof = json.loads((bundle.with_name("pico.onnx") / model_files.PROOF).read_text())
            (folder / model_files.PROOF).write_text(json.dumps(proof | {"bundle": model_files.fingerprint(path)}))

    monkeypatch.setattr(making, "build_model_file", copy)
    return targets


def predict(capsys, *words):
    """Run `vitrail predict --json`; return its exit code, the parsed lines of stdout, and stderr."""
    code = 0
    try:
        main(["predict", *map(str, words), "--json"])
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    assert "internal error" not in captured.err
    return code, [json.loads(line) for line in captured.out.splitlines()], captured.err


def names(rows):
    return [Path(row["file"]).name for row in rows]


def assert_alike(ours, theirs, tolerance=1e-5):
    for predictions, expected in zip(ours, theirs, strict=True):
        assert [entry["label"] for entry in predictions] == [entry["label"] for entry in expected]
        scores = [[entry["score"] for entry in answer] for answer in (predictions, expected)]
        np.testing.assert_allclose(*scores, rtol=0, atol=tolerance)


# Engines


def test_predict_with_existing_onnx_file_does_not_import_torch(copied, images):
    speeds = {
        EngineChoice(name, "float32"): Speed(0.1, start, 0, 0)
        for name, start in (("torch", 3), ("onnx", 0.3), ("openvino", 2))
    }
    BenchmarkStore.read(copied).save_speeds(Workload(32, 1, 1), speeds)
    script = (
        "import sys\nfrom vitrail.cli import main\n"
        "for engine in ('onnx', 'auto'):\n"
        "    main(['predict', *sys.argv[1:], '--threads', '1', '--json', '--engine', engine])\n"
        "unwanted = 'torch', 'safetensors', 'rich', 'onnx', 'openvino'\n"
        "sys.exit(' '.join(name for name in unwanted if name in sys.modules))\n"
    )
    command = [sys.executable, "-c", script, str(copied), str(images / "01.png"), str(images / "more")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "auto: onnx float32 10.0 images/s after 0.3 s (openvino float32 10.0 images/s after 2.0 s, torch float32 10.0"
        " images/s after 3.0 s)\n\n"  # sys.exit of an empty text
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert names(rows) == ["01.png", "00.png", "03.png", "06.png", "09.png"] * 2
    assert {entry["label"] for entry in rows[0]["predictions"]} == {"cat", "dog", "새"}


def test_torch_and_onnx_give_equal_predictions_and_features(bundle, images):
    files = [str(path) for path in sorted(images.rglob("*.png"))]
    streams = [
        list(vitrail.Classifier(bundle, engine=engine, threads=2).stream(files, features=True))
        for engine in ("torch", "onnx")
    ]
    assert [["error" in row for row in rows] for rows in streams] == [[name.endswith("07.png") for name in files]] * 2
    good = [[row for row in rows if "error" not in row] for rows in streams]
    assert_alike(*([row["predictions"] for row in rows] for rows in good))
    features = [np.stack([row["features"] for row in rows]) for rows in good]
    np.testing.assert_allclose(*features, rtol=0, atol=1e-5)
    assert features[0].std(0).max() > 1e-2


def test_predictions_do_not_depend_on_threads_and_batch_size(bundle, images):
    files = [str(path) for path in sorted(images.rglob("*.png")) if path.name != "07.png"]
    expected = vitrail.Classifier(bundle).predict(files)
    for engine in ("torch", "onnx"):
        for threads, batch_size in ((1, None), (2, 1), (3, 4), (16, 2)):
            rows = list(vitrail.Classifier(bundle, engine=engine, threads=threads).stream(files, batch_size=batch_size))
            assert [row["file"] for row in rows] == files
            assert_alike([row["predictions"] for row in rows], expected)
        assert_alike(vitrail.Classifier(bundle, engine=engine, threads=1).predict(files), expected)


def test_streaming_restores_torch_threads(bundle, images):
    torch.set_num_threads(2)
    rows = vitrail.Classifier(bundle, threads=1).stream([str(images / "01.png")] * 40)
    assert len(list(islice(rows, 3))) == 3
    rows.close()
    assert torch.get_num_threads() == 2


def test_onnx_graph_contains_the_metadata_of_the_bundle(bundle):
    session = import_engine_package("onnxruntime", "onnx").InferenceSession(bundle.with_name("pico.onnx") / MODEL)
    shapes = {port.name: port.shape for port in (*session.get_inputs(), *session.get_outputs())}
    assert shapes == {"pixel_values": ["batch", 1, 8, 8], "logits": ["batch", 3], "features": ["batch", 16]}
    metadata = session.get_modelmeta().custom_metadata_map
    loaded = vitrail.load(bundle)
    assert json.loads(metadata["labels"]) == ["cat", "dog", "새"]
    assert json.loads(metadata["mean"]) == list(loaded.preprocess.mean)
    assert json.loads(metadata["std"]) == list(loaded.preprocess.std) == [0.25]
    assert vitrail.Preprocess.from_json(json.loads(metadata["preprocess"])) == loaded.preprocess
    proof = json.loads((bundle.with_name("pico.onnx") / model_files.PROOF).read_text())
    assert (proof["pictures"], proof["same_answers"], proof["bundle"]) == (40, 40, model_files.fingerprint(bundle))
    assert 0 <= proof["max_logit_difference"] < 1e-5
    assert metadata["bundle"] == proof["bundle"]


def test_engine_with_different_outputs_is_rejected():
    rng = np.random.default_rng(0)
    torchs = EngineOutputs(rng.normal(size=(40, 3)), rng.normal(size=(40, 16)))
    proof = compare_outputs(EngineOutputs(torchs.logits + 1e-6, torchs.features - 1e-5), torchs, SINGLE_LABEL)
    assert (proof["pictures"], proof["same_answers"]) == (40, 40)
    assert proof["max_logit_difference"] == pytest.approx(1e-6)
    assert proof["max_feature_difference"] == pytest.approx(1e-5)
    tied = EngineOutputs(np.array([[0.5, 0.5 + 1e-7]]), torchs.features[:1])
    for outputs, expected in (
        (EngineOutputs(torchs.logits + 1e-2, torchs.features), torchs),
        (EngineOutputs(torchs.logits * np.nan, torchs.features), torchs),
        (EngineOutputs(tied.logits[:, ::-1], tied.features), tied),
    ):
        with pytest.raises(VitrailError, match=r"is not used\. Use engine torch"):
            compare_outputs(outputs, expected, SINGLE_LABEL)
    rough = compare_outputs(EngineOutputs(torchs.logits + 0.2, torchs.features), torchs, SINGLE_LABEL, "int8")
    assert rough["same_answers"] == 40
    with pytest.raises(VitrailError, match=r"in int8 predicts .* is not used\. Use float32"):
        compare_outputs(EngineOutputs(rng.normal(size=(40, 3)), torchs.features), torchs, SINGLE_LABEL, "int8")


def test_multilabel_outputs_are_compared_by_their_thresholds():
    features, answer = np.zeros((2, 1)), MultiLabel(thresholds=(0.5, 0.5))
    torchs = EngineOutputs(np.array([[3.0, -1e-6], [2.0, 1.0]]), features)
    outputs = EngineOutputs(np.array([[3.0, 1e-6], [2.0, 1.0]]), features)
    assert compare_outputs(outputs, torchs, SINGLE_LABEL)["same_answers"] == 2
    assert compare_outputs(outputs, torchs, answer, "int8")["same_answers"] == 1
    with pytest.raises(VitrailError, match="predicts 1 of 2 images differently"):
        compare_outputs(outputs, torchs, answer)


def test_sample_images_fit_any_preprocessing():
    for channels in (1, 3, 13):
        eye = GREY_8.replace(mean=(0.5,) * channels, std=(0.5,) * channels, resolution=(12, 20))
        pixels = crop_embedded_images(eye, 40)
        assert pixels.shape == (40, 12, 20, channels)
        assert pixels.std(axis=(1, 2)).min() > 10


def test_standardised_kernels_can_be_precomputed():
    model = redraw(vitrail.create("BiT-R50x1", base=32, layers=(1, 1), resolution=32, classes=5))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        bake_(model)
        assert torch.equal(model(images), expected)
        bake_(model)
        assert torch.equal(model(images), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ONE_PER_FAMILY, "BiT-R50x1", "R+ViT-Ti/16", "iGPT-Micro palette"])
def test_every_family_has_an_onnx_engine(name, tmp_path):
    changes = {"base": 32, "layers": (1, 1), "resolution": 32} if name == "BiT-R50x1" else {}
    model = redraw(vitrail.create(name.partition(" ")[0], classes=5, **changes), std=0.05)
    if name.endswith("palette"):  # levels of grey, between which some pixels lie in the very middle
        model.palette.copy_(torch.linspace(-1, 1, len(model.palette))[:, None])
    half = (0.5,) * model.config.channels
    eye = vitrail.Preprocess(resolution=model.config.resolution, mean=half, std=half)
    vitrail.save(vitrail.Bundle(model=model, preprocess=eye), tmp_path / "one")
    image = np.random.default_rng(0).integers(0, 256, (40, 50), dtype=np.uint8)
    ours, theirs = (vitrail.Classifier(tmp_path / "one", engine=engine) for engine in ("torch", "onnx"))
    assert_alike(theirs.predict([image] * 3), ours.predict([image] * 3), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"position": "rope-2d", "pool": "gap", "registers": 2},
        {"position": "relative", "pool": "map", "attention": "local"},
        {"position": "learned-2d", "representation": "tanh", "norm": "batch"},
        {"position": "sincos-2d", "norm_order": "post", "channels": 13},
        {"stride": 1, "activation": "gelu-tanh", "layer_scale": 0.1},
        {"residual": False, "attention_scale": 1.0},
        {"norm": "none", "activation": "none"},
    ],
    ids=str,
)
def test_every_vit_variant_has_an_onnx_engine(changes, tmp_path):
    model = tiny(**changes)
    half = (0.5,) * model.config.channels
    vitrail.save(vitrail.Bundle(model=model, preprocess=GREY_8.replace(mean=half, std=half)), tmp_path / "one")
    proof = json.loads((ready(tmp_path / "one") / model_files.PROOF).read_text())
    assert proof["max_logit_difference"] < 1e-4


@pytest.mark.slow
def test_deit_gives_equal_predictions_in_torch_and_onnx(shared, tmp_path):
    from safetensors.torch import load_file

    model = vitrail.create("ViT-Ti/16")
    model.load_state_dict(load_file(shared / "deit-ti16" / "model.safetensors"))
    vitrail.save(vitrail.Bundle(model=model.eval(), preprocess=vitrail.Preprocess()), tmp_path / "deit")
    photos = [str(path) for path in sorted((shared / "imagenet-val-500").rglob("*.JPEG"))[::10]]
    ours, theirs = (
        [row["predictions"] for row in vitrail.Classifier(tmp_path / "deit", engine=engine).stream(photos, top_k=1)]
        for engine in ("torch", "onnx")
    )
    assert_alike(ours, theirs, 1e-4)
    double = vitrail.Classifier(tmp_path / "deit", engine="onnx", jpeg="double").stream(photos, top_k=1)
    assert [row["predictions"][0]["label"] for row in double] == [entries[0]["label"] for entries in ours]


# The file that is kept


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def forge_proof(folder, change, without="nothing"):
    """Change a proof or remove a file, and update the manifest."""
    proof = json.loads((folder / model_files.PROOF).read_text())
    (folder / model_files.PROOF).write_text(json.dumps(proof | change))
    (folder / without).unlink(missing_ok=True)
    (folder / MANIFEST).unlink()
    _write_manifest(folder)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: flip(folder / MODEL),
        lambda folder: flip(folder / model_files.PROOF),
        lambda folder: flip(folder / "manifest.json"),
        lambda folder: (folder / MODEL).unlink(),
        lambda folder: (folder / model_files.PROOF).unlink(),
        lambda folder: (folder / model_files.PROOF).write_text("[]"),
        lambda folder: forge_proof(folder, {"files": []}, without=MODEL),
        lambda folder: forge_proof(folder, {"files": [None]}),
        lambda folder: forge_proof(folder, {"files": 3}),
    ],
    ids=[
        "model",
        "proof",
        "manifest",
        "no model",
        "no proof",
        "another proof",
        "proof of nothing",
        "proof of null",
        "proof of a number",
    ],
)
def test_corrupt_onnx_folder_is_rebuilt(copied, exports, spoil, capsys):
    beside = copied.with_name("pico.onnx")
    assert ready(copied) == beside
    assert not exports
    spoil(beside)
    assert ready(copied) == beside
    assert exports == [beside]
    assert "pico.onnx is corrupt and is built again" in capsys.readouterr().err
    assert ready(copied) == beside
    assert exports == [beside]


def test_changed_bundle_gets_a_new_onnx_file(copied, exports, capsys):
    vitrail.save(make(), copied, force=True)
    ready(copied)
    assert exports == [copied.with_name("pico.onnx")]
    assert "belongs to another version of the bundle and is built again" in capsys.readouterr().err


def test_onnx_file_of_an_older_format_is_rebuilt(copied, exports, monkeypatch):
    monkeypatch.setattr(model_files, "FORMAT", model_files.FORMAT + 1)
    ready(copied)
    assert len(exports) == 1


def test_foreign_folder_next_to_the_bundle_is_not_replaced(copied, exports, home):
    beside = copied.with_name("pico.onnx")
    shutil.rmtree(beside)
    beside.write_bytes(b"my own export")
    assert ready(copied) == home / "onnx" / model_files.fingerprint(copied)
    assert beside.read_bytes() == b"my own export"


def test_onnx_file_of_a_read_only_bundle_goes_to_the_user_cache(copied, exports, home, monkeypatch):
    shutil.rmtree(copied.with_name("pico.onnx"))
    can = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != copied.parent and can(path, mode))
    place = ready(copied)
    assert place == home / "onnx" / model_files.fingerprint(copied)
    assert ready(copied) == place
    assert exports == [place]
    assert not copied.with_name("pico.onnx").exists()
    monkeypatch.delenv("VITRAIL_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_folder() == Path("/somewhere/vitrail")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_folder() == Path.home() / ".cache" / "vitrail"


def test_error_without_a_writable_folder_names_the_variable(copied, exports, home, monkeypatch, capsys, images):
    shutil.rmtree(copied.with_name("pico.onnx"))
    can = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: can(path, mode) and not mode & os.W_OK)
    code, rows, messages = predict(capsys, copied, images / "01.png", "--engine", "onnx")
    assert (code, rows, exports) == (2, [], [])
    assert (
        f"File of engine onnx must go to a folder that can be written, got '{copied}.onnx' and '{home}/onnx/"
        in messages
    )
    assert messages.endswith("Set $VITRAIL_HOME to a writable folder, or use engine torch.\n")
    assert messages.count("\n") == 1


def test_predict_does_not_change_the_bundle(bundle):
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == {
        path.name: path.read_bytes() for path in FIXTURE.iterdir()
    }


def test_a_missing_extra_is_one_line(bundle, images, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, rows, messages = predict(capsys, bundle, images / "01.png", "--engine", "onnx")
    assert (code, rows) == (2, [])
    assert messages.startswith("vitrail: Engine onnx needs the 'onnx' extra")
    assert messages.endswith('Run, in the source folder of vitrail: pip install -c constraints.txt ".[onnx]".\n')
    assert messages.count("\n") == 1


def test_failed_export_gives_one_line(monkeypatch, tmp_path):
    vitrail.save(make(), tmp_path / "one")

    def fail(*_, **__):
        raise RuntimeError("no such operator\nand more")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(UsageError, match=r"family vit, which torch.onnx cannot \(no such operator\). Use engine torch"):
        ready(tmp_path / "one")
    assert not (tmp_path / "one.onnx").exists()


def test_batch_size_depends_on_the_model_and_threads_on_the_environment(monkeypatch):
    sizes = [batch_for(vitrail.models.zoo.find(name)) for name in ("ViT-Pico/2", "ViT-Ti/16", "ViT-B/16")]
    assert sizes == [32, 4, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert thread_count() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert thread_count() == len(os.sched_getaffinity(0))


# Ways to name images


def test_files_folders_patterns_and_stdin(bundle, images, monkeypatch, capsys):
    listed = f"{images}/02.png\n\n{images}/nowhere.png\n{images}/more\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(listed.encode())))
    arguments = [images / "01.png", "-", f"{images}/0[45].p*", f"{images}/**/09.png", images / "more"]
    code, rows, _ = predict(capsys, bundle, *arguments, "--top-k", 1, "--engine", "onnx")
    more = ["00.png", "03.png", "06.png", "09.png"]
    assert names(rows) == ["01.png", "02.png", "nowhere.png", *more, "04.png", "05.png", "09.png", *more]
    assert code == 1
    assert "must be a file that exists" in rows[2]["error"]
    assert [len(row.get("predictions", ())) for row in rows].count(1) == len(rows) - 1


def test_impossible_file_names_give_one_error_each(bundle, images, monkeypatch, capsys):
    strange = [f"{images}/{'x' * 5000}.png", f"{images}/\0.png", "/".join("x" * 3000)]
    listed = "\n".join([f"{images}/01.png", *strange, f"{images}/02.png"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(listed.encode())))
    code, rows, _ = predict(capsys, bundle, "-")
    assert code == 1
    assert ["must be a file that exists" in row.get("error", "") for row in rows] == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.png"], "Image must be a file or folder that exists, got 'missing.png'."),
        (["*.tif"], "Pattern must match files or folders, got '*.tif', which matches none."),
        (["empty"], "Folder must have images in it, got 'empty' without any."),
        (["-"], "Names of images must come on standard input"),
        (["01.png", "--top-k", "0"], "Top k must be an integer from 1"),
        (["01.png", "--threads", "0"], "Threads must be an integer from 1"),
        (["01.png", "--features", "out.csv"], "Features must go to a file that ends in .npz, got 'out.csv'."),
        (["01.png", "--features", "empty/there.npz"], "Output must not exist yet"),
        (["01.png", "--features", "01.png/out.npz"], "Output must be in a folder that can be written"),
        (["01.png", "--engine", "gpu"], "gpu"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_use_is_one_line(bundle, images, arguments, message, monkeypatch, capsys, tmp_path):
    shutil.copy(images / "01.png", tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "there.npz").write_bytes(b"precious")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    code, rows, messages = predict(capsys, bundle, *arguments)
    assert (code, rows) == (2, [])
    assert message in messages
    assert messages.count("\n") == 1
    assert (tmp_path / "empty" / "there.npz").read_bytes() == b"precious"


def test_unreadable_file_is_reported_and_the_others_are_classified(bundle, images, capsys):
    for engine in ("torch", "onnx"):
        code, rows, messages = predict(capsys, bundle, images, "--engine", engine)
        assert code == 1
        assert [name for name, row in zip(names(rows), rows, strict=True) if "error" in row] == ["07.png"]
        error = rows[names(rows).index("07.png")]["error"]
        assert "07.png' cannot be decoded" in error
        assert messages == f"vitrail: 1 of 12 images could not be classified; the first: {error}\n"


def test_errors_are_printed_once_in_a_terminal(bundle, images, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, rows, messages = predict(capsys, bundle, images / "07.png", images / "01.png")
    assert (code, ["error" in row for row in rows], messages) == (1, [True, False], "")


# In Python


def test_predict_decodes_and_computes_in_parallel(bundle, images, monkeypatch):
    both = threading.Barrier(2, timeout=20)
    crop = vitrail.Preprocess.crop

    def meet(*given, **named):
        both.wait()
        return crop(*given, **named)

    monkeypatch.setattr(vitrail.Preprocess, "crop", meet)
    files = [str(images / f"{index:02d}.png") for index in (1, 2, 4, 5)]
    assert len(vitrail.Classifier(bundle, threads=2).predict(files, batch_size=1)) == 4


def test_predict_accepts_any_iterable_of_images_in_order(bundle, images):
    files = [path for path in vitrail_order(images) if path.name != "07.png"]
    expected = vitrail.Classifier(bundle, threads=1).predict(map(str, files))
    kinds = [files[0], str(files[1]), files[2].read_bytes(), Image.open(files[3]), np.asarray(Image.open(files[4]))]
    kinds += [np.asarray(Image.open(files[5]).convert("RGB")), *files[6:]]
    for threads in (1, 4):
        for images in (kinds, iter(kinds), (kind for kind in kinds), dict(enumerate(kinds)).values()):
            assert_alike(vitrail.Classifier(bundle, threads=threads).predict(images, batch_size=2), expected)
    lazy = Image.open(files[0])
    assert_alike(vitrail.Classifier(bundle, threads=4).predict([lazy] * 40), expected[:1] * 40)
    assert vitrail.Classifier(bundle).predict([]) == []


def test_predict_raises_the_first_error_in_order(bundle, images):
    broken = images / "07.png"
    classifier = vitrail.Classifier(bundle, threads=2)
    for inputs, message in (
        ([images / "01.png", broken, images / "nowhere.png"], "07.png' cannot be decoded"),
        ([images / "01.png", images / "nowhere.png", broken], "must be a file that exists"),
        ([images / "01.png", broken.read_bytes()], "image 1' cannot be decoded"),
        ([3.5], "Image must be a path"),
        ("a.png", "Images must be a list, got one str. Put it in brackets."),
        (b"\x89PNG", "Images must be a list, got one bytes. Put it in brackets."),
    ):
        with pytest.raises(VitrailError, match=message):
            classifier.predict(inputs)
    assert torch.get_num_threads() == 1


# How much of the package a reader has to follow


TRACE = """
import json, sys, threading
from pathlib import Path
import vitrail
from vitrail.cli import main

package, entered, local = str(Path(vitrail.__file__).parent), set(), threading.local()

def trace(frame, event, _):
    code = frame.f_code
    if code.co_name == "<module>" and event in ("call", "return"):
        local.imports = getattr(local, "imports", 0) + (1 if event == "call" else -1)
    elif event == "call" and not getattr(local, "imports", 0) and code.co_filename.startswith(package):
        entered.add((code.co_filename, code.co_firstlineno, code.co_name))

threading.setprofile(trace)
sys.setprofile(trace)
main(sys.argv[1:])
sys.setprofile(None)
parts = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # of the function around them
functions = [place for place in entered if place[2] not in parts]
print(json.dumps([len({file for file, *_ in functions}), len(functions)]), file=sys.stderr)
"""


def test_classifying_an_image_enters_few_files_and_functions(tmp_path):
    """Count the files and functions that run between the command line and the prediction, without imports."""
    Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "a.png")
    command = [sys.executable, "-c", TRACE, "predict", "fashion", str(tmp_path / "a.png")]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    files, functions = json.loads(done.stderr)
    assert files <= MOST_FILES
    assert functions <= MOST_FUNCTIONS


MOST_FILES, MOST_FUNCTIONS = 25, 150


# Devices


ACCELERATORS = [name for name in ("cuda", "mps", "xpu") if getattr(torch, name).is_available()]


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda", "cuda:99", "hpu", "meta", ""])
def test_missing_device_gives_one_short_line(call, device, tmp_path):
    if device in ACCELERATORS:
        pytest.skip("this machine has it")
    for arguments in (
        ["predict", FIXTURE, __file__],
        ["evaluate", FIXTURE, "digits"],
        ["evaluate", FIXTURE, "digits", "--protocol", "knn"],
        ["inspect", FIXTURE, __file__, "--output", tmp_path / "out"],
        ["train", "digits", "--model", "ViT-Pico/2", "--output", tmp_path / "out", "--steps", "1"],
    ):
        done = call(*arguments, "--device", device)
        assert (done.returncode, done.stdout) == (2, "")
        advice = " NVIDIA and AMD GPUs are called cuda." if device == "gpu" else ""
        assert done.stderr == f"vitrail: Device must be one that this machine has (cpu), got {device!r}.{advice}\n"
    with pytest.raises(UsageError, match="Device must be one that this machine has"):
        vitrail.Classifier(make(), device=device)
    assert not (tmp_path / "out").exists()


def test_every_command_that_computes_has_the_same_device_flag():
    from vitrail.api.commands import COMMANDS, Group
    from vitrail.core.flags import UNSET, flag_of
    from vitrail.training.options import RunOptions

    commands = {
        **COMMANDS,
        **{f"faces {name}": command for name, command in COMMANDS["faces"].commands.items()},
    }
    flags = {}
    for name, command in commands.items():
        for parameter in () if isinstance(command, Group) else command.parameters:
            if parameter.name == "device":
                flag = parameter.flag
                flags[name] = (parameter.default if flag.cli_default is UNSET else flag.cli_default, flag.help)
    assert flags.keys() >= {"train", "finetune", "predict", "evaluate", "inspect", "bench", "faces evaluate"}
    assert flags.keys() >= {"faces train", "faces enroll", "faces verify", "faces identify", "faces calibrate"}
    assert set(flags.values()) == {("auto", flag_of(RunOptions.__annotations__["device"]).help)}


@pytest.mark.parametrize("accelerator", ["cuda", "xpu", "mps", None])
def test_device_auto_is_the_accelerator_that_torch_reports(accelerator, monkeypatch, capsys):
    """torch's report of accelerators is replaced, so that the test runs on any machine."""
    from vitrail.models import device

    answer = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: answer)
    device._say_device.cache_clear()
    assert device.find_device("auto") == (answer or torch.device("cpu"))
    assert capsys.readouterr().err == ""
    assert device.choose_device("auto") == device.choose_device("auto") == (answer or torch.device("cpu"))
    note = f"note: computing on device {accelerator}; --device cpu computes on the CPU\n"
    assert capsys.readouterr().err == ("" if accelerator is None else note)
    assert device.choose_device("cpu") == torch.device("cpu")
    device._say_device.cache_clear()


def test_bundles_in_memory_keep_their_device(bundle, monkeypatch):
    from vitrail.analysis.inspected_model import open_inspected_model
    from vitrail.bundles import bundle as bundles

    chosen = []
    monkeypatch.setattr(bundles, "choose_device", lambda name: chosen.append(name) or torch.device("cpu"))
    loaded = vitrail.load(bundle)
    for opened in (bundle, loaded):
        vitrail.Classifier(opened)
        vitrail.evaluate(opened, "digits", protocol="knn")
        open_inspected_model(opened)
    assert chosen == ["auto"] * 3
    vitrail.Classifier(loaded, device="cpu")
    assert chosen == ["auto"] * 3 + ["cpu"]


def test_devices_by_name(bundle, call, images, tmp_path):
    assert next(vitrail.load(bundle, device="auto").model.parameters()).device.type in (*ACCELERATORS, "cpu")
    for engine in ("torch", "onnx"):
        done = call("predict", bundle, images / "01.png", "--device", "cpu", "--engine", engine)
        assert done.returncode == 0, done.stderr
    done = call("predict", bundle, images / "01.png", "--device", "cuda", "--engine", "onnx")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Device must be cpu for engine onnx, got 'cuda'. Use engine torch." in done.stderr


@pytest.mark.skipif(not ACCELERATORS, reason="this machine has no GPU")
@pytest.mark.parametrize("device", ACCELERATORS)
def test_gpu_gives_equal_predictions(bundle, call, images, device, tmp_path):
    files = [str(path) for path in vitrail_order(images) if path.name != "07.png"]
    ours, theirs = (vitrail.Classifier(bundle, device=name).predict(files) for name in ("cpu", device))
    assert_alike(ours, theirs, 1e-4)
    for arguments in (
        ["evaluate", "fashion", "fashion-40"],
        ["evaluate", "fashion", "digits", "--protocol", "knn", "--cache", tmp_path / "cache"],
        ["inspect", "fashion", files[0], "--output", tmp_path / "out", "--evidence"],
    ):
        assert call(*arguments, "--device", device).returncode == 0


def test_the_table_is_aligned_and_printable(bundle, images, capsys, tmp_path):
    shutil.copy(images / "01.png", tmp_path / "line\nbreak.png")
    shutil.copy(images / "02.png", tmp_path / "새.png")
    main(["predict", str(bundle), str(tmp_path), "--engine", "onnx", "--top-k", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "line\\nbreak.png" in lines[0]
    # A Korean syllable is two columns wide.
    ends = [line.index(".png") + (line.count("새", 0, line.index(".png"))) for line in lines]
    starts = [line.index("0.") for line in lines]
    assert ends[0] - ends[1] == len("line\\nbreak") - 2
    assert starts[0] > ends[0]
    assert starts[1] > ends[1]


# Features


def test_classes_that_do_not_fit_into_a_terminal_are_left_out(bundle, images, capsys, monkeypatch):
    row = {"file": "1.png", "predictions": [{"label": label, "score": 0.25} for label in ("a", "나", "c", "d")]}
    prediction = vitrail.api.predictions.Prediction.of(row)
    full = "1.png  a 0.250   나 0.250, c 0.250, d 0.250\n"
    for columns, expected in ((None, full), (43, full), (42, "1.png  a 0.250   나 0.250, c 0.250, ...\n")):
        prediction_table(["1.png"], "a나cd", columns=columns)(prediction)
        assert capsys.readouterr().out == expected
    prediction_table(["1.png"], "a나cd", columns=10)(prediction)
    assert capsys.readouterr().out == "1.png  a 0.250\n"

    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
    monkeypatch.setattr(output_predictions, "terminal_width", lambda _: 36)
    monkeypatch.chdir(images)
    for words, is_shortened in (([], True), (["--top-k", "3"], False)):
        main(["predict", str(bundle), "01.png", *words])
        assert capsys.readouterr().out.endswith("...\n") == is_shortened


def test_features_are_the_input_of_the_head(bundle, images, capsys, tmp_path):
    out = tmp_path / "deep" / "features.npz"
    out.parent.mkdir()
    loaded = vitrail.load(bundle)
    good = [str(path) for path in vitrail_order(images) if path.name != "07.png"]
    expected = look(loaded.model, loaded.preprocess(good)).steps["pooled"].numpy()
    for engine in ("torch", "onnx"):
        code, rows, _ = predict(capsys, bundle, images, "--engine", engine, "--features", out, "--force")
        assert code == 1
        assert "features" not in rows[0]
        with np.load(out, allow_pickle=False) as arrays:
            assert arrays["files"].tolist() == good
            assert arrays["features"].dtype == np.float32
            np.testing.assert_allclose(arrays["features"], expected, rtol=0, atol=1e-5)
    before = out.read_bytes()
    code, rows, messages = predict(capsys, bundle, images, "--features", out)
    assert (code, rows) == (2, [])
    assert "Output must not exist yet" in messages
    assert out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["features.npz"]


def test_features_are_written_after_stdout_is_closed(call, bundle, images, monkeypatch, tmp_path):
    class Left(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Left())
    done = call("predict", bundle, images / "01.png", images / "02.png", "--features", tmp_path / "out.npz")
    assert (done.returncode, sys.stdout.name) == (0, os.devnull)
    sys.stdout.close()
    with np.load(tmp_path / "out.npz") as arrays:
        assert len(arrays["files"]) == 2


def vitrail_order(folder):
    return sorted(folder.rglob("*.png"), key=str)


def test_no_features_are_written_if_all_images_are_unreadable(bundle, images, capsys, tmp_path):
    code, rows, messages = predict(capsys, bundle, images / "07.png", "--features", tmp_path / "out.npz")
    assert (code, len(rows)) == (1, 1)
    assert "No image could be read" in messages
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_partial_file(bundle, images, tmp_path, sent, code):
    out = tmp_path / "features.npz"
    arguments = ["predict", bundle, "-", "--engine", "onnx", "--json", "--threads", "2", "--features", out]
    command = [sys.executable, "-m", "vitrail", *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL),  # a background job's children would not hear Ctrl-C
    )
    process.stdin.write(f"{images / '01.png'}\n".encode() * 50_000)
    process.stdin.close()
    assert json.loads(process.stdout.readline())["predictions"]
    process.send_signal(sent)
    process.stdout.read()  # a reader who leaves would be another reason to stop
    process.stdout.close()
    messages = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == code
    assert b"Traceback" not in messages
    assert not list(tmp_path.glob("*.npz"))
    assert not list(tmp_path.glob(".*"))


def test_output_file_is_written_atomically(tmp_path):
    path = tmp_path / "folder" / "one"
    with atomic_file(path) as file:
        file.write(b"first")
    with pytest.raises(UsageError, match="must not exist yet"), atomic_file(path):
        pass

    def write_half():
        with atomic_file(path, force=True) as file:
            file.write(b"second")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_engine_onnx_needs_a_bundle_on_disk():
    with pytest.raises(UsageError, match="must be given the path of a bundle"):
        vitrail.Classifier(make(), engine="onnx")
    with pytest.raises(UsageError, match="Engine must be one of torch, onnx, openvino, got 'gpu'"):
        vitrail.Classifier(FIXTURE, engine="gpu")


def test_error_about_encoded_bytes_states_their_index(bundle, images):
    content = (images / "01.png").read_bytes()
    with pytest.raises(CorruptFileError, match=r"^'image 3' cannot be decoded \(its header is not that of a JPEG"):
        vitrail.Classifier(bundle).predict([content] * 3 + [b"none"], batch_size=2)


def test_the_jpeg_rule_can_be_overridden(bundle):
    assert vitrail.Classifier(bundle).preprocess.jpeg == "exact"
    assert vitrail.Classifier(bundle, jpeg="double").preprocess.jpeg == "double"
    assert vitrail.Classifier(bundle, engine="onnx", jpeg="double").preprocess.jpeg == "double"


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_model_without_a_head_gives_features_and_no_predictions(call, tmp_path, images, engine):
    model = redraw(vitrail.create("ViT-Pico/2", classes=0)).eval()
    preprocess = vitrail.Preprocess(resolution=8, mean=(0.5,), std=(0.5,))
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess), tmp_path / "bundle")
    files = sorted(images.glob("0*.png"))[:3]
    arguments = ["predict", tmp_path / "bundle", *files, "--engine", engine]
    done = call(*arguments)
    assert done.returncode == 2
    assert "must have a model that predicts classes, got one that predicts features" in done.stderr
    assert "with protocol knn, probe or fewshot" in done.stderr
    done = call(*arguments, "--features", tmp_path / "features.npz", "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"file": str(file), "predictions": []} for file in files
    ]
    with np.load(tmp_path / "features.npz") as arrays, torch.no_grad():
        np.testing.assert_allclose(arrays["features"], model(preprocess(files)).numpy(), atol=1e-5)
    assert call(*arguments, "--features", tmp_path / "again.npz").stdout == f"features  {tmp_path / 'again.npz'}\n"


@pytest.fixture
def impatient(monkeypatch):
    """Use a watchdog that prints its note after 0.5 s."""
    monkeypatch.setenv("VITRAIL_PATIENCE", "0.5")
    monkeypatch.setattr(watchdog, "_watchdog", watchdog._Watchdog())


def slow_down(monkeypatch, name, seconds=1.0):
    """Make a method of `Preprocess` slower."""
    original = getattr(vitrail.Preprocess, name)

    def slow(self, *words, **more):
        time.sleep(seconds)
        return original(self, *words, **more)

    monkeypatch.setattr(vitrail.Preprocess, name, slow)


def test_the_watchdog_names_an_image_that_is_not_decoded(bundle, images, impatient, monkeypatch, capsys):
    slow_down(monkeypatch, "crop")
    (rows,) = vitrail.Classifier(bundle, threads=1).predict([str(images / "01.png")])
    assert rows
    messages = capsys.readouterr().err.splitlines()
    assert messages.count(f"note: no progress for 0.5 s: decoding {str(images / '01.png')!r}") == 1


def test_the_watchdog_names_the_images_that_are_not_computed(bundle, images, impatient, monkeypatch, capsys):
    slow_down(monkeypatch, "scale")
    files = [str(images / f"{number:02}.png") for number in (1, 2, 4)]
    assert len(vitrail.Classifier(bundle, threads=1).predict(files)) == 3
    assert [line for line in capsys.readouterr().err.splitlines() if "decoding" not in line] == [
        f"note: no progress for 0.5 s: computing {files[0]!r} with engine torch",
        f"note: no progress for 0.5 s: computing {files[1]!r} to {files[2]!r} with engine torch",
    ]


def test_the_watchdog_names_the_images_of_evaluate(bundle, tmp_path, impatient, monkeypatch, capsys):
    pixels = np.zeros((3, 8, 8), np.uint8)
    np.savez(tmp_path / "data.npz", images=pixels, labels=np.array(vitrail.load(bundle).labels[:3]))
    slow_down(monkeypatch, "scale")
    vitrail.evaluate(bundle, tmp_path / "data.npz")
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "no progress" in line]
    assert note.startswith("note: no progress for 0.5 s: computing 'all image 0' to 'all image 2' with engine torch")


def test_the_watchdog_is_silent_while_steps_end(impatient, capsys):
    for _ in range(8):
        with watchdog.watch_step(lambda: "working"):
            time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_the_watchdog_prints_once_per_step_also_in_forks(impatient, capfd):
    with watchdog.watch_step(lambda: "working"):
        time.sleep(1.2)
        child = os.fork()
        if not child:
            with watchdog.watch_step(lambda: "working in a fork"):
                time.sleep(1.0)
            os._exit(0)
        os.waitpid(child, 0)
    messages = capfd.readouterr().err.splitlines()
    assert messages == ["note: no progress for 0.5 s: working", "note: no progress for 0.5 s: working in a fork"]
