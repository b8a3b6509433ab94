"""Model files of engines: built once per bundle, next to it, or in the user's cache if that folder cannot be written.

The bundle itself never changes. The folder `BUNDLE.SUFFIX` (`BUNDLE.onnx`, `BUNDLE.onnx-int8`, `BUNDLE.openvino`) holds

model.onnx, ...   the model, as the engine wrote it
proof.json        the bundle and the versions it was built from, and how its outputs differ from torch's
manifest.json     SHA-256 of these files

Such a folder may come with a bundle from an untrusted source, with forged checksums and a forged proof. It is therefore
used only if its files were built and verified for this user: `proved/HASH.json` in the user's cache holds a copy of the
proof, named by a hash of the bundle's fingerprint and the checksums of the files. Other model files are not opened, not
even to verify them: the images of the proof are public, and a graph can be correct on these images only.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from vitrail.bundles.folder import EMBEDDED, check_folder
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.core.files import MANIFEST, atomic_file, can_replace, file_lock, read_json, user_folder, verify_checksums
from vitrail.core.terminal import say
from vitrail.inference.engine import FileEngine, processor, version_of

FORMAT = 6  # file format version; older model files are rebuilt
PROOF = "proof.json"


def fingerprint(bundle: Path) -> str:
    """Return a hash of a bundle that changes with any byte of any of its files."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise CorruptFileError(path=bundle / MANIFEST, cause=f"cannot be read ({error.strerror})") from None


def belongs_to_bundle(folder: Path, key: str) -> bool:
    """Return whether a folder holds a model file of the bundle with this fingerprint."""
    try:
        return read_json(folder / PROOF)["bundle"] == key
    except (CorruptFileError, KeyError, TypeError):
        return False


def prepare_model_file(path: str | Path, engine: type[FileEngine], precision: str) -> Path:
    """Return the folder with the verified model file of a bundle for an engine.

    The file is built if it is missing, corrupt, or of another version of the bundle. Raises UsageError if there is no
    folder that can be written.
    """
    bundle = check_folder(path)
    key, folders = fingerprint(bundle), _candidate_folders(path, engine.folder_suffixes[precision])
    if (proved := _find_proved(folders, key, engine, precision)) is not None:
        return proved
    from vitrail.inference.build_model_file import build_model_file

    target = next((folder for folder in folders if can_replace(folder) and _has_only_engine_files(folder)), None)
    if target is None:
        paths = " and ".join(repr(str(folder)) for folder in folders)
        raise UsageError(
            f"File of engine {engine.name} must go to a folder that can be written, got {paths}."
            " Set $VITRAIL_HOME to a writable folder, or use engine torch."
        )
    # If several processes need the file at the same time, one builds it and the others wait. The folder is replaced as
    # a whole, so the lock is outside of it: in the user's cache, otherwise next to the folder.
    locked = folders[-1] if can_replace(folders[-1]) else target
    lock = locked.with_name(f".{locked.name}.lock")
    with file_lock(lock, lambda holder: say(f"waiting for {target}, which {holder} is building")) as is_held:
        if not is_held:
            say(f"note: {str(target.parent)!r} has no file locks: processes that start together build the file twice")
        if (proved := _find_proved(folders, key, engine, precision)) is not None:
            return proved
        earlier = next((folder for folder in folders if not _find_flaw(folder, key, engine, precision)), None)
        if earlier is not None:
            say(f"{earlier} is not verified in {precision} with this version and CPU, and is verified again")
        elif os.path.lexists(target):
            say(f"{target} {_find_flaw(target, key, engine, precision)} and is built again")
        build_model_file(bundle, target, engine, precision, earlier)
        _save_own_proof(target)
    return target


def is_intact(folder: Path, key: str, engine: type[FileEngine], precision: str) -> bool:
    """Return whether a folder holds an unchanged model file of this bundle (`key`) that this user has built."""
    return not _find_flaw(folder, key, engine, precision)


def find_model_file(bundle: Path, key: str, engine: type[FileEngine], precision: str) -> Path | None:
    """Return the folder with the verified model file of the bundle with this fingerprint, or None if there is none."""
    return _find_proved(_candidate_folders(bundle, engine.folder_suffixes[precision]), key, engine, precision)


def _has_only_engine_files(folder: Path) -> bool:
    """Return whether a folder does not exist or holds only files of engines.

    An export or a bundle may have the same name and must not be replaced.
    """
    names = {file.name for file in folder.iterdir()} if os.path.lexists(folder) else set()
    return all(name in (MANIFEST, PROOF) or name.startswith("model.") for name in names)


def _candidate_folders(path: str | Path, suffix: str) -> list[Path]:
    """Return the folders that may hold the model file of a bundle: next to the bundle, and in the user's cache."""
    bundle = check_folder(path)
    folders = [user_folder() / suffix / fingerprint(bundle)]
    if bundle not in map(check_folder, EMBEDDED):  # the installed package is never written
        # abspath: the path of a bundle may be a dot.
        folders.insert(0, Path(f"{os.path.abspath(bundle)}.{suffix}"))  # noqa: PTH100 - resolve() would follow links
    return folders


def _find_proved(folders: list[Path], key: str, engine: type[FileEngine], precision: str) -> Path | None:
    """Return the first folder without a flaw whose file is verified in the precision."""
    intact = (folder for folder in folders if not _find_flaw(folder, key, engine, precision))
    return next((folder for folder in intact if _is_proved(folder, engine, precision)), None)


def _is_proved(folder: Path, engine: type[FileEngine], precision: str) -> bool:
    """Return whether the proof is of the installed versions, of the precision and, if it matters, of this CPU."""
    proof = read_own_proof(folder) or {}
    versions = proof.get("versions")
    if not isinstance(versions, dict) or any(versions.get(name) != version_of(name) for name in engine.packages):
        return False
    if precision != proof["precision"]:
        reduced = proof.get("reduced")
        proof = reduced.get(precision) if isinstance(reduced, dict) else None
    return isinstance(proof, dict) and (precision not in engine.cpu_dependent or proof.get("cpu") == processor()[1])


_own_proofs: dict[str, dict[str, Any]] = {}  # proofs of this process, needed if the user's cache cannot be written


def read_own_proof(folder: Path) -> dict[str, Any] | None:
    """Return the proof that was stored when this user built the files of a folder; None if another user built them."""
    try:
        path = _own_proof_path(read_json(folder / PROOF))
        proof = _own_proofs.get(path.name) or read_json(path)
        return proof if _own_proof_path(proof) == path else None
    except (CorruptFileError, KeyError, TypeError):
        return None


def _save_own_proof(folder: Path) -> None:
    """Copy the proof of a folder to the user's cache. If that cannot be written, print a note."""
    proof = read_json(folder / PROOF)
    path = _own_proof_path(proof)
    _own_proofs[path.name] = proof
    try:
        with atomic_file(path, force=True) as file:
            file.write(json.dumps(proof, indent=2).encode())
    except VitrailError as error:
        say(f"note: the proof cannot be stored, so the file is built again next time: {error}")


def _own_proof_path(proof: dict[str, Any]) -> Path:
    """Return the path of this user's copy of a proof: a hash of the bundle, the kind and the checksums of the files."""
    files = json.dumps([proof["bundle"], proof["kind"], proof["files"]], sort_keys=True)
    return user_folder() / "proved" / f"{hashlib.sha256(files.encode()).hexdigest()}.json"


def _find_flaw(folder: Path, key: str, engine: type[FileEngine], precision: str) -> str:
    """Return the reason why the model file in a folder cannot be used, or "" if it can be used."""
    try:
        verify_checksums(folder, (PROOF,))
        proof = read_json(folder / PROOF)
        if (proof["format"], proof["bundle"]) != (FORMAT, key):
            return "belongs to another version of the bundle"
        expected = engine.folder_suffixes[precision], engine.precisions_of_file(precision)[0]
        if (proof.get("kind"), proof["precision"]) != expected:  # an export, for example
            return "is not a file of this engine"
        files = {name: digest for name, digest in read_json(folder / MANIFEST)["files"].items() if name != PROOF}
        if not files or proof["files"] != files:
            return "is corrupt"
        verify_checksums(folder, files)
    except (CorruptFileError, KeyError, TypeError, OSError):
        return "is corrupt"
    return "" if read_own_proof(folder) is not None else "was not built by this user on this machine"
