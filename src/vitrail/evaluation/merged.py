"""`vitrail export --merge`: a bundle that merges tokens, as many as are given or as a search on images finds."""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from vitrail.bundles.bundle import load, save
from vitrail.bundles.folder import check_folder
from vitrail.core.errors import UsageError
from vitrail.core.terminal import say
from vitrail.data.sources.registry import AnyData, open_images
from vitrail.evaluation.merging import Judge, check_can_merge, find_merge, with_merge
from vitrail.inference.model_files import fingerprint

_IMAGES = 500  # of DATA, at most: the search runs the model on each of them some forty times


@contextlib.contextmanager
def merged_bundle(
    path: str, merge: str, data: AnyData | None, tolerance: float, *, split: str | None = None
) -> Generator[tuple[str, dict[str, Any]]]:
    """A copy of a bundle that merges tokens, for as long as the context lasts, and what merging saves and changes.

    `merge` is auto, a number for every layer, or one for each, separated by commas. For auto, DATA must be given;
    otherwise the changed answers are counted where it is.
    """
    counts, images = None if merge == "auto" else _parse(merge), None
    bundle = load(path)
    check_can_merge(bundle.model.config)
    if data is not None:
        dataset = open_images(data)
        for note in dataset.notes:
            say(f"note: {note}")
        images = dataset.for_evaluation(split).spread(_IMAGES).images
    about: dict[str, Any] = {"bundle": fingerprint(check_folder(path)), "data": data}
    if counts is None:
        if images is None:
            raise UsageError("Merge auto must have images to search on, got none. Give --data DATA.")
        say(f"searching what to merge on {len(images):,} images")
        curve = find_merge(bundle, images, tolerance, tell=say)
        counts = curve[-1].merge
        about |= {"tolerance": tolerance, "curve": [price.to_json() for price in curve]}
        if not any(counts):
            raise UsageError(
                f"Tolerance must be one that some merging meets, got {tolerance:g}: every step that was tried changes"
                f" more of the {len(images):,} answers."
            )
    model = with_merge(bundle.model, counts[0] if len(counts) == 1 else counts)
    if images is not None and "curve" not in about:
        about["curve"] = [Judge(bundle, images).price(model.config.merge).to_json()]
    lengths = (model.config.tokens, *model.config.layer_tokens)
    about["merge"] = [before - after for before, after in itertools.pairwise(lengths)]
    with tempfile.TemporaryDirectory(prefix="vitrail-") as aside:
        folder = Path(aside, "bundle")
        save(dataclasses.replace(bundle, model=model, provenance={**bundle.provenance, "merge": about}), folder)
        yield str(folder), about


def _parse(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(f"Merge must be auto, a number, or one for each layer such as 0,0,16,0, got {text!r}.")
    return tuple(int(part) for part in parts)
