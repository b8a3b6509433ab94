"""The files that engines run: made once for a bundle, in a folder beside it, or in the user's cache if that cannot be
written.

The bundle itself never changes. The folder `BUNDLE.KIND` (`BUNDLE.onnx`, `BUNDLE.onnx-int8`, `BUNDLE.openvino`) holds

model.onnx, ...   the model, as the engine wrote it
proof.json        what it was made from, by which versions, and how its outputs differ from torch's
manifest.json     SHA-256 of all of these
"""

import hashlib
import os
from pathlib import Path

from vitrail.configs.bundle import EMBEDDED, check_folder
from vitrail.console import say
from vitrail.engines.base import FileEngine
from vitrail.errors import DamagedError, UsageError
from vitrail.storage import MANIFEST, can_replace, locked, read_json, user_folder, verify

FORMAT = 6  # of what engines write: what another version wrote is made anew
PROOF = "proof.json"


def fingerprint(bundle: Path) -> str:
    """A hash that changes with any byte of any file of the bundle."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise DamagedError(path=bundle / MANIFEST, cause=f"cannot be read ({error.strerror})") from None


def ready(path: str | Path, engine: type[FileEngine], precision: str) -> Path:
    """The folder with the bundle's file for an engine, verified. It is made if it is missing, damaged or of another
    state of the bundle."""
    bundle = check_folder(path)
    key, places = fingerprint(bundle), _places(path, engine.kinds[precision])
    if (found := _intact(places, key, engine, precision)) is not None:
        return found
    from vitrail.engines.make import make

    place = next((place for place in places if can_replace(place) and _is_of_engine(place)), None)
    if place is None:
        tried = " and ".join(repr(str(place)) for place in places)
        raise UsageError(
            f"File of engine {engine.name} must go to a folder that can be written, got {tried}."
            " Set $VITRAIL_HOME to one that can, or use engine torch."
        )
    # Of processes that want it at the same time, one makes it and the others wait. The folder is exchanged as a whole,
    # so its lock lies elsewhere: in the user's cache, or else beside it.
    lock = (places[-1] if can_replace(places[-1]) else place).with_suffix(".lock")
    with locked(lock, lambda holder: say(f"waiting for {place}, which {holder} makes")) as is_held:
        if not is_held:
            say(f"note: {str(place.parent)!r} has no locks: processes that start at the same time make the file twice")
        if (found := _intact(places, key, engine, precision)) is not None:
            return found
        if os.path.lexists(place):
            say(f"{place} {_flaw(place, key, engine, precision)} and is made again")
        make(bundle, place, engine, precision)
    return place


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
    return next((place for place in places if not _flaw(place, key, engine, precision)), None)


def _flaw(folder: Path, key: str, engine: type[FileEngine], precision: str) -> str:
    """The reason why the folder cannot be used; empty if it can."""
    try:
        verify(folder, (PROOF,))
        proof = read_json(folder / PROOF)
        if (proof["format"], proof["bundle"]) != (FORMAT, key):
            return "belongs to another state of the bundle"
        exact = engine.sharing(precision)[0]
        if (proof.get("kind"), proof["precision"]) != (engine.kinds[precision], exact):  # an export, for example
            return "is no file of this engine"
        if precision not in (exact, *proof.get("reduced", ())):
            return f"is not proved in {precision}"
        files = {name: sum for name, sum in read_json(folder / MANIFEST)["files"].items() if name != PROOF}
        if not files or proof["files"] != files:
            return "is damaged"
        verify(folder, files)
    except (DamagedError, KeyError, TypeError):
        return "is damaged"
    return ""
