"""Published data sets as they are distributed: folders of images with lists of labels beside them."""

import csv
import dataclasses
import io
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.data.sources.tree import FolderLayout, Tree, is_image

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

Pairs = list[tuple[str, str]]
"""Image files and their classes."""

_IMAGENET_CLASSES = 1000
_IMAGENET_IMAGES = 50_000  # of validation


def _dataset(tree: Tree, files: dict[str, Pairs], note: str) -> "Dataset":
    from vitrail.data.dataset import Dataset

    labels = {label for pairs in files.values() for _, label in pairs}
    if not labels:
        raise CorruptFileError(path=tree.name, cause="has no labelled image")
    counts = ", ".join(f"{len(pairs):,} {split}" for split, pairs in files.items())
    made = Dataset.from_files(tree.name, files, labels, root=tree.name)
    return dataclasses.replace(made, notes=(f"read as {note}: {counts} images of {len(labels):,} classes",))


def _rows(tree: Tree, path: str, *columns: int) -> list[list[str]]:
    """The words of each line of a list, as many as one of `columns` says: a line that has lost its end, or has taken in
    the next one, is damaged."""
    rows: list[list[str]] = []
    for number, line in enumerate(tree.text(path).split("\n"), 1):
        words = line.split()
        if not words:
            continue
        if len(words) not in columns:
            raise CorruptFileError(
                f"Line {number} of {tree.full(path)!r} must have {' or '.join(map(str, columns))} words, got"
                f" {line[:100]!r}.",
                path=tree.full(path),
            )
        rows.append(words)
    if not rows:
        raise CorruptFileError(path=tree.full(path), cause="has no line")
    return rows


def _check_names(tree: Tree, path: str, names: Iterable[str]) -> None:
    """Refuse a list that names an image twice, which could have two classes or be in two splits, or one elsewhere."""
    for name, count in Counter(names).items():
        if count > 1:
            raise CorruptFileError(path=tree.full(path), cause=f"must name each image once, got {name!r} {count} times")
        if "/" in name or "\\" in name:
            raise CorruptFileError(path=tree.full(path), cause=f"must name images without folders, got {name!r}")


def _check_listed(tree: Tree, path: str, names: Iterable[str], of: dict[str, str]) -> None:
    """Refuse images that a list has no class of."""
    if missing := [name for name in names if name not in of]:
        raise CorruptFileError(path=tree.full(path), cause=f"has no label of {missing[0]}")


class TinyImageNet(FolderLayout):
    """`train/<class>/images/*`, `val/images/*` with `val/val_annotations.txt`; `test` has no labels."""

    description = "Tiny-ImageNet"
    _list = "val/val_annotations.txt"

    def fits(self, tree: Tree) -> bool:
        return tree.has(self._list) and bool(tree.folders("train")) and "images" in tree.folders("val")

    def read(self, tree: Tree) -> "Dataset":
        classes = sorted(tree.folders("train"))
        training = [(file, name) for name in classes for file in tree.images(f"train/{name}")]
        rows = _rows(tree, self._list, 6, 2)  # with the box of the object, or without
        if strange := sorted({row[1] for row in rows} - set(classes)):
            raise CorruptFileError(
                path=tree.full(self._list), cause=f"has a class that is not in train: {', '.join(strange[:3])}"
            )
        _check_names(tree, self._list, (row[0] for row in rows))
        _check_listed(tree, self._list, filter(is_image, tree.files("val/images")), {row[0]: row[1] for row in rows})
        validation = [(tree.image(f"val/images/{row[0]}"), row[1]) for row in rows]
        unlabelled = len(tree.images("test")) if "test" in tree.folders() else 0
        left = f" (its {unlabelled:,} test images have no labels)" if unlabelled else ""
        return _dataset(tree, {"train": training, "val": validation}, f"Tiny-ImageNet{left}")


class ImageNetValidation(FolderLayout):
    """`ILSVRC2012_val_*.JPEG` in one folder, and a list of their classes in it or beside it: `val.txt` (class numbers),
    `LOC_val_solution.csv` or `imagenet_2012_validation_synset_labels.txt` (WordNet ids)."""

    description = "ImageNet's validation images with their list of labels"
    _numbers, _solution, _ids = "val.txt", "LOC_val_solution.csv", "imagenet_2012_validation_synset_labels.txt"
    _devkit = "ILSVRC2012_validation_ground_truth.txt"

    def fits(self, tree: Tree) -> bool:
        return self._list_in(tree) is not None and self._images_in(tree) is not None

    def read(self, tree: Tree) -> "Dataset":
        folder, listed = self._images_in(tree), self._list_in(tree)
        within = f"{folder}/" if folder else ""
        names = [name for name in tree.files(folder or "") if is_image(name)]
        if listed == self._devkit:
            raise UsageError(
                f"Labels of ImageNet must be those of {self._numbers}, {self._solution} or {self._ids}, got only"
                f" {self._devkit} in {tree.name!r}, whose numbers follow the development kit's own order."
            )
        read = {self._numbers: self._read_numbers, self._solution: self._read_solution, self._ids: self._read_ids}
        found = read[str(listed)](tree, names)
        rule = r"\d{1,3}" if listed == self._numbers else r"n\d+"
        if strange := next((label for _, label in found if not re.fullmatch(rule, label, re.ASCII)), None):
            what = (
                f"a number below {_IMAGENET_CLASSES:,}" if listed == self._numbers else "a WordNet id such as n01440764"
            )
            raise CorruptFileError(
                path=tree.full(str(listed)), cause=f"must have {what} for each image, got {strange!r}"
            )
        _check_names(tree, str(listed), (name for name, _ in found))
        of = dict(found)
        _check_listed(tree, str(listed), names, of)
        kinds = sorted({of[name] for name in names})
        if len(kinds) > _IMAGENET_CLASSES:
            raise CorruptFileError(
                path=tree.full(str(listed)), cause=f"must have {_IMAGENET_CLASSES:,} classes, got {len(kinds):,}"
            )
        how = ""
        if len(kinds) == _IMAGENET_CLASSES and kinds[0].startswith("n"):
            numbers = {kind: str(number) for number, kind in enumerate(kinds)}
            of, how = {name: numbers[of[name]] for name in names}, ", classes numbered by their WordNet ids"
        pairs = [(tree.image(within + name), of[name]) for name in names]
        return _dataset(tree, {"val": pairs}, f"ImageNet's validation images with {listed}{how}")

    def _read_numbers(self, tree: Tree, names: list[str]) -> Pairs:
        return [(row[0].rpartition("/")[2], row[1]) for row in _rows(tree, self._numbers, 2)]

    def _read_solution(self, tree: Tree, names: list[str]) -> Pairs:
        """Lines of `image,class x y x y class x y x y ...`: the boxes of an image are all of one class."""
        try:
            rows = list(csv.reader(io.StringIO(tree.text(self._solution), newline=""), strict=True))[1:]
        except csv.Error as error:
            raise CorruptFileError(path=tree.full(self._solution), cause=f"cannot be read as CSV ({error})") from None
        pairs = []
        for row in filter(any, rows):
            words = row[1].split() if len(row) == 2 else []
            if not words or len(words) % 5 or len(set(words[::5])) > 1:
                raise CorruptFileError(
                    path=tree.full(self._solution),
                    cause=f"must have an image, and boxes of one class, in each line, got {','.join(row)[:100]!r}",
                )
            pairs.append((f"{row[0]}.JPEG", words[0]))
        return pairs

    def _read_ids(self, tree: Tree, names: list[str]) -> Pairs:
        """The line of an image is the number in its name, so that a folder may have some of them; but with a line more
        or less, all after it would have the class of another."""
        lines = tree.text(self._ids).removesuffix("\n").split("\n")
        if len(lines) != _IMAGENET_IMAGES:
            raise CorruptFileError(
                path=tree.full(self._ids), cause=f"must have {_IMAGENET_IMAGES:,} lines, got {len(lines):,}"
            )
        numbered = [(name, re.fullmatch(r"ILSVRC2012_val_(\d{8})\.\w+", name, re.ASCII)) for name in names]
        known = [(name, int(match[1])) for name, match in numbered if match]
        return [(name, lines[number - 1].strip()) for name, number in known if 1 <= number <= len(lines)]

    def _images_in(self, tree: Tree) -> str | None:
        """The folder of images named as in ImageNet: the root, or one in it."""
        for folder in ("", *tree.folders()):
            if any(name.startswith("ILSVRC2012_val_") for name in tree.files(folder)):
                return folder
        return None

    def _list_in(self, tree: Tree) -> str | None:
        known = (self._numbers, self._solution, self._ids, self._devkit)
        return next((name for name in known if tree.has(name)), None)


class OxfordPets(FolderLayout):
    """`images/*.jpg` and `annotations/trainval.txt`, `annotations/test.txt`; breeds are in the names of images."""

    description = "Oxford Pets"
    _lists = {"train": "annotations/trainval.txt", "test": "annotations/test.txt"}  # noqa: RUF012

    def fits(self, tree: Tree) -> bool:
        if {"annotations.tar.gz", "images.tar.gz"} <= set(tree.files()):
            return True
        return "images" in tree.folders() and all(tree.has(path) for path in self._lists.values())

    def read(self, tree: Tree) -> "Dataset":
        _refuse_packed(tree, {"images": "images.tar.gz", "annotations": "annotations.tar.gz"}, "Oxford Pets")
        rows = {split: _rows(tree, path, 4) for split, path in self._lists.items()}
        _check_names(tree, "annotations", (row[0] for listed in rows.values() for row in listed))
        files: dict[str, Pairs] = {}
        numbers: dict[str, str] = {}
        for split, listed in rows.items():
            for name, number, _, _ in listed:
                breed = re.sub(r"_\d+$", "", name)
                # Each line says it twice: by the name, and by a number.
                if numbers.setdefault(breed, number) != number:
                    raise CorruptFileError(
                        path=tree.full(self._lists[split]),
                        cause=f"must have one class number for each breed, got {numbers[breed]} and {number} for"
                        f" {breed}",
                    )
                files.setdefault(split, []).append((tree.image(f"images/{name}.jpg"), breed))
        if len(set(numbers.values())) < len(numbers):
            raise CorruptFileError(path=tree.full("annotations"), cause="must have another class number for each breed")
        return _dataset(tree, files, "Oxford Pets")


class OxfordFlowers(FolderLayout):
    """`jpg/image_*.jpg` with `imagelabels.mat` and `setid.mat`; classes are numbers from 1."""

    description = "Oxford Flowers"
    _splits = (("train", "trnid"), ("val", "valid"), ("test", "tstid"))

    def fits(self, tree: Tree) -> bool:
        return tree.has("imagelabels.mat") and tree.has("setid.mat")

    def read(self, tree: Tree) -> "Dataset":
        _refuse_packed(tree, {"jpg": "102flowers.tgz"}, "Oxford Flowers")
        labels = self._numbers(tree, "imagelabels.mat", "labels")
        files: dict[str, Pairs] = {}
        ids = {key: self._numbers(tree, "setid.mat", key) for _, key in self._splits}
        _check_names(tree, "setid.mat", (str(one) for chosen in ids.values() for one in chosen))
        for split, key in self._splits:
            chosen = ids[key]
            if max(chosen) > len(labels):
                raise CorruptFileError(
                    path=tree.full("setid.mat"), cause=f"must number images from 1 to {len(labels):,} in {key}"
                )
            files[split] = [(tree.image(f"jpg/image_{one:05d}.jpg"), str(labels[one - 1])) for one in chosen]
        return _dataset(tree, files, "Oxford Flowers")

    def _numbers(self, tree: Tree, path: str, key: str) -> list[int]:
        from vitrail.data.sources.matlab import read_matlab

        found: Any = read_matlab(tree.read(path), tree.full(path)).get(key)
        if found is None or not len(found):
            raise CorruptFileError(path=tree.full(path), cause=f"must have numbers called {key}")
        numbers = found.tolist()
        if any(not number >= 1 or number % 1 for number in numbers):  # NaN is not, and infinity has a NaN as its rest
            raise CorruptFileError(path=tree.full(path), cause=f"must have whole numbers of at least 1 in {key}")
        return [int(number) for number in numbers]


def _refuse_packed(tree: Tree, archives: dict[str, str], name: str) -> None:
    """Refuse a folder whose archives are not unpacked yet, and say what to do."""
    for folder, archive in archives.items():
        if folder not in tree.folders():
            raise UsageError(
                f"{name} must have the folder {folder}, got {tree.name!r} without it. Unpack {archive} there: tar xf"
                f" {archive}."
            )
