"""Outputs of `predict` and `evaluate`: tables, sorting, contact sheets, pages of mistakes, saved predictions."""

import csv
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from tests.bundles.test_bundle import FIXTURE
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources.registry import open_data, open_named_split
from vitrail.evaluation.metrics import find_doubtful_labels
from vitrail.evaluation.paired import PairedComparison, holm_levels, sign_test
from vitrail.evaluation.predictions.prediction_tables import ParquetTable, check_table, open_table
from vitrail.evaluation.predictions.row_sorting import sort_rows
from vitrail.evaluation.predictions.saved_predictions import SavedPredictions
from vitrail.evaluation.protocols import evaluate_split
from vitrail.inference.registry import ENGINES
from vitrail.reports.contact_sheet import open_contact_sheet

EVIL = ["=cmd|' /C calc'!A0", "+1.png", "-1.png", "@a.png", "\tb.png", "\rc.png", 'a"b,c.png', "two\nlines.png"]
EVIL += ["<img src=x onerror=alert(1)>.png", os.fsdecode(b"\xff.png"), "개미.png", "'quoted.png"]


def prediction_row(file, *scores, labels="abcdefgh"):
    predictions = [{"label": label, "score": score} for label, score in zip(labels, scores, strict=False)]
    return {"file": file, "predictions": predictions}


def error_row(file):
    return {"file": file, "error": f"'{file}' cannot be decoded."}


def read_csv(path):
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.reader(file))


# The paired test


def test_sign_test_equals_scipy():
    from scipy.stats import binomtest

    pairs = [(b, c) for b in range(14) for c in range(14)] + [(318, 300), (5, 60), (0, 900), (4000, 4400)]
    pairs += [(50_000, 50_400), (200_000, 203_000), (1, 100_000)]
    for b, c in pairs:
        expected = binomtest(min(b, c), b + c).pvalue if b + c else 1.0
        assert sign_test(b, c) == pytest.approx(expected, rel=1e-8, abs=1e-300), (b, c)
        assert sign_test(c, b) == sign_test(b, c)


def test_comparison_sentence():
    paired = PairedComparison(318, 300, 836, 2000)
    sentence = "ViT 57.7 %, ResNet 56.8 %: cannot tell, 318 against 300 of 2,000, p = 0.49"
    assert paired.sentence("ViT", "ResNet") == sentence
    better = PairedComparison(30, 60, 10, 200).sentence("ViT", "ResNet")
    assert better == "ViT 20.0 %, ResNet 35.0 %: ResNet is better, 30 against 60 of 200, p = 0.0021"
    assert PairedComparison(30, 60, 10, 200).verdict("ViT", "ResNet", level=0.002) == "cannot tell"
    assert PairedComparison(0, 0, 3, 3).p_value == 1
    first, second = np.array([1, 1, 0, 0, 1], bool), np.array([1, 0, 1, 0, 0], bool)
    assert PairedComparison.of(first, second) == (2, 1, 1, 5)


def test_holm_levels_are_smallest_for_the_smallest_p_value():
    levels = holm_levels({"a": 0.001, "b": 0.02, "c": 0.04, "d": 0.9})
    assert levels == pytest.approx({"a": 0.0125, "b": 0.05 / 3, "c": 0.05 / 3, "d": 0.05 / 3})


# Tables


def test_csv_has_no_formulas_and_keeps_all_values(tmp_path):
    with open_table(tmp_path / "a.csv", top_k=2) as table:
        for name in EVIL:
            table.add(prediction_row(name, 0.75, 0.1, labels=("=1+1", "b")))
        table.add(error_row("z.png"))
    header, *rows = read_csv(tmp_path / "a.csv")
    assert header == ["file", "label", "score", "label_2", "score_2", "error"]
    assert len(rows) == len(EVIL) + 1
    assert all(not cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cells in rows for cell in cells)
    files = [
        cells[0].removeprefix("'") if name[0] in "=+-@\t\r" else cells[0]
        for cells, name in zip(rows, EVIL, strict=False)
    ]
    assert files == [name.replace("\udcff", "\\udcff") for name in EVIL]
    assert rows[0][1:] == ["'=1+1", "0.75", "b", "0.1", ""]
    assert rows[-1] == ["z.png", "", "", "", "", "'z.png' cannot be decoded."]


def test_json_lines_and_parquet_have_the_same_rows(tmp_path):
    from pyarrow import parquet

    rows = [prediction_row(name, 0.75, 0.1) for name in EVIL] + [error_row("z.png")]
    for ending in ("jsonl", "parquet"):
        with open_table(tmp_path / f"a.{ending}", top_k=2) as table:
            for entry in rows:
                table.add(entry)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == rows
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column_names == ["file", "label", "score", "label_2", "score_2", "error"]
    assert table["file"].to_pylist()[:-1] == [name.replace("\udcff", "\\udcff") for name in EVIL]
    assert table.slice(len(EVIL)).to_pylist()[0]["label"] is None
    assert table["score_2"].to_pylist()[0] == pytest.approx(0.1)


def write_rows(path, count, sort=None, force=False):
    rows = (prediction_row(f"images/{number**7}.png", 1 / (number + 1), 0.1, 1e-9 * number) for number in range(count))
    with open_table(path, top_k=3, force=force) as table:
        if sort is None:
            for entry in rows:
                table.add(entry)
            return
        with sort_rows(rows, sort, path.parent) as ordered:
            for entry in ordered:
                table.add(entry)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_full_disk_keeps_the_previous_file(tmp_path, ending):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / f"a.{ending}"
    path.write_text("what was there")
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(VitrailError, match=r"failed \(.*\); the previous content is unchanged"):
            write_rows(path, 40_000, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_other_suffixes_and_a_missing_package_are_errors(tmp_path, monkeypatch):
    for name in ("a.xlsx", "answers", "a.npz", "."):
        with pytest.raises(UsageError, match=r"must be a file that ends in \.csv, \.jsonl, \.parquet, got"):
            check_table(tmp_path / name, force=False)
    check_table(tmp_path / "a.CSV", force=False)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        UsageError, match=r"\.parquet needs the 'parquet' extra \(pyarrow is missing\). Run.*pip install"
    ):
        check_table(tmp_path / "a.parquet", force=False)


@pytest.mark.parametrize(("ending", "sort"), [("csv", None), ("jsonl", None), ("csv", "uncertain")])
def test_writing_rows_uses_constant_memory(tmp_path, ending, sort):
    peaks = []
    for count in (1000, 6000):
        tracemalloc.start()
        write_rows(tmp_path / f"{count}.{ending}", count, sort)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 5000 * 40  # a row with three classes is 600 bytes


def test_parquet_is_written_in_row_groups(tmp_path, monkeypatch):
    from pyarrow import parquet

    monkeypatch.setattr(ParquetTable, "_BATCH_ROWS", 100)
    write_rows(tmp_path / "a.parquet", 950)
    file = parquet.ParquetFile(tmp_path / "a.parquet")
    assert (file.num_row_groups, file.metadata.num_rows) == (10, 950)


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "sort"), [("csv", ""), ("jsonl", ""), ("parquet", ""), ("csv", "uncertain")])
def test_million_rows_use_hardly_more_memory_than_a_hundred_thousand(tmp_path, ending, sort):
    script = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from vitrail.evaluation.predictions.prediction_tables import open_table\n"
        "from vitrail.evaluation.predictions.row_sorting import sort_rows\n"
        "count, path, sort = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]\n"
        "labels = ['a', 'b', 'c']\n"
        "rows = ({'file': f'images/{n:07}.png', 'predictions': [{'label': l, 'score': (n * 7919 % 100003) / 100003}"
        " for l in labels]} for n in range(count))\n"
        "with open_table(path, top_k=3) as table:\n"
        "    if sort:\n"
        "        with sort_rows(rows, sort, path.parent) as ordered:\n"
        "            for row in ordered: table.add(row)\n"
        "    else:\n"
        "        for row in rows: table.add(row)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peaks = []
    for count in (100_000, 1_000_000):
        command = [sys.executable, "-c", script, str(count), str(tmp_path / f"{count}.{ending}"), sort]
        peaks.append(1024 * int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 900_000 * (28 if sort else 0) + 12e6  # score, offset and order of each row


def test_sorting_is_stable_and_puts_errors_last():
    rows = [
        prediction_row("a", 0.5),
        error_row("b"),
        prediction_row("c", 0.9),
        prediction_row("d", 0.2),
        prediction_row("e", 0.5),
    ]
    for by, expected in (("uncertain", "daecb"), ("confident", "caedb")):
        with sort_rows(rows, by) as ordered:
            assert "".join(entry["file"] for entry in ordered) == expected


# predict


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of images with hostile names, one of them corrupt."""
    folder = tmp_path_factory.mktemp("evil")
    for index, name in enumerate(EVIL):
        pixels = np.random.default_rng(index).integers(0, 256, (9, 9), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name.replace("/", "|"), "PNG")
    (folder / "z.png").write_bytes(b"not an image")
    return folder


def test_predict_writes_the_rows_that_it_prints(call, folder, tmp_path):
    printed = call("predict", FIXTURE, folder, "--json", "--top-k", "2")
    lines = [json.loads(line) for line in printed.stdout.splitlines()]
    for ending in ("csv", "jsonl", "parquet"):
        done = call("predict", FIXTURE, folder, "--output", tmp_path / f"a.{ending}", "--top-k", "2")
        assert done.returncode == 1
        assert f"1 of {len(lines)} images could not be classified" in done.stderr
        assert done.stdout.split() == ["predictions", str(tmp_path / f"a.{ending}")]
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == lines
    rows = read_csv(tmp_path / "a.csv")[1:]
    assert len(rows) == len(lines)
    assert [cells[1] for cells in rows] == [
        line["predictions"][0]["label"] if "error" not in line else "" for line in lines
    ]
    assert ["cannot be decoded" in cells[-1] for cells in rows].count(True) == 1
    again = call("predict", FIXTURE, folder, "--output", tmp_path / "a.csv")
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)
    assert call("predict", FIXTURE, folder, "--output", tmp_path / "a.csv", "--force").returncode == 1


def test_predict_sorts_by_certainty(call, tmp_path):
    for by in ("uncertain", "confident"):
        done = call("predict", "fashion", "fashion-40", "--sort", by, "--json")
        scores = [json.loads(line)["predictions"][0]["score"] for line in done.stdout.splitlines()]
        assert scores == sorted(scores, reverse=by == "confident")
        assert len(scores) == 40


def test_predict_reads_every_form_of_data(call, tmp_path):
    pixels = open_data("fashion-40").splits["test"].images
    np.savez(tmp_path / "bare.npz", images=pixels[:5])
    np.savez(tmp_path / "split.npz", train_images=pixels[:4], train_labels=np.arange(4), test_images=pixels[4:7],
             test_labels=np.arange(3))  # fmt: skip
    Image.fromarray(pixels[0][..., 0]).save(tmp_path / "a.png")
    (tmp_path / "list.csv").write_text("file,label\na.png,Bag\n")
    expected = {"bare.npz": ("all", 5), "split.npz": ("test", 3)}
    for name, (split, count) in expected.items():
        lines = call("predict", "fashion", tmp_path / name, "--json", "--top-k", "1").stdout.splitlines()
        assert [json.loads(line)["file"] for line in lines] == [f"{split} image {index}" for index in range(count)]
    lines = call("predict", "fashion", tmp_path / "split.npz", "--split", "train", "--json").stdout.splitlines()
    assert len(lines) == 4
    assert json.loads(call("predict", "fashion", tmp_path / "list.csv", "--json").stdout)["file"] == str(
        tmp_path / "a.png"
    )
    for arguments in (
        [tmp_path / "split.npz", tmp_path / "a.png"],
        [tmp_path / "a.png", "--split", "test"],
        [tmp_path / "split.npz", "--split", "val"],
        ["fashion-40", "--output", tmp_path / "a.xlsx"],
        ["fashion-40", "--page", tmp_path],
    ):
        done = call("predict", "fashion", *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


def test_path_takes_precedence_over_a_built_in_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(open_named_split(["digits"])) == 360
    (tmp_path / "digits").mkdir()
    assert open_named_split(["digits"]) is None


def test_contact_sheet_has_every_image_by_predicted_class(call, folder, tmp_path):
    done = call("predict", FIXTURE, folder, "--page", tmp_path / "sheet", "--output", tmp_path / "a.jsonl")
    assert done.returncode == 1
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    labels = {line["predictions"][0]["label"] for line in lines if "predictions" in line}
    pages = {path.name: path.read_text() for path in (tmp_path / "sheet").glob("*.html")}
    assert set(pages) == {"index.html", "unread-1.html", *(f"answer-{n}-1.html" for n in range(1, len(labels) + 1))}
    image_count = sum(text.count("<img ") for name, text in pages.items() if name != "index.html")
    assert image_count == len(lines) - 1
    assert "cannot be decoded" in pages["unread-1.html"]
    # The same numbers as in the terminal.
    assert f"1 of {len(lines)} images could not be classified" in done.stderr
    numbers = re.findall(r'<b>([\d,]+)</b><span class="en" lang="en">(.*?)</span>', pages["index.html"])
    assert numbers == [
        (str(len(lines)), "images"),
        (str(len(labels)), "predicted classes"),
        ("1", "could not be classified"),
    ]
    for text in pages.values():
        assert "<img src=x" not in text
        assert "http:" not in text
        assert "https:" not in text


def test_equally_large_groups_of_a_contact_sheet_are_in_natural_order(tmp_path):
    with open_contact_sheet(tmp_path / "sheet", "ViT") as sheet:
        for label in ("class 10", "class 2", "class 1", "class 1"):
            sheet.add(prediction_row("a.png", 0.9, labels=[label]) | {"thumbnail": ""})
    page = (tmp_path / "sheet" / "index.html").read_text(encoding="utf-8")
    positions = [page.index(f"{label}<") for label in ("class 1", "class 2", "class 10")]
    assert positions == sorted(positions)


def test_large_group_of_a_contact_sheet_has_several_pages(call, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.reports.contact_sheet.IMAGES_PER_PAGE", 3)
    assert call("predict", "fashion", "fashion-40", "--page", tmp_path / "sheet").returncode == 0
    names = sorted(path.name for path in (tmp_path / "sheet").glob("answer-1-*.html"))
    assert names == ["answer-1-1.html", "answer-1-2.html"]
    first, second = ((tmp_path / "sheet" / name).read_text() for name in names)
    assert "next page" in first
    assert "previous page" not in first
    assert "next page" not in second
    assert (first.count("<img "), second.count("<img ")) == (3, 2)


# evaluate


def test_evaluate_writes_predictions_and_truth(call, tmp_path):
    done = call("evaluate", "fashion", "fashion-40", "--output", tmp_path / "a.csv", "--json")
    scores = json.loads(done.stdout)
    header, *rows = read_csv(tmp_path / "a.csv")
    assert header[:4] == ["file", "truth", "label", "score"]
    assert len(rows) == 40
    assert sum(cells[1] == cells[2] for cells in rows) / 40 == scores["accuracy"] == 0.975
    assert call("evaluate", "fashion", "fashion-40", "--output", tmp_path / "a.npz").returncode == 0
    saved = SavedPredictions.read(tmp_path / "a.npz")
    assert (saved.right.mean(), saved.data, saved.split, len(saved)) == (0.975, "fashion-40", "test", 40)
    assert [saved.labels[label] for label in saved.answers] == [cells[2] for cells in rows]
    assert saved.scores == pytest.approx([float(cells[3]) for cells in rows], rel=1e-5)


def test_every_mistake_is_on_the_pages(call, tmp_path, monkeypatch):
    arrays = open_data("fashion-40").splits["test"]
    names = np.array(open_data("fashion-40").labels)
    np.savez(tmp_path / "wrong.npz", images=arrays.images, labels=names[(arrays.labels + 1) % 10])
    monkeypatch.setattr("vitrail.reports.contact_sheet.IMAGES_PER_PAGE", 15)
    done = call("evaluate", "fashion", tmp_path / "wrong.npz", "--page", tmp_path / "page", "--json")
    wrong = 40 - round(40 * json.loads(done.stdout)["accuracy"])
    assert wrong == 40
    pages = [(tmp_path / "page" / f"mistakes-{number}.html").read_text() for number in (1, 2, 3)]
    assert sum(text.count("<img ") for text in pages) == wrong
    index = (tmp_path / "page" / "index.html").read_text()
    assert index.count("<img ") == 15
    assert "mistakes-3.html" in index
    assert call("evaluate", "fashion", "fashion-40", "--page", tmp_path / "page").returncode == 2


def test_changed_labels_are_found():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, 2000)
    logits = rng.normal(size=(2000, 4)) + 6 * np.eye(4)[truth]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = truth.copy()
    labels[:50] = (truth[:50] + 1) % 4
    is_doubtful = find_doubtful_labels(shares, labels)
    assert is_doubtful[:50].mean() > 0.5
    assert is_doubtful[50:].sum() <= 2
    assert not find_doubtful_labels(shares, shares.argmax(1)).any()


@pytest.mark.slow
def test_changed_labels_of_fashion_mnist_are_found():
    """Recall and precision as in docs/evaluate.md."""
    try:
        predictions = evaluate_split(ENGINES["torch"].open("fashion"), "fashion-mnist", "test").predictions
    except UsageError as missing:
        pytest.skip(str(missing))
    for share, recall, precision in ((0.05, 0.86, 0.80), (0.01, 0.84, 0.43)):
        shares = []
        for seed in range(10):
            rng = np.random.default_rng(seed)
            is_changed = rng.random(10_000) < share
            labels = predictions.labels.copy()
            labels[is_changed] = (labels[is_changed] + rng.integers(1, 10, is_changed.sum())) % 10
            is_doubtful = find_doubtful_labels(predictions.probabilities, labels)
            hits = (is_doubtful & is_changed).sum()
            shares.append([hits / is_changed.sum(), hits / is_doubtful.sum()])
        assert np.mean(shares, axis=0) == pytest.approx([recall, precision], abs=0.01)


def test_against_compares_models_on_the_same_images(call, tmp_path):
    command = ["evaluate", "fashion", "fashion-40"]
    assert call(*command, "--output", tmp_path / "a.npz").returncode == 0
    for other in ("fashion", tmp_path / "a.npz"):
        comparison = json.loads(call(*command, "--against", other, "--json").stdout)["against"]
        values = [comparison[key] for key in ("only_this", "only_other", "p_value", "accuracy")]
        assert tuple(values) == (0, 0, 1.0, 0.975)
    assert "cannot tell, 0 against 0 of 40, p = 1" in call(*command, "--against", "fashion").stdout
    for arguments, message in (
        (["evaluate", "fashion", "digits", "--against", tmp_path / "a.npz"], "0 in common"),
        ([*command, "--against", FIXTURE], f"--against {FIXTURE}: "),
        ([*command, "--against", tmp_path / "missing"], "must be a folder that exists"),
        ([*command, "--against", tmp_path / "missing.npz"], "must be a file that exists"),
        ([*command, "--against", "fashion", "--protocol", "knn"], "must be used with --protocol classify"),
        ([*command, "--output", tmp_path / "a.xlsx"], ".csv, .jsonl, .parquet, .npz"),
    ):
        done = call(*arguments)
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]


# Saved predictions


def saved_predictions(images, labels, predicted, names=("a", "b", "c"), root=""):
    split = Split("test", images, np.array(labels))
    return SavedPredictions.of(Dataset("data", names, {"test": split}, root=root), split, np.arange(len(predicted)),
                          np.eye(len(names), dtype=np.float32)[predicted])  # fmt: skip


def test_saved_predictions_are_matched_by_image_not_by_index(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (6, 2, 2, 1), dtype=np.uint8)
    first = saved_predictions(pixels, [0, 1, 2, 0, 1, 2], [0, 1, 2, 1, 1, 1])
    order = np.array([3, 1, 5, 0, 4, 2])
    other = saved_predictions(pixels[order], np.array([0, 1, 2, 0, 1, 2])[order], np.array([0, 1, 0, 0, 1, 2])[order])
    assert first.compare(other) == (1, 2, 3, 6)
    first.write(tmp_path / "a.npz")
    assert SavedPredictions.read(tmp_path / "a.npz").compare(other) == (1, 2, 3, 6)
    with pytest.raises(UsageError, match=r"6 of data \(test\) and 5 of data \(test\), 5 in common"):
        first.compare(saved_predictions(pixels[:5], [0, 1, 2, 0, 1], [0] * 5))
    with pytest.raises(UsageError, match="same 6 images with 1 different labels"):
        first.compare(saved_predictions(pixels, [0, 1, 2, 0, 1, 0], [0] * 6))


def test_files_are_matched_in_a_copy_of_the_data(tmp_path):
    for folder in ("original", "copy"):
        (tmp_path / folder).mkdir()
        for name, content in (("x.png", b"1"), (os.fsdecode(b"\xff.png"), b"22")):
            (tmp_path / folder / name).write_bytes(content)
    names = ["x.png", os.fsdecode(b"\xff.png")]
    first, other = (
        saved_predictions(
            [str(tmp_path / folder / name) for name in names], [0, 1], [0, 0], root=str(tmp_path / folder)
        )
        for folder in ("original", "copy")
    )
    assert first.compare(other) == (0, 0, 1, 2)
    (tmp_path / "copy" / "x.png").write_bytes(b"2")  # same size, as BMP files of one shape have
    changed = saved_predictions(
        [str(tmp_path / "copy" / name) for name in names], [0, 1], [0, 0], root=str(tmp_path / "copy")
    )
    with pytest.raises(UsageError, match="1 in common"):
        first.compare(changed)


def test_files_in_archives_are_matched_by_content(tmp_path):
    keys = []
    for name, level in (("one", 0), ("other", 255), ("copy", 0)):
        folder = tmp_path / name / "data"
        for label in "ab":
            (folder / label).mkdir(parents=True)
            Image.fromarray(np.full((4, 4), level, np.uint8)).save(folder / label / "x.bmp")
        shutil.make_archive(str(folder), "zip", folder)
        dataset = open_data(f"{folder}.zip")
        keys.append(dataset.first_split.image_keys(dataset.root).tolist())
    assert not set(keys[0]) & set(keys[1])
    assert keys[0] == keys[2]


def test_class_that_is_not_in_the_data_is_wrong():
    split = Split("test", np.zeros((2, 2, 2, 1), np.uint8), np.array([0, 1]))
    dataset = Dataset("data", ("b", "d"), {"test": split})
    shares = np.array([[0, 0.9, 0.1, 0], [0.6, 0, 0, 0.4]], np.float32)
    saved = SavedPredictions.of(dataset, split, np.arange(2), shares, np.array([1, 3]))
    assert saved.answers.tolist() == [0, -1]
    assert saved.own.tolist() == pytest.approx([0.9, 0.4])


@pytest.mark.parametrize("change", ["missing", "garbage", "pickle"])
def test_corrupt_saved_predictions_give_one_error_line(tmp_path, change):
    path = tmp_path / "a.npz"
    saved_predictions(np.zeros((3, 2, 2, 1), np.uint8), [0, 1, 2], [0, 1, 1]).write(path)
    arrays = dict(np.load(path))
    if change == "missing":
        del arrays["truth"]
    elif change == "pickle":
        arrays["labels"] = np.array(["a", {}, "c"], object)
    np.savez(path, **arrays)
    if change == "garbage":
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptFileError) as error:
        SavedPredictions.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
