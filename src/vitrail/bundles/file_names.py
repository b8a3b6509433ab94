"""What the files of checkpoints are called, in a folder or in a repository; without torch."""

from collections.abc import Collection
from pathlib import Path

from vitrail.bundles.folder import ANSWER_FILE
from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import MANIFEST, read_json

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pth.tar")
"""Endings of files that could run code."""
CARD = "README.md"
"""The model card."""
DOCUMENTS = ("config.json", "preprocessor_config.json", "vitrail.json")
"""JSON documents of other libraries, and ours beside them."""
ENDINGS = (".safetensors", ".npz", *PICKLES)
"""How the names of checkpoints end."""
BESIDE = (*DOCUMENTS, CARD, MANIFEST, "preprocess.json", "labels.json", "provenance.json", ANSWER_FILE)
"""Files beside the tensors that are read, of other libraries and of bundles."""
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model.npz",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In a folder, the first of these is the one: files that cannot run code before pickles."""


def choose_weights(names: Collection[str], place: str) -> str:
    """The file of tensors among the files of a folder or repository."""
    for name in WEIGHTS:
        if name in names:
            return name
    found = sorted(name for name in names if name.endswith(ENDINGS) and "/" not in name)
    if len(found) != 1:
        raise UsageError(
            f"Folder must hold one checkpoint (.safetensors, .npz, .pth, .pt or .bin), got {len(found)} in"
            f" {place!r}{': ' if found else ''}{', '.join(found[:4])}."
        )
    return found[0]


def check_content(name: str, head: bytes, place: str) -> None:
    """Refuse a file whose first bytes are not of the kind that its name says: a page instead of a file, for
    instance."""
    starts = {".safetensors": head[8:9] == b"{", ".npz": head[:2] == b"PK"}
    is_right = next((right for ending, right in starts.items() if name.endswith(ending)), head[:1] in b"P\x80")
    if not is_right:
        raise CorruptFileError(
            path=place, cause=f"is another kind of file than its name says: it begins with {head[:12]!r}"
        )


def read_index(index: Path) -> dict[str, set[str]]:
    """The files that an index lists, with the names of their tensors."""
    document = read_json(index)
    table = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(table, dict) or not table:
        raise CorruptFileError(path=index, cause="has no table of tensors (weight_map)")
    shards: dict[str, set[str]] = {}
    for tensor, shard in sorted(table.items(), key=lambda entry: str(entry[1])):
        name = str(shard)
        if Path(name).name != name or not name.endswith((".safetensors", ".bin")):
            raise CorruptFileError(path=index, cause=f"names a file that is not beside it: {name!r}")
        shards.setdefault(name, set()).add(tensor)
    return shards
