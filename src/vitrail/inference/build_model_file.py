"""Making the file of an engine: written, proved against torch, and put in its place only then."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from vitrail import __version__
from vitrail.bundles.bundle import load
from vitrail.bundles.metadata import BundleInfo
from vitrail.core.errors import CorruptFileError, UnprovedError, VitrailError
from vitrail.core.files import atomic_folder, checksum, write_json
from vitrail.core.terminal import say
from vitrail.inference.engine import EngineOutputs, ExportSource, FileEngine, processor, version_of
from vitrail.inference.model_files import FORMAT, PROOF, fingerprint, own_proof
from vitrail.inference.proof import crop_images_for_proof, prove, run_engine
from vitrail.inference.torch_engine import TorchEngine


def build_model_file(
    path: Path, target: Path, engine: type[FileEngine], precision: str, earlier: Path | None = None
) -> None:
    """Write the folder `target` for the bundle at `path`, and prove it; what is there is replaced. The files of an
    `earlier` folder are only proved again."""
    say(f"making {target} (once for this bundle)")
    source = open_source(path)
    info = source.bundle.info
    pixels = crop_images_for_proof(info.config, info.preprocess)
    expected = run_engine(TorchEngine(source.bundle), pixels)
    exact, *others = engine.sharing(precision)
    known = None if earlier is None else own_proof(earlier)
    with atomic_folder(target, force=True, owned=True) as folder:
        if earlier is not None and known is not None and known["bundle"] == source.key:  # not replaced since
            for name in known["files"]:
                shutil.copyfile(earlier / name, folder / name)
        else:
            engine.write(source, folder, precision)
        files = {file.name: checksum(file) for file in sorted(folder.iterdir())}
        proof: dict[str, Any] = {"format": FORMAT, "kind": engine.kinds[precision], "files": files}
        proof |= describe(source, engine.packages, _answer(engine, folder, info, exact, pixels), expected, exact)
        before = None if known is None else known.get("reduced")
        proof |= {"cpu": processor()[1], "reduced": before if isinstance(before, dict) else {}}
        for reduced in others:
            try:
                engine.check(reduced)
                found = _answer(engine, folder, info, reduced, pixels)
                proved = prove(found, expected, info.answer, reduced)
                proof["reduced"] |= {reduced: {"cpu": processor()[1], **proved}}
            except VitrailError:
                if reduced == precision:  # others may fail: nobody has asked for them
                    raise
        write_json(folder / PROOF, proof)
    shown = proof["reduced"].get(precision, proof)
    say(
        f"checked on {shown['pictures']} images: {shown['same_answers']} answers as torch's, largest logit difference"
        f" {shown['max_logit_difference']:.1e}"
    )


def _answer(
    engine: type[FileEngine], folder: Path, info: BundleInfo, precision: str, pixels: np.ndarray
) -> EngineOutputs:
    """Answers of a file that was just written: if they cannot be had, it is not the file that is damaged."""
    try:
        return run_engine(engine(folder, info, precision), pixels)
    except CorruptFileError as error:
        raise UnprovedError(f"Engine {engine.name} cannot run this model in {precision} here: {error.cause}.") from None


def open_source(path: Path) -> ExportSource:
    """A bundle that can be exported, loaded."""
    key, bundle = "", None
    while bundle is None or key != fingerprint(path):  # a training run may replace it meanwhile
        key = fingerprint(path)
        bundle = load(path)
    bundle.info.check_computable()
    bundle.model.float().eval()
    return ExportSource(path, bundle, key)


def describe(
    source: ExportSource, packages: tuple[str, ...], found: EngineOutputs, expected: EngineOutputs, precision: str
) -> dict[str, Any]:
    """What a proof says besides its files. Raises if the outputs differ by too much."""
    versions = {package: version_of(package) for package in dict.fromkeys(("torch", *packages))}
    return {
        "bundle": source.key,
        "precision": precision,
        "versions": {"vitrail": __version__, **versions},
        **prove(found, expected, source.bundle.info.answer, precision),
    }
