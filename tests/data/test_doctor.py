"""`vitrail doctor` reports every defect of a data set and nothing else."""

import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unicodedata

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from tests.test_cli import run
from vitrail.data.doctor import _find_twins, find_problems
from vitrail.data.sources.registry import open_data


def save_photo(path, seed, size=(96, 80), mode="RGB"):
    """Save an image of soft blobs that differs for each seed, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    image = small.resize(size, Image.Resampling.BICUBIC).convert(mode)
    image.save(path)
    return path


@pytest.fixture
def healthy(tmp_path):
    """A folder of 36 images in two splits and two classes, without defects."""
    seed = 0
    for split, count in (("train", 12), ("val", 6)):
        for label in ("cat", "dog"):
            for index in range(count):
                seed += 1
                save_photo(
                    tmp_path / "data" / split / label / f"{index}.jpg", seed, size=(80 + 3 * seed, 90 + 2 * seed)
                )
    return tmp_path / "data"


def findings_by_kind(folder):
    return {finding.kind: finding for finding in find_problems(open_data(folder))}


def test_folder_without_defects_has_no_findings(healthy):
    assert find_problems(open_data(healthy)) == []


def test_each_defect_gives_exactly_one_finding(healthy, tmp_path):
    def check(kind, *files, severity="warning"):
        """Assert that the folder has exactly this finding, then restore the folder."""
        findings = find_problems(open_data(folder))
        assert [finding.kind for finding in findings] == [kind], findings
        assert findings[0].severity == severity
        assert sorted(findings[0].files) == sorted(str(folder / file) for file in files)
        shutil.rmtree(folder)
        shutil.copytree(healthy, folder)

    folder = tmp_path / "defective"
    shutil.copytree(healthy, folder)
    (folder / "train/cat/x.jpg").write_bytes((folder / "train/cat/3.jpg").read_bytes()[:900])
    check("unreadable", "train/cat/x.jpg", severity="error")
    (folder / "train/emu").mkdir()
    check("empty-class", "train/emu", severity="error")
    for index in range(2):
        save_photo(folder / f"train/emu/{index}.jpg", 900 + index)
    check("label-mismatch", severity="error")
    save_photo(folder / "train/emu/0.jpg", 900)
    save_photo(folder / "val/emu/0.jpg", 901)
    check("single-picture-class")
    for index in range(120):
        save_photo(folder / f"train/cat/more-{index}.jpg", 1000 + index, size=(100 + index, 90))
    check("imbalance")
    shutil.copy(folder / "train/dog/4.jpg", folder / "val/dog/copy.jpg")
    check("duplicate", "train/dog/4.jpg", "val/dog/copy.jpg")
    with Image.open(folder / "train/dog/4.jpg") as image:
        mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).resize((70, 75))
        mirrored.save(folder / "val/cat/near.jpg", quality=70)
    check("near-duplicate", "train/dog/4.jpg", "val/cat/near.jpg")
    save_photo(tmp_path / "x.png", 77).rename(folder / "train/dog/x.jpg")
    check("lying-extension", "train/dog/x.jpg")
    save_photo(folder / "train/dog/grey.jpg", 78, mode="L")
    save_photo(folder / "val/dog/grey.jpg", 79, mode="L")
    check("mixed-modes", "train/dog/grey.jpg", "val/dog/grey.jpg")
    save_photo(folder / "train/dog/tiny.jpg", 80, size=(9, 9))
    check("mixed-sizes", "train/dog/tiny.jpg")


@pytest.mark.parametrize(
    ("name", "other"), [("Cat", "cat"), ("cat ", "cat"), ("고양이", unicodedata.normalize("NFD", "고양이"))]
)
def test_class_names_that_look_equal_are_reported(tmp_path, name, other):
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8), np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=np.array([name, other, "dog"] * 2))
    (finding,) = find_problems(open_data(tmp_path / "x.npz"))
    assert (finding.kind, finding.severity) == ("similar-classes", "warning")
    names = ", ".join(map(ascii, sorted([name, other])))
    assert finding.message == f"classes differ only in capitals, spaces or the encoding of letters: {names}"


def test_image_of_another_size_is_reported(tmp_path):
    for index in range(30):
        save_photo(tmp_path / "ab"[index % 2] / f"{index}.png", index, size=(64, 64) if index else (64, 70))
    (finding,) = find_problems(open_data(tmp_path))
    assert (finding.kind, finding.files) == ("mixed-sizes", (str(tmp_path / "a/0.png"),))


def test_duplicates_in_memory_are_reported(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 8, 8), np.uint8)
    np.savez(
        tmp_path / "x.npz",
        train_images=images[:30],
        train_labels=np.arange(30) % 2,
        test_images=np.concatenate([images[30:], images[4:5]]),
        test_labels=np.arange(11) % 2,
    )
    (finding,) = find_problems(open_data(tmp_path / "x.npz"))
    assert (finding.kind, finding.files) == ("duplicate", ("train image 4", "test image 10"))


def add_defects(folder):
    """Add twelve defects of six kinds to a copy of the photos. Return the kind and the files of each."""
    photos = {label: sorted((folder / "train" / label).iterdir()) for label in ("ants", "bees")}
    defects = []

    def write_unreadable(path, content):
        path.write_bytes(content)
        defects.append(("unreadable", {path}))

    write_unreadable(folder / "train/ants/zz-cut.jpg", photos["ants"][0].read_bytes()[:5000])
    write_unreadable(folder / "train/bees/zz-empty.jpg", b"")
    write_unreadable(folder / "val/bees/zz-text.jpg", b"<html>404 not found</html>" * 50)
    for source, target in ((photos["ants"][5], "val/ants/zz-a.jpg"), (photos["bees"][7], "val/bees/zz-b.jpg")):
        shutil.copy(source, folder / target)
        defects.append(("duplicate", {source, folder / target}))
    with Image.open(photos["ants"][20]) as image:
        image.resize((image.width * 2 // 3, image.height * 2 // 3)).save(folder / "val/ants/zz-small.jpg", quality=60)
        defects.append(("near-duplicate", {photos["ants"][20], folder / "val/ants/zz-small.jpg"}))
    with Image.open(photos["bees"][30]) as image:
        bright = ImageEnhance.Brightness(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)).enhance(1.15)
        bright.save(folder / "val/bees/zz-turned.jpg")
        defects.append(("near-duplicate", {photos["bees"][30], folder / "val/bees/zz-turned.jpg"}))
    for name, form in (("train/ants/zz-liar.jpg", "PNG"), ("val/bees/zz-liar.png", "JPEG")):
        save_photo(folder / "new.png", len(defects), size=(300, 280))
        with Image.open(folder / "new.png") as image:
            image.save(folder / name, format=form)
        (folder / "new.png").unlink()
        defects.append(("lying-extension", {folder / name}))
    (folder / "train/wasps").mkdir()
    defects.append(("empty-class", {folder / "train/wasps"}))
    for label, split in (("flies", "val"), ("moths", "train")):
        for index in range(2):
            save_photo(folder / split / label / f"{index}.jpg", 500 + index + 10 * len(defects), size=(320, 240))
        defects.append(("label-mismatch", label))
    return defects


def test_twelve_defects_of_six_kinds_in_real_photos(shared, tmp_path):
    folder = tmp_path / "photos"
    shutil.copytree(shared / "hymenoptera", folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert find_problems(open_data(folder)) == []
    defects = add_defects(folder)
    assert len(defects) == 12
    assert len({kind for kind, _ in defects}) == 6
    reported = [
        (finding.kind, finding.message.split("'")[1] if finding.kind == "label-mismatch" else set(finding.files))
        for finding in find_problems(open_data(folder))
    ]
    expected = [
        (kind, label_or_files if isinstance(label_or_files, str) else set(map(str, label_or_files)))
        for kind, label_or_files in defects
    ]
    assert [defect for defect in expected if defect not in reported] == []
    assert [defect for defect in reported if defect not in expected] == []
    assert len(reported) == 12


def test_command_exits_with_1_for_errors_and_0_for_warnings(call, healthy):
    done = run("doctor", healthy)
    assert done.returncode == 0
    assert "no problems found" in done.stdout
    shutil.copy(healthy / "train/dog/4.jpg", healthy / "val/dog/copy.jpg")
    done = call("doctor", healthy, "--json")
    assert done.returncode == 0
    (finding,) = json.loads(done.stdout)["findings"]
    assert set(finding) == {"kind", "severity", "files", "message"}
    assert (finding["kind"], finding["severity"]) == ("duplicate", "warning")
    (healthy / "train/cat/broken.jpg").write_bytes(b"")
    done = call("doctor", healthy)
    assert done.returncode == 1
    assert "error  unreadable: train/cat/broken.jpg cannot be decoded (it is empty)\n" in done.stdout
    assert "duplicate" in done.stdout
    done = call("doctor", healthy, "--json")
    assert done.returncode == 1
    assert [finding["severity"] for finding in json.loads(done.stdout)["findings"]] == ["error", "warning"]
    assert call("doctor", healthy / "nowhere").returncode == 2


def test_findings_of_a_kind_are_abbreviated_as_text_and_complete_in_json(tmp_path, call):
    """The data are 1,000 classes of one image each; 20 images cannot be read."""
    for index in range(1000):
        (tmp_path / f"{index:04d}").mkdir()
        save_photo(tmp_path / f"{index:04d}" / "only.bmp", index, size=(8, 8))
    for index in range(0, 1000, 50):
        (tmp_path / f"{index:04d}" / "only.bmp").write_bytes(b"BM")
    done = call("doctor", tmp_path)
    assert done.returncode == 1
    assert done.stdout.split("\n\n")[1:] == [
        "\n    ".join(
            [
                "error  unreadable: 20 findings",
                *(
                    f"{index:04d}/only.bmp: cannot be decoded (its header is not that of a JPEG, PNG, GIF, WEBP,"
                    " BMP, TIFF, PPM or AVIF file)"
                    for index in range(0, 500, 50)
                ),
                "... and 10 more (all with --json)",
            ]
        ),
        "\n    ".join(
            [
                "warning  single-picture-class: 1,000 findings",
                *(f"class '{index:04d}' has one image in all" for index in range(10)),
                "... and 990 more (all with --json)\n",
            ]
        ),
    ]
    findings = json.loads(call("doctor", tmp_path, "--json").stdout)["findings"]
    assert collections.Counter(finding["kind"] for finding in findings) == {
        "unreadable": 20,
        "single-picture-class": 1000,
    }


def test_20_000_files_are_listed_in_seconds(tmp_path):
    """`benchmarks/images.py` lists 200,000 files and compares with timm's reader."""
    for label in range(20):
        (tmp_path / str(label)).mkdir()
        for index in range(1000):
            (tmp_path / str(label) / f"{index}.jpg").touch()
    start = time.perf_counter()
    assert len(open_data(tmp_path).first_split) == 20_000
    assert time.perf_counter() - start < 10


def test_files_that_training_rejects_or_ignores_are_reported(healthy, tmp_path):
    (healthy / "train/dog/notes.txt").write_bytes(b"x")
    (healthy / "train/dog/gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    findings = findings_by_kind(healthy)
    assert set(findings) == {"ignored-file", "unreadable"}
    assert findings["unreadable"].files == (str(healthy / "train/dog/gone.jpg"),)
    assert findings["ignored-file"].files == (str(healthy / "train/dog/notes.txt"),)
    (healthy / "train/dog/gone.jpg").unlink()
    (healthy / "train/dog/phone.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    assert findings_by_kind(healthy)["unreadable"].message == (
        "is a HEIC (HEIF) image, which cannot be decoded: convert it to JPEG and remove it, for example by"
        " `magick mogrify -format jpg *.heic`"
    )
    for index in range(3):
        save_photo(tmp_path / "one" / "cat" / f"{index}.jpg", index)
    assert set(findings_by_kind(tmp_path / "one")) == {"single-class"}
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "x.npz",
        images=rng.integers(0, 256, (9, 8, 8), np.uint8),
        labels=np.arange(9) % 2,
        classes=np.array(["a", "b", "c"]),
    )
    assert set(findings_by_kind(tmp_path / "x.npz")) == {"empty-class"}


def test_duplicates_without_splits_are_reported(tmp_path):
    for label in "ab":
        for index in range(4):
            save_photo(tmp_path / label / f"{index}.png", 10 * ord(label) + index, size=(30, 30))
    with Image.open(tmp_path / "a/1.png") as image:  # the same pixels in another file
        image.save(tmp_path / "a/again.png", compress_level=1)
    shutil.copy(tmp_path / "a/2.png", tmp_path / "b/2-too.png")
    findings = findings_by_kind(tmp_path)
    assert set(findings) == {"duplicate", "conflicting-labels"}
    assert len(findings["duplicate"].files) == len(findings["conflicting-labels"].files) == 2


def test_many_similar_images_give_a_single_finding(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 20)):
        for index in range(count):
            disc = Image.new("L", (80, 80), 255)
            left, top = (30 + rng.integers(0, 5, 2)).tolist()
            disc.paste(0, (left, top, left + 20, top + 20))
            path = tmp_path / split / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noisy = np.asarray(disc).astype(int) + rng.integers(-6, 7, (80, 80))
            Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(path)
    (finding,) = find_problems(open_data(tmp_path))
    assert finding.kind == "near-duplicate"
    assert "nature of the data" in finding.message


def test_duplicate_in_val_does_not_hide_near_duplicate_in_test(healthy):
    shutil.copytree(healthy / "val", healthy / "test")
    for path in (healthy / "test").rglob("*.jpg"):
        save_photo(path, 5000 + sum(map(ord, str(path.relative_to(healthy)))) * 7 + int(path.stem))
    shutil.copy(healthy / "train/cat/3.jpg", healthy / "val/cat/copy.jpg")
    with Image.open(healthy / "train/cat/3.jpg") as image:
        image.save(healthy / "test/cat/again.jpg", quality=50)
    assert {"duplicate", "near-duplicate"} <= set(findings_by_kind(healthy))


def test_mirrored_near_duplicates_in_memory_are_reported(tmp_path):
    rng = np.random.default_rng(0)
    small = [Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)) for _ in range(12)]
    images = np.stack([np.asarray(image.resize((96, 96), Image.Resampling.BICUBIC)) for image in small])
    test = np.concatenate([images[8:], images[2:3, :, ::-1]])
    np.savez(
        tmp_path / "x.npz",
        train_images=images[:8],
        train_labels=np.arange(8) % 2,
        test_images=test,
        test_labels=np.arange(5) % 2,
    )
    (finding,) = find_problems(open_data(tmp_path / "x.npz"))
    assert (finding.kind, finding.files) == ("near-duplicate", ("train image 2", "test image 4"))


def test_images_outside_of_class_folders_are_reported(healthy):
    save_photo(healthy / "loose.jpg", 4000)
    save_photo(healthy / "train" / "loose.jpg", 4001)
    (finding,) = find_problems(open_data(healthy))
    assert finding.kind == "ignored-file"
    assert finding.files == (str(healthy / "loose.jpg"), str(healthy / "train" / "loose.jpg"))


def test_ctrl_c_ends_doctor_without_traceback(tmp_path):
    original = save_photo(tmp_path / "a" / "0.png", 0, size=(400, 400))
    (tmp_path / "b").mkdir()
    for index in range(1, 3000):
        os.link(original, tmp_path / "ab"[index % 2] / f"{index}.png")
    process = subprocess.Popen(
        [sys.executable, "-m", "vitrail", "doctor", tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode in (0, 130)  # a fast machine may have finished
    assert "Traceback" not in stderr


def test_pipe_among_images_is_reported_and_not_read(tmp_path):
    os.mkfifo(tmp_path / "p.jpg")
    for index in range(4):
        save_photo(tmp_path / f"{index}.png", index)
    (tmp_path / "x.csv").write_text("p.jpg,a\n0.png,a\n1.png,a\n2.png,b\n3.png,b\n")
    (finding,) = find_problems(open_data(tmp_path / "x.csv"))
    assert (finding.kind, finding.files) == ("unreadable", (str(tmp_path / "p.jpg"),))


def test_long_file_names_are_printed_in_full(call, tmp_path):
    deep = tmp_path / ("a-folder-with-a-long-name-" * 5) / ("and-another-" * 10)
    for label in ("cat", "<b>\nx"):
        for index in range(2):
            save_photo(deep / label / f"{index}.jpg", 100 + index + ord(label[0]))
    (deep / "cat" / "broken-and-rather-long-file-name.jpg").write_bytes(b"")
    done = call("doctor", deep)
    assert done.returncode == 1
    assert "cat/broken-and-rather-long-file-name.jpg" in done.stdout


def test_people_option_reports_equal_images_of_two_people_only(call, tmp_path):
    root = tmp_path / "people"
    for number, name in enumerate(("ann", "ben", "cho", "dee", "eva")):
        for image in range(3):
            save_photo(root / name / f"{image}.png", 10 * number + image)
    (tmp_path / "train.txt").write_text("ann\nben\n")
    arguments = ("doctor", root, "--people", tmp_path / "train.txt", "--json")
    assert json.loads(call(*arguments).stdout) == {"findings": []}  # a person need not be in both splits

    shutil.copy(root / "ann" / "0.png", root / "cho" / "7.png")  # in training, and in the test under another name
    shutil.copy(root / "dee" / "0.png", root / "eva" / "7.png")  # two names in the test
    shutil.copy(root / "ben" / "1.png", root / "ben" / "7.png")  # twice for the same person: not reported
    save_photo(root / "fay" / "0.png", 99)
    done = call(*arguments)
    assert done.returncode == 0
    findings = json.loads(done.stdout)["findings"]
    assert [(finding["kind"], finding["message"], len(finding["files"])) for finding in findings] == [
        ("single-picture-class", "person 'fay' has one image, so recognition cannot be tested", 0),
        ("conflicting-labels", "the same image under more than one name, in train and test", 2),
        ("conflicting-labels", "the same image under more than one name", 2),
    ]
    (root / "gus").mkdir()
    assert call(*arguments).returncode == 1  # a person without an image
    (tmp_path / "train.txt").write_text("ann\nbem\n")
    done = call(*arguments)
    assert (done.returncode, "got 'bem'" in done.stderr, "ben" in done.stderr) == (2, True, True)
    for too_few in ("", "ann\n", "ann\nben\ncho\ndee\neva\nfay\n"):  # fewer than 2 people for training or for the test
        (tmp_path / "train.txt").write_text(too_few)
        done = call(*arguments)
        assert (done.returncode, "People must name at least 2" in done.stderr) == (2, True)


def test_near_duplicates_within_a_split_and_between_classes_are_reported(tmp_path):
    for seed in range(16):
        save_photo(tmp_path / ("cat", "dog")[seed % 2] / f"{seed:02d}.jpg", seed, size=(90 + 3 * seed, 100 + 2 * seed))
    assert find_problems(open_data(tmp_path)) == []
    with Image.open(tmp_path / "cat/02.jpg") as image:
        image.save(tmp_path / "cat/again.jpg", quality=50)
    with Image.open(tmp_path / "dog/05.jpg") as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).resize((80, 85)).save(tmp_path / "cat/turned.jpg")
    findings = [
        (finding.kind, [path.removeprefix(f"{tmp_path}/") for path in finding.files], finding.message)
        for finding in find_problems(open_data(tmp_path))
    ]
    assert findings == [
        (
            "near-duplicate",
            ["cat/turned.jpg", "dog/05.jpg"],
            "probably the same image (mirrored) with different labels: 'cat' and 'dog'",
        ),
        (
            "near-duplicate",
            ["cat/02.jpg", "cat/again.jpg"],
            "probably the same image twice; a random split may put copies on both sides",
        ),
    ]


def test_duplicates_within_train_are_reported(healthy):
    shutil.copy(healthy / "train/dog/4.jpg", healthy / "train/dog/copy.jpg")
    with Image.open(healthy / "train/cat/3.jpg") as image:
        image.save(healthy / "train/cat/near.jpg", quality=50)
    findings = findings_by_kind(healthy)
    assert findings["duplicate"].message == "the same image 2 times in train"
    assert findings["near-duplicate"].message == "probably the same image twice in train"
    assert findings["near-duplicate"].files == (str(healthy / "train/cat/3.jpg"), str(healthy / "train/cat/near.jpg"))


@pytest.mark.slow
def test_near_duplicates_of_20_000_images_are_found_in_seconds():
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (20_000, 8, 8), np.uint8)
    coarse[19_999] = coarse[7, :, ::-1]
    start = time.process_time()
    twins = [*_find_twins(coarse.repeat(4, axis=1).repeat(4, axis=2))]
    assert time.process_time() - start < 20  # about 1 on one core
    assert [(index, pairs) for index, pairs in enumerate(twins) if pairs] == [(19_999, [(7, True)])]
