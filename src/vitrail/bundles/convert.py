"""`vitrail convert`: weights of other libraries into a bundle, a bundle into their formats, and the proof."""

import dataclasses
import functools
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.bundles.bundle import Bundle, find_not_finite, load, save
from vitrail.bundles.catalogue import catalogue
from vitrail.bundles.decision import SINGLE_LABEL, decision_rule_from_json
from vitrail.bundles.file_names import CARD
from vitrail.bundles.folder import EMBEDDED
from vitrail.bundles.formats.base import InferredModel, LibraryCheckpoint, WeightFormat, join_tensors, split_tensors
from vitrail.bundles.formats.registry import FORMATS, check_written_format
from vitrail.bundles.infer_config import drop_empty_notes, make_unique
from vitrail.bundles.parity import Forward, select_images, try_to_prove
from vitrail.bundles.remote.base import Download, demand, parse_sha256
from vitrail.bundles.remote.registry import REMOTES, remote_kind
from vitrail.bundles.weight_files import read_checkpoint
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError, first_line
from vitrail.core.files import (
    atomic_folder,
    check_output,
    checksum,
    read_small_file,
    verify_checksums,
    write_json,
    write_text,
)
from vitrail.core.settings import Pair
from vitrail.data.preprocess import ImageLike, Preprocess
from vitrail.models import zoo
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig, read_model
from vitrail.models.create import build
from vitrail.models.library_limits import unsupported_model_error


@dataclasses.dataclass(frozen=True)
class UserHints:
    """What the user states about a source whose files do not."""

    model: str | None = None
    resolution: Pair | None = None
    preprocess: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = None

    def check(self) -> None:
        """Refuse a model that there is not."""
        _ = self.config

    @property
    def config(self) -> ModelConfig | None:
        """The configuration of the model that the user named."""
        if self.model is None:
            if self.resolution is not None:
                raise UsageError("Resolution must be given with --model, which has the patch size, got it alone.")
            return None
        config = zoo.find(self.model)
        return config if self.resolution is None else config.replace(resolution=self.resolution)


@dataclasses.dataclass(frozen=True)
class ImportedWeights:
    """A source as a bundle, and how it was read."""

    bundle: Bundle
    library: str
    tensors: int
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    open_peer: Callable[[], Forward] | None = None
    """Opens the source in its own library; None for a bundle."""
    verifier: str = ""
    """Name of that library in the proof."""
    fetched: Download | None = None
    """The files, if they were fetched."""
    is_restored: bool = False
    """Whether `vitrail.json` beside the files gave back what the bundle was, its provenance included."""


def convert(
    source: str,
    destination: Path,
    to: str,
    *,
    told: UserHints | None = None,
    verifies: bool = True,
    images: Sequence[ImageLike],
    force: bool = False,
    sha256: str | None = None,
) -> dict[str, Any]:
    """Read `source` in any format and write `destination`. Returns a report, with the proof or the reason why there is
    none.

    `source` is a path, an address (`hf:owner/repository`, `https://...`) or a name of the catalogue; the file of
    tensors must have `sha256`, if it is given. Both models are compared on `images`, or on some of them if the model is
    large.
    """
    check_written_format(to)
    target = None if to == "vitrail" else FORMATS[to](to)
    check_output(destination, force=force)
    if verifies and not images:
        raise UsageError("Images to compare both models on must be at least one, got none.")
    found = import_weights(source, told or UserHints(), sha256=sha256)
    config = found.bundle.model.config
    shown = select_images(config, images)
    report: dict[str, Any] = {
        "from": found.library,
        "source": None if found.fetched is None else found.fetched.provenance,
        "to": to,
        "destination": str(destination),
        "model": config.name or config.family,
        "parameters": config.parameters,
        "tensors": found.tensors,
        "left_out": list(found.left_out),
        "notes": list(found.notes),
        "proofs": [],
    }
    if found.open_peer is not None:
        report["proofs"].append(
            _prove(found.verifier, found.open_peer, found.bundle, shown, ours=False, verifies=verifies)
        )
    if target is None:
        bundle = found.bundle
        if report["proofs"] and not found.is_restored:
            bundle = dataclasses.replace(bundle, provenance={**bundle.provenance, "proofs": report["proofs"]})
        save(bundle, destination, force=force)
        return report
    proof, notes = _write(found.bundle, destination, target, shown, verifies=verifies, force=force)
    report["proofs"].append(proof)
    report["notes"] += notes
    return report


def import_weights(source: str, told: UserHints, *, sha256: str | None = None) -> ImportedWeights:
    """Read a bundle or a checkpoint: at a path, at an address, or by its name in the catalogue. A path that exists is
    never fetched."""
    demanded = None if sha256 is None else parse_sha256(sha256)
    is_here = os.path.exists(source)  # noqa: PTH110 - unlike Path.exists, False for a name that no file can have
    published = None if is_here else catalogue().get(source)
    address = source if published is None else published.address
    kind = None if is_here else remote_kind(address)
    if kind is None:
        return _read_here(source, told, demanded)
    if published is not None and told.model is None:
        told = dataclasses.replace(told, model=published.model)
    told.check()  # before anything is fetched
    fetched = REMOTES[kind]().fetch(address, demanded)
    try:
        found = _read_here(str(fetched.path), told, None)
    except CorruptFileError:
        fetched.discard()
        raise
    bundle = found.bundle
    provenance, labels = {**bundle.provenance, "source": fetched.provenance}, bundle.labels
    if published is not None:
        provenance = {"licence": published.licence, **provenance}
        if labels is None and published.class_names is not None:
            labels, _ = make_unique(published.class_names)
    bundle = dataclasses.replace(bundle, provenance=provenance, labels=labels)
    return dataclasses.replace(found, bundle=bundle, notes=fetched.notes + found.notes, fetched=fetched)


def _read_here(source: str, told: UserHints, sha256: str | None) -> ImportedWeights:
    """Read a bundle, or a checkpoint of a library that is recognised by its tensor names."""
    path = Path(source)
    if sha256 is not None and path.is_file():
        demand(sha256, checksum(path), path)
    elif sha256 is not None:
        raise UsageError(f"--sha256 must be of a file, got {source!r}.")
    if path.name == "model.safetensors" and _is_bundle(path.parent):
        path = path.parent
    if source in EMBEDDED or _is_bundle(path):
        if told != UserHints():
            raise UsageError(
                "A bundle has all settings: --model, --preprocess and --labels are only for files of other libraries."
            )
        bundle = load(source if source in EMBEDDED else path)
        return ImportedWeights(bundle, "vitrail", len(bundle.model.state_dict()))
    checkpoint = read_checkpoint(path)
    weight_format = _recognise(checkpoint)
    return _understand(weight_format, weight_format.prepare(checkpoint), told)


def _recognise(checkpoint: LibraryCheckpoint) -> WeightFormat:
    """The first format that recognises the tensor names. Formats of other packages are imported only if no built-in one
    does."""
    for name in FORMATS:
        weight_format = FORMATS[name](name)
        if weight_format.recognises(checkpoint.tensors.keys()):
            return weight_format
    names = sorted(checkpoint.tensors)
    raise UsageError(
        f"Source must be a checkpoint of a known format ({', '.join(FORMATS)}), got {len(names)} tensors such as"
        f" {', '.join(names[:3])}."
    )


def _understand(weight_format: WeightFormat, checkpoint: LibraryCheckpoint, told: UserHints) -> ImportedWeights:
    stated, about_stated = _beside(checkpoint)
    try:
        reading = weight_format.read(checkpoint, told.config) if stated is None else stated.reading
    except VitrailError:
        raise
    except KeyError as error:
        raise CorruptFileError(
            path=checkpoint.path,
            cause=f"looks like a model of {weight_format.name}, but {error} is missing",
            advice="Nothing is loaded in part.",
        ) from None
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise CorruptFileError(
            path=checkpoint.path,
            cause=f"looks like a model of {weight_format.name}, but cannot be read ({first_line(error)})",
        ) from None
    config = reading.config
    _agree(told.config, config)
    entries = list(weight_format.entries(config, checkpoint.tensors.keys()))
    tensors = join_tensors(entries, checkpoint, reading.left_out)
    preprocess = _change(reading.preprocess, told.preprocess)
    about_pixels = None if told.preprocess else reading.about_pixels
    notes = drop_empty_notes([*checkpoint.notes, about_stated, *reading.notes, about_pixels])
    provenance: dict[str, Any] = {"converted_from": weight_format.name}
    if checkpoint.licence is not None:
        provenance["licence"] = checkpoint.licence
    if not config.classes:
        provenance["objective"] = "features"
    if notes:
        provenance["assumed"] = list(notes)
    if stated is not None:
        provenance = stated.provenance
    bundle = Bundle(
        model=_fill(config, tensors),
        preprocess=preprocess,
        labels=told.labels or reading.labels,
        provenance=provenance,
        answer=reading.answer,
    )
    open_peer = functools.partial(weight_format.open_source, config, checkpoint)
    return ImportedWeights(
        bundle,
        weight_format.name,
        len(checkpoint.tensors),
        notes,
        tuple(sorted(reading.left_out)),
        open_peer,
        verifier=weight_format.verifier or weight_format.name,
        is_restored=stated is not None,
    )


def read_labels(path: Path) -> tuple[str, ...]:
    """Class names in a file: a JSON list of names or of objects with a name, or one name per line. Repeated names
    (ImageNet has two cranes) get their index."""
    try:
        text = read_small_file(path).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"Labels must be in a text file that can be read, got {str(path)!r} ({reason}).") from None
    if path.suffix != ".json":
        return make_unique(line.strip() for line in text.splitlines() if line.strip())[0]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    names = [one.get("name") if isinstance(one, dict) else one for one in found] if isinstance(found, list) else [None]
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"Labels must be a JSON list of names, got something else in {str(path)!r}.")
    return make_unique(names)[0]


def _agree(told: ModelConfig | None, found: ModelConfig) -> None:
    """Refuse a file that does not hold the model that the user named."""
    if told is None:
        return
    for name in ("family", "width", "depth", "patch", "layers"):
        if getattr(told, name, None) != getattr(found, name, None):
            raise UsageError(
                f"Model must be what the file holds, got --model {told.name} with {name} {getattr(told, name, None)}"
                f" for a file with {getattr(found, name, None)}."
            )


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """The content of `vitrail.json`: the settings that a file in another format cannot hold."""

    reading: InferredModel
    provenance: dict[str, Any]


def _beside(checkpoint: LibraryCheckpoint) -> tuple[Sidecar | None, str | None]:
    """Read `vitrail.json` beside a checkpoint; None unless all files are as they were written."""
    stated = checkpoint.document("vitrail.json")
    if not stated:
        return None, None
    try:
        verify_checksums(checkpoint.path.parent, [checkpoint.path.name, *checkpoint.documents])
    except CorruptFileError as error:
        return None, f"vitrail.json is ignored, because files were changed since: {error}"
    try:
        config = read_model(stated["config"])
        labels = None if stated["labels"] is None else tuple(stated["labels"])
        answer = decision_rule_from_json(stated["answer"]) if "answer" in stated else SINGLE_LABEL
        reading = InferredModel(config, Preprocess.from_json(stated["preprocess"]), labels, answer=answer)
        return Sidecar(reading, dict(stated["provenance"])), None
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise CorruptFileError(
            f"vitrail.json beside {str(checkpoint.path)!r} is damaged ({error}).",
            path=checkpoint.path.parent / "vitrail.json",
        ) from None


def _change(preprocess: Preprocess, changes: Iterable[str]) -> Preprocess:
    """Apply changes such as `mean=0.5 crop_fraction=0.9`; one number stands for all channels."""
    fields = preprocess.to_json()
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in fields:
            raise UsageError(f"Preprocessing must be KEY=VALUE with one of {', '.join(fields)}, got {change!r}.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        is_one = key in ("mean", "std") and isinstance(value, int | float)
        fields[key] = [float(value)] * preprocess.channels if is_one else value
    return Preprocess.from_json(fields)


def _fill(config: ModelConfig, tensors: dict[str, Tensor]) -> AnyModel:
    """Our model with these tensors, all of which must match."""
    with torch.device("meta"):
        model = build(config)
    expected = model.state_dict()
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name].shape:
            raise CorruptFileError(
                f"{name} must have the shape {tuple(expected[name].shape)} in {config.name or config.family}, got"
                f" {tuple(tensor.shape)}."
            )
    if not_finite := find_not_finite(tensors):
        raise CorruptFileError(f"Weights must be finite, got NaN or infinity in {', '.join(not_finite[:5])}.")
    model.load_state_dict(tensors, assign=True)
    model.fill_tables()
    return model.eval()


def _write(
    bundle: Bundle, destination: Path, target: WeightFormat, images: list[ImageLike], *, verifies: bool, force: bool
) -> tuple[dict[str, Any], list[str]]:
    """Write a bundle in another library's format. Returns the proof, made with that library's model from the files, and
    notes on what it computes slightly differently."""
    config = bundle.model.config
    if config.embedding:
        raise unsupported_model_error(target.name, f"an embedding of {config.embedding} in place of a head")
    notes = target.check(bundle)
    if bundle.answer != SINGLE_LABEL:
        notes = [*notes, f"{target.name} does not know that the logits answer with several labels: use a sigmoid"]
    theirs = split_tensors(target.entries(config), bundle.model.state_dict())
    with atomic_folder(destination, force=force) as folder:
        target.write(theirs, folder / target.file)
        for name, document in target.documents(bundle).items():
            write_json(folder / name, document)
        if card := target.card(bundle):
            write_text(folder / CARD, card)
        open_peer = functools.partial(target.open_written, config, folder)
        proof = _prove(target.verifier or target.name, open_peer, bundle, images, ours=True, verifies=verifies)
        write_json(
            folder / "vitrail.json",
            {
                "config": config.to_document(),
                "preprocess": bundle.preprocess.to_json(),
                "labels": bundle.labels,
                **({} if bundle.answer == SINGLE_LABEL else {"answer": bundle.answer.to_json()}),
                "provenance": bundle.provenance,
                "proof": proof,
            },
        )
    return proof, notes


def _prove(
    library: str,
    open_peer: Callable[[], Forward],
    bundle: Bundle,
    images: list[ImageLike],
    *,
    ours: bool,
    verifies: bool,
) -> dict[str, Any]:
    """The proof for the report, or why there is none."""
    if not verifies:
        return {"library": library, "not_verified": "not asked for"}
    return try_to_prove(library, open_peer, bundle, images, ours=ours)


def _is_bundle(path: Path) -> bool:
    """Whether a path is a folder with a bundle's config.json."""
    try:
        document = json.loads(read_small_file(path / "config.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "format" in document and "family" in document
