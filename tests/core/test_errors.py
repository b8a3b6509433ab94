"""Errors have attributes for path and cause, so that no caller parses messages."""

import ast
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.core.errors import CorruptFileError
from vitrail.core.files import read_json
from vitrail.data.decode import open_image, read_file
from vitrail.data.doctor import find_problems
from vitrail.data.sources.registry import open_data


@pytest.mark.parametrize(
    ("error", "message", "path", "cause"),
    [
        (CorruptFileError(path=Path("a b.png"), cause="is cut"), "'a b.png' is cut.", "a b.png", "is cut"),
        (CorruptFileError(path="a", cause="is cut", advice="Do this."), "'a' is cut. Do this.", "a", "is cut"),
        # A cause may end with another error's message, which has its own full stop or question mark.
        (CorruptFileError(path="a", cause="is wrong: no b."), "'a' is wrong: no b.", "a", "is wrong: no b"),
        (
            CorruptFileError(path="a", cause="is wrong. Is it 'c'?"),
            "'a' is wrong. Is it 'c'?",
            "a",
            "is wrong. Is it 'c'?",
        ),
        (
            CorruptFileError("Line 3 of 'a' is wrong.", path="a"),
            "Line 3 of 'a' is wrong.",
            "a",
            "Line 3 of 'a' is wrong",
        ),
        (CorruptFileError("No image is whole."), "No image is whole.", None, "No image is whole"),
    ],
)
def test_corrupt_file_error_has_a_path_and_a_cause(error, message, path, cause):
    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert (str(copy), copy.path, copy.cause) == (message, path, cause)


def test_path_and_cause_where_files_are_read(tmp_path):
    path = tmp_path / "cannot be decoded (x).png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:900])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "x.json").write_text("{")
    (tmp_path / "x.npz").write_bytes(b"PK")
    (tmp_path / "x.csv").write_text("a.png\n")
    for read, name, cause in (
        (open_image, path.name, "cannot be decoded ("),
        (read_file, "empty.png", "cannot be decoded (it is empty)"),
        (read_json, "x.json", "is corrupt: it is not a JSON document"),
        (open_data, "x.npz", "cannot be read as npz ("),
        (open_data, "x.csv", f"Line 1 of {str(tmp_path / 'x.csv')!r} must be file,label"),
    ):
        with pytest.raises(CorruptFileError) as caught:
            read(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
        assert caught.value.cause.startswith(cause)
        assert caught.value.cause in str(caught.value)


def test_doctor_prints_the_cause_for_any_file_name(tmp_path):
    """A pattern would take a file name that looks like a message for the cause."""
    for label in "ab":
        (tmp_path / label).mkdir()
        Image.new("RGB", (9, 9), (len(label), ord(label), 0)).save(tmp_path / label / "good.png")
    (tmp_path / "a" / "cannot be read .png").write_bytes(b"")
    (tmp_path / "b" / "gone.png").symlink_to(tmp_path / "nowhere")
    messages = {
        Path(finding.files[0]).name: finding.message
        for finding in find_problems(open_data(tmp_path))
        if finding.kind == "unreadable"
    }
    assert messages == {
        "cannot be read .png": "cannot be decoded (it is empty)",
        "gone.png": "is missing or not a file",
    }


def test_messages_that_start_with_a_path_are_built_by_the_error_class():
    """`CorruptFileError(f"{path!r} ...")` would state a path in its message without having the attribute."""
    written = []
    for file in sorted(Path(vitrail.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_error = isinstance(call, ast.Call) and ast.unparse(call.func) == "CorruptFileError"
            if is_error and call.args and isinstance(call.args[0], ast.JoinedStr):
                first = call.args[0].values[0]
                if isinstance(first, ast.FormattedValue) and first.conversion == ord("r"):
                    written.append(f"{file.name}:{call.lineno}")
    assert written == []
