"""Names of the files of checkpoints, in a folder or in a repository. Without torch."""

from collections.abc import Collection
from pathlib import Path

from vitrail.bundles.folder import DECISION_RULE_FILE
from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import MANIFEST, read_json

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pth.tar")
"""Endings of pickles, which can run code."""
CARD = "README.md"
"""The model card."""
DOCUMENTS = ("config.json", "preprocessor_config.json", "open_clip_config.json", "vitrail.json")
"""JSON documents in the folder of a checkpoint: those of other libraries, and `vitrail.json`."""
ENDINGS = (".safetensors", ".npz", *PICKLES)
"""Endings of checkpoints."""
METADATA_FILES = (*DOCUMENTS, CARD, MANIFEST, "preprocess.json", "labels.json", "provenance.json", DECISION_RULE_FILE)
"""Files that are read in addition to the tensors, of other libraries and of bundles."""
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model.npz",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Names of the file of tensors in order of preference: files that cannot run code come before pickles."""


def choose_weights(names: Collection[str], location: str) -> str:
    """Return the name of the file of tensors in a folder or repository. Raise UsageError if there is not exactly one.

    `location` is the folder or repository in the error.
    """
    for name in WEIGHTS:
        if name in names:
            return name
    checkpoints = sorted(name for name in names if name.endswith(ENDINGS) and "/" not in name)
    if len(checkpoints) != 1:
        raise UsageError(
            f"Folder must hold one checkpoint (.safetensors, .npz, .pth, .pt or .bin), got {len(checkpoints)} in"
            f" {location!r}{': ' if checkpoints else ''}{', '.join(checkpoints[:4])}."
        )
    return checkpoints[0]


def check_magic_bytes(name: str, head: bytes, location: str) -> None:
    """Raise CorruptFileError if the first bytes of a file do not match the ending of its name.

    A proxy may send an HTML page instead of a file, for instance. `location` is the path or address in the error.
    """
    if name.endswith(".safetensors"):
        matches = head[8:9] == b"{"
    elif name.endswith(".npz"):
        matches = head[:2] == b"PK"
    else:  # a pickle, alone or in a zip
        matches = head[:1] in b"P\x80"
    if not matches:
        raise CorruptFileError(path=location, cause=f"does not match its file type: it begins with {head[:12]!r}")


def read_index(index: Path) -> dict[str, set[str]]:
    """Read the index of a sharded checkpoint: the name of each shard, with the names of its tensors."""
    document = read_json(index)
    table = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(table, dict) or not table:
        raise CorruptFileError(path=index, cause="has no table of tensors (weight_map)")
    shards: dict[str, set[str]] = {}
    for tensor, shard in sorted(table.items(), key=lambda entry: str(entry[1])):
        name = str(shard)
        if Path(name).name != name or not name.endswith((".safetensors", ".bin")):
            raise CorruptFileError(path=index, cause=f"must name files in its own folder, got {name!r}")
        shards.setdefault(name, set()).add(tensor)
    return shards
