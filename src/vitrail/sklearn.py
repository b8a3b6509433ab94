"""scikit-learn estimators `ViTClassifier` and `ViTFeatures`, for pipelines, cross-validation and grid searches.

The images X have one of these forms:

    paths of files       a list or an array of strings
    pixels               uint8 (n, height, width) or (n, height, width, channels)
    rows of numbers      (n, m), real numbers: each row is a flattened grey image, as in scikit-learn's digits. It is
                         reshaped to a square, padded with black if m is not a square number. The smallest number in
                         `fit` is black, the largest is white
"""

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np

from vitrail.bundles.bundle import Bundle, open_bundle
from vitrail.core.errors import MissingError, UsageError
from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import Loader
from vitrail.evaluation.feature_cache import FeatureCache
from vitrail.evaluation.feature_classifiers import fit_probe
from vitrail.evaluation.split_predictions import predict_split
from vitrail.models import zoo
from vitrail.training.finetune import finetune
from vitrail.training.options import Options
from vitrail.training.recipe import Recipe, adjust_recipe, find_recipe, recipe_names
from vitrail.training.run import train

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        assert_all_finite,
        check_consistent_length,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError:
    raise MissingError.for_extra("vitrail.sklearn", "sklearn", "scikit-learn 1.6 or newer") from None

_BATCH = 64
_FEATURES = FeatureCache()  # shared by all estimators of the process: the clones of a search fit the same images


class _ImageEstimator(BaseEstimator):
    """Base class of the estimators, which reads images in any of the three forms."""

    def _read_images(self, X: Any, *, fitting: bool) -> Split:
        """Return X as images without labels. With `fitting`, also set `black_` and `white_`."""
        if fitting:
            self.black_ = self.white_ = None
        is_list = isinstance(X, list | tuple) or getattr(X, "ndim", None) == 1
        if is_list and isinstance(next(iter(X), None), str | os.PathLike):
            images = [os.fspath(path) for path in X]
        else:
            images = self._as_pixels(X, fitting=fitting)
        return Split("images", images, np.zeros(len(images), np.int64))

    def _as_pixels(self, X: Any, *, fitting: bool) -> np.ndarray:
        if getattr(X, "ndim", None) in (3, 4):
            if X.dtype != np.uint8 or 0 in X.shape:
                raise UsageError(f"Pixels must be uint8 and not empty, got {X.dtype} of shape {X.shape}.")
            return np.asarray(X) if X.ndim == 4 else np.asarray(X)[..., None]
        rows = validate_data(self, X, reset=fitting, dtype=np.float64, ensure_min_samples=2 if fitting else 1)
        if fitting:
            self.black_, self.white_ = float(rows.min()), float(rows.max())
        if self.black_ is None or self.white_ is None:
            raise UsageError("X must be images as in fit, got rows of numbers.")
        side = int(np.ceil(np.sqrt(rows.shape[1])))
        canvas = np.zeros((len(rows), side * side), np.uint8)
        canvas[:, : rows.shape[1]] = np.rint(255 * ((rows - self.black_) / (self.white_ - self.black_ or 1)).clip(0, 1))
        return canvas.reshape(-1, side, side, 1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        return tags


class ViTFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _ImageEstimator):
    """A transformer from images to the features of a frozen model, float32 (n, d).

    bundle     path of a bundle, or a `vitrail.Bundle`
    layer      layer whose output ([CLS] or the mean) is used, counted from 0 or from the end (-1); default: the input
               of the head
    workers    number of threads that prepare images
    """

    def __init__(self, bundle: Any = None, *, layer: int | None = None, workers: int = 2) -> None:
        self.bundle = bundle
        self.layer = layer
        self.workers = workers

    def fit(self, X: Any, y: Any = None) -> Self:
        """Load the bundle. If X has rows of numbers, also set black and white; nothing else is fitted."""
        if self.bundle is None:
            raise UsageError("Bundle must be a path or a vitrail.Bundle, got None.")
        images = self._read_images(X, fitting=True)
        self.bundle_ = open_bundle(self.bundle)
        self._n_features_out = self._extract(images.select(np.arange(1))).shape[1]
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the features of each image, float32 (n, d)."""
        check_is_fitted(self)
        return self._extract(self._read_images(X, fitting=False))

    def _extract(self, images: Split) -> np.ndarray:
        return _FEATURES.extract(self.bundle_, images, layer=self.layer, batch=_BATCH, workers=self.workers)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []  # the result is always float32
        return tags


class ViTClassifier(ClassifierMixin, _ImageEstimator):
    """A classifier of images: a linear probe on a bundle's features, a fine-tuned bundle, or a new model.

    A bundle is fine-tuned if `epochs`, `minutes` or `recipe` is set. Without them, or with `epochs=0`, the classifier
    is a linear probe (logistic regression) on the features of the frozen model. Features are kept in memory, so that a
    grid search computes them once for each image.

    bundle     path of a bundle, or a `vitrail.Bundle`. None: train a new model
    layer      probe: layer whose output is used as features; default: the input of the head
    penalty    probe: L2 penalty; default: chosen on a held-out fifth of the images
    model      new model: a name of `vitrail models`; images are resized to its resolution
    recipe     training: a recipe of the package, a .toml file or a `Recipe`; default: "small" for a new model, "auto"
               for a bundle
    lr         training: peak learning rate; default: as in the recipe
    settings   training: changes of the recipe, as for `--set`: ("augment.flip=none", "batch=64")
    epochs     training: number of passes over the images; default: as in the recipe
    minutes    training: time limit, instead of epochs
    seed       random seed
    workers    number of threads that prepare images
    """

    def __init__(
        self,
        bundle: Any = None,
        *,
        layer: int | None = None,
        penalty: float | None = None,
        model: str = "ViT-Nano/7",
        recipe: Any = None,
        lr: float | None = None,
        settings: tuple[str, ...] = (),
        epochs: int | None = None,
        minutes: float | None = None,
        seed: int = 0,
        workers: int = 2,
    ) -> None:
        self.bundle = bundle
        self.layer = layer
        self.penalty = penalty
        self.model = model
        self.recipe = recipe
        self.lr = lr
        self.settings = settings
        self.epochs = epochs
        self.minutes = minutes
        self.seed = seed
        self.workers = workers

    def fit(self, X: Any, y: Any) -> Self:
        """Fit the probe, or train a model, and return the classifier. This sets `bundle_`, `probe_` and `classes_`."""
        if y is None:
            raise UsageError("ViTClassifier requires y to be passed, but the target y is None.")
        images = self._read_images(X, fitting=True)
        y = column_or_1d(y, warn=True)
        check_consistent_length(images.images, y)
        assert_all_finite(y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        images = dataclasses.replace(images, labels=labels.astype(np.int64))
        if self._is_probe():
            self.bundle_ = open_bundle(self.bundle)
            self.probe_, self.penalty_ = fit_probe(
                self._extract(images), images.labels, classes=len(self.classes_), penalty=self.penalty, seed=self.seed
            )
        else:
            self.bundle_, self.probe_ = self._train(images), None
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each image."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities (n, classes), in the order of `classes_`."""
        check_is_fitted(self)
        images = self._read_images(X, fitting=False)
        if self.probe_ is not None:
            return self.probe_.probabilities(self._extract(images))
        loader = Loader(images, self.bundle_.preprocess, batch=_BATCH, shuffle=False, workers=self.workers)
        return predict_split(self.bundle_.model, loader).probabilities.astype(np.float64)

    def _extract(self, images: Split) -> np.ndarray:
        return _FEATURES.extract(self.bundle_, images, layer=self.layer, batch=_BATCH, workers=self.workers)

    def _is_probe(self) -> bool:
        """Whether the model of a bundle stays frozen. Raise UsageError for a learning rate that nothing would use."""
        if self.bundle is None:
            return False
        if self.epochs == 0:
            return True
        if any(value is not None for value in (self.epochs, self.minutes, self.recipe)):
            return False
        if self.lr is not None or self.settings:
            name = "settings" if self.lr is None else "lr"
            raise UsageError(
                f"Fine-tuning must have epochs, minutes or a recipe, got only {name}. Set epochs=5, or leave {name} out"
                " for a linear probe."
            )
        return True

    def _train(self, images: Split) -> Bundle:
        """Train a new model or fine-tune the bundle in a temporary folder, and return the new bundle."""
        data = Dataset("in memory", tuple(map(str, self.classes_)), {"train": images})
        options = Options(seed=self.seed, workers=self.workers)
        with tempfile.TemporaryDirectory(prefix="vitrail-") as folder:
            run = Path(folder) / "run"
            if self.bundle is not None:
                recipe = self._make_recipe("auto", drop_preprocess=True)
                return finetune(self.bundle, data, run, recipe, options, quiet=True, command="vitrail.sklearn").bundle
            recipe = self._make_recipe("small")
            resolution = list(zoo.find(self.model).resolution)
            recipe = recipe.replace(holdout=0.0, model={"resolution": resolution, **recipe.model})
            return train(data, self.model, run, recipe, options, quiet=True, command="vitrail.sklearn").bundle

    def _make_recipe(self, default: str, *, drop_preprocess: bool = False) -> Recipe:
        """Return the recipe with the learning rate, settings and length of this estimator.

        `drop_preprocess` drops the preprocessing of a built-in recipe, which is for new models.
        """
        recipe = default if self.recipe is None else self.recipe
        if not isinstance(recipe, Recipe):
            name = str(recipe)
            recipe = find_recipe(name)
            if drop_preprocess and name in recipe_names():
                recipe = recipe.replace(preprocess={})
        changes = {"learning_rate": self.lr}
        return adjust_recipe(recipe, changes, self.settings, epochs=self.epochs, steps=None, minutes=self.minutes)
