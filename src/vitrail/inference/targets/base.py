"""`vitrail export`: a model in the format of another runtime, with all that is needed to run it without vitrail.

The folder holds the model, labels.txt, preprocess.json, proof.json, and a README.md with a program that runs it. A
target is one class and one line of `TARGETS` in `inference.registry`.
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
from vitrail.inference.build_model_file import describe, open_source
from vitrail.inference.engine import Engine, EngineChoice, ExportSource, import_engine_package
from vitrail.inference.model_files import FORMAT, PROOF
from vitrail.inference.proof import crop_images_for_proof, run_engine
from vitrail.inference.registry import TARGETS
from vitrail.inference.targets.readme import write_readme
from vitrail.inference.torch_engine import TorchEngine

LABELS, PREPROCESS = "labels.txt", "preprocess.json"
_DIGITS = 9  # of a number of images


class ExportOptions(NamedTuple):
    """What is to be written."""

    precision: str = "float32"
    batch: int | None = None
    """Number of images of a call; None: any."""


class Target(abc.ABC):
    """One target."""

    name: ClassVar[str]
    engine: ClassVar[str]
    """The engine that runs the same file; what `vitrail bench` found of it is added to the proof."""
    precisions: ClassVar[tuple[str, ...]]
    packages: ClassVar[tuple[str, ...]]
    """What is needed to write it and to run it for its proof."""
    extra: ClassVar[str]
    """The extra that installs these."""
    imports: ClassVar[str]
    """What the program in README.md imports besides numpy and Pillow."""
    program: ClassVar[str]
    """Lines of that program: from `pixels`, float32 (batch, channels, height, width), to `logits` of the first image.
    `{model}` is the model's path in the folder."""
    notes: ClassVar[str] = ""
    """More for README.md."""

    @classmethod
    def check(cls, precision: str) -> None:
        """Refuse a precision that the target does not have, and missing packages."""
        if precision not in cls.precisions:
            raise UsageError(
                f"Precision must be one that target {cls.name} has ({', '.join(cls.precisions)}), got {precision!r}."
            )
        for package in cls.packages:
            import_engine_package(package, cls.extra)

    @classmethod
    def program_for(cls, model: str, precision: str) -> str:
        """The lines of `program` for a model at this path in the folder."""
        return cls.program.format(model=model)

    @classmethod
    @abc.abstractmethod
    def write(cls, source: ExportSource, folder: Path, order: ExportOptions) -> Path:
        """Write the model's files into the folder. Returns the path of the model in it."""

    @classmethod
    @abc.abstractmethod
    def opened(cls, model: Path, info: BundleInfo, precision: str) -> Engine:
        """An engine that runs what was written."""


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
    """Write a bundle in the format of a target, and prove it. Returns the proof, in which `about` is noted, too."""
    target, order = check_export(path, output, to, precision=precision, batch=batch, force=force)
    source = open_source(check_folder(path))
    info = source.bundle.info
    pixels = crop_images_for_proof(info.config, info.preprocess)
    expected = run_engine(TorchEngine(source.bundle), pixels, order.batch)
    say(f"writing {output}, and comparing it with torch on {len(pixels)} images")
    with atomic_folder(output, force=force) as folder:
        model = target.write(source, folder, order)
        found = run_engine(target.opened(model, info, precision), pixels, order.batch)
        written = sorted(file for file in folder.rglob("*") if file.is_file())
        proof = {
            "format": FORMAT,
            "target": to,
            "files": {file.relative_to(folder).as_posix(): checksum(file) for file in written},
            "batch": batch,
            **describe(source, target.packages, found, expected, precision),
            **(about or {}),
        }
        if (known := BenchmarkStore.read(path).agreements().get(EngineChoice(target.engine, precision))) is not None:
            proof["measured"] = known._asdict()
        write_json(folder / PROOF, proof)
        write_json(folder / PREPROCESS, info.preprocess.to_json())
        if info.config.classes:
            write_labels(folder / LABELS, info)
        write_readme(folder, info, target, model.relative_to(folder).as_posix(), order.batch or 1, proof)
    return proof


def check_export(
    path: str, output: Path, to: str, *, precision: str, batch: str, force: bool
) -> tuple[type[Target], ExportOptions]:
    """The target of this name and what it is to write. Refuses what cannot be written."""
    TARGETS.check(to)
    target, order = TARGETS[to], ExportOptions(precision, _parse_batch(batch))
    target.check(precision)
    refuse_foreign(output)
    check_output(output, force=force)
    bundle, place = check_folder(path).resolve(), output.resolve()
    if place == bundle or bundle in place.parents or place in bundle.parents:
        raise UsageError(f"Output must be outside the bundle, got {str(output)!r}. Choose another path.")
    if (output / MANIFEST).exists() and not (output / PROOF).exists():
        raise UsageError(f"Output must be new or an earlier export, got {str(output)!r}. Choose another path.")
    return target, order


def write_labels(path: Path, info: BundleInfo) -> None:
    """Write a line for each class: its name, or its number without one."""
    labels = info.labels or tuple(map(str, range(info.config.classes)))
    write_text(path, "".join(" ".join(label.splitlines()) + "\n" for label in labels))


def _parse_batch(text: str) -> int | None:
    if text == "any":
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS:
        raise UsageError(f"Batch must be a number of images or any, got {text!r}.")
    return check_integer("batch", int(text), low=1, high=4096)
