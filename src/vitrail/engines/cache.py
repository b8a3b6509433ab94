"""The ONNX file of a bundle: in a folder beside it, or in the user's cache if that cannot be written.

The bundle itself never changes. The folder holds

model.onnx      the model; large ones keep their weights in model.onnx.data
proof.json      the bundle and the versions it was made from, and the difference of its outputs from torch's
speed.json      measured speeds of the engines (see `engines.choose`)
manifest.json   SHA-256 of the first two
"""

import hashlib
import os
from pathlib import Path

from vitrail.configs.bundle import EMBEDDED, check_folder
from vitrail.console import say
from vitrail.errors import DamagedError, UsageError
from vitrail.storage import MANIFEST, can_replace, locked, read_json, user_folder, verify

FORMAT = 2  # of what `engines.export` writes: what another version wrote is made anew
MODEL, PROOF, SPEED = "model.onnx", "proof.json", "speed.json"


def fingerprint(bundle: Path) -> str:
    """A hash that changes with any byte of any file of the bundle."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise DamagedError(path=bundle / MANIFEST, cause=f"cannot be read ({error.strerror})") from None


def ready(path: str | Path) -> Path:
    """The folder with the bundle's ONNX file, verified. It is made if it is missing, damaged or of another state of the
    bundle."""
    bundle = check_folder(path)
    key = fingerprint(bundle)
    # abspath: a bundle may be given as a dot.
    beside = Path(os.path.abspath(bundle) + ".onnx")  # noqa: PTH100 - resolve() would follow links
    places = [user_folder() / "onnx" / key]
    if path not in EMBEDDED:  # the package itself never changes
        places.insert(0, beside)
    if (found := _intact(places, key)) is not None:
        return found
    from vitrail.engines.export import export

    place = next((place for place in places if can_replace(place)), None)
    if place is None:
        tried = " and ".join(repr(str(place)) for place in places)
        raise UsageError(
            f"ONNX file must go to a folder that can be written, got {tried}."
            " Set $VITRAIL_HOME to one that can, or use engine torch."
        )
    # Of processes that want it at the same time, one makes it and the others wait. The folder is exchanged as a whole,
    # so its lock lies elsewhere: in the user's cache, or else beside it.
    lock = (places[-1] if can_replace(places[-1]) else place).with_suffix(".lock")
    with locked(lock, lambda holder: say(f"waiting for {place}, which {holder} makes")) as is_held:
        if not is_held:
            say(f"note: {str(place.parent)!r} has no locks: processes that start at the same time make the file twice")
        if (found := _intact(places, key)) is not None:
            return found
        if os.path.lexists(place):
            say(f"{place} {_flaw(place, key)} and is made again")
        export(bundle, place, key)
    return place


def _intact(places: list[Path], key: str) -> Path | None:
    return next((place for place in places if not _flaw(place, key)), None)


def _flaw(folder: Path, key: str) -> str:
    """The reason why the folder cannot be used; empty if it can."""
    try:
        verify(folder, (PROOF,))
        proof = read_json(folder / PROOF)
        if (proof["format"], proof["bundle"]) != (FORMAT, key):
            return "belongs to another state of the bundle"
        verify(folder, {MODEL, *proof["files"]})
    except (DamagedError, KeyError, TypeError):
        return "is damaged"
    return ""
