"""`vitrail faces` on the command line, with the embedded model and random grey images as faces."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.paths import FIXTURES
from vitrail.api.commands import FACES
from vitrail.bundles.bundle import bundle_key
from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.faces.align import BY_LANDMARKS, TEMPLATE, UNALIGNED, align
from vitrail.faces.embed import Aligner, Embedder
from vitrail.faces.gallery import Gallery, _digest
from vitrail.faces.recognition import identify

HEADLESS = FIXTURES / "bundle-without-head"


def draw_people(folder, first, count, images=6, noise=25):
    """Write folders `person-NN` of images: a blurred random pattern for each person, with noise."""
    rng = np.random.default_rng(first)
    for person in range(first, first + count):
        pattern = Image.fromarray(rng.integers(0, 255, (4, 4)).astype(np.uint8)).resize((32, 32), 3)
        (folder / f"person-{person:02d}").mkdir(parents=True)
        for number in range(1, images + 1):
            pixels = np.clip(np.asarray(pattern) + rng.normal(0, noise, (32, 32)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"person-{person:02d}" / f"{number}.png")


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """A folder with three people to enroll (`known`) and twenty other people (`others`)."""
    folder = tmp_path_factory.mktemp("people")
    draw_people(folder / "known", 0, 3)
    draw_people(folder / "others", 3, 20)
    return folder


@pytest.fixture
def gallery(people, tmp_path, call):
    path = tmp_path / "people.gallery"
    for name in ("person-00", "person-01", "person-02"):
        files = [people / "known" / name / f"{number}.png" for number in (1, 2, 3)]
        assert call("faces", "enroll", "fashion", path, name, *files).returncode == 0
    return path


def parse_lines(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


# Embeddings


def test_an_embedding_is_the_unit_sum_for_an_image_and_its_mirror_image(people):
    file = people / "known" / "person-00" / "1.png"
    bundle = vitrail.load("fashion")
    embeddings = Embedder("fashion").embed([str(file)])
    images = bundle.preprocess([file])
    expected = (bundle.model.features(images) + bundle.model.features(images.flip(3))).detach()
    expected = torch.nn.functional.normalize(expected)
    np.testing.assert_allclose(embeddings.vectors, expected.numpy(), atol=1e-6)
    assert (embeddings.vectors.dtype, embeddings.vectors.shape) == (np.float32, (1, 96))
    assert embeddings.sources == (hashlib.sha256(file.read_bytes()).hexdigest(),)
    assert Embedder("fashion").key == bundle_key("fashion")
    mirror = np.asarray(Image.open(file))[:, ::-1]
    np.testing.assert_allclose(Embedder(bundle).embed([mirror]).vectors, embeddings.vectors, atol=1e-6)


def test_the_embedding_of_a_bundle_without_a_head_is_its_output():
    bundle = vitrail.load(HEADLESS)
    pixels = np.random.default_rng(0).integers(0, 255, (5, 20, 20, bundle.preprocess.channels)).astype(np.uint8)
    images = bundle.preprocess(list(pixels))
    with torch.no_grad():
        expected = torch.nn.functional.normalize(bundle.model(images) + bundle.model(images.flip(3)))
    np.testing.assert_allclose(Embedder(HEADLESS).embed(pixels).vectors, expected.numpy(), atol=1e-6)


def test_unusable_images_raise_errors_of_one_line(tmp_path):
    Image.new("L", (40, 15)).save(tmp_path / "small.png")
    (tmp_path / "text.png").write_text("no image")
    embedder = Embedder("fashion")
    for name, error_class, message in (
        ("small.png", UsageError, "must have at least 16 x 16 pixels, got 40 x 15 in"),
        ("text.png", CorruptFileError, "cannot be decoded"),
        ("none.png", UsageError, "must be a file that exists"),
    ):
        with pytest.raises(error_class, match=message) as caught:
            embedder.embed([str(tmp_path / name)])
        assert "\n" not in str(caught.value)
    valid = np.random.default_rng(0).integers(0, 255, (30, 30)).astype(np.uint8)
    results = list(embedder.stream([valid, str(tmp_path / "small.png"), valid]))
    assert isinstance(results[1], UsageError)
    np.testing.assert_array_equal(results[0].vector, results[2].vector)


# Enrolment, calibration and identification


def test_enroll_calibrate_and_identify(call, people, gallery):
    probes = [people / "known" / f"person-{number:02d}" / "4.png" for number in range(3)]
    probes.append(people / "others" / "person-03" / "1.png")
    uncalibrated = call("faces", "identify", "fashion", gallery, *probes, "--json")
    assert uncalibrated.returncode == 0
    assert uncalibrated.stderr.count("note: no threshold is set") == 1
    for row, name in zip(parse_lines(uncalibrated), ("person-00", "person-01", "person-02", None), strict=True):
        assert (row["name"], row["accepted"], row["threshold"]) == (None, None, None)
        assert len(row["candidates"]) == 3
        assert name in (None, row["candidates"][0]["name"])

    done = call("faces", "calibrate", "fashion", gallery, people / "others", "--far", "0.1", "--json")
    thresholds = json.loads(done.stdout)
    assert (thresholds["verify"]["trials"], thresholds["identify"]["trials"]) == (6840, 120)
    assert (thresholds["verify"]["gallery_people"], thresholds["identify"]["gallery_people"]) == (None, 3)
    for task, max_errors in (("verify", 684), ("identify", 12)):
        low, high = thresholds[task]["interval"]
        assert 0 < thresholds[task]["errors"] <= max_errors
        assert low < thresholds[task]["errors"] / thresholds[task]["trials"] < high

    rows = parse_lines(call("faces", "identify", "fashion", gallery, *probes, "--json", "--top-k", "1"))
    for row in rows:
        candidate = row["candidates"][0]
        assert row["threshold"] == thresholds["identify"]["threshold"]
        assert row["accepted"] == (candidate["score"] >= row["threshold"])
        assert row["name"] == (candidate["name"] if row["accepted"] else None)
    assert [row["name"] for row in rows[1:3]] == ["person-01", "person-02"]
    # On the calibration images, as many get a name as `calibrate` counted.
    unknown_rows = parse_lines(call("faces", "identify", "fashion", gallery, people / "others", "--json"))
    assert sum(row["accepted"] for row in unknown_rows) == thresholds["identify"]["errors"]
    rejected = next(row["file"] for row in unknown_rows if not row["accepted"])
    rejected_table = call("faces", "identify", "fashion", gallery, rejected).stdout
    accepted_table = call("faces", "identify", "fashion", gallery, probes[1]).stdout
    assert re.search(r"\d.png  person-01 \(person-01 0\.\d{4}, person-0\d 0\.\d{4}, ", accepted_table)
    assert re.search(r"\d.png  unknown \(person-0\d 0\.\d{4}, person-0\d 0\.\d{4}, ", rejected_table)

    done = call("faces", "enroll", "fashion", gallery, "person-00", probes[0])
    assert "the threshold of identify was dropped" in done.stderr
    assert "person-00: 1 new, 4 in all" in done.stdout
    assert "no threshold is set" in call("faces", "identify", "fashion", gallery, probes[1]).stderr


def test_identify_reads_people_and_threshold_in_one_transaction(call, people, gallery, monkeypatch):
    assert call("faces", "calibrate", "fashion", gallery, people / "others", "--far", "0.1").returncode == 0
    probe, read_index = str(people / "known" / "person-00" / "4.png"), Gallery.index

    def read_index_and_enroll_concurrently(opened):
        index = read_index(opened)
        with Gallery.open(gallery) as other:
            other.enroll("Ann", np.eye(96, dtype=np.float32)[:1], ["a"])  # removes the threshold
        return index

    monkeypatch.setattr(Gallery, "index", read_index_and_enroll_concurrently)
    (row,) = identify("fashion", gallery, [probe])
    assert (len(row["candidates"]), row["threshold"] is not None) == (3, True)
    monkeypatch.undo()
    (row,) = identify("fashion", gallery, [probe])
    assert (len(row["candidates"]), row["threshold"]) == (4, None)


def test_verify_compares_the_score_with_the_calibrated_threshold(call, people, gallery):
    first, second = (people / "known" / "person-00" / f"{number}.png" for number in (5, 6))
    report = json.loads(call("faces", "verify", "fashion", first, second, "--json").stdout)
    vectors = Embedder("fashion").embed([str(first), str(second)]).vectors
    assert report["score"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-6)
    assert (report["same"], report["threshold"]) == (None, None)
    assert "no threshold is set" in call("faces", "verify", "fashion", first, second, "--gallery", gallery).stderr
    arguments = ["faces", "calibrate", "fashion", gallery, people / "others", "--far", "0.01"]
    assert call(*arguments, "--task", "verify").returncode == 0
    report = json.loads(call("faces", "verify", "fashion", first, second, "--gallery", gallery, "--json").stdout)
    assert report["same"] == (report["score"] >= report["threshold"])
    assert report["far"] == 0.01
    same = call("faces", "verify", "fashion", first, first, "--gallery", gallery)
    assert (same.returncode, same.stderr) == (0, "")
    assert "the same person" in same.stdout
    # The threshold of identify needs more images than DATA has.
    done = call(*arguments)
    assert done.returncode == 2
    assert "--far must be at least 0.084 for identify with 120 images" in done.stderr


def test_remove_erases_the_name_and_suggests_another_if_it_is_gone(call, people, gallery):
    name = b"person-01"
    assert name in gallery.read_bytes()
    done = call("faces", "remove", gallery, "person-01", "--json")
    assert json.loads(done.stdout) == {
        "gallery": str(gallery), "name": "person-01", "removed": True, "people": 2,
    }  # fmt: skip
    assert name not in gallery.read_bytes()
    done = call("faces", "remove", gallery, "person-01")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Did you mean 'person-0" in done.stderr


@pytest.mark.parametrize("journal", [None, "WAL"])
def test_an_enrolment_that_was_killed_can_be_repeated(call, people, tmp_path, journal):
    path = tmp_path / "people.gallery"
    path.touch()
    if journal:
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.close()
    done = call("faces", "enroll", "fashion", path, "Ann", people / "known" / "person-00" / "1.png")
    assert (done.returncode, "Ann: 1 new, 1 in all" in done.stdout) == (0, True)


def test_enroll_writes_nothing_if_an_image_is_rejected(call, people, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "small.png")
    valid = people / "known" / "person-00" / "1.png"
    done = call("faces", "enroll", "fashion", tmp_path / "g", "Ann", valid, tmp_path / "small.png")
    assert (done.returncode, done.stdout) == (2, "")
    assert "at least 16 x 16 pixels" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.png"]


def test_identify_continues_after_an_image_that_cannot_be_read(call, people, gallery, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    valid = people / "known" / "person-00" / "5.png"
    done = call("faces", "identify", "fashion", gallery, tmp_path / "text.png", valid, "--json")
    assert done.returncode == 1
    assert [("error" in row) for row in parse_lines(done)] == [True, False]
    assert "1 of 2 images could not be read" in done.stderr


def test_wrong_arguments_give_an_error_of_one_line(call, people, gallery, tmp_path):
    image, others = people / "known" / "person-00" / "5.png", people / "others"
    draw_people(tmp_path / "same", 0, 1)
    (tmp_path / "same" / "person-00").rename(tmp_path / "same" / "stranger")
    enrolled_image = (people / "known" / "person-00" / "1.png").read_bytes()
    (tmp_path / "same" / "stranger" / "1.png").write_bytes(enrolled_image)
    draw_people(tmp_path / "same", 50, 20)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "groups.csv").write_text("nobody,here\n")
    (tmp_path / "wrong.csv").write_text("person-03\n")
    cases = [
        (
            ["bogus"],
            2,
            f"Command of `vitrail faces` must be one of {', '.join(FACES.commands)}, got 'bogus'.",
        ),
        (["identfy"], 2, "Did you mean 'identify'?"),
        (["enroll", "fashion"], 2, "vitrail faces enroll needs GALLERY"),
        (["enroll", "fashion", gallery, "Ann"], 2, "Images must be given"),
        (["enroll", "fashion", gallery, "person-01", people / "known/person-00/1.png"], 2, "enrolled as 'person-00'"),
        (
            ["enroll", HEADLESS, gallery, "Ann", image],
            2,
            "Embeddings of two models, or of aligned",
        ),
        (["enroll", "fashion", gallery, image, image], 2, "NAME must be the name of a person, got the file"),
        (["enroll", "fashion", gallery, " ", image], 2, "Name must be printable text"),
        (["enroll", "fashon", gallery, "Ann", image], 2, "Did you mean 'fashion'?"),
        (["identify", "fashion", tmp_path / "none", image], 2, "Gallery must be a file that exists"),
        (["identify", "fashion", image, image], 2, "got another file"),
        (["identify", "fashion", gallery, image, "--top-k", "0"], 2, "Top k must be an integer from 1"),
        (["identify", "fashion", gallery, image, "--threshold", "0"], 2, "Flag must be one that --help lists"),
        (["calibrate", "fashion", gallery, others], 2, "--far"),
        (["calibrate", "fashion", gallery, others, "--far", "1e-6"], 2, "--far must be at least 0.0015 for verify"),
        (["calibrate", "fashion", gallery, others, "--far", "2"], 2, "--far must be above 0 and below 1, got 2."),
        (["calibrate", "fashion", gallery, people / "known", "--far", "0.1"], 2, "got 'person-00', who is in the"),
        (["calibrate", "fashion", gallery, tmp_path / "same", "--far", "0.1"], 2, "stranger/1.png' of 'person-00'"),
        (["evaluate", "fashion", others, "--pairs", tmp_path / "empty.txt"], 1, "got none"),
        (
            ["evaluate", "fashion", others, "--groups", tmp_path / "groups.csv"],
            2,
            "Groups must name people of the data",
        ),
        (
            ["evaluate", "fashion", others, "--groups", tmp_path / "wrong.csv"],
            1,
            "must be person,group, got 'person-03'",
        ),
        (["evaluate", "fashion", others, "--show-images"], 2, "must be used with --output"),
        (["evaluate", "fashion", others, "--output", people], 2, "Output must not exist yet"),
        (
            ["evaluate", "fashion", "digits", "--pairs", tmp_path / "empty.txt"],
            2,
            "Pairs must be used with data in files",
        ),
        (["evaluate", "fashion", tmp_path / "nowhere"], 2, "Data must be"),
        (["remove", gallery, "Nobody At All"], 2, "Name must be one that is enrolled"),
    ]
    before = gallery.read_bytes()
    for arguments, code, message in cases:
        done = call("faces", *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), (arguments, done)
        assert message in done.stderr, (arguments, done.stderr)
    assert gallery.read_bytes() == before


def test_a_gallery_with_a_trigger_or_an_endless_view_is_rejected_and_not_written(call, people, gallery):
    trigger = "CREATE TRIGGER t AFTER INSERT ON template BEGIN UPDATE person SET name = 'Eve' WHERE id = 1; END"
    endless = "WITH RECURSIVE n (id) AS (SELECT 1 UNION SELECT id + 1 FROM n) SELECT id, 'x' || id AS name FROM n"
    for statements in ([trigger], ["ALTER TABLE person RENAME TO other", f"CREATE VIEW person AS {endless}"]):
        forged = gallery.with_name(f"forged-{len(statements)}.gallery")
        shutil.copyfile(gallery, forged)
        connection = sqlite3.connect(forged, isolation_level=None)
        for statement in statements:
            connection.execute(statement)
        connection.close()
        before = forged.read_bytes()
        image = people / "others" / "person-08" / "1.png"
        for arguments in (("enroll", "fashion", forged, "Ann", image), ("remove", forged, "Ann")):
            done = call("faces", *arguments)
            assert done.returncode == 1
            assert "must have the tables that `vitrail faces enroll` makes" in done.stderr
            assert done.stderr.count("\n") == 1
        assert forged.read_bytes() == before


def test_enroll_and_identify_accept_paths_that_are_not_utf8(call, people, tmp_path):
    folder = tmp_path / os.fsdecode(b"f\xff")
    shutil.copytree(people / "known", folder)
    (folder / "person-01" / "1.png").rename(folder / "person-01" / os.fsdecode(b"1\xfe.png"))
    bundle, path = tmp_path / os.fsdecode(b"b\xff"), tmp_path / os.fsdecode(b"g\xff.gallery")
    shutil.copytree(HEADLESS, bundle)
    for name in ("person-00", "person-01"):
        assert call("faces", "enroll", bundle, path, name, folder / name).returncode == 0
    rows = parse_lines(call("faces", "identify", bundle, path, folder / "person-01", "--json"))
    assert (len(rows), rows[0]["candidates"][0]["name"]) == (6, "person-01")
    done = call("faces", "identify", "fashion", path, folder / "person-01")
    assert done.returncode == 2
    assert r"/b\udcff, hash " in done.stderr


def test_a_gallery_with_embeddings_of_another_width_is_reported_as_damaged(call, people, gallery):
    with sqlite3.connect(gallery) as connection:
        connection.execute("UPDATE about SET value = '1' WHERE key = 'width'")
        query, vector = (
            "SELECT template.id, name, source FROM template JOIN person ON person = person.id",
            np.ones(1, "<f4"),
        )
        for number, name, source in connection.execute(f"{query} WHERE person = person.id").fetchall():
            digest = _digest(bundle_key("fashion"), name, source, vector)
            update = "UPDATE template SET vector = ?, digest = ? WHERE id = ?"
            connection.execute(update, (vector, digest, number))
    connection.close()
    probe = people / "others" / "person-03" / "1.png"
    for name, *arguments in (
        ["identify", probe],
        ["enroll", "Ann", probe],
        ["calibrate", people / "others", "--far", "0.1"],
    ):
        done = call("faces", name, "fashion", gallery, *arguments)
        assert (done.returncode, done.stderr.count("\n"), "is damaged: it" in done.stderr) == (1, 1, True)


def test_remove_and_enroll_exit_with_1_while_the_gallery_is_in_use(call, people, gallery, monkeypatch):
    monkeypatch.setattr("vitrail.faces.gallery_file.PATIENCE", 0.1)
    reader = sqlite3.connect(gallery, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM person").fetchone()
    done = call("faces", "remove", gallery, "person-02")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "traces remain" in done.stderr
    reader.execute("COMMIT")
    reader.execute("BEGIN IMMEDIATE")
    done = call("faces", "enroll", "fashion", gallery, "Ann", people / "known/person-00/6.png")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "is locked" in done.stderr
    reader.close()
    done = call("faces", "remove", gallery, "person-02")
    assert (done.returncode, "remaining data of an earlier removal" in done.stdout) == (0, True)
    assert "note: 'person-02' is not enrolled" in done.stderr


# Evaluation


def test_evaluate_reports_all_pairs_and_groups_and_writes_a_page(call, people, tmp_path):
    rows = [f"person-{number:02d},{'odd' if number % 2 else 'even'}" for number in range(3, 22)]
    (tmp_path / "groups.csv").write_text("\n".join(["person,group", *rows]))
    arguments = ["faces", "evaluate", "fashion", people / "others", "--groups", tmp_path / "groups.csv"]
    done = call(*arguments, "--output", tmp_path / "page", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["images"], report["people"], report["genuine"], report["impostor"]) == (120, 20, 300, 6840)
    assert report["model"] == bundle_key("fashion")
    low, high = report["eer_interval"]
    assert 0 < low < report["eer"] < high < 0.5
    assert [row["tar"] is None for row in report["tar"]] == [False, False, True]
    assert len(report["accuracy_folds"]) == 10
    assert report["rank1"] > 0.5
    assert [(row["group"], row["people"]) for row in report["groups"]] == [("even", 9), ("odd", 10)]
    assert "1 of 20 people are in no group" in done.stderr
    assert "TAR at FAR 0.001 and below is not measured" in done.stderr
    assert len(report["worst"]["genuine"]) == len(report["worst"]["impostor"]) == 12
    assert json.loads((tmp_path / "page" / "faces.json").read_text()) == report

    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "<img" not in page  # without --show-images
    assert page.count("<svg") == 3
    assert "How well does fashion tell people apart?" in page
    assert "사람을 얼마나 잘 구별할까요?" in page
    assert f"{report['eer']:.1%}" in page
    assert "n = 20 people" in page
    assert not re.search(r"(src|href)=.https?:", page)

    printed = call(*arguments, "--output", tmp_path / "page", "--force", "--show-images").stdout
    assert (tmp_path / "page" / "index.html").read_text(encoding="utf-8").count("<img") == 48
    assert "equal error rate" in printed
    assert "false accepts / false rejects at FAR 0.1 of all" in printed


def test_two_people_are_evaluated_without_intervals(call, people, tmp_path):
    (tmp_path / "without.txt").write_text("person-02\n")
    (tmp_path / "groups.csv").write_text("person-00,both\nperson-01,both\n")
    arguments = [
        "--without",
        tmp_path / "without.txt",
        "--groups",
        tmp_path / "groups.csv",
        "--output",
        tmp_path / "page",
    ]
    done = call("faces", "evaluate", "fashion", people / "known", *arguments)
    assert (done.returncode, re.search(r"equal error rate +\d+\.\d\d% *\n", done.stdout) is not None) == (0, True)
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "n = 2 people: too few for intervals" in page
    assert "95 % interval " not in page


def test_evaluate_reads_a_list_of_pairs(call, people, tmp_path):
    rng = np.random.default_rng(0)
    listed = []
    for fold in range(10):
        names = [f"person-{3 + 2 * fold + side:02d}" for side in (0, 1)]
        for _ in range(5):
            first, second = rng.choice(6, 2, replace=False) + 1
            listed.append(f"{names[0]}\t{first}\t{second}")
        listed += [f"{names[0]}\t{rng.integers(1, 7)}\t{names[1]}\t{rng.integers(1, 7)}" for _ in range(5)]
    (tmp_path / "pairs.txt").write_text("\n".join(["10\t5", *listed]))
    arguments = ["faces", "evaluate", "fashion", people / "others", "--pairs", tmp_path / "pairs.txt"]
    report = json.loads(call(*arguments, "--json").stdout)
    assert (report["genuine"], report["impostor"], report["people"]) == (50, 50, 20)
    assert (report["rank1"], report["dir"], [row["tar"] for row in report["tar"]]) == (None, [], [None] * 3)
    assert report["accuracy_std"] == pytest.approx(np.std(report["accuracy_folds"]))
    files = [[people / "others" / row.split("\t")[0] / f"{row.split(chr(9))[1]}.png" for row in listed]]
    files.append([people / "others" / row.split("\t")[-2] / f"{row.split(chr(9))[-1]}.png"
                  if row.count("\t") == 3 else people / "others" / row.split("\t")[0] / f"{row.split(chr(9))[2]}.png"
                  for row in listed])  # fmt: skip
    first_vectors, second_vectors = (Embedder("fashion").embed(map(str, side_files)).vectors for side_files in files)
    scores = (first_vectors * second_vectors).sum(axis=1)
    is_genuine = np.tile([True] * 5 + [False] * 5, 10)
    worst = min(report["worst"]["genuine"], key=lambda row: row["score"])
    assert worst["score"] == pytest.approx(scores[is_genuine].min(), abs=1e-6)
    assert call(*arguments, "--output", tmp_path / "page").returncode == 0


def test_hostile_names_are_escaped_on_the_page(call, people, tmp_path):
    names = ["<script>alert(1)", "a&b\"'", "<img src=x onerror=alert(1)>"]
    for name, folder in zip(names, sorted((people / "known").iterdir()), strict=True):
        shutil.copytree(folder, tmp_path / "people" / name)
    (tmp_path / "groups.csv").write_text("".join(f'"{name.replace(chr(34), 2 * chr(34))}",<b>all\n' for name in names))
    arguments = ["--groups", tmp_path / "groups.csv", "--output", tmp_path / "page", "--show-images"]
    assert call("faces", "evaluate", "fashion", tmp_path / "people", *arguments).returncode == 0
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;all" in page
    assert not any(markup in page for markup in ("<script>alert", "<img src=x", "<b>all"))


def test_the_page_fits_a_phone_and_switches_language_in_a_browser(call, people, tmp_path, browser):
    assert call("faces", "evaluate", "fashion", people / "known", "--output", tmp_path / "page").returncode == 0
    page = browser.new_page(viewport={"width": 390, "height": 800}, locale="en-GB")
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((tmp_path / "page" / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("h1").inner_text() == "How well does fashion tell people apart?"
    page.click("#language")
    assert page.locator("h1").inner_text() == "fashion은(는) 사람을 얼마나 잘 구별할까요?"
    assert page.locator("svg").count() == 2
    assert errors == []
    page.close()


def test_without_leaves_out_people_in_evaluate_and_calibrate(call, people, gallery, tmp_path):
    (tmp_path / "trained.txt").write_text("".join(f"person-{number:02d}\n" for number in range(3, 13)))
    arguments = ["faces", "evaluate", "fashion", people / "others", "--without", tmp_path / "trained.txt"]
    report = json.loads(call(*arguments, "--json").stdout)
    assert (report["people"], report["images"], report["genuine"]) == (10, 60, 150)
    worst = [Path(row["one"]).parent.name for row in report["worst"]["genuine"]]
    assert min(worst) >= "person-13"
    (tmp_path / "trained.txt").write_text("person-99\n")
    assert "Did you mean 'person-" in call(*arguments).stderr
    # All people in one folder: the enrolled people must be left out of the calibration.
    for name in ("known", "others"):
        for folder in (people / name).iterdir():
            (tmp_path / "all").mkdir(exist_ok=True)
            (tmp_path / "all" / folder.name).symlink_to(folder)
    (tmp_path / "known.txt").write_text("person-00\nperson-01\nperson-02\n")
    arguments = ["faces", "calibrate", "fashion", gallery, tmp_path / "all", "--far", "0.1", "--json"]
    assert call(*arguments).returncode == 2
    assert json.loads(call(*arguments, "--without", tmp_path / "known.txt").stdout)["identify"]["trials"] == 120


def test_an_image_under_two_names_is_noted_by_evaluate_and_rejected_by_calibrate(call, people, gallery, tmp_path):
    """It would be an impostor pair with the score of one person."""
    shutil.copytree(people / "others", tmp_path / "others")
    shutil.copy(tmp_path / "others/person-04/2.png", tmp_path / "others/person-05/7.png")
    done = call("faces", "evaluate", "fashion", tmp_path / "others")
    assert (done.returncode, done.stderr.count("the same image has two names")) == (0, 1)
    assert "person-04/2.png' and '" in done.stderr
    before = gallery.read_bytes()
    done = call("faces", "calibrate", "fashion", gallery, tmp_path / "others", "--far", "0.1")
    assert (done.returncode, done.stderr.count("\n"), gallery.read_bytes() == before) == (2, 1, True)
    assert "DATA must have each image of one person only, got the same image in" in done.stderr


def test_evaluate_notes_data_that_the_bundle_was_trained_on(call, people, gallery, tmp_path):
    bundle = vitrail.load("fashion")
    training = {"faces": {"alignment": UNALIGNED, "people": 9}, "data": "somewhere/others: 90 training images"}
    vitrail.save(dataclasses.replace(bundle, provenance={**bundle.provenance, **training}), tmp_path / "face")
    (tmp_path / "people.txt").write_text("person-03\n")
    note = "was trained on people of 'somewhere/others'"
    arguments = ["faces", "evaluate", tmp_path / "face", people / "others"]
    assert call(*arguments).stderr.count(note) == 1
    assert note not in call(*arguments, "--without", tmp_path / "people.txt").stderr
    assert note not in call("faces", "evaluate", tmp_path / "face", people / "known").stderr
    vitrail.save(dataclasses.replace(bundle, provenance={"faces": "many"}), tmp_path / "odd")
    assert call("faces", "evaluate", tmp_path / "odd", people / "known").returncode == 0


def test_names_in_nfc_and_nfd_are_one_person_in_calibrate_and_evaluate(call, people, gallery, tmp_path):
    names = {"person-00": "김한", "person-03": "이봄", "person-04": "최별", "person-05": "최별"}
    forms = {"person-05": "NFC"}  # 최별 in two folders
    for kind in ("known", "others"):
        for folder in (people / kind).iterdir():
            name = unicodedata.normalize(forms.get(folder.name, "NFD"), names.get(folder.name, folder.name))
            (tmp_path / "all").mkdir(exist_ok=True)
            (tmp_path / "all" / name).symlink_to(folder)
    probe = people / "known" / "person-00" / "4.png"
    assert call("faces", "enroll", "fashion", gallery, "김한", probe).returncode == 0
    (tmp_path / "known.txt").write_text("person-01\nperson-02\n")
    arguments = ["--without", tmp_path / "known.txt"]
    done = call("faces", "calibrate", "fashion", gallery, tmp_path / "all", "--far", "0.1", *arguments)
    assert (done.returncode, "got '김한', who is in the gallery" in done.stderr) == (2, True)
    (tmp_path / "known.txt").write_text("person-01\nperson-02\n김한\n", encoding="utf-8")
    (tmp_path / "groups.csv").write_text("이봄,one\n최별,one\n", encoding="utf-8")
    arguments += ["--groups", tmp_path / "groups.csv", "--json"]
    report = json.loads(call("faces", "evaluate", "fashion", tmp_path / "all", *arguments).stdout)
    assert (report["people"], report["images"]) == (19, 120)
    assert (report["groups"][0]["people"], report["groups"][0]["images"]) == (2, 18)


def test_landmarks_align_faces_as_in_training_and_need_their_own_gallery(call, people, tmp_path):
    folder, files = people / "known", sorted((people / "known").rglob("*.png"))
    points = TEMPLATE * 32 / 112 + [2, 1]
    rows = [",".join([str(file.relative_to(folder)), *(f"{x:.4f}" for x in points.ravel())]) for file in files]
    header = ",".join(["file", *(f"{axis}{number}" for number in range(1, 6) for axis in "xy")])
    marks = tmp_path / "marks.csv"
    marks.write_text("\n".join([header, *rows]))
    aligned = [np.asarray(align(Image.open(file), points.round(4))) for file in files]
    expected = Embedder("fashion").embed(aligned).vectors
    vectors = Embedder("fashion", aligner=Aligner(marks, [str(folder)])).embed(map(str, files)).vectors
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    arguments = ["faces", "evaluate", "fashion", folder, "--json"]
    with_marks, without = (json.loads(call(*arguments, *options).stdout) for options in (["--landmarks", marks], []))
    assert with_marks["eer"] != without["eer"]

    gallery = tmp_path / "aligned.gallery"
    marks_of_folder = folder / "marks.csv"  # names files relative to its own folder
    marks_of_folder.write_text(marks.read_text())
    try:
        enrolled = call("faces", "enroll", "fashion", gallery, "Ann", files[0], "--landmarks", marks_of_folder)
        assert enrolled.returncode == 0, enrolled.stderr
        done = call("faces", "identify", "fashion", gallery, files[1])
        assert (done.returncode, "of aligned and unaligned faces" in done.stderr) == (2, True)
        rows = parse_lines(
            call("faces", "identify", "fashion", gallery, files[0], "--landmarks", marks_of_folder, "--json")
        )
        assert rows[0]["candidates"][0]["score"] == pytest.approx(1, abs=1e-5)
    finally:
        marks_of_folder.unlink()
    done = call("faces", "enroll", "fashion", gallery, "Ann", files[1], "--landmarks", marks)
    assert (done.returncode, "got none for" in done.stderr) == (2, True)


def test_landmarks_are_pixels_of_the_full_size_image_after_exif_rotation(tmp_path):
    """Also if the bundle decodes photos at a smaller scale."""
    bundle = vitrail.load("fashion")
    fast = dataclasses.replace(bundle, preprocess=bundle.preprocess.replace(jpeg="double"))
    pattern = np.random.default_rng(0).integers(0, 255, (20, 20), np.uint8)
    photo = Image.fromarray(pattern).resize((800, 800), Image.Resampling.BICUBIC)
    points = 4 * TEMPLATE + [150, 90]
    photo.save(tmp_path / "plain.jpg", quality=95)
    orientation = Image.Exif()
    orientation[0x0112] = 6  # viewers rotate the image by 90 degrees, clockwise
    photo.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.jpg", quality=95, exif=orientation)
    (tmp_path / "marks.json").write_text(json.dumps({name: points.tolist() for name in ("plain.jpg", "turned.jpg")}))
    expected = Embedder(bundle).embed([np.asarray(align(photo, points))]).vectors[0]
    for source in (bundle, fast):
        embedder = Embedder(source, aligner=Aligner(tmp_path / "marks.json"))
        vectors = embedder.embed([str(tmp_path / "plain.jpg"), str(tmp_path / "turned.jpg")]).vectors
        assert (vectors @ expected).min() > 0.999


def test_a_bundle_notes_if_faces_are_not_aligned_as_in_its_training(call, people, tmp_path):
    bundle = vitrail.load("fashion")
    provenance = {**bundle.provenance, "faces": {"alignment": BY_LANDMARKS, "people": 9}}
    vitrail.save(dataclasses.replace(bundle, provenance=provenance), tmp_path / "face")
    files = sorted((people / "known" / "person-00").iterdir())[:2]
    assert "was trained on faces aligned by landmarks" in call("faces", "verify", tmp_path / "face", *files).stderr
    assert "aligned" not in call("faces", "verify", "fashion", *files).stderr
    provenance = {**bundle.provenance, "faces": {"alignment": UNALIGNED, "people": 9}}
    vitrail.save(dataclasses.replace(bundle, provenance=provenance), tmp_path / "other")
    assert "aligned" not in call("faces", "verify", tmp_path / "other", *files).stderr
    marks = tmp_path / "marks.json"
    marks.write_text(json.dumps({os.path.relpath(file, tmp_path): (TEMPLATE / 4).tolist() for file in files}))
    done = call("faces", "verify", tmp_path / "other", *files, "--landmarks", marks)
    assert (done.returncode, "trained on faces that were not aligned" in done.stderr) == (0, True)


# The command line


@pytest.mark.parametrize("arguments", [["faces"], *(["faces", name, "--help"] for name in FACES.commands)])
def test_help_imports_neither_torch_nor_numpy(arguments):
    script = (
        "import sys\nfrom vitrail.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as leaving:\n    assert not leaving.code, leaving.code\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy', 'PIL', 'sqlite3')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: vitrail faces")


def test_remove_does_not_import_torch(gallery):
    script = "import sys\nfrom vitrail.cli import main\nmain(sys.argv[1:])\nsys.exit('torch' in sys.modules)\n"
    arguments = [sys.executable, "-c", script, "faces", "remove", str(gallery), "person-00"]
    assert subprocess.run(arguments, capture_output=True, check=False).returncode == 0


def test_help_flag_and_help_command_print_the_same(call):
    assert call("help", "faces").stdout == call("faces", "--help").stdout == call("faces").stdout
    assert call("help", "faces", "enroll").stdout == call("faces", "enroll", "--help").stdout
    assert "faces" in call("--help").stdout
