"""Answers in files and on pages: --output, --sort and --page of `predict`, --against of `evaluate`, answers.npz."""

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

EVIL = ["=cmd|' /C calc'!A0", "+1.png", "-1.png", "@a.png", "\tb.png", "\rc.png", 'a"b,c.png', "two\nlines.png"]
EVIL += ["<img src=x onerror=alert(1)>.png", os.fsdecode(b"\xff.png"), "개미.png", "'quoted.png"]


def row(file, *scores, labels="abcdefgh"):
    named = [{"label": label, "score": score} for label, score in zip(labels, scores, strict=False)]
    return {"file": file, "predictions": named}


def failed(file):
    return {"file": file, "error": f"'{file}' cannot be decoded."}


def read_csv(path):
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.reader(file))


# The paired test


def test_the_paired_test_equals_scipys():
    from scipy.stats import binomtest

    pairs = [(b, c) for b in range(14) for c in range(14)] + [(318, 300), (5, 60), (0, 900), (4000, 4400)]
    pairs += [(50_000, 50_400), (200_000, 203_000), (1, 100_000)]
    for b, c in pairs:
        expected = binomtest(min(b, c), b + c).pvalue if b + c else 1.0
        assert sign_test(b, c) == pytest.approx(expected, rel=1e-8, abs=1e-300), (b, c)
        assert sign_test(c, b) == sign_test(b, c)


def test_a_comparison_is_a_sentence():
    paired = PairedComparison(318, 300, 836, 2000)
    said = "ViT 57.7 %, ResNet 56.8 %: cannot tell, 318 against 300 of 2,000, p = 0.49"
    assert paired.sentence("ViT", "ResNet") == said
    better = PairedComparison(30, 60, 10, 200).sentence("ViT", "ResNet")
    assert better == "ViT 20.0 %, ResNet 35.0 %: ResNet is better, 30 against 60 of 200, p = 0.0021"
    assert PairedComparison(30, 60, 10, 200).verdict("ViT", "ResNet", level=0.002) == "cannot tell"
    assert PairedComparison(0, 0, 3, 3).p_value == 1
    one, other = np.array([1, 1, 0, 0, 1], bool), np.array([1, 0, 1, 0, 0], bool)
    assert PairedComparison.of(one, other) == (2, 1, 1, 5)


def test_holm_is_strictest_with_the_smallest():
    levels = holm_levels({"a": 0.001, "b": 0.02, "c": 0.04, "d": 0.9})
    assert levels == pytest.approx({"a": 0.0125, "b": 0.05 / 3, "c": 0.05 / 3, "d": 0.05 / 3})


# Tables


def test_a_spreadsheet_computes_nothing_and_loses_nothing(tmp_path):
    with open_table(tmp_path / "a.csv", top_k=2) as table:
        for name in EVIL:
            table.add(row(name, 0.75, 0.1, labels=("=1+1", "b")))
        table.add(failed("z.png"))
    header, *rows = read_csv(tmp_path / "a.csv")
    assert header == ["file", "label", "score", "label_2", "score_2", "error"]
    assert len(rows) == len(EVIL) + 1
    assert all(not cell.startswith(("=", "+", "-", "@", "\t", "\r")) for one in rows for cell in one)
    assert [one[0].removeprefix("'") if EVIL[at][0] in "=+-@\t\r" else one[0] for at, one in enumerate(rows[:-1])] == [
        name.replace("\udcff", "\\udcff") for name in EVIL
    ]
    assert rows[0][1:] == ["'=1+1", "0.75", "b", "0.1", ""]
    assert rows[-1] == ["z.png", "", "", "", "", "'z.png' cannot be decoded."]


def test_json_lines_and_parquet_hold_the_same(tmp_path):
    from pyarrow import parquet

    rows = [row(name, 0.75, 0.1) for name in EVIL] + [failed("z.png")]
    for ending in ("jsonl", "parquet"):
        with open_table(tmp_path / f"a.{ending}", top_k=2) as table:
            for one in rows:
                table.add(one)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == rows
    found = parquet.read_table(tmp_path / "a.parquet")
    assert found.column_names == ["file", "label", "score", "label_2", "score_2", "error"]
    assert found["file"].to_pylist()[:-1] == [name.replace("\udcff", "\\udcff") for name in EVIL]
    assert found.slice(len(EVIL)).to_pylist()[0]["label"] is None
    assert found["score_2"].to_pylist()[0] == pytest.approx(0.1)


def write_many(path, count, sort=None, force=False):
    rows = (row(f"images/{number**7}.png", 1 / (number + 1), 0.1, 1e-9 * number) for number in range(count))
    with open_table(path, top_k=3, force=force) as table:
        if sort is None:
            for one in rows:
                table.add(one)
            return
        with sort_rows(rows, sort, path.parent) as ordered:
            for one in ordered:
                table.add(one)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_full_disk_leaves_no_file(tmp_path, ending):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / f"a.{ending}"
    path.write_text("what was there")
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(VitrailError, match=r"failed \(.*\); the previous content is unchanged"):
            write_many(path, 40_000, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_other_endings_and_a_missing_package_are_refused(tmp_path, monkeypatch):
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
def test_rows_are_not_kept_in_memory(tmp_path, ending, sort):
    peaks = []
    for count in (1000, 6000):
        tracemalloc.start()
        write_many(tmp_path / f"{count}.{ending}", count, sort)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 5000 * 40  # a row of three answers is 600 bytes


def test_parquet_is_written_piece_by_piece(tmp_path, monkeypatch):
    from pyarrow import parquet

    monkeypatch.setattr(ParquetTable, "_BATCH_ROWS", 100)
    write_many(tmp_path / "a.parquet", 950)
    found = parquet.ParquetFile(tmp_path / "a.parquet")
    assert (found.num_row_groups, found.metadata.num_rows) == (10, 950)


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "sort"), [("csv", ""), ("jsonl", ""), ("parquet", ""), ("csv", "uncertain")])
def test_a_million_rows_take_as_much_memory_as_a_hundred_thousand(tmp_path, ending, sort):
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
        words = [sys.executable, "-c", script, str(count), str(tmp_path / f"{count}.{ending}"), sort]
        peaks.append(1024 * int(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 900_000 * (28 if sort else 0) + 12e6  # a score, a place and an order each


def test_an_order_keeps_ties_and_puts_errors_last():
    rows = [row("a", 0.5), failed("b"), row("c", 0.9), row("d", 0.2), row("e", 0.5)]
    for by, expected in (("uncertain", "daecb"), ("confident", "caedb")):
        with sort_rows(rows, by) as ordered:
            assert "".join(one["file"] for one in ordered) == expected


# predict


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images with names that are no good, one of them damaged."""
    folder = tmp_path_factory.mktemp("evil")
    for index, name in enumerate(EVIL):
        pixels = np.random.default_rng(index).integers(0, 256, (9, 9), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name.replace("/", "|"), "PNG")
    (folder / "z.png").write_bytes(b"not an image")
    return folder


def test_predict_writes_what_it_would_print(call, folder, tmp_path):
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
    assert [one[1] for one in rows] == [
        line["predictions"][0]["label"] if "error" not in line else "" for line in lines
    ]
    assert ["cannot be decoded" in one[-1] for one in rows].count(True) == 1
    again = call("predict", FIXTURE, folder, "--output", tmp_path / "a.csv")
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)
    assert call("predict", FIXTURE, folder, "--output", tmp_path / "a.csv", "--force").returncode == 1


def test_predict_sorts_by_certainty(call, tmp_path):
    for by in ("uncertain", "confident"):
        done = call("predict", "fashion", "fashion-40", "--sort", by, "--json")
        scores = [json.loads(line)["predictions"][0]["score"] for line in done.stdout.splitlines()]
        assert scores == sorted(scores, reverse=by == "confident")
        assert len(scores) == 40


def test_predict_takes_every_form_of_data(call, tmp_path):
    pixels = open_data("fashion-40").splits["test"].images
    np.savez(tmp_path / "bare.npz", images=pixels[:5])
    np.savez(tmp_path / "split.npz", train_images=pixels[:4], train_labels=np.arange(4), test_images=pixels[4:7],
             test_labels=np.arange(3))  # fmt: skip
    Image.fromarray(pixels[0][..., 0]).save(tmp_path / "a.png")
    (tmp_path / "list.csv").write_text("file,label\na.png,Bag\n")
    expected = {"bare.npz": ("all", 5), "split.npz": ("test", 3)}
    for name, (split, count) in expected.items():
        lines = call("predict", "fashion", tmp_path / name, "--json", "--top-k", "1").stdout.splitlines()
        assert [json.loads(line)["file"] for line in lines] == [f"{split} image {at}" for at in range(count)]
    lines = call("predict", "fashion", tmp_path / "split.npz", "--split", "train", "--json").stdout.splitlines()
    assert len(lines) == 4
    assert json.loads(call("predict", "fashion", tmp_path / "list.csv", "--json").stdout)["file"] == str(
        tmp_path / "a.png"
    )
    for words in (
        [tmp_path / "split.npz", tmp_path / "a.png"],
        [tmp_path / "a.png", "--split", "test"],
        [tmp_path / "split.npz", "--split", "val"],
        ["fashion-40", "--output", tmp_path / "a.xlsx"],
        ["fashion-40", "--page", tmp_path],
    ):
        done = call("predict", "fashion", *words)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


def test_a_path_comes_before_a_built_in_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(open_named_split(["digits"])) == 360
    (tmp_path / "digits").mkdir()
    assert open_named_split(["digits"]) is None


def test_a_contact_sheet_shows_every_image_by_its_answer(call, folder, tmp_path):
    done = call("predict", FIXTURE, folder, "--page", tmp_path / "sheet", "--output", tmp_path / "a.jsonl")
    assert done.returncode == 1
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    answers = {line["predictions"][0]["label"] for line in lines if "predictions" in line}
    pages = {path.name: path.read_text() for path in (tmp_path / "sheet").glob("*.html")}
    assert set(pages) == {"index.html", "unread-1.html", *(f"answer-{n}-1.html" for n in range(1, len(answers) + 1))}
    shown = sum(text.count("<img ") for name, text in pages.items() if name != "index.html")
    assert shown == len(lines) - 1
    assert "cannot be decoded" in pages["unread-1.html"]
    # The same numbers as in the terminal.
    assert f"1 of {len(lines)} images could not be classified" in done.stderr
    numbers = re.findall(r'<b>([\d,]+)</b><span class="en" lang="en">(.*?)</span>', pages["index.html"])
    assert numbers == [
        (str(len(lines)), "images"),
        (str(len(answers)), "predicted classes"),
        ("1", "could not be classified"),
    ]
    for text in pages.values():
        assert "<img src=x" not in text
        assert "http:" not in text
        assert "https:" not in text


def test_a_gallery_has_pages(call, tmp_path, monkeypatch):
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


def test_evaluate_keeps_answers_and_truth(call, tmp_path):
    done = call("evaluate", "fashion", "fashion-40", "--output", tmp_path / "a.csv", "--json")
    scores = json.loads(done.stdout)
    header, *rows = read_csv(tmp_path / "a.csv")
    assert header[:4] == ["file", "truth", "label", "score"]
    assert len(rows) == 40
    assert sum(one[1] == one[2] for one in rows) / 40 == scores["accuracy"] == 0.975
    assert call("evaluate", "fashion", "fashion-40", "--output", tmp_path / "a.npz").returncode == 0
    kept = SavedPredictions.read(tmp_path / "a.npz")
    assert (kept.right.mean(), kept.data, kept.split, len(kept)) == (0.975, "fashion-40", "test", 40)
    assert [kept.labels[said] for said in kept.answers] == [one[2] for one in rows]
    assert kept.scores == pytest.approx([float(one[3]) for one in rows], rel=1e-5)


def test_every_mistake_is_on_the_page(call, tmp_path, monkeypatch):
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


def test_labels_that_are_likely_wrong_are_found():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, 2000)
    logits = rng.normal(size=(2000, 4)) + 6 * np.eye(4)[truth]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    given = truth.copy()
    given[:50] = (truth[:50] + 1) % 4
    found = find_doubtful_labels(shares, given)
    assert found[:50].mean() > 0.5
    assert found[50:].sum() <= 2
    assert not find_doubtful_labels(shares, shares.argmax(1)).any()


@pytest.mark.slow
def test_changed_labels_of_fashion_mnist_are_found():
    """As docs/evaluate.md states."""
    try:
        found = evaluate_split(ENGINES["torch"].open("fashion"), "fashion-mnist", "test").predictions
    except UsageError as missing:
        pytest.skip(str(missing))
    for share, recall, precision in ((0.05, 0.86, 0.80), (0.01, 0.84, 0.43)):
        shares = []
        for seed in range(10):
            rng = np.random.default_rng(seed)
            is_changed = rng.random(10_000) < share
            given = found.labels.copy()
            given[is_changed] = (given[is_changed] + rng.integers(1, 10, is_changed.sum())) % 10
            marked = find_doubtful_labels(found.probabilities, given)
            both = (marked & is_changed).sum()
            shares.append([both / is_changed.sum(), both / marked.sum()])
        assert np.mean(shares, axis=0) == pytest.approx([recall, precision], abs=0.01)


def test_two_models_are_compared_on_the_same_images(call, tmp_path):
    words = ["evaluate", "fashion", "fashion-40"]
    assert call(*words, "--output", tmp_path / "a.npz").returncode == 0
    for other in ("fashion", tmp_path / "a.npz"):
        found = json.loads(call(*words, "--against", other, "--json").stdout)["against"]
        assert (found["only_this"], found["only_other"], found["p_value"], found["accuracy"]) == (0, 0, 1.0, 0.975)
    assert "cannot tell, 0 against 0 of 40, p = 1" in call(*words, "--against", "fashion").stdout
    for wrong, said in (
        (["evaluate", "fashion", "digits", "--against", tmp_path / "a.npz"], "0 in common"),
        ([*words, "--against", FIXTURE], f"--against {FIXTURE}: "),
        ([*words, "--against", tmp_path / "missing"], "must be a folder that exists"),
        ([*words, "--against", tmp_path / "missing.npz"], "must be a file that exists"),
        ([*words, "--against", "fashion", "--protocol", "knn"], "must come with --protocol classify"),
        ([*words, "--output", tmp_path / "a.xlsx"], ".csv, .jsonl, .parquet, .npz"),
    ):
        done = call(*wrong)
        assert done.returncode == 2
        assert said in done.stderr.splitlines()[-1]


# Answers that are kept


def kept_of(images, labels, said, names=("a", "b", "c"), root=""):
    split = Split("test", images, np.array(labels))
    return SavedPredictions.of(Dataset("data", names, {"test": split}, root=root), split, np.arange(len(said)),
                          np.eye(len(names), dtype=np.float32)[said])  # fmt: skip


def test_answers_are_matched_by_image_and_not_by_place(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (6, 2, 2, 1), dtype=np.uint8)
    one = kept_of(pixels, [0, 1, 2, 0, 1, 2], [0, 1, 2, 1, 1, 1])
    order = np.array([3, 1, 5, 0, 4, 2])
    other = kept_of(pixels[order], np.array([0, 1, 2, 0, 1, 2])[order], np.array([0, 1, 0, 0, 1, 2])[order])
    assert one.compare(other) == (1, 2, 3, 6)
    one.write(tmp_path / "a.npz")
    assert SavedPredictions.read(tmp_path / "a.npz").compare(other) == (1, 2, 3, 6)
    with pytest.raises(UsageError, match=r"6 of data \(test\) and 5 of data \(test\), 5 in common"):
        one.compare(kept_of(pixels[:5], [0, 1, 2, 0, 1], [0] * 5))
    with pytest.raises(UsageError, match="same 6 images with 1 different labels"):
        one.compare(kept_of(pixels, [0, 1, 2, 0, 1, 0], [0] * 6))


def test_files_are_the_same_in_a_copy_of_the_data(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        for name, content in (("x.png", b"1"), (os.fsdecode(b"\xff.png"), b"22")):
            (tmp_path / place / name).write_bytes(content)
    names = ["x.png", os.fsdecode(b"\xff.png")]
    one, other = (
        kept_of([str(tmp_path / place / name) for name in names], [0, 1], [0, 0], root=str(tmp_path / place))
        for place in ("here", "there")
    )
    assert one.compare(other) == (0, 0, 1, 2)
    (tmp_path / "there" / "x.png").write_bytes(b"2")  # of the same size, as BMP files of one shape are
    changed = kept_of([str(tmp_path / "there" / name) for name in names], [0, 1], [0, 0], root=str(tmp_path / "there"))
    with pytest.raises(UsageError, match="1 in common"):
        one.compare(changed)


def test_files_in_archives_are_told_apart_by_their_contents(tmp_path):
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


def test_a_class_that_the_data_do_not_have_is_wrong():
    split = Split("test", np.zeros((2, 2, 2, 1), np.uint8), np.array([0, 1]))
    dataset = Dataset("data", ("b", "d"), {"test": split})
    shares = np.array([[0, 0.9, 0.1, 0], [0.6, 0, 0, 0.4]], np.float32)
    kept = SavedPredictions.of(dataset, split, np.arange(2), shares, np.array([1, 3]))
    assert kept.answers.tolist() == [0, -1]
    assert kept.own.tolist() == pytest.approx([0.9, 0.4])


@pytest.mark.parametrize("change", ["missing", "garbage", "pickle"])
def test_damaged_answers_are_one_line(tmp_path, change):
    path = tmp_path / "a.npz"
    kept_of(np.zeros((3, 2, 2, 1), np.uint8), [0, 1, 2], [0, 1, 1]).write(path)
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
