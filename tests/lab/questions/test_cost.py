"""The cost question: exponents, pairs of equal cost, and footprints."""

import dataclasses

import pytest

from tests.fake_lab import digits_lab, states_with_results, states_without_results
from vitrail.bundles.catalogue import catalogue
from vitrail.lab.questions.cost import (
    BATCHES,
    KINDS,
    MIXER,
    SEQUENCES,
    TOKENS,
    CostQuestion,
    cheapest_equal,
    measure_footprint,
    pair,
    slope,
)


@pytest.fixture(scope="module")
def question():
    return CostQuestion("cost", digits_lab())


def measured_with(exponents):
    """Return a function that invents times: power laws with noise over rounds."""

    def times(counts, exponent):
        return [[noise * count**exponent for count in counts] for noise in (1.0, 1.1, 0.9)]

    def outcome_of(trial):
        task = trial.task.rpartition(":")[2]
        if task == "time_attention":
            noisy = [
                [time * (1 + 0.01 * number) ** index for index, time in enumerate(row)]
                for number, row in enumerate(times(TOKENS, exponents["attention"]))
            ]
            return {}, dict.fromkeys(KINDS, noisy)
        if task == "time_sequences":
            rows = {name: times(SEQUENCES, exponents[name]) for name in ("vit", "lstm")}
            rows["vit"][1][-1] *= 1.01
            return {}, {str(batch): rows for batch in BATCHES}
        return {"parameters": 10, "macs": 10, "tokens": 16, "patch": 2}, {"latency": 1.0, "step": 2.0, "memory": 3.0}

    return outcome_of


@pytest.mark.parametrize(
    ("exponents", "verdicts"),
    [
        ({"attention": 1.9, "vit": 1.0, "lstm": 1.4}, ("supported", "supported")),
        ({"attention": 1.1, "vit": 1.4, "lstm": 1.0}, ("contradicted", "contradicted")),
    ],
)
def test_verdicts_follow_the_exponents(tmp_path, question, exponents, verdicts):
    states = states_with_results(question, tmp_path, lambda _: 0.5, measure=measured_with(exponents))
    assert (states["C30"], states["C32a"]) == verdicts
    assert (states["C31"], states["C34c"]) == ("reported", "true")
    exponent = question.exponent("global")
    assert exponent.value == pytest.approx(exponents["attention"], abs=0.05)


def test_arithmetic_claim_is_decided_without_results(tmp_path, question):
    states = states_without_results(question, tmp_path)
    assert states == {"C30": "not run", "C31": "not run", "C32a": "not run", "C34c": "true", "C42": "not run"}
    fields = next(verdict.fields for verdict in question.verdicts() if verdict.claim == "C34c")
    assert (fields["mixer"], fields["vit"], fields["namesake"]) == ("12.6", "3.4", "17.6")


def test_model_of_equal_accuracy_is_the_cheapest_of_the_same_pre_training():
    """S/32 at 384 px is the cheapest for Mixer's 76.6 %. Ti/16 at 384 px is accurate enough, too, but costs more."""
    mixer = catalogue()[MIXER]
    assert cheapest_equal(mixer, "vit").name == "vit-s32.augreg-in21k-1k-384"
    better = dataclasses.replace(mixer, accuracy=81.0)
    assert cheapest_equal(better, "vit").name == "vit-s16.augreg-in21k-1k"


def test_timing_trials_run_alone(question):
    assert all(trial.alone for question_round in question.rounds()[:3] for trial in question_round)
    assert not any(trial.alone for question_round in question.rounds()[3:] for trial in question_round)


def test_pair_has_equal_cost_and_the_requested_length():
    for count in SEQUENCES:
        vit, lstm = pair(count)
        assert (vit.patches, lstm.tokens) == (count, count)
        assert abs(lstm.macs / vit.macs - 1) < 0.02


def test_slope_is_the_exponent():
    assert slope((1, 10, 100), (3, 300, 30_000)) == pytest.approx(2)


@pytest.mark.slow
def test_footprint_is_measured_in_a_new_process(question, tmp_path):
    """More tokens take more memory and time. MACs and tokens are computed."""
    outcomes = {}
    for patch in (1, 4):
        settings = {**question.families["vit", patch].settings, "rounds": 1, "batch": 256}
        outcomes[patch] = measure_footprint(settings, question.lab.images, [], tmp_path)
    config = digits_lab().images.matched_config("vit")
    assert outcomes[4].result["macs"] == config.replace(patch=4).macs
    assert outcomes[1].result["tokens"] == 65
    assert outcomes[1].measured["memory"] > 2 * outcomes[4].measured["memory"] > 0
    assert outcomes[1].measured["step"] > outcomes[4].measured["step"] > 0
