"""vitrail.sklearn: scikit-learn's own checks, its pipelines and searches, and the three forms of images."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

import vitrail
from vitrail.core.errors import CorruptFileError, MissingError, UsageError
from vitrail.data.sources.registry import open_data
from vitrail.evaluation import feature_cache
from vitrail.evaluation.feature_cache import FeatureCache
from vitrail.evaluation.feature_classifiers import sample_shots
from vitrail.evaluation.features import extract_features
from vitrail.evaluation.protocols import evaluate
from vitrail.lab.exact import redraw
from vitrail.sklearn import ViTClassifier, ViTFeatures

# The one thing that scikit-learn asks of every estimator and that ours do not promise.
ROUNDING = {"check_methods_subset_invariance": "features are single precision: the last bits depend on the batch"}


def make_bundle(**changes):
    model = redraw(vitrail.create("ViT-Pico/2", classes=7, **changes))
    half = (0.5,) * model.config.channels
    preprocess = vitrail.Preprocess(resolution=model.config.resolution, mean=half, std=half, crop_fraction=1.0)
    return vitrail.Bundle(model=model, preprocess=preprocess)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "pico"
    vitrail.save(make_bundle(), folder)
    return str(folder)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Return twelve digits of each class as pixels, files and rows of numbers, and the names of their classes."""
    folder = tmp_path_factory.mktemp("a,b")  # a comma for the CSV
    split = open_data("digits").splits["train"]
    split = split.select(sample_shots(split.labels, 12, seed=0))
    paths = [folder / f"{index}.png" for index in range(len(split))]
    for path, image in zip(paths, split.images, strict=True):
        Image.fromarray(image[..., 0]).save(path)
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])[split.labels]
    return split.images, paths, split.images.reshape(len(split), -1), names


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "small"
    vitrail.save(make_bundle(resolution=4, depth=1), folder)
    return str(folder)


def test_the_probe_passes_scikit_learns_checks(small):
    check_estimator(ViTClassifier(small, penalty=1.0), expected_failed_checks=ROUNDING, on_skip=None)


def test_features_pass_scikit_learns_checks(small):
    check_estimator(ViTFeatures(small), expected_failed_checks=ROUNDING, on_skip=None)


@pytest.mark.slow
def test_a_trained_model_passes_scikit_learns_checks():
    short = {"check_classifiers_train": "two epochs are too few for the accuracy that is asked for"}
    trained = ViTClassifier(model="ViT-Pico/2", epochs=2, settings=("model.depth=1",))
    check_estimator(trained, expected_failed_checks=short | ROUNDING, on_skip=None)


def test_fit_does_not_change_parameters(bundle):
    classifier = ViTClassifier(bundle, layer=-1, penalty=3, settings=["batch=64"])
    assert classifier.get_params() == {
        "bundle": bundle,
        "layer": -1,
        "penalty": 3,
        "model": "ViT-Nano/7",
        "recipe": None,
        "lr": None,
        "settings": ["batch=64"],
        "epochs": None,
        "minutes": None,
        "seed": 0,
        "workers": 2,
    }
    assert clone(classifier).get_params() == classifier.get_params()


def test_classifier_equals_the_probe_of_evaluate(bundle, tmp_path):
    splits = open_data("digits").splits
    sample = splits["train"].select(sample_shots(splits["train"].labels, 20, seed=0))
    np.savez(
        tmp_path / "some.npz",
        train_images=sample.images,
        train_labels=sample.labels,
        test_images=splits["test"].images,
        test_labels=splits["test"].labels,
    )
    scores = evaluate(bundle, str(tmp_path / "some.npz"), protocol="probe", layer=2, cache=tmp_path / "cache")
    classifier = ViTClassifier(bundle, layer=2).fit(sample.images, sample.labels)
    assert classifier.penalty_ == scores["penalty"]
    assert classifier.score(splits["test"].images, splits["test"].labels) == pytest.approx(scores["accuracy"])
    assert scores["accuracy"] > 0.5


def test_pixels_files_and_rows_are_the_same_images(bundle, digits):
    pixels, paths, rows, names = digits
    expected = ViTFeatures(bundle).fit(pixels).transform(pixels)
    assert expected.shape == (120, 48)
    for form in (pixels[..., 0], paths, list(map(str, paths)), np.array(list(map(str, paths))), 3.5 * rows - 7):
        np.testing.assert_allclose(ViTFeatures(bundle).fit(form).transform(form), expected, rtol=1e-4, atol=1e-5)
    classifier = ViTClassifier(bundle, penalty=1.0).fit(paths, names)
    assert classifier.classes_.tolist() == sorted(set(names))
    np.testing.assert_allclose(classifier.predict_proba(pixels).sum(axis=1), 1)
    assert (classifier.predict(pixels) == classifier.predict(paths)).all()
    assert classifier.score(pixels, names) > 0.9


def test_rows_of_any_length_and_rgb_pixels_are_accepted():
    rows = np.random.default_rng(0).normal(size=(6, 13))
    features = ViTFeatures(make_bundle(resolution=4, channels=3)).fit(rows)
    drawn = features._as_pixels(rows, fitting=False)
    assert drawn.shape == (6, 4, 4, 1)
    assert (drawn.min(), drawn.max()) == (0, 255)
    assert (drawn.reshape(6, 16)[:, 13:] == 0).all()
    assert features._as_pixels(np.full((1, 13), 1e9), fitting=False).max() == 255
    assert features.transform(rows).shape == (6, 48)


def test_pipelines_and_grid_search_accept_the_estimators(bundle, digits):
    pixels, paths, rows, names = digits
    pipeline = make_pipeline(ViTFeatures(bundle), LogisticRegression(max_iter=1000))
    assert cross_val_score(pipeline, paths, names, cv=2).mean() > 0.4
    search = GridSearchCV(ViTClassifier(bundle), {"layer": [0, None], "penalty": [1.0, 1e5]}, cv=2).fit(pixels, names)
    assert search.best_params_["penalty"] == 1.0
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict_proba(pixels[:64]), search.predict_proba(pixels[:64]))
    assert ViTFeatures(bundle).fit(rows).get_feature_names_out()[:2].tolist() == ["vitfeatures0", "vitfeatures1"]


def count_computed(monkeypatch):
    """Return a list to which each call of `extract_features` for the cache adds its number of images."""
    counts = []

    def extract(model, preprocess, images, **options):
        counts.append(len(images))
        return extract_features(model, preprocess, images, **options)

    monkeypatch.setattr(feature_cache, "extract_features", extract)
    return counts


def test_a_grid_search_computes_the_features_of_each_image_once(digits, monkeypatch):
    pixels, _, _, names = digits
    search = GridSearchCV(ViTClassifier(make_bundle()), {"penalty": [1.0, 10.0, 100.0, 1000.0]}, cv=3)
    counts = count_computed(monkeypatch)
    monkeypatch.setattr(vitrail.sklearn, "_FEATURES", FeatureCache())
    scores = search.fit(pixels, names).cv_results_["mean_test_score"]
    assert sum(counts) == len(pixels)
    with monkeypatch.context() as patch:
        patch.setattr(vitrail.sklearn, "_FEATURES", FeatureCache(capacity=0))
        np.testing.assert_allclose(search.fit(pixels, names).cv_results_["mean_test_score"], scores, atol=0.02)
    assert sum(counts) == len(pixels) * (1 + 4 * 3 + 1)  # without a cache: in each fit, and to fit the best again
    parallel = clone(search).set_params(n_jobs=2).fit(pixels, names)  # each process has a cache of its own
    np.testing.assert_allclose(parallel.cv_results_["mean_test_score"], scores, atol=0.02)


def test_a_bundle_that_changes_gets_new_features(digits, tmp_path):
    pixels, _, _, _ = digits
    folder = tmp_path / "bundle"
    vitrail.save(make_bundle(), folder)
    features = ViTFeatures(str(folder)).fit(pixels)
    first = features.transform(pixels)
    changed = make_bundle()
    with torch.no_grad():
        changed.model.patch_embed.proj.weight.neg_()
    vitrail.save(changed, folder, force=True)
    second = ViTFeatures(str(folder)).fit(pixels).transform(pixels)
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(features.transform(pixels), first)
    with torch.no_grad():
        features.bundle_.model.patch_embed.proj.weight.mul_(2)
    assert np.abs(features.transform(pixels) - first).max() > 0.1


def test_a_bundle_is_fine_tuned_with_epochs_and_a_learning_rate(bundle, digits):
    pixels, _, _, names = digits
    tuned = {}
    settings = ("batch=32", "holdout=0")  # with held-out images, the head before the first step may be kept
    for lr in (1e-3, 1e-2):
        classifier = ViTClassifier(bundle, epochs=2, lr=lr, settings=settings).fit(pixels, names)
        assert classifier.probe_ is None
        assert classifier.predict_proba(pixels).shape == (120, 10)
        tuned[lr] = classifier.bundle_
    options = {"settings": {"holdout": 0}, "quiet": True}
    result = vitrail.finetune(bundle, (pixels[..., 0], names), epochs=2, lr=1e-3, batch=32, **options)
    assert result.bundle.labels == tuned[1e-3].labels
    ours, theirs = tuned[1e-3].model.state_dict(), result.bundle.model.state_dict()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor)
    assert not torch.equal(ours["head.weight"], tuned[1e-2].model.head.weight)
    assert ViTClassifier(bundle, epochs=0, lr=1e-3, penalty=1.0).fit(pixels, names).probe_ is not None
    frozen = ViTClassifier(bundle, recipe="frozen").fit(pixels, names)
    assert frozen.score(pixels, names) > 0.8
    search = GridSearchCV(ViTClassifier(bundle, penalty=1.0), {"epochs": [0, 1], "lr": [1e-4]}, cv=2)
    assert search.fit(pixels, names).best_score_ > 0.4


@pytest.mark.slow
def test_a_fine_tuned_bundle_passes_scikit_learns_checks(small):
    short = {"check_classifiers_train": "one epoch is too few for the accuracy that is asked for"}
    check_estimator(ViTClassifier(small, epochs=1), expected_failed_checks=short | ROUNDING, on_skip=None)


def test_a_trained_model_is_a_bundle(digits, tmp_path):
    pixels, paths, _, names = digits
    settings = ("model.depth=1", "augment.flip=none")
    for form in (pixels, paths):
        classifier = ViTClassifier(model="ViT-Pico/2", epochs=1, settings=settings).fit(form, names)
        assert classifier.bundle_.labels == tuple(sorted(set(names)))
        # The same object with a bundle and no epochs is a probe, and without a bundle no longer.
        classifier.set_params(bundle=classifier.bundle_, penalty=1.0, epochs=0)
        probing = classifier.fit(form, names).predict_proba(form)
        trained = classifier.set_params(bundle=None, epochs=1).fit(form, names)
        assert np.abs(trained.predict_proba(form) - probing).max() > 0.01
        vitrail.save(classifier.bundle_, tmp_path / "bundle", force=True)
        answers = vitrail.Classifier(tmp_path / "bundle").predict(pixels, top_k=1)
        assert [answer[0]["label"] for answer in answers] == classifier.predict(form).tolist()
    again = ViTClassifier(model="ViT-Pico/2", epochs=1, settings=settings).fit(paths, names)
    np.testing.assert_array_equal(again.predict_proba(paths), classifier.predict_proba(paths))


@pytest.mark.slow
def test_training_on_scikit_learns_digits():
    rows, labels = load_digits(return_X_y=True)
    classifier = ViTClassifier(model="ViT-Pico/2", epochs=20, settings=("augment.flip=none", "augment.padding=1"))
    assert classifier.fit(rows[:1400], labels[:1400]).score(rows[1400:], labels[1400:]) > 0.8


def test_wrong_use_is_one_line(bundle, digits):
    pixels, paths, rows, names = digits
    fitted = ViTClassifier(bundle, penalty=1.0).fit(pixels, names)
    _, singles = np.unique(names, return_index=True)
    for call, message in (
        (lambda: ViTFeatures().fit(pixels), "Bundle must be a path or a vitrail.Bundle, got None"),
        (lambda: ViTFeatures("nowhere").fit(pixels), "Bundle must be a folder that exists"),
        (lambda: ViTFeatures(bundle, layer=9).fit(pixels), "Layer must be from 0 to 3"),
        (lambda: ViTFeatures(bundle).fit(pixels / 255), "Pixels must be uint8"),
        (lambda: fitted.predict(rows), "X must be images as in fit"),
        (lambda: ViTClassifier(bundle).fit(paths, names[:5]), "inconsistent numbers of samples"),
        (lambda: ViTClassifier(bundle).fit(paths, np.linspace(0, 1, 120)), "Unknown label type"),
        (lambda: ViTClassifier(bundle).fit(paths, None), "requires y to be passed"),
        (lambda: ViTClassifier(bundle).fit(pixels[singles], names[singles]), "Penalty must be given if every class"),
        (lambda: ViTClassifier(model="ViT-Pico").fit(pixels, names), "Did you mean"),
        (lambda: ViTClassifier(epochs=1, minutes=1).fit(pixels, names), "Length must be one of"),
        (lambda: ViTClassifier(bundle, lr=0.1).fit(pixels, names), "Fine-tuning must have epochs, minutes or a recipe"),
        (lambda: ViTClassifier(bundle, settings=("batch=8",)).fit(pixels, names), "got only settings"),
        (lambda: ViTClassifier(bundle, epochs=1, lr="fast").fit(pixels, names), "Learning rate must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(CorruptFileError, match=r"'nosuch\.png'[^`]*$"):
        ViTClassifier(bundle).fit(["nosuch.png"] * 4, [0, 1, 0, 1])


def test_missing_scikit_learn_gives_one_line():
    script = (
        "import sys\nsys.modules['sklearn'] = None\nimport vitrail.cli\n"
        "try:\n    import vitrail.sklearn\nexcept ImportError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "MissingError vitrail.sklearn needs the 'sklearn' extra (scikit-learn 1.6 or newer is missing)."
        ' Run, in the source folder of vitrail: pip install -c constraints.txt ".[sklearn]".\n'
    )
    assert issubclass(MissingError, UsageError)
