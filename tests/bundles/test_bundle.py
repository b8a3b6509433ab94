"""Bundles: saving and loading are exact, corrupt bundles are refused, writes are atomic."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

import vitrail
from tests.paths import FIXTURES
from vitrail.bundles.card import model_card
from vitrail.bundles.pretrained import create
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.core.files import MANIFEST, atomic_folder, write_json
from vitrail.core.terminal import print_json
from vitrail.data.preprocess import Preprocess
from vitrail.lab.exact import redraw

FIXTURE = FIXTURES / "bundle-format-1"
GREY_8 = Preprocess(resolution=(8, 8), crop_fraction=1.0, mean=(0.5,), std=(0.5,))


def tiny(**changes):
    settings = {"depth": 2, "width": 16, "heads": 2, "mlp": 16, "classes": 3, **changes}
    return redraw(create("ViT-Pico/2", **settings))


def make(**changes):
    return vitrail.Bundle(model=tiny(**changes), preprocess=GREY_8, labels=("a", "b", "c"), provenance={"seed": 1})


@settings(max_examples=25)
@given(
    position=st.sampled_from(["none", "learned-1d", "learned-2d", "sincos-1d", "sincos-2d", "relative", "rope-2d"]),
    pool=st.sampled_from(["cls", "gap", "map"]),
    registers=st.integers(0, 2),
    representation=st.sampled_from(["none", "tanh"]),
    norm=st.sampled_from(["layer", "batch", "none"]),
    labels=st.none() | st.lists(st.text(min_size=1), min_size=3, max_size=3, unique=True),
)
def test_a_saved_bundle_loads_with_equal_parts_and_logits(
    tmp_path_factory, position, pool, registers, representation, norm, labels
):
    model = tiny(position=position, pool=pool, registers=registers, representation=representation, norm=norm)
    labels = None if labels is None else tuple(labels)
    bundle = vitrail.Bundle(model=model, preprocess=GREY_8, labels=labels, provenance={"a": [1, None, "é"]})
    path = tmp_path_factory.mktemp("bundles") / "one"
    vitrail.save(bundle, path)
    loaded = vitrail.load(path)
    assert loaded.model.config == model.config
    assert (loaded.labels, loaded.preprocess, loaded.provenance) == (labels, GREY_8, bundle.provenance)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded.model(images), model(images))
    assert not loaded.model.training


def test_equal_bundles_are_written_as_equal_bytes(tmp_path):
    for name in ("one", "other"):
        vitrail.save(make(), tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()
    header = (tmp_path / "one" / "model.safetensors").read_bytes()[8:200]
    assert b"__metadata__" not in header


def test_a_loaded_bundle_can_be_trained_and_moved(tmp_path):
    vitrail.save(make(position="rope-2d"), tmp_path / "one")
    model = vitrail.load(tmp_path / "one").model.train()
    model.double()(torch.randn(2, 1, 8, 8, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_bundle_without_a_head_of_version_0_1_loads_without_classes():
    """Version 0.1 wrote it with one class and a head of zeros."""
    bundle = vitrail.load(FIXTURES / "bundle-without-head")
    assert (bundle.model.config.classes, bundle.model.config.predicts) == (0, "features")
    features = bundle.model(torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8))
    expected = torch.tensor([[1.2687, -0.5735, -1.8779, -0.0875, -0.3878, -0.4341, 1.0468, 1.0453]])
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match="must have been trained to classify"):
        bundle.info.check_classifies()


def test_the_fixture_of_format_1_loads_with_the_same_logits():
    bundle = vitrail.load(FIXTURE)
    assert bundle.labels == ("cat", "dog", "새")
    assert bundle.preprocess.std == (0.25,)
    logits = bundle.model(torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8))
    expected = torch.tensor([[-0.14415787, 0.96460688, 0.20847486]])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_loading_does_not_import_torchs_compiler():
    """The import takes more than a second, and `vitrail predict` begins by loading a bundle."""
    script = "import sys, vitrail; vitrail.load(sys.argv[1]); sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script, FIXTURE], check=False).returncode == 0


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "copy")
    return tmp_path / "copy"


def load_error(path):
    """Load a corrupt bundle, and return its error message, which must be one line."""
    with pytest.raises(VitrailError) as caught:
        vitrail.load(path)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


# `make test-all` tests every byte and every bit, other runs a sample.
sampled = pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])


@sampled
def test_truncation_of_any_file_at_any_byte_is_detected(copy, step):
    for file in sorted(copy.iterdir()):
        content = file.read_bytes()
        for length in range(0, len(content), step):
            file.write_bytes(content[:length])
            assert file.name in load_error(copy)
        file.write_bytes(content)
    assert vitrail.load(copy).labels


@sampled
def test_a_flipped_bit_in_any_file_is_detected(copy, step):
    for file in sorted(copy.iterdir()):
        content = file.read_bytes()
        for bit in range(0, 8 * len(content), 3 * step):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            load_error(copy)
        file.write_bytes(content)
    assert vitrail.load(copy).labels


def rewrite(folder, name, change):
    """Edit a JSON file of a bundle and update the manifest."""
    document = change(json.loads((folder / name).read_text()))
    write_json(folder / name, document)
    remake_manifest(folder)


def remake_manifest(folder):
    """Write the manifest of a bundle anew, with the checksums of its current files."""
    from vitrail.core.files import _write_manifest

    (folder / MANIFEST).unlink()
    _write_manifest(folder)


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURE.iterdir()))
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    assert name in load_error(copy)


def test_missing_extra_and_misshapen_tensors_are_named(copy):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors["head.bias"] = torch.zeros(4)
    tensors["extra"] = torch.zeros(1)
    tensors["norm.bias"] = tensors["norm.bias"].long()
    del tensors["cls_token"]
    save_file(tensors, path)
    remake_manifest(copy)
    message = load_error(copy)
    assert "cls_token is missing" in message
    assert "extra is unknown" in message
    assert "norm.bias has numbers of type torch.int64 instead of torch.float32" in message
    assert "head.bias has shape (4,) instead of (3,)" in message


def test_a_newer_format_and_an_unknown_family_are_refused(copy):
    rewrite(copy, "config.json", lambda fields: {**fields, "format": 3})
    assert "has format 3; this vitrail reads up to 2. Upgrade vitrail." in load_error(copy)
    rewrite(copy, "config.json", lambda fields: {**fields, "format": 1, "family": "perceiver"})
    assert "Family must be one of vit, hybrid, resnet, mixer, lstm, igpt, mlp, got 'perceiver'" in load_error(copy)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda fields: {**fields, "heads": 3}, "Width must be a multiple of heads"),
        ("config.json", lambda fields: {**fields, "colour": 3}, "unknown fields: colour"),
        ("config.json", lambda fields: [], "does not state its format"),
        ("config.json", lambda fields: {**fields, "resolution": [8, "8"]}, "Resolution must be"),
        ("labels.json", lambda labels: labels[:2], "Labels must be one for each of the model's 3 classes, got 2"),
        ("labels.json", lambda labels: "abc", "Labels must be a list of strings"),
        ("provenance.json", lambda provenance: [], "Provenance must be a dictionary"),
        ("config.json", lambda fields: {**fields, "format": True}, "does not state its format"),
        ("config.json", lambda fields: {**fields, "family": ["vit"]}, "mlp, got ['vit']"),
        ("preprocess.json", lambda fields: {**fields, "mean": "x"}, "Mean must be a number for each channel"),
        (
            "preprocess.json",
            lambda fields: {**fields, "resolution": [9, 9]},
            "must output images at the model's resolution",
        ),
    ],
)
def test_invalid_documents_with_valid_checksums_are_refused(copy, name, change, message):
    rewrite(copy, name, change)
    assert message in load_error(copy)


# Settings of a small bundle with a large grid, just below the limit for tables.
LARGE_GRIDS = [
    {"resolution": [178, 178], "position": "relative", "position_at": "every", "wrap": True},
    {"resolution": [300, 300], "attention": "local"},
    {"resolution": [300, 300], "attention": "strided"},
    {"resolution": [2000, 2000], "position": "sincos-2d"},
]


def test_a_small_bundle_with_a_large_grid_is_refused_without_allocating_memory(copy):
    """Its header is compared with the shapes of its configuration before any table is allocated."""
    plain = json.loads((copy / "config.json").read_text())
    folders = []
    for number, changes in enumerate(LARGE_GRIDS):
        folders.append(copy.parent / str(number))
        shutil.copytree(copy, folders[-1])
        rewrite(folders[-1], "config.json", lambda fields, changes=changes: {**plain, **changes})
        size = changes["resolution"]
        rewrite(folders[-1], "preprocess.json", lambda fields, size=size: {**fields, "resolution": size})
    script = (
        "import sys, vitrail\n"
        "from pathlib import Path\n"
        "def peak():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('VmHWM'))\n"
        "vitrail.load(sys.argv[1])\n"
        "before = peak()\n"
        "for path in sys.argv[2:]:\n"
        "    try:\n"
        "        vitrail.load(path)\n"
        "    except vitrail.core.errors.CorruptFileError as error:\n"
        "        assert 'does not fit' in str(error), error\n"
        "    else:\n"
        "        sys.exit('loaded')\n"
        "print(peak() - before)\n"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of memory is read from /proc")
    done = subprocess.run([sys.executable, "-c", script, copy, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20_000  # kB


def test_paths_that_are_not_bundles_are_refused(tmp_path):
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name, message in (("nowhere", "that exists"), ("file", "got the file"), ("empty", f"without {MANIFEST}")):
        with pytest.raises(UsageError, match=message):
            vitrail.load(tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ("a", "b")}, "one for each of the model's 3 classes, got 2"),
        ({"labels": ("a", "b", "a")}, "must differ from each other, got 'a' twice"),
        ({"labels": ("a", "", "c")}, "a string that is not empty"),
        ({"preprocess": Preprocess()}, "must output images at the model's resolution"),
        ({"preprocess": GREY_8.replace(mean=(0.5,) * 3, std=(0.5,) * 3)}, "must give the model's 1 channels, got 3"),
    ],
)
def test_parts_that_do_not_match_the_model_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        vitrail.Bundle(**{"model": tiny(), "preprocess": GREY_8, **changes})


# Atomic writes


def test_an_existing_output_is_refused_and_replaced_only_by_force(tmp_path):
    vitrail.save(make(), tmp_path / "one")
    before = (tmp_path / "one" / MANIFEST).read_bytes()
    with pytest.raises(UsageError, match="Output must not exist yet"):
        vitrail.save(make(pool="gap"), tmp_path / "one")
    assert (tmp_path / "one" / MANIFEST).read_bytes() == before
    vitrail.save(make(pool="gap"), tmp_path / "one", force=True)
    assert vitrail.load(tmp_path / "one").model.config.pool == "gap"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_failing_write_leaves_nothing(tmp_path):
    bundle = make()
    bundle.provenance["oops"] = object()
    with pytest.raises(UsageError, match="Provenance must be a dictionary that JSON can represent"):
        vitrail.save(bundle, tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_match_its_configuration_is_refused_before_writing(tmp_path):
    bundle = make()
    bundle.model.norm = torch.nn.LayerNorm(5)
    with pytest.raises(UsageError, match=r"norm\.bias has shape \(5,\) instead of \(16,\)"):
        vitrail.save(bundle, tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


HEADS = [
    (torch.nn.Linear(15, 3), "got Linear(in_features=15, out_features=3, bias=True)"),
    (torch.nn.Sequential(torch.nn.Linear(16, 3), torch.nn.Flatten()), "got Sequential."),
    (torch.nn.Linear(16, 5), "Labels must be one for each of the model's 5 classes, got 3. Use dataclasses.replace("),
    (torch.nn.Identity(), "Labels must be one for each of the model's 0 classes, got 3."),
]


@pytest.mark.parametrize(("head", "message"), HEADS, ids=lambda value: str(value)[:30])
def test_a_head_that_does_not_match_the_model_is_refused_before_writing(tmp_path, head, message):
    bundle = make()
    bundle.model.head = head
    with pytest.raises(UsageError) as caught:
        vitrail.save(bundle, tmp_path / "one")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_assigned_head_sets_the_classes(tmp_path):
    bundle = make(representation="tanh")
    bundle.model.head = torch.nn.Linear(16, 2)
    assert bundle.model.config.classes == 2
    vitrail.save(dataclasses.replace(bundle, labels=("yes", "no")), tmp_path / "one")
    loaded = vitrail.load(tmp_path / "one")
    assert (loaded.labels, loaded.model.config.representation) == (("yes", "no"), "tanh")
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded.model(images), bundle.model(images))


def test_a_model_card_lists_the_provenance_as_nested_items():
    provenance = {
        "data_fingerprint": "d567",
        "seconds": 5266.7,
        "amp": True,
        "cache": None,
        "command": "vitrail train a\n*b*",
        "scores": {"split": "test", "accuracy": 0.9297, "accuracy_interval": [0.92452255, 0.93454743], "top5": None},
        "proofs": [{"library": "timm", "difference": 1.25e-6}, {"library": "none"}],
        "finetuned_from": {"bundle": "deit", "changes": ["a head of 2 classes", "grey"], "old": {"data": "x", "n": 3}},
        "damaged": {"policy": "skip", "files": {f"my_{number}.png": "cut" for number in range(23)}},
    }
    _, _, listed = model_card(tiny().config, provenance).partition("## Where it comes from\n\n")
    assert listed.splitlines()[:25] == [
        "- data fingerprint: d567",
        "- seconds: 5266.7",
        "- amp: yes",
        "- cache: none",
        "- command: `vitrail train a *b*`",
        "- scores:",
        "  - split: test",
        "  - accuracy: 0.9297",
        "  - accuracy interval: 0.924523, 0.934547",
        "  - top5: none",
        "- proofs:",
        "  - library timm, difference 1.25e-06",
        "  - library none",
        "- finetuned from:",
        "  - bundle: deit",
        "  - changes:",
        "    - a head of 2 classes",
        "    - grey",
        "  - old:",
        "    - data: x",
        "    - n: 3",
        "- damaged:",
        "  - policy: skip",
        "  - files:",
        "    - my_0.png: cut",
    ]
    assert listed.endswith("    - my_19.png: cut\n    - and 3 more, in provenance.json\n")


@pytest.fixture
def scored(tmp_path):
    """A bundle with scores, loaded from a file."""
    provenance = {"seed": 1, "scores": {"accuracy": 0.9}, "proofs": [{"library": "timm", "difference": 1e-6}]}
    vitrail.save(dataclasses.replace(make(resize_rule="timm"), provenance=provenance), tmp_path / "scored")
    return vitrail.load(tmp_path / "scored")


def test_scores_stay_with_the_weights_they_were_measured_on(tmp_path, scored):
    def save_and_load(bundle):
        vitrail.save(bundle, tmp_path / "new", force=True)
        return vitrail.load(tmp_path / "new")

    assert save_and_load(scored).provenance == scored.provenance
    assert list(scored.provenance) == ["seed", "scores", "proofs"]
    assert "- scores:\n  - accuracy: 0.9\n- proofs:\n" in (tmp_path / "new" / "README.md").read_text()
    # Another model, replaced as in the documentation.
    other_model = tiny(classes=2, resize_rule="timm")
    replaced = dataclasses.replace(scored, model=other_model, labels=("yes", "no"))
    assert replaced.provenance == save_and_load(replaced).provenance == {"seed": 1}
    assert replaced.preprocess == scored.preprocess == save_and_load(replaced).preprocess
    assert save_and_load(replaced).model.config.resize_rule == "timm"
    # New scores that are passed with another model are kept.
    new_provenance = {**scored.provenance, "scores": {"accuracy": 0.5}}
    rescored = dataclasses.replace(scored, model=other_model, labels=None, provenance=new_provenance)
    assert save_and_load(rescored).provenance == {"seed": 1, "scores": {"accuracy": 0.5}}
    # The same model, trained further in place.
    with torch.no_grad():
        scored.model.norm.bias += 1
    assert save_and_load(scored).provenance == {"seed": 1}
    assert "accuracy" not in (tmp_path / "new" / "README.md").read_text()


def test_a_new_head_in_place_removes_the_scores(tmp_path, scored):
    scored.model.reset_classifier(3)
    assert "scores" not in dataclasses.replace(scored, labels=("x", "y", "z")).provenance
    vitrail.save(scored, tmp_path / "new")
    assert "scores" not in vitrail.load(tmp_path / "new").provenance


def test_changed_preprocessing_or_labels_remove_the_scores(scored):
    preprocess = dataclasses.replace(scored.preprocess, mean=(0.1,) * scored.preprocess.channels)
    assert dataclasses.replace(scored, preprocess=preprocess).provenance == {"seed": 1}
    relabelled = dataclasses.replace(scored, labels=("left", "right", "none")[: scored.model.config.classes])
    assert relabelled.provenance == {"seed": 1}
    assert dataclasses.replace(scored, preprocess=dataclasses.replace(scored.preprocess)).provenance["scores"]
    fashion = vitrail.load("fashion")
    assert "scores" not in dataclasses.replace(fashion, labels=fashion.labels[::-1]).provenance


def test_changed_weights_of_a_run_remove_its_scores(tmp_path):
    result = vitrail.train("digits", "ViT-Pico/2", steps=1, quiet=True)
    vitrail.save(result.bundle, tmp_path / "as-it-is")
    assert vitrail.load(tmp_path / "as-it-is").provenance["scores"] == result.bundle.provenance["scores"]
    with torch.no_grad():
        result.bundle.model.norm.bias += 1
    vitrail.save(result.bundle, tmp_path / "changed")
    assert "scores" not in vitrail.load(tmp_path / "changed").provenance


def test_a_failing_write_keeps_the_existing_bundle(tmp_path):
    vitrail.save(make(), tmp_path / "one")

    def write_half():
        with atomic_folder(tmp_path / "one", force=True) as folder:
            (folder / "config.json").write_text("{}")
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        write_half()
    assert vitrail.load(tmp_path / "one").labels == ("a", "b", "c")


@pytest.mark.parametrize("exchange", [True, False])
def test_an_interrupt_between_the_renames_keeps_the_existing_bundle(tmp_path, monkeypatch, exchange):
    """Ctrl-C between the renames of a forced overwrite, with and without the system's atomic exchange."""
    vitrail.save(make(), tmp_path / "one")

    def interrupt(*paths):
        raise KeyboardInterrupt

    if exchange:
        monkeypatch.setattr("vitrail.core.files._exchange_paths", interrupt)
    else:
        monkeypatch.setattr("vitrail.core.files._exchange_paths", lambda first, second: False)
        rename = Path.rename

        def interrupt_final_rename(self, target):
            return interrupt() if self.name.startswith(".one.writing") else rename(self, target)

        monkeypatch.setattr(Path, "rename", interrupt_final_rename)
    with pytest.raises(KeyboardInterrupt):
        vitrail.save(make(pool="gap"), tmp_path / "one", force=True)
    assert vitrail.load(tmp_path / "one").model.config.pool == "cls"


def test_force_works_without_the_systems_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.core.files._exchange_paths", lambda first, second: False)
    vitrail.save(make(), tmp_path / "one")
    vitrail.save(make(pool="gap"), tmp_path / "one", force=True)
    assert vitrail.load(tmp_path / "one").model.config.pool == "gap"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_force_replaces_only_folders_that_vitrail_wrote(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "thesis")
    for name in ("thesis", "notes.txt", "link"):
        with pytest.raises(UsageError, match="must be a folder that vitrail wrote"):
            vitrail.save(make(), tmp_path / name, force=True)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "years of work"
    vitrail.save(make(), tmp_path / "one")
    (tmp_path / "one" / ".DS_Store").touch()
    vitrail.save(make(), tmp_path / "one", force=True)
    (tmp_path / "one" / "more").mkdir()
    for name in ("more/notes.txt", ".env", "link"):
        user_file = tmp_path / "one" / name
        user_file.symlink_to(tmp_path / "thesis") if name == "link" else user_file.write_text("mine")
        with pytest.raises(
            UsageError, match=f"Output must contain only files that vitrail wrote, got '{user_file}' in it"
        ):
            vitrail.save(make(), tmp_path / "one", force=True)
        user_file.unlink()
    for manifest in ('{"name": "My app"}', "{brok", "[]"):  # of another program, or damaged
        (tmp_path / "one" / "manifest.json").write_text(manifest)
        with pytest.raises(UsageError, match="must be a folder that vitrail wrote"):
            vitrail.save(make(), tmp_path / "one", force=True)
    (tmp_path / "empty").mkdir()
    vitrail.save(make(), tmp_path / "empty", force=True)
    assert vitrail.load(tmp_path / "empty").labels == ("a", "b", "c")


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    bundle = make()
    with torch.no_grad():
        bundle.model.head.bias[1] = torch.nan
    with pytest.raises(UsageError, match=r"finite weights, got NaN or infinity in head\.bias"):
        vitrail.save(bundle, tmp_path / "one")


def change_tensor(folder, name, change):
    """Change a tensor of a bundle and update the manifest."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    remake_manifest(folder)


@pytest.fixture
def image(tmp_path):
    (tmp_path / "pictures" / "cat").mkdir(parents=True)
    Image.new("L", (8, 8), 200).save(tmp_path / "pictures" / "cat" / "a.png")
    return tmp_path / "pictures" / "cat" / "a.png"


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_weights_that_are_not_finite_are_not_loaded(copy, image, call, number):
    """`predict --json` would print NaN, which is not valid JSON."""
    change_tensor(
        copy, "blocks.0.mlp.fc1.weight", lambda weight: weight.index_fill(0, torch.tensor([2]), float(number))
    )
    assert "must hold finite numbers, got NaN or infinity in blocks.0.mlp.fc1.weight" in load_error(copy)
    done = call("predict", copy, image, "--json")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)


def test_predictions_that_overflow_are_errors(copy, image, call, tmp_path):
    change_tensor(copy, "head.weight", lambda weight: torch.full_like(weight, 2e38))
    change_tensor(copy, "norm.weight", lambda weight: torch.full_like(weight, 1e30))
    vitrail.load(copy)  # every weight is finite, but their sum is not
    done = call("predict", copy, image, "--json")
    assert done.returncode == 1
    assert "must be finite, got NaN or infinity" in json.loads(done.stdout)["error"]
    for command in (("inspect", copy, image, "--output", tmp_path / "page"), ("evaluate", copy, tmp_path / "pictures")):
        done = call(*command)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
        assert "must be finite, got NaN or infinity" in done.stderr
    with pytest.raises(CorruptFileError, match="must be finite, got NaN or infinity"):
        vitrail.Classifier(copy).predict([np.zeros((8, 8), np.uint8)])


def test_printed_json_has_null_for_numbers_that_are_not_finite(capsys):
    print_json({"a": [float("nan"), {"b": float("-inf")}], "c": (1.5, "NaN")})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": [None, {"b": None}],
        "c": [1.5, "NaN"],
    }


def test_weights_of_mixed_or_unsupported_dtypes_are_refused(copy):
    change_tensor(copy, "norm.weight", lambda weight: weight.half())
    assert "norm.weight has numbers of type torch.float16 instead of torch.float32" in load_error(copy)
    change_tensor(copy, "norm.weight", lambda weight: weight.to(torch.float8_e4m3fn))
    assert "norm.weight has numbers of type unknown instead of torch.float32" in load_error(copy)


@pytest.mark.parametrize(
    "invalid_parts",
    [
        {"model": None},
        {"model": torch.nn.Linear(1, 1)},
        {"preprocess": None},
        {"labels": "abc"},
        {"provenance": None},
        {"provenance": {1: 2}},
        {"provenance": {"a": float("nan")}},
    ],
)
def test_parts_of_wrong_types_are_refused(invalid_parts):
    with pytest.raises(UsageError):
        vitrail.Bundle(**{"model": tiny(), "preprocess": GREY_8, **invalid_parts})


def test_an_output_that_appears_during_the_write_is_not_overwritten(tmp_path):
    def write():
        with atomic_folder(tmp_path / "one") as folder:
            (folder / "config.json").write_text("{}")
            (tmp_path / "one").mkdir()
            (tmp_path / "one" / "precious").write_text("mine")

    with pytest.raises(VitrailError, match="the previous content is unchanged"):
        write()
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["precious"]


def test_half_precision_bundles_predict(tmp_path):
    bundle = make()
    bundle.model.bfloat16()
    vitrail.save(bundle, tmp_path / "one")
    predictions = vitrail.Classifier(tmp_path / "one").predict([np.zeros((8, 8), np.uint8)])
    assert len(predictions[0]) == 3
    assert vitrail.load(tmp_path / "one").model.head.weight.dtype == torch.bfloat16


def test_a_model_of_13_channels_predicts_from_arrays(tmp_path):
    model = tiny(channels=13)
    preprocess = GREY_8.replace(mean=(0.5,) * 13, std=(0.5,) * 13)
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess), tmp_path / "one")
    bands = np.random.default_rng(0).integers(0, 255, (8, 8, 13), dtype=np.uint8)
    assert len(vitrail.Classifier(tmp_path / "one").predict([bands])[0]) == 3
    torch.testing.assert_close(preprocess([bands])[0, 4], torch.from_numpy(bands[..., 4] / 127.5 - 1).float())
    with pytest.raises(UsageError, match="Image of 13 bands must be a uint8 array"):
        preprocess([bands[..., :3]])


def test_an_output_that_cannot_be_written_gives_an_error_of_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(VitrailError, match="Output must be in a folder that can be written"):
        vitrail.save(make(), tmp_path / "file" / "one")


def test_a_killed_write_leaves_no_bundle(tmp_path):
    """SIGKILL while files are being written leaves nothing under the final name."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from vitrail.core.files import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'config.json').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "one"], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "one").exists()


# Preprocessing and predictions


@pytest.mark.parametrize(
    "invalid_settings",
    [
        {"crop_fraction": 0.0},
        {"crop_fraction": 1.5},
        {"interpolation": "nearest"},
        {"mean": ()},
        {"mean": (0.5,)},
        {"std": (0.0, 1.0, 1.0)},
        {"resolution": (0, 8)},
        {"mean": ("a", "b", "c")},
    ],
)
def test_invalid_preprocessing_is_refused(invalid_settings):
    with pytest.raises(UsageError) as caught:
        Preprocess(**invalid_settings)
    assert "\n" not in str(caught.value)


@given(width=st.integers(1, 60), height=st.integers(1, 60), rows=st.integers(1, 20), columns=st.integers(1, 20))
def test_images_of_any_size_are_resized_to_the_models_resolution(width, height, rows, columns):
    preprocess = Preprocess(resolution=(rows, columns), crop_fraction=0.8)
    assert preprocess([np.zeros((height, width, 3), np.uint8)]).shape == (1, 3, rows, columns)


def test_values_that_are_not_images_are_refused(tmp_path):
    for not_an_image in (np.zeros((4, 4)), np.zeros((4, 4, 3, 1), np.uint8), np.zeros((0, 4), np.uint8), 7):
        with pytest.raises(UsageError):
            Preprocess()([not_an_image])
    with pytest.raises(UsageError, match="Image must be a file that exists"):
        Preprocess()([tmp_path / "nowhere.png"])
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnonsense")
    with pytest.raises(CorruptFileError, match=r"broken\.png' cannot be decoded"):
        Preprocess()([tmp_path / "broken.png"])


def test_classifier_returns_labels_sorted_by_score():
    classifier, bundle = vitrail.Classifier(FIXTURE), vitrail.load(FIXTURE)
    images = [np.full((20, 10), level, np.uint8) for level in (0, 128, 255)]
    predictions = classifier.predict(iter(images), batch_size=2)
    assert len(predictions) == 3
    for prediction, image in zip(predictions, images, strict=True):
        logits = bundle.model(bundle.preprocess([image]))[0]
        order = logits.argsort(descending=True).tolist()
        assert [entry["label"] for entry in prediction] == [("cat", "dog", "새")[index] for index in order]
        assert sum(entry["score"] for entry in prediction) == pytest.approx(1, abs=1e-6)
    assert [len(prediction) for prediction in classifier.predict(images, top_k=1)] == [1, 1, 1]
    for invalid_options in ({"top_k": 0}, {"batch_size": 0}):
        with pytest.raises(UsageError, match="must be an integer from 1"):
            classifier.predict(images, **invalid_options)
    with pytest.raises(UsageError, match="Images must be a list, got one str"):
        classifier.predict("cat.jpg")
