"""The data question: leads on little and much data, other axes, longer training, and classical learners."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from tests.fake_lab import digits_lab, states_with_results, states_without_results
from tests.made_up import InventedResults
from vitrail.lab import compare
from vitrail.lab.lab_report import write_report
from vitrail.lab.plan import make_plan
from vitrail.lab.question import Lab
from vitrail.lab.questions.data import DataQuestion
from vitrail.lab.questions.data_classical import Posterior, learn_xor, update_posterior
from vitrail.lab.questions.data_trials import AXES, MAX_DOUBLINGS
from vitrail.lab.training import RATE_SEEDS
from vitrail.lab.trial import pack
from vitrail.lab.trial_results import Results, needs_rate

SIZES = (100, 300, 600, 1000)
LONGER = [f"vit-{doublings}" for doublings in range(1, MAX_DOUBLINGS + 1)]


@pytest.fixture
def question():
    return DataQuestion("data", digits_lab(SIZES, seeds=3))


@pytest.fixture
def invented(tmp_path, question):
    return InventedResults(tmp_path, question)


def train_all(invented, question, accuracy, names=None):
    """Add results of these variants, all but those of longer training by default, and read them."""
    for (name, count), trials in question.trials.items():
        if name in (names or question.variants) and (names or not question.variants[name].doublings):
            for trial in trials:
                invented.train(trial, accuracy(name, count))
    question.read(invented.results)
    return {verdict.claim: verdict for verdict in question.verdicts()}


def measure(trial):
    """Invent the results of classical learners."""
    task = trial.task.rpartition(":")[2]
    curve = {"counts": [10, 100], "sequential": [0.4, 0.6], "refit": [0.4, 0.6], "bayes": 1e-15, "gradient": 0.2}
    results = {
        "floor": {"accuracy": 0.6},
        "update_posterior": curve,
        "learn_xor": {"difference": 0.0, "linear": 0.5, "mlp": 1.0, "conjunction": 1.0},
    }
    return results[task], {}


# Verdicts


def test_verdicts_follow_the_leads(tmp_path):
    """Accuracy by family at 100 images; the CNN gains 10 points up to 300 images, the others 20."""
    accuracies = {"vit": 0.5, "resnet": 0.6, "lstm": 0.55, "mixer": 0.4, "hybrid": 0.5, "mlp": 0.5}

    def accuracy(settings):
        family = settings["model"]["family"]
        return accuracies[family] + (0.1 if family == "resnet" else 0.2) * (settings["count"] == 300)

    question = DataQuestion("data", digits_lab(seeds=3))
    assert states_with_results(question, tmp_path, accuracy, measure=measure) == {
        "C1": "cannot tell",  # level at 300 images
        "C2": "cannot tell",
        "C3": "supported",
        "C7": "supported",
        "C8": "reported",
        "C34b": "supported",
        "C37": "supported",
        "C44": "true",
        "C45": "true",
    }
    assert question.numbers()["accuracy"]["resnet 100"][0] == pytest.approx(0.6, abs=0.01)


def test_verdicts_without_results_are_open(tmp_path, question):
    assert set(states_without_results(question, tmp_path).values()) <= {"cannot tell", "not run"}


def test_c1_and_c37_take_the_smaller_lead_at_the_two_smallest_sizes(invented, question):
    leads = {"resnet": (0.2, 0.1, -0.2, -0.2), "lstm": (0.05, 0.15, -0.1, -0.1)}

    def accuracy(name, count):
        return 0.6 + leads.get(name, (0,) * 4)[SIZES.index(count)]

    verdicts = train_all(invented, question, accuracy, ["vit", "resnet", "lstm"])
    assert verdicts["C1"].estimate.value == pytest.approx(0.1, abs=0.01)
    assert verdicts["C37"].estimate.value == pytest.approx(0.05, abs=0.01)
    assert [len(verdicts[claim].estimate.parts) for claim in ("C1", "C37")] == [2, 2]


@pytest.mark.parametrize(
    ("leads", "message", "at"),
    [
        ((-0.2, -0.1, -0.05, -0.03), "not-crossed", None),
        ((-0.2, -0.1, 0.1, 0.2), "crossed", 424),  # halfway from 300 to 600 in log n
        ((0.1, 0.1, 0.1, 0.2), "ahead", None),
        ((-0.2, -0.1, -0.05, 0.0), "level", None),
        ((-0.2, -0.1, 0.0), "level-few", None),
        ((-0.2, -0.1, -0.1), "not-crossed-few", None),
    ],
)
def test_c2_says_where_the_curves_cross(tmp_path, leads, message, at):
    question = DataQuestion("data", digits_lab(SIZES[: len(leads)], seeds=3))
    lead = dict(zip(SIZES, leads, strict=False))

    def accuracy(name, count):
        return 0.5 + 0.1 * math.log10(count / 100) + (lead[count] if name == "vit" else 0)

    verdict = train_all(InventedResults(tmp_path, question), question, accuracy, ["vit", "resnet"])["C2"]
    assert verdict.message == message
    assert all(question.messages[f"C2-{message}"][language].format(**verdict.fields) for language in ("en", "ko"))
    if at is not None:
        low, value, high = (float(verdict.fields[name].replace(",", "")) for name in ("low", "at", "high"))
        assert value == pytest.approx(at, rel=0.05)
        assert low < at < high


def test_claims_about_growing_data_need_two_sizes(tmp_path):
    question = DataQuestion("data", digits_lab((300,), seeds=2))
    verdicts = train_all(InventedResults(tmp_path, question), question, lambda *_: 0.8, ["vit", "resnet"])
    assert [verdicts[claim].estimate for claim in ("C3", "C7")] == [None, None]


def test_gap_error_includes_seeds_and_test_images(invented, question):
    families = question.lab.families
    verdicts = train_all(invented, question, lambda _, count: 0.5 if count == 100 else 0.8, families)
    gap, test_difference = verdicts["C7"].estimate, question.accuracies.difference(("vit", 100), ("vit", 1000))
    assert gap.value == pytest.approx(0.3, abs=0.01)
    assert len(gap.parts) == len(families)
    assert gap.parts[0].image_error == test_difference.image_error > 0
    assert gap.parts[0].error > gap.parts[0].image_error


def test_mixer_claim_needs_the_smallest_and_the_largest_size(invented, question):
    for name, count in (*(("vit", count) for count in SIZES), ("mixer", 300), ("mixer", 600)):
        for trial in question.trials[name, count]:
            invented.train(trial, 0.8)
    question.read(invented.results)
    assert {verdict.claim: verdict for verdict in question.verdicts()}["C34b"].estimate is None


@pytest.mark.parametrize(("wide_lead", "ending"), [(0.2, "agree"), (-0.2, "differ")])
def test_axes_do_not_change_the_verdict_but_their_signs_are_stated(invented, question, wide_lead, ending):
    leads = {"resnet": 0.1, "resnet-parameters": wide_lead}
    names = ["vit", "vit-time", "resnet", "resnet-parameters"]
    verdicts = train_all(invented, question, lambda name, _: 0.6 + leads.get(name, 0), names)
    assert verdicts["C1"].estimate.value == pytest.approx(0.1, abs=0.01)
    assert verdicts["C1"].state(0.05) == "supported"
    assert (verdicts["C1"].message, verdicts["C2"].message) == (f"result-{ending}", f"not-crossed-{ending}")
    for verdict in (verdicts["C1"], verdicts["C2"]):
        for language in ("en", "ko"):
            assert verdict.fields["parameters"] in question.messages[f"{verdict.claim}-{verdict.message}"][
                language
            ].format(**verdict.fields)
    figures = dict(question.figures())
    assert "data-axes" in figures
    assert "133,339" in question.html(figures)  # parameters of the CNN at equal multiply-accumulates


def test_axes_equalise_parameters_and_change_only_one_model(question):
    def config(name):
        variant = question.variants[name]
        return question.lab.images.matched_config(variant.family, **variant.changes)

    configs = {axis: [config(name) for name in names] for axis, names in AXES.items()}
    assert configs["macs"][0].macs == pytest.approx(configs["macs"][1].macs, rel=0.06)
    assert configs["parameters"][0].parameters == pytest.approx(configs["parameters"][1].parameters, rel=0.05)
    assert configs["parameters"][0] == configs["macs"][0]
    assert configs["time"][1] == configs["macs"][1]
    assert configs["time"][0].depth == 3


# Longer training


def add_validation(invented, trial, accuracy):
    """Add the trials that choose the learning rate of a trial, with this validation accuracy at the best rate."""
    for rate_trial in invented.results.rate_trials(trial):
        is_best = rate_trial.settings["learning_rate"] == 1e-3
        invented.put(rate_trial, **invented.predictions(0.8), validation_accuracy=accuracy - 0.1 * (not is_best))


def needed(question, results):
    """Return whether ViT must be trained on 2, 4, 8 and 16 times as many images seen."""
    trials = [question.trials[name, SIZES[-1]][0] for name in LONGER]
    assert [trial.settings["seen"] // question.lab.seen for trial in trials] == [2, 4, 8, 16]
    return [question.is_needed(trial, results) for trial in trials]


def test_training_is_doubled_until_it_gains_less_than_0_3_points(invented, question):
    assert needed(question, invented.results) == [True, None, None, None]
    for name, accuracy in (("vit", 0.7), ("vit-1", 0.72), ("vit-2", 0.7232), ("vit-3", 0.726)):
        add_validation(invented, question.trials[name, SIZES[-1]][0], accuracy)
    assert needed(question, invented.results) == [True, True, True, False]


def test_doubling_ends_at_16_times_the_images_seen(invented, question):
    for number, name in enumerate(("vit", *LONGER)):
        add_validation(invented, question.trials[name, SIZES[-1]][0], 0.5 + 0.1 * number)
    assert needed(question, invented.results) == [True] * 4
    assert max(variant.doublings for variant in question.variants.values()) == 4


def test_plan_leaves_out_doublings_that_are_not_needed(invented, question):
    speeds = dict.fromkeys(question.lab.families, 1e9)

    def seconds():
        return make_plan({"data": question}, invented.results, speeds, budget=None, jobs=1).seconds

    before = seconds()
    for family in ("vit", "resnet"):
        for name in (family, f"{family}-1"):
            add_validation(invented, question.trials[name, SIZES[-1]][0], 0.7)
    saved = before - seconds()
    longest = sum(question.trials[f"{family}-4", SIZES[-1]][0].work / 1e9 for family in ("vit", "resnet"))
    assert saved > (3 * len(RATE_SEEDS) + 3) * longest


def test_compare_doubles_training_until_it_no_longer_helps(tmp_path, monkeypatch):
    """Training on 4 times the images seen gains 10 points, on 8 times none, so 16 times is not tried."""
    question = DataQuestion("data", digits_lab((100,), seeds=1))
    results = Results(tmp_path / "results.jsonl", "x")
    right = {"right": pack(np.ones(8)), "count": 8, "accuracy": 1.0, "training_accuracy": 1.0}
    ran = []

    def run(_folder, trials, *, jobs, backend):
        for trial in trials:
            ran.append((trial.settings["seen"] // question.lab.seen, trial.settings["seed"]))
            accuracy = 0.1 * min(ran[-1][0], 4) - abs(math.log10(trial.settings["learning_rate"] / 1e-3)) / 10
            result = {**right, "validation_accuracy": accuracy}
            yield {"key": trial.trial_id("x"), "cell": trial.to_json(), "result": result, "measured": {}}

    def needed_trials():
        trials = [trial for name in ("vit", *LONGER) for trial in question.trials[name, 100]]
        return [trial for trial in trials if question.is_needed(trial, results)]

    monkeypatch.setattr(compare, "run_trials", run)
    compare._run_stages(tmp_path, results, needed_trials, {"vit": 1e9}, jobs=1, backend="loky", tell=lambda _: None)
    rate_trials = 3 * len(RATE_SEEDS)
    assert Counter(factor for factor, _ in ran) == dict.fromkeys((1, 2, 4, 8), rate_trials + 1)
    assert [factor for factor, seed in ran if seed == 0] == [1, 2, 4, 8]  # judged after all rates are chosen


@pytest.mark.parametrize(("gain", "ending"), [(0.0, "longer"), (0.1, "unconverged")])
def test_c2_compares_the_models_that_were_trained_longest(invented, question, gain, ending):
    names = ["vit", "resnet", "vit-1", "resnet-1"]
    for number, name in enumerate(names):
        add_validation(invented, question.trials[name, SIZES[-1]][0], 0.7 + gain * (number > 1))
    longer = {"vit": 0.7, "resnet": 0.8, "vit-1": 0.9, "resnet-1": 0.8}
    verdicts = train_all(invented, question, lambda name, _: longer[name], names)
    assert verdicts["C2"].estimate.value == pytest.approx(0.1, abs=0.01)
    assert verdicts["C2"].message == f"crossed-{ending}"
    assert verdicts["C2"].fields["vit_seen"] == "2,000"
    assert "data-convergence" in dict(question.figures())


# Rounds


def test_first_rounds_answer_c1_then_c37(question):
    def content(number):
        trainings = [trial for trial in question.rounds()[number] if needs_rate(trial)]
        return {(trial.family, trial.settings["count"], trial.settings["seed"]) for trial in trainings}

    assert content(0) == {(family, n, seed) for family in ("vit", "resnet") for n in SIZES[:2] for seed in range(3)}
    assert content(1) == {("lstm", n, seed) for n in SIZES[:2] for seed in range(3)}
    assert question.rounds()[0][0] == question.lab.train("vit", count=100, seed=0)  # shared with other questions


def test_rounds_of_few_families_need_no_pair(tmp_path):
    question = DataQuestion("data", Lab(digits_lab().images, ("mlp",), (100, 300), 2, 1000))
    assert {trial.family for trial in question.rounds()[0]} == {"mlp"}
    assert "C34b" not in states_without_results(question, tmp_path)


# Classical learners


def test_bayesian_updates_match_scipy():
    """The predictive distribution of a normal mean and variance is a Student distribution (Murphy 2007, section 6)."""
    rng = np.random.default_rng(0)
    pixels, labels, new = rng.random((6, 4)), np.array([0, 1, 0, 0, 1, 0]), rng.random((3, 4))
    posterior = Posterior.prior(2, 4)
    for image, label in zip(pixels, labels, strict=True):
        posterior.update(image, label)
    images = pixels[labels == 0]
    strength, shape = 1 + 4, 1 + 4 / 2
    mean = (0.5 + images.sum(axis=0)) / strength
    deviations = np.square(images - images.mean(axis=0)).sum(axis=0)
    scale = 0.1 + 0.5 * deviations + 4 * np.square(images.mean(axis=0) - 0.5) / (2 * strength)
    student = stats.t(2 * shape, mean, np.sqrt(scale * (strength + 1) / (shape * strength)))
    expected = math.log(strength) + student.logpdf(new).sum(axis=1) + 2 * math.log(math.pi)
    assert posterior.log_joint(new)[:, 0] == pytest.approx(expected, rel=1e-9)


def test_sequential_posterior_equals_the_batch_posterior_but_gradient_steps_depend_on_order(question):
    result = update_posterior({"count": 300}, question.lab.images, [], None).result
    assert result["bayes"] < 1e-12
    assert result["gradient"] > 0.05
    assert result["sequential"] == result["refit"]
    assert result["sequential"][-1] > 0.8


def test_no_linear_rule_learns_xor_but_an_mlp_does(question):
    result = learn_xor({"count": 50}, question.lab.images, [], None).result
    assert result["difference"] == 0
    assert result["linear"] <= 0.75
    assert (result["conjunction"], result["mlp"]) == (1, 1)


def test_report_states_results_of_classical_learners_in_both_languages(tmp_path, question):
    results = Results(tmp_path / "results.jsonl", "x")
    for trial in question.classical.trials:
        result, measured = measure(trial)
        results.add({"key": trial.trial_id("x"), "cell": trial.to_json(), "result": result, "measured": measured})
    question.read(results)
    write_report(tmp_path, question.lab, {"data": question}, machines={}, commands=[])
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "best possible linear rule 75 %" in page
    assert "선형 규칙의 한계는 75 %" in page
