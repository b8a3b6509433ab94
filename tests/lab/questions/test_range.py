"""The range question: the generated images, and verdicts from invented results."""

import numpy as np
import pytest

from tests.fake_lab import digits_lab, states_with_results, states_without_results
from tests.made_up import InventedResults
from vitrail.lab.questions import range as task
from vitrail.lab.questions.range import DISTANCES, MODELS, RangeQuestion, config_of, distances, make_marks
from vitrail.lab.trial import pack


@pytest.fixture(scope="module")
def question():
    return RangeQuestion("range", digits_lab(seeds=5))


def test_marks_have_their_distance_and_only_their_pair_determines_the_class():
    pixels, same = make_marks(600, 0)
    mark_distances = distances(600)
    noise = np.random.default_rng(0)
    noise.integers(2, size=600)  # the directions of the first marks
    marks = pixels - noise.integers(0, 128, pixels.shape, np.uint8)
    assert set(np.unique(marks)) == {0, 96}
    bright = (marks[..., 0] == 96).reshape(600, 7, 4, 7, 4).transpose(0, 1, 3, 2, 4)
    for index in range(600):
        (row, column), (other_row, other_column) = np.argwhere(bright[index].any((2, 3)))
        assert max(abs(row - other_row), abs(column - other_column)) == mark_distances[index]
        assert (bright[index, row, column] == bright[index, other_row, other_column]).all() == same[index]
    assert set(bright.sum((1, 2, 3, 4))) == {16}
    for distance in DISTANCES:
        assert same[mark_distances == distance].mean() == 0.5
    assert (pixels == make_marks(600, 0)[0]).all()
    assert (pixels != make_marks(600, 1)[0]).any()


def test_models_of_the_task_have_equal_cost_and_documented_receptive_fields():
    cost = config_of("vit").macs
    assert config_of("vit").grid == (7, 7)
    assert all(abs(config_of(name).macs / cost - 1) < 0.06 for name in MODELS)
    assert config_of("resnet").receptive_field == 25
    assert config_of("wide").receptive_field == 49
    assert config_of("vit").receptive_field is None


def learning_curve(needed):
    """Return the accuracy of a model that needs this many images for 90 %."""
    return lambda count: min(0.9 + 0.1 * np.log2(count / needed), 0.99) if needed else 0.5


@pytest.mark.parametrize(
    ("vit", "cnn", "verdict", "doublings"),
    [
        (8000, 1000, "supported", 3),
        (1000, 8000, "contradicted", -3),
        (4000, 4000, "cannot tell", 0),
        (None, 1000, "supported", 5),  # never learned: cut at 32,000 images
        (None, None, "cannot tell", 0),
    ],
)
def test_local_claim_compares_the_numbers_of_images_needed(tmp_path, vit, cnn, verdict, doublings):
    question = RangeQuestion("range", digits_lab(seeds=4))
    curves = {"vit": learning_curve(vit), "resnet": learning_curve(cnn)}

    def share(settings):
        return max(curves.get(settings["model"]["family"], learning_curve(None))(settings.get("count", 30_000)), 0.5)

    assert states_with_results(question, tmp_path, share, count=3000)["C16a"] == verdict
    estimate = next(candidate.estimate for candidate in question.verdicts() if candidate.claim == "C16a")
    assert estimate.value == pytest.approx(doublings, abs=0.1)


@pytest.mark.parametrize(("cnn", "far"), [(0.8, "contradicted"), (0.6, "supported")])
def test_global_claim_uses_the_farthest_marks(tmp_path, cnn, far):
    question = RangeQuestion("range", digits_lab(seeds=4))
    shares = {"vit": 0.7, "resnet": cnn}
    states = states_with_results(
        question, tmp_path, lambda settings: shares.get(settings["model"]["family"], 0.5), count=3000
    )
    assert states["C16b"] == far
    assert len(question.accuracies.right) == len(MODELS) * len(DISTANCES)
    assert question._unlearned() == ["lstm", "mixer"]


def test_near_task_has_faint_marks_one_cell_apart():
    pixels, same = make_marks(400, 0, mark=24, mark_distances=(1,))
    assert pixels.max() <= 127 + 24
    assert same.mean() == 0.5
    near = RangeQuestion("range", digits_lab(seeds=5)).near_trials["vit", 250][0]
    assert (near.settings["mark"], near.settings["distances"], near.settings["count"]) == (24, [1], 250)


def test_accuracy_is_split_by_the_distance_of_the_marks(tmp_path, question):
    invented = InventedResults(tmp_path, question, count=3000)
    for name in ("vit", "resnet"):
        for trial in question.trials[name]:
            invented.train(trial, 0.5)
            right = distances(3000) <= (6 if name == "vit" else 2)
            result = {"right": pack(right), "count": 3000, "accuracy": float(right.mean())}
            invented.put(invented.results.resolve(trial), **result, validation_accuracy=0.5)
    question.read(invented.results)
    for name, max_distance in (("vit", 6), ("resnet", 2)):
        values = [question.accuracies.estimate((name, distance)).value for distance in DISTANCES]
        assert values == [float(distance <= max_distance) for distance in DISTANCES]


def test_verdicts_without_results_are_not_run(tmp_path, question):
    assert states_without_results(question, tmp_path) == {"C16a": "not run", "C16b": "not run"}


def test_trial_trains_on_generated_images(tmp_path, question, monkeypatch):
    for name, count in (("_TRAINING", 60), ("_VALIDATION", 12), ("_TEST", 24), ("NEAR_COUNTS", (60,))):
        monkeypatch.setattr(task, name, count)
    task.mark_images.cache_clear()
    trial = question.trials["resnet"][0].clone_with(seen=256, learning_rate=1e-3)
    result = task.train_on_marks(trial.settings, question.lab.images, [], tmp_path / "one").result
    task.mark_images.cache_clear()
    assert result["count"] == 24
    assert "count" not in trial.settings
