"""The augmentation question: the gain of ViT minus that of the CNN."""

import pytest

from tests.fake_lab import digits_lab, states_with_results, states_without_results
from vitrail.lab.questions.augmentation import AugmentationQuestion
from vitrail.lab.training import protocol


def accuracy(gain_of_vit, gain_of_cnn):
    def share(settings):
        base, gain = (0.6, gain_of_vit) if settings["model"]["family"] == "vit" else (0.7, gain_of_cnn)
        return base + gain * bool(settings["augment"] or settings["recipe"])

    return share


@pytest.mark.parametrize(
    ("gains", "verdict"), [((0.2, 0.02), "supported"), ((0.02, 0.2), "contradicted"), ((0.1, 0.1), "cannot tell")]
)
def test_verdict_follows_the_gains(tmp_path, gains, verdict):
    question = AugmentationQuestion("augmentation", digits_lab())
    assert states_with_results(question, tmp_path, accuracy(*gains)) == {"C4": verdict}
    gain = question.gain("vit-augmented", 100)
    assert gain is not None
    assert abs(gain.value - gains[0]) < 0.01


def test_verdict_uses_the_smallest_size(tmp_path):
    """ViT gains more with few images, the CNN with many."""

    def share(settings):
        is_vit, is_few = settings["model"]["family"] == "vit", settings["count"] == 100
        return 0.6 + 0.1 * (is_vit == is_few) * bool(settings["augment"] or settings["recipe"])

    assert states_with_results(AugmentationQuestion("augmentation", digits_lab()), tmp_path, share) == {
        "C4": "supported"
    }


def test_augmented_trials_train_on_shifted_images():
    lab = digits_lab()
    plain, shifted = (
        protocol(lab.train("vit", count=100, seed=0, augment=augment, learning_rate=1e-3).settings, lab.images)
        for augment in (False, True)
    )
    assert (shifted.augment.crop, shifted.augment.padding) == ("pad", 1)
    assert plain.augment.crop == "none"


def test_verdicts_without_results_are_not_run(tmp_path):
    assert states_without_results(AugmentationQuestion("augmentation", digits_lab()), tmp_path) == {"C4": "not run"}


def test_first_round_has_both_sides_and_shares_plain_trials():
    lab = digits_lab()
    first = AugmentationQuestion("augmentation", lab).rounds()[0]
    kinds = {(trial.settings["model"]["family"], trial.settings["augment"], trial.settings["seed"]) for trial in first}
    assert len(first) == len(kinds) == 8
    assert lab.train("vit", count=100, seed=0) in first
