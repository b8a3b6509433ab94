"""Plugins of another package (tests/extending), one of each category, work in every command."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from tests.models.test_config import check_tables
from tests.paths import TESTS
from tests.processes import start_function
from vitrail.bundles.bundle import Bundle, load, save
from vitrail.bundles.convert import UserHints, import_weights
from vitrail.bundles.formats.registry import FORMATS
from vitrail.bundles.pretrained import create
from vitrail.cli import main
from vitrail.core import registry
from vitrail.core.errors import MissingError, UsageError, VitrailError
from vitrail.core.rng import Stream
from vitrail.data.augment.config import AUGMENTATIONS, Augment
from vitrail.data.augment.pipeline import augment
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import SOURCES, open_data
from vitrail.inference.registry import ENGINES
from vitrail.lab.exact import redraw
from vitrail.lab.registry import QUESTIONS
from vitrail.models.families import FAMILIES
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.positions import POSITIONS
from vitrail.reports.inspect.registry import PANELS
from vitrail.training.recipe import OBJECTIVES, OPTIMISERS, Recipe, find_recipe

TOYS = TESTS / "extending"
TRAIN = ("train", "digits", "--threads", "1", "--steps", "20", "--batch", "64", "--checkpoint-seconds", "0")


@pytest.fixture
def toys(monkeypatch):
    """Make the package of toy plugins appear installed."""
    monkeypatch.syspath_prepend(str(TOYS))
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()


def weights_of(run):
    return hashlib.sha256((run / "bundle" / "model.safetensors").read_bytes()).hexdigest()


def run_with_toys(*arguments):
    registry._entry_points.cache_clear()
    main(list(arguments))


def train_and_resume(call, tmp_path, *settings):
    """Train twice, kill and resume the second run, compare the weights, and return its folder."""
    run, killed = tmp_path / "run", tmp_path / "killed"
    done = call(*TRAIN, *settings, "--output", run)
    assert done.returncode == 0, done.stderr
    process = start_function(run_with_toys, *TRAIN, *settings, "--keep", "20", "--output", str(killed))
    while process.poll() is None and not list(killed.glob("checkpoints/step-*7")):
        time.sleep(0.002)
    process.kill()
    _, err = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), err
    # The killed run may be past step 7; remove its later checkpoints to resume there.
    for path in (*killed.glob("checkpoints/step-*"), killed / "bundle"):
        if path.exists() and (path.name == "bundle" or int(path.name.removeprefix("step-")) > 7):
            shutil.rmtree(path)
    done = call(*TRAIN, *settings, "--keep", "20", "--output", killed, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "resuming after step 7 of 20" in done.stderr
    assert weights_of(killed) == weights_of(run)
    return run


def go_through(call, tmp_path, images, *settings):
    """Train, resume, predict with torch and ONNX, inspect, and return the folder of the bundle."""
    bundle = train_and_resume(call, tmp_path, *settings) / "bundle"
    answers = {}
    for engine in ("torch", "onnx"):
        done = call("predict", bundle, *images, "--engine", engine, "--json")
        assert done.returncode == 0, done.stderr
        answers[engine] = [json.loads(line)["predictions"][0] for line in done.stdout.splitlines()]
    assert [entry["label"] for entry in answers["torch"]] == [entry["label"] for entry in answers["onnx"]]
    assert answers["torch"][0]["score"] == pytest.approx(answers["onnx"][0]["score"], abs=1e-5)
    done = call("inspect", bundle, *images, "--output", tmp_path / "inspect")
    assert done.returncode == 0, done.stderr
    return bundle


def _path():
    return os.pathsep.join([str(TOYS), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for index, pixels in enumerate(open_data("digits").splits["test"].images[:3]):
        Image.fromarray(pixels[..., 0]).save(folder / f"{index}.png")
    return sorted(folder.iterdir())


def test_names_of_extensions_are_known_without_importing_them(toys):
    command = [sys.executable, "-X", "importtime", "-m", "vitrail", "models", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": _path()}, check=True
    )
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["coarse"] == dict.fromkeys(rows["ViT-B/16"]) | {"name": "coarse", "family": "coarse"}
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {name for name in imported if name.startswith("toy_") or name == "torch"}
    command[-2:] = ["convert", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": _path()}, check=True
    )
    assert "sequential" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {name for name in imported if name.startswith("toy_") or name == "torch"}


def test_a_family(toys, call, tmp_path, images):
    from toy_family.config import CoarseConfig

    done = call("info", "coarse", "--json")
    row = json.loads(done.stdout)
    model = create("coarse")
    assert (row["parameters"], row["macs"]) == (
        sum(parameter.numel() for parameter in model.parameters()),
        16 * 32 + 32 * 10,
    )
    row = json.loads(call("info", "coarse-large", "--json").stdout)
    assert (row["name"], row["family"], row["macs"]) == ("coarse-large", "coarse", 64 * 64 + 64 * 10)
    assert create("coarse-large").config == CoarseConfig(name="coarse-large", cells=8, width=64)
    done = call("info", "coarse-huge")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    bundle = go_through(call, tmp_path, images, "--model", "coarse")
    assert json.loads((bundle / "config.json").read_text())["extensions"] == {"family.coarse": "toys 1.0"}
    assert load(bundle).model.config.cells == 4
    assert json.loads((tmp_path / "inspect" / "inspect.json").read_text())["model"]["family"] == "coarse"
    headless = create("coarse", classes=0)
    assert headless(torch.zeros(1, 1, 8, 8)).shape == (1, 32)


def test_a_position(toys, call, tmp_path, images):
    model = create("ViT-Pico/2", position="diagonal", position_at="every")
    assert model.config.parameters == sum(parameter.numel() for parameter in model.parameters())
    check_tables(model.config)
    assert "rope-2d, diagonal. Position embedding" in model.config.meanings()["position"]
    assert torch.equal(model.resize(16).resize(8)(torch.ones(1, 1, 8, 8)), model(torch.ones(1, 1, 8, 8)))
    bundle = go_through(call, tmp_path, images, "--model", "ViT-Pico/2", "--set", "model.position=diagonal")
    assert json.loads((bundle / "config.json").read_text())["extensions"] == {"position.diagonal": "toys 1.0"}
    document = json.loads((tmp_path / "inspect" / "inspect.json").read_text())
    # Places on one diagonal are equal, so rows and columns count the same.
    assert document["positions"]["row"] == pytest.approx(document["positions"]["column"], abs=1e-6)


def test_a_format(toys, call, tmp_path, monkeypatch):
    model = redraw(create("MLP-Pico"), std=0.05)
    bundle = Bundle(model=model, preprocess=Preprocess(resolution=8, mean=(0.5,), std=(0.5,)))
    save(bundle, tmp_path / "ours")
    reports = []
    for source, destination, to in (("ours", "theirs", "sequential"), ("theirs", "back", "vitrail")):
        done = call("convert", tmp_path / source, tmp_path / destination, "--to", to, "--json")
        assert done.returncode == 0, done.stderr
        (tmp_path / destination / "vitrail.json").unlink(missing_ok=True)  # only what the format itself can hold
        reports.append(json.loads(done.stdout))
    assert [(report["from"], report["to"]) for report in reports] == [
        ("vitrail", "sequential"),
        ("sequential", "vitrail"),
    ]
    for (proof,) in (report["proofs"] for report in reports):
        assert (proof["library"], proof["equal_answers"]) == ("sequential", 40)
        assert proof["largest_difference"] < 1e-5
    back = load(tmp_path / "back")
    assert back.model.config == model.config
    assert all(torch.equal(back.model.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    # Anyone who knows nothing of vitrail reads it.
    hidden = (nn.Linear(64, 1132), nn.GELU(), nn.Linear(1132, 1132), nn.GELU())
    plain = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(1132, 10))
    plain.load_state_dict(load_file(tmp_path / "theirs" / "model.safetensors"))
    image = torch.rand(1, 1, 8, 8)
    torch.testing.assert_close(plain(image), model.eval()(image))
    # It is imported only where none of ours recognises the file.
    monkeypatch.delitem(sys.modules, "toy_format")
    done = call("convert", "fashion", tmp_path / "timm", "--to", "timm", "--no-verify")
    assert done.returncode == 0, done.stderr
    assert import_weights(str(tmp_path / "timm"), UserHints()).library == "timm"
    assert "toy_format" not in sys.modules
    assert import_weights(str(tmp_path / "theirs"), UserHints()).library == "sequential"
    for arguments in (("fashion", "--to", "sequential"), ("fashion", "--to", "sequental"), ("fashion", "--to", "dino")):
        done = call("convert", arguments[0], tmp_path / "never", *arguments[1:])
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert not (tmp_path / "never").exists()
    done = call("convert", "fashion", tmp_path / "never", "--to", "sequental")
    assert "got 'sequental'. Did you mean 'sequential'?" in done.stderr


def test_a_source_of_weights(toys, call, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTIC", str(tmp_path))
    call("convert", "fashion", tmp_path / "old", "--to", "timm", "--no-verify")
    done = call("convert", "attic:old", tmp_path / "ours", "--no-verify")
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256((tmp_path / "old" / "model.safetensors").read_bytes()).hexdigest()
    assert load(tmp_path / "ours").provenance["source"] == {
        "address": "attic:old",
        "sha256": {"model.safetensors": digest},
    }
    assert "must have the SHA-256" in call("convert", "attic:old", tmp_path / "no", "--sha256", "0" * 64).stderr
    assert call("convert", "attic:none", tmp_path / "no").returncode == 2


def test_an_engine(toys, call, images):
    answers = {}
    for engine in ("torch", "double"):
        done = call("predict", "fashion", *images, "--engine", engine, "--json")
        assert done.returncode == 0, done.stderr
        answers[engine] = [json.loads(line)["predictions"] for line in done.stdout.splitlines()]
    labels = {engine: [row[0]["label"] for row in rows] for engine, rows in answers.items()}
    assert labels["torch"] == labels["double"]
    scores = [[row[0]["score"] for row in rows] for rows in answers.values()]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert scores[0] != scores[1]  # of other rounding, so the engine did compute in double precision


def test_an_export_target(toys, call, tmp_path, images):
    done = call("export", "fashion", tmp_path / "out", "--to", "ort", "--json")
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert (proof["target"], list(proof["files"]), proof["same_answers"]) == ("ort", ["model.ort"], proof["pictures"])
    command = [sys.executable, "-I", tmp_path / "out" / "run.py", images[0]]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    expected = json.loads(call("predict", "fashion", images[0], "--json").stdout)["predictions"]
    assert output.split()[1] == expected[0]["label"].split()[0]
    assert float(output.split()[0]) == pytest.approx(expected[0]["score"], abs=1e-4)


def test_a_panel(toys, call, tmp_path, images):
    done = call("inspect", "fashion", *images, "--output", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    bundle = load("fashion")
    greys = [float(bundle.preprocess.crop(path).mean()) for path in images]
    assert json.loads(done.stdout)["brightness"] == pytest.approx(greys)
    assert json.loads((tmp_path / "out" / "inspect.json").read_text())["brightness"] == pytest.approx(greys)
    text = (tmp_path / "out" / "index.html").read_text()
    section = re.search(r'<section id="brightness">.+?<h2>(.+?)</h2>(.+?)</section>', text)
    assert "Brightness" in section[1]
    assert "밝기" in section[1]
    assert "<svg" in section[2]
    assert '<a href="#brightness">' in text
    assert text.index('<section id="layers">') < section.start() < text.index('<section id="absent">')
    assert "mean grey" in (tmp_path / "out" / "figures" / "brightness.svg").read_text()


def test_an_objective(toys, call, tmp_path, images, monkeypatch):
    run = go_through(call, tmp_path, images, "--model", "ViT-Pico/2", "--objective", "tempered").parent
    bundle = load(run / "bundle")
    # Nothing of its own is needed for the scores of a classifier.
    split = open_data("digits").splits["test"]
    with torch.no_grad():
        predicted = bundle.model(bundle.preprocess(split.images)).argmax(1).numpy()
    right = int((predicted == split.labels).sum())
    assert bundle.provenance["scores"]["accuracy"] == pytest.approx(right / len(split.labels))
    assert ">Confusion matrix<" in (run / "report.html").read_text()
    assert (bundle.provenance["objective"], bundle.provenance["objective_package"]) == ("tempered", "toys 1.0")
    (newest,) = (run / "checkpoints").glob("step-*20")
    state = json.loads((newest / "state.json").read_text())
    assert state["best"]["score"] == -state["best"]["loss"]
    temperature = load_file(newest / "tensors.safetensors")["now/log_temperature"]
    assert temperature.shape == ()
    assert temperature != 0
    assert f"accuracy {state['best']['accuracy']:.1%} at the end" in (run / "report.html").read_text()
    done = call(
        "finetune", run / "bundle", "digits", "--steps", "1", "--output", tmp_path / "tuned", "--recipe", "small"
    )
    assert done.returncode == 0, done.stderr
    assert "10 classes are those of the bundle: its head is kept" in done.stderr
    # The bundle does not need the objective that trained it; the run does.
    monkeypatch.setattr(registry, "_extensions", lambda _: {})
    done = call("predict", run / "bundle", images[0], "--json")
    assert json.loads(done.stdout)["predictions"][0]["label"] in bundle.labels
    done = call("train", "digits", "--model", "ViT-Pico/2", "--objective", "tempered", "--output", tmp_path / "x")
    assert done.returncode == 2
    assert "Objective must be one of classify, margin, masked, multilabel, next-pixel, got 'tempered'." in done.stderr
    done = call(*TRAIN, "--model", "ViT-Pico/2", "--output", run, "--resume", "auto")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("Objective must be one of classify, margin, masked, multilabel, next-pixel, got 'tempered'.")


def test_an_optimiser(toys, call, tmp_path):
    assert Recipe(optimiser="lion").optimiser == "lion"
    run = train_and_resume(call, tmp_path, "--model", "ViT-Pico/2", "--set", "optimiser=lion")
    (newest,) = (run / "checkpoints").glob("step-*20")
    state = load_file(newest / "tensors.safetensors")
    assert "memory/model.blocks.0.attn.qkv.weight/momentum" in state
    assert "memory/model.blocks.0.attn.qkv.bias/exp_avg" in state


def test_a_data_source(toys, call, tmp_path):
    arguments = ("train", "stripes:40", "--model", "MLP-Pico", "--steps", "20", "--batch", "16", "--threads", "1")
    done = call(*arguments, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "run" / "bundle").labels == ("lying", "upright")
    done = call("evaluate", tmp_path / "run" / "bundle", "stripes:10", "--json")
    assert (json.loads(done.stdout)["accuracy"], json.loads(done.stdout)["count"]) == (1.0, 10)
    done = call("predict", tmp_path / "run" / "bundle", "stripes:4", "--json")
    predictions = [json.loads(line)["predictions"] for line in done.stdout.splitlines()]
    assert [row[0]["label"] for row in predictions] == ["lying", "upright"] * 2
    done = call("doctor", "stripes:x")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_folder_and_built_in_data_are_opened_as_without_extensions(toys, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "toy_source", raising=False)
    assert open_data("digits").labels == tuple("0123456789")
    assert "toy_source" not in sys.modules
    for label in "ab":
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.png").touch()
    assert open_data(tmp_path).labels == ("a", "b")


def test_an_augmentation(toys, call, tmp_path):
    run = train_and_resume(call, tmp_path, "--model", "ViT-Pico/2", "--set", "augment.fog=0.5", "augment.crop=none")
    augmentation = tomllib.loads((run / "config.toml").read_text())["augment"]
    assert (augmentation["fog"], augmentation["fog_level"]) == (0.5, 255)
    plain = call(*TRAIN, "--model", "ViT-Pico/2", "--set", "augment.crop=none", "--output", tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    assert weights_of(tmp_path / "plain") != weights_of(run)
    # From a recipe, after the built-in augmentations, with the same pixels for one image as in a batch.
    (tmp_path / "foggy.toml").write_text("# Foggy.\nsteps = 2\n[augment]\nfog = 1.0\nflip = 'random'\n")
    settings = find_recipe(str(tmp_path / "foggy.toml")).augment
    images = np.full((8, 8, 8, 1), 100, np.uint8)
    preprocess = Preprocess(resolution=8, crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    foggy = augment(images, Stream(0, 0, np.arange(8)), settings, preprocess)
    levels = foggy[:, 0, 0, 0]
    assert (foggy == levels[:, None, None, None]).all()
    assert len(set(levels.tolist())) > 4
    assert (levels >= 100).all()
    assert (augment(images[3:4], Stream(0, 0, np.array([3])), settings, preprocess) == foggy[3]).all()
    rows = {row["setting"]: row for row in json.loads(call("recipes", "small", "--json").stdout)["settings"]}
    assert (rows["augment.fog"]["default"], rows["augment.fog"]["meaning"]) == (0.0, "Largest share of white.")
    for setting, message in (
        ("augment.fog=2", "Fog must be a number from 0 to 1, got 2."),
        ("augment.fog_density=1", "Setting of augmentation must be one of crop, "),
        ("augment.fob=1", "Setting must be a key of a recipe, got 'augment.fob'."),
        ("fog=1", "Setting must be a key of a recipe, got 'fog'. Did you mean 'augment.fog'?"),
    ):
        done = call(*TRAIN, "--model", "ViT-Pico/2", "--set", setting, "--output", tmp_path / "refused")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert message in done.stderr


def test_an_augmentation_is_imported_only_where_it_is_used(toys, monkeypatch):
    monkeypatch.delitem(sys.modules, "toy_augmentation", raising=False)
    Recipe(augment={"flip": "random"})
    assert "toy_augmentation" not in sys.modules
    assert Augment(fog_level=3).fog_level == 3
    assert "toy_augmentation" in sys.modules


def test_settings_of_an_augmentation_must_have_its_name(install):
    install("misnamed", "augmentation.mist = toy_augmentation:Fog")
    with pytest.raises(
        VitrailError,
        match=r"augmentation.mist of misnamed 2 must be called mist or mist_..., got fog\. Rename the setting",
    ):
        Augment(mist=0.5)


def test_help_lists_objectives_and_data_sources_of_other_packages(toys):
    command = [sys.executable, "-m", "vitrail", "train", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": _path()}, check=True
    )
    assert "classify, margin, masked, multilabel, next-pixel, tempered." in " ".join(done.stdout.split())
    command[-2:] = ["help", "data"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": _path()}, check=True
    )
    assert "  DATA of the extension source.stripes\n" in done.stdout


def test_bundle_with_a_missing_extension_is_rejected_without_running_code(tmp_path):
    registry._entry_points.cache_clear()
    from tests.bundles.test_bundle import FIXTURE
    from vitrail.core.files import _write_manifest

    for added, wanted in (
        ({"position": "diagonal", "extensions": {"position.diagonal": "toys 1.0"}}, MissingError),
        ({"family": "coarse", "extensions": {"family.coarse": "toys 1.0"}}, MissingError),
        ({"family": "coarse"}, VitrailError),
        ({"extensions": {"family.os": 3}}, MissingError),
        ({"extensions": ["family.coarse"]}, VitrailError),
    ):
        folder = tmp_path / "bundle"
        shutil.copytree(FIXTURE, folder)
        document = json.loads((folder / "config.json").read_text()) | added
        (folder / "config.json").write_text(json.dumps(document))
        (folder / "manifest.json").unlink()
        _write_manifest(folder)
        with pytest.raises(wanted) as caught:
            load(folder)
        assert "\n" not in str(caught.value)
        if wanted is MissingError:
            assert "which is not installed" in str(caught.value)
        shutil.rmtree(folder)


def test_unknown_plugin_name_gets_a_suggestion(toys):
    with pytest.raises(UsageError, match=r"Position must be one of none, .*, diagonal, got 'diagnal'. Did you mean"):
        create("ViT-Pico/2", position="diagnal")


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Make a package with one entry point appear installed."""
    monkeypatch.syspath_prepend(str(TOYS))

    def with_entry_point(package, line):
        folder = tmp_path / f"{package}-2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2\n")
        (folder / "entry_points.txt").write_text(f"[vitrail.extensions]\n{line}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        registry._entry_points.cache_clear()

    yield with_entry_point
    registry._entry_points.cache_clear()


def test_extension_that_cannot_be_imported_gives_one_line(install):
    install("broken", "family.x = nowhere:X")
    with pytest.raises(
        VitrailError, match=r"Extension family.x of broken 2 cannot be used \(No module named 'nowhere'"
    ):
        create("x")


def test_a_family_must_state_the_name_of_its_entry_point(install, call, tmp_path):
    install("misnamed", "family.rough = toy_family.config:CoarseConfig")
    done = call(*TRAIN, "--model", "rough", "--output", tmp_path / "run")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        "Extension family.rough of misnamed 2 must have family = 'rough', got 'coarse'. Rename one of the two."
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("registry", "base"),
    [
        (FAMILIES, "ModelConfig"),
        (POSITIONS, "Position"),
        (FORMATS, "WeightFormat"),
        (PANELS, "Panel"),
        (OBJECTIVES, "Objective"),
        (OPTIMISERS, "Optimiser"),
        (AUGMENTATIONS, "Augmentation"),
        (SOURCES, "Source"),
        (ENGINES, "Engine"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.category,
)
@pytest.mark.parametrize(("target", "got"), [("pathlib:Path", "<class '.*Path'>"), ("math:pi", "3.14")])
def test_extension_of_a_wrong_type_is_rejected(install, registry, base, target, got):
    install("wrong", f"{registry.category}.x = {target}")
    with pytest.raises(VitrailError, match=f"{registry.category}.x of wrong 2 must be a subclass of {base}, got {got}"):
        registry["x"]


def test_built_in_plugin_takes_precedence_over_an_extension(install):
    install("shadow", "family.vit = nowhere:X")
    assert FAMILIES["vit"] is ViTConfig
    assert list(FAMILIES).count("vit") == 1
    assert "vit" not in FAMILIES.extension_names
    assert create("ViT-Pico/2").config.extensions == {}


def test_plugin_name_of_two_packages_is_rejected(install):
    install("doubles", "family.coarse = toy_family.config:CoarseConfig")
    assert FAMILIES.extension_names == ["coarse"]  # listed, but nobody can tell which is meant
    with pytest.raises(
        VitrailError, match=r"Extension family.coarse must come from one package, got doubles 2 and toys 1.0. Uninstall"
    ):
        create("coarse")


def test_a_question(toys, call, tmp_path):
    assert "contrast" in list(QUESTIONS)
    arguments = ("compare", "digits", "--output", tmp_path / "lab", "--questions", "contrast", "--families", "mlp")
    done = call(*arguments, "--jobs", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (claim,) = report["claims"]
    low, high = claim["interval"]
    assert (claim["id"], claim["verdict"], 0 < low < claim["value"] < high) == ("T1", "supported", True)
    assert report["numbers"]["contrast"]["difference"][0] == claim["value"]
    text = (tmp_path / "lab" / "index.html").read_text()
    assert "Classes differ in brightness." in text
    assert "클래스의 밝기" in text
