"""Write folders and files atomically: under a temporary name, flushed to disk, then renamed.

A folder also gets a manifest with the checksums of its files, written last. A reader trusts the folder only if every
file has the checksum that the manifest states.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.core.errors import CorruptFileError, UsageError, VitrailError

MANIFEST = "manifest.json"
_MAX_DOCUMENT_BYTES = 64 * 2**20
_SYSTEM_FILES = re.compile(r"\.DS_Store|\.nfs.*|\.directory|desktop\.ini|Thumbs\.db")  # of file managers and NFS


@contextlib.contextmanager
def atomic_folder(path: Path, *, force: bool = False, owned: bool = False) -> Generator[Path]:
    """Yield an empty temporary folder; if the block succeeds, add a manifest and rename the folder to `path`.

    Raise UsageError if `path` exists, unless `force`. With `force`, an existing folder stays in place until the new one
    is complete, and is replaced only if vitrail wrote everything in it. With `owned`, any existing folder is replaced.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    is_replaceable = _is_folder if owned else _is_from_vitrail
    _refuse_foreign(path, is_replaceable)
    refuse_existing(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.writing-", dir=path.parent))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"Output must be in a folder that can be written, got {str(path)!r} ({_os_error_reason(error)})."
        ) from None
    try:
        yield temporary
        _write_manifest(temporary)
        _flush_tree(temporary)
        _rename_into_place(temporary, path, is_replaceable, force=force)
    except OSError as error:
        raise VitrailError(
            f"Writing {str(path)!r} failed ({_os_error_reason(error)}); the previous content is unchanged."
        ) from None
    finally:
        _remove_path(temporary)


@contextlib.contextmanager
def atomic_file(path: Path, *, force: bool = False) -> Generator[BinaryIO]:
    """Yield a temporary file to write; rename it to `path` if the block succeeds.

    Raise UsageError if `path` exists, unless `force`.
    """
    refuse_existing(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.writing-", dir=path.parent)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"Output must be in a folder that can be written, got {str(path)!r} ({_os_error_reason(error)})."
        ) from None
    temporary = Path(name)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - it is open already
            yield file
        temporary.chmod(0o666 & ~_umask())
        _flush_path(temporary)
        temporary.replace(path)
    except OSError as error:
        raise VitrailError(
            f"Writing {str(path)!r} failed ({_os_error_reason(error)}); the previous content is unchanged."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def file_lock(path: Path, on_busy: Callable[[str], None]) -> Generator[bool]:
    """Hold the lock of the file `path`, which one process at a time can hold. Create the file and its folder.

    If another process holds the lock, call `on_busy` with a description of that process, then wait; `on_busy` may raise
    instead. Yield True, or False if the file system has no locks. The file is never deleted: otherwise two processes
    could lock two files of the same name.
    """
    from filelock import FileLock, Timeout  # a slow import

    # A soft lock is a file that exists, so it would outlive a killed process.
    lock = FileLock(
        path, thread_local=False, fallback_to_soft=False, preserve_lock_file=True, on_acquired=_write_lock_holder
    )
    is_held, reader = True, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_busy(path.read_text(errors="replace")[:300].strip() or "another process")
            lock.acquire()
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and path.exists():
            # The folder is read-only, or another user owns the lock file: lock it without writing to it.
            reader = _lock_read_only_file(path)
        elif error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            is_held = False
        else:
            raise UsageError(
                f"Output must be in a folder that can be written, got {str(path.parent)!r} ({_os_error_reason(error)})."
            ) from None
    try:
        yield is_held
    finally:
        lock.release()
        if reader is not None:
            os.close(reader)


def _lock_read_only_file(path: Path) -> int:
    """Wait for the lock of a file that cannot be written, and return its descriptor; closing it releases the lock."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@contextlib.contextmanager
def folder_lock(folder: Path) -> Generator[None]:
    """Hold the lock of a folder, without a file in it. Wait while another process holds it.

    Nothing is locked if the folder cannot be opened or its file system has no locks.
    """
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _write_lock_holder(file: int) -> None:
    """Write this process into its lock file, for messages of processes that wait."""
    with contextlib.suppress(OSError):  # a full disk: the lock is held without a name
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {os.uname().nodename}\n".encode(errors="replace"), 0)


def user_folder() -> Path:
    """Return the folder for caches: $VITRAIL_HOME, otherwise `vitrail` in the user's cache folder."""
    if home := os.environ.get("VITRAIL_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrail"


def check_output(path: Path, *, force: bool) -> None:
    """Raise UsageError if an output exists or cannot be written; call this before any computation.

    With `force`, an existing folder is accepted if vitrail wrote everything in it.
    """
    if not force or os.path.lexists(path / MANIFEST):  # `training.run_folder` checks runs
        refuse_foreign(path)
    refuse_existing(path, force=force)
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise UsageError if a path cannot be written, whether it exists or not."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise UsageError(
            f"Output must be a path that can be written, got {str(path)!r} ({_os_error_reason(error)})."
        ) from None
    parent = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"Output must be in a folder that can be written, got {str(path)!r} ({str(parent)!r} cannot).")


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise UsageError if an output exists, unless `force`."""
    if os.path.lexists(path) and not force:
        raise UsageError(
            f"Output must not exist yet, got {str(path)!r}. Choose another path, or overwrite it with --force"
            " (in Python: force=True)."
        )


def refuse_foreign(path: Path) -> None:
    """Raise UsageError if `path` exists and has content that vitrail did not write, which not even `force` replaces.

    Accepted are an empty folder and a folder that contains only the files that its manifest names.
    """
    _refuse_foreign(path, _is_from_vitrail)


def _refuse_foreign(path: Path, is_replaceable: Callable[[Path], bool]) -> None:
    if not os.path.lexists(path) or is_replaceable(path):
        return
    if foreign_files := _foreign_files(path):
        raise UsageError(
            f"Output must contain only files that vitrail wrote, got {str(foreign_files[0])!r} in it. Move that file"
            " away, or choose another path."
        )
    raise UsageError(
        f"Output must not exist yet, or must be a folder that vitrail wrote, got {str(path)!r}. Choose another"
        " path, or move it away."
    )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_from_vitrail(path: Path) -> bool:
    return _is_folder(path) and (
        not any(path.iterdir()) or (_files_in_manifest(path) is not None and not _foreign_files(path))
    )


def _foreign_files(path: Path) -> list[Path]:
    """Return the files and links in a folder that its manifest does not name; an empty list if it has no manifest."""
    if (own_files := _files_in_manifest(path)) is None:
        return []
    files = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    return sorted(file for file in files if file not in own_files and not _SYSTEM_FILES.fullmatch(file.name))


def _files_in_manifest(path: Path) -> set[Path] | None:
    """Return the paths that the manifest of a folder names, and its own; None if it is missing or corrupt."""
    if not os.path.lexists(path / MANIFEST):
        return None
    try:
        return {path / MANIFEST, *(path / name for name in read_json(path / MANIFEST)["files"])}
    except (CorruptFileError, KeyError, TypeError):
        return None


def can_replace(path: Path) -> bool:
    """Return whether `atomic_folder(path, force=True, owned=True)` can write `path`."""
    parent = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    return (not os.path.lexists(path) or _is_folder(path)) and os.access(parent, os.W_OK | os.X_OK)


def read_small_file(path: Path) -> bytes:
    """Return the bytes of a file such as settings or a table.

    Raise OSError if it has more than 64 MB or is not a regular file (reading a pipe could block).
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123 - O_NONBLOCK: opening a pipe does not wait
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "it is not a regular file", str(path))
        content = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(content) > _MAX_DOCUMENT_BYTES:
        raise OSError(None, f"it has more than {_MAX_DOCUMENT_BYTES:,} bytes", str(path))
    return content


def read_text(path: str | Path, noun: str, form: str = "a file") -> str:
    """Return the text of a file that the user named.

    Errors name it by `noun` and `form`: "Labels must be a file that exists, got ...".
    """
    try:
        return read_small_file(Path(path)).decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{noun} must be {form} that exists, got {str(path)!r}.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise CorruptFileError(path=path, cause=f"cannot be read ({reason})") from None


def read_json(path: Path) -> Any:
    """Return the JSON document in a file. Raise CorruptFileError if it cannot be read."""
    if not path.is_file():  # reading a pipe would never end
        raise CorruptFileError(path=path, cause="is missing or not a file", advice="Restore it from a copy.")
    try:
        return json.loads(read_small_file(path))
    except (ValueError, RecursionError):
        raise CorruptFileError(
            path=path, cause="is corrupt: it is not a JSON document", advice="Restore it from a copy."
        ) from None
    except OSError as error:
        raise CorruptFileError(path=path, cause=f"cannot be read ({_os_error_reason(error)})") from None


def write_json(path: Path, document: object) -> None:
    """Write JSON in a canonical form, in which equal documents have equal bytes."""
    write_text(path, _canonical_json(document))  # JSON reads its escapes of surrogates back


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8; bytes of file names that are not UTF-8 are escaped."""
    path.write_bytes(escape_surrogates(text).encode())


def replace_text(path: Path, text: str) -> None:
    """Write text atomically: a reader sees the old file or the new one.

    All processes use the same temporary name, so a file left by a killed process is overwritten by the next call.
    """
    temporary = path.with_name(f".{path.name}.writing")
    write_text(temporary, text)
    temporary.replace(path)


def escape_surrogates(text: str) -> str:
    """Escape surrogates, by which Python represents bytes of a file name that are not UTF-8, so that the text can be
    encoded."""
    return text.encode(errors="backslashreplace").decode()


@contextlib.contextmanager
def utf8_path(path: Path) -> Generator[Path]:
    """Yield a path of the file that is valid UTF-8, as safetensors requires; it exists only within the block."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with path.open("rb") as file:
            yield Path(f"/dev/fd/{file.fileno()}")
    else:
        yield path


def verify_checksums(folder: Path, names: Iterable[str]) -> None:
    """Raise CorruptFileError unless the named files of `folder` have the checksums that its manifest states."""
    manifest_path = folder / MANIFEST
    manifest = read_json(manifest_path)
    files = manifest.get("files") if isinstance(manifest, dict) and manifest.keys() == {"files"} else None
    # `_canonical_json` restores the bytes of a manifest, so any changed byte is detected here or by a checksum.
    try:
        is_as_written = read_small_file(manifest_path) == _canonical_json(manifest).encode()
    except (OSError, ValueError):  # JSON that vitrail does not write: NaN, lone surrogates
        is_as_written = False
    if not isinstance(files, dict) or not is_as_written:
        raise CorruptFileError(
            path=manifest_path, cause="is corrupt: it is not a manifest as written", advice="Restore it from a copy."
        )
    for name in names:
        path = folder / name
        if name not in files:
            raise CorruptFileError(
                path=manifest_path, cause=f"is corrupt: it does not name {name}", advice="Restore it from a copy."
            )
        if not path.is_file():
            raise CorruptFileError(path=path, cause="is missing", advice="Restore it from a copy.")
        try:
            is_intact = checksum(path) == files[name]
        except OSError as error:
            raise CorruptFileError(path=path, cause=f"cannot be read ({_os_error_reason(error)})") from None
        if not is_intact:
            raise CorruptFileError(
                path=path, cause="is corrupt: its checksum is not the one recorded", advice="Restore it from a copy."
            )


def _write_manifest(folder: Path) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): checksum(path) for path in paths}
    write_json(folder / MANIFEST, {"files": files})


def _canonical_json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rename_into_place(temporary: Path, path: Path, is_replaceable: Callable[[Path], bool], *, force: bool) -> None:
    """Rename `temporary` to `path`.

    With `force`, an existing folder is swapped with the new one atomically, so that `path` always exists. The caller
    then removes the old folder under its new name, `temporary`.
    """
    if not force or not os.path.lexists(path):
        temporary.rename(path)  # fails if another process has created a folder with content there
    elif _exchange_paths(temporary, path):
        if not is_replaceable(temporary):  # another process has replaced the folder
            _exchange_paths(temporary, path)
            _refuse_foreign(path, is_replaceable)
    else:
        _refuse_foreign(path, is_replaceable)
        replaced = path.with_name(f".{path.name}.replaced-{os.getpid()}")
        path.rename(replaced)
        try:
            temporary.rename(path)
        except BaseException:
            replaced.rename(path)
            raise
        _remove_path(replaced)
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder
        _flush_path(path.parent)


def _exchange_paths(first: Path, second: Path) -> bool:
    """Swap the names of two folders atomically. Return False if the system cannot (only Linux can)."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    at_working_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and not rename(
        at_working_folder, os.fsencode(first), at_working_folder, os.fsencode(second), exchange
    )


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush_tree(folder: Path) -> None:
    """Flush a folder and its content to disk, with the default permissions of the user.

    `mkdtemp` and some writers create folders and files that only the user can read.
    """
    umask = _umask()
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        _flush_path(path)
    folder.chmod(0o777 & ~umask)
    _flush_path(folder)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _flush_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _os_error_reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
