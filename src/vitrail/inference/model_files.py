"""The files that engines run: made once for a bundle, in a folder beside it, or in the user's cache if that cannot be
written.

The bundle itself never changes. The folder `BUNDLE.KIND` (`BUNDLE.onnx`, `BUNDLE.onnx-int8`, `BUNDLE.openvino`) holds

model.onnx, ...   the model, as the engine wrote it
proof.json        what it was made from, by which versions, and how its outputs differ from torch's
manifest.json     SHA-256 of all of these

Such a folder may come with a stranger's bundle, and then all three are the stranger's. So a folder is used only if its
files are those that were made and proved for this user: `proved/HASH.json` in the user's cache holds a copy of the
proof, named by a hash of the bundle's fingerprint and the checksums of the files. Other files are not even opened. To
prove them would not do: the images of the proof are public, and a graph can answer these rightly and others not.
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

FORMAT = 6  # of what engines write: what another version wrote is made anew
PROOF = "proof.json"


def fingerprint(bundle: Path) -> str:
    """A hash that changes with any byte of any file of the bundle."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise CorruptFileError(path=bundle / MANIFEST, cause=f"cannot be read ({error.strerror})") from None


def is_of(folder: Path, key: str) -> bool:
    """Whether a folder holds the file of the bundle with this fingerprint."""
    try:
        return read_json(folder / PROOF)["bundle"] == key
    except (CorruptFileError, KeyError, TypeError):
        return False


def ready(path: str | Path, engine: type[FileEngine], precision: str) -> Path:
    """The folder with the bundle's file for an engine, verified. It is made if it is missing, damaged or of another
    state of the bundle."""
    bundle = check_folder(path)
    key, places = fingerprint(bundle), _places(path, engine.kinds[precision])
    if (found := _intact(places, key, engine, precision)) is not None:
        return found
    from vitrail.inference.build_model_file import build_model_file

    place = next((place for place in places if can_replace(place) and _is_of_engine(place)), None)
    if place is None:
        tried = " and ".join(repr(str(place)) for place in places)
        raise UsageError(
            f"File of engine {engine.name} must go to a folder that can be written, got {tried}."
            " Set $VITRAIL_HOME to one that can, or use engine torch."
        )
    # Of processes that want it at the same time, one makes it and the others wait. The folder is exchanged as a whole,
    # so its lock lies elsewhere: in the user's cache, or else beside it.
    beside = places[-1] if can_replace(places[-1]) else place
    lock = beside.with_name(f".{beside.name}.lock")
    with file_lock(lock, lambda holder: say(f"waiting for {place}, which {holder} makes")) as is_held:
        if not is_held:
            say(f"note: {str(place.parent)!r} has no locks: processes that start at the same time make the file twice")
        if (found := _intact(places, key, engine, precision)) is not None:
            return found
        earlier = next((place for place in places if not _flaw(place, key, engine, precision)), None)
        if earlier is not None:
            say(f"{earlier} is not proved in {precision} with this version and CPU, and is proved again")
        elif os.path.lexists(place):
            say(f"{place} {_flaw(place, key, engine, precision)} and is made again")
        build_model_file(bundle, place, engine, precision, earlier)
        _keep_proof(place)
    return place


def is_intact(folder: Path, key: str, engine: type[FileEngine], precision: str) -> bool:
    """Whether a folder holds the verified file of an engine for the bundle with this fingerprint."""
    return not _flaw(folder, key, engine, precision)


def kept(bundle: Path, key: str, engine: type[FileEngine], precision: str) -> Path | None:
    """The folder with the file of an engine for the bundle of this fingerprint, verified, if there is one."""
    return _intact(_places(bundle, engine.kinds[precision]), key, engine, precision)


def _is_of_engine(place: Path) -> bool:
    """Whether a folder is free or holds nothing but what engines write. An export or a bundle of the same name is
    somebody's work."""
    names = {file.name for file in place.iterdir()} if os.path.lexists(place) else set()
    return all(name in (MANIFEST, PROOF) or name.startswith("model.") for name in names)


def _places(path: str | Path, kind: str) -> list[Path]:
    bundle = check_folder(path)
    places = [user_folder() / kind / fingerprint(bundle)]
    if bundle not in map(check_folder, EMBEDDED):  # the package itself never changes
        # abspath: a bundle may be given as a dot.
        places.insert(0, Path(f"{os.path.abspath(bundle)}.{kind}"))  # noqa: PTH100 - resolve() would follow links
    return places


def _intact(places: list[Path], key: str, engine: type[FileEngine], precision: str) -> Path | None:
    """The first place that has no flaw and is proved in the precision, with the engine's version and, if that matters,
    on a CPU like this one."""
    fine = (place for place in places if not _flaw(place, key, engine, precision))
    return next((place for place in fine if _is_proved(place, engine, precision)), None)


def _is_proved(folder: Path, engine: type[FileEngine], precision: str) -> bool:
    proof = own_proof(folder) or {}
    versions = proof.get("versions")
    if not isinstance(versions, dict) or any(versions.get(one) != version_of(one) for one in engine.packages):
        return False
    if precision != proof["precision"]:
        reduced = proof.get("reduced")
        proof = reduced.get(precision) if isinstance(reduced, dict) else None
    return isinstance(proof, dict) and (precision not in engine.by_cpu or proof.get("cpu") == processor()[1])


_own_proofs: dict[str, dict[str, Any]] = {}  # of this process, where the user's cache cannot be written


def own_proof(folder: Path) -> dict[str, Any] | None:
    """The proof that was kept when the files of a folder were made for this user; None if somebody else made them."""
    try:
        path = _proof_path(read_json(folder / PROOF))
        proof = _own_proofs.get(path.name) or read_json(path)
        return proof if _proof_path(proof) == path else None
    except (CorruptFileError, KeyError, TypeError):
        return None


def _keep_proof(folder: Path) -> None:
    proof = read_json(folder / PROOF)
    path = _proof_path(proof)
    _own_proofs[path.name] = proof
    try:
        with atomic_file(path, force=True) as file:
            file.write(json.dumps(proof, indent=2).encode())
    except VitrailError as error:
        say(f"note: the proof cannot be kept, so the file is made again next time: {error}")


def _proof_path(proof: dict[str, Any]) -> Path:
    files = json.dumps([proof["bundle"], proof["kind"], proof["files"]], sort_keys=True)
    return user_folder() / "proved" / f"{hashlib.sha256(files.encode()).hexdigest()}.json"


def _flaw(folder: Path, key: str, engine: type[FileEngine], precision: str) -> str:
    """The reason why the folder cannot be used; empty if it can."""
    try:
        verify_checksums(folder, (PROOF,))
        proof = read_json(folder / PROOF)
        if (proof["format"], proof["bundle"]) != (FORMAT, key):
            return "belongs to another state of the bundle"
        known = proof.get("kind"), proof["precision"]
        if known != (engine.kinds[precision], engine.sharing(precision)[0]):  # an export, for example
            return "is no file of this engine"
        files = {name: sum for name, sum in read_json(folder / MANIFEST)["files"].items() if name != PROOF}
        if not files or proof["files"] != files:
            return "is damaged"
        verify_checksums(folder, files)
    except (CorruptFileError, KeyError, TypeError, OSError):
        return "is damaged"
    return "" if own_proof(folder) is not None else "was not made by this user on this machine"
