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
from vitrail.evaluation.feature_classifiers import fit_probe
from vitrail.evaluation.features import extract_features
from vitrail.evaluation.split_predictions import predict_split
from vitrail.models import zoo
from vitrail.training.options import Options
from vitrail.training.recipe import change_recipe, find_recipe
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
        model, preprocess = self.bundle_.model, self.bundle_.preprocess
        return extract_features(model, preprocess, images, layer=self.layer, batch=_BATCH, workers=self.workers)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []  # the result is always float32
        return tags


class ViTClassifier(ClassifierMixin, _ImageEstimator):
    """A classifier of images: a linear probe on a bundle's features, or a model trained from scratch.

    bundle     path of a bundle, or a `vitrail.Bundle`: fit a linear probe (logistic regression) on the features of its
               frozen model. None: train a new model
    layer      probe: layer whose output is used as features; default: the input of the head
    penalty    probe: L2 penalty; default: chosen on a held-out fifth of the images
    model      training: a name of `vitrail models`; images are resized to its resolution
    recipe     training: a recipe of the package, or a .toml file
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
        recipe: str = "small",
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
        if self.bundle is None:
            self.bundle_, self.probe_ = self._train(images), None
            return self
        self.bundle_ = open_bundle(self.bundle)
        features = self._extract(images)
        self.probe_, self.penalty_ = fit_probe(
            features, images.labels, classes=len(self.classes_), penalty=self.penalty, seed=self.seed
        )
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
        model, preprocess = self.bundle_.model, self.bundle_.preprocess
        return extract_features(model, preprocess, images, layer=self.layer, batch=_BATCH, workers=self.workers)

    def _train(self, images: Split) -> Bundle:
        """Train a new model in a temporary folder, and return its bundle."""
        recipe = change_recipe(find_recipe(self.recipe), self.settings)
        recipe = recipe.with_length(epochs=self.epochs, steps=None, minutes=self.minutes)
        resolution = list(zoo.find(self.model).resolution)
        with tempfile.TemporaryDirectory(prefix="vitrail-") as folder:
            return train(
                Dataset("in memory", tuple(map(str, self.classes_)), {"train": images}),
                self.model,
                Path(folder) / "run",
                recipe.replace(holdout=0.0, model={"resolution": resolution, **recipe.model}),
                Options(seed=self.seed, workers=self.workers),
                quiet=True,
                command="vitrail.sklearn",
            ).bundle
