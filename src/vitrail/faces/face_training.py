"""`vitrail faces train`: an embedding of faces, from the first weights or from a bundle."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from vitrail.bundles.bundle import Bundle, bundle_key, open_bundle
from vitrail.core.errors import UsageError
from vitrail.core.files import escape_surrogates, write_text
from vitrail.data.dataset import Dataset
from vitrail.data.preprocess import Preprocess
from vitrail.faces.align import BY_LANDMARKS, SIDE, UNALIGNED
from vitrail.faces.people import align_people, split_people
from vitrail.faces.probe import mean_embeddings, set_embedding
from vitrail.models import zoo
from vitrail.models.base import AnyModel
from vitrail.models.create import build
from vitrail.models.surgery import surgery_of
from vitrail.training.finetune import adapt_bundle_with, describe_origin, extract_training_features
from vitrail.training.options import Options
from vitrail.training.recipe import OBJECTIVES, Recipe
from vitrail.training.run import Result, RunControls, run
from vitrail.training.starting_point import RunContext, StartingPoint, count_channels, make_preprocess, resolve_model

EMBEDDING = 512
PEOPLE = "people.txt"
"""In the folder of a run: who was trained on or held out, a name a line, as `--people` and `--without` read it."""


def train_faces(
    data: str | Path,
    output: str | Path,
    recipe: Recipe,
    options: Options,
    *,
    model: str | None = None,
    source: Bundle | str | Path | None = None,
    people: str | Path | None = None,
    test: float = 0.2,
    landmarks: str | Path | None = None,
    resolution: int | None = None,
    **controls: Unpack[RunControls],
) -> Result:
    """Train an embedding on people who are strangers to those it is tested on (see `split_people`): a model of this
    name from its first weights, or the model of the bundle `source`. Faces are aligned if `landmarks` are given."""
    if (model is None) == (source is None):
        raise UsageError(
            "Faces must be learned by a new model (--model NAME) or from a bundle (--from BUNDLE), got"
            f" {'both' if model else 'none'}."
        )
    if OBJECTIVES[recipe.objective].output != "features":
        raise UsageError(f"Faces must have an objective that learns an embedding (margin), got {recipe.objective}.")
    if source is None:
        recipe = recipe.replace(head="zero")  # without weights there are no features to begin with
    dataset, held_out, notes = split_people(
        data, people=people, test=test, validation=recipe.holdout, seed=options.seed
    )
    if landmarks is None:
        notes.append("faces are not aligned, because no landmarks are given: images are taken as they are cropped")
    else:
        channels = count_channels(dataset.first_split)
        plain = Preprocess(resolution=(SIDE, SIDE), mean=(0.5,) * channels, std=(0.5,) * channels)
        dataset = align_people(dataset, landmarks, plain)
        notes.append(f"faces are aligned by five landmarks to {SIDE} x {SIDE} pixels")
    dataset = dataclasses.replace(dataset, notes=(*dataset.notes, *notes))
    alignment = UNALIGNED if landmarks is None else BY_LANDMARKS
    kept = {"faces": {"alignment": alignment, "people": len(dataset.labels)}}

    def initialise(given: RunContext) -> StartingPoint:
        torch.manual_seed(options.seed)
        if source is None:
            return _first_weights(str(model), given.dataset, given, recipe, resolution, kept)
        return _from_bundle(source, given, recipe, resolution, kept, options)

    result = run(dataset, output, recipe, options, initialise, **controls)
    if result.is_first and result.folder is not None:
        known = sorted({*dataset.labels, *held_out})
        write_text(result.folder / PEOPLE, "".join(f"{escape_surrogates(name)}\n" for name in known))
    return result


def _first_weights(
    name: str, dataset: Dataset, given: RunContext, recipe: Recipe, resolution: int | None, kept: dict[str, Any]
) -> StartingPoint:
    named = zoo.find(name)
    settings = {"embedding": named.embedding or EMBEDDING, "classes": 0}
    settings |= {} if resolution is None else {"resolution": resolution}
    config = resolve_model(named.replace(**settings), dataset, recipe)
    return StartingPoint(build(config), make_preprocess(config, given.training, recipe), origin=kept)


def _from_bundle(
    source: Bundle | str | Path,
    given: RunContext,
    recipe: Recipe,
    resolution: int | None,
    kept: dict[str, Any],
    options: Options,
) -> StartingPoint:
    loaded = open_bundle(source)
    size = None if resolution is None else (resolution, resolution)
    channels = count_channels(given.dataset.first_split)
    settings = dict(recipe.model)
    pool = settings.pop("pool", "gap")
    if pool not in ("gap", "cls"):
        raise UsageError(f"Pool of a bundle's model must be gap, or cls if it has that, got {pool!r}.")
    new_head = functools.partial(_new_embedding, reads_patches=pool == "gap")
    model, preprocess, notes = adapt_bundle_with(loaded, new_head, channels, recipe.replace(model=settings), size)
    made = model.config.to_document().get("pool", pool)
    if "pool" in recipe.model and made != pool:
        raise UsageError(f"Pool must stay {made} for this bundle, got {pool!r}.")
    learned, damaged = {}, {}
    if recipe.head == "probe" and given.is_new:
        is_fitted = not loaded.model.config.embedding
        learned = _learn(model, preprocess, given, recipe, damaged, options, is_fitted=is_fitted)
        if is_fitted:
            notes += ("the embedding begins with the frozen model's features, whitened within people",)
    origin = kept | describe_origin(source, loaded, notes)
    return StartingPoint(model, preprocess, bundle_key(source)[:12], origin, notes, damaged=damaged, learned=learned)


def _learn(
    model: AnyModel,
    preprocess: Preprocess,
    given: RunContext,
    recipe: Recipe,
    damaged: dict[str, str],
    options: Options,
    *,
    is_fitted: bool,
) -> dict[str, torch.Tensor]:
    """Fit the embedding, unless it stays as it is, to the features of the training images and their mirror images.
    Returns the first weights of the objective."""
    given.tell(f"computing features of {len(given.training):,} images for the embedding")
    parts = [
        extract_training_features(model, preprocess, given, recipe, damaged, workers=options.workers, mirrored=mirrored)
        for mirrored in (False, True)
    ]
    features, people = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if is_fitted:
        set_embedding(model, features, people, options.seed)
    return {"weight": mean_embeddings(model, features, people, len(given.dataset.labels))}


def _new_embedding(model: AnyModel, *, reads_patches: bool) -> tuple[AnyModel, str]:
    if model.config.embedding:
        return model.clone_with(), f"its embedding of {model.config.embedding} stays"
    pooled, note = surgery_of(model).with_mean_pooling() if reads_patches else (model, None)
    made, dropped = surgery_of(pooled).with_new_head(0, embedding=EMBEDDING)
    notes = [f"an embedding of {EMBEDDING} in place of the head", *([note] if note else []), *dropped]
    return made, "; ".join(notes)
