"""Where the ONNX file of a bundle lies: in a folder beside it, or in the user's cache where that cannot be written.

The bundle itself never changes. The folder holds

model.onnx      the model; large ones keep their weights in model.onnx.data
proof.json      which bundle it was made from, by which versions, and how near its answers are to torch's
speed.json      which engine was faster here, once that was asked (see `engines.choose`)
manifest.json   SHA-256 of the first two
"""

import hashlib
import os
from pathlib import Path

from vitrail.configs.bundle import EMBEDDED, check_folder
from vitrail.console import say
from vitrail.errors import DamagedError, UsageError
from vitrail.storage import MANIFEST, can_replace, read_json, user_folder, verify

FORMAT = 1  # of what `engines.export` writes: what another version wrote is made anew
MODEL, PROOF, SPEED = "model.onnx", "proof.json", "speed.json"


def fingerprint(bundle: Path) -> str:
    """Changes with any byte of any file of the bundle."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise DamagedError(f"{str(bundle / MANIFEST)!r} cannot be read ({error.strerror}).") from None


def ready(path: str | Path) -> Path:
    """The folder with the bundle's ONNX file: whole, and made from this very bundle. If there is none, it is made."""
    bundle = check_folder(path)
    key = fingerprint(bundle)
    # abspath: a bundle may be given as a dot.
    beside = Path(os.path.abspath(bundle) + ".onnx")  # noqa: PTH100 - resolve() would follow links
    places = [user_folder() / "onnx" / key]
    if path not in EMBEDDED:  # the package itself never changes
        places.insert(0, beside)
    flaws = {}
    for place in places:
        flaws[place] = _flaw(place, key)
        if not flaws[place]:
            return place
    from vitrail.engines.export import export

    place = next((place for place in places if can_replace(place)), None)
    if place is None:
        tried = " and ".join(repr(str(place)) for place in places)
        raise UsageError(
            f"ONNX file must go to a folder that can be written, got {tried}."
            " Set $VITRAIL_HOME to one that can, or use engine torch."
        )
    if os.path.lexists(place):
        say(f"{place} {flaws[place]} and is made anew")
    export(bundle, place, key)
    return place


def _flaw(folder: Path, key: str) -> str:
    """Why the folder cannot be used; empty if it can."""
    try:
        verify(folder, (PROOF,))
        proof = read_json(folder / PROOF)
        if (proof["format"], proof["bundle"]) != (FORMAT, key):
            return "belongs to another state of the bundle"
        verify(folder, proof["files"])
    except (DamagedError, KeyError, TypeError):
        return "is damaged"
    return ""
