"""`report.html` of a training run: numbers, commands, and updates during training."""

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

NO_WORKERS = Options(workers=0)
REFRESH = '<meta http-equiv="refresh" content="10">'


@pytest.fixture(scope="module")
def small_data():
    split = open_data("digits").splits["test"].select(np.arange(60))
    return Dataset("some digits", tuple("0123456789"), {"train": split, "test": split.select(np.arange(20), "test")})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run on image files of two classes, and every version of its report.

    Paths contain characters that are special in a shell.
    """
    folder = tmp_path_factory.mktemp("report") / "it's here; $HOME"
    digits = open_data("digits").splits["test"]
    for index in range(48):
        label = "odd & <b>" if digits.labels[index] % 2 else "even"
        path = folder / "data" / ("train" if index < 36 else "val") / label / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[index, :, :, 0]).save(path)
    versions = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_report, "_MIN_PAUSE", 0.0)
        patch.setattr(run_report, "_MAX_TIME_SHARE", 1e9)
        replace_text = run_report.replace_text

        def record_text(path, text):
            versions.append(text)
            replace_text(path, text)

        patch.setattr(run_report, "replace_text", record_text)
        recipe = Recipe(epochs=3, batch=12, preprocess={"crop_fraction": 1.0})
        train(
            folder / "data",
            "ViT-Pico/2",
            folder / "run",
            recipe,
            NO_WORKERS,
            quiet=True,
            command="vitrail train x --force",
        )
    return folder / "run", versions


def text_of(page):
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def test_report_is_written_after_each_evaluation_and_at_the_end(run):
    folder, versions = run
    assert [REFRESH in page for page in versions] == [True, True, True, False]
    assert [re.findall(r"Step (\d) of 9;", page)[:1] for page in versions] == [["3"], ["6"], ["9"], []]
    assert (folder / "report.html").read_text() == versions[-1]
    assert not (folder / ".report.html.writing").exists()


def test_report_has_the_numbers_of_metrics_jsonl(run):
    folder, versions = run
    events = read_events(folder / "metrics.jsonl")
    evaluations = [event for event in events if event["event"] == "evaluate"]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in evaluations] == [3, 6, 9]
    seconds = [event["seconds"] for event in events if event["event"] in ("step", "evaluate")]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    page = versions[-1]
    for step, evaluation in zip(steps, evaluations, strict=True):
        assert (
            f"<title>step {step['step']}&#10;training {step['loss']:.4g}&#10;held out {evaluation['loss']:.4g}</title>"
            in page
        )
        assert f"<title>held out&#10;{step['step']}: {100 * evaluation['accuracy']:.4g}</title>" in page
        assert (
            f"<title>스텝 {step['step']}&#10;학습 {step['loss']:.4g}&#10;떼어 둠 {evaluation['loss']:.4g}</title>"
            in page
        )
    assert training_curve(events, "evaluate", "accuracy").seconds == [event["seconds"] for event in evaluations]
    assert page.count('class="by-seconds"') == page.count('class="by-step"') == 4
    assert f"{evaluations[-1]['accuracy']:.1%} at the end" in page
    final = events[-2]
    assert final["training_accuracy"] != final["accuracy"]
    (percentage,) = re.findall(r"<b>([\d.]+%)</b><span[^>]*>accuracy on training", page)
    assert percentage == f"{final['training_accuracy']:.1%}"


def test_note_names_the_highest_evaluation_not_the_last(report, log, tmp_path):
    for step, accuracy in ((3, 0.25), (6, 0.75), (9, 0.5)):
        log.write("evaluate", step=step, seconds=1.0, loss=1.0, accuracy=accuracy, count=8)
    report.update(AT_5)
    assert "n = 8; best 75.0% at step 6" in text_of((tmp_path / "report.html").read_text())


def test_report_uses_standard_terms_and_has_no_top_5_for_two_classes(run):
    page = run[1][-1]
    for term in (
        "Confusion matrix",
        "Images per second",
        "Calibration error",
        "Accuracy by class",
        "혼동 행렬",
        "다음에 할 일",
    ):
        assert term in page, term
    assert "top-5" not in page
    assert "상위 5" not in page
    assert "<b>" in html.unescape(re.search(r'<td title="([^"]*odd[^"]*)"', page)[1])


def test_commands_of_the_report_run(run, call, monkeypatch):
    folder, versions = run
    monkeypatch.chdir(folder.parent)
    section = versions[-1].partition('<div class="next">')[2].partition("</div>")[0]
    commands = [shlex.split(html.unescape(text)) for text in re.findall(r"<pre>(.*?)</pre>", section)]
    assert [command[:2] for command in commands] == [
        ["vitrail", x] for x in ("predict", "evaluate", "inspect", "finetune")
    ]
    assert str(folder.parent / "data") in commands[1]
    for command in commands[:3]:
        done = call(*command[1:])
        assert done.returncode == 0, done.stderr
    done = call(
        *(str(folder.parent / "data") if word == "other-photos" else word for word in commands[3][1:]), "--steps", "1"
    )
    assert done.returncode == 0, done.stderr
    assert (folder.parent / "run-inspect" / "index.html").is_file()


def test_top_5_accuracy_needs_six_classes(small_data):
    trainer = make_trainer(data=small_data.splits["train"])
    for classes, has_top_5 in ((5, False), (6, True)):
        labels = tuple(map(str, range(classes)))
        split = Split("test", small_data.splits["test"].images, small_data.splits["test"].labels % classes)
        model = make_trainer(classes=classes).kept_model
        judgement = judge_classifier(model, labels, trainer.evaluation_loader(split), Ranks())
        assert any("top-5" in name for name, _ in summary(judgement)) == has_top_5


def test_thousand_classes_have_a_table_of_pairs_instead_of_a_matrix():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 1000, 4000)
    probabilities = rng.random((4000, 1000)) ** 8
    probabilities[np.arange(4000), labels] += 1
    is_confused = labels == 7
    probabilities[is_confused, 7], probabilities[is_confused, 900] = 0, 3
    probabilities /= probabilities.sum(1, keepdims=True)
    names = tuple(f"class {index}" for index in range(1000))
    preprocess = Preprocess(resolution=(8, 8), crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    judgement = Classification(
        scores={},
        sentence="",
        all_scores=score_classes(probabilities, labels, names),
        predictions=SplitPredictions(np.arange(4000), labels, probabilities),
        labels=names,
        split=Split("test", np.zeros((4000, 8, 8, 1), np.uint8), labels),
        preprocess=preprocess,
    )
    page = sections(judgement)
    assert len(page) < 400_000
    assert 'class="matrix' not in page
    row = f"<td>class 7</td><td>class 900</td><td class=number>{is_confused.sum()}</td><td class=number>100.0%</td>"
    assert row in page
    assert f"the 30 worst of {len(np.unique(labels))} classes" in page


def test_run_without_held_out_images_has_a_report(tmp_path, small_data):
    training_data = Dataset("training images", small_data.labels, {"train": small_data.splits["train"]})
    recipe = Recipe(steps=2, batch=16, holdout=0.0)
    page = (
        train(training_data, "ViT-Pico/2", tmp_path / "run", recipe, NO_WORKERS, quiet=True).folder / "report.html"
    ).read_text()
    assert "Loss: " in page
    assert "Held-out images" not in page
    assert "vitrail evaluate" in page
    assert "resumes=True" not in page


def test_metrics_of_version_0_1_have_no_time_axis():
    events = read_events(HALF_WAY / "metrics.jsonl")
    page = run_report._curves(events, info_of(HALF_WAY, peak_learning_rate=0.003), is_finished=True)
    assert page.count('class="by-step"') == 4
    assert "peak of the recipe: 0.003" in page  # no recorded step has this rate
    assert "by-seconds" not in page
    assert "<input" not in page
    assert training_curve(events, "step", "loss").seconds == [None] * len(training_curve(events, "step", "loss").steps)


def test_curve_drops_steps_after_the_checkpoint_of_a_resume(tmp_path):
    def step(number, loss):
        return {"event": "step", "step": number, "loss": loss, "learning_rate": 0.1, "images_per_second": 9.0}

    events = [step(10, 3.0), step(20, 2.0), step(30, 1.0), {"event": "resume", "step": 20}, step(25, 1.5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert training_curve(read_events(tmp_path / "metrics.jsonl"), "step", "loss")[1::2] == (
        [10, 20, 25],
        [3.0, 2.0, 1.5],
    )


def test_single_recorded_step_has_no_chart(tmp_path, small_data):
    recipe = Recipe(steps=3, batch=16)  # only the last step is recorded
    page = (
        train(small_data, "ViT-Pico/2", tmp_path / "run", recipe, NO_WORKERS, quiet=True).folder / "report.html"
    ).read_text()
    assert len(training_curve(read_events(tmp_path / "run" / "metrics.jsonl"), "step", "loss").steps) == 1
    assert 'class="by-step"' not in page
    assert "Images per second: " in page
    assert "at the end" in page


@pytest.mark.parametrize(("epochs", "text"), [(3.0909, "3.1"), (20.0, "20"), (1234.56, "1,234.6"), (0.0417, "0.042")])
def test_epochs_text(epochs, text):
    assert run_report._epochs_text(epochs) == text


AT_5 = RunProgress(step=5, total=20, seconds=1.0)


def info_of(folder, **changes):
    fields = {
        "data": ("digits",),
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
    return RunInfo(folder=folder, **(fields | changes))


@pytest.fixture
def log(tmp_path):
    with RunLog(tmp_path, 20, writes=True) as log:
        log.write("step", step=5, loss=2.5, learning_rate=0.1, images_per_second=9.0, seconds=1.0)
        yield log


@pytest.fixture
def report(tmp_path, log):
    report = RunReport(info_of(tmp_path))
    log.add_observer(report)
    return report


def test_update_pauses_between_reports(report, tmp_path):
    page = tmp_path / "report.html"
    report.update(AT_5)
    assert REFRESH in page.read_text()
    page.unlink()
    report.update(AT_5)
    assert not page.exists()
    report._next_time = 0.0
    report.update(AT_5)
    assert page.exists()


def test_write_error_gives_one_warning_and_training_continues(report, monkeypatch, capsys):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_report, "replace_text", fail)
    for _ in range(3):
        report._next_time = 0.0
        report.update(AT_5)
    warning = "warning: report.html cannot be written (No space left on device). Training continues.\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize(
    ("error", "message"), [(Interrupted("stopped by SIGINT", 130), ""), (MemoryError(), "MemoryError")]
)
def test_interrupted_run_shows_the_command_that_resumes_it(report, log, tmp_path, error, message):
    report.update(AT_5)
    with contextlib.suppress(type(error)), log.report_failures(lambda: AT_5):
        raise error
    page = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page
    assert "Interrupted after step 5 of 20" in page
    assert "<pre>vitrail train digits --output &#x27;a b&#x27; --resume auto</pre>" in page
    assert message in page


@pytest.mark.parametrize("command", ["", "vitrail.train(data, 'ViT-Pico/2', output=\"it's\")"])
def test_interrupted_python_run_shows_the_argument_that_resumes_it(log, tmp_path, command):
    report = RunReport(info_of(tmp_path, command=command))
    log.add_observer(report)
    report.update(AT_5)
    with contextlib.suppress(MemoryError), log.report_failures(lambda: AT_5):
        raise MemoryError
    page = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page
    assert "<pre>resume=True</pre>" in page


def test_commands_use_a_placeholder_for_arrays(tmp_path, small_data):
    arrays = (small_data.splits["train"].images, small_data.splits["train"].labels)
    train(arrays, "ViT-Pico/2", tmp_path / "run", Recipe(steps=1, batch=10, objective="masked"), NO_WORKERS, quiet=True)
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


def test_judgement_of_another_package_uses_functions_registered_for_its_type():
    class OtherJudgement(Judgement):
        """The judgement of another package."""

    judgement = OtherJudgement(scores={}, sentence="", summary=(("errors", "3 <"),))
    assert (summary(judgement), sections(judgement)) == ([("errors", "3 <")], "")
    sections.register(OtherJudgement, lambda other: f"<h2>{other.summary[0][0]}</h2>")
    assert sections(judgement) == "<h2>errors</h2>"


@pytest.mark.parametrize(
    ("command", "resume_command"),
    [
        ("vitrail train digits --force", "vitrail train digits --resume auto"),
        ("vitrail train digits --resume auto", "vitrail train digits --resume auto"),
        ("vitrail train digits --resume=auto", "vitrail train digits --resume=auto"),
        ("vitrail.train('digits')", "resume=True"),
    ],
)
def test_resume_command_has_the_resume_flag_once(command, resume_command):
    assert run_report._resume_command(command) == resume_command
