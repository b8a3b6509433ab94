"""Read tensors from untrusted files: safetensors, npz, and pickles, which are opened in a sandbox.

A pickle can run code. It is always read with `weights_only=True`, by a child process without network that returns plain
tensors: `core.sandbox.read_tensors` behind `vitrail.core.sandbox.child`.
"""

import os
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitrail.bundles.catalogue import suggest_published
from vitrail.bundles.file_names import CARD, DOCUMENTS, PICKLES, choose_weights, read_index
from vitrail.bundles.formats.base import LibraryCheckpoint
from vitrail.core import array_files
from vitrail.core.errors import CorruptFileError, UsageError, first_line, suggest_path
from vitrail.core.files import read_json, read_small_file, utf8_path
from vitrail.core.sandbox import read_tensors
from vitrail.core.sandbox.convert_pickle import convert_pickle
from vitrail.core.zip_files import open_zip


def read_checkpoint(path: Path) -> LibraryCheckpoint:
    """Read a checkpoint: the tensors at `path`, a file or a folder, and the JSON documents in the same folder.

    Raise UsageError if `path` is not a checkpoint, CorruptFileError if its content is invalid.
    """
    try:
        exists = path.exists()
    except (OSError, ValueError):  # no file can have such a name
        exists = False
    if not exists:
        suggestion = suggest_path(path, lambda sibling: sibling if os.path.lexists(sibling) else None)
        suggestion = suggestion or suggest_published(str(path))
        raise UsageError(
            f"Source must be a file or folder that exists, hf:owner/repository, an https:// address, or a name that"
            f" `vitrail weights` lists, got {str(path)!r}.{suggestion}"
        )
    file = path / choose_weights([entry.name for entry in path.iterdir()], str(path)) if path.is_dir() else path
    documents = {name: read_json(file.parent / name) for name in DOCUMENTS if (file.parent / name).is_file()}
    card_licence = _read_card_licence(file.parent / CARD)
    settings_files = [*documents, *([CARD] if card_licence else [])]
    notes: list[str] = []
    if settings_files and not path.is_dir():
        notes.append(f"the settings are taken from {', '.join(settings_files)} beside the file")
    tensors = _read_tensor_file(file, notes)
    if not tensors:
        raise CorruptFileError(
            path=file, cause="has no floating-point tensors", advice="If it is a data set, see `vitrail doctor`."
        )
    return LibraryCheckpoint(
        file, tensors, documents, tuple(notes), tensors, card_licence or _config_licence(documents)
    )


def _read_card_licence(path: Path) -> str | None:
    """Read the licence in the front matter of a model card: `license: apache-2.0`, or a list."""
    try:
        lines = read_small_file(path).decode(errors="replace").splitlines()
    except OSError:
        return None
    end = lines.index("---", 1) if lines[:1] == ["---"] and "---" in lines[1:] else 0
    fields: dict[str, list[str]] = {}
    key = ""
    for line in lines[1:end]:
        if field := re.match(r"(\w+):(.*)", line):
            key, line = field[1], field[2]
        items = re.split(r"[\[\],]", re.sub(r"^\s*-\s|\s#.*", "", line))
        fields.setdefault(key, []).extend(value for item in items if (value := item.strip(" '\"\t")))
    licences = fields.get("license", [])
    if licences == ["other"]:  # for a licence that the Hub does not know
        licences = fields.get("license_name", licences)
    return _clean_licence(", ".join(licences))


def _config_licence(documents: dict[str, Any]) -> str | None:
    """Return the licence in config.json: that of timm's `pretrained_cfg`, or of the document itself."""
    config = documents.get("config.json")
    tables = [config, config.get("pretrained_cfg")] if isinstance(config, dict) else []
    licences = (table.get("license") for table in tables if isinstance(table, dict))
    return next((_clean_licence(licence) for licence in licences if isinstance(licence, str)), None)


def _clean_licence(licence: str) -> str | None:
    """Return a licence as a short line of printable characters. Return None if it is empty."""
    printable = "".join(character if character.isprintable() else " " for character in licence)
    return " ".join(printable.split())[:200] or None


def _read_tensor_file(file: Path, notes: list[str]) -> dict[str, Tensor]:
    """Read the tensors of a file, whose ending is its format. Notes on tensors that are left out go to `notes`."""
    if not file.is_file():  # rejects pipes, too, because reading one could wait for ever
        raise UsageError(f"Checkpoint must be a regular file, got {str(file)!r}.")
    if file.name.endswith(".index.json"):
        return _read_shards(file, notes)
    if file.name.endswith(".safetensors"):
        try:
            with utf8_path(file) as path:
                return load_file(path)
        except (SafetensorError, OSError) as error:
            raise CorruptFileError(path=file, cause=f"cannot be read ({error})") from None
    if file.name.endswith(".npz"):
        return _read_npz(file, notes)
    if file.name.endswith(PICKLES):
        return _read_pickle(file, notes)
    raise UsageError(f"Checkpoint must end in .safetensors, .npz or {', '.join(PICKLES)}, got {str(file)!r}.")


def _read_shards(index: Path, notes: list[str]) -> dict[str, Tensor]:
    """Read a sharded checkpoint of Hugging Face by its index, which lists the file of each tensor."""
    tensors: dict[str, Tensor] = {}
    for name, listed_names in read_index(index).items():
        shard = _read_tensor_file(index.parent / name, notes)
        if missing := sorted(listed_names - shard.keys()):
            raise CorruptFileError(path=index, cause=f"lists tensors that {name} lacks: {', '.join(missing[:3])}")
        if repeated := sorted(tensors.keys() & shard.keys()):
            raise CorruptFileError(path=index, cause=f"lists two files that contain {repeated[0]}")
        tensors |= shard
    return tensors


def _read_npz(file: Path, notes: list[str]) -> dict[str, Tensor]:
    """Read the arrays of an npz file that are floating point, with a note in `notes` about all others."""
    # The extra bytes per number are for the model in float32 and for converting bfloat16.
    arrays = array_files.read_npz(file, _is_floating_point, extra_bytes=8)
    if left_out := [name for name, array in arrays.items() if array is None]:
        notes.append(f"arrays that are not floating point are left out: {', '.join(left_out[:4])}")
    try:
        return {name: _as_tensor(array) for name, array in arrays.items() if array is not None}
    except (TypeError, ValueError) as error:  # byte orders and item sizes that torch does not support
        raise CorruptFileError(path=file, cause=f"cannot be read as npz ({first_line(error)})") from None


def _is_floating_point(dtype: np.dtype) -> bool:
    """Return whether a dtype is floating point. numpy represents bfloat16 as two bytes of void."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.itemsize == 2)


def _as_tensor(array: np.ndarray) -> Tensor:
    """Convert an array to a tensor, and bfloat16 to float32."""
    if array.dtype.kind == "V":
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return torch.from_numpy(array)


def _check_crc(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if a file of the archive differs from its CRC-32.

    PyTorch does not verify CRC-32s when it reads, and may write 0 for all files: these are not verified.
    """
    if any(info.CRC for info in archive.infolist()) and (corrupt := archive.testzip()) is not None:
        raise ValueError(f"{corrupt[:200]!r} in it differs from its checksum")


def _read_pickle(file: Path, notes: list[str]) -> dict[str, Tensor]:
    """Read the state dict in a pickle, in a child process without network."""
    try:
        with file.open("rb") as opened:
            is_zip = opened.read(4) == b"PK\3\4"  # since PyTorch 1.6
        if is_zip:
            with open_zip(file) as archive:
                _check_crc(archive)
    except Exception as error:  # any error of the zip parser
        raise CorruptFileError(path=file, cause=f"cannot be read ({first_line(error)})") from None
    with tempfile.TemporaryDirectory(prefix="vitrail-pickle-") as folder:
        plain = Path(folder) / "tensors.safetensors"
        report = convert_pickle(Path(read_tensors.__file__), file, plain, expected="a plain state dict")
        if report["beside"]:
            notes.append(f"of its tables {report['taken']} is taken, not {', '.join(report['beside'])}")
        if report["others"]:
            notes.append(f"entries that are not tensors are left out: {', '.join(report['others'])}")
        return {name: tensor.clone() for name, tensor in load_file(plain).items()}
