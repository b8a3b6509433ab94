"""Source of data: a folder with a folder of images for each class."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.core.errors import UsageError
from vitrail.data.sources.base import SPLIT_NAMES
from vitrail.data.sources.tree import Folder, FolderLayout, Tree, is_image

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset


class ClassFolder(FolderLayout):
    """Source of data: `root/train/<class>/*` with `root/val`, `root/validation` or `root/test`; or `root/<class>/*`."""

    description = "a folder of class folders (perhaps in train, val, test)"
    is_folder_of_files = True
    is_distributed = False

    def fits(self, tree: Tree) -> bool:
        """Accept any folder; other layouts are tried first."""
        return True

    def find(self, tree: Tree) -> Tree:
        """Return the tree; or the tree of its only folder if that has classes or splits, as after unzipping."""
        while (name := _only_data_folder(tree)) is not None:
            tree = tree.below(name)
        return tree

    def open(self, data: str | Path) -> "Dataset":
        outer = Folder(data)
        tree = self.find(outer)
        dataset = self.read(tree)
        if tree is outer:
            return dataset
        note = f"{str(data)!r} holds one folder, which is the data set: {tree.name!r}"
        return dataclasses.replace(dataset, name=str(data), notes=(*dataset.notes, note))

    def read(self, tree: Tree) -> "Dataset":
        from vitrail.data.dataset import Dataset

        split_folders = _find_split_folders(tree)
        classes = {split: sorted(tree.folders(folder)) for split, folder in split_folders.items()}
        labels = sorted({name for names in classes.values() for name in names})
        if not labels:
            raise UsageError(
                f"Data folder must have a folder of images for each class, got {tree.name!r} without any. Sort"
                f" the images into {tree.full('CLASS')!r}, or {tree.full('train/CLASS')!r} and so on."
            )
        if not_unicode := [name for name in labels if not _is_unicode(name)]:
            raise UsageError(f"Class folder must have a name in Unicode, got {not_unicode[0]!r} in {tree.name!r}.")
        folders = {
            split: {name: _join_path(split_folders[split], name) for name in names} for split, names in classes.items()
        }
        files = {
            split: [(file, name) for name, folder in class_folders.items() for file in tree.images(folder)]
            for split, class_folders in folders.items()
        }
        if not any(files.values()):
            raise UsageError(f"Data folder must have images in its class folders, got none in {tree.name!r}.")
        files = {split: pairs for split, pairs in files.items() if pairs or split == "train"}
        full_paths = {
            split: {name: tree.full(folder) for name, folder in class_folders.items()}
            for split, class_folders in folders.items()
        }
        return Dataset.from_files(tree.name, files, labels, folders=full_paths, root=tree.name)


def _only_data_folder(tree: Tree) -> str | None:
    """Return the only folder of a tree if it contains two or more folders (classes) or a split, and no loose images."""
    folders = tree.folders()
    if len(folders) != 1 or folders[0].lower() in SPLIT_NAMES or any(map(is_image, tree.files())):
        return None
    subfolders = tree.folders(folders[0])
    is_divided = len(subfolders) > 1 or any(name.lower() in SPLIT_NAMES for name in subfolders)
    is_wrapped = len(subfolders) == 1 and _only_data_folder(tree.below(folders[0])) is not None
    if any(map(is_image, tree.files(folders[0]))) or not (is_divided or is_wrapped):
        return None
    return folders[0]


def _find_split_folders(tree: Tree) -> dict[str, str]:
    """Return the folder of each split, or {"all": ""} if the root contains classes and no splits."""
    folders = tree.folders()
    folder_of: dict[str, str] = {}
    for name in folders:
        split = SPLIT_NAMES.get(name.lower())
        if split is None or (not tree.folders(name) and tree.images(name)):
            continue  # not a split, or a class that has the name of a split
        if split in folder_of:
            raise UsageError(
                f"Data folder must have one {split} folder, got {folder_of[split]} and {name} in {tree.name!r}."
            )
        folder_of[split] = name
    other_folders = [name for name in folders if name not in folder_of.values()]
    if "train" not in folder_of and other_folders:
        return {"all": ""}
    if classes := [name for name in other_folders if tree.images(name)]:
        raise UsageError(
            f"Data folder must have either splits or classes in it, got {folder_of['train']} beside"
            f" {', '.join(map(repr, classes[:3]))}, which have images, too, in {tree.name!r}."
        )
    return folder_of or {"all": ""}


def _join_path(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
