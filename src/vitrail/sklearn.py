"""scikit-learn estimators: `ViTClassifier` and `ViTFeatures` for pipelines, cross-validation and grid searches.

Images X are one of these:

    paths of files       a list or an array of strings
    pixels               uint8 (n, height, width) or (n, height, width, channels)
    rows of numbers      (n, m), any real numbers: each row is a grey image, flattened, as in scikit-learn's digits.
                         It becomes a square (padded with black if m is not a square number); black is the smallest
                         number seen in `fit`, white the largest
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
    """Base class of both: reads images in any of the three forms."""

    def _read_images(self, X: Any, *, fitting: bool) -> Split:
        """X as images without labels."""
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
                raise UsageError(f"Pixels must be uint8 and some, got {X.dtype} of shape {X.shape}.")
            return np.asarray(X) if X.ndim == 4 else np.asarray(X)[..., None]
        rows = validate_data(self, X, reset=fitting, dtype=np.float64, ensure_min_samples=2 if fitting else 1)
        if fitting:
            self.black_, self.white_ = float(rows.min()), float(rows.max())
        if self.black_ is None or self.white_ is None:
            raise UsageError("X must be images, as they were in fit, got rows of numbers.")
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

    bundle     a path, or a `vitrail.Bundle` layer      use the output of this layer ([CLS] or the mean), from 0 or from
    the end (-1); default: the input of the head workers    threads that prepare images
    """

    def __init__(self, bundle: Any = None, *, layer: int | None = None, workers: int = 2) -> None:
        self.bundle = bundle
        self.layer = layer
        self.workers = workers

    def fit(self, X: Any, y: Any = None) -> Self:
        """Load the bundle. Nothing is fitted except black and white, if X is rows of numbers."""
        if self.bundle is None:
            raise UsageError("Bundle must be given: a path or a vitrail.Bundle, got None.")
        images = self._read_images(X, fitting=True)
        self.bundle_ = open_bundle(self.bundle)
        self._n_features_out = self._extract(images.select(np.arange(1))).shape[1]
        return self

    def transform(self, X: Any) -> np.ndarray:
        """The features of each image."""
        check_is_fitted(self)
        return self._extract(self._read_images(X, fitting=False))

    def _extract(self, images: Split) -> np.ndarray:
        model, preprocess = self.bundle_.model, self.bundle_.preprocess
        return extract_features(model, preprocess, images, layer=self.layer, batch=_BATCH, workers=self.workers)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []  # always 32-bit reals
        return tags


class ViTClassifier(ClassifierMixin, _ImageEstimator):
    """A classifier of images: a linear probe on a bundle's features, or a model trained from scratch.

    bundle     a path, or a `vitrail.Bundle`: logistic regression on the features of its frozen model.
               None: a new model is trained
    layer      probe: features of this layer instead of the input of the head
    penalty    probe: L2 penalty; default: chosen on a held-out fifth
    model      trained: a name of `vitrail models`; images are resized to its resolution
    recipe     trained: a recipe of the package, or a .toml file
    settings   trained: changes of the recipe, as `--set` takes them: ("augment.flip=none", "batch=64")
    epochs     trained: number of passes over the images; default: the recipe's
    minutes    trained: time limit, instead of epochs
    seed       of everything random
    workers    threads that prepare images
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
        """Fit the classes of images. `bundle_` is then the bundle in use."""
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
        """The most probable class of each image."""
        likely = self.predict_proba(X)
        return self.classes_[likely.argmax(axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (n, classes), in the order of `classes_`."""
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
        """Train a model in a folder that is removed afterwards."""
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
