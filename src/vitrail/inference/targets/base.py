"""`vitrail export`: write a model in the format of another runtime, with everything needed to run it without vitrail.

The folder holds the model, labels.txt, preprocess.json, proof.json, the program run.py, and a README.md that shows it.
A target is a class that is registered in `TARGETS` of `inference.registry`.
"""

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from vitrail.bundles.folder import check_folder
from vitrail.bundles.metadata import BundleInfo
from vitrail.core.errors import UsageError
from vitrail.core.files import MANIFEST, atomic_folder, check_output, checksum, refuse_foreign, write_json, write_text
from vitrail.core.settings import check_integer
from vitrail.core.terminal import say
from vitrail.inference.benchmark_store import BenchmarkStore
from vitrail.inference.build_model_file import build_proof, open_source
from vitrail.inference.engine import Engine, EngineChoice, ExportSource, import_engine_package
from vitrail.inference.model_files import FORMAT, PROOF
from vitrail.inference.proof import crop_images_for_proof, run_engine
from vitrail.inference.registry import TARGETS
from vitrail.inference.targets.program import PROGRAM, format_program
from vitrail.inference.targets.readme import write_readme
from vitrail.inference.torch_engine import TorchEngine

LABELS, PREPROCESS = "labels.txt", "preprocess.json"
_MAX_DIGITS = 9  # of --batch


class ExportOptions(NamedTuple):
    """Options of an exported model."""

    precision: str = "float32"
    batch: int | None = None
    """Number of images per call. None: any number."""


class Target(abc.ABC):
    """The format of a runtime: how a model is written, and how it is run to verify it."""

    name: ClassVar[str]
    engine: ClassVar[str]
    """The engine that runs the same file. Its results of `vitrail bench` are added to the proof."""
    precisions: ClassVar[tuple[str, ...]]
    packages: ClassVar[tuple[str, ...]]
    """Packages that are needed to write the model and to run it for its proof."""
    extra: ClassVar[str]
    """The extra that installs the packages."""
    imports: ClassVar[str]
    """Import statements of run.py, besides os, sys, numpy and Pillow."""
    program: ClassVar[str]
    """Lines of run.py that compute `logits` of the first image from `pixels`, float32 (batch, channels, height, width).
    `{model}` is replaced by the model's path in the folder, which is the working folder of these lines."""
    program_packages: ClassVar[tuple[str, ...]] = ()
    """Packages that run.py needs, besides numpy and Pillow, as pip knows them. Empty: the same as `packages`."""
    notes: ClassVar[str] = ""
    """Additional text in README.md."""

    @classmethod
    def check(cls, precision: str) -> None:
        """Raise if the target does not have the precision or a package is missing."""
        if precision not in cls.precisions:
            raise UsageError(
                f"Precision must be one that target {cls.name} has ({', '.join(cls.precisions)}), got {precision!r}."
            )
        for package in cls.packages:
            import_engine_package(package, cls.extra)

    @classmethod
    def program_for(cls, model: str, precision: str) -> str:
        """Return the lines of `program` for a model at this path in the folder."""
        return cls.program.format(model=model)

    @classmethod
    @abc.abstractmethod
    def write(cls, source: ExportSource, folder: Path, options: ExportOptions) -> Path:
        """Write the model's files into the folder, and return the path of the model."""

    @classmethod
    @abc.abstractmethod
    def opened(cls, model: Path, info: BundleInfo, precision: str) -> Engine:
        """Return an engine that runs the model that was just written."""


def export(
    path: str,
    output: Path,
    to: str,
    *,
    precision: str = "float32",
    batch: str = "any",
    force: bool = False,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the bundle at `path` in the format of target `to`, and verify it against torch.

    Returns the content of proof.json, to which `about` is added. Raises UnprovedError, and writes nothing, if the
    outputs differ too much from torch's.
    """
    target, options = check_export(path, output, to, precision=precision, batch=batch, force=force)
    source = open_source(check_folder(path))
    info = source.bundle.info
    pixels = crop_images_for_proof(info.config, info.preprocess)
    expected = run_engine(TorchEngine(source.bundle), pixels, options.batch)
    say(f"writing {output}, and comparing it with torch on {len(pixels)} images")
    with atomic_folder(output, force=force) as folder:
        model = target.write(source, folder, options)
        outputs = run_engine(target.opened(model, info, precision), pixels, options.batch)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        proof = {
            "format": FORMAT,
            "target": to,
            "files": {file.relative_to(folder).as_posix(): checksum(file) for file in files},
            "batch": batch,
            **build_proof(source, target.packages, outputs, expected, precision),
            **(about or {}),
        }
        agreement = BenchmarkStore.read(path).agreements().get(EngineChoice(target.engine, precision))
        if agreement is not None:
            proof["measured"] = agreement._asdict()
        write_json(folder / PROOF, proof)
        write_json(folder / PREPROCESS, info.preprocess.to_json())
        if info.config.classes:
            write_labels(folder / LABELS, info)
        model_name, batch_size = model.relative_to(folder).as_posix(), options.batch or 1
        program = format_program(info, target, model_name, precision, batch_size)
        write_text(folder / PROGRAM, program)
        write_readme(folder, info, target, model_name, batch_size, proof, program)
    return proof


def check_export(
    path: str, output: Path, to: str, *, precision: str, batch: str, force: bool
) -> tuple[type[Target], ExportOptions]:
    """Return the target with this name and its options. Raises UsageError if they or the output folder are invalid."""
    TARGETS.check(to)
    target, options = TARGETS[to], ExportOptions(precision, _parse_batch(batch))
    target.check(precision)
    refuse_foreign(output)
    check_output(output, force=force)
    bundle, folder = check_folder(path).resolve(), output.resolve()
    if folder == bundle or bundle in folder.parents or folder in bundle.parents:
        raise UsageError(f"Output must be outside the bundle, got {str(output)!r}. Choose another path.")
    if (output / MANIFEST).exists() and not (output / PROOF).exists():
        raise UsageError(f"Output must be new or an earlier export, got {str(output)!r}. Choose another path.")
    return target, options


def write_labels(path: Path, info: BundleInfo) -> None:
    """Write a text file with a line for each class: its name, or its number if the bundle has no names."""
    labels = info.labels or tuple(map(str, range(info.config.classes)))
    write_text(path, "".join(" ".join(label.splitlines()) + "\n" for label in labels))


def _parse_batch(text: str) -> int | None:
    """Convert the flag --batch to a batch size, or None for any."""
    if text == "any":
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise UsageError(f"Batch must be a number of images or any, got {text!r}.")
    return check_integer("batch", int(text), low=1, high=4096)
