"""Open the model that `vitrail inspect` shows: a bundle, a run with snapshots of its training, or a model's name."""

import re
from pathlib import Path
from typing import NamedTuple

import torch

from vitrail.bundles.bundle import Bundle, open_to_compute
from vitrail.bundles.folder import EMBEDDED
from vitrail.data.preprocess import Preprocess
from vitrail.models import zoo
from vitrail.models.create import build
from vitrail.models.device import choose_device

_MAX_UNCROPPED = 64  # pixels; input images up to this size are not cropped


class InspectedModel(NamedTuple):
    """A bundle to inspect, its name, and the snapshots of its training."""

    bundle: Bundle
    name: str
    snapshots: list[tuple[int, Path]]
    """Training step and bundle folder of each snapshot, in order of the steps; empty without snapshots."""
    notes: list[str]
    """Sentences for the user about the choice of the model."""


def open_inspected_model(source: str | Path | Bundle, *, device: str | None = None) -> InspectedModel:
    """Open a bundle, the folder of a bundle or a run, or a model by name.

    A model's name takes precedence over a path of the same name. Its weights are random, drawn with seed 0.
    """
    if isinstance(source, Bundle):
        return InspectedModel(open_to_compute(source, device=device), source.model.config.name or "bundle", [], [])
    name = str(source)
    if name not in EMBEDDED and zoo.is_model(name):
        note = f"{name} is the name of a model: its weights are new and random"
        return InspectedModel(_create_untrained(name, device or "auto"), name, [], [*zoo.alias_notes(name), note])
    snapshots = _list_snapshots(Path(name))
    final = Path(name) / "bundle"
    if name in EMBEDDED or not (snapshots or (final / "config.json").exists()):
        return InspectedModel(open_to_compute(source, device=device), name, [], [])
    notes = [] if snapshots else [f"{name} has no snapshots: train with --snapshots N to see how it changes"]
    if not final.exists():
        final = snapshots[-1][1]
        notes.append(f"{name} is not finished and has no bundle yet: the weights of its last snapshot are shown")
    return InspectedModel(open_to_compute(final, device=device), str(final), snapshots, notes)


def _create_untrained(name: str, device: str) -> Bundle:
    """Create a bundle of a named model with random weights, and with preprocessing for its resolution."""
    config = zoo.find(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(config).eval().to(choose_device(device))
    values = (0.5,) * config.channels
    crop = 1.0 if max(config.resolution) <= _MAX_UNCROPPED else 0.875
    preprocess = Preprocess(resolution=config.resolution, mean=values, std=values, crop_fraction=crop)
    return Bundle(model=model, preprocess=preprocess)


def _list_snapshots(run: Path) -> list[tuple[int, Path]]:
    """Return the step and the folder of each snapshot that `train --snapshots` saved in a run, in order."""
    try:
        folders = sorted((run / "snapshots").iterdir())
    except OSError:
        return []
    matches = ((re.fullmatch(r"step-(\d+)", folder.name), folder) for folder in folders)
    return [(int(match[1]), folder) for match, folder in matches if match]
