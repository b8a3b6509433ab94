"""`report.html`: its numbers are those of the run, its commands run, and it is there while the run trains."""

import contextlib
import html
import json
import re
import shlex

import numpy as np
import pytest
from PIL import Image

from tests.training.runs import train
from tests.training.test_loop import HALF_WAY, make_trainer
from vitrail.core.html import Html
from vitrail.core.terminal import say
from vitrail.data.dataset import Dataset, Split
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.metrics import score_classes
from vitrail.evaluation.split_predictions import SplitPredictions
from vitrail.models.families.vit.config import ViTConfig
from vitrail.reports import run_report
from vitrail.reports.curves import TrainingCurve, draw_curves, training_curve, with_axis_choice
from vitrail.reports.objectives.registry import sections, summary
from vitrail.reports.run_report import RunReport, read_events
from vitrail.training.objectives.judgement import Classification, Judgement, judge_classifier
from vitrail.training.observer import RunInfo, RunProgress
from vitrail.training.options import Options
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import Recipe
from vitrail.training.run_log import RunLog
from vitrail.training.stop import Interrupted

ALONE = Options(workers=0)
REFRESH = '<meta http-equiv="refresh" content="10">'


@pytest.fixture(scope="module")
def few():
    split = open_data("digits").splits["test"].select(np.arange(60))
    return Dataset("some digits", tuple("0123456789"), {"train": split, "test": split.select(np.arange(20), "test")})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on files of two classes, in folders that a shell would take apart, with every report that it wrote."""
    folder = tmp_path_factory.mktemp("report") / "it's here; $HOME"
    digits = open_data("digits").splits["test"]
    for index in range(48):
        label = "odd & <b>" if digits.labels[index] % 2 else "even"
        path = folder / "data" / ("train" if index < 36 else "val") / label / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[index, :, :, 0]).save(path)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_report, "_PAUSE", 0.0)
        patch.setattr(run_report, "_SHARE", 1e9)
        replace_text = run_report.replace_text

        def keep(path, text):
            written.append(text)
            replace_text(path, text)

        patch.setattr(run_report, "replace_text", keep)
        recipe = Recipe(epochs=3, batch=12, preprocess={"crop_fraction": 1.0})
        train(
            folder / "data", "ViT-Pico/2", folder / "run", recipe, ALONE, quiet=True, command="vitrail train x --force"
        )
    return folder / "run", written


def text_of(page):
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def test_every_evaluation_and_the_end_write_it(run):
    folder, written = run
    assert [REFRESH in page for page in written] == [True, True, True, False]
    assert [re.findall(r"Step (\d) of 9;", page)[:1] for page in written] == [["3"], ["6"], ["9"], []]
    assert (folder / "report.html").read_text() == written[-1]
    assert not (folder / ".report.html.writing").exists()


def test_its_numbers_are_those_of_the_run(run):
    folder, written = run
    events = read_events(folder / "metrics.jsonl")
    evaluated = [event for event in events if event["event"] == "evaluate"]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in evaluated] == [3, 6, 9]
    seconds = [event["seconds"] for event in events if event["event"] in ("step", "evaluate")]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    page = written[-1]
    for one, other in zip(steps, evaluated, strict=True):
        assert (
            f"<title>step {one['step']}&#10;training {one['loss']:.4g}&#10;held out {other['loss']:.4g}</title>" in page
        )
        assert f"<title>held out&#10;{one['step']}: {100 * other['accuracy']:.4g}</title>" in page
        assert f"<title>스텝 {one['step']}&#10;학습 {one['loss']:.4g}&#10;떼어 둠 {other['loss']:.4g}</title>" in page
    assert training_curve(events, "evaluate", "accuracy").seconds == [event["seconds"] for event in evaluated]
    assert page.count('class="by-seconds"') == page.count('class="by-step"') == 4
    assert f"{evaluated[-1]['accuracy']:.1%} at the end" in page
    final = events[-2]
    assert final["training_accuracy"] != final["accuracy"]
    (shown,) = re.findall(r"<b>([\d.]+%)</b><span[^>]*>accuracy on training", page)
    assert shown == f"{final['training_accuracy']:.1%}"


def test_the_best_evaluation_is_the_highest(live, log, tmp_path):
    for step, accuracy in ((3, 0.25), (6, 0.75), (9, 0.5)):
        log.write("evaluate", step=step, seconds=1.0, loss=1.0, accuracy=accuracy, count=8)
    live.update(AT_5)
    assert "n = 8; best 75.0% at step 6" in text_of((tmp_path / "report.html").read_text())


def test_words_are_those_of_the_field_and_two_classes_have_no_top_5(run):
    page = run[1][-1]
    for words in (
        "Confusion matrix",
        "Images per second",
        "Calibration error",
        "Accuracy by class",
        "혼동 행렬",
        "다음에 할 일",
    ):
        assert words in page, words
    assert "top-5" not in page
    assert "상위 5" not in page
    assert "<b>" in html.unescape(re.search(r'<td title="([^"]*odd[^"]*)"', page)[1])


def test_its_commands_run(run, call, monkeypatch):
    folder, written = run
    monkeypatch.chdir(folder.parent)
    section = written[-1].partition('<div class="next">')[2].partition("</div>")[0]
    commands = [shlex.split(html.unescape(words)) for words in re.findall(r"<pre>(.*?)</pre>", section)]
    assert [words[:2] for words in commands] == [["vitrail", x] for x in ("predict", "evaluate", "inspect", "finetune")]
    assert str(folder.parent / "data") in commands[1]
    for words in commands[:3]:
        done = call(*words[1:])
        assert done.returncode == 0, done.stderr
    done = call(
        *(str(folder.parent / "data") if word == "other-photos" else word for word in commands[3][1:]), "--steps", "1"
    )
    assert done.returncode == 0, done.stderr
    assert (folder.parent / "run-inspect" / "index.html").is_file()


def test_six_classes_have_a_top_5(few):
    trainer = make_trainer(data=few.splits["train"])
    for classes, shown in ((5, False), (6, True)):
        labels = tuple(map(str, range(classes)))
        split = Split("test", few.splits["test"].images, few.splits["test"].labels % classes)
        model = make_trainer(classes=classes).kept_model
        found = judge_classifier(model, labels, trainer.evaluation_loader(split), Ranks())
        assert any("top-5" in name for name, _ in summary(found)) == shown


def test_a_thousand_classes_are_shown_by_their_most_confused_pairs():
    chance = np.random.default_rng(0)
    labels = chance.integers(0, 1000, 4000)
    probabilities = chance.random((4000, 1000)) ** 8
    probabilities[np.arange(4000), labels] += 1
    twins = labels == 7
    probabilities[twins, 7], probabilities[twins, 900] = 0, 3
    probabilities /= probabilities.sum(1, keepdims=True)
    names = tuple(f"class {index}" for index in range(1000))
    eye = Preprocess(resolution=(8, 8), crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    judgement = Classification(
        scores={},
        sentence="",
        full=score_classes(probabilities, labels, names),
        answers=SplitPredictions(np.arange(4000), labels, probabilities),
        labels=names,
        split=Split("test", np.zeros((4000, 8, 8, 1), np.uint8), labels),
        preprocess=eye,
    )
    page = sections(judgement)
    assert len(page) < 400_000
    assert 'class="matrix' not in page
    row = f"<td>class 7</td><td>class 900</td><td class=number>{twins.sum()}</td><td class=number>100.0%</td>"
    assert row in page
    assert f"the 30 worst of {len(np.unique(labels))} classes" in page


def test_a_run_without_held_out_images(tmp_path, few):
    alone = Dataset("training images", few.labels, {"train": few.splits["train"]})
    recipe = Recipe(steps=2, batch=16, holdout=0.0)
    page = (train(alone, "ViT-Pico/2", tmp_path / "run", recipe, ALONE, quiet=True).folder / "report.html").read_text()
    assert "Loss: " in page
    assert "Held-out images" not in page
    assert "vitrail evaluate" in page
    assert "resumes=True" not in page


def test_metrics_of_version_0_1_have_no_seconds():
    events = read_events(HALF_WAY / "metrics.jsonl")
    page = run_report._curves(events, info_of(HALF_WAY, peak_learning_rate=0.003), is_over=True)
    assert page.count('class="by-step"') == 4
    assert "the recipe&#x27;s peak: 0.003" in page  # which no recorded step need have
    assert "by-seconds" not in page
    assert "<input" not in page
    assert training_curve(events, "step", "loss").seconds == [None] * len(training_curve(events, "step", "loss").steps)


def test_steps_after_the_checkpoint_that_a_run_resumed_from_are_forgotten(tmp_path):
    def step(number, loss):
        return {"event": "step", "step": number, "loss": loss, "learning_rate": 0.1, "images_per_second": 9.0}

    events = [step(10, 3.0), step(20, 2.0), step(30, 1.0), {"event": "resume", "step": 20}, step(25, 1.5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert training_curve(read_events(tmp_path / "metrics.jsonl"), "step", "loss")[1::2] == (
        [10, 20, 25],
        [3.0, 2.0, 1.5],
    )


def test_a_single_step_is_no_curve(tmp_path, few):
    recipe = Recipe(steps=3, batch=16)  # of which the last is recorded
    page = (train(few, "ViT-Pico/2", tmp_path / "run", recipe, ALONE, quiet=True).folder / "report.html").read_text()
    assert len(training_curve(read_events(tmp_path / "run" / "metrics.jsonl"), "step", "loss").steps) == 1
    assert 'class="by-step"' not in page
    assert "Images per second: " in page
    assert "at the end" in page


@pytest.mark.parametrize(("epochs", "said"), [(3.0909, "3.1"), (20.0, "20"), (1234.56, "1,234.6"), (0.0417, "0.042")])
def test_epochs_have_one_digit(epochs, said):
    assert run_report._epochs(epochs) == said


AT_5 = RunProgress(step=5, total=20, seconds=1.0)


def info_of(folder, **changes):
    facts = {
        "data": "digits",
        "dataset": open_data("digits"),
        "command": "vitrail train digits --force --output 'a b'",
        "model": ViTConfig(),
        "watched": "accuracy",
        "watched_name": "accuracy",
        "korean": {},
        "peak_learning_rate": 0.1,
        "steps_per_epoch": 10,
        "say": say,
    }
    return RunInfo(folder=folder, **(facts | changes))


@pytest.fixture
def log(tmp_path):
    with RunLog(tmp_path, 20, writes=True) as log:
        log.write("step", step=5, loss=2.5, learning_rate=0.1, images_per_second=9.0, seconds=1.0)
        yield log


@pytest.fixture
def live(tmp_path, log):
    report = RunReport(info_of(tmp_path))
    log.add(report)
    return report


def test_it_is_written_at_most_now_and_then(live, tmp_path):
    page = tmp_path / "report.html"
    live.update(AT_5)
    assert REFRESH in page.read_text()
    page.unlink()
    live.update(AT_5)
    assert not page.exists()
    live._due = 0.0
    live.update(AT_5)
    assert page.exists()


def test_what_cannot_be_written_does_not_end_the_run(live, monkeypatch, capsys):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_report, "replace_text", fail)
    for _ in range(3):
        live._due = 0.0
        live.update(AT_5)
    warning = "warning: report.html cannot be written (No space left on device). Training goes on.\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize(
    ("error", "said"), [(Interrupted("stopped by SIGINT", 130), ""), (MemoryError(), "MemoryError")]
)
def test_an_interrupted_run_says_how_to_go_on(live, log, tmp_path, error, said):
    live.update(AT_5)
    with contextlib.suppress(type(error)), log.failures(lambda: AT_5):
        raise error
    page = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page
    assert "Interrupted after step 5 of 20" in page
    assert "<pre>vitrail train digits --output &#x27;a b&#x27; --resume auto</pre>" in page
    assert said in page


@pytest.mark.parametrize("command", ["", "vitrail.train(data, 'ViT-Pico/2', output=\"it's\")"])
def test_an_interrupted_run_of_python_says_how_to_go_on(log, tmp_path, command):
    live = RunReport(info_of(tmp_path, command=command))
    log.add(live)
    live.update(AT_5)
    with contextlib.suppress(MemoryError), log.failures(lambda: AT_5):
        raise MemoryError
    page = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page
    assert "<pre>resume=True</pre>" in page


def test_arrays_have_no_name_in_commands(tmp_path, few):
    arrays = (few.splits["train"].images, few.splits["train"].labels)
    train(arrays, "ViT-Pico/2", tmp_path / "run", Recipe(steps=1, batch=10, objective="masked"), ALONE, quiet=True)
    page = (tmp_path / "run" / "report.html").read_text()
    section = html.unescape(page.partition('<div class="next">')[2].partition("</div>")[0])
    assert "array(" not in section
    assert f"evaluate {tmp_path}/run/bundle other-photos --protocol knn" in section


def test_curves_of_several_runs_share_a_chart():
    runs = [
        TrainingCurve("one", [10, 20], [1.0, 2.0], [0.5, 0.25], 0),
        TrainingCurve(Html("a &lt; b"), [10, 20, 30], [None, 7000.0, 9000.0], [0.9, 0.8, 0.7], 1),
    ]
    page = with_axis_choice(draw_curves(runs, "loss"))
    over_steps, over_time = page.split('class="by-seconds"')
    assert "<title>step 20&#10;one 0.25&#10;a &lt; b 0.8</title>" in over_steps
    assert "<title>minutes 150&#10;a &lt; b 0.7</title>" in over_time
    assert page.count("<input") == 2


def test_a_final_evaluation_of_another_package_is_shown_by_its_type():
    class Doubt(Judgement):
        """The judgement of another package."""

    plain = Doubt(scores={}, sentence="", summary=(("doubts", "3 <"),))
    assert (summary(plain), sections(plain)) == ([("doubts", "3 <")], "")
    sections.register(Doubt, lambda judgement: f"<h2>{judgement.summary[0][0]}</h2>")
    assert sections(plain) == "<h2>doubts</h2>"


@pytest.mark.parametrize(
    ("command", "resumed"),
    [
        ("vitrail train digits --force", "vitrail train digits --resume auto"),
        ("vitrail train digits --resume auto", "vitrail train digits --resume auto"),
        ("vitrail train digits --resume=auto", "vitrail train digits --resume=auto"),
        ("vitrail.train('digits')", "resume=True"),
    ],
)
def test_the_command_that_resumes_a_run_has_the_flag_once(command, resumed):
    assert run_report._resumed(command) == resumed
