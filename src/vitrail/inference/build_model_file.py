"""Build the model file of an engine: write it, verify it against torch, and only then move it to its folder."""

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
from vitrail.inference.model_files import FORMAT, PROOF, fingerprint, read_own_proof
from vitrail.inference.proof import compare_outputs, crop_images_for_proof, run_engine
from vitrail.inference.torch_engine import TorchEngine


def build_model_file(
    path: Path, target: Path, engine: type[FileEngine], precision: str, earlier: Path | None = None
) -> None:
    """Write the folder `target` for the bundle at `path` with an engine's model file and its proof.

    An existing folder is replaced. With an `earlier` folder, its files are copied and only verified again.
    """
    say(f"building {target} (once for this bundle)")
    source = open_source(path)
    info = source.bundle.info
    pixels = crop_images_for_proof(info.config, info.preprocess)
    expected = run_engine(TorchEngine(source.bundle), pixels)
    exact, *reduced_precisions = engine.precisions_of_file(precision)
    earlier_proof = None if earlier is None else read_own_proof(earlier)
    with atomic_folder(target, force=True, owned=True) as folder:
        # The bundle may have been replaced since.
        if earlier is not None and earlier_proof is not None and earlier_proof["bundle"] == source.key:
            for name in earlier_proof["files"]:
                shutil.copyfile(earlier / name, folder / name)
        else:
            engine.write(source, folder, precision)
        files = {file.name: checksum(file) for file in sorted(folder.iterdir())}
        proof: dict[str, Any] = {"format": FORMAT, "kind": engine.folder_suffixes[precision], "files": files}
        outputs = _run_new_file(engine, folder, info, exact, pixels)
        proof |= build_proof(source, engine.packages, outputs, expected, exact)
        earlier_reduced = None if earlier_proof is None else earlier_proof.get("reduced")
        proof |= {"cpu": processor()[1], "reduced": earlier_reduced if isinstance(earlier_reduced, dict) else {}}
        for reduced in reduced_precisions:
            try:
                engine.check(reduced)
                outputs = _run_new_file(engine, folder, info, reduced, pixels)
                differences = compare_outputs(outputs, expected, info.answer, reduced)
                proof["reduced"] |= {reduced: {"cpu": processor()[1], **differences}}
            except VitrailError:
                if reduced == precision:  # the user did not request the other precisions: they may fail
                    raise
        write_json(folder / PROOF, proof)
    differences = proof["reduced"].get(precision, proof)
    say(
        f"verified on {differences['pictures']} images: {differences['same_answers']} predictions are the same as with"
        f" torch, largest logit difference {differences['max_logit_difference']:.1e}"
    )


def _run_new_file(
    engine: type[FileEngine], folder: Path, info: BundleInfo, precision: str, pixels: np.ndarray
) -> EngineOutputs:
    """Return the outputs of a model file that was just written.

    Raises UnprovedError instead of CorruptFileError: a new file is not corrupt, so the engine cannot run the model.
    """
    try:
        return run_engine(engine(folder, info, precision), pixels)
    except CorruptFileError as error:
        raise UnprovedError(f"Engine {engine.name} cannot run this model in {precision} here: {error.cause}.") from None


def open_source(path: Path) -> ExportSource:
    """Load a bundle for export, in float32 and evaluation mode. Raises if it has no model that can compute."""
    key, bundle = "", None
    while bundle is None or key != fingerprint(path):  # a training run may replace the bundle meanwhile
        key = fingerprint(path)
        bundle = load(path)
    bundle.info.check_computable()
    bundle.model.float().eval()
    return ExportSource(path, bundle, key)


def build_proof(
    source: ExportSource, packages: tuple[str, ...], outputs: EngineOutputs, expected: EngineOutputs, precision: str
) -> dict[str, Any]:
    """Return the content of proof.json without the files: bundle, precision, versions and differences from torch.

    Raises UnprovedError if the outputs differ too much from the expected ones.
    """
    versions = {package: version_of(package) for package in dict.fromkeys(("torch", *packages))}
    return {
        "bundle": source.key,
        "precision": precision,
        "versions": {"vitrail": __version__, **versions},
        **compare_outputs(outputs, expected, source.bundle.info.answer, precision),
    }
