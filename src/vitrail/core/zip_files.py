"""The list of a zip archive, checked against the archive itself: .zip, .npz and PyTorch's .pth.

A zip states its files twice: in the list at its end, which `zipfile` believes, and in a header before each of them. A
bit that flips in the list can hide files or swap their names, and no checksum covers it.
"""

import os
import struct
import zipfile


def check_list(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if the list has another number of entries than its end states, an entry twice, or another name
    than the file has; or if there are files before the first one."""
    number, listed, at = _descriptor(archive), archive.infolist(), archive.start_dir
    for _ in listed:
        at += 46 + sum(struct.unpack("<3H", os.pread(number, 6, at + 28)))  # name, extra field, comment
    end = os.pread(number, 40, at)
    if end.startswith(b"PK\6\6"):  # zip64
        is_whole = int.from_bytes(end[32:40], "little") == len(listed)
    else:  # some programs count beyond 65,535 files from 0 again
        is_whole = end[:4] == b"PK\5\6" and int.from_bytes(end[10:12], "little") == len(listed) % 2**16
    if not is_whole:
        raise ValueError(f"its list of {len(listed):,} files is not the one that its end states")
    # A program that unpacks itself may lie before the first file, but not another archive, which nobody would read.
    first = min((info.header_offset for info in listed), default=archive.start_dir)
    if first and os.pread(number, 4, 0) == b"PK\3\4":
        raise ValueError(f"there are files before byte {first:,} that its list has not: several may be joined")
    names: set[str] = set()
    for info in listed:
        if info.filename in names:
            raise ValueError(f"{info.filename[:200]!r} is in it twice")
        if not _states_name(number, info):
            raise ValueError(f"its list and its files differ about {info.filename[:200]!r}")
        names.add(info.filename)


def check_content(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if the list is damaged (see `check_list`) or a file differs from its CRC-32. PyTorch itself does
    not look at these, and can leave them out, all of them as 0."""
    check_list(archive)
    if any(info.CRC for info in archive.infolist()) and (broken := archive.testzip()) is not None:
        raise ValueError(f"{broken[:200]!r} in it differs from its checksum")


def _descriptor(archive: zipfile.ZipFile) -> int:
    file = archive.fp
    if file is None:
        raise ValueError("it is closed")
    return file.fileno()


def _states_name(number: int, info: zipfile.ZipInfo) -> bool:
    """Whether the header of a file has the name that the list has."""
    name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    header = os.pread(number, 30 + len(name), info.header_offset)
    return header[:4] == b"PK\3\4" and header[26:28] == len(name).to_bytes(2, "little") and header[30:] == name
