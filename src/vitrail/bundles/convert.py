"""`vitrail convert`: read weights of other libraries into a bundle, write bundles in their formats, and prove both."""

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
from vitrail.bundles.remote.base import Download, check_sha256, parse_sha256
from vitrail.bundles.remote.registry import REMOTES, remote_prefix
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
    """Settings that the user states for a checkpoint, because its files do not state them."""

    model: str | None = None
    resolution: Pair | None = None
    preprocess: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = None

    def check(self) -> None:
        """Raise UsageError for an unknown model or an invalid resolution."""
        _ = self.config

    @property
    def config(self) -> ModelConfig | None:
        """The configuration of the model that the user named, if any."""
        if self.model is None:
            if self.resolution is not None:
                raise UsageError(
                    "--resolution must be used with --model, which sets the patch size, got --resolution alone."
                )
            return None
        config = zoo.find(self.model)
        return config if self.resolution is None else config.replace(resolution=self.resolution)


@dataclasses.dataclass(frozen=True)
class ImportedWeights:
    """A checkpoint that was read into a bundle, with the library it came from and notes."""

    bundle: Bundle
    library: str
    tensors: int
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    open_peer: Callable[[], Forward] | None = None
    """Open the source in its own library. None for a bundle."""
    verifier: str = ""
    """Name of that library in the proof."""
    fetched: Download | None = None
    """The downloaded files, if the source was remote."""
    is_restored: bool = False
    """Whether settings and provenance were restored from `vitrail.json`."""


def convert(
    source: str,
    destination: Path,
    to: str,
    *,
    hints: UserHints | None = None,
    verifies: bool = True,
    images: Sequence[ImageLike],
    force: bool = False,
    sha256: str | None = None,
    licence: str | None = None,
) -> dict[str, Any]:
    """Convert the weights of `source`, in any format, to the folder `destination` in the format `to`.

    `source` is a path, an address (`hf:owner/repository`, `https://...`) or a name of the catalogue. If `sha256` is
    set, the file of tensors must have this hash. `licence` replaces the one that the source states. Both models are
    compared on `images`, or on a sample of them if the model is large. Return a report with the proof, or with the
    reason why there is none.
    """
    check_written_format(to)
    target = None if to == "vitrail" else FORMATS[to](to)
    check_output(destination, force=force)
    if verifies and not images:
        raise UsageError("Images to compare both models on must be at least one, got none.")
    imported = import_weights(source, hints or UserHints(), sha256=sha256)
    if licence is not None:
        provenance = {**imported.bundle.provenance, "licence": licence}
        imported = dataclasses.replace(imported, bundle=dataclasses.replace(imported.bundle, provenance=provenance))
    config = imported.bundle.model.config
    compared_images = select_images(config, images)
    report: dict[str, Any] = {
        "from": imported.library,
        "source": None if imported.fetched is None else imported.fetched.provenance,
        "to": to,
        "destination": str(destination),
        "model": config.name or config.family,
        "parameters": config.parameters,
        "tensors": imported.tensors,
        "left_out": list(imported.left_out),
        "notes": list(imported.notes),
        "proofs": [],
    }
    if imported.open_peer is not None:
        report["proofs"].append(
            _prove_conversion(
                imported.verifier,
                imported.open_peer,
                imported.bundle,
                compared_images,
                is_output=False,
                verifies=verifies,
            )
        )
    if target is None:
        bundle = imported.bundle
        if report["proofs"] and not imported.is_restored:
            bundle = dataclasses.replace(bundle, provenance={**bundle.provenance, "proofs": report["proofs"]})
        save(bundle, destination, force=force)
        return report
    proof, notes = _write_in_format(
        imported.bundle, destination, target, compared_images, verifies=verifies, force=force
    )
    report["proofs"].append(proof)
    report["notes"] += notes
    return report


def import_weights(source: str, hints: UserHints, *, sha256: str | None = None) -> ImportedWeights:
    """Read a bundle or a checkpoint from a path, an address or a name of the catalogue.

    A path that exists is never fetched. Remote files are stored in the cache; a corrupt file is removed from it. Raise
    CorruptFileError if the file of tensors does not have `sha256`.
    """
    expected_sha256 = None if sha256 is None else parse_sha256(sha256)
    is_local = os.path.exists(source)  # noqa: PTH110 - unlike Path.exists, False for a name that no file can have
    published = None if is_local else catalogue().get(source)
    address = source if published is None else published.address
    prefix = None if is_local else remote_prefix(address)
    if prefix is None:
        return _import_local(source, hints, expected_sha256)
    if published is not None and hints.model is None:
        hints = dataclasses.replace(hints, model=published.model)
    hints.check()  # before anything is fetched
    download = REMOTES[prefix]().fetch(address, expected_sha256)
    try:
        imported = _import_local(str(download.path), hints, None)
    except CorruptFileError:
        download.discard()
        raise
    bundle = imported.bundle
    provenance, labels = {**bundle.provenance, "source": download.provenance}, bundle.labels
    if published is not None:
        provenance = {"licence": published.licence, **provenance}
        if labels is None and published.class_names is not None:
            labels, _ = make_unique(published.class_names)
    bundle = dataclasses.replace(bundle, provenance=provenance, labels=labels)
    return dataclasses.replace(imported, bundle=bundle, notes=download.notes + imported.notes, fetched=download)


def _import_local(source: str, hints: UserHints, sha256: str | None) -> ImportedWeights:
    """Read a bundle or a checkpoint from a local path. The library is recognised by the tensor names."""
    path = Path(source)
    if sha256 is not None and path.is_file():
        check_sha256(sha256, checksum(path), path)
    elif sha256 is not None:
        raise UsageError(f"--sha256 must be used with a single file, got the folder {source!r}.")
    if path.name == "model.safetensors" and _is_bundle(path.parent):
        path = path.parent
    if source in EMBEDDED or _is_bundle(path):
        if hints != UserHints():
            raise UsageError(
                "A bundle has all settings: --model, --preprocess and --labels are only for files of other libraries."
            )
        bundle = load(source if source in EMBEDDED else path)
        return ImportedWeights(bundle, "vitrail", len(bundle.model.state_dict()))
    checkpoint = read_checkpoint(path)
    weight_format = _recognise_format(checkpoint)
    return _import_checkpoint(weight_format, weight_format.prepare(checkpoint), hints)


def _recognise_format(checkpoint: LibraryCheckpoint) -> WeightFormat:
    """Return the first format that recognises the tensor names. Raise UsageError if none does.

    Formats of other packages come last: they are imported only if no built-in format recognises the names.
    """
    for name in FORMATS:
        weight_format = FORMATS[name](name)
        if weight_format.recognises(checkpoint.tensors.keys()):
            return weight_format
    names = sorted(checkpoint.tensors)
    raise UsageError(
        f"Source must be a checkpoint of a known format ({', '.join(FORMATS)}), got {len(names)} tensors such as"
        f" {', '.join(names[:3])}."
    )


def _import_checkpoint(weight_format: WeightFormat, checkpoint: LibraryCheckpoint, hints: UserHints) -> ImportedWeights:
    """Build the model of a library's checkpoint, with the settings of `vitrail.json` or else with inferred settings."""
    sidecar, sidecar_note = _read_sidecar(checkpoint)
    try:
        source_model = weight_format.read(checkpoint, hints.config) if sidecar is None else sidecar.model
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
    config = source_model.config
    _check_hinted_config(hints.config, config)
    entries = list(weight_format.entries(config, checkpoint.tensors.keys()))
    tensors = join_tensors(entries, checkpoint, source_model.left_out)
    preprocess = _change_preprocess(source_model.preprocess, hints.preprocess)
    preprocess_note = None if hints.preprocess else source_model.about_pixels
    notes = drop_empty_notes([*checkpoint.notes, sidecar_note, *source_model.notes, preprocess_note])
    bundle = Bundle(
        model=_build_with_weights(config, tensors),
        preprocess=preprocess,
        labels=hints.labels or source_model.labels,
        provenance=_new_provenance(weight_format, checkpoint, config, notes) if sidecar is None else sidecar.provenance,
        answer=source_model.answer,
    )
    # Opens the checkpoint in its own library, for the proof that both models give the same outputs.
    open_peer = functools.partial(weight_format.open_source, config, checkpoint)
    return ImportedWeights(
        bundle,
        weight_format.name,
        len(checkpoint.tensors),
        notes,
        tuple(sorted(source_model.left_out)),
        open_peer,
        verifier=weight_format.verifier or weight_format.name,
        is_restored=sidecar is not None,
    )


def _new_provenance(
    weight_format: WeightFormat, checkpoint: LibraryCheckpoint, config: ModelConfig, notes: tuple[str, ...]
) -> dict[str, Any]:
    """Return the provenance of a bundle from another library's checkpoint, without entries that do not apply."""
    provenance: dict[str, Any] = {"converted_from": weight_format.name}
    if checkpoint.licence is not None:
        provenance["licence"] = checkpoint.licence
    if not config.classes:
        provenance["objective"] = "features"
    if notes:
        provenance["assumed"] = list(notes)
    return provenance


def read_labels(path: Path) -> tuple[str, ...]:
    """Read class names from a file: a JSON list of names or of objects with a name, or one name per line.

    The index is appended to repeated names (ImageNet has two cranes).
    """
    try:
        text = read_small_file(path).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise UsageError(f"Labels must be in a text file that can be read, got {str(path)!r} ({reason}).") from None
    if path.suffix != ".json":
        return make_unique(line.strip() for line in text.splitlines() if line.strip())[0]
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    entries = document if isinstance(document, list) else [None]
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in entries]
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"Labels must be a JSON list of names, got something else in {str(path)!r}.")
    return make_unique(names)[0]


def _check_hinted_config(hinted: ModelConfig | None, inferred: ModelConfig) -> None:
    """Raise UsageError if a file does not contain the model that the user named."""
    if hinted is None:
        return
    for name in ("family", "width", "depth", "patch", "layers"):
        hinted_value, inferred_value = getattr(hinted, name, None), getattr(inferred, name, None)
        if hinted_value != inferred_value:
            raise UsageError(
                f"Model must be the one in the file, got --model {hinted.name} with {name} {hinted_value}"
                f" for a file with {inferred_value}."
            )


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """The content of `vitrail.json`: the settings that a file in another format cannot hold."""

    model: InferredModel
    provenance: dict[str, Any]


def _read_sidecar(checkpoint: LibraryCheckpoint) -> tuple[Sidecar | None, str | None]:
    """Read `vitrail.json` in the folder of a checkpoint.

    Return None if there is none, and None with a note if a file of the folder has changed since it was written.
    """
    document = checkpoint.document("vitrail.json")
    if not document:
        return None, None
    try:
        verify_checksums(checkpoint.path.parent, [checkpoint.path.name, *checkpoint.documents])
    except CorruptFileError as error:
        return None, f"vitrail.json is ignored, because files were changed since: {error}"
    try:
        config = read_model(document["config"])
        labels = None if document["labels"] is None else tuple(document["labels"])
        rule = decision_rule_from_json(document["answer"]) if "answer" in document else SINGLE_LABEL
        model = InferredModel(config, Preprocess.from_json(document["preprocess"]), labels, answer=rule)
        return Sidecar(model, dict(document["provenance"])), None
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise CorruptFileError(
            f"vitrail.json beside {str(checkpoint.path)!r} is corrupt ({error}).",
            path=checkpoint.path.parent / "vitrail.json",
        ) from None


def _change_preprocess(preprocess: Preprocess, changes: Iterable[str]) -> Preprocess:
    """Apply changes such as `mean=0.5 crop_fraction=0.9`. A single number for mean or std applies to all channels."""
    fields = preprocess.to_json()
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in fields:
            raise UsageError(f"Preprocessing must be KEY=VALUE with one of {', '.join(fields)}, got {change!r}.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        is_single_number = key in ("mean", "std") and isinstance(value, int | float)
        fields[key] = [float(value)] * preprocess.channels if is_single_number else value
    return Preprocess.from_json(fields)


def _build_with_weights(config: ModelConfig, tensors: dict[str, Tensor]) -> AnyModel:
    """Build the model with these tensors. Raise CorruptFileError if a shape differs or a number is not finite."""
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


def _write_in_format(
    bundle: Bundle, destination: Path, target: WeightFormat, images: list[ImageLike], *, verifies: bool, force: bool
) -> tuple[dict[str, Any], list[str]]:
    """Write a bundle in another library's format to the folder `destination`.

    Return the proof, computed with that library's model from the written files, and notes on slight differences in how
    the library computes the model.
    """
    config = bundle.model.config
    if config.embedding:
        raise unsupported_model_error(target.name, f"an embedding of {config.embedding} in place of a head")
    notes = target.check(bundle)
    if bundle.answer != SINGLE_LABEL:
        notes = [*notes, f"{target.name} cannot store that the model predicts several labels: apply a sigmoid"]
    library_tensors = split_tensors(target.entries(config), bundle.model.state_dict())
    with atomic_folder(destination, force=force) as folder:
        target.write(library_tensors, folder / target.file)
        for name, document in target.documents(bundle).items():
            write_json(folder / name, document)
        if card := target.card(bundle):
            write_text(folder / CARD, card)
        open_peer = functools.partial(target.open_written, config, folder)
        proof = _prove_conversion(
            target.verifier or target.name, open_peer, bundle, images, is_output=True, verifies=verifies
        )
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


def _prove_conversion(
    library: str,
    open_peer: Callable[[], Forward],
    bundle: Bundle,
    images: list[ImageLike],
    *,
    is_output: bool,
    verifies: bool,
) -> dict[str, Any]:
    """Return the entry of the report for the proof, or for the reason why there is none."""
    if not verifies:
        return {"library": library, "not_verified": "not asked for"}
    return try_to_prove(library, open_peer, bundle, images, is_output=is_output)


def _is_bundle(path: Path) -> bool:
    """Return whether a path is a folder with a bundle's config.json."""
    try:
        document = json.loads(read_small_file(path / "config.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "format" in document and "family" in document
