"""Find the folder of a bundle and read its configuration, without torch."""

import contextlib
import functools
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from vitrail.bundles.catalogue import catalogue, suggest_published
from vitrail.bundles.remote.registry import remote_prefix
from vitrail.core.errors import CorruptFileError, MissingError, UsageError, VitrailError, did_you_mean, suggest_path
from vitrail.core.files import MANIFEST, read_json, verify_checksums
from vitrail.core.registry import Registry
from vitrail.models import zoo
from vitrail.models.config import ModelConfig, read_model
from vitrail.models.families import FAMILIES
from vitrail.models.positions import POSITIONS

FORMAT = 2
"""Newest version of the bundle format. Bundles with the decision rule `SingleLabel` are still written as format 1."""
DECISION_RULE_FILE = "answer.json"
"""Name of the file with the decision rule, in format 2."""
FILES = ("config.json", "model.safetensors", "preprocess.json", "labels.json", "provenance.json", "README.md")

EMBEDDED = ("fashion",)
"""Bundles that ship with the package, by name."""

_READ_ATTEMPTS = 10

_OTHER_LIBRARY_KEYS = {"architecture", "architectures", "model_type"}  # in the config.json of timm and Hugging Face


def check_folder(bundle: str | Path) -> Path:
    """Return the folder of a bundle, by its path or by the name of an embedded bundle, which takes precedence.

    Raise UsageError if the folder does not exist or is not a bundle. Files are not verified.
    """
    if isinstance(bundle, str) and bundle in EMBEDDED:
        return Path(str(resources.files("vitrail").joinpath("embedded", bundle)))
    if not isinstance(bundle, str | os.PathLike):
        raise UsageError(f"Bundle must be a path, a name or a vitrail.Bundle, got {type(bundle).__name__}.")
    path = Path(bundle)
    if not os.path.exists(path):  # noqa: PTH110 - unlike Path.exists, False for a name that no file can have
        if str(bundle) in catalogue() or remote_prefix(str(bundle)):
            raise UsageError(
                f"Bundle must be a folder that exists, got the public checkpoint {str(bundle)!r}. Fetch it first:"
                f" vitrail convert {bundle} FOLDER"
            )
        if zoo.is_model(str(bundle)):
            raise UsageError(
                f"Bundle must be a folder that exists, got {str(bundle)!r}, the name of a model without weights."
                " `vitrail weights` lists public ones, `vitrail convert` makes a bundle of them."
            )
        suggestion = suggest_path(path, _bundle_at) or did_you_mean(str(path), EMBEDDED) or suggest_published(str(path))
        raise UsageError(f"Bundle must be a folder that exists, got {str(path)!r}.{suggestion}")
    if not path.is_dir():
        raise UsageError(f"Bundle must be a folder, got the file {str(path)!r}.")
    if not (path / "config.json").exists() and (path / "bundle" / "config.json").exists():
        raise UsageError(f"Bundle must be a bundle, got the run {str(path)!r}. Did you mean {str(path / 'bundle')!r}?")
    if (path / "inspect.json").exists():
        raise UsageError(f"Bundle must be a bundle, got {str(path)!r}, which `vitrail inspect` wrote.")
    if not (path / MANIFEST).exists() and not (path / "config.json").exists():
        raise UsageError(f"Bundle must be a folder that vitrail wrote, got {str(path)!r} without {MANIFEST}.")
    return path


Options = ParamSpec("Options")
Result = TypeVar("Result")


def reread_if_replaced(
    read: Callable[Concatenate[str | Path, Options], Result],
) -> Callable[Concatenate[str | Path, Options], Result]:
    """Decorate a function that reads a bundle: call it again if the folder was replaced while it was reading.

    `vitrail rename` and training runs replace bundles. Files of two versions do not fit together, and look corrupt.
    """

    @functools.wraps(read)
    def read_again(path: str | Path, /, *arguments: Options.args, **options: Options.kwargs) -> Result:
        for _ in range(_READ_ATTEMPTS):
            folder = check_folder(path)
            with contextlib.ExitStack() as stack:
                # It stays open, because file systems give the inode of a removed folder to the next one.
                with contextlib.suppress(OSError):  # a folder that can be entered, but not listed
                    stack.callback(os.close, os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
                status = folder.stat()
                try:
                    outcome = read(path, *arguments, **options)
                except CorruptFileError as error:
                    outcome = error
                with contextlib.suppress(OSError):  # it was removed
                    if os.path.samestat(status, folder.stat()):
                        break
        else:
            raise CorruptFileError(
                path=path, cause="changed each time it was read", advice="Wait until no other process writes to it."
            )
        if isinstance(outcome, CorruptFileError):
            raise outcome
        return outcome

    return read_again


def find_config(model: str) -> ModelConfig:
    """Return the configuration of a model name, of a public checkpoint, or of the bundle at a path."""
    if zoo.is_model(model):
        return zoo.find(model)
    if model in catalogue():
        return catalogue()[model].config
    if model in EMBEDDED or (model and os.path.exists(model)):  # noqa: PTH110 - as in `check_folder`
        return read_config(check_folder(model))
    with contextlib.suppress(UsageError):  # a name of timm with a tag
        return zoo.find(model)
    raise UsageError(
        f"Model must be a name that `vitrail models` lists, or a bundle that exists, got {model!r}."
        f"{(suggest_path(model, _bundle_at) if model else '') or zoo.suggest_model(model)}"
    )


def find_licence(model: str) -> str | None:
    """Return the licence of the weights of a public checkpoint or of a bundle; None for the name of a model.

    The licence of a bundle is "unknown" if its provenance does not state it, as on its card.
    """
    if zoo.is_model(model):
        return None
    if model in catalogue():
        return catalogue()[model].licence
    if model not in EMBEDDED and not os.path.exists(model):  # noqa: PTH110 - as in `check_folder`
        return None
    folder = check_folder(model)
    verify_checksums(folder, ("provenance.json",))
    provenance = read_json(folder / "provenance.json")
    return str(provenance.get("licence", "unknown")) if isinstance(provenance, dict) else "unknown"


def _bundle_at(path: Path) -> Path | None:
    """Return the bundle at a path, or the bundle of the run at this path. Return None if there is neither."""
    for folder in (path, path / "bundle"):
        if os.path.isfile(folder / "config.json"):  # noqa: PTH113 - Path.is_file raises for folders of other users
            return folder
    return None


def read_config(folder: Path) -> ModelConfig:
    """Read the model's configuration from the folder of a bundle, and verify it against the manifest.

    Raise UsageError for a folder of another library, VitrailError for a newer format, before any other file is read.
    """
    path = folder / "config.json"
    fields = read_json(path)
    version = fields.pop("format", None) if isinstance(fields, dict) else None
    if version is None and isinstance(fields, dict) and _OTHER_LIBRARY_KEYS & fields.keys():
        raise UsageError(
            f"Bundle must be of vitrail's own format, got {str(folder)!r}, which is another library's. Convert it:"
            f" vitrail convert {folder} NEW"
        )
    if type(version) is not int or version < 1:
        raise CorruptFileError(
            path=path, cause="is corrupt: it does not state its format", advice="Restore it from a copy."
        )
    if version > FORMAT:
        raise VitrailError(f"{str(folder)!r} has format {version}; this vitrail reads up to {FORMAT}. Upgrade vitrail.")
    for name in (MANIFEST, *FILES, *([DECISION_RULE_FILE] if version > 1 else [])):
        if not (folder / name).is_file():
            raise CorruptFileError(
                path=folder / name, cause="is missing or not a file", advice="Restore it from a copy."
            )
    if version == 1 and (folder / DECISION_RULE_FILE).exists():  # an older version would read its logits as one class
        raise CorruptFileError(path=folder / DECISION_RULE_FILE, cause="must not be in a bundle of format 1")
    verify_checksums(folder, ("config.json",))
    if "extensions" in fields:
        _check_extensions(folder, fields.pop("extensions"))
    try:
        return read_model(fields)
    except UsageError as error:
        raise CorruptFileError(path=path, cause=f"is not a valid model: {error}") from None


def _check_extensions(folder: Path, extensions: object) -> None:
    """Raise MissingError if a bundle needs an extension that is not installed. No extension is imported."""
    if not isinstance(extensions, dict):
        raise CorruptFileError(path=folder / "config.json", cause="is corrupt: extensions must be an object")
    registries: dict[str, Registry] = {registry.category: registry for registry in (FAMILIES, POSITIONS)}
    for extension, package in extensions.items():
        category, _, name = extension.partition(".")
        if category not in registries or name not in registries[category]:
            raise MissingError(
                f"Bundle {str(folder)!r} needs the extension {extension!r} of package {str(package)!r}, which is not"
                " installed. Install the package first."
            )
