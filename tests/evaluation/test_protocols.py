"""Protocols on frozen features: results equal to scikit-learn, leave-one-out by refitting, and cached features."""

import dataclasses
import json
import shutil
import time

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

import vitrail
from tests.test_cli import FIXTURE
from vitrail.cli import main
from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import user_folder
from vitrail.core.least_squares import Ridge
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.feature_classifiers import (
    LOGISTIC_PENALTIES,
    fit_logistic_regression,
    fit_probe,
    fit_ridge,
    neighbour_votes,
    sample_shots,
)
from vitrail.evaluation.features import FeatureStore, extract_features
from vitrail.evaluation.metrics import mean_interval
from vitrail.evaluation.protocols import choose_train_and_test, evaluate, fewshot, knn, probe, read_examples
from vitrail.lab.exact import redraw
from vitrail.models.activations import look

FAMILIES = ["ViT-Nano/7", "Hybrid-Nano", "ResNet-Nano", "Mixer-Nano/7", "LSTM-Nano/7", "iGPT-Micro", "MLP-Nano"]
SIZES = [(40, 12), (15, 60), (30, 30), (31, 30)]


def clouds(count, width, classes, seed=0):
    """Return random features around a centre for each class, on different scales and not centred, and their labels."""
    class_rng, rng = np.random.default_rng(0), np.random.default_rng(seed + 1)
    labels = np.arange(count) % classes
    centres, scales = class_rng.normal(size=(classes, width)), 10.0 ** class_rng.uniform(-2, 2, width)
    return (centres[labels] + rng.normal(size=(count, width))) * scales + 3, labels


def signs(labels, classes):
    return np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)


@pytest.mark.parametrize(("count", "width"), SIZES)
@pytest.mark.parametrize("penalty", [1e-3, 1.0, 1e4])
def test_ridge_equals_scikit_learn(count, width, penalty):
    from sklearn.linear_model import Ridge as Peer

    features, labels = clouds(count, width, 3)
    classifier, _ = fit_ridge(features, labels, classes=3, penalty=penalty)
    peer = Peer(alpha=penalty, solver="svd").fit(features, signs(labels, 3))
    np.testing.assert_allclose(classifier.weight, peer.coef_.T, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(classifier.bias, peer.intercept_, rtol=1e-5, atol=1e-8)
    queries, _ = clouds(50, width, 3, seed=1)
    np.testing.assert_allclose(classifier(queries), peer.predict(queries), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("count", "width"), SIZES)
@pytest.mark.parametrize("penalty", [1e-4, 1e-2, 10.0])
def test_leave_one_out_errors_equal_refitting_without_each_image(count, width, penalty):
    from sklearn.linear_model import Ridge as Peer

    features, labels = clouds(count, width, 3)
    targets = signs(labels, 3)
    for index, error in enumerate(Ridge(features, targets).leave_one_out_errors(penalty)):
        is_other = np.arange(count) != index
        refitted = Peer(alpha=penalty, solver="svd").fit(features[is_other], targets[is_other])
        np.testing.assert_allclose(error, targets[index] - refitted.predict(features[[index]])[0], rtol=1e-5, atol=1e-6)


def test_ridge_penalty_equals_scikit_learn_leave_one_out():
    from sklearn.linear_model import RidgeCV

    penalties = 10.0 ** np.linspace(-4, 6, 21)
    peer_penalties = set()
    for seed, (count, width) in enumerate(SIZES):
        features, labels = clouds(count, width, 3, seed)
        system = Ridge(features, signs(labels, 3))
        peer = RidgeCV(penalties).fit(features, signs(labels, 3))
        assert system.choose_penalty(penalties) == pytest.approx(peer.alpha_)
        peer_penalties.add(peer.alpha_)
        # The default grid scales with the features: other units give another penalty and the same scores.
        classifier, penalty = fit_ridge(features, labels, classes=3)
        scaled, scaled_penalty = fit_ridge(100 * features, labels, classes=3)
        assert scaled_penalty == pytest.approx(1e4 * penalty)
        np.testing.assert_allclose(scaled(100 * features), classifier(features), rtol=1e-6, atol=1e-8)
    assert len(peer_penalties) > 1


def test_constant_features_give_finite_equal_scores():
    features, labels = np.ones((12, 5)), np.arange(12) % 3
    for classifier, _ in (fit_ridge(features, labels, classes=3), fit_probe(features, labels, classes=3)):
        scores = classifier(features)
        assert np.isfinite(scores).all()
        np.testing.assert_allclose(scores, scores[:1].repeat(12, axis=0))
    assert np.isfinite(neighbour_votes(0 * features, labels, features, classes=3, neighbours=3)).all()


@pytest.mark.parametrize(("count", "width"), SIZES)
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("penalty", [0.1, 10.0])
def test_logistic_regression_equals_scikit_learn(count, width, classes, penalty):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    features, labels = clouds(count, width, classes)
    scaler = StandardScaler().fit(features)
    # scikit-learn has one vector for two classes, whose square is half of that of two vectors of opposite sign.
    factor = 2 if classes == 2 else 1
    peer = LogisticRegression(C=factor / penalty, solver="newton-cholesky", tol=1e-10)
    peer.fit(scaler.transform(features), labels)
    classifier = fit_logistic_regression(
        scaler.transform(features), labels, classes=classes, penalty=penalty, slope=1e-9
    )
    difference = classifier.weight[:, 1:] - classifier.weight[:, :1] if classes == 2 else classifier.weight
    np.testing.assert_allclose(difference, peer.coef_.T, atol=1e-5)
    # The probe folds the standardisation into its weights.
    queries, _ = clouds(50, width, classes, seed=1)
    probabilities = fit_probe(features, labels, classes=classes, penalty=penalty)[0].probabilities(queries)
    np.testing.assert_allclose(probabilities, peer.predict_proba(scaler.transform(queries)), atol=1e-4)


def test_probe_penalty_grows_with_noise():
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 4
    clear_features = 3 * np.eye(4)[labels].repeat(5, axis=1) + rng.normal(size=(200, 20))
    penalties = [fit_probe(features, labels, classes=4)[1] for features in (clear_features, rng.normal(size=(200, 20)))]
    assert penalties[0] < penalties[1] == LOGISTIC_PENALTIES[0]
    with pytest.raises(UsageError, match="Penalty must be given if every class has only one image"):
        fit_probe(clear_features[:4], labels[:4], classes=4)


@pytest.mark.parametrize("neighbours", [1, 4, 9])
def test_neighbour_votes_equal_scikit_learn(neighbours):
    from sklearn.neighbors import KNeighborsClassifier

    features, labels = clouds(600, 7, 5)
    queries, _ = clouds(300, 7, 5, seed=1)
    peer = KNeighborsClassifier(neighbours, metric="cosine").fit(features, labels)
    shares = neighbour_votes(features, labels, queries, classes=5, neighbours=neighbours, temperature=0)
    np.testing.assert_allclose(shares, peer.predict_proba(queries), atol=1e-12)
    np.testing.assert_array_equal(shares.argmax(1), peer.predict(queries))
    weighted_peer = KNeighborsClassifier(
        neighbours, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
    )
    shares = neighbour_votes(features, labels, queries, classes=5, neighbours=neighbours)
    np.testing.assert_allclose(
        shares, weighted_peer.fit(features, labels).predict_proba(queries), rtol=1e-6, atol=1e-12
    )


def test_neighbour_votes_at_tiny_temperature_equal_nearest_neighbour():
    features, labels = clouds(50, 7, 5)
    nearest = neighbour_votes(features, labels, features, classes=5, neighbours=1, temperature=0)
    cold = neighbour_votes(features, labels, features, classes=5, neighbours=20, temperature=1e-12)
    np.testing.assert_allclose(cold, nearest, atol=1e-6)


def test_shots_depend_only_on_seed_and_are_nested():
    labels = np.repeat([0, 1, 2], [30, 4, 12])[np.random.default_rng(0).permutation(46)]
    few, more = sample_shots(labels, 5, seed=3), sample_shots(labels, 10, seed=3)
    assert np.bincount(labels[few]).tolist() == [5, 4, 5]
    assert np.bincount(labels[more]).tolist() == [10, 4, 10]
    assert set(few) <= set(more)
    np.testing.assert_array_equal(few, sample_shots(labels, 5, seed=3))
    assert set(few) != set(sample_shots(labels, 5, seed=4))


def test_mean_interval_equals_scipy():
    from scipy import stats

    for count in (2, 3, 5, 30):
        values = np.random.default_rng(count).normal(size=count)
        expected = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
        assert mean_interval(values) == pytest.approx(expected, rel=1e-4)
    assert mean_interval([0.5]) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_extracted_features_equal_pooled_layers_of_every_family(name):
    model = redraw(vitrail.create(name, classes=3), std=0.1)
    channel_means = (0.5,) * model.config.channels
    preprocess = vitrail.Preprocess(
        resolution=model.config.resolution, mean=channel_means, std=channel_means, crop_fraction=1.0
    )
    pixels = np.random.default_rng(0).integers(
        0, 256, (5, *model.config.resolution, len(channel_means)), dtype=np.uint8
    )
    split = Split("train", pixels, np.zeros(5, np.int64))
    activations = look(model, preprocess(pixels))
    features = extract_features(model, preprocess, split, batch=2)
    np.testing.assert_allclose(features, activations.steps["pooled"], atol=1e-4)
    assert features.std(axis=0).max() > 1e-3
    for layer in range(model.config.depth):
        output = activations.steps[f"blocks.{layer}"].numpy()
        match output.ndim:
            case 4:
                expected = output.mean(axis=(2, 3))
            case 3 if getattr(model.config, "pool", "") == "cls":
                expected = output[:, 0]
            case 3:
                expected = output.mean(axis=1)
            case _:
                expected = output
        np.testing.assert_allclose(extract_features(model, preprocess, split, layer=layer), expected, atol=1e-4)
    with pytest.raises(UsageError, match="Layer must be from 0"):
        extract_features(model, preprocess, split, layer=model.config.depth)


def test_features_exclude_registers_and_average_pixels():
    preprocess = vitrail.Preprocess(resolution=28, mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), dtype=np.uint8)
    split = Split("train", pixels, np.zeros(3, np.int64))
    model = redraw(vitrail.create("ViT-Nano/7", pool="gap", registers=3))
    output = look(model, preprocess(pixels), [1]).steps["blocks.1"]
    np.testing.assert_allclose(
        extract_features(model, preprocess, split, layer=1), output[:, 3:].mean(dim=1), atol=1e-5
    )
    model = redraw(vitrail.create("iGPT-Micro", output="pixels", causal=True, classes=16))
    preprocess = preprocess.replace(resolution=model.config.resolution)
    assert extract_features(model, preprocess, split).shape == (3, model.config.width)


def test_features_are_taken_before_the_representation_layer():
    model = redraw(vitrail.create("ViT-Nano/7", representation="tanh"))
    preprocess = vitrail.Preprocess(resolution=28, mean=(0.5,), std=(0.5,))
    split = Split("train", np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), dtype=np.uint8), np.arange(3))
    assert np.abs(extract_features(model, preprocess, split)).max() > 1


def test_look_without_attention_gives_same_steps():
    model = redraw(vitrail.create("ViT-Nano/7"))
    images = vitrail.Preprocess(resolution=28, mean=(0.5,), std=(0.5,))([np.zeros((28, 28), np.uint8)])
    activations = look(model, images, [2], attention=False)
    assert activations.attention == {}
    assert (activations.steps["blocks.2"] == look(model, images, [2]).steps["blocks.2"]).all()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A self-supervised bundle with random weights and no classes."""
    folder = tmp_path_factory.mktemp("bundle") / "pico"
    model = redraw(vitrail.create("ViT-Pico/2", classes=7))
    preprocess = vitrail.Preprocess(resolution=8, mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess, provenance={"objective": "masked"}), folder)
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Data with 30 training images and 10 test images of each digit."""
    folder = tmp_path_factory.mktemp("data")
    splits = open_data("digits").splits
    small_splits = {
        name: splits[name].select(sample_shots(splits[name].labels, count, 0))
        for name, count in (("train", 30), ("test", 10))
    }
    arrays = {f"{name}_images": split.images for name, split in small_splits.items()}
    np.savez(
        folder / "digits.npz", **arrays, **{f"{name}_labels": split.labels for name, split in small_splits.items()}
    )
    return str(folder / "digits.npz")


@pytest.fixture(scope="module")
def examples(bundle, digits, tmp_path_factory):
    return read_examples(bundle, digits, cache=tmp_path_factory.mktemp("cache"))


def test_feature_store_computes_features_once_per_key(bundle, digits, tmp_path, monkeypatch):
    split = open_data(digits).splits["test"]
    loaded = vitrail.load(bundle)
    first = FeatureStore(loaded, bundle, folder=tmp_path)
    features = first.of(split)
    assert (first.hits, len(list(tmp_path.iterdir()))) == (0, 1)
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.evaluation.features.extract_features", None)
        second = FeatureStore(loaded, bundle, folder=tmp_path)
        assert (second.of(split) == features).all()
        assert second.hits == 1
    # Features depend on the layer, the images, the preprocessing and the bundle.
    other_stores = [FeatureStore(loaded, bundle, folder=tmp_path, layer=layer) for layer in (0, -1, 3)]
    assert [(other_store.of(split) == features).all() for other_store in other_stores] == [False] * 3
    assert [other_store.hits for other_store in other_stores] == [0, 0, 1]  # -1 and 3 are the same layer
    changed_split = split.select(np.arange(len(split)))
    changed_split.images[5, 0, 0, 0] ^= 1
    preprocess = loaded.preprocess.replace(mean=(0.4,))
    shutil.copytree(bundle, tmp_path / "copy")
    vitrail.save(loaded, tmp_path / "copy", force=True)
    for store, images, hits in (
        (FeatureStore(loaded, bundle, folder=tmp_path), changed_split, 0),
        (FeatureStore(vitrail.Bundle(model=loaded.model, preprocess=preprocess), bundle, folder=tmp_path), split, 0),
        (FeatureStore(loaded, FIXTURE, folder=tmp_path), split, 0),
        (FeatureStore(loaded, tmp_path / "copy", folder=tmp_path), split, 1),
    ):
        store.of(images)
        assert store.hits == hits


def test_changed_file_of_same_size_is_computed_again(bundle, tmp_path):
    files = [tmp_path / name for name in ("a.png", "b.png")]
    for index, file in enumerate(files):
        Image.fromarray(np.full((8, 8), 100 + index, np.uint8)).save(file)
    split = Split("test", [str(file) for file in files], np.zeros(2, np.int64))
    loaded = vitrail.load(bundle)
    before = FeatureStore(loaded, bundle, folder=tmp_path / "cache").of(split)
    size = files[0].stat().st_size
    Image.fromarray(np.full((8, 8), 102, np.uint8)).save(files[0])
    assert files[0].stat().st_size == size
    store = FeatureStore(loaded, bundle, folder=tmp_path / "cache")
    after = store.of(split)
    assert store.hits == 0
    assert (after[0] != before[0]).any()
    assert (after[1] == before[1]).all()


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "key", "manifest", "swap"])
def test_corrupt_cached_features_are_computed_again(bundle, digits, tmp_path, damage):
    splits = open_data(digits).splits
    loaded = vitrail.load(bundle)
    features = FeatureStore(loaded, bundle, folder=tmp_path).of(splits["test"])
    (entry,) = tmp_path.iterdir()
    path = entry / "features.safetensors"
    content = path.read_bytes()
    match damage:
        case "flip":
            path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        case "cut":
            path.write_bytes(content[:-100])
        case "remove":
            path.unlink()
        case "key":
            (entry / "key.json").write_text((entry / "key.json").read_text().replace('"layer": null', '"layer": 0'))
        case "manifest":
            (entry / "manifest.json").write_text("{}")
        case "swap":  # an intact entry of another split
            FeatureStore(loaded, bundle, folder=tmp_path).of(splits["train"])
            (other,) = set(tmp_path.iterdir()) - {entry}
            shutil.rmtree(entry)
            other.rename(entry)
    store = FeatureStore(loaded, bundle, folder=tmp_path)
    assert (store.of(splits["test"]) == features).all()
    assert store.hits == 0
    assert len(store.notes) == 1
    assert store.notes[0].startswith("stored features cannot be used and are computed again: ")
    repaired = FeatureStore(loaded, bundle, folder=tmp_path)
    assert (repaired.of(splits["test"]) == features).all()
    assert (repaired.hits, repaired.notes) == (1, [])


def test_unwritable_cache_is_rejected_or_noted(bundle, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    loaded = vitrail.load(bundle)
    with pytest.raises(UsageError, match="Cache must be a folder that can be written"):
        FeatureStore(loaded, bundle, folder=tmp_path / "file" / "cache")
    # The default folder was not requested: if it cannot be written, features are computed with a note.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert user_folder() == tmp_path / "file" / "vitrail"
    store = FeatureStore(loaded, bundle)
    assert store.of(open_data("digits").splits["test"]).shape == (360, 48)
    assert store.notes[0].startswith("features are not cached: ")


def test_training_and_test_images_never_overlap(tmp_path):
    labels = np.arange(40) % 4
    pixels = np.zeros((40, 8, 8, 1), np.uint8)
    undivided = Dataset("data", ("a", "b", "c", "d"), {"all": Split("all", pixels, labels)})
    training, test = choose_train_and_test(undivided, None, seed=3)
    expected = undivided.for_training(holdout=0.1, seed=3)
    np.testing.assert_array_equal(test.labels, expected[1].labels)
    assert (len(training), len(test)) == (36, 4)
    splits = {name: Split(name, pixels, labels) for name in ("train", "val", "test")}
    divided = Dataset("data", ("a", "b", "c", "d"), splits)
    assert [part.name for part in choose_train_and_test(divided, None, 0)] == ["train", "test"]
    assert [part.name for part in choose_train_and_test(divided, "val", 0)] == ["train", "val"]
    for data, split, message in (
        (divided, "train", "Split must not be train"),
        (divided, "tset", "Split must be one of"),
        (undivided, "test", "Split must be val, a held-out share"),
        (Dataset("data", ("a", "b", "c", "d"), {"test": splits["test"]}), None, "must have a train split"),
        (Dataset("data", ("a", "b"), {"all": Split("all", pixels[:2], labels[:2])}), None, "at least 2 images"),
    ):
        with pytest.raises(UsageError, match=message):
            choose_train_and_test(data, split, 0)


def test_protocol_scores_equal_scikit_learn(examples):
    from sklearn.linear_model import LogisticRegression
    from sklearn.linear_model import Ridge as Peer
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.preprocessing import StandardScaler

    peer = KNeighborsClassifier(5, metric="cosine").fit(examples.features, examples.labels)
    scores = knn(examples, neighbours=5, temperature=0)
    assert scores["accuracy"] == pytest.approx(peer.score(examples.test_features, examples.test_labels))
    assert scores["ece"] is not None

    scores = probe(examples)
    scaler = StandardScaler().fit(examples.features.astype(np.float64))
    train_features, test_features = (
        scaler.transform(features.astype(np.float64)) for features in (examples.features, examples.test_features)
    )
    peer = LogisticRegression(C=1 / scores["penalty"], solver="newton-cholesky", tol=1e-10).fit(
        train_features, examples.labels
    )
    assert scores["accuracy"] == pytest.approx(peer.score(test_features, examples.test_labels))
    assert scores["accuracy"] > 0.7
    assert scores["ece"] < 0.2

    scores = fewshot(examples)
    peer = Peer(alpha=scores["penalty"]).fit(examples.features, signs(examples.labels, 10))
    assert scores["accuracy"] == pytest.approx(
        (peer.predict(examples.test_features).argmax(1) == examples.test_labels).mean()
    )
    assert scores["ece"] is None
    assert [row["shots"] for row in scores["shots"]] == [1, 5, 10, 25]
    means = [row["accuracy"] for row in scores["shots"]]
    assert means == sorted(means)
    assert means[-1] < scores["accuracy"]
    for row in scores["shots"]:
        assert row["accuracy"] == pytest.approx(np.mean(row["accuracies"]))
        assert row["accuracy_interval"][0] < row["accuracy"] < row["accuracy_interval"][1]
        assert (len(row["accuracies"]), row["train_count"]) == (5, 10 * row["shots"])
    sample = sample_shots(examples.labels, 5, seed=1)
    row_of_5_shots = scores["shots"][1]
    peer = Peer(alpha=row_of_5_shots["penalties"][1]).fit(examples.features[sample], signs(examples.labels[sample], 10))
    assert row_of_5_shots["accuracies"][1] == pytest.approx(
        (peer.predict(examples.test_features).argmax(1) == examples.test_labels).mean()
    )


def test_knn_uses_at_most_all_training_images(examples):
    few_examples = dataclasses.replace(examples, features=examples.features[:7], labels=examples.labels[:7])
    scores = knn(few_examples)
    assert (scores["neighbours"], knn(examples)["neighbours"]) == (7, 20)
    assert scores["accuracy"] == knn(few_examples, neighbours=7)["accuracy"]
    with pytest.raises(UsageError, match="Neighbours must be an integer from 1 to 7, got 8"):
        knn(few_examples, neighbours=8)


def test_fewshot_notes_classes_with_too_few_images(examples):
    indices = np.flatnonzero((examples.labels != 7) | (np.cumsum(examples.labels == 7) <= 3))
    indices = indices[sample_shots(examples.labels[indices], 20, seed=0)]
    fields = vars(examples) | {"features": examples.features[indices], "labels": examples.labels[indices]}
    scores = fewshot(type(examples)(**fields), seeds=1)
    assert [row["shots"] for row in scores["shots"]] == [1, 5, 10]
    assert [row["fewer"] for row in scores["shots"]] == [[], ["7"], ["7"]]
    assert [row["train_count"] for row in scores["shots"]] == [10, 48, 93]
    assert scores["shots"][0]["accuracy_interval"] is None
    assert scores["notes"] == [
        "5 shots: 1 of 10 classes have fewer images, all of which are used (7)",
        "10 shots: 1 of 10 classes have fewer images, all of which are used (7)",
        "25 shots are left out: no class has more than 20 training images",
    ]
    with pytest.raises(UsageError, match="Shots must be an integer from 1 to 20, got 25"):
        fewshot(type(examples)(**fields), shots=[25])


def test_evaluate_command_prints_json_scores(call, bundle, digits, tmp_path):
    result = call("evaluate", bundle, digits, "--protocol", "fewshot", "--shots", "2", "--cache", tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout)
    assert {"accuracy", "accuracy_interval", "top5", "ece", "count", "per_class", "confusion"} <= scores.keys()
    assert (scores["count"], scores["train_count"], scores["split"]) == (100, 300, "test")
    assert (scores["layer"], scores["features"], scores["cached"]) == (None, 48, False)
    assert [row["shots"] for row in scores["shots"]] == [2]
    assert scores["accuracy_interval"][0] < scores["accuracy"] < scores["accuracy_interval"][1]


def test_evaluate_prints_short_tables_and_notes(bundle, digits, tmp_path, capsys):
    command = ["evaluate", str(bundle), digits, "--cache", str(tmp_path), "--layer", "-1"]
    main([*command, "--protocol", "knn", "--neighbours", "5"])
    knn_output = capsys.readouterr().out
    assert "300 images, 48 features (layer 3, [CLS] token)" in knn_output
    main([*command, "--protocol", "fewshot", "--shots", "1", "--seeds", "2"])
    fewshot_output = capsys.readouterr().out
    assert "[CLS] token; cached)" in fewshot_output
    assert "95 % interval (2 draws)" in fewshot_output
    for entry in tmp_path.iterdir():
        (entry / "features.safetensors").write_bytes(b"")
    main([*command, "--protocol", "knn", "--neighbours", "5"])
    captured = capsys.readouterr()
    assert captured.out == knn_output
    assert captured.err.count("note: stored features cannot be used and are computed again: ") == 2


def test_wrong_use_of_protocols_gives_one_line_error(bundle, digits, tmp_path, capsys):
    np.savez(tmp_path / "singles.npz", images=np.zeros((3, 8, 8), np.uint8), labels=np.arange(3))
    for arguments, message in (
        ([digits, "--protocol", "knn", "--layer", "4"], "Layer must be from 0 to 3"),
        ([digits, "--protocol", "knn", "--neighbours", "301"], "Neighbours must be an integer from 1 to 300"),
        ([digits, "--protocol", "knn", "--temperature", "-1"], "Temperature must be a number of at least 0"),
        ([digits, "--protocol", "fewshot", "--shots", "31"], "Shots must be an integer from 1 to 30, got 31"),
        ([digits, "--protocol", "fewshot", "--seeds", "0"], "Seeds must be an integer from 1"),
        ([digits, "--protocol", "probe", "--penalty", "0"], "Penalty must be a number above 0, got 0.0."),
        ([digits, "--protocol", "probe", "--shots", "5"], "Shots must be used with protocol fewshot, got probe."),
        ([digits, "--layer", "1"], "Layer must be used with protocol knn or probe or fewshot, got classify."),
        ([digits, "--protocol", "probe", "--split", "train"], "Split must not be train"),
        (["fashion-40", "--protocol", "probe"], "Data to train on must have a train split, got only test."),
        ([str(tmp_path / "singles.npz"), "--protocol", "probe"], "Data must have a class of at least 2 images"),
        ([digits], "Fine-tune it first, or judge its features"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(
                [
                    "evaluate",
                    str(bundle),
                    *arguments,
                    *(["--cache", str(tmp_path)] if "--protocol" in arguments else []),
                ]
            )
        stderr = capsys.readouterr().err
        assert (exit_info.value.code, message in stderr) == (2, True), stderr
        assert stderr.count("\n") == 1


def test_corrupt_image_raises_error_with_its_name(bundle, tmp_path):
    for split in ("train", "val"):
        for name in "ab":
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for index in range(3):
                Image.fromarray(np.full((8, 8), 50 * index, np.uint8)).save(folder / f"{index}.png")
    (tmp_path / "data" / "val" / "b" / "1.png").write_bytes(b"no picture")
    with pytest.raises(CorruptFileError, match=r"b/1\.png"):
        evaluate(bundle, str(tmp_path / "data"), protocol="knn", neighbours=2, cache=tmp_path / "cache")


@pytest.mark.slow
def test_accuracy_of_deit_features_on_ants_and_bees(shared, tmp_path):
    """243 training photos and 153 test photos. Both insects are among the ImageNet classes that DeiT was trained on."""
    model = vitrail.create("ViT-Ti/16")
    model.load_state_dict(load_file(shared / "deit-ti16" / "model.safetensors"))
    vitrail.save(vitrail.Bundle(model=model.eval(), preprocess=vitrail.Preprocess()), tmp_path / "deit")
    start = time.process_time()
    examples = read_examples(tmp_path / "deit", str(shared / "hymenoptera"), cache=tmp_path / "cache")
    fewshot_scores, probe_scores, knn_scores = fewshot(examples), probe(examples), knn(examples)
    assert time.process_time() - start < 60  # CPU seconds of all cores
    assert fewshot_scores["count"] == probe_scores["count"] == 153
    assert fewshot_scores["accuracy"] >= 0.94
    assert probe_scores["accuracy"] >= 0.94
    assert knn_scores["accuracy"] >= 0.94
    assert fewshot_scores["shots"][0]["accuracy"] < fewshot_scores["shots"][-1]["accuracy"]
    # A weak penalty gives a lower accuracy than the chosen one.
    weakly_penalised, _ = fit_ridge(examples.features, examples.labels, classes=2, penalty=1.0)
    assert (weakly_penalised(examples.test_features).argmax(1) == examples.test_labels).mean() < 0.9
    assert fewshot_scores["penalty"] > 50
