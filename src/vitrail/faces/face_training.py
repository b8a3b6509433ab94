"""`vitrail faces train`: train an embedding of faces, from random weights or from a bundle."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from vitrail.bundles.bundle import Bundle, bundle_key, open_bundle
from vitrail.core.errors import UsageError
from vitrail.core.files import escape_surrogates, write_text
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import AnyData
from vitrail.faces.align import BY_LANDMARKS, SIDE, UNALIGNED
from vitrail.faces.people import align_people, split_people
from vitrail.faces.whitening import mean_embeddings, set_embedding
from vitrail.models import zoo
from vitrail.models.base import AnyModel
from vitrail.models.create import build
from vitrail.models.surgery import surgery_of
from vitrail.training.finetune import adapt_bundle_with, describe_origin, extract_training_features
from vitrail.training.options import Options
from vitrail.training.recipe import OBJECTIVES, Recipe
from vitrail.training.run import Result, RunControls, run
from vitrail.training.starting_point import RunContext, StartingPoint, count_channels, make_preprocess, resolve_model

EMBEDDING_WIDTH = 512
PEOPLE_FILE = "people.txt"
"""File in a run folder with the people who were trained on or held out, one name per line. `--people` and `--without`
read this format."""


def train_faces(
    data: AnyData,
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
    """Train an embedding of faces and write a run folder. Nobody is in both training and test (see `split_people`).

    Trains either the model called `model` from random weights, or the model of the bundle `source`. Faces are aligned
    if `landmarks` are given.
    """
    if (model is None) == (source is None):
        raise UsageError(
            "Faces must be trained with a new model (--model NAME) or from a bundle (--from BUNDLE), got"
            f" {'both' if model else 'none'}."
        )
    if OBJECTIVES[recipe.objective].output != "features":
        raise UsageError(f"Faces must have an objective that learns an embedding (margin), got {recipe.objective}.")
    if source is None:
        recipe = recipe.replace(head="zero")  # random weights have no features to whiten
    dataset, held_out, notes = split_people(
        data, people=people, test_share=test, validation_share=recipe.holdout, seed=options.seed
    )
    if landmarks is None:
        notes.append("faces are not aligned, because no landmarks are given")
    else:
        channels = count_channels(dataset.first_split)
        preprocess = Preprocess(resolution=(SIDE, SIDE), mean=(0.5,) * channels, std=(0.5,) * channels)
        dataset = align_people(dataset, landmarks, preprocess)
        notes.append(f"faces are aligned by five landmarks to {SIDE} x {SIDE} pixels")
    dataset = dataclasses.replace(dataset, notes=(*dataset.notes, *notes))
    alignment = UNALIGNED if landmarks is None else BY_LANDMARKS
    provenance = {"faces": {"alignment": alignment, "people": len(dataset.labels)}}

    def initialise(context: RunContext) -> StartingPoint:
        torch.manual_seed(options.seed)
        if source is None:
            return _start_from_random_weights(str(model), context, recipe, resolution, provenance)
        return _start_from_bundle(source, context, recipe, resolution, provenance, options)

    result = run(dataset, output, recipe, options, initialise, **controls)
    if result.is_first and result.folder is not None:
        names = sorted({*dataset.labels, *held_out})
        write_text(result.folder / PEOPLE_FILE, "".join(f"{escape_surrogates(name)}\n" for name in names))
    return result


def _start_from_random_weights(
    name: str, context: RunContext, recipe: Recipe, resolution: int | None, provenance: dict[str, Any]
) -> StartingPoint:
    named = zoo.find(name)
    settings = {"embedding": named.embedding or EMBEDDING_WIDTH, "classes": 0}
    settings |= {} if resolution is None else {"resolution": resolution}
    config = resolve_model(named.replace(**settings), context.dataset, recipe)
    return StartingPoint(build(config), make_preprocess(config, context.training, recipe), origin=provenance)


def _start_from_bundle(
    source: Bundle | str | Path,
    context: RunContext,
    recipe: Recipe,
    resolution: int | None,
    provenance: dict[str, Any],
    options: Options,
) -> StartingPoint:
    """Load a bundle, replace its head by an embedding, and adapt it to the data.

    With `head = "probe"`, the embedding starts as the whitening of the frozen model's features.
    """
    bundle = open_bundle(source)
    size = None if resolution is None else (resolution, resolution)
    channels = count_channels(context.dataset.first_split)
    settings = dict(recipe.model)
    pool = settings.pop("pool", "gap")
    if pool not in ("gap", "cls"):
        raise UsageError(f"Pool of a bundle's model must be gap, or cls if the model has [CLS], got {pool!r}.")
    new_head = functools.partial(_replace_head_by_embedding, mean_pooling=pool == "gap")
    model, preprocess, notes = adapt_bundle_with(bundle, new_head, channels, recipe.replace(model=settings), size)
    actual_pool = model.config.to_document().get("pool", pool)
    if "pool" in recipe.model and actual_pool != pool:
        raise UsageError(f"Pool must stay {actual_pool} for this bundle, got {pool!r}.")
    learned, damaged = {}, {}
    if recipe.head == "probe" and context.is_new:
        is_fitted = not bundle.model.config.embedding
        learned = _fit_initial_weights(model, preprocess, context, recipe, damaged, options, is_fitted=is_fitted)
        if is_fitted:
            notes += ("the embedding begins with the frozen model's features, whitened within people",)
    origin = provenance | describe_origin(source, bundle, notes)
    return StartingPoint(model, preprocess, bundle_key(source)[:12], origin, notes, damaged=damaged, learned=learned)


def _fit_initial_weights(
    model: AnyModel,
    preprocess: Preprocess,
    context: RunContext,
    recipe: Recipe,
    damaged: dict[str, str],
    options: Options,
    *,
    is_fitted: bool,
) -> dict[str, torch.Tensor]:
    """Return the initial weights of the margin objective: the mean embedding of each person.

    The embeddings are of the training images and their mirror images. If `is_fitted`, the embedding head of `model` is
    first set, in place, to the whitening of their features. Images that cannot be read are added to `damaged`.
    """
    context.tell(f"computing features of {len(context.training):,} images for the embedding")
    parts = [
        extract_training_features(
            model, preprocess, context, recipe, damaged, workers=options.workers, mirrored=mirrored
        )
        for mirrored in (False, True)
    ]
    features, people = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if is_fitted:
        set_embedding(model, features, people, options.seed)
    return {"weight": mean_embeddings(model, features, people, len(context.dataset.labels))}


def _replace_head_by_embedding(model: AnyModel, *, mean_pooling: bool) -> tuple[AnyModel, str]:
    """Return a copy of a model with an embedding head, and a note about the change. An existing embedding stays."""
    if model.config.embedding:
        return model.clone_with(), f"its embedding of {model.config.embedding} stays"
    pooled, note = surgery_of(model).with_mean_pooling() if mean_pooling else (model, None)
    embedding_model, dropped = surgery_of(pooled).with_new_head(0, embedding=EMBEDDING_WIDTH)
    notes = [f"an embedding of {EMBEDDING_WIDTH} in place of the head", *([note] if note else []), *dropped]
    return embedding_model, "; ".join(notes)
