"""`vitrail runs`: comparison of runs by paired tests, notes on missing files, and the saved predictions of a run."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from vitrail.cli import main
from vitrail.core.errors import CorruptFileError
from vitrail.core.intervals import wilson_interval
from vitrail.evaluation.compare_runs import compare_runs
from vitrail.evaluation.predictions.saved_predictions import SavedPredictions
from vitrail.evaluation.run_reader import find_runs, read_run

IMAGES = 400


def make_run(folder, model="ViT-Pico/2", family="vit", correct=300, *, seed=0, data="digits", first_key=0, **settings):
    """Write the folder of a run with a number of correct predictions. The keys of its images start at `first_key`."""
    folder.mkdir(parents=True)
    lines = [f'data = "{data}"', f"seed = {seed}", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    lines += ["[model]", f'name = "{model}"', f'family = "{family}"']
    (folder / "config.toml").write_text("# vitrail train ...\n" + "\n".join(lines) + "\n")
    events = [{"event": "start", "step": 0, "total": 20}]
    for step in (10, 20):
        progress = {"step": step, "epoch": 0, "seconds": step * 1.5}
        events.append({"event": "step", **progress, "loss": 9 / step, "learning_rate": 0.1, "images_per_second": 7.0})
        events.append({"event": "evaluate", **progress, "loss": 8 / step, "accuracy": step / 40, "count": 100})
    interval = list(wilson_interval(correct, IMAGES))
    scores = {"split": "test", "count": IMAGES, "accuracy": correct / IMAGES, "accuracy_interval": interval}
    events += [{"event": "final", "step": 20, **scores}, {"event": "end", "step": 20, "seconds": 31.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    order = np.random.default_rng(seed).permutation(IMAGES)
    predicted = np.ones(IMAGES, np.int32)
    predicted[order[:correct]] = 0
    saved = SavedPredictions(
        data=data,
        split="test",
        labels=("a", "b"),
        images=np.arange(IMAGES, dtype=np.uint64) + np.uint64(first_key),
        truth=np.zeros(IMAGES, np.int32),
        answers=predicted,
        scores=np.full(IMAGES, 0.9, np.float32),
        own=np.full(IMAGES, 0.9, np.float32),
    )
    saved.write(folder / "answers.npz")
    return folder


def test_runs_are_compared_by_the_paired_test(tmp_path, call):
    from scipy.stats import binomtest

    make_run(tmp_path / "a", correct=300)
    make_run(tmp_path / "b", "ResNet-Pico", "resnet", correct=250, seed=1)
    make_run(tmp_path / "c", "Mixer-Pico/2", "mixer", correct=245, seed=2)
    result = call("runs", tmp_path / "b", tmp_path / "a", tmp_path / "c", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert [run["name"] for run in report["runs"]] == ["ViT-Pico/2", "ResNet-Pico", "Mixer-Pico/2"]
    assert report["runs"][0]["accuracy_interval"] == list(wilson_interval(300, 400))
    assert report["runs"][0]["seconds"] == 31.5
    correct = {name: SavedPredictions.read(tmp_path / name / "answers.npz").right for name in "abc"}
    only_one = [int((correct["a"] & ~correct["b"]).sum()), int((correct["b"] & ~correct["a"]).sum())]
    assert len(report["pairs"]) == 3
    pair = report["pairs"][0]
    assert [pair["only_one"], pair["only_other"], pair["count"]] == [*only_one, 400]
    assert pair["p_value"] == pytest.approx(binomtest(min(only_one), sum(only_one)).pvalue, rel=1e-9)
    assert [pair_row["verdict"] for pair_row in report["pairs"]] == ["ViT-Pico/2 is better"] * 2 + ["cannot tell"]
    # Holm: the smallest p-value has a third of the level, the largest the full level.
    assert sorted(pair_row["level"] for pair_row in report["pairs"]) == pytest.approx([0.05 / 3, 0.05 / 2, 0.05])
    text = call("runs", tmp_path).stdout
    assert text.splitlines()[1].split()[1:5] == ["ViT-Pico/2", "75.0%", "70.5%", "to"]
    assert (
        f"ViT-Pico/2 75.0 %, ResNet-Pico 62.5 %: ViT-Pico/2 is better, {only_one[0]} against {only_one[1]} of 400"
        in text
    )


def test_equally_good_runs_are_in_natural_order(tmp_path):
    for name in ("run-10", "run-9", "run-1"):
        make_run(tmp_path / name)
    make_run(tmp_path / "run-2", correct=310)
    for paths in ([tmp_path], sorted(tmp_path.iterdir())):
        assert [run.folder.name for run in compare_runs(paths).runs] == ["run-2", "run-1", "run-9", "run-10"]


def test_different_settings_of_runs_are_listed(tmp_path):
    make_run(tmp_path / "a", seed=3, workers=2, clip=1.0, augment=0)
    make_run(tmp_path / "b", seed=4, workers=8, clip=1.0, steps=7)
    comparison = compare_runs([tmp_path])
    # The first run sets epochs, which gave 20 planned steps.
    assert list(comparison.differences.items()) == [("steps", [20, 7]), ("seed", [3, 4]), ("augment", [0, None])]
    assert comparison.names == ("a", "b")
    make_run(tmp_path / "c" / "a", "ResNet-Pico", "resnet")
    config = tmp_path / "c" / "a" / "config.toml"
    config.write_text(config.read_text() + "edges = 'zeros'\n")
    comparison = compare_runs([tmp_path / "a", tmp_path / "c"])
    assert "model.edges" not in comparison.differences  # only a ResNet has such a setting
    assert comparison.differences["model.family"] == ["vit", "resnet"]


def test_runs_of_different_data_are_not_compared(tmp_path, call):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", correct=200)
    make_run(tmp_path / "c", data="others", first_key=5)
    result = call("runs", tmp_path, "--json")
    report = json.loads(result.stdout)
    assert [(pair["one"], pair["other"]) for pair in report["pairs"]] == [("a", "b")]
    assert len(result.stderr.splitlines()) == 1
    assert "tested on different images" in result.stderr
    assert "others (test, 400): c" in result.stderr
    assert call("runs", tmp_path, "--page", tmp_path / "page").returncode == 0
    text = (tmp_path / "page" / "index.html").read_text()
    assert text.index("테스트에 쓴 이미지가 다른 실행이 있어") < text.index("<figure")
    assert "no run is the best" in text
    assert "Highest final accuracy: a, 75.0%" not in text
    assert call("runs", tmp_path / "a", tmp_path / "b", "--page", tmp_path / "same").returncode == 0
    assert "Highest final accuracy: a, 75.0%" in (tmp_path / "same" / "index.html").read_text()
    # Without saved predictions, data, split and count are compared.
    (tmp_path / "c" / "answers.npz").unlink()
    assert not compare_runs([tmp_path / "a", tmp_path / "c"]).have_same_images
    (tmp_path / "b" / "answers.npz").unlink()
    assert compare_runs([tmp_path / "a", tmp_path / "b"]).have_same_images


def test_note_names_command_that_creates_missing_predictions(tmp_path, call):
    make_run(tmp_path / "a")
    (make_run(tmp_path / "b b") / "answers.npz").unlink()
    result = call("runs", tmp_path)
    assert result.returncode == 0
    assert f"`vitrail evaluate '{tmp_path}/b b/bundle' digits --output '{tmp_path}/b b/answers.npz'`" in result.stderr
    metrics = tmp_path / "b b" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"split": "test"', '"split": "held-out"'))
    assert "run its command again with --resume auto" in call("runs", tmp_path, "--page", tmp_path / "page").stderr
    assert "repeat the command of the run with --resume auto" in (tmp_path / "page" / "index.html").read_text()


def test_unfinished_and_truncated_runs_are_listed(tmp_path, call):
    make_run(tmp_path / "a")
    truncated = make_run(tmp_path / "b")
    (truncated / "answers.npz").unlink()
    lines = (truncated / "metrics.jsonl").read_text().splitlines()
    (truncated / "metrics.jsonl").write_text("\n".join(lines[:3]) + '\n{"event": "fin')
    empty = make_run(tmp_path / "c")
    (empty / "answers.npz").unlink()
    (empty / "metrics.jsonl").unlink()
    report = json.loads(call("runs", tmp_path, "--json").stdout)
    assert [(run["finished"], run["steps"], run["accuracy"]) for run in report["runs"]] == [
        (True, 20, 0.75),
        (False, 10, None),
        (False, 0, None),
    ]
    result = call("runs", tmp_path, "--page", tmp_path / "page")
    assert result.returncode == 0
    assert "(unfinished)" in result.stdout


def test_path_that_is_not_a_run_gives_one_line_error(tmp_path, call):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run = make_run(tmp_path / "run")
    for arguments in (["missing"], ["empty"], ["file"], [], ["run", "--page", "run"]):
        result = call("runs", *(tmp_path / argument if argument[0] != "-" else argument for argument in arguments))
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
    assert "'nosuch', which does not exist." in call("runs", "nosuch").stderr
    assert "file', which is a file." in call("runs", tmp_path / "file").stderr
    assert find_runs([run, tmp_path]) == [run]
    (run / "answers.npz").write_bytes(b"PK nonsense")
    result = call("runs", run)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    (run / "config.toml").write_text("# vitrail\nseed = [")
    with pytest.raises(CorruptFileError, match="config"):
        read_run(run)


def test_runs_page_lists_every_run_and_escapes_names(tmp_path, call):
    html_name = "<img src=x onerror=alert(1)>"
    make_run(tmp_path / "runs" / html_name)
    make_run(tmp_path / "runs" / os.fsdecode(b"b\xff"), correct=200)
    result = call("runs", tmp_path / "runs", "--page", tmp_path / "page")
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "page" / "index.html").read_text()
    assert "&lt;img src=x onerror" in text
    assert "<img" not in text
    assert "b\\udcff" in text
    assert text.count("<polyline") == 2 * 3 * 2  # runs, figures, steps and seconds
    assert json.loads((tmp_path / "page" / "runs.json").read_text())["pairs"][0]["count"] == 400
    assert call("runs", tmp_path / "runs", "--page", tmp_path / "page").returncode == 2


def test_runs_command_does_not_import_torch(tmp_path):
    make_run(tmp_path / "a")
    script = "import sys\nfrom vitrail.cli import main\nmain(sys.argv[1:])\nsys.exit('torch' in sys.modules)\n"
    command = [sys.executable, "-c", script, "runs", tmp_path / "a", "--page", tmp_path / "page"]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_saved_predictions_of_a_run_equal_those_of_evaluate(tmp_path, call):
    run = tmp_path / "run"
    main(["train", "digits", "--model", "ViT-Pico/2", "--output", str(run), "--steps", "2", "--seed", "1"])
    call("evaluate", run / "bundle", "digits", "--output", tmp_path / "again.npz")
    saved, evaluated = SavedPredictions.read(run / "answers.npz"), SavedPredictions.read(tmp_path / "again.npz")
    assert (saved.data, saved.split, len(saved), saved.labels) == ("digits", "test", 360, tuple("0123456789"))
    assert (saved.images == evaluated.images).all()
    assert (saved.answers == evaluated.answers).all()
    np.testing.assert_allclose(saved.own, evaluated.own, atol=1e-5)
    final = next(json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"final"' in line)
    assert final["accuracy"] == saved.right.mean()
    seconds = [event["seconds"] for event in read_run(run).events if event["event"] in ("step", "evaluate")]
    assert len(seconds) >= 2
    assert seconds == sorted(seconds)
