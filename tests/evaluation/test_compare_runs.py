"""`vitrail runs`: runs side by side, their paired tests and what is missing; the answers that every run leaves."""

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


def make_run(folder, model="ViT-Pico/2", family="vit", right=300, *, seed=0, data="digits", images=0, **settings):
    """A folder as a run leaves it, with this many right answers to images that `images` tells apart."""
    folder.mkdir(parents=True)
    lines = [f'data = "{data}"', f"seed = {seed}", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    lines += ["[model]", f'name = "{model}"', f'family = "{family}"']
    (folder / "config.toml").write_text("# vitrail train ...\n" + "\n".join(lines) + "\n")
    events = [{"event": "start", "step": 0, "total": 20}]
    for step in (10, 20):
        course = {"step": step, "epoch": 0, "seconds": step * 1.5}
        events.append({"event": "step", **course, "loss": 9 / step, "learning_rate": 0.1, "images_per_second": 7.0})
        events.append({"event": "evaluate", **course, "loss": 8 / step, "accuracy": step / 40, "count": 100})
    interval = list(wilson_interval(right, IMAGES))
    scores = {"split": "test", "count": IMAGES, "accuracy": right / IMAGES, "accuracy_interval": interval}
    events += [{"event": "final", "step": 20, **scores}, {"event": "end", "step": 20, "seconds": 31.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    order = np.random.default_rng(seed).permutation(IMAGES)
    answers = np.ones(IMAGES, np.int32)
    answers[order[:right]] = 0
    kept = SavedPredictions(
        data=data,
        split="test",
        labels=("a", "b"),
        images=np.arange(IMAGES, dtype=np.uint64) + np.uint64(images),
        truth=np.zeros(IMAGES, np.int32),
        answers=answers,
        scores=np.full(IMAGES, 0.9, np.float32),
        own=np.full(IMAGES, 0.9, np.float32),
    )
    kept.write(folder / "answers.npz")
    return folder


def test_runs_are_compared_by_the_paired_test(tmp_path, call):
    from scipy.stats import binomtest

    make_run(tmp_path / "a", right=300)
    make_run(tmp_path / "b", "ResNet-Pico", "resnet", right=250, seed=1)
    make_run(tmp_path / "c", "Mixer-Pico/2", "mixer", right=245, seed=2)
    done = call("runs", tmp_path / "b", tmp_path / "a", tmp_path / "c", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [run["name"] for run in found["runs"]] == ["ViT-Pico/2", "ResNet-Pico", "Mixer-Pico/2"]
    assert found["runs"][0]["accuracy_interval"] == list(wilson_interval(300, 400))
    assert found["runs"][0]["seconds"] == 31.5
    kept = {name: SavedPredictions.read(tmp_path / name / "answers.npz").right for name in "abc"}
    only = [int((kept["a"] & ~kept["b"]).sum()), int((kept["b"] & ~kept["a"]).sum())]
    assert len(found["pairs"]) == 3
    pair = found["pairs"][0]
    assert [pair["only_one"], pair["only_other"], pair["count"]] == [*only, 400]
    assert pair["p_value"] == pytest.approx(binomtest(min(only), sum(only)).pvalue, rel=1e-9)
    assert [one["verdict"] for one in found["pairs"]] == ["ViT-Pico/2 is better"] * 2 + ["cannot tell"]
    # Holm: the smallest p-value is judged at a third of the level, the largest at all of it.
    assert sorted(one["level"] for one in found["pairs"]) == pytest.approx([0.05 / 3, 0.05 / 2, 0.05])
    text = call("runs", tmp_path).stdout
    assert text.splitlines()[1].split()[1:5] == ["ViT-Pico/2", "75.0%", "70.5%", "to"]
    assert f"ViT-Pico/2 75.0 %, ResNet-Pico 62.5 %: ViT-Pico/2 is better, {only[0]} against {only[1]} of 400" in text


def test_settings_that_differ_are_listed(tmp_path):
    make_run(tmp_path / "a", seed=3, workers=2, clip=1.0, augment=0)
    make_run(tmp_path / "b", seed=4, workers=8, clip=1.0, steps=7)
    found = compare_runs([tmp_path])
    # The first is as long as its epochs make it: the 20 steps that it planned.
    assert list(found.differences.items()) == [("steps", [20, 7]), ("seed", [3, 4]), ("augment", [0, None])]
    assert found.names == ("a", "b")
    make_run(tmp_path / "c" / "a", "ResNet-Pico", "resnet")
    config = tmp_path / "c" / "a" / "config.toml"
    config.write_text(config.read_text() + "edges = 'zeros'\n")
    found = compare_runs([tmp_path / "a", tmp_path / "c"])
    assert "model.edges" not in found.differences  # only a ResNet has such a setting
    assert found.differences["model.family"] == ["vit", "resnet"]


def test_runs_of_different_data_are_not_compared(tmp_path, call):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", right=200)
    make_run(tmp_path / "c", data="others", images=5)
    done = call("runs", tmp_path, "--json")
    found = json.loads(done.stdout)
    assert [(one["one"], one["other"]) for one in found["pairs"]] == [("a", "b")]
    assert len(done.stderr.splitlines()) == 1
    assert "tested on different images" in done.stderr
    assert "others (test, 400): c" in done.stderr
    assert call("runs", tmp_path, "--page", tmp_path / "page").returncode == 0
    text = (tmp_path / "page" / "index.html").read_text()
    assert text.index("테스트에 쓴 이미지가 다른 실행이 있어") < text.index("<figure")
    assert "no run is the best" in text
    assert "Highest final accuracy: a, 75.0%" not in text
    assert call("runs", tmp_path / "a", tmp_path / "b", "--page", tmp_path / "same").returncode == 0
    assert "Highest final accuracy: a, 75.0%" in (tmp_path / "same" / "index.html").read_text()
    # Without answers only data, split and count tell.
    (tmp_path / "c" / "answers.npz").unlink()
    assert not compare_runs([tmp_path / "a", tmp_path / "c"]).have_same_images
    (tmp_path / "b" / "answers.npz").unlink()
    assert compare_runs([tmp_path / "a", tmp_path / "b"]).have_same_images


def test_older_runs_are_told_how_to_make_their_answers(tmp_path, call):
    make_run(tmp_path / "a")
    (make_run(tmp_path / "b b") / "answers.npz").unlink()
    done = call("runs", tmp_path)
    assert done.returncode == 0
    assert f"`vitrail evaluate '{tmp_path}/b b/bundle' digits --output '{tmp_path}/b b/answers.npz'`" in done.stderr
    metrics = tmp_path / "b b" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"split": "test"', '"split": "held-out"'))
    assert "--resume auto makes it" in call("runs", tmp_path, "--page", tmp_path / "page").stderr
    assert "repeat the command of the run with --resume auto" in (tmp_path / "page" / "index.html").read_text()


def test_unfinished_and_torn_runs_are_shown(tmp_path, call):
    make_run(tmp_path / "a")
    half = make_run(tmp_path / "b")
    (half / "answers.npz").unlink()
    lines = (half / "metrics.jsonl").read_text().splitlines()
    (half / "metrics.jsonl").write_text("\n".join(lines[:3]) + '\n{"event": "fin')
    empty = make_run(tmp_path / "c")
    (empty / "answers.npz").unlink()
    (empty / "metrics.jsonl").unlink()
    found = json.loads(call("runs", tmp_path, "--json").stdout)
    assert [(run["finished"], run["steps"], run["accuracy"]) for run in found["runs"]] == [
        (True, 20, 0.75),
        (False, 10, None),
        (False, 0, None),
    ]
    done = call("runs", tmp_path, "--page", tmp_path / "page")
    assert done.returncode == 0
    assert "(unfinished)" in done.stdout


def test_what_is_no_run_is_one_line(tmp_path, call):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run = make_run(tmp_path / "run")
    for words in (["missing"], ["empty"], ["file"], [], ["run", "--page", "run"]):
        done = call("runs", *(tmp_path / word if word[0] != "-" else word for word in words))
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "'nosuch', which does not exist." in call("runs", "nosuch").stderr
    assert "file', which is a file." in call("runs", tmp_path / "file").stderr
    assert find_runs([run, tmp_path]) == [run]
    (run / "answers.npz").write_bytes(b"PK nonsense")
    done = call("runs", run)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    (run / "config.toml").write_text("# vitrail\nseed = [")
    with pytest.raises(CorruptFileError, match="config"):
        read_run(run)


def test_a_page_has_every_run_and_no_way_out(tmp_path, call):
    evil = "<img src=x onerror=alert(1)>"
    make_run(tmp_path / "runs" / evil)
    make_run(tmp_path / "runs" / os.fsdecode(b"b\xff"), right=200)
    done = call("runs", tmp_path / "runs", "--page", tmp_path / "page")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page" / "index.html").read_text()
    assert "&lt;img src=x onerror" in text
    assert "<img" not in text
    assert "b\\udcff" in text
    assert text.count("<polyline") == 2 * 3 * 2  # runs, figures, steps and seconds
    assert json.loads((tmp_path / "page" / "runs.json").read_text())["pairs"][0]["count"] == 400
    assert call("runs", tmp_path / "runs", "--page", tmp_path / "page").returncode == 2


def test_runs_imports_no_torch(tmp_path):
    make_run(tmp_path / "a")
    script = "import sys\nfrom vitrail.cli import main\nmain(sys.argv[1:])\nsys.exit('torch' in sys.modules)\n"
    words = [sys.executable, "-c", script, "runs", tmp_path / "a", "--page", tmp_path / "page"]
    assert subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_run_leaves_the_answers_that_evaluate_gives(tmp_path, call):
    run = tmp_path / "run"
    main(["train", "digits", "--model", "ViT-Pico/2", "--output", str(run), "--steps", "2", "--seed", "1"])
    call("evaluate", run / "bundle", "digits", "--output", tmp_path / "again.npz")
    kept, again = SavedPredictions.read(run / "answers.npz"), SavedPredictions.read(tmp_path / "again.npz")
    assert (kept.data, kept.split, len(kept), kept.labels) == ("digits", "test", 360, tuple("0123456789"))
    assert (kept.images == again.images).all()
    assert (kept.answers == again.answers).all()
    np.testing.assert_allclose(kept.own, again.own, atol=1e-5)
    final = next(json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"final"' in line)
    assert final["accuracy"] == kept.right.mean()
    seconds = [event["seconds"] for event in read_run(run).events if event["event"] in ("step", "evaluate")]
    assert len(seconds) >= 2
    assert seconds == sorted(seconds)
