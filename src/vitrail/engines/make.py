"""Making the file of an engine: written, proved against torch, and put in its place only then."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitrail import __version__
from vitrail.console import say
from vitrail.engines.base import FileEngine, Outputs, Source
from vitrail.engines.cache import FORMAT, PROOF, fingerprint
from vitrail.engines.eager import TorchEngine
from vitrail.engines.proof import answer, prove, sample_for
from vitrail.errors import VitrailError
from vitrail.storage import atomic_folder, checksum, write_json
from vitrail.weights.bundle import load


def make(path: Path, target: Path, engine: type[FileEngine], precision: str) -> None:
    """Write the folder `target` for the bundle at `path`; an earlier one is replaced."""
    say(f"making {target} (once for this bundle)")
    source = open_source(path)
    parts = source.bundle.parts
    pixels = sample_for(parts.config, parts.preprocess)
    expected = answer(TorchEngine(source.bundle), pixels)
    with atomic_folder(target, force=True) as folder:
        engine.write(source, folder, precision)
        files = {file.name: checksum(file) for file in sorted(folder.iterdir())}
        exact = engine.sharing(precision)[0]
        proof: dict[str, Any] = {"format": FORMAT, "kind": engine.kinds[precision], "files": files, "reduced": {}}
        proof |= describe(source, engine.packages, answer(engine(folder, parts, exact), pixels), expected, exact)
        for reduced in engine.sharing(precision)[1:]:
            try:
                engine.check(reduced)
                found = answer(engine(folder, parts, reduced), pixels)
                proof["reduced"][reduced] = prove(found, expected, parts.answer, reduced)
            except VitrailError:
                if reduced == precision:  # others may fail: nobody has asked for them
                    raise
        write_json(folder / PROOF, proof)
    say(
        f"checked on {proof['pictures']} images: {proof['same_answers']} answers as torch's, largest logit difference"
        f" {proof['max_logit_difference']:.1e}"
    )


def open_source(path: Path) -> Source:
    """A bundle that can be exported, loaded."""
    key, bundle = "", None
    while bundle is None or key != fingerprint(path):  # a training run may replace it meanwhile
        key = fingerprint(path)
        bundle = load(path)
    bundle.parts.check_computable()
    bundle.model.float().eval()
    return Source(path, bundle, key)


def describe(
    source: Source, packages: tuple[str, ...], found: Outputs, expected: Outputs, precision: str
) -> dict[str, Any]:
    """What a proof says besides its files. Raises if the outputs differ by too much."""
    versions = {package: version(package) for package in dict.fromkeys(("torch", *packages))}
    return {
        "bundle": source.key,
        "precision": precision,
        "versions": {"vitrail": __version__, **versions},
        **prove(found, expected, source.bundle.parts.answer, precision),
    }
