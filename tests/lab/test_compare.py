"""The bias lab: trials and their ids, statistics against SciPy, plans, and identical results of every executor."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import vitrail
from vitrail.core.errors import CorruptFileError, MissingError, UsageError
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources.registry import open_data
from vitrail.lab import compare as lab_compare
from vitrail.lab.compare import compare
from vitrail.lab.executor import run_trials
from vitrail.lab.images import prepare, restore, store
from vitrail.lab.measurements import measurement_trial
from vitrail.lab.permute import LEVELS, permutation, permute_input
from vitrail.lab.plan import make_plan, parse_budget
from vitrail.lab.question import Lab, Question
from vitrail.lab.questions.data import DataQuestion
from vitrail.lab.training import RATE_SEEDS
from vitrail.lab.trial import Outcome, Trial, pack, unpack
from vitrail.lab.trial_results import Results
from vitrail.models import zoo
from vitrail.models.create import build

DIGITS = prepare(open_data("digits"))


# Images


def test_splits_do_not_overlap_and_subsets_are_nested():
    digits = open_data("digits").splits["train"].images
    assert len(DIGITS.training) + len(DIGITS.validation) == len(digits)
    seen = {image.tobytes() for image in np.asarray(DIGITS.training.images)}
    assert not seen & {image.tobytes() for image in np.asarray(DIGITS.validation.images)}
    small, large = (DIGITS.subset(count, 0) for count in (100, 300))
    assert np.bincount(small.labels).tolist() == [10] * 10
    assert {image.tobytes() for image in small.images} <= {image.tobytes() for image in large.images}
    assert {image.tobytes() for image in small.images} != {image.tobytes() for image in DIGITS.subset(100, 1).images}
    assert (DIGITS.size, DIGITS.sizes()) == ("Pico", (300, 1240))


def test_other_images_are_resized_and_models_have_equal_cost():
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (80, 40, 24, 3), np.uint8)
    dataset = Dataset("noise", ("a", "b"), {"all": Split("all", pixels, np.arange(80) % 2)})
    images = prepare(dataset)
    assert (images.size, images.resolution, images.channels) == ("Nano/8", (32, 32), 3)
    assert any("held out for the test" in note for note in images.notes)
    for channels, data in ((1, DIGITS), (3, images)):
        cost = data.matched_config("vit").macs
        for family in ("hybrid", "resnet", "mixer", "lstm", "mlp"):
            config = data.matched_config(family)
            assert abs(config.macs / cost - 1) < 0.06
            assert (config.channels, config.resolution) == (channels, data.resolution)


@pytest.mark.parametrize(("each", "is_enough"), [(1, False), (3, False), (4, True)])
def test_prepare_needs_four_images_of_each_class(each, is_enough):
    pixels = np.random.default_rng(0).integers(0, 256, (2 * each, 32, 32, 3), np.uint8)
    dataset = Dataset("few", ("a", "b"), {"all": Split("all", pixels, np.arange(2 * each) % 2)})
    if is_enough:
        assert prepare(dataset).largest == 4
        return
    with pytest.raises(UsageError, match="at least 4 images of each class"):
        prepare(dataset)


def test_small_presets_have_equal_cost():
    for size in ("Pico", "Nano", "Nano/8", "Micro"):
        cost = zoo.small(size, "vit").macs
        for family in ("hybrid", "resnet", "mixer", "lstm", "mlp"):
            assert abs(zoo.small(size, family).macs / cost - 1) < 0.06
    assert zoo.find("MLP-Nano").with_macs(5_000_000).macs == pytest.approx(5_000_000, rel=0.01)


def test_restored_images_equal_stored_images(tmp_path):
    store(DIGITS, tmp_path / "images")
    restored = restore(tmp_path / "images")
    assert (restored.labels, restored.size, restored.fingerprint) == (DIGITS.labels, DIGITS.size, DIGITS.fingerprint)
    for part in ("training", "validation", "test"):
        np.testing.assert_array_equal(getattr(restored, part).images, getattr(DIGITS, part).images)
        np.testing.assert_array_equal(getattr(restored, part).labels, getattr(DIGITS, part).labels)


# Permutations


@pytest.mark.parametrize("level", LEVELS)
def test_permutation_moves_pixels_of_its_level(level):
    order = permutation(level, (8, 8), (2, 2), 0)
    assert sorted(order.tolist()) == list(range(64))
    patches = torch.arange(64).view(8, 8).view(4, 2, 4, 2).permute(0, 2, 1, 3).reshape(16, 4)
    permuted = order.view(8, 8).view(4, 2, 4, 2).permute(0, 2, 1, 3).reshape(16, 4)
    same_patch = [set(row.tolist()) in [set(patch.tolist()) for patch in patches] for row in permuted]
    assert all(same_patch) == (level != "pixels")
    by_seed = [permutation(level, (8, 8), (2, 2), seed).tolist() for seed in (0, 1, 2)]
    assert by_seed[0] == order.tolist()
    assert by_seed[0] != by_seed[1] != by_seed[2] != by_seed[0]
    if level == "within":
        assert [set(row.tolist()) for row in permuted] == [set(patch.tolist()) for patch in patches]
        assert len({tuple((row - row.min()).tolist()) for row in permuted}) == 1


def test_permute_input_equals_permuting_images():
    model = build(DIGITS.matched_config("vit")).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.rand(3, 1, 8, 8)
    order = permutation("pixels", (8, 8), (2, 2), 3)
    expected = model(images.flatten(2)[..., order].view(images.shape))
    permute_input(model, "pixels", (2, 2), 3)
    torch.testing.assert_close(model(images), expected)


# Trials and plans


def test_unpack_inverts_pack():
    right = np.random.default_rng(0).random(37) < 0.7
    np.testing.assert_array_equal(unpack(pack(right), 37), right)


def test_corrupt_images_of_a_lab_are_prepared_again(tmp_path):
    store(DIGITS, tmp_path / "images")
    (tmp_path / "images" / "about.json").write_text("{}")
    images = lab_compare._prepare_images(open_data("digits"), tmp_path, None)
    assert (images.fingerprint, len(images.test)) == (DIGITS.fingerprint, len(DIGITS.test))


def test_trial_id_depends_on_task_settings_inputs_and_images_only():
    trial = Trial("a:b", {"x": 1, "y": [2]}, work=3.0)
    assert trial.trial_id("images") == Trial("a:b", {"y": [2], "x": 1}, work=9.0).trial_id("images")
    changed_trials = [
        Trial("a:c", trial.settings),
        Trial("a:b", {"x": 2, "y": [2]}),
        Trial("a:b", trial.settings, inputs=(trial,)),
    ]
    assert (
        len(
            {
                trial.trial_id("images"),
                trial.trial_id("others"),
                *(changed.trial_id("images") for changed in changed_trials),
            }
        )
        == 5
    )
    assert Trial.from_json(json.loads(json.dumps(changed_trials[2].to_json()))) == changed_trials[2]


def test_new_model_setting_at_its_default_keeps_trial_ids(tmp_path):
    model = zoo.find("ViT-Nano/7").to_document()
    older = {name: value for name, value in model.items() if name != "layer_scale"}
    now, before = Trial("a:b", {"model": model}), Trial("a:b", {"model": older})
    assert (
        now.trial_id("x")
        == before.trial_id("x")
        != Trial("a:b", {"model": {**model, "layer_scale": 0.1}}).trial_id("x")
    )
    assert now.trial_id("x") != Trial("a:b", {"model": {**model, "patch": [4, 4]}}).trial_id("x")
    line = {"key": "of another version", "cell": before.to_json(), "result": {"accuracy": 0.5}, "measured": {}}
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    assert Results(tmp_path / "results.jsonl", "x").get(now) == {"accuracy": 0.5}


class Turns(Question):
    """Three rounds of one trial each, with 10, 20 and 40 units of work."""

    def rounds(self):
        return [[Trial("a:b", {"round": number, "of": self.name}, work=10.0 * 2**number)] for number in range(3)]


def test_plan_finishes_a_question_before_the_next_within_the_budget(tmp_path):
    lab = Lab(DIGITS, ("vit",), (300,), 2, 1000)
    questions = {name: Turns(name, lab) for name in ("one", "two")}
    results = Results(tmp_path / "results.jsonl", "x")
    full_plan = make_plan(questions, results, {"vit": 1.0}, budget=None, jobs=1)
    assert (full_plan.taken, full_plan.dropped) == ({"one": 3, "two": 3}, ())
    assert full_plan.seconds == pytest.approx(140, rel=0.05)
    partial_plan = make_plan(questions, results, {"vit": 1.0}, budget=105.0, jobs=1)
    assert partial_plan.taken == {"one": 3, "two": 2}
    assert [line.partition(" (")[0] for line in partial_plan.dropped] == ["two: round 3 of 3 and later"]
    # The next question is begun if the rest of the first one does not fit.
    small_plan = make_plan(questions, results, {"vit": 1.0}, budget=65.0, jobs=1)
    assert small_plan.taken == {"one": 2, "two": 2}
    with pytest.raises(UsageError, match="at least"):
        make_plan(questions, results, {"vit": 1.0}, budget=5.0, jobs=1)


def test_plan_counts_the_training_that_a_measurement_needs(tmp_path):
    lab = Lab(DIGITS, ("vit",), (300,), 2, 1000)
    trained = lab.train("vit", count=300, seed=0)

    class MeasurementQuestion(Question):
        def rounds(self):
            return ([Trial("x:y", {}, (trained,), work=1.0)],)

    results = Results(tmp_path / "results.jsonl", "x")
    plan = make_plan({"looks": MeasurementQuestion("looks", lab)}, results, {"vit": trained.work}, budget=None, jobs=1)
    assert plan.seconds == pytest.approx(10, abs=5)  # three learning rates with three seeds each, and one training


def test_parse_budget_accepts_times_only():
    assert [parse_budget(text) for text in ("90s", "20m", "1.5h")] == [90, 1200, 5400]
    for text in ("", "20", "m", "0m", "-3m", "1d"):
        with pytest.raises(UsageError, match="Budget"):
            parse_budget(text)


# Complete labs


TINY = {"families": ("mixer", "mlp"), "sizes": (20, 100), "seeds": 2, "questions": ("data",)}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(sys.modules["vitrail.lab.compare"]._IMAGES_SEEN, "Pico", 256)


def results_of(folder):
    lines = (folder / "results.jsonl").read_text().splitlines()
    return {record["key"]: record["result"] for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Run a lab of a few seconds in this process."""
    seen = sys.modules["vitrail.lab.compare"]._IMAGES_SEEN
    before, seen["Pico"] = seen["Pico"], 256
    folder = tmp_path_factory.mktemp("lab") / "digits"
    output = []
    document = compare("digits", folder, **TINY, jobs=1, tell=output.append)
    seen["Pico"] = before
    return folder, document, output


def test_lab_writes_report_claims_and_bundles(tiny):
    folder, document, _ = tiny
    assert {record["id"] for record in document["claims"]} >= {"C1", "C2", "C3", "C7", "C8"}
    assert json.loads((folder / "claims.json").read_text()) == document
    page = (folder / "index.html").read_text()
    assert "The bias lab on digits" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["request"]["sizes"] == [20, 100]
    trained = [
        record
        for record in map(json.loads, (folder / "results.jsonl").read_text().splitlines())
        if "curve" in record["result"]
    ]
    settings = [record["cell"]["settings"] for record in trained]
    assert {record["seed"] for record in settings} == {*range(TINY["seeds"]), *RATE_SEEDS}
    lab = Lab(restore(folder / "images"), TINY["families"], TINY["sizes"], TINY["seeds"], 256)
    results = Results(folder / "results.jsonl", lab.images.fingerprint)
    question = DataQuestion("data", lab)
    needed = [trial for trials in question.rounds() for trial in trials if question.is_needed(trial, results)]
    assert all(results.get(trial) is not None for trial in needed)
    assert all(results.has(rate_trial) for trial in needed for rate_trial in results.rate_trials(trial))
    required = {part.trial_id("") for trial in needed for part in (*results.rate_trials(trial), results.resolve(trial))}
    assert len(required) == len(results)
    bundle = vitrail.load(folder / "cells" / trained[0]["key"])
    images = restore(folder / "images")
    with torch.no_grad():
        predictions = bundle.model(bundle.preprocess(list(images.test.images))).argmax(1).numpy()
    right = unpack(trained[0]["result"]["right"], trained[0]["result"]["count"])
    np.testing.assert_array_equal(predictions == images.test.labels, right)


def test_same_command_again_runs_nothing(tiny, quick):
    folder, document, _ = tiny
    before = (folder / "results.jsonl").read_bytes()
    output = []
    assert compare("digits", folder, **TINY, jobs=1, tell=output.append) == document
    assert (folder / "results.jsonl").read_bytes() == before
    assert output == []


def test_extended_lab_reruns_no_trial(tiny, quick, tmp_path):
    folder, _, _ = tiny
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before = results_of(copy)
    compare("digits", copy, **{**TINY, "sizes": (20, 50, 100)}, jobs=1, command="vitrail compare", tell=lambda _: None)
    assert json.loads((copy / "plan.json").read_text())["commands"] == ["Python", "vitrail compare"]
    assert "<pre>Python\nvitrail compare</pre>" in (copy / "index.html").read_text()
    after = results_of(copy)
    assert before.items() <= after.items()
    lines = map(json.loads, (copy / "results.jsonl").read_text().splitlines())
    added = [record["cell"]["settings"] for record in lines if record["key"] not in before]
    assert {settings["count"] for settings in added} == {50}
    assert len(added) == len(after) - len(before)


def test_report_keeps_earlier_questions(tiny, quick, tmp_path):
    folder, document, _ = tiny
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    options = {**TINY, "questions": ("position",), "budget": "1s"}  # its first round is a proof
    extended = compare("digits", copy, **options, jobs=1, tell=lambda _: None)
    assert {claim["id"] for claim in document["claims"]} | {"C18", "C21"} <= {
        claim["id"] for claim in extended["claims"]
    }
    before, after = (json.loads((path / "plan.json").read_text())["rounds"] for path in (folder, copy))
    assert (after["data"], after.keys()) == (before["data"], {"data", "position"})


def test_compare_rejects_invalid_options_before_training(tiny, tmp_path, quick):
    folder, _, _ = tiny
    for options, match in (
        ({"sizes": (5,)}, "Sizes must be from 10"),
        ({"sizes": (10_000,)}, "Sizes must be"),
        ({"families": ("swin",)}, "Families must be from"),
        ({"questions": ("dat",)}, "Did you mean 'data'"),
        ({"budget": "1s"}, "Budget must be at least"),
        ({"families": ("mlp",), "budget": "1s"}, "Budget must be at least"),
        ({"seeds": 0}, "Seeds must be"),
        ({"backend": "spark"}, "Backend must be loky or dask, or a backend registered with joblib, got 'spark'"),
    ):
        with pytest.raises(UsageError, match=match):
            compare("digits", tmp_path / "new", **{**TINY, **options}, jobs=1, tell=lambda _: None)
    assert not list((tmp_path / "new").glob("cells/*"))
    with pytest.raises(UsageError, match="on the same images"):
        compare("fashion-40", folder, **TINY, jobs=1, tell=lambda _: None)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    with pytest.raises(UsageError, match="new folder or an existing lab"):
        compare("digits", tmp_path / "photos", **TINY, jobs=1, tell=lambda _: None)
    one_class = Dataset(
        "one", ("a",), {"train": Split("train", np.zeros((9, 8, 8, 1), np.uint8), np.zeros(9, np.int64))}
    )
    with pytest.raises(UsageError, match="at least 2 classes"):
        compare(one_class, tmp_path / "one", **TINY, jobs=1, tell=lambda _: None)


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}'])
def test_corrupt_plan_is_rejected(tmp_path, content):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(CorruptFileError, match=r"plan.json' is"):
        compare("digits", tmp_path, **TINY, jobs=1, tell=lambda _: None)


SCRIPT = """
import sys
from pathlib import Path
from vitrail.lab import compare as lab
if __name__ == "__main__":
    lab._IMAGES_SEEN["Pico"] = 256
    lab.compare("digits", Path(sys.argv[1]), families=("mixer", "mlp"), sizes=(20, 100), seeds=2, questions=("data",),
                jobs=int(sys.argv[2]), backend=sys.argv[3], tell=print)
"""


def start(folder, jobs, backend="loky"):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(jobs), backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_deleted_bundle_is_trained_again_for_a_pending_measurement(tmp_path):
    """A bundle is trained again only while a measurement of it is pending."""
    store(DIGITS, tmp_path / "images")
    lab = Lab(DIGITS, ("mlp",), (20,), 1, 128)
    measurement = measurement_trial("vitrail.lab.questions.robustness:measure", lab.train("mlp", count=20, seed=0), 1.0)
    results = Results(tmp_path / "results.jsonl", DIGITS.fingerprint)

    def run():
        lab_compare._run_stages(
            tmp_path, results, lambda: [measurement], {"mlp": 1e9}, jobs=1, backend="loky", tell=lambda _: None
        )
        return (tmp_path / "results.jsonl").read_text().splitlines()

    before = run()
    measured = results.get(measurement)
    shutil.rmtree(tmp_path / "cells")
    assert run() == before  # no measurement is pending
    training_lines = [line for line in before if json.loads(line)["cell"]["of"] == []]
    (tmp_path / "results.jsonl").write_text("\n".join(training_lines) + "\n")
    results = Results(tmp_path / "results.jsonl", DIGITS.fingerprint)
    assert len(run()) == len(training_lines) + 2
    assert results.get(measurement) == measured


def die_once(settings, _images, _of, folder):
    """Trial function that kills its process the first time it is run."""
    if settings["dies"] and not folder.exists():
        folder.mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome({"number": settings["number"]}, {})


@pytest.mark.slow
def test_trial_of_a_killed_worker_is_run_again(tmp_path):
    store(DIGITS, tmp_path / "images")
    trials = [Trial(f"{__name__}:die_once", {"number": number, "dies": number == 3}) for number in range(6)]
    records = list(run_trials(tmp_path, trials, jobs=2, backend="loky"))
    assert sorted(record["result"]["number"] for record in records) == list(range(6))


def test_error_for_a_missing_package_names_its_extra(tmp_path, monkeypatch):
    for package, extra, backend in (("distributed", "dask", "dask"), ("joblib", "lab", "loky")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingError, match=rf"'{extra}' extra \({package} is missing\).* \"\.\[{extra}\]\"\.$"):
            list(run_trials(tmp_path, [], jobs=2, backend=backend))


@pytest.mark.slow
def test_dask_cluster_gives_identical_results(tiny, tmp_path):
    pytest.importorskip("distributed", reason="distributed is not installed")
    process = start(tmp_path / "lab", 2, "dask")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert results_of(tmp_path / "lab") == results_of(tiny[0])


@pytest.mark.slow
def test_parallel_processes_give_identical_results(tiny, tmp_path):
    process = start(tmp_path / "lab", 2)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert results_of(tmp_path / "lab") == results_of(tiny[0])


@pytest.mark.slow
def test_lab_killed_ten_times_gives_identical_results(tiny, tmp_path):
    generator, kills = np.random.default_rng(0), 0
    for _ in range(40):
        process = start(tmp_path / "lab", 2)
        try:
            process.communicate(timeout=float(generator.uniform(4, 9)) if kills < 10 else 300)
            assert process.returncode == 0
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            kills += 1
            time.sleep(0.2)
    assert results_of(tmp_path / "lab") == results_of(tiny[0])
