"""Zip archives from untrusted sources: .zip, .npz and PyTorch's .pth."""

import zipfile
from pathlib import Path


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open a zip archive. Raise ValueError if a file in it is neither stored nor deflated.

    zipfile unpacks other compressions without a limit: 400 bytes of bzip2 can fill a gigabyte of memory.
    """
    archive = zipfile.ZipFile(path)
    for info in archive.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            archive.close()
            raise ValueError(f"{info.filename[:200]!r} is neither stored nor deflated")
    return archive
