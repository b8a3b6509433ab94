"""Verification and identification of faces: rates equal scikit-learn and plain loops, with intervals."""

import json
import math
import unicodedata

import numpy as np
import pytest
from PIL import Image
from scipy.stats import beta
from sklearn.metrics import roc_curve

from vitrail.core import rng
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.evaluation import verification_metrics
from vitrail.evaluation.identification_metrics import measure_identification
from vitrail.evaluation.verification_metrics import (
    DRAWS,
    FARS,
    cross_validate_people,
    fold_accuracy,
    score_all_pairs,
    score_listed_pairs,
    verify_groups,
    verify_pairs,
)
from vitrail.faces.pairs import read_pairs
from vitrail.faces.thresholds import check_rate, clopper_pearson, least_rate, threshold_at
from vitrail.reports.objectives.registry import summary
from vitrail.training.objectives.margin import judge_pairs


def draw_people(people=30, images=6, width=16, spread=1.2, seed=0):
    """Return random unit vectors around a centre for each person, and the person of each vector."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(people), images)
    vectors = generator.normal(size=(len(labels), width)) + spread * generator.normal(size=(people, width))[labels]
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels


def verify_all(vectors, people, **settings):
    return verify_pairs(lambda: score_all_pairs(vectors), people, **settings)


def scores_of(vectors, people):
    """Return scores and truth of all pairs, computed at once."""
    first, second = np.triu_indices(len(people), 1)
    return (vectors @ vectors.T)[first, second], people[first] == people[second]


@pytest.mark.parametrize("digits", [7, 1])
@pytest.mark.parametrize("seed", [0, 1])
def test_roc_curve_equals_scikit_learn(digits, seed):
    """With one digit, many scores are equal."""
    vectors, people = draw_people(seed=seed)
    scores, truth = scores_of(vectors, people)
    scores = scores.round(digits).astype(np.float32)
    first, second = np.triu_indices(len(people), 1)
    blocks = [
        verification_metrics.PairBlock(first[indices], second[indices], scores[indices])
        for indices in np.array_split(np.arange(len(first)), 7)
    ]
    curve = verify_pairs(lambda: blocks, people).curve
    fpr, tpr, thresholds = roc_curve(truth, scores, drop_intermediate=False)
    assert (curve.genuine, curve.impostor) == (int(truth.sum()), int((~truth).sum()))
    positions = np.searchsorted(-thresholds, -curve.thresholds.astype(np.float64))
    assert len(positions) == len(np.unique(scores[truth])) + 1
    np.testing.assert_array_equal(thresholds[positions], curve.thresholds)
    np.testing.assert_array_equal(tpr[positions], curve.tar)
    np.testing.assert_array_equal(fpr[positions], curve.far)
    for far in (*FARS, 0.0, 0.25, 1.0):
        assert curve.at_far(far).tar == tpr[fpr <= far].max()
    assert curve.at_equal_errors()[0] == np.maximum(fpr, 1 - tpr).min()


def test_eer_is_where_both_error_rates_cross():
    vectors, people = draw_people()
    scores, truth = scores_of(vectors, people)
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    crossing = np.argmax(fpr >= 1 - tpr)
    interpolated = np.interp(0, (fpr + tpr - 1)[crossing - 1 : crossing + 1], fpr[crossing - 1 : crossing + 1])
    assert verify_all(vectors, people).curve.at_equal_errors()[0] == pytest.approx(interpolated, abs=1e-12)


def test_blocks_of_pairs_have_bounded_size_and_same_result(monkeypatch):
    vectors, people = draw_people()
    expected = verify_all(vectors, people)
    monkeypatch.setattr(verification_metrics, "BLOCK_PAIRS", 1000)
    assert max(len(block.scores) for block in score_all_pairs(vectors)) <= 1000
    first, second = (
        np.concatenate([getattr(block, side) for block in score_all_pairs(vectors)]) for side in ("first", "second")
    )
    np.testing.assert_array_equal(np.stack([first, second]), np.triu_indices(len(people), 1))
    blockwise = verify_all(vectors, people)
    np.testing.assert_allclose(blockwise.curve.far, expected.curve.far, atol=2 / expected.curve.impostor)
    assert blockwise.report()["eer"] == pytest.approx(expected.report()["eer"], abs=1e-3)
    listed = verify_pairs(lambda: score_listed_pairs(vectors, first, second), people)
    assert listed.report()["eer"] == pytest.approx(expected.report()["eer"], abs=1e-3)


@pytest.mark.parametrize("units", [128, 7])
def test_bootstrap_of_people_equals_plain_loop(monkeypatch, units):
    monkeypatch.setattr(verification_metrics, "_UNITS", units)
    vectors, people = draw_people(people=12, images=4)
    verification = verify_all(vectors, people, seed=5)
    units = min(units, 12)
    unit_of = rng.permutation(12, 5, stream="units of people") % units
    samples = rng.integers(units, 5, np.arange(DRAWS)[:, None], np.arange(units), stream="bootstrap of people")
    scores, truth = scores_of(vectors, people)
    first, second = np.triu_indices(len(people), 1)
    weights = np.stack([np.bincount(sample, minlength=units) for sample in samples])[:, unit_of]
    assert (weights.sum(axis=1) == 12).all() or units < 12
    draw = 0
    for weight in weights[:20]:
        first_weights = weight[people[first]]
        impostor_weights, genuine_weights = (first_weights * weight[people[second]])[~truth], first_weights[truth]
        if not genuine_weights.sum() or not impostor_weights.sum():
            continue
        for index in (0, 40, len(verification.draws.thresholds) - 1):
            threshold = verification.draws.thresholds[index]
            tar, far = (
                (pair_weights * (scores[is_kind] >= threshold)).sum() / pair_weights.sum()
                for pair_weights, is_kind in ((genuine_weights, truth), (impostor_weights, ~truth))
            )
            assert verification.draws.tar[draw, index] == pytest.approx(tar, abs=1e-6)
            assert verification.draws.far[draw, index] == pytest.approx(far, abs=1e-6)
        draw += 1
    assert verification.units == units


def test_bootstrap_of_few_people_with_many_images_has_bounded_size():
    vectors, people = draw_people(people=4, images=80)
    verification = verify_all(vectors, people)
    assert len(verification.curve.thresholds) > 10_000
    assert verification.draws.tar.size <= verification_metrics._TABLE
    low, high = verification.report()["eer_interval"]
    assert low <= verification.report()["eer"] <= high


def test_verification_without_intervals_does_not_resample(monkeypatch):
    vectors, people = draw_people()
    expected = verify_all(vectors, people).report()
    monkeypatch.setattr(verification_metrics, "draw_weights", None)
    verification = verify_all(vectors, people, intervals=False)
    assert (verification.draws, verification.units) == (None, 0)
    tar = [row | {"interval": None} for row in expected["tar"]]
    assert verification.report() == expected | {"eer_interval": None, "tar": tar, "resampled": 0}


def test_results_depend_only_on_the_seed():
    vectors, people = draw_people()
    assert verify_all(vectors, people, seed=3).report() == verify_all(vectors, people, seed=3).report()
    report, other_report = (verify_all(vectors, people, seed=seed).report() for seed in (3, 4))
    assert report["eer"] == other_report["eer"]
    assert report["eer_interval"] != other_report["eer_interval"]
    assert measure_identification(vectors, people, seed=3) == measure_identification(vectors, people, seed=3)
    assert (
        cross_validate_people(vectors, people, seed=3)
        == cross_validate_people(vectors, people, seed=3)
        != cross_validate_people(vectors, people, seed=4)
    )


def test_eer_intervals_contain_the_true_eer():
    """The EER of 400 people is in most intervals of samples of 20 of them."""
    vectors, people = draw_people(people=400, images=4, seed=9)
    truth = verify_all(vectors, people).report()["eer"]
    hits = 0
    for number in range(24):
        sample = np.isin(people, rng.permutation(400, number, stream="sample")[:20])
        _, sample_people = np.unique(people[sample], return_inverse=True)
        low, high = verify_all(vectors[sample], sample_people).report()["eer_interval"]
        hits += low <= truth <= high
    assert hits >= 20  # 23 are expected, but the intervals of 20 people are approximate


def test_rates_that_the_data_cannot_support_are_none():
    vectors, people = draw_people(people=8, images=4)
    report = verify_all(vectors, people).report()
    assert report["impostor"] == 448
    assert [row["tar"] is None for row in report["tar"]] == [False, True, True]
    assert [row["dir"] for row in measure_identification(vectors, people)["dir"]] == [None] * 3
    assert cross_validate_people(vectors[people < 3], people[people < 3]) is None


def test_two_people_have_rates_without_intervals():
    vectors, people = draw_people(people=2, images=20)
    verification = verify_all(vectors, people)
    report = verification.report()
    assert 0 < report["eer"] < 1
    assert (report["eer_interval"], report["resampled"]) == (None, 0)
    assert (report["tar"][0]["tar"] > 0, report["tar"][0]["interval"]) == (True, None)
    assert measure_identification(vectors, people)["rank1_interval"] is None
    judgement = judge_pairs(verification, 2, "test")
    assert judgement.sentence == f"test equal error rate {report['eer']:.1%} (2 people, 780 pairs)"
    assert "interval" not in summary(judgement)[0][0]
    (row,) = verify_groups(lambda: score_all_pairs(vectors), people, ["pair", "pair"], verification)
    assert (row["eer"], row["eer_interval"]) == (report["eer"], None)
    assert verify_all(*draw_people(people=3, images=20)).report()["resampled"] == 3


def test_perfect_scores_have_no_interval():
    """Every bootstrap draw is perfect, too, so it cannot tell how rare errors are."""
    people = np.repeat(np.arange(6), 8)
    report = verify_all(np.eye(6, dtype=np.float32)[people], people).report()
    assert (report["eer"], report["eer_interval"], report["resampled"]) == (0, None, 6)
    assert (report["tar"][0]["tar"], report["tar"][0]["interval"]) == (1, None)
    identification = measure_identification(np.eye(6, dtype=np.float32)[people], people)
    assert (identification["rank1"], identification["rank1_interval"]) == (1, None)
    folds = fold_accuracy(np.array([0.9, 0.1] * 4), np.array([True, False] * 4), np.arange(8) // 2)
    assert (folds["accuracy"], folds["accuracy_interval"]) == (1, None)


def test_model_that_is_always_wrong_has_finite_rates():
    vectors = np.tile(
        np.eye(2, dtype=np.float32), (12, 1)
    )  # opposite images of a person, equal images of different people
    report = verify_all(vectors, np.repeat(np.arange(12), 2)).report()
    assert (report["eer"], report["eer_threshold"]) == (1.0, None)
    assert (report["tar"][0]["tar"], report["tar"][0]["threshold"]) == (0.0, None)
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(("people", "images", "message"), [(5, 1, "person with two images"), (1, 5, "two people")])
def test_data_without_genuine_or_impostor_pairs_is_rejected(people, images, message):
    with pytest.raises(UsageError, match=message):
        verify_all(*draw_people(people=people, images=images))


def test_fold_accuracy_equals_plain_loop():
    vectors, people = draw_people(people=10, images=5, spread=0.8)
    scores, truth = scores_of(vectors, people)
    folds = np.arange(len(scores)) % 10
    report = fold_accuracy(scores, truth, folds)
    expected = []
    for fold in range(10):
        outside, inside = folds != fold, folds == fold

        def accuracy(threshold, subset):
            accepted = scores[subset] >= threshold
            return (accepted[truth[subset]].mean() + (~accepted[~truth[subset]]).mean()) / 2

        best_threshold = max(
            np.unique(scores[outside]), key=lambda threshold: (accuracy(threshold, outside), threshold)
        )
        next_score = scores[outside][scores[outside] < best_threshold].max()
        expected.append(accuracy((float(best_threshold) + float(next_score)) / 2, inside))
    assert report["accuracy_folds"] == pytest.approx(expected)
    assert report["accuracy"] == pytest.approx(np.mean(expected))
    low, high = report["accuracy_interval"]
    assert low < report["accuracy"] < high


def test_people_cross_validation_has_ten_folds_or_fewer():
    vectors, people = draw_people(people=23, images=3, spread=3)
    report = cross_validate_people(vectors, people)
    assert len(report["accuracy_folds"]) == 10
    assert report["accuracy"] > 0.95
    assert len(cross_validate_people(vectors[people < 7], people[people < 7])["accuracy_folds"]) == 3


def test_identification_equals_plain_loop():
    vectors, labels = draw_people(people=40, images=10, spread=1.0)
    report = measure_identification(vectors, labels, seed=1)
    gallery, probes = {}, []
    for person in range(40):
        images = np.flatnonzero(labels == person)
        mean = vectors[images[:5]].sum(axis=0)
        gallery[person] = mean / np.linalg.norm(mean)
        probes += images[5:].tolist()

    def best_match(vector, people):
        return max((float(vector @ gallery[person]), person) for person in people)

    is_right = [best_match(vectors[probe], range(40))[1] == labels[probe] for probe in probes]
    assert (report["rank1"], report["probes"]) == (pytest.approx(np.mean(is_right)), 200)
    low, high = report["rank1_interval"]
    assert low < report["rank1"] < high

    order = rng.permutation(40, 1, stream="unknown people")
    rates = []
    for half in (0, 1):
        enrolled = [person for person in range(40) if order[person] % 2 == half]
        unknown_scores = sorted(
            (best_match(vectors[probe], enrolled)[0] for probe in np.flatnonzero(~np.isin(labels, enrolled))),
            reverse=True,
        )
        threshold = unknown_scores[math.floor(0.1 * len(unknown_scores))]
        matches = [
            (best_match(vectors[probe], enrolled), labels[probe]) for probe in probes if labels[probe] in enrolled
        ]
        rates.append(np.mean([score > threshold and match == person for (score, match), person in matches]))
    assert report["dir"][0]["dir"] == pytest.approx(np.mean(rates), abs=1e-9)
    assert report["unknown"] == 200
    assert [row["dir"] is None for row in report["dir"]] == [False, True, True]


def test_group_rates_use_thresholds_of_all_people():
    vectors, people = draw_people(people=30, images=6)
    vectors[people < 10] = draw_people(people=10, images=6, spread=0.4, seed=7)[0]
    verification = verify_all(vectors, people)
    group_of = ["hard"] * 10 + ["easy"] * 15 + ["alone"] + [None] * 4
    rows = {
        row["group"]: row for row in verify_groups(lambda: score_all_pairs(vectors), people, group_of, verification)
    }
    assert list(rows) == ["alone", "easy", "hard"]
    assert (rows["alone"]["eer"], rows["alone"]["people"], rows["alone"]["at"]) == (None, 1, [])
    assert rows["hard"]["eer"] > 3 * rows["easy"]["eer"]
    threshold = verification.curve.at_far(0.1).threshold
    for name, members in (("hard", people < 10), ("easy", (people >= 10) & (people < 25))):
        scores, truth = scores_of(vectors[members], people[members])
        rates = rows[name]["at"][0]
        assert rates["threshold"] == threshold
        assert rates["group_far"] == pytest.approx((scores[~truth] >= threshold).mean(), abs=1e-3)
        assert rates["tar"] == pytest.approx((scores[truth] >= threshold).mean(), abs=1e-2)


def test_group_interval_equals_that_of_its_images_alone():
    vectors, people = draw_people(people=20, images=4)
    verification = verify_all(vectors, people)
    group_of = ["group" if person % 2 and person < 16 else None for person in range(20)]
    (row,) = verify_groups(lambda: score_all_pairs(vectors), people, group_of, verification)
    in_group = (people % 2 == 1) & (people < 16)
    thresholds = [verification.curve.at_far(far).threshold for far in FARS if verification.curve.supports(far)]
    group_verification = verify_all(vectors[in_group], people[in_group] // 2, extra_thresholds=thresholds)
    assert row["eer_interval"] == pytest.approx(group_verification.report()["eer_interval"], abs=1e-9)


def test_worst_pairs_have_the_most_extreme_scores():
    vectors, people = draw_people()
    scores, truth = scores_of(vectors, people)
    lowest_genuine, highest_impostor = verify_all(vectors, people).worst
    np.testing.assert_allclose(lowest_genuine.scores, np.sort(scores[truth])[:12], atol=1e-6)
    np.testing.assert_allclose(highest_impostor.scores, np.sort(scores[~truth])[::-1][:12], atol=1e-6)
    assert (people[lowest_genuine.first] == people[lowest_genuine.second]).all()
    assert (people[highest_impostor.first] != people[highest_impostor.second]).all()


def test_principal_components_of_orl_faces_have_published_error_rates(shared):
    """Whitened PCA-60 of people 1 to 20, all pairs of people 21 to 40: about EER 16.2 % and TAR 47.4 % at FAR 1e-2."""
    folder = shared / "orl-faces"
    if not folder.is_dir():
        pytest.skip("needs the ORL faces in data/orl-faces")
    images = np.stack(
        [
            np.asarray(Image.open(folder / f"s{person}" / f"{number}.pgm"), np.float64).ravel()
            for person in range(1, 41)
            for number in range(1, 11)
        ]
    )
    images -= images.mean(axis=1, keepdims=True)
    mean = images[:200].mean(axis=0)
    values, vectors = np.linalg.eigh((images[:200] - mean) @ (images[:200] - mean).T)
    features = (images[200:] - mean) @ ((images[:200] - mean).T @ vectors[:, -60:]) / values[-60:]
    features = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)
    report = verify_all(features, np.repeat(np.arange(20), 10)).report()
    assert (report["genuine"], report["impostor"]) == (900, 19_000)
    assert report["eer"] == pytest.approx(0.162, abs=0.02)
    assert [row["tar"] for row in report["tar"]] == pytest.approx([0.748, 0.474, 0.304], abs=0.02)


# Lists of pairs


IMAGES = {
    "Ann": [f"lfw/Ann/Ann_{number:04d}.jpg" for number in (1, 2, 4)],
    "Bo Li": ["lfw/Bo Li/a.png", "lfw/Bo Li/b.png"],
    "Cy": ["lfw/Cy/Cy_0001.jpg"],
}


def test_read_pairs_accepts_lfw_format(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("2\t1\nAnn\t1\t4\nAnn\t2\tBo Li\t2\n\nBo Li\t1\t2\nCy\t1\tAnn\t1\n", encoding="utf-8")
    pairs = read_pairs(path, IMAGES)
    pair_files = [
        (pairs.files[first], pairs.files[second]) for first, second in zip(pairs.first, pairs.second, strict=True)
    ]
    assert pair_files == [
        ("lfw/Ann/Ann_0001.jpg", "lfw/Ann/Ann_0004.jpg"),
        ("lfw/Ann/Ann_0002.jpg", "lfw/Bo Li/b.png"),
        ("lfw/Bo Li/a.png", "lfw/Bo Li/b.png"),
        ("lfw/Cy/Cy_0001.jpg", "lfw/Ann/Ann_0001.jpg"),
    ]
    assert pairs.folds.tolist() == [0, 0, 1, 1]
    assert pairs.people == ("Ann", "Ann", "Ann", "Bo Li", "Bo Li", "Cy")
    path.write_text("1\nAnn 1 2\nAnn 1 Cy 1\n", encoding="utf-8")
    assert len(read_pairs(path, IMAGES).first) == 2
    # Images are sorted by number: 10 comes after 2.
    numbered = {"s1": [f"s1/{number}.pgm" for number in (1, 10, 2)], "s2": ["s2/1.pgm"]}
    path.write_text("1\ns1 2 10\ns1 1 s2 1\n", encoding="utf-8")
    assert read_pairs(path, numbered).files == ("s1/2.pgm", "s1/10.pgm", "s1/1.pgm", "s2/1.pgm")
    with pytest.raises(
        UsageError, match=r"Line 2 .* must name one image, got 2 of 's1': 's1/2\.pgm' or 's1/s1_02\.jpg'"
    ):
        read_pairs(path, numbered | {"s1": ["s1/2.pgm", "s1/s1_02.jpg"]})


def test_read_pairs_accepts_names_in_both_unicode_forms(tmp_path):
    path = tmp_path / "pairs.txt"
    files = {
        name: [unicodedata.normalize("NFD", f"{name}_000{number}.jpg") for number in (1, 2)]
        for name in ("김한", "이봄")
    }
    for form in ("NFC", "NFD"):
        path.write_text(unicodedata.normalize(form, "1\n김한 1 2\n김한 1 이봄 2\n"), encoding="utf-8")
        pairs = read_pairs(path, files)
        assert (pairs.files, pairs.people) == ((*files["김한"], files["이봄"][1]), ("김한", "김한", "이봄"))


@pytest.mark.parametrize(
    ("text", "error_class", "message"),
    [
        ("", CorruptFileError, "got none"),
        ("10 300\n", CorruptFileError, "got none"),
        ("many\nAnn 1 2\n", CorruptFileError, "must begin with the numbers of folds and of pairs, got 'many'"),
        ("1 1\nAnn 1 2\n", CorruptFileError, "must have 2 x 1 x 1 pairs, as its first line says, got 1"),
        (
            "1 1\nAnn 1 2\nAnn 1\n",
            CorruptFileError,
            "Line 3 of .* must be NAME I J .* or NAME I OTHER J .*, got 'Ann 1'",
        ),
        ("1 1\nAnn 1 1\nAnn 1 Cy 1\n", CorruptFileError, r"must be NAME I J \(two images of a person\).*got 'Ann 1 1'"),
        ("1 1\nAnn 1 2\nAnn 1 Ann 2\n", CorruptFileError, r"\(images of two people\), got 'Ann 1 Ann 2'"),
        ("1 1\nAnn 1 2\nAnn 0 Cy 1\n", CorruptFileError, "got 'Ann 0 Cy 1'"),
        ("1 1\nAnn 1 3\nAnn 1 Cy 1\n", UsageError, r"must name an image that 'Ann' has \(3 files\), got 3"),
        ("1 1\nAnn 1 2\nAnne 1 Cy 1\n", UsageError, "got 'Anne'. Did you mean 'Ann'?"),
    ],
)
def test_wrong_pair_list_gives_one_line_error(tmp_path, text, error_class, message):
    path = tmp_path / "pairs.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error_class, match=message) as error:
        read_pairs(path, IMAGES)
    assert "\n" not in str(error.value)


def test_missing_or_binary_pair_list_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="Pairs must be a file that exists"):
        read_pairs(tmp_path / "none.txt", IMAGES)
    (tmp_path / "pairs.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorruptFileError, match="not text in UTF-8"):
        read_pairs(tmp_path / "pairs.txt", IMAGES)


# Thresholds


@pytest.mark.parametrize(("errors", "trials"), [(0, 10), (10, 10), (1, 9108), (13, 138), (910, 9108), (250, 10**6)])
def test_clopper_pearson_equals_beta_quantiles(errors, trials):
    low = 0 if errors == 0 else beta.ppf(0.025, errors, trials - errors + 1)
    high = 1 if errors == trials else beta.ppf(0.975, errors + 1, trials - errors)
    assert clopper_pearson(errors, trials) == pytest.approx((low, high), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("far", [0.003, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("digits", [6, 1])
def test_threshold_accepts_at_most_far_and_next_lower_exceeds_it(far, digits):
    scores = np.random.default_rng(1).normal(size=5000).astype(np.float32).round(digits)
    threshold, errors = threshold_at(far, np.array_split(scores, 13), len(scores))
    assert (scores.astype(np.float64) >= threshold).sum() == errors <= far * 5000
    lower = scores[scores < threshold].max()  # the next threshold below would accept too many
    assert (scores >= lower).sum() > far * 5000
    assert threshold > lower


def test_rate_of_almost_one_rejects_the_lowest_score():
    assert threshold_at(0.9999999999999, [np.arange(10) / 10], 10) == (pytest.approx(0.05), 9)


def test_equal_highest_scores_are_all_rejected():
    threshold, errors = threshold_at(0.1, [np.ones(100, np.float32)], 100)
    assert (threshold > 1, errors) == (True, 0)


def test_rate_too_small_to_measure_is_rejected_with_smallest_measurable_rate():
    check_rate(0.01, 1000, "verify", "pairs")
    with pytest.raises(UsageError, match=r"--far must be at least 0.011 for verify with 999 pairs .*got 0.01"):
        check_rate(0.01, 999, "verify", "pairs")
    check_rate(0.011, 999, "verify", "pairs")
    with pytest.raises(UsageError, match="no rate can be measured"):
        check_rate(0.5, 9, "verify", "pairs")
    for rate in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(VitrailError, match="--far must be above 0 and below 1"):
            check_rate(rate, 1000, "verify", "pairs")
    assert least_rate(0) == math.inf
