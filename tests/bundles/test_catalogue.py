"""The catalogue of public checkpoints: entries equal timm's table, and checkpoints are converted by their names."""

import json
import subprocess
import sys

import pytest
import torch

from tests.bundles.test_convert import CLOTHES
from tests.hub_server import HubServer
from tests.paths import ROOT
from tests.peers import import_peer
from vitrail.bundles.catalogue import catalogue, list_published, suggest_published
from vitrail.bundles.convert import convert
from vitrail.core.errors import UsageError
from vitrail.lab.exact import redraw
from vitrail.models.create import build

FAST_NAMES = ("vit-ti16.augreg-in21k-1k", "r+vit-ti16.augreg-in21k-1k")
SLOW_NAMES = (
    *("vit-s32.augreg-in21k", "vit-b8.augreg2-in21k-1k", "vit-b16.augreg-in21k-1k-384", "vit-b32.in21k"),
    *("r26+vit-s32.augreg-in21k-1k-384", "r50+vit-b16.in21k", "mixer-b16.in21k-1k", "bit-r50x1.in21k-1k"),
    *("bit-r101x1.in21k", "deit-s16.in1k", "deit-b16.in1k-384", "dino-s16.in1k"),
    *("dinov2-s14.lvd142m", "dinov2-s14-reg4.lvd142m"),
)


def test_every_entry_equals_the_one_in_timms_table():
    models = import_peer("timm").models
    for page in ("README.md", "README.ko.md", "docs/weights.md", "docs/weights.ko.md"):
        assert str(len(catalogue())) in (ROOT / page).read_text(encoding="utf-8")
    for entry in catalogue().values():
        theirs = models.get_pretrained_cfg(entry.hub.removeprefix("timm/"))
        assert entry.hub == theirs.hf_hub_id, entry.name
        assert (entry.pixels, entry.classes, entry.licence) == (
            theirs.input_size[1],
            theirs.num_classes,
            theirs.license,
        )
        if entry.original is not None:
            assert entry.original == theirs.url, entry.name
            assert entry.original.startswith(("https://storage.googleapis.com/", "https://dl.fbaipublicfiles.com/"))


def test_all_sizes_and_families_are_listed_and_each_model_builds():
    families = {entry.config.family for entry in catalogue().values()}
    assert families == {"vit", "hybrid", "resnet", "mixer"}
    assert {entry.model[4:].partition("/")[0] for entry in catalogue().values() if entry.model.startswith("ViT-")} == {
        *("Ti", "S", "B", "L", "H"),
    }
    parameter_counts = {}
    for entry in catalogue().values():
        if entry.config not in parameter_counts:
            with torch.device("meta"):
                parameter_counts[entry.config] = sum(tensor.numel() for tensor in build(entry.config).parameters())
        assert entry.to_json()["parameters"] == entry.config.parameters == parameter_counts[entry.config], entry.name
    # As published: vision_transformer's models_test.py, timm's table.
    counts = {"vit-b16.in21k-1k": 86_567_656, "vit-b16.in21k": 85_798_656, "deit-ti16.in1k": 5_717_416}
    counts |= {"r50+vit-l32.augreg-in21k-1k": 328_994_856, "mixer-b16.in21k-1k": 59_880_472}
    counts |= {"bit-r152x4.in21k-1k": 936_533_224, "vit-h14.in21k": 630_764_800}
    assert {name: catalogue()[name].config.parameters for name in counts} == counts


@pytest.mark.slow
def test_every_parameter_count_equals_timms():
    timm = import_peer("timm")
    for entry in catalogue().values():
        with torch.device("meta"):
            theirs = timm.create_model(entry.hub.removeprefix("timm/"), pretrained=False)
        assert sum(tensor.numel() for tensor in theirs.parameters()) == entry.config.parameters, entry.name


def test_accuracies_are_cited_and_plausible():
    for entry in catalogue().values():
        scores = [score for score in (entry.accuracy, entry.linear) if score is not None]
        assert bool(scores) == (entry.source is not None)
        assert all(70 < score < 90 for score in scores)
        assert (entry.accuracy is not None) == (entry.classes == 1000)
        assert entry.source in (None, "timm", "facebookresearch/dino", "facebookresearch/dinov2")


def test_class_names_equal_timms_names_of_imagenet():
    timm = import_peer("timm")
    theirs = timm.data.ImageNetInfo("imagenet-1k")
    names = catalogue()["deit-ti16.in1k"].class_names
    assert names == [theirs.index_to_description(index).split(",")[0].strip() for index in range(1000)]
    assert catalogue()["vit-b16.augreg-in21k"].class_names is None


def test_patterns_and_names_of_other_libraries_find_checkpoints():
    assert {entry.model for entry in list_published("VIT-b16*")} == {"ViT-B/16"}
    assert [entry.name for entry in list_published("timm/deit_tiny*")] == ["deit-ti16.in1k"]
    assert len(list_published("BiT-*")) == 12
    assert suggest_published("vit_base_patch16_224.augreg_in21k_ft_in1k") == " Did you mean 'vit-b16.augreg-in21k-1k'?"
    assert suggest_published("deit-ti16.in1") == " Did you mean 'deit-ti16.in1k'?"
    assert list_published("DINOv2") == list_published("dinov2*") != []
    with pytest.raises(UsageError, match=r"got 'perceiver'\.$"):
        list_published("perceiver")
    with pytest.raises(UsageError, match=r"got ''\.$"):
        list_published("")


def test_checkpoints_of_a_collection_are_sorted_by_size_and_patch():
    names = [published.name for published in list_published("bit") if published.name.endswith("-1k")]
    assert names == [f"bit-{size}.in21k-1k" for size in ("r50x1", "r50x3", "r101x1", "r101x3", "r152x2", "r152x4")]
    assert [published.name for published in list_published("dino-")] == [
        *("dino-s8.in1k", "dino-s16.in1k", "dino-b8.in1k", "dino-b16.in1k")
    ]
    collections = [published.collection for published in list_published()]
    assert list(dict.fromkeys(collections)) == [
        name for name, following in zip(collections, [*collections[1:], ""], strict=True) if name != following
    ]


def test_weights_are_listed_without_torch_and_without_a_connection(call):
    script = (
        "import sys, socket; socket.socket.connect = None; from vitrail.cli import main\n"
        "main(['weights', 'vit-b16*', '--json'])\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    row = rows["vit-b16.augreg-in21k-1k"]
    assert (row["hub"], row["parameters"]) == ("hf:timm/vit_base_patch16_224.augreg_in21k_ft_in1k", 86_567_656)
    assert (row["accuracy"], row["source"], row["pixels"], row["licence"]) == (84.532, "timm", 224, "apache-2.0")
    assert call("weights", "deit*").stdout.count("apache-2.0") == 4
    assert json.loads(call("info", "vit-b16.augreg-in21k-1k-384", "--json").stdout)["tokens"] == 577


@pytest.mark.parametrize(
    "command",
    [
        ("predict", "NAME", "fashion-40"),
        ("finetune", "NAME", "digits", "--output", "x"),
        ("evaluate", "NAME", "digits"),
        ("inspect", "NAME", "IMAGE", "--output", "x"),
    ],
)
@pytest.mark.parametrize("name", ["vit-b16.augreg-in21k-1k", "hf:google/vit-base-patch16-224"])
def test_commands_that_need_a_bundle_explain_how_to_fetch_it(call, tmp_path, monkeypatch, command, name):
    monkeypatch.chdir(tmp_path)
    from PIL import Image

    Image.new("RGB", (8, 8)).save("image.png")
    replaced = {"NAME": name, "IMAGE": "image.png", "fashion-40": "image.png"}
    done = call(*(replaced.get(argument, argument) for argument in command))
    assert done.returncode == 2
    assert done.stderr == (
        f"vitrail: Bundle must be a folder that exists, got the public checkpoint {name!r}. Fetch it first:"
        f" vitrail convert {name} FOLDER\n"
    )


@pytest.fixture(scope="module")
def server():
    hub_server = HubServer()
    yield hub_server
    hub_server.close()


def convert_published(server, tmp_path, monkeypatch, name):
    """Publish timm's model of an entry with random weights, and convert it by the entry's name.

    Return the entry, the report and the config.json of the bundle.
    """
    timm = import_peer("timm")
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra `hub`")
    entry = catalogue()[name]
    torch.manual_seed(0)
    model = redraw(timm.create_model(entry.hub.removeprefix("timm/"), pretrained=False), std=0.02).eval()
    timm.models._hub.save_for_hf(model, tmp_path / "theirs", safe_serialization=True)
    server.publish(entry.hub, tmp_path / "theirs")
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_URL_HOSTS", frozenset({"localhost"}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    report = convert(name, tmp_path / "ours", "vitrail", images=CLOTHES[:2])
    labels = json.loads((tmp_path / "ours" / "labels.json").read_text())
    assert labels is None if entry.classes != 1000 else (labels[310], labels[517]) == ("ant", "crane (517)")
    return entry, report, json.loads((tmp_path / "ours" / "config.json").read_text())


def check_conversion(entry, report, config):
    assert report["model"] == (entry.config.family if entry.settings else entry.model)
    assert report["parameters"] == entry.config.parameters
    assert (config["resolution"], config["classes"]) == ([entry.pixels] * 2, entry.classes)
    assert report["source"]["address"].startswith(f"{entry.address}@")
    assert report["proofs"][0]["largest_difference"] < 1e-4


@pytest.mark.parametrize("name", FAST_NAMES)
def test_a_small_checkpoint_is_fetched_by_name_and_proved(server, tmp_path, monkeypatch, name):
    check_conversion(*convert_published(server, tmp_path, monkeypatch, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_NAMES)
def test_a_large_checkpoint_is_fetched_by_name_and_proved(server, tmp_path, monkeypatch, name):
    check_conversion(*convert_published(server, tmp_path, monkeypatch, name))
