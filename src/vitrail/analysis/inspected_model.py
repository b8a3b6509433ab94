"""What `inspect` looks at: a bundle, a run with the snapshots of its training, or a model's name."""

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

_SMALL = 64  # pixels: smaller images are not cropped


class Subject(NamedTuple):
    """A bundle with its name, and the model during its training."""

    bundle: Bundle
    name: str
    snapshots: list[tuple[int, Path]]
    """Steps, and folders of bundles, in order."""
    notes: list[str]


def open_subject(given: str | Path | Bundle, *, device: str | None = None) -> Subject:
    """Open what was given. A model's name wins over a path of that name: its weights are new, drawn with seed 0."""
    if isinstance(given, Bundle):
        return Subject(open_to_compute(given, device=device), given.model.config.name or "bundle", [], [])
    name = str(given)
    if name not in EMBEDDED and zoo.is_model(name):
        note = f"{name} is the name of a model: its weights are new and random"
        return Subject(_untrained(name, device or "auto"), name, [], [*zoo.alias_notes(name), note])
    snapshots = _snapshots(Path(name))
    final = Path(name) / "bundle"
    if name in EMBEDDED or not (snapshots or (final / "config.json").exists()):
        return Subject(open_to_compute(given, device=device), name, [], [])
    notes = [] if snapshots else [f"{name} has no snapshots: train with --snapshots N to see what grows"]
    if not final.exists():
        final = snapshots[-1][1]
        notes.append(f"{name} has no bundle yet: its last snapshot is shown")
    return Subject(open_to_compute(final, device=device), str(final), snapshots, notes)


def _untrained(name: str, device: str) -> Bundle:
    config = zoo.find(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(config).eval().to(choose_device(device))
    values = (0.5,) * config.channels
    crop = 1.0 if max(config.resolution) <= _SMALL else 0.875
    preprocess = Preprocess(resolution=config.resolution, mean=values, std=values, crop_fraction=crop)
    return Bundle(model=model, preprocess=preprocess)


def _snapshots(run: Path) -> list[tuple[int, Path]]:
    """The bundles that `train --snapshots` left in a run."""
    try:
        folders = sorted((run / "snapshots").iterdir())
    except OSError:
        return []
    found = ((re.fullmatch(r"step-(\d+)", folder.name), folder) for folder in folders)
    return [(int(match[1]), folder) for match, folder in found if match]
