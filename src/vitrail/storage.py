"""Folders that are whole or absent: written aside, flushed to disk, named in a manifest of checksums, then renamed.

A reader trusts a folder only if its manifest, written last, agrees with every byte of every file it names.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from vitrail.errors import DamagedError, UsageError, VitrailError

MANIFEST = "manifest.json"


@contextlib.contextmanager
def whole_folder(path: Path, *, force: bool = False) -> Generator[Path]:
    """Yield an empty folder to write into; it becomes `path`, with its manifest, only if the block succeeds.

    An existing `path` is refused unless `force`; then it stays until the new folder is complete.
    """
    path = Path(path)
    refuse_existing(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.writing-", dir=path.parent))
    except OSError as error:
        raise UsageError(
            f"Output must be in a folder that can be written, got {str(path)!r} ({_reason(error)})."
        ) from None
    try:
        yield aside
        _write_manifest(aside)
        _flush(aside)
        _put_in_place(aside, path)
    except OSError as error:
        raise VitrailError(f"Writing {str(path)!r} failed ({_reason(error)}); nothing was left there.") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def refuse_existing(path: Path, *, force: bool) -> None:
    """An output that exists is never overwritten by accident."""
    if (path.exists() or path.is_symlink()) and not force:
        raise UsageError(
            f"Output must not exist yet, got {str(path)!r}. Choose another path, or overwrite it with --force."
        )


def read_json(path: Path) -> Any:
    """The JSON document in a file that should hold one."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise DamagedError(f"{str(path)!r} is damaged: it is not a JSON document. Restore it from a copy.") from None
    except OSError as error:
        raise DamagedError(f"{str(path)!r} cannot be read ({_reason(error)}).") from None


def write_json(path: Path, document: object) -> None:
    """The one way in which we write JSON, so that equal content is equal bytes."""
    path.write_text(_canonical(document), encoding="utf-8")


def verify(folder: Path, names: tuple[str, ...] | None = None) -> None:
    """Check files of `folder` against its manifest: all of them, or those of `names`."""
    manifest_path = folder / MANIFEST
    manifest = read_json(manifest_path)
    files = manifest.get("files") if isinstance(manifest, dict) and manifest.keys() == {"files"} else None
    # Written by `_canonical`, read back the same: any changed byte of the manifest shows here or in a checksum.
    if not isinstance(files, dict) or manifest_path.read_bytes() != _canonical(manifest).encode():
        raise DamagedError(
            f"{str(manifest_path)!r} is damaged: it is not a manifest as written. Restore it from a copy."
        )
    for name in names or files:
        if name not in files:
            raise DamagedError(f"{str(manifest_path)!r} is damaged: it does not name {name}. Restore it from a copy.")
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{str(path)!r} is missing. Restore it from a copy.")
        if _checksum(path) != files[name]:
            raise DamagedError(
                f"{str(path)!r} is damaged: its checksum is not the one recorded. Restore it from a copy."
            )


def _write_manifest(folder: Path) -> None:
    files = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {"files": files})


def _canonical(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put_in_place(aside: Path, path: Path) -> None:
    """Rename `aside` to `path`. A folder in the way steps aside first, and comes back if the rename fails."""
    if path.exists() or path.is_symlink():
        replaced = Path(tempfile.mkdtemp(prefix=f".{path.name}.replaced-", dir=path.parent))
        path.rename(replaced / path.name)
        try:
            aside.rename(path)
        except OSError:
            (replaced / path.name).rename(path)
            raise
        finally:
            shutil.rmtree(replaced, ignore_errors=True)
    else:
        aside.rename(path)
    _flush_one(path.parent)


def _flush(folder: Path) -> None:
    """Everything onto the disk, and readable by others as usual: temporary files and some writers are private."""
    for path in folder.iterdir():
        path.chmod(0o644)
        _flush_one(path)
    folder.chmod(0o755)
    _flush_one(folder)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
