"""`vitrail compare --bundles`: measurements with intervals and references, pairwise comparisons, and the page."""

import json

import numpy as np
import pytest
import torch

from vitrail.bundles.bundle import Bundle, load, save
from vitrail.core.intervals import wilson_interval
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.feature_classifiers import fit_ridge_head
from vitrail.evaluation.features import extract_features
from vitrail.lab.exact import redraw
from vitrail.lab.perturbations import mean_of
from vitrail.lab.profile import Measurement, Profile, _name_bundles, compare_pairs, plan_perturbations, profile
from vitrail.models import zoo
from vitrail.models.create import build

IMAGES = open_data("fashion-40").splits["test"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Save a ViT without positions and a CNN with random weights and heads fitted to the images."""
    folder = tmp_path_factory.mktemp("bundles")
    preprocess = Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    for name, config in {
        "blind": zoo.find("ViT-Nano/7").replace(position="none"),
        "cnn": zoo.find("ResNet-Nano"),
    }.items():
        model = redraw(build(config))
        head, _ = fit_ridge_head(extract_features(model, preprocess, IMAGES), IMAGES.labels, classes=10)
        with torch.no_grad():
            model.head.weight.copy_(torch.from_numpy(head.weight.T))
            model.head.bias.copy_(torch.from_numpy(head.bias))
        save(Bundle(model=model, preprocess=preprocess, labels=open_data("fashion-40").labels), folder / name)
    return folder


@pytest.fixture(scope="module")
def profiled(bundles):
    return profile("fashion-40", [bundles / "blind", bundles / "cnn"], tell=lambda _: None)


def test_profile_shows_that_a_vit_without_positions_ignores_order(profiled):
    profiles, _, split = profiled
    blind, cnn = (bundle_profile.numbers for bundle_profile in profiles)
    assert len(split) == 40
    assert blind["accuracy"].estimate.value > 0.6
    assert blind["shuffle"].estimate.value == 1
    assert blind["shuffle"].reference == 1
    assert cnn["shuffle"].estimate.value < 1
    assert "nearest" in blind
    assert "nearest" not in cnn
    assert blind["accuracy"].reference == pytest.approx(0.1)
    assert all(
        low <= number.estimate.value <= high + 1e-9 for number in blind.values() for low, high in [number.interval]
    )
    assert blind["shuffle"].interval == pytest.approx(wilson_interval(29, 29), abs=0.05)
    assert cnn["accuracy"].interval[1] <= 1
    assert set(profiles[0].accuracies) >= {"", "shuffle 4", "drop 0.5", "low 0.25", "high 0.25", "shift 3.57"}
    assert profiles[0].cost["parameters"] == zoo.find("ViT-Nano/7").replace(position="none").parameters


def test_pairs_of_bundles_are_compared_on_the_same_images(profiled):
    profiles, pairs, _ = profiled
    by_name = {pair.measure: pair for pair in pairs}
    assert set(by_name) == {"accuracy", "shift", "shuffle", "drop", "low", "high", "area", "similarity", "over"}
    assert by_name["shuffle"].is_significant
    assert by_name["shuffle"].difference.value == pytest.approx(1 - profiles[1].numbers["shuffle"].estimate.value)
    same = Profile(
        "x", load("fashion"), {"a": Measurement(mean_of(np.arange(9.0)), np.arange(9.0))}, {}, {}, {}, None, [], {}
    )
    (contrast,) = compare_pairs([same, same])
    assert not contrast.is_significant


def test_profile_writes_page_figures_and_json(call, tmp_path, bundles, profiled, monkeypatch):
    monkeypatch.setattr("vitrail.lab.profile.profile", lambda *_, **__: profiled)  # measured above
    arguments = ["compare", "fashion-40", "--bundles", bundles / "blind", bundles / "cnn", "--output", tmp_path / "out"]
    completed = call(*arguments)
    assert completed.returncode == 0, completed.stderr
    assert "cnn" in completed.stdout
    page = (tmp_path / "out" / "index.html").read_text()
    document = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert [bundle["name"] for bundle in document["bundles"]] == ["blind", "cnn"]
    assert "a ViT without positions: 100.0 %, exactly" in page
    assert "위치 임베딩이 없는 ViT" in page
    assert len(list((tmp_path / "out" / "figures").glob("*.svg"))) == 20
    assert len(list((tmp_path / "out" / "figures").glob("*.ko.svg"))) == 10
    replaced = call(*arguments, "--json")
    assert json.loads(replaced.stdout) == document


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "--bundles", "fashion", "--questions", "data"], "--bundles must be used without"),
        (["digits", "--bundles", "nothing-here"], "Bundle must be"),
        (["digits", "--bundles", "fashion", "fashion"], "Bundles must differ"),
        (["fashion-40", "--bundles", "fashion", "--budget", "1x"], "Budget must be a time"),
        (["fashion-40", "--bundles", "fashion", "--budget", "0.000001s"], "Budget must be at least"),
    ],
)
def test_profile_rejects_invalid_options(call, tmp_path, arguments, message):
    completed = call("compare", *arguments, "--output", tmp_path / "out")
    assert completed.returncode == 2
    assert message in completed.stderr
    assert not (tmp_path / "out").exists()


def test_profile_rejects_a_folder_with_other_files(call, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    completed = call("compare", "fashion-40", "--bundles", "fashion", "--output", tmp_path)
    assert completed.returncode == 2
    assert "Output must be a new folder" in completed.stderr


def test_perturbation_plan_is_shared_by_bundles_of_different_resolutions():
    models = [zoo.find("ViT-Nano/7"), zoo.find("ResNet-Nano").replace(resolution=56), zoo.find("iGPT-Micro")]
    plan = plan_perturbations([Bundle(model=build(config), preprocess=plain(config)) for config in models])
    assert plan.distances(14) == {1: 1 / 14, 2: 1 / 7}
    assert plan.distances(56) == {4: 1 / 14, 8: 1 / 7}
    assert plan.grids == [(2, 2), (7, 7), (14, 14)]
    assert plan.reported_grid == (2, 2)  # does not cut the 4 x 4 patches
    assert plan.keeps_all_patches
    assert plan.drop_grid == (4, 4)
    odd = [zoo.find("ViT-Micro/4"), zoo.find("ResNet-Nano/8").replace(channels=1)]
    assert not plan_perturbations(
        [Bundle(model=build(config), preprocess=plain(config)) for config in odd]
    ).keeps_all_patches  # 7 x 7, 32 px


def test_shuffle_reference_is_exact_only_for_uncut_patches():
    configs = [zoo.find("ViT-Micro/4"), zoo.find("ViT-Nano/7"), zoo.find("ResNet-Nano")]
    plan = plan_perturbations([Bundle(model=build(config), preprocess=plain(config)) for config in configs])
    assert plan.reported_grid == (4, 4)  # 7 x 7 patches are cut, 4 x 4 are not
    assert [plan.keeps_patches(config) for config in configs] == [False, True, False]
    alone = plan_perturbations([Bundle(model=build(config), preprocess=plain(config)) for config in configs[1:]])
    assert [alone.keeps_patches(config) for config in configs[1:]] == [True, True]


def plain(config):
    return Preprocess(resolution=config.resolution, mean=(0.5,), std=(0.5,))


def test_bundle_names_are_as_short_as_possible():
    assert list(_name_bundles(["a/bundle", "b/bundle", "c"])) == ["a/bundle", "b/bundle", "c"]
    assert list(_name_bundles(["a/one", "b/two/"])) == ["one", "two"]
