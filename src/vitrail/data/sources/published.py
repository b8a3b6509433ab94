"""Published data sets as they are distributed: folders of images and separate lists of labels."""

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
"""Pairs of an image file and its class."""

_IMAGENET_CLASSES = 1000
_IMAGENET_IMAGES = 50_000  # of validation


def _build_published_dataset(tree: Tree, files: dict[str, Pairs], title: str) -> "Dataset":
    """Build a data set from the pairs of each split. Its note says that it was read as `title`."""
    from vitrail.data.dataset import Dataset

    labels = {label for pairs in files.values() for _, label in pairs}
    if not labels:
        raise CorruptFileError(path=tree.name, cause="has no labelled image")
    counts = ", ".join(f"{len(pairs):,} {split}" for split, pairs in files.items())
    dataset = Dataset.from_files(tree.name, files, labels, root=tree.name)
    return dataclasses.replace(dataset, notes=(f"read as {title}: {counts} images of {len(labels):,} classes",))


def _read_word_rows(tree: Tree, path: str, *column_counts: int) -> list[list[str]]:
    """Return the words of each line of a list.

    A line whose number of words is not in `column_counts` is corrupt: it was cut off or joined with the next one.
    """
    rows: list[list[str]] = []
    for number, line in enumerate(tree.text(path).split("\n"), 1):
        row = line.split()
        if not row:
            continue
        if len(row) not in column_counts:
            raise CorruptFileError(
                f"Line {number} of {tree.full(path)!r} must have {' or '.join(map(str, column_counts))} words, got"
                f" {line[:100]!r}.",
                path=tree.full(path),
            )
        rows.append(row)
    if not rows:
        raise CorruptFileError(path=tree.full(path), cause="has no line")
    return rows


def _check_unique_names(tree: Tree, path: str, names: Iterable[str]) -> None:
    """Reject a list that names an image twice (it could have two classes or splits), or in another folder."""
    for name, count in Counter(names).items():
        if count > 1:
            raise CorruptFileError(path=tree.full(path), cause=f"must name each image once, got {name!r} {count} times")
        if "/" in name or "\\" in name:
            raise CorruptFileError(path=tree.full(path), cause=f"must name images without folders, got {name!r}")


def _check_labels_complete(tree: Tree, path: str, names: Iterable[str], class_of: dict[str, str]) -> None:
    """Reject a list that lacks the class of an image."""
    if missing := [name for name in names if name not in class_of]:
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
        rows = _read_word_rows(tree, self._list, 6, 2)  # with the box of the object, or without
        if unknown := sorted({row[1] for row in rows} - set(classes)):
            raise CorruptFileError(
                path=tree.full(self._list), cause=f"has a class that is not in train: {', '.join(unknown[:3])}"
            )
        _check_unique_names(tree, self._list, (row[0] for row in rows))
        _check_labels_complete(
            tree, self._list, filter(is_image, tree.files("val/images")), {row[0]: row[1] for row in rows}
        )
        validation = [(tree.image(f"val/images/{row[0]}"), row[1]) for row in rows]
        unlabelled = len(tree.images("test")) if "test" in tree.folders() else 0
        remark = f" (its {unlabelled:,} test images have no labels)" if unlabelled else ""
        return _build_published_dataset(tree, {"train": training, "val": validation}, f"Tiny-ImageNet{remark}")


class ImageNetValidation(FolderLayout):
    """`ILSVRC2012_val_*.JPEG` in the root or in one folder, and a list of their classes in the root.

    The list is `val.txt` (class numbers), `LOC_val_solution.csv` or `imagenet_2012_validation_synset_labels.txt`
    (WordNet ids).
    """

    description = "ImageNet's validation images with their list of labels"
    _numbers, _solution, _ids = "val.txt", "LOC_val_solution.csv", "imagenet_2012_validation_synset_labels.txt"
    _devkit = "ILSVRC2012_validation_ground_truth.txt"

    def fits(self, tree: Tree) -> bool:
        return self._find_list(tree) is not None and self._find_image_folder(tree) is not None

    def read(self, tree: Tree) -> "Dataset":
        folder, list_name = self._find_image_folder(tree), str(self._find_list(tree))
        prefix = f"{folder}/" if folder else ""
        names = [name for name in tree.files(folder or "") if is_image(name)]
        if list_name == self._devkit:
            raise UsageError(
                f"Labels of ImageNet must be those of {self._numbers}, {self._solution} or {self._ids}, got only"
                f" {self._devkit} in {tree.name!r}, whose numbers follow the development kit's own order."
            )
        read = {self._numbers: self._read_numbers, self._solution: self._read_solution, self._ids: self._read_ids}
        pairs = read[list_name](tree, names)
        has_numbers = list_name == self._numbers
        pattern = r"\d{1,3}" if has_numbers else r"n\d+"
        if invalid := next((label for _, label in pairs if not re.fullmatch(pattern, label, re.ASCII)), None):
            rule = f"a number below {_IMAGENET_CLASSES:,}" if has_numbers else "a WordNet id such as n01440764"
            raise CorruptFileError(path=tree.full(list_name), cause=f"must have {rule} for each image, got {invalid!r}")
        _check_unique_names(tree, list_name, (name for name, _ in pairs))
        class_of = dict(pairs)
        _check_labels_complete(tree, list_name, names, class_of)
        classes = sorted({class_of[name] for name in names})
        if len(classes) > _IMAGENET_CLASSES:
            raise CorruptFileError(
                path=tree.full(list_name), cause=f"must have {_IMAGENET_CLASSES:,} classes, got {len(classes):,}"
            )
        remark = ""
        if len(classes) == _IMAGENET_CLASSES and classes[0].startswith("n"):
            number_of = {label: str(number) for number, label in enumerate(classes)}
            class_of = {name: number_of[class_of[name]] for name in names}
            remark = ", classes numbered by their WordNet ids"
        files: dict[str, Pairs] = {"val": [(tree.image(prefix + name), class_of[name]) for name in names]}
        return _build_published_dataset(tree, files, f"ImageNet's validation images with {list_name}{remark}")

    def _read_numbers(self, tree: Tree, names: list[str]) -> Pairs:
        return [(row[0].rpartition("/")[2], row[1]) for row in _read_word_rows(tree, self._numbers, 2)]

    def _read_solution(self, tree: Tree, names: list[str]) -> Pairs:
        """Parse lines of `image,class x y x y class x y x y ...`. All boxes of an image have the same class."""
        try:
            rows = list(csv.reader(io.StringIO(tree.text(self._solution), newline=""), strict=True))[1:]
        except csv.Error as error:
            raise CorruptFileError(path=tree.full(self._solution), cause=f"cannot be read as CSV ({error})") from None
        pairs = []
        for row in filter(any, rows):
            boxes = row[1].split() if len(row) == 2 else []  # five words each, the first is the class
            if not boxes or len(boxes) % 5 or len(set(boxes[::5])) > 1:
                raise CorruptFileError(
                    path=tree.full(self._solution),
                    cause=f"must have an image, and boxes of one class, in each line, got {','.join(row)[:100]!r}",
                )
            pairs.append((f"{row[0]}.JPEG", boxes[0]))
        return pairs

    def _read_ids(self, tree: Tree, names: list[str]) -> Pairs:
        """Take the class of an image from the line whose number is in its name.

        So the folder may have only a part of the images. The number of lines is checked: a missing or additional line
        would shift the classes of all later images.
        """
        lines = tree.text(self._ids).removesuffix("\n").split("\n")
        if len(lines) != _IMAGENET_IMAGES:
            raise CorruptFileError(
                path=tree.full(self._ids), cause=f"must have {_IMAGENET_IMAGES:,} lines, got {len(lines):,}"
            )
        matches = [(name, re.fullmatch(r"ILSVRC2012_val_(\d{8})\.\w+", name, re.ASCII)) for name in names]
        numbers = [(name, int(match[1])) for name, match in matches if match]
        return [(name, lines[number - 1].strip()) for name, number in numbers if 1 <= number <= len(lines)]

    def _find_image_folder(self, tree: Tree) -> str | None:
        """Return the folder of images with ImageNet's names: "" for the root, or a folder in it."""
        for folder in ("", *tree.folders()):
            if any(name.startswith("ILSVRC2012_val_") for name in tree.files(folder)):
                return folder
        return None

    def _find_list(self, tree: Tree) -> str | None:
        """Return the name of the list of classes."""
        lists = (self._numbers, self._solution, self._ids, self._devkit)
        return next((name for name in lists if tree.has(name)), None)


class OxfordPets(FolderLayout):
    """`images/*.jpg` and `annotations/trainval.txt`, `annotations/test.txt`. The breed is in the name of each image."""

    description = "Oxford Pets"
    _lists = {"train": "annotations/trainval.txt", "test": "annotations/test.txt"}  # noqa: RUF012

    def fits(self, tree: Tree) -> bool:
        if {"annotations.tar.gz", "images.tar.gz"} <= set(tree.files()):
            return True
        return "images" in tree.folders() and all(tree.has(path) for path in self._lists.values())

    def read(self, tree: Tree) -> "Dataset":
        _check_unpacked(tree, {"images": "images.tar.gz", "annotations": "annotations.tar.gz"}, "Oxford Pets")
        split_rows = {split: _read_word_rows(tree, path, 4) for split, path in self._lists.items()}
        _check_unique_names(tree, "annotations", (row[0] for rows in split_rows.values() for row in rows))
        files: dict[str, Pairs] = {}
        numbers: dict[str, str] = {}
        for split, rows in split_rows.items():
            for name, number, _, _ in rows:
                breed = re.sub(r"_\d+$", "", name)
                # Each line states the class twice, by the name of the image and by a number: check that they agree.
                if numbers.setdefault(breed, number) != number:
                    raise CorruptFileError(
                        path=tree.full(self._lists[split]),
                        cause=f"must have one class number for each breed, got {numbers[breed]} and {number} for"
                        f" {breed}",
                    )
                files.setdefault(split, []).append((tree.image(f"images/{name}.jpg"), breed))
        if len(set(numbers.values())) < len(numbers):
            raise CorruptFileError(path=tree.full("annotations"), cause="must have another class number for each breed")
        return _build_published_dataset(tree, files, "Oxford Pets")


class OxfordFlowers(FolderLayout):
    """`jpg/image_*.jpg` with `imagelabels.mat` and `setid.mat`. Classes are numbers from 1."""

    description = "Oxford Flowers"
    _splits = (("train", "trnid"), ("val", "valid"), ("test", "tstid"))

    def fits(self, tree: Tree) -> bool:
        return tree.has("imagelabels.mat") and tree.has("setid.mat")

    def read(self, tree: Tree) -> "Dataset":
        _check_unpacked(tree, {"jpg": "102flowers.tgz"}, "Oxford Flowers")
        labels = self._read_integers(tree, "imagelabels.mat", "labels")
        files: dict[str, Pairs] = {}
        image_ids = {key: self._read_integers(tree, "setid.mat", key) for _, key in self._splits}
        _check_unique_names(tree, "setid.mat", (str(image_id) for ids in image_ids.values() for image_id in ids))
        for split, key in self._splits:
            ids = image_ids[key]
            if max(ids) > len(labels):
                raise CorruptFileError(
                    path=tree.full("setid.mat"), cause=f"must number images from 1 to {len(labels):,} in {key}"
                )
            files[split] = [(tree.image(f"jpg/image_{index:05d}.jpg"), str(labels[index - 1])) for index in ids]
        return _build_published_dataset(tree, files, "Oxford Flowers")

    def _read_integers(self, tree: Tree, path: str, key: str) -> list[int]:
        """Read an array of integers from 1 upwards."""
        from vitrail.data.sources.matlab import read_matlab

        array: Any = read_matlab(tree.read(path), tree.full(path)).get(key)
        if array is None or not len(array):
            raise CorruptFileError(path=tree.full(path), cause=f"must have numbers called {key}")
        numbers = array.tolist()
        if any(not number >= 1 or number % 1 for number in numbers):  # also rejects NaN, and infinity: inf % 1 is NaN
            raise CorruptFileError(path=tree.full(path), cause=f"must have whole numbers of at least 1 in {key}")
        return [int(number) for number in numbers]


def _check_unpacked(tree: Tree, archives: dict[str, str], name: str) -> None:
    """Reject a folder whose archives are not unpacked yet."""
    for folder, archive in archives.items():
        if folder not in tree.folders():
            raise UsageError(
                f"{name} must have the folder {folder}, got {tree.name!r} without it. Unpack {archive} there: tar xf"
                f" {archive}."
            )
