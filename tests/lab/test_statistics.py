"""Verdicts under noise: their false positive rates, and the rules that decide them."""

import math

import numpy as np
import pytest
from scipy import stats

from tests.fake_lab import digits_lab
from tests.made_up import InventedResults
from vitrail.lab import lab_report
from vitrail.lab.question import Accuracies, Question, Verdict
from vitrail.lab.questions.augmentation import AugmentationQuestion
from vitrail.lab.questions.data import DataQuestion
from vitrail.lab.questions.encoder import EncoderQuestion
from vitrail.lab.questions.order import OrderQuestion
from vitrail.lab.questions.position import PositionQuestion
from vitrail.lab.questions.size import SizeQuestion
from vitrail.lab.questions.transfer import TransferQuestion, halves
from vitrail.lab.statistics import (
    Estimate,
    SeedNoise,
    central_interval,
    combine,
    contrast,
    draw_accuracies,
    log_errors,
    mean_of,
    pool,
    smallest,
    sum_of_means,
)
from vitrail.lab.trial import Trial, pack
from vitrail.lab.trial_results import Results

LEVEL = 0.05


def rate(event, trials):
    """Return the frequency of an event in repeated experiments."""
    return sum(bool(event()) for _ in range(trials)) / trials


# Degrees of freedom


def test_means_with_shared_noise_count_its_degrees_of_freedom_once():
    noise = pool([[1.0, 2.0], [3.0, 3.5], [0.0, 0.1], [4.0, 4.2]])
    estimate = sum_of_means([(1.0, [1.0, 2.0], noise), (-1.0, [3.0, 3.5], noise)])
    assert (estimate.freedom, estimate.value) == (pytest.approx(4), pytest.approx(-1.75))
    assert estimate.error == pytest.approx(math.sqrt(noise.variance))
    other = SeedNoise(noise.variance, 2)
    apart = sum_of_means([(1.0, [1.0, 2.0], noise), (-1.0, [3.0, 3.5], other)])
    assert apart.freedom == pytest.approx(4 / (1 / 4 + 1 / 2))  # Welch and Satterthwaite
    same = SeedNoise(noise.variance, noise.freedom)  # another estimate that has the same value
    assert sum_of_means([(1.0, [1.0, 2.0], noise), (-1.0, [3.0, 3.5], same)]).freedom == pytest.approx(8)
    assert math.isnan(sum_of_means([(1.0, [1.0], SeedNoise(math.nan, 0))]).error)


def test_false_positive_rate_of_equal_means_matches_the_level():
    """Two of four groups of two seeds with pooled noise: without an effect, 5 % are significant."""
    generator = np.random.default_rng(0)

    def is_significant():
        groups = generator.normal(size=(4, 2)).tolist()
        noise = pool(groups)
        return sum_of_means([(1.0, groups[0], noise), (-1.0, groups[1], noise)]).p_value < LEVEL

    assert rate(is_significant, 3000) == pytest.approx(LEVEL, abs=0.012)


# The smallest of several


def draw_leads(generator, variants, lead=0.0):
    """Draw the leads of several variants over one reference, with three seeds each."""
    groups = generator.normal(size=(variants + 1, 3))
    groups[:variants] += lead
    noise = pool(groups.tolist())
    return [
        sum_of_means([(1.0, groups[variant], noise), (-1.0, groups[variants], noise)]) for variant in range(variants)
    ]


def test_smallest_of_equal_values_is_rarely_contradicted():
    generator = np.random.default_rng(0)

    def is_contradicted():
        return Verdict("P1", "trained", smallest(draw_leads(generator, 6))).state(LEVEL) == "contradicted"

    assert rate(is_contradicted, 1500) < 0.03  # 0.025 is the level; an interval of the smallest alone would give 0.09


def test_smallest_is_above_zero_only_if_every_part_is():
    sure, unsure = Estimate(0.02, 0.001, 20), Estimate(0.03, 0.02, 20)
    estimate = smallest([sure, unsure])
    assert estimate.value == 0.02
    assert estimate.interval() == pytest.approx((unsure.interval()[0], sure.interval(LEVEL / 2)[1]))
    assert Verdict("C1", "trained", estimate).state(LEVEL) == "cannot tell"
    assert Verdict("C1", "trained", smallest([sure, sure])).state(LEVEL) == "supported"
    assert smallest([sure, None]) is None
    assert math.isnan(smallest([sure, Estimate(0.1, math.nan, 0)]).error)


@pytest.mark.parametrize("values", [(0.03, 0.02), (-0.03, 0.02), (-0.03, -0.05), (0.0, 0.001)])
def test_p_value_of_the_smallest_is_the_level_whose_interval_ends_at_zero(values):
    estimate = smallest([Estimate(value, 0.01, 8) for value in values])
    p = estimate.p_value
    low, high = estimate.interval(min(p * 1.01, 1))
    is_beyond = low > 0 or high < 0
    low, high = estimate.interval(p * 0.99)
    assert low < 0 < high
    assert is_beyond or p == 1


def test_smallest_inherits_the_doubt_of_any_part():
    steady = Estimate(0.1, 0.001, 10, halves=(0.1, 0.1))
    unsteady = Estimate(0.2, 0.001, 10, halves=(0.5, -0.1))
    cut_off = steady._replace(value=0.3, is_cut_off=True)
    assert Verdict("C1", "trained", smallest([steady, unsteady])).doubt == "unsteady"
    assert Verdict("C1", "trained", smallest([steady, cut_off])).doubt == "cut-off"
    below = Estimate(-0.1, 0.001, 10, halves=(-0.1, -0.1))
    assert Verdict("C1", "trained", smallest([below, unsteady])).state(LEVEL) == "contradicted"


# Noise groups


def fill_two_sizes(folder):
    """Write results whose seeds differ by 8 points with few images and by 0.2 with many."""
    results = Results(folder / "results.jsonl", "x", 300)
    groups = {(name, n): [Trial(name, {"n": n, "seed": seed}) for seed in range(2)] for name in "ab" for n in (1, 2)}
    for (_, n), trials in groups.items():
        for seed, trial in enumerate(trials):
            right = np.arange(1000) < 500 + (80 if n == 1 else 2) * seed
            result = {"right": pack(right), "count": 1000}
            results.add({"key": trial.trial_id("x"), "cell": trial.to_json(), "result": result, "measured": {}})
    return results, groups


def test_seed_noise_is_separate_for_each_size(tmp_path):
    accuracies = Accuracies(*fill_two_sizes(tmp_path), noise_group=lambda key: key[1])
    spread = [accuracies.noise_of(("a", n)) for n in (1, 2)]
    assert [noise.variance for noise in spread] == [pytest.approx(0.08**2 / 2), pytest.approx(0.002**2 / 2)]
    assert [noise.freedom for noise in spread] == [2, 2]
    across = accuracies.contrast((1.0, ("a", 1)), (-1.0, ("b", 1)), (-1.0, ("a", 2)), (1.0, ("b", 2)))
    assert across.error == pytest.approx(math.sqrt(0.08**2 / 2 + 0.002**2 / 2), rel=1e-6)
    assert across.freedom == pytest.approx(2, rel=0.01)
    assert accuracies.difference(("a", 2), ("b", 2)).error < 0.01


def noises(question, folder):
    """Return the seed noise of every variant of a question with two seeds each."""
    invented = InventedResults(folder, question)
    for trials in question.trials.values():
        for trial in trials:
            invented.train(trial, 0.8)
    question.read(invented.results)
    return {name: question.accuracies.noise_of(name) for name in question.accuracies.right}


def test_questions_pool_noise_within_noise_groups(tmp_path):
    for number, (kind, size) in enumerate(((DataQuestion, 1), (AugmentationQuestion, 2), (SizeQuestion, 2))):
        (tmp_path / str(number)).mkdir()
        pooled = noises(kind("q", digits_lab()), tmp_path / str(number))
        of_sizes = {name[size]: noise for name, noise in pooled.items()}
        assert len(of_sizes) == 2
        assert all(noise is of_sizes[name[size]] for name, noise in pooled.items())
        counts = {n: sum(name[size] == n for name in pooled) for n in of_sizes}
        assert {n: noise.freedom for n, noise in of_sizes.items()} == counts  # two seeds each
    (tmp_path / "encoder").mkdir()
    pooled = noises(EncoderQuestion("q", digits_lab()), tmp_path / "encoder")
    assert pooled["pre"] is pooled["post"] is pooled["bare-deep"]
    assert pooled["pre"] is not pooled["base"]


def test_false_positive_rate_matches_the_level_at_a_noisy_size():
    """Seeds differ twice as much with few images as elsewhere; 10,000 test images, three seeds, four families."""
    generator = np.random.default_rng(0)

    def is_significant():
        hard = generator.normal(size=10_000)
        rights = []
        for _ in range(4):
            cuts = stats.norm.ppf(0.65 + generator.normal(0, 0.008, 3)) * math.sqrt(2)
            rights.append(np.stack([hard + generator.normal(size=10_000) < cut for cut in cuts]).astype(float))
        noise = pool(right.mean(axis=1).tolist() for right in rights)
        return contrast([(1.0, rights[0], noise), (-1.0, rights[1], noise)]).p_value < LEVEL

    assert rate(is_significant, 150) < 0.09


# Log errors, gaps, curves


def test_log_errors_are_paired_and_match_the_bootstrap():
    generator = np.random.default_rng(0)
    hard = generator.normal(size=4000)
    rights = [np.stack([hard + generator.normal(0, 0.3, 4000) < cut] * 2).astype(float) for cut in (1.0, 1.1, 0.2, 0.3)]
    noise, weights = SeedNoise(1e-8, 6), (1.0, -1.0, -1.0, 1.0)
    estimate = log_errors([(weight, right, noise) for weight, right in zip(weights, rights, strict=True)])
    wrong = [1 - right.mean() for right in rights]
    assert estimate.value == pytest.approx(sum(w * math.log(share) for w, share in zip(weights, wrong, strict=True)))
    draws = []
    for _ in range(400):
        sample = generator.integers(4000, size=4000)
        shares = [1 - right[:, sample].mean() for right in rights]
        draws.append(sum(w * math.log(share) for w, share in zip(weights, shares, strict=True)))
    assert estimate.error == pytest.approx(np.std(draws), rel=0.15)
    assert estimate.halves == pytest.approx((estimate.value, estimate.value))


def test_draw_accuracies_share_images_and_include_seed_noise():
    generator = np.random.default_rng(7)
    right = np.stack([generator.random(400) < 0.7] * 2).astype(float)
    same = draw_accuracies([(right, SeedNoise(0.0, 4)), (right, SeedNoise(0.0, 4))])
    assert np.ptp(same[:, 0] - same[:, 1]) == 0  # the images are the same
    assert same[:, 0].std() == pytest.approx(math.sqrt(0.21 / 400), rel=0.15)
    noisy = draw_accuracies([(right, SeedNoise(1e-2, 3)), (right, SeedNoise(1e-2, 3))])
    apart = noisy[:, 0] - noisy[:, 1]
    wide = math.sqrt(1e-2) * stats.t.ppf(0.975, 3)
    assert central_interval(apart.tolist())[1] == pytest.approx(wide, rel=0.25)
    assert central_interval([1.0] * 390 + [math.inf] * 10) == (1.0, 1.0)
    assert math.isinf(central_interval([1.0] * 380 + [math.inf] * 20)[1])


def ask_about_data(folder, accuracy, sizes=(100, 300, 600, 1000)):
    """Return the data question and its verdicts for accuracies by family and size."""
    question = DataQuestion("data", digits_lab(sizes))
    invented = InventedResults(folder, question)
    for key, trials in question.trials.items():
        for trial in trials:
            invented.train(trial, accuracy(*key))
    question.read(invented.results)
    return question, {verdict.claim: verdict for verdict in question.verdicts()}


@pytest.mark.parametrize(
    ("leads", "sentence", "at"),
    [
        ((-0.2, -0.1, -0.05, -0.03), "not-crossed", None),
        ((-0.2, -0.1, 0.1, 0.2), "crossed", 424),
        ((0.1, 0.1, 0.1, 0.2), "ahead", None),
        ((-0.2, -0.1, -0.05, 0.0), "level", None),
        ((-0.2, -0.1, 0.0), "level-few", None),
        ((-0.2, -0.1, -0.1), "not-crossed-few", None),
    ],
)
def test_crossover_message_depends_on_the_noise(tmp_path, leads, sentence, at):
    sizes = (100, 300, 600, 1000)[: len(leads)]
    lead = dict(zip(sizes, leads, strict=True))

    def accuracy(family, count):
        return 0.5 + 0.1 * math.log10(count / 100) + (lead[count] if family == "vit" else 0)

    _, verdicts = ask_about_data(tmp_path, accuracy, sizes)
    verdict = verdicts["C2"]
    assert verdict.message == sentence
    for language in ("en", "ko"):
        assert DataQuestion.messages[f"C2-{sentence}"][language].format(**verdict.fields)
    if at is not None:  # halfway from 300 to 600 in log n
        assert float(verdict.fields["at"].replace(",", "")) == pytest.approx(at, rel=0.05)
        assert float(verdict.fields["low"].replace(",", "")) < at < float(verdict.fields["high"].replace(",", ""))


def test_c1_uses_the_two_smallest_sizes(tmp_path):
    """The CNN leads by 20 points at 100 images, by 10 at 300, and lags at 1,000."""
    leads = {100: 0.2, 300: 0.1, 1000: -0.2}
    _, verdicts = ask_about_data(
        tmp_path, lambda family, count: 0.6 + leads[count] * (family == "resnet"), sizes=tuple(leads)
    )
    assert verdicts["C1"].estimate.value == pytest.approx(0.1, abs=0.01)
    assert len(verdicts["C1"].estimate.parts) == 2


def test_claims_about_growing_data_need_two_sizes(tmp_path):
    _, verdicts = ask_about_data(tmp_path, lambda _family, _count: 0.8, sizes=(300,))
    assert [verdicts[claim].estimate for claim in ("C3", "C7")] == [None, None]


def test_gap_error_includes_sampling_of_train_and_test_images(tmp_path):
    question, verdicts = ask_about_data(tmp_path, lambda _family, count: 0.5 if count == 100 else 0.8)
    gap = verdicts["C7"].estimate
    assert gap.value == pytest.approx(0.3, abs=0.01)
    test_difference = question.accuracies.difference(("vit", 100), ("vit", 1000))
    assert gap.parts[0].image_error == pytest.approx(test_difference.image_error)  # all training images were evaluated
    assert test_difference.image_error == pytest.approx(math.sqrt(0.3 * 0.7 / 2000), rel=0.05)
    question.training_accuracy = {("vit", 8000): 0.9, ("vit", 300): 0.9}
    assert question._sampling_error(("vit", 8000)) == pytest.approx(math.sqrt(0.9 * 0.1 / 2000 * 0.75))
    assert question._sampling_error(("vit", 300)) == 0


def test_mixer_claim_needs_the_smallest_and_the_largest_size(tmp_path):
    question = DataQuestion("data", digits_lab((100, 300, 600)))
    invented = InventedResults(tmp_path, question)
    for key, trials in question.trials.items():
        if key[0] == "vit" or key == ("mixer", 300):  # the largest size is missing
            for trial in trials:
                invented.train(trial, 0.8)
    question.read(invented.results)
    verdict = next(candidate for candidate in question.verdicts() if candidate.claim == "C34b")
    assert verdict.estimate is None


# Learning rates that are cut off


def cut_off_rates(invented, trial):
    """Add results in which each further learning rate is better, up to the outermost."""
    for rate_trial, share in zip(invented.results.rate_trials(trial), (0.5, 0.5, 0.6), strict=True):
        invented.put(rate_trial, **invented.predictions(0.8), fewshot=0.5, finetuned=0.5, validation_accuracy=share)
    for share in (0.8, 0.97):
        invented.put(
            invented.results.next_rate_trial(trial),
            **invented.predictions(0.8),
            fewshot=0.5,
            finetuned=0.5,
            validation_accuracy=share,
        )


def test_transfer_is_cut_off_with_its_rates_and_includes_image_noise(tmp_path):
    lab = digits_lab()
    for is_cut in (False, True):
        question = TransferQuestion("transfer", lab)
        folder = tmp_path / str(is_cut)
        folder.mkdir()
        invented = InventedResults(folder, question)
        for number, (key, trials) in enumerate(question.trials.items()):
            for seed, trial in enumerate(trials):
                if not seed and key == ("vit", "linear", 100) and is_cut:
                    cut_off_rates(invented, trial)
                for rate_trial in invented.results.rate_trials(trial):
                    if not invented.results.has(rate_trial):
                        invented.put(rate_trial, fewshot=0.5, finetuned=0.5, validation_accuracy=0.5)
                share = 0.5 + 0.3 * (key[2] == 300) + 0.001 * seed + 1e-5 * number
                invented.put(invented.results.resolve(trial), fewshot=share, finetuned=share, validation_accuracy=0.97)
        question.read(invented.results)
        verdict = next(question.verdicts())
        assert verdict.state(LEVEL) == ("cannot tell" if is_cut else "supported")
        assert verdict.doubt == ("cut-off" if is_cut else None)
    new = [lab.images.labels.index(name) for name in halves(lab.images)[1].labels]
    test_count = int(np.isin(lab.images.test.labels, new).sum())
    estimate = question._estimate("fewshot", ("vit", "linear", 100))
    assert estimate.image_error == pytest.approx(math.sqrt(0.5 * 0.5 / test_count), rel=0.01)


def test_position_and_order_estimates_are_cut_off_with_their_rates(tmp_path):
    lab = digits_lab()
    question = PositionQuestion("position", lab)
    invented = InventedResults(tmp_path, question)
    for seed, trial in enumerate(question.fine_trials):
        invented.train(trial, 0.8, places=[[0, 0, 0.1, 0.1], [9, 0, 0.8, 0.5 + 0.001 * seed]])
    question.read(invented.results)
    verdict = next(question.verdicts())
    assert (verdict.estimate.value, verdict.doubt) == (pytest.approx(0.4005), None)
    assert len(verdict.estimate.parts) == 2
    cut_off_rates(invented, question.fine_trials[0])
    for seed, trial in enumerate(question.fine_trials):
        curve = [[0, 0, 0.1, 0.1], [9, 0, 0.8, 0.5 + 0.001 * seed]]
        invented.put(invented.results.resolve(trial), **invented.predictions(0.8), places=curve)
    question.read(invented.results)
    assert next(question.verdicts()).doubt == "cut-off"
    question = OrderQuestion("order", lab)
    question.accuracies = Accuracies(invented.results, {})
    question.measurements, question.noise = {"raster": [{"after": {"recency": 0.7}}]}, SeedNoise(1e-6, 3)
    assert not question._excess_recency("raster").is_cut_off
    question.accuracies.cut_off = {"raster"}
    assert question._excess_recency("raster").is_cut_off
    assert question._excess_recency("raster").value == pytest.approx(0.2)


def test_mean_equals_a_sum_of_one_term():
    noise = SeedNoise(0.04, 5)
    assert mean_of([1.0, 3.0], noise) == sum_of_means([(1.0, [1.0, 3.0], noise)])


def uncertain(value, seeds, images):
    """Return an estimate with errors from seeds (nine degrees of freedom) and from 2,000 test images."""
    return combine((1.0, Estimate(value, images, 1999, image_error=images)), (1.0, Estimate(0.0, seeds, 9)))


@pytest.mark.parametrize(
    ("verdict", "name"),
    [
        (Verdict("C1", "trained"), "not-run"),
        (Verdict("C1", "exact"), "not-run"),
        (Verdict("C1", "trained", Estimate(0.1, math.nan, 0)), "one-seed"),
        (Verdict("C1", "trained", Estimate(0.1, 0.001, 9, halves=(0.3, -0.1))), "unsteady"),
        (Verdict("C1", "trained", Estimate(0.01, 0.02, 9, halves=(0.3, -0.1))), "more-seeds"),
        (Verdict("C1", "trained", Estimate(0.01, 0.02, 9, is_cut_off=True)), "cut-off"),
        (Verdict("C2", "trained", Estimate(-0.1, 0.001, 9), is_one_sided=True), "beyond-range"),
        (Verdict("C2", "trained", Estimate(-0.01, 0.02, 9), is_one_sided=True), "beyond-range"),
        (Verdict("C2", "trained", Estimate(0.01, 0.02, 9), is_one_sided=True), "more-seeds"),
        (Verdict("C1", "trained", Estimate(0.001, 0.02, 9)), "far-too-few-seeds"),
        (Verdict("C1", "trained", Estimate(0.0, 0.02, 9)), "far-too-few-seeds"),
        (Verdict("C1", "trained", uncertain(0.001, 0.02, 0.001)), "far-too-few"),
        (Verdict("C1", "trained", uncertain(0.01, 0.001, 0.02)), "more-images"),
        (Verdict("C1", "trained", uncertain(0.01, 0.006, 0.019)), "more-of-both"),
        (Verdict("C1", "trained", uncertain(0.01, 0.019, 0.006)), "more-of-both"),
        (Verdict("C20", "trained", Estimate(0.004, 0.02, 9), margin=0.01), "margin-zero"),
        (Verdict("C20", "trained", Estimate(0.0135, 0.0035, 35), margin=0.01), "margin-difference"),
        (Verdict("C1", "trained", Estimate(0.1, 0.001, 9)), None),
    ],
)
def test_undecided_verdict_has_the_right_reason(verdict, name):
    reason = lab_report._undecided_reason(digits_lab(), verdict, LEVEL)
    assert (None if reason is None else reason.name) == name
    for language in ("en", "ko") if reason is not None else ():
        text = reason.text(language)
        assert "{" not in text
        assert text in reason.html()


@pytest.mark.parametrize(
    ("estimate", "name", "sources"),
    [
        (Estimate(0.01, 0.02, 9), "more-seeds", ("seeds",)),
        (Estimate(0.17, 0.065, 2), "more-seeds", ("seeds",)),
        (uncertain(-0.01, 0.02, 0.001), "more-seeds", ("seeds",)),
        (uncertain(0.01, 0.001, 0.02), "more-images", ("images",)),
        (uncertain(0.01, 0.006, 0.019), "more-of-both", ("seeds", "images")),
        (smallest([Estimate(0.01, 0.008, 9), Estimate(0.02, 0.04, 9)]), "more-seeds", ("seeds",)),
    ],
)
def test_remedy_names_the_fewest_sufficient_seeds_and_images(estimate, name, sources):
    """The named number makes the interval exclude zero, one fewer does not."""
    lab, level = digits_lab(), 0.01
    remedy = lab_report._remedy(lab, estimate, level)
    assert remedy.name == name
    (count,) = remedy.fields.values()
    current = lab.seeds if name == "more-seeds" else 1
    for number, is_decided in ((count - 1, False), (count, True)):
        assert estimate.would_exclude_zero(level, **dict.fromkeys(sources, number / current)) == is_decided


def test_remedy_does_not_suggest_images_that_cannot_help():
    """Neither more seeds nor more test images alone exclude zero, because seeds vary too much."""
    estimate = uncertain(-0.0053, 0.0524, 0.0028)
    assert not estimate.would_exclude_zero(seeds=1e12)
    assert not estimate.would_exclude_zero(images=1e12)
    assert lab_report._remedy(digits_lab(), estimate, LEVEL).name == "far-too-few"


def test_rescaled_error_matches_more_seeds_and_images():
    generator = np.random.default_rng(0)
    few, many = (generator.normal(size=(4, seeds)) for seeds in (5, 20))
    noise = pool(few.tolist())
    rescaled = sum_of_means([(1.0, few[0], noise), (-1.0, few[1], noise)], images=0.1, freedom=1e4)._rescaled(4, 9)
    larger_noise = SeedNoise(noise.variance, 4 * noise.freedom)
    expected = sum_of_means([(1.0, many[0], larger_noise), (-1.0, many[1], larger_noise)], images=0.1 / 3, freedom=9e4)
    assert rescaled.error == pytest.approx(expected.error)
    assert rescaled.freedom == pytest.approx(expected.freedom, rel=0.01)


# Equivalence


@pytest.mark.parametrize("value", [-0.016, -0.008, -0.004, 0.0, 0.003, 0.007, 0.012, 0.02])
@pytest.mark.parametrize("error", [0.0005, 0.002, 0.006])
def test_equality_verdict_matches_two_one_sided_tests(value, error):
    """It does not matter whether the interval includes zero: 0.3 +- 0.1 points are equal within one."""
    margin, freedom = 0.01, 12
    above, below = stats.t.sf([(value + margin) / error, (margin - value) / error], freedom)
    apart = min(stats.t.sf([(value - margin) / error, (-margin - value) / error], freedom))
    expected = "supported" if max(above, below) < LEVEL / 2 else "contradicted" if apart < LEVEL / 2 else "cannot tell"
    verdict = Verdict("C20", "trained", Estimate(value, error, freedom), margin=margin)
    assert verdict.state(LEVEL) == expected
    low, high = verdict.estimate.interval()
    assert (expected == "supported") == (-margin < low and high < margin)
    assert (expected == "contradicted") == (low > margin or high < -margin)


def test_reason_for_an_open_equality_names_the_margin():
    """1-D and 2-D positions on Fashion-MNIST: the interval excludes zero and crosses one point."""
    verdict = Verdict("C20", "trained", Estimate(-0.0135, 0.0035, 35, image_error=0.0019), margin=0.01)
    text = lab_report._undecided_reason(digits_lab(), verdict, LEVEL).text("en")
    assert text.startswith("The interval excludes zero and crosses the margin of ±1.0 points: there is a difference,")
    assert text.endswith("times as many seeds and test images would decide.")
    level = Verdict("C20", "trained", Estimate(-0.004, 0.0035, 35), margin=0.01)
    assert "excludes zero" not in lab_report._undecided_reason(digits_lab(), level, LEVEL).text("en")


def test_report_applies_holms_correction(tmp_path):
    """One claim at p = 0.04 is supported, two are not after Holm's correction."""

    class Claims(Question):
        def verdicts(self):
            yield from (Verdict(claim, "trained", Estimate(0.01, error, math.inf)) for claim, error in self.errors)

    Claims.messages = {name: {"en": name, "ko": name} for name in ("title", "about", "C1", "C1-rule", "C2", "C2-rule")}
    question = Claims("claims", digits_lab())
    error_at_004 = 0.01 / stats.norm.isf(0.02)
    for errors, expected in (
        ([("C1", error_at_004)], ["supported"]),
        ([("C1", error_at_004), ("C2", error_at_004)], ["cannot tell", "cannot tell"]),
        ([("C1", error_at_004), ("C2", error_at_004 / 10)], ["supported", "supported"]),
    ):
        question.errors = errors
        document = lab_report.write_report(tmp_path, question.lab, {"claims": question}, machines={}, commands=[])
        assert [claim["verdict"] for claim in document["claims"]] == expected
        assert all((claim["interval"][0] > 0) == (claim["verdict"] == "supported") for claim in document["claims"])
