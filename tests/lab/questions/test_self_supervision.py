"""The self-supervision question: iGPT against an untrained iGPT and against raw pixels."""

import numpy as np
import pytest

from tests.fake_lab import digits_lab, states_without_results, verdict_states
from tests.made_up import InventedResults
from vitrail.lab.questions.self_supervision import SelfSupervisionQuestion, probe_pixels
from vitrail.lab.trial import unpack


def invent(question, folder, trained, untrained, pixels):
    """Return the verdicts for accuracies of the three probes."""
    invented = InventedResults(folder, question)
    for (_, is_trained), trials in question.trials.items():
        for trial in trials:
            if is_trained:
                invented.train(trial, trained)
            else:
                invented.put(trial, **invented.predictions(untrained))
    for trial in question.pixel_trials:
        invented.put(trial, **invented.predictions(pixels))
    question.read(invented.results)
    assert question.html({})
    return verdict_states(question)


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ((0.8, 0.6, 0.7), "supported"),
        ((0.7, 0.6, 0.8), "contradicted"),
        ((0.7, 0.8, 0.6), "contradicted"),
        ((0.7, 0.7, 0.6), "cannot tell"),
    ],
)
def test_igpt_must_beat_both_untrained_features_and_raw_pixels(tmp_path, accuracies, verdict):
    question = SelfSupervisionQuestion("self", digits_lab(seeds=4))
    assert invent(question, tmp_path, *accuracies) == {"C35": verdict}


def test_verdicts_without_results(tmp_path):
    assert set(states_without_results(SelfSupervisionQuestion("self", digits_lab()), tmp_path)) == {"C35"}


def test_pixel_probe_depends_on_the_training_images_of_its_seed(tmp_path):
    question = SelfSupervisionQuestion("self", digits_lab(sizes=(100,), seeds=3))
    images = question.lab.images
    results = [probe_pixels(trial.settings, images, [], tmp_path).result for trial in question.pixel_trials]
    rights = [unpack(result["right"], result["count"]) for result in results]
    assert all(result["accuracy"] == right.mean() > 0.5 for result, right in zip(results, rights, strict=True))
    assert not np.array_equal(rights[0], rights[1])
