"""Generated sequences of the order question: their classes, the models, and the test at twice the length."""

import numpy as np
import pytest

from vitrail.lab.questions import order_sequences
from vitrail.lab.questions.order_sequences import (
    PARITY_LENGTH,
    RECALL_LENGTHS,
    parity_sequences,
    recall_sequences,
    sequence_configs,
    sequence_images,
    sequence_trials,
    train_on_sequences,
)
from vitrail.lab.trial import unpack


def test_class_of_parity_is_whether_the_number_of_marks_is_odd():
    marks, classes = parity_sequences(2000, 16, 0)
    assert marks.shape == (2000, 16)
    np.testing.assert_array_equal(classes, marks.sum(axis=1) % 2)
    assert 0.45 < classes.mean() < 0.5  # stretches of one or two tokens are often blank
    assert marks.any(axis=0).all()


def test_stretches_of_the_test_are_longer_than_the_sequences_of_training():
    """Their marks span at most 16 tokens only if the random tokens at an end are blank."""
    marks, classes = parity_sequences(4000, 32, 1, shortest=17)
    spans = np.array([np.ptp(np.flatnonzero(row)) + 1 for row in marks])
    assert (spans > 16).mean() > 0.85
    assert spans.max() == 32
    assert classes.mean() == pytest.approx(0.5, abs=0.03)


def test_class_of_recall_is_the_first_token():
    marks, classes = recall_sequences(2000, 64, 0)
    np.testing.assert_array_equal(classes, marks[:, 0])
    correlations = [np.corrcoef(classes, marks[:, index])[0, 1] for index in range(1, 64)]
    assert np.abs(correlations).max() < 0.1


@pytest.mark.parametrize("length", [PARITY_LENGTH, *RECALL_LENGTHS])
def test_models_have_equal_parameters(length):
    lstm, vit = (sequence_configs(length)[name] for name in ("lstm", "vit"))
    assert (lstm.patches, vit.patches) == (length, length)
    assert lstm.parameters / vit.parameters == pytest.approx(1, abs=0.03)


@pytest.fixture
def few_sequences(monkeypatch):
    """Make sequences and training few."""
    monkeypatch.setattr(order_sequences, "_PARTS", {"training": 200, "validation": 40, "test": 50})
    monkeypatch.setattr(order_sequences, "_COUNT", 100)
    sequence_images.cache_clear()
    yield
    sequence_images.cache_clear()


@pytest.mark.parametrize("family", ["lstm", "vit"])
def test_parity_is_tested_at_twice_the_length(tmp_path, few_sequences, family):
    trial = sequence_trials("parity", family, PARITY_LENGTH, 1)[0].clone_with(seen=128, learning_rate=1e-3)
    result = train_on_sequences(trial.settings, None, [], tmp_path / "cell").result
    assert result == train_on_sequences(trial.settings, None, [], tmp_path / "again").result
    assert result["accuracy"] == unpack(result["right"], 50).mean()
    assert result["count"] == 50
    assert 0 <= result["same_length"] <= 1


def test_recall_is_tested_at_the_length_of_training(tmp_path, few_sequences):
    trial = sequence_trials("recall", "lstm", 16, 1)[0].clone_with(seen=128, learning_rate=1e-3)
    result = train_on_sequences(trial.settings, None, [], tmp_path / "cell").result
    assert result["count"] == 50
    assert "same_length" not in result
