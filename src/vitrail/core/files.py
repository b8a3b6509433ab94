"""Atomic folders and files: written under a temporary name, flushed to disk, listed in a manifest of checksums, then
renamed.

A reader trusts a folder only if its manifest, written last, agrees with every byte of every file it names.
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
_MOST = 64 * 2**20  # bytes of a document
_LEFT_BY_SYSTEMS = re.compile(r"\.DS_Store|\.nfs.*|\.directory|desktop\.ini|Thumbs\.db")  # by file managers and NFS


@contextlib.contextmanager
def atomic_folder(path: Path, *, force: bool = False, owned: bool = False) -> Generator[Path]:
    """Yield an empty folder to write into; it becomes `path`, with its manifest, only if the block succeeds.

    An existing `path` is refused unless `force`; then it stays until the new folder is complete. Even so, what vitrail
    did not write is refused, unless the name is `owned` by vitrail: then the folder is replaced, whatever it holds.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    is_ours = _is_folder if owned else _is_ours
    _refuse_foreign(path, is_ours)
    refuse_existing(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.writing-", dir=path.parent))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"Output must be in a folder that can be written, got {str(path)!r} ({_reason(error)})."
        ) from None
    try:
        yield aside
        _write_manifest(aside)
        _flush(aside)
        _put_in_place(aside, path, is_ours, force=force)
    except OSError as error:
        raise VitrailError(
            f"Writing {str(path)!r} failed ({_reason(error)}); what was there before is unchanged."
        ) from None
    finally:
        _remove(aside)


@contextlib.contextmanager
def atomic_file(path: Path, *, force: bool = False) -> Generator[BinaryIO]:
    """Yield a file to write; it becomes `path` only if the block succeeds. An existing `path` needs `force`."""
    refuse_existing(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.writing-", dir=path.parent)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"Output must be in a folder that can be written, got {str(path)!r} ({_reason(error)})."
        ) from None
    aside = Path(name)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - it is open already
            yield file
        aside.chmod(0o666 & ~_umask())
        _flush_one(aside)
        aside.replace(path)
    except OSError as error:
        raise VitrailError(
            f"Writing {str(path)!r} failed ({_reason(error)}); what was there before is unchanged."
        ) from None
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def file_lock(path: Path, on_busy: Callable[[str], None]) -> Generator[bool]:
    """Hold the lock file `path`, which only one process at a time can; its folder is created if necessary.

    If another process holds it, `on_busy` is called with its description and may raise; otherwise we wait. Yields False
    if the file system has no locks. The file is not deleted: otherwise two processes could lock two files of the same
    name.
    """
    from filelock import FileLock, Timeout  # its import takes longer than most locks are held

    # A note left by a soft lock would outlive a killed process: without locks of the system, there is none.
    lock = FileLock(
        path, thread_local=False, fallback_to_soft=False, preserve_lock_file=True, on_acquired=_write_holder
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
            # A shared or read-only folder: the lock file of somebody else can be locked without writing to it.
            reader = _lock_without_writing(path)
        elif error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            is_held = False
        else:
            raise UsageError(
                f"Output must be in a folder that can be written, got {str(path.parent)!r} ({_reason(error)})."
            ) from None
    try:
        yield is_held
    finally:
        lock.release()
        if reader is not None:
            os.close(reader)


def _lock_without_writing(path: Path) -> int:
    """Wait for the lock of a file that cannot be written, and return its descriptor; closing it releases the lock."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _write_holder(file: int) -> None:
    """Write this process into its lock file, for the message of others."""
    with contextlib.suppress(OSError):  # a full disk: we hold the lock without a name
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {os.uname().nodename}\n".encode(errors="replace"), 0)


def user_folder() -> Path:
    """Folder for caches: $VITRAIL_HOME, otherwise `vitrail` in the user's cache folder."""
    if home := os.environ.get("VITRAIL_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrail"


def check_output(path: Path, *, force: bool) -> None:
    """Refuse an output that exists or cannot be written, before any work is done for it. With `force`, a folder that
    vitrail wrote is accepted, unless somebody has put files into it, which would be lost."""
    if not force or os.path.lexists(path / MANIFEST):  # a run has none, and a rule of its own
        refuse_foreign(path)
    refuse_existing(path, force=force)
    check_writable(path)


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, whether something is there or not."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise UsageError(f"Output must be a path that can be written, got {str(path)!r} ({_reason(error)}).") from None
    above = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"Output must be in a folder that can be written, got {str(path)!r} ({str(above)!r} cannot).")


def refuse_existing(path: Path, *, force: bool) -> None:
    """Refuse an output that exists, unless `force`."""
    if os.path.lexists(path) and not force:
        raise UsageError(
            f"Output must not exist yet, got {str(path)!r}. Choose another path, or overwrite it with --force"
            " (in Python: force=True)."
        )


def refuse_foreign(path: Path) -> None:
    """Refuse to replace, even with `force`, what vitrail did not write: only an empty folder, or one that holds what
    its manifest names and nothing else, is replaced."""
    _refuse_foreign(path, _is_ours)


def _refuse_foreign(path: Path, is_ours: Callable[[Path], bool]) -> None:
    if not os.path.lexists(path) or is_ours(path):
        return
    if added := _added(path):
        raise UsageError(
            f"Output must hold nothing but what vitrail wrote, got {str(added[0])!r} in it. Move that away, or choose"
            " another path."
        )
    raise UsageError(
        f"Output must not exist yet, or must be a folder that vitrail wrote, got {str(path)!r}. Choose another"
        " path, or move it away yourself."
    )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_ours(path: Path) -> bool:
    return _is_folder(path) and (not any(path.iterdir()) or (_named(path) is not None and not _added(path)))


def _added(path: Path) -> list[Path]:
    """Files and links of somebody else in a folder that vitrail wrote: what its manifest does not name."""
    if (known := _named(path)) is None:
        return []
    every = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    return sorted(file for file in every if file not in known and not _LEFT_BY_SYSTEMS.fullmatch(file.name))


def _named(path: Path) -> set[Path] | None:
    """What the manifest of a folder names, with the manifest; None if there is none, or if it is damaged."""
    if not os.path.lexists(path / MANIFEST):
        return None
    try:
        return {path / MANIFEST, *(path / name for name in read_json(path / MANIFEST)["files"])}
    except (CorruptFileError, KeyError, TypeError):
        return None


def can_replace(path: Path) -> bool:
    """Whether `atomic_folder(path, force=True, owned=True)` may write there."""
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    return (not os.path.lexists(path) or _is_folder(path)) and os.access(above, os.W_OK | os.X_OK)


def read_small_file(path: Path) -> bytes:
    """The bytes of a regular file of at most 64 MB, such as settings or a table; anything else raises OSError (reading
    a pipe could block)."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123 - a pipe is opened at once
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "it is not a regular file", str(path))
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        raise OSError(None, f"it has more than {_MOST:,} bytes", str(path))
    return content


def read_text(path: str | Path, noun: str, what: str = "a file") -> str:
    """The text of a file that the user named; errors call it by the noun."""
    try:
        return read_small_file(Path(path)).decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{noun} must be {what} that exists, got {str(path)!r}.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise CorruptFileError(path=path, cause=f"cannot be read ({reason})") from None


def read_json(path: Path) -> Any:
    """The JSON document in a file that should hold one."""
    if not path.is_file():  # nor a pipe, which would wait for ever
        raise CorruptFileError(path=path, cause="is missing or not a file", advice="Restore it from a copy.")
    try:
        return json.loads(read_small_file(path))
    except (ValueError, RecursionError):
        raise CorruptFileError(
            path=path, cause="is damaged: it is not a JSON document", advice="Restore it from a copy."
        ) from None
    except OSError as error:
        raise CorruptFileError(path=path, cause=f"cannot be read ({_reason(error)})") from None


def write_json(path: Path, document: object) -> None:
    """Write JSON in a canonical form, so that equal content gives equal bytes."""
    write_text(path, _canonical(document))  # the escapes of `escape_surrogates` are JSON's, so reading restores them


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8; bytes of file names that are not UTF-8 are escaped."""
    path.write_bytes(escape_surrogates(text).encode())


def replace_text(path: Path, text: str) -> None:
    """Write text so that a reader sees the old file or the new one, never a part. What a killed process leaves aside is
    used by the next one."""
    aside = path.with_name(f".{path.name}.writing")
    write_text(aside, text)
    aside.replace(path)


def escape_surrogates(text: str) -> str:
    """Text that can be encoded in UTF-8. Python keeps bytes of a file name that are not UTF-8 as surrogates; these are
    escaped."""
    return text.encode(errors="backslashreplace").decode()


@contextlib.contextmanager
def utf8_path(path: Path) -> Generator[Path]:
    """A path of the file that is valid UTF-8 within the block, for libraries that need it (safetensors)."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with path.open("rb") as file:
            yield Path(f"/dev/fd/{file.fileno()}")
    else:
        yield path


def verify_checksums(folder: Path, names: Iterable[str]) -> None:
    """Check the named files of `folder`, and that its manifest names them, against their recorded checksums."""
    manifest_path = folder / MANIFEST
    manifest = read_json(manifest_path)
    files = manifest.get("files") if isinstance(manifest, dict) and manifest.keys() == {"files"} else None
    # Written by `_canonical`, read back the same: any changed byte of the manifest shows here or in a checksum.
    try:
        is_as_written = read_small_file(manifest_path) == _canonical(manifest).encode()
    except (OSError, ValueError):  # what JSON can read but we would never write: NaN, half characters
        is_as_written = False
    if not isinstance(files, dict) or not is_as_written:
        raise CorruptFileError(
            path=manifest_path, cause="is damaged: it is not a manifest as written", advice="Restore it from a copy."
        )
    for name in names:
        path = folder / name
        if name not in files:
            raise CorruptFileError(
                path=manifest_path, cause=f"is damaged: it does not name {name}", advice="Restore it from a copy."
            )
        if not path.is_file():
            raise CorruptFileError(path=path, cause="is missing", advice="Restore it from a copy.")
        try:
            intact = checksum(path) == files[name]
        except OSError as error:
            raise CorruptFileError(path=path, cause=f"cannot be read ({_reason(error)})") from None
        if not intact:
            raise CorruptFileError(
                path=path, cause="is damaged: its checksum is not the one recorded", advice="Restore it from a copy."
            )


def _write_manifest(folder: Path) -> None:
    every = (path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): checksum(path) for path in sorted(every)}
    write_json(folder / MANIFEST, {"files": files})


def _canonical(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put_in_place(aside: Path, path: Path, is_ours: Callable[[Path], bool], *, force: bool) -> None:
    """Rename `aside` to `path`. What `force` replaces is exchanged with it atomically, so that `path` always exists,
    and is then removed under the name `aside`."""
    if not force or not os.path.lexists(path):
        aside.rename(path)  # refused by the system if a folder with content has appeared there meanwhile
    elif _exchange(aside, path):
        if not is_ours(aside):  # something else has appeared there meanwhile
            _exchange(aside, path)
            _refuse_foreign(path, is_ours)
    else:
        _refuse_foreign(path, is_ours)
        replaced = path.with_name(f".{path.name}.replaced-{os.getpid()}")
        path.rename(replaced)
        try:
            aside.rename(path)
        except BaseException:
            replaced.rename(path)
            raise
        _remove(replaced)
    with contextlib.suppress(OSError):  # the folder is in place; some systems cannot flush a folder's own name
        _flush_one(path.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically, where the system can (Linux)."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    at_working_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and not rename(
        at_working_folder, os.fsencode(one), at_working_folder, os.fsencode(other), exchange
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(folder: Path) -> None:
    """Flush everything to disk, with the permissions of a new file: temporary folders and some writers create private
    ones."""
    umask = _umask()
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        _flush_one(path)
    folder.chmod(0o777 & ~umask)
    _flush_one(folder)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
