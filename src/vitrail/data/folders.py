"""A folder with one folder of images for each class."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.data.base import SPLIT_NAMES, Source
from vitrail.data.files import is_folder, list_images
from vitrail.errors import UsageError

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset


class ClassFolder(Source):
    """`root/train/<class>/*` with val, validation or test beside it; or `root/<class>/*`."""

    description = "a folder of class folders (perhaps in train, val, test)"
    is_folder_of_files = True

    def recognises(self, data: str | Path) -> bool:
        """Any folder; other kinds of folders are tried first."""
        return is_folder(data)

    def open(self, data: str | Path) -> "Dataset":
        from vitrail.data.dataset import Dataset

        root = Path(data)
        places = _split_folders(root)
        classes = {split: sorted(_subfolders(folder)) for split, folder in places.items()}
        labels = sorted({name for names in classes.values() for name in names})
        if not labels:
            raise UsageError(
                f"Data folder must have a folder of images for each class, got {str(root)!r} without any. Sort"
                f" the images into {str(root / 'CLASS')!r}, or {str(root / 'train' / 'CLASS')!r} and so on."
            )
        if not_unicode := [name for name in labels if not _is_text(name)]:
            raise UsageError(f"Class folder must have a name in Unicode, got {not_unicode[0]!r} in {str(root)!r}.")
        folders = {split: {name: str(places[split] / name) for name in names} for split, names in classes.items()}
        files = {
            split: [(file, name) for name, folder in listed.items() for file in list_images([folder])]
            for split, listed in folders.items()
        }
        if not any(files.values()):
            raise UsageError(f"Data folder must have images in its class folders, got none in {str(root)!r}.")
        files = {split: pairs for split, pairs in files.items() if pairs or split == "train"}
        return Dataset.from_files(str(root), files, labels, folders=folders, root=str(root))


def _split_folders(root: Path) -> dict[str, Path]:
    """The folder of each split; `all` is the root itself, if it contains classes and no splits."""
    below = _subfolders(root)
    parts: dict[str, Path] = {}
    for name in below:
        split = SPLIT_NAMES.get(name.lower())
        if split is None or (not _subfolders(root / name) and list_images([root / name])):
            continue  # another folder, or a class that happens to be called so
        if split in parts:
            raise UsageError(
                f"Data folder must have one {split} folder, got {parts[split].name} and {name} in {str(root)!r}."
            )
        parts[split] = root / name
    others = [name for name in below if root / name not in parts.values()]
    if "train" not in parts and others:
        return {"all": root}
    if strange := [name for name in others if list_images([root / name])]:
        raise UsageError(
            f"Data folder must have either splits or classes in it, got {parts['train'].name} beside"
            f" {', '.join(map(repr, strange[:3]))}, which have images, too, in {str(root)!r}."
        )
    return parts or {"all": root}


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
