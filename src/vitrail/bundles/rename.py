"""`vitrail rename`: change labels of a bundle. All other files, above all the weights, are copied byte by byte."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from vitrail.bundles.folder import DECISION_RULE_FILE, EMBEDDED, FILES, check_folder
from vitrail.bundles.metadata import BundleInfo, read_bundle_info, validate_labels
from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.files import MANIFEST, atomic_folder, check_output, folder_lock, write_json

Names = Mapping[str, str] | Iterable[str]
"""New names of labels: a mapping, or texts OLD=NEW."""


def rename_labels(
    bundle: str | Path, names: Names, output: Path | None = None, *, force: bool = False
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Rename labels of the bundle at a path, in place or in a copy at `output`. Return the renamed and all labels.

    The folder is replaced atomically. Processes that rename labels of the same bundle wait for each other.
    """
    source = check_folder(bundle)
    if output is not None:
        check_output(output, force=force)
    elif source in map(check_folder, EMBEDDED):
        raise UsageError(
            f"Output must be given for the embedded bundle {str(bundle)!r}, which is never changed, got none. Write a"
            " copy with --output DIR."
        )
    # The folder at the end of links is replaced, not the link.
    target = Path(os.path.realpath(source)) if output is None else output
    names = names if isinstance(names, Mapping) else list(names)
    with folder_lock(Path(os.path.realpath(source)).parent):
        _rename(read_bundle_info(source, weights=False), names)  # raises errors before the weights are copied
        with atomic_folder(target, force=force or output is None) as folder:
            for name in (MANIFEST, *FILES, DECISION_RULE_FILE):  # not those of the manifest, which may be a stranger's
                if name != DECISION_RULE_FILE or (source / name).exists():
                    shutil.copyfile(source / name, folder / name)
            info = read_bundle_info(folder)  # verifies the copy: a training run may have replaced the source meanwhile
            renamed, labels = _rename(info, names)
            write_json(folder / "labels.json", labels)
    return renamed, labels


def _rename(info: BundleInfo, names: Mapping[str, str] | list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the new name of each label that is renamed, and all labels with their new names."""
    if not info.config.classifies or not info.config.classes:
        raise UsageError(
            f"Bundle must have a model that predicts classes, got one that predicts {info.config.predicts}."
        )
    labels = info.labels or tuple(map(str, range(info.config.classes)))
    renamed: dict[str, str] = {}
    for old, new in names.items() if isinstance(names, Mapping) else (_split(text, labels) for text in names):
        if old not in labels:
            raise UsageError(f"Label must be one that the bundle has, got {old!r}.{did_you_mean(str(old), labels)}")
        if old in renamed:
            raise UsageError(f"Label must be renamed once, got {old!r} twice.")
        renamed[old] = new
    if not renamed:
        raise UsageError("Labels to rename must be at least one, got none. Name them as OLD=NEW.")
    return renamed, validate_labels([renamed.get(label, label) for label in labels], len(labels))


def _split(text: str, labels: tuple[str, ...]) -> tuple[str, str]:
    """Return the old and the new name in OLD=NEW. Either may contain =, if only one part before an = is a label."""
    if not isinstance(text, str) or "=" not in text:
        raise UsageError(f"Name of a label must be OLD=NEW, got {text!r}.")
    pairs = [(text[:index], text[index + 1 :]) for index, character in enumerate(text) if character == "="]
    matches = [pair for pair in pairs if pair[0] in labels]
    if len(matches) > 1:
        raise UsageError(
            f"Name of a label must be OLD=NEW for one label, got {text!r}, which fits several. Use vitrail.rename in"
            " Python."
        )
    return (matches or pairs)[0]
