"""Tensors from untrusted files: safetensors, npz, and pickles, which are opened in a sandbox.

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
    """The tensors at `path` (a file, or a folder as libraries write it), and the JSON documents beside them."""
    try:
        exists = path.exists()
    except (OSError, ValueError):  # no file can have such a name
        exists = False
    if not exists:
        near = suggest_path(path, lambda other: other if os.path.lexists(other) else None) or suggest_published(
            str(path)
        )
        raise UsageError(
            f"Source must be a file or folder that exists, hf:owner/repository, an https:// address, or a name that"
            f" `vitrail weights` lists, got {str(path)!r}.{near}"
        )
    file = path / choose_weights([one.name for one in path.iterdir()], str(path)) if path.is_dir() else path
    documents = {name: read_json(file.parent / name) for name in DOCUMENTS if (file.parent / name).is_file()}
    card = _card_licence(file.parent / CARD)
    beside = [*documents, *([CARD] if card else [])]
    notes: list[str] = []
    if beside and not path.is_dir():
        notes.append(f"the settings are taken from {', '.join(beside)} beside the file")
    tensors = _read(file, notes)
    if not tensors:
        raise CorruptFileError(
            path=file, cause="has no floating-point tensors", advice="A data set? See `vitrail doctor`."
        )
    return LibraryCheckpoint(file, tensors, documents, tuple(notes), tensors, card or _config_licence(documents))


def _card_licence(path: Path) -> str | None:
    """The licence in the front matter of a model card: `license: apache-2.0`, or a list."""
    try:
        lines = read_small_file(path).decode(errors="replace").splitlines()
    except OSError:
        return None
    end = lines.index("---", 1) if lines[:1] == ["---"] and "---" in lines[1:] else 0
    stated: dict[str, list[str]] = {}
    key = ""
    for line in lines[1:end]:
        if field := re.match(r"(\w+):(.*)", line):
            key, line = field[1], field[2]
        words = re.split(r"[\[\],]", re.sub(r"^\s*-\s|\s#.*", "", line))
        stated.setdefault(key, []).extend(word for part in words if (word := part.strip(" '\"\t")))
    found = stated.get("license", [])
    # A licence that the hub does not know is called "other" and named beside.
    return _one_line(", ".join(stated.get("license_name", found) if found == ["other"] else found))


def _config_licence(documents: dict[str, Any]) -> str | None:
    """The licence in config.json: in timm's table of pretrained settings, or in the document itself."""
    config = documents.get("config.json")
    tables = [config, config.get("pretrained_cfg")] if isinstance(config, dict) else []
    stated = (table.get("license") for table in tables if isinstance(table, dict))
    return next((_one_line(one) for one in stated if isinstance(one, str)), None)


def _one_line(licence: str) -> str | None:
    """A licence as one short line; None if it is empty."""
    return " ".join("".join(one if one.isprintable() else " " for one in licence).split())[:200] or None


def _read(file: Path, notes: list[str]) -> dict[str, Tensor]:
    if not file.is_file():  # nor a pipe, which would wait for ever
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
    """Read sharded checkpoints of Hugging Face, whose index lists the file of each tensor."""
    tensors: dict[str, Tensor] = {}
    for name, stated in read_index(index).items():
        found = _read(index.parent / name, notes)
        if missing := sorted(stated - found.keys()):
            raise CorruptFileError(path=index, cause=f"names tensors that {name} has not: {', '.join(missing[:3])}")
        if twice := sorted(tensors.keys() & found.keys()):
            raise CorruptFileError(path=index, cause=f"leads to files that both have {twice[0]}")
        tensors |= found
    return tensors


def _read_npz(file: Path, notes: list[str]) -> dict[str, Tensor]:
    # Beside the arrays: our model in 32-bit floats, and a reading of bfloat16 as such.
    found = array_files.read_npz(file, _is_real, extra_bytes=8)
    if others := [name for name, array in found.items() if array is None]:
        notes.append(f"arrays that are not floating point are left out: {', '.join(others[:4])}")
    try:
        return {name: _as_tensor(array) for name, array in found.items() if array is not None}
    except (TypeError, ValueError) as error:  # byte orders and lengths that torch does not have
        raise CorruptFileError(path=file, cause=f"cannot be read as npz ({first_line(error)})") from None


def _is_real(dtype: np.dtype) -> bool:
    """Whether a dtype is floating point; numpy shows bfloat16 as two bytes of void."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.itemsize == 2)


def _as_tensor(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "V":
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return torch.from_numpy(array)


def _check_crc(archive: zipfile.ZipFile) -> None:
    """Raise ValueError for a file that differs from its CRC-32: PyTorch does not check it, and may write 0 for all."""
    if any(info.CRC for info in archive.infolist()) and (corrupt := archive.testzip()) is not None:
        raise ValueError(f"{corrupt[:200]!r} in it differs from its checksum")


def _read_pickle(file: Path, notes: list[str]) -> dict[str, Tensor]:
    """The state dict in a pickle, read by a child process without other abilities."""
    try:
        with file.open("rb") as opened:
            is_zip = opened.read(4) == b"PK\3\4"  # since PyTorch 1.6
        if is_zip:
            with open_zip(file) as archive:
                _check_crc(archive)
    except Exception as error:  # what the parser raises
        raise CorruptFileError(path=file, cause=f"cannot be read ({first_line(error)})") from None
    with tempfile.TemporaryDirectory(prefix="vitrail-pickle-") as folder:
        plain = Path(folder) / "tensors.safetensors"
        report = convert_pickle(Path(read_tensors.__file__), file, plain, plain="a plain state dict")
        if report["beside"]:
            notes.append(f"of its tables {report['taken']} is taken, not {', '.join(report['beside'])}")
        if report["others"]:
            notes.append(f"entries that are not tensors are left out: {', '.join(report['others'])}")
        return {name: tensor.clone() for name, tensor in load_file(plain).items()}
