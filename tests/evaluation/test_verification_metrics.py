"""Verification and identification: equal to scikit-learn and to plain loops, in bounded memory, with intervals."""

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


def made_up(people=30, images=6, width=16, spread=1.2, seed=0):
    """Unit vectors around a centre for each person, and who is who."""
    random = np.random.default_rng(seed)
    who = np.repeat(np.arange(people), images)
    vectors = random.normal(size=(len(who), width)) + spread * random.normal(size=(people, width))[who]
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), who


def judge(vectors, who, **settings):
    return verify_pairs(lambda: score_all_pairs(vectors), who, **settings)


def scores_of(vectors, who):
    """Scores and truth of all pairs, the plain way."""
    one, other = np.triu_indices(len(who), 1)
    return (vectors @ vectors.T)[one, other], who[one] == who[other]


@pytest.mark.parametrize("digits", [7, 1])
@pytest.mark.parametrize("seed", [0, 1])
def test_roc_curve_equals_scikit_learn(digits, seed):
    """Also where many scores are equal."""
    vectors, who = made_up(seed=seed)
    scores, truth = scores_of(vectors, who)
    scores = scores.round(digits).astype(np.float32)
    one, other = np.triu_indices(len(who), 1)
    blocks = [
        verification_metrics.PairBlock(one[part], other[part], scores[part])
        for part in np.array_split(np.arange(len(one)), 7)
    ]
    curve = verify_pairs(lambda: blocks, who).curve
    fpr, tpr, thresholds = roc_curve(truth, scores, drop_intermediate=False)
    assert (curve.genuine, curve.impostor) == (int(truth.sum()), int((~truth).sum()))
    at = np.searchsorted(-thresholds, -curve.thresholds.astype(np.float64))
    assert len(at) == len(np.unique(scores[truth])) + 1
    np.testing.assert_array_equal(thresholds[at], curve.thresholds)
    np.testing.assert_array_equal(tpr[at], curve.tar)
    np.testing.assert_array_equal(fpr[at], curve.far)
    for far in (*FARS, 0.0, 0.25, 1.0):
        assert curve.at_far(far).tar == tpr[fpr <= far].max()
    assert curve.at_equal_errors()[0] == np.maximum(fpr, 1 - tpr).min()


def test_eer_is_where_both_error_rates_cross():
    vectors, who = made_up()
    scores, truth = scores_of(vectors, who)
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    crossing = np.argmax(fpr >= 1 - tpr)
    straight = np.interp(0, (fpr + tpr - 1)[crossing - 1 : crossing + 1], fpr[crossing - 1 : crossing + 1])
    assert judge(vectors, who).curve.at_equal_errors()[0] == pytest.approx(straight, abs=1e-12)


def test_blocks_of_pairs_have_bounded_size_and_same_result(monkeypatch):
    vectors, who = made_up()
    whole = judge(vectors, who)
    monkeypatch.setattr(verification_metrics, "BLOCK_PAIRS", 1000)
    assert max(len(block.scores) for block in score_all_pairs(vectors)) <= 1000
    one, other = (
        np.concatenate([getattr(block, side) for block in score_all_pairs(vectors)]) for side in ("first", "second")
    )
    np.testing.assert_array_equal(np.stack([one, other]), np.triu_indices(len(who), 1))
    parts = judge(vectors, who)
    np.testing.assert_allclose(parts.curve.far, whole.curve.far, atol=2 / whole.curve.impostor)
    assert parts.report()["eer"] == pytest.approx(whole.report()["eer"], abs=1e-3)
    listed = verify_pairs(lambda: score_listed_pairs(vectors, one, other), who)
    assert listed.report()["eer"] == pytest.approx(whole.report()["eer"], abs=1e-3)


@pytest.mark.parametrize("units", [128, 7])
def test_bootstrap_of_people_equals_plain_loop(monkeypatch, units):
    monkeypatch.setattr(verification_metrics, "_UNITS", units)
    vectors, who = made_up(people=12, images=4)
    found = judge(vectors, who, seed=5)
    units = min(units, 12)
    unit_of = rng.permutation(12, 5, stream="units of people") % units
    drawn = rng.integers(units, 5, np.arange(DRAWS)[:, None], np.arange(units), stream="bootstrap of people")
    scores, truth = scores_of(vectors, who)
    one, other = np.triu_indices(len(who), 1)
    weights = np.stack([np.bincount(row, minlength=units) for row in drawn])[:, unit_of]
    assert (weights.sum(axis=1) == 12).all() or units < 12
    kept = 0
    for weight in weights[:20]:
        own = weight[who[one]]
        false, true = (own * weight[who[other]])[~truth], own[truth]
        if not true.sum() or not false.sum():
            continue
        for at in (0, 40, len(found.draws.thresholds) - 1):
            threshold = found.draws.thresholds[at]
            tar, far = (
                (some * (scores[kind] >= threshold)).sum() / some.sum()
                for some, kind in ((true, truth), (false, ~truth))
            )
            assert found.draws.tar[kept, at] == pytest.approx(tar, abs=1e-6)
            assert found.draws.far[kept, at] == pytest.approx(far, abs=1e-6)
        kept += 1
    assert found.units == units


def test_bootstrap_of_few_people_with_many_images_has_bounded_size():
    vectors, who = made_up(people=4, images=80)
    found = judge(vectors, who)
    assert len(found.curve.thresholds) > 10_000
    assert found.draws.tar.size <= verification_metrics._TABLE
    low, high = found.report()["eer_interval"]
    assert low <= found.report()["eer"] <= high


def test_verification_without_intervals_does_not_resample(monkeypatch):
    vectors, who = made_up()
    whole = judge(vectors, who).report()
    monkeypatch.setattr(verification_metrics, "draw_weights", None)
    found = judge(vectors, who, intervals=False)
    assert (found.draws, found.units) == (None, 0)
    tar = [row | {"interval": None} for row in whole["tar"]]
    assert found.report() == whole | {"eer_interval": None, "tar": tar, "resampled": 0}


def test_results_depend_only_on_the_seed():
    vectors, who = made_up()
    assert judge(vectors, who, seed=3).report() == judge(vectors, who, seed=3).report()
    one, other = (judge(vectors, who, seed=seed).report() for seed in (3, 4))
    assert one["eer"] == other["eer"]
    assert one["eer_interval"] != other["eer_interval"]
    assert measure_identification(vectors, who, seed=3) == measure_identification(vectors, who, seed=3)
    assert (
        cross_validate_people(vectors, who, seed=3)
        == cross_validate_people(vectors, who, seed=3)
        != cross_validate_people(vectors, who, seed=4)
    )


def test_eer_intervals_contain_the_true_eer():
    """The EER of very many people, in the intervals of samples of 20 of them."""
    vectors, who = made_up(people=400, images=4, seed=9)
    truth = judge(vectors, who).report()["eer"]
    hits = 0
    for number in range(24):
        chosen = np.isin(who, rng.permutation(400, number, stream="sample")[:20])
        low, high = judge(vectors[chosen], np.unique(who[chosen], return_inverse=True)[1]).report()["eer_interval"]
        hits += low <= truth <= high
    assert hits >= 20  # 23 expected; 20 people are few


def test_rates_that_the_data_cannot_support_are_none():
    vectors, who = made_up(people=8, images=4)
    report = judge(vectors, who).report()
    assert report["impostor"] == 448
    assert [row["tar"] is None for row in report["tar"]] == [False, True, True]
    assert [row["dir"] for row in measure_identification(vectors, who)["dir"]] == [None] * 3
    assert cross_validate_people(vectors[who < 3], who[who < 3]) is None


def test_two_people_have_rates_without_intervals():
    vectors, who = made_up(people=2, images=20)
    found = judge(vectors, who)
    report = found.report()
    assert 0 < report["eer"] < 1
    assert (report["eer_interval"], report["resampled"]) == (None, 0)
    assert (report["tar"][0]["tar"] > 0, report["tar"][0]["interval"]) == (True, None)
    assert measure_identification(vectors, who)["rank1_interval"] is None
    judged = judge_pairs(found, 2, "test")
    assert judged.sentence == f"test equal error rate {report['eer']:.1%} (2 people, 780 pairs)"
    assert "interval" not in summary(judged)[0][0]
    (row,) = verify_groups(lambda: score_all_pairs(vectors), who, ["pair", "pair"], found)
    assert (row["eer"], row["eer_interval"]) == (report["eer"], None)
    assert judge(*made_up(people=3, images=20)).report()["resampled"] == 3


def test_perfect_scores_have_no_interval():
    """Every draw of people has none either: that is no reason to be sure."""
    who = np.repeat(np.arange(6), 8)
    report = judge(np.eye(6, dtype=np.float32)[who], who).report()
    assert (report["eer"], report["eer_interval"], report["resampled"]) == (0, None, 6)
    assert (report["tar"][0]["tar"], report["tar"][0]["interval"]) == (1, None)
    found = measure_identification(np.eye(6, dtype=np.float32)[who], who)
    assert (found["rank1"], found["rank1_interval"]) == (1, None)
    folds = fold_accuracy(np.array([0.9, 0.1] * 4), np.array([True, False] * 4), np.arange(8) // 2)
    assert (folds["accuracy"], folds["accuracy_interval"]) == (1, None)


def test_model_that_is_always_wrong_has_finite_rates():
    vectors = np.tile(
        np.eye(2, dtype=np.float32), (12, 1)
    )  # a person has two opposite images, strangers have equal ones
    report = judge(vectors, np.repeat(np.arange(12), 2)).report()
    assert (report["eer"], report["eer_threshold"]) == (1.0, None)
    assert (report["tar"][0]["tar"], report["tar"][0]["threshold"]) == (0.0, None)
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(("people", "images", "message"), [(5, 1, "person with two images"), (1, 5, "two people")])
def test_data_without_genuine_or_impostor_pairs_is_rejected(people, images, message):
    with pytest.raises(UsageError, match=message):
        judge(*made_up(people=people, images=images))


def test_fold_accuracy_equals_plain_loop():
    vectors, who = made_up(people=10, images=5, spread=0.8)
    scores, truth = scores_of(vectors, who)
    folds = np.arange(len(scores)) % 10
    found = fold_accuracy(scores, truth, folds)
    expected = []
    for fold in range(10):
        others, inside = folds != fold, folds == fold

        def accuracy(threshold, some):
            accepted = scores[some] >= threshold
            return (accepted[truth[some]].mean() + (~accepted[~truth[some]]).mean()) / 2

        best = max(np.unique(scores[others]), key=lambda threshold: (accuracy(threshold, others), threshold))
        below = scores[others][scores[others] < best].max()
        expected.append(accuracy((float(best) + float(below)) / 2, inside))
    assert found["accuracy_folds"] == pytest.approx(expected)
    assert found["accuracy"] == pytest.approx(np.mean(expected))
    low, high = found["accuracy_interval"]
    assert low < found["accuracy"] < high


def test_people_cross_validation_has_ten_folds_or_fewer():
    vectors, who = made_up(people=23, images=3, spread=3)
    found = cross_validate_people(vectors, who)
    assert len(found["accuracy_folds"]) == 10
    assert found["accuracy"] > 0.95
    assert len(cross_validate_people(vectors[who < 7], who[who < 7])["accuracy_folds"]) == 3


def test_identification_equals_plain_loop():
    vectors, who = made_up(people=40, images=10, spread=1.0)
    found = measure_identification(vectors, who, seed=1)
    gallery, probes = {}, []
    for person in range(40):
        own = np.flatnonzero(who == person)
        mean = vectors[own[:5]].sum(axis=0)
        gallery[person] = mean / np.linalg.norm(mean)
        probes += own[5:].tolist()

    def best(vector, people):
        return max((float(vector @ gallery[person]), person) for person in people)

    right = [best(vectors[probe], range(40))[1] == who[probe] for probe in probes]
    assert (found["rank1"], found["probes"]) == (pytest.approx(np.mean(right)), 200)
    low, high = found["rank1_interval"]
    assert low < found["rank1"] < high

    place = rng.permutation(40, 1, stream="unknown people")
    rates = []
    for half in (0, 1):
        known = [person for person in range(40) if place[person] % 2 == half]
        strangers = sorted((best(vectors[at], known)[0] for at in np.flatnonzero(~np.isin(who, known))), reverse=True)
        limit = strangers[math.floor(0.1 * len(strangers))]
        answers = [(best(vectors[probe], known), who[probe]) for probe in probes if who[probe] in known]
        rates.append(np.mean([score > limit and named == person for (score, named), person in answers]))
    assert found["dir"][0]["dir"] == pytest.approx(np.mean(rates), abs=1e-9)
    assert found["unknown"] == 200
    assert [row["dir"] is None for row in found["dir"]] == [False, True, True]


def test_group_rates_use_thresholds_of_all_people():
    vectors, who = made_up(people=30, images=6)
    vectors[who < 10] = made_up(people=10, images=6, spread=0.4, seed=7)[0]
    found = judge(vectors, who)
    named = ["hard"] * 10 + ["easy"] * 15 + ["alone"] + [None] * 4
    rows = {row["group"]: row for row in verify_groups(lambda: score_all_pairs(vectors), who, named, found)}
    assert list(rows) == ["alone", "easy", "hard"]
    assert (rows["alone"]["eer"], rows["alone"]["people"], rows["alone"]["at"]) == (None, 1, [])
    assert rows["hard"]["eer"] > 3 * rows["easy"]["eer"]
    threshold = found.curve.at_far(0.1).threshold
    for name, members in (("hard", who < 10), ("easy", (who >= 10) & (who < 25))):
        scores, truth = scores_of(vectors[members], who[members])
        first = rows[name]["at"][0]
        assert first["threshold"] == threshold
        assert first["group_far"] == pytest.approx((scores[~truth] >= threshold).mean(), abs=1e-3)
        assert first["tar"] == pytest.approx((scores[truth] >= threshold).mean(), abs=1e-2)


def test_group_interval_equals_that_of_its_images_alone():
    vectors, who = made_up(people=20, images=4)
    found = judge(vectors, who)
    group_of = ["some" if person % 2 and person < 16 else None for person in range(20)]
    (row,) = verify_groups(lambda: score_all_pairs(vectors), who, group_of, found)
    chosen = (who % 2 == 1) & (who < 16)
    thresholds = [found.curve.at_far(far).threshold for far in FARS if found.curve.supports(far)]
    alone = judge(vectors[chosen], who[chosen] // 2, also=thresholds)
    assert row["eer_interval"] == pytest.approx(alone.report()["eer_interval"], abs=1e-9)


def test_worst_pairs_have_the_most_extreme_scores():
    vectors, who = made_up()
    scores, truth = scores_of(vectors, who)
    low, high = judge(vectors, who).worst
    np.testing.assert_allclose(low.scores, np.sort(scores[truth])[:12], atol=1e-6)
    np.testing.assert_allclose(high.scores, np.sort(scores[~truth])[::-1][:12], atol=1e-6)
    assert (who[low.first] == who[low.second]).all()
    assert (who[high.first] != who[high.second]).all()


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
    report = judge(features, np.repeat(np.arange(20), 10)).report()
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
    found = read_pairs(path, IMAGES)
    named = [(found.files[one], found.files[other]) for one, other in zip(found.first, found.second, strict=True)]
    assert named == [
        ("lfw/Ann/Ann_0001.jpg", "lfw/Ann/Ann_0004.jpg"),
        ("lfw/Ann/Ann_0002.jpg", "lfw/Bo Li/b.png"),
        ("lfw/Bo Li/a.png", "lfw/Bo Li/b.png"),
        ("lfw/Cy/Cy_0001.jpg", "lfw/Ann/Ann_0001.jpg"),
    ]
    assert found.folds.tolist() == [0, 0, 1, 1]
    assert found.people == ("Ann", "Ann", "Ann", "Bo Li", "Bo Li", "Cy")
    path.write_text("1\nAnn 1 2\nAnn 1 Cy 1\n", encoding="utf-8")
    assert len(read_pairs(path, IMAGES).first) == 2
    # Numbers are numbers, though 10 is before 2 in the order of names.
    numbered = {"s1": [f"s1/{number}.pgm" for number in (1, 10, 2)], "s2": ["s2/1.pgm"]}
    path.write_text("1\ns1 2 10\ns1 1 s2 1\n", encoding="utf-8")
    assert read_pairs(path, numbered).files == ("s1/2.pgm", "s1/10.pgm", "s1/1.pgm", "s2/1.pgm")
    with pytest.raises(
        UsageError, match=r"Line 2 .* must name one image, got 2 of 's1': 's1/2\.pgm' or 's1/s1_02\.jpg'"
    ):
        read_pairs(path, numbered | {"s1": ["s1/2.pgm", "s1/s1_02.jpg"]})


def test_read_pairs_accepts_names_in_both_unicode_forms(tmp_path):
    path = tmp_path / "pairs.txt"
    files = {name: [unicodedata.normalize("NFD", f"{name}_000{n}.jpg") for n in (1, 2)] for name in ("김한", "이봄")}
    for form in ("NFC", "NFD"):
        path.write_text(unicodedata.normalize(form, "1\n김한 1 2\n김한 1 이봄 2\n"), encoding="utf-8")
        found = read_pairs(path, files)
        assert (found.files, found.people) == ((*files["김한"], files["이봄"][1]), ("김한", "김한", "이봄"))


@pytest.mark.parametrize(
    ("text", "kind", "message"),
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
def test_wrong_pair_list_gives_one_line_error(tmp_path, text, kind, message):
    path = tmp_path / "pairs.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(kind, match=message) as caught:
        read_pairs(path, IMAGES)
    assert "\n" not in str(caught.value)


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
    for wrong in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(VitrailError, match="--far must be above 0 and below 1"):
            check_rate(wrong, 1000, "verify", "pairs")
    assert least_rate(0) == math.inf
