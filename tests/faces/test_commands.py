"""`vitrail faces` from the command line, with the embedded model and made-up grey images as faces."""

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
    """Folders `person-NN` of images: a blurred pattern for each person, with noise."""
    random = np.random.default_rng(first)
    for person in range(first, first + count):
        pattern = Image.fromarray(random.integers(0, 255, (4, 4)).astype(np.uint8)).resize((32, 32), 3)
        (folder / f"person-{person:02d}").mkdir(parents=True)
        for number in range(1, images + 1):
            pixels = np.clip(np.asarray(pattern) + random.normal(0, noise, (32, 32)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"person-{person:02d}" / f"{number}.png")


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """Three to know and twenty others."""
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


def lines(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


# Embeddings


def test_an_embedding_is_the_unit_sum_of_an_image_and_its_mirror(people):
    file = people / "known" / "person-00" / "1.png"
    bundle = vitrail.load("fashion")
    found = Embedder("fashion").embed([str(file)])
    images = bundle.preprocess([file])
    expected = (bundle.model.features(images) + bundle.model.features(images.flip(3))).detach()
    expected = torch.nn.functional.normalize(expected)
    np.testing.assert_allclose(found.vectors, expected.numpy(), atol=1e-6)
    assert (found.vectors.dtype, found.vectors.shape) == (np.float32, (1, 96))
    assert found.sources == (hashlib.sha256(file.read_bytes()).hexdigest(),)
    assert Embedder("fashion").key == bundle_key("fashion")
    mirror = np.asarray(Image.open(file))[:, ::-1]
    np.testing.assert_allclose(Embedder(bundle).embed([mirror]).vectors, found.vectors, atol=1e-6)


def test_a_bundle_without_a_head_gives_its_output():
    bundle = vitrail.load(HEADLESS)
    pixels = np.random.default_rng(0).integers(0, 255, (5, 20, 20, bundle.preprocess.channels)).astype(np.uint8)
    images = bundle.preprocess(list(pixels))
    with torch.no_grad():
        expected = torch.nn.functional.normalize(bundle.model(images) + bundle.model(images.flip(3)))
    np.testing.assert_allclose(Embedder(HEADLESS).embed(pixels).vectors, expected.numpy(), atol=1e-6)


def test_images_that_show_no_face_are_one_line_each(tmp_path):
    Image.new("L", (40, 15)).save(tmp_path / "small.png")
    (tmp_path / "text.png").write_text("no image")
    embedder = Embedder("fashion")
    for name, kind, message in (
        ("small.png", UsageError, "must have at least 16 x 16 pixels, got 40 x 15 in"),
        ("text.png", CorruptFileError, "cannot be decoded"),
        ("none.png", UsageError, "must be a file that exists"),
    ):
        with pytest.raises(kind, match=message) as caught:
            embedder.embed([str(tmp_path / name)])
        assert "\n" not in str(caught.value)
    good = np.random.default_rng(0).integers(0, 255, (30, 30)).astype(np.uint8)
    answers = list(embedder.stream([good, str(tmp_path / "small.png"), good]))
    assert isinstance(answers[1], UsageError)
    np.testing.assert_array_equal(answers[0].vector, answers[2].vector)


# The way of a new user


def test_enroll_calibrate_and_identify(call, people, gallery):
    probes = [people / "known" / f"person-{number:02d}" / "4.png" for number in range(3)]
    probes.append(people / "others" / "person-03" / "1.png")
    blind = call("faces", "identify", "fashion", gallery, *probes, "--json")
    assert blind.returncode == 0
    assert blind.stderr.count("note: no threshold is set") == 1
    for row, name in zip(lines(blind), ("person-00", "person-01", "person-02", None), strict=True):
        assert (row["name"], row["accepted"], row["threshold"]) == (None, None, None)
        assert len(row["candidates"]) == 3
        assert name in (None, row["candidates"][0]["name"])

    done = call("faces", "calibrate", "fashion", gallery, people / "others", "--far", "0.1", "--json")
    found = json.loads(done.stdout)
    assert (found["verify"]["trials"], found["identify"]["trials"]) == (6840, 120)
    assert (found["verify"]["gallery_people"], found["identify"]["gallery_people"]) == (None, 3)
    for task, most in (("verify", 684), ("identify", 12)):
        low, high = found[task]["interval"]
        assert 0 < found[task]["errors"] <= most
        assert low < found[task]["errors"] / found[task]["trials"] < high

    rows = lines(call("faces", "identify", "fashion", gallery, *probes, "--json", "--top-k", "1"))
    for row in rows:
        best = row["candidates"][0]
        assert row["threshold"] == found["identify"]["threshold"]
        assert row["accepted"] == (best["score"] >= row["threshold"])
        assert row["name"] == (best["name"] if row["accepted"] else None)
    assert [row["name"] for row in rows[1:3]] == ["person-01", "person-02"]
    # Of the images that it was set on, as many get a name as it said.
    strangers = lines(call("faces", "identify", "fashion", gallery, people / "others", "--json"))
    assert sum(row["accepted"] for row in strangers) == found["identify"]["errors"]
    refused = next(row["file"] for row in strangers if not row["accepted"])
    table = call("faces", "identify", "fashion", gallery, refused).stdout
    named = call("faces", "identify", "fashion", gallery, probes[1]).stdout
    assert re.search(r"\d.png  person-01 \(person-01 0\.\d{4}, person-0\d 0\.\d{4}, ", named)
    assert re.search(r"\d.png  unknown \(person-0\d 0\.\d{4}, person-0\d 0\.\d{4}, ", table)

    done = call("faces", "enroll", "fashion", gallery, "person-00", probes[0])
    assert "the threshold of identify was for other people" in done.stderr
    assert "person-00: 1 new, 4 in all" in done.stdout
    assert "no threshold is set" in call("faces", "identify", "fashion", gallery, probes[1]).stderr


def test_people_and_threshold_are_of_one_moment(call, people, gallery, monkeypatch):
    assert call("faces", "calibrate", "fashion", gallery, people / "others", "--far", "0.1").returncode == 0
    probe, read = str(people / "known" / "person-00" / "4.png"), Gallery.index

    def read_and_let_another_enroll(opened):
        index = read(opened)
        with Gallery.open(gallery) as other:
            other.enroll("Ann", np.eye(96, dtype=np.float32)[:1], ["a"])  # drops the threshold
        return index

    monkeypatch.setattr(Gallery, "index", read_and_let_another_enroll)
    (row,) = identify("fashion", gallery, [probe])
    assert (len(row["candidates"]), row["threshold"] is not None) == (3, True)
    monkeypatch.undo()
    (row,) = identify("fashion", gallery, [probe])
    assert (len(row["candidates"]), row["threshold"]) == (4, None)


def test_verify(call, people, gallery):
    one, other = (people / "known" / "person-00" / f"{number}.png" for number in (5, 6))
    found = json.loads(call("faces", "verify", "fashion", one, other, "--json").stdout)
    vectors = Embedder("fashion").embed([str(one), str(other)]).vectors
    assert found["score"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-6)
    assert (found["same"], found["threshold"]) == (None, None)
    assert "no threshold is set" in call("faces", "verify", "fashion", one, other, "--gallery", gallery).stderr
    words = ["faces", "calibrate", "fashion", gallery, people / "others", "--far", "0.01"]
    assert call(*words, "--task", "verify").returncode == 0
    found = json.loads(call("faces", "verify", "fashion", one, other, "--gallery", gallery, "--json").stdout)
    assert found["same"] == (found["score"] >= found["threshold"])
    assert found["far"] == 0.01
    same = call("faces", "verify", "fashion", one, one, "--gallery", gallery)
    assert (same.returncode, same.stderr) == (0, "")
    assert "the same person" in same.stdout
    # That of identify needs more images than there are.
    done = call(*words)
    assert done.returncode == 2
    assert "--far must be at least 0.084 for identify with 120 images" in done.stderr


def test_remove(call, people, gallery):
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
def test_an_enrolment_that_was_killed_can_be_given_again(call, people, tmp_path, journal):
    path = tmp_path / "people.gallery"
    path.touch()
    if journal:
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.close()
    done = call("faces", "enroll", "fashion", path, "Ann", people / "known" / "person-00" / "1.png")
    assert (done.returncode, "Ann: 1 new, 1 in all" in done.stdout) == (0, True)


def test_nothing_is_written_if_an_image_is_bad(call, people, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "small.png")
    good = people / "known" / "person-00" / "1.png"
    done = call("faces", "enroll", "fashion", tmp_path / "g", "Ann", good, tmp_path / "small.png")
    assert (done.returncode, done.stdout) == (2, "")
    assert "at least 16 x 16 pixels" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.png"]


def test_one_bad_image_does_not_keep_the_others_from_their_names(call, people, gallery, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    good = people / "known" / "person-00" / "5.png"
    done = call("faces", "identify", "fashion", gallery, tmp_path / "text.png", good, "--json")
    assert done.returncode == 1
    assert [("error" in row) for row in lines(done)] == [True, False]
    assert "1 of 2 images could not be read" in done.stderr


def test_wrong_use_is_one_line(call, people, gallery, tmp_path):
    image, others = people / "known" / "person-00" / "5.png", people / "others"
    draw_people(tmp_path / "same", 0, 1)
    (tmp_path / "same" / "person-00").rename(tmp_path / "same" / "stranger")
    image_enrolled = (people / "known" / "person-00" / "1.png").read_bytes()
    (tmp_path / "same" / "stranger" / "1.png").write_bytes(image_enrolled)
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
            "embeddings of two models, or of aligned",
        ),
        (["enroll", "fashion", gallery, image, image], 2, "NAME must be who the images show, got the file"),
        (["enroll", "fashion", gallery, " ", image], 2, "Name must be printable text"),
        (["enroll", "fashon", gallery, "Ann", image], 2, "Did you mean 'fashion'?"),
        (["identify", "fashion", tmp_path / "none", image], 2, "Gallery must be a file that exists"),
        (["identify", "fashion", image, image], 2, "which is something else"),
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
        (["evaluate", "fashion", others, "--show-images"], 2, "must come with --output"),
        (["evaluate", "fashion", others, "--output", people], 2, "Output must not exist yet"),
        (["evaluate", "fashion", "digits", "--pairs", tmp_path / "empty.txt"], 2, "Pairs must come with data in files"),
        (["evaluate", "fashion", tmp_path / "nowhere"], 2, "Data must be"),
        (["remove", gallery, "Nobody At All"], 2, "Name must be one that is enrolled"),
    ]
    before = gallery.read_bytes()
    for words, code, message in cases:
        done = call("faces", *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), (words, done)
        assert message in done.stderr, (words, done.stderr)
    assert gallery.read_bytes() == before


def test_a_gallery_with_a_trigger_or_an_endless_view_is_one_line_and_not_written(call, people, gallery):
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
        for words in (("enroll", "fashion", forged, "Ann", image), ("remove", forged, "Ann")):
            done = call("faces", *words)
            assert done.returncode == 1
            assert "must have the tables that `vitrail faces enroll` makes" in done.stderr
            assert done.stderr.count("\n") == 1
        assert forged.read_bytes() == before


def test_paths_that_are_not_utf8(call, people, tmp_path):
    folder = tmp_path / os.fsdecode(b"f\xff")
    shutil.copytree(people / "known", folder)
    (folder / "person-01" / "1.png").rename(folder / "person-01" / os.fsdecode(b"1\xfe.png"))
    bundle, path = tmp_path / os.fsdecode(b"b\xff"), tmp_path / os.fsdecode(b"g\xff.gallery")
    shutil.copytree(HEADLESS, bundle)
    for name in ("person-00", "person-01"):
        assert call("faces", "enroll", bundle, path, name, folder / name).returncode == 0
    rows = lines(call("faces", "identify", bundle, path, folder / "person-01", "--json"))
    assert (len(rows), rows[0]["candidates"][0]["name"]) == (6, "person-01")
    done = call("faces", "identify", "fashion", path, folder / "person-01")
    assert done.returncode == 2
    assert r"/b\udcff, hash " in done.stderr


def test_a_gallery_with_embeddings_of_another_width_is_damaged(call, people, gallery):
    with sqlite3.connect(gallery) as connection:
        connection.execute("UPDATE about SET value = '1' WHERE key = 'width'")
        query, vector = (
            "SELECT template.id, name, source FROM template JOIN person ON person = person.id",
            np.ones(1, "<f4"),
        )
        for number, name, source in connection.execute(f"{query} WHERE person = person.id").fetchall():
            digest = _digest(bundle_key("fashion"), name, source, vector)
            change = "UPDATE template SET vector = ?, digest = ? WHERE id = ?"
            connection.execute(change, (vector, digest, number))
    connection.close()
    probe = people / "others" / "person-03" / "1.png"
    for name, *words in (
        ["identify", probe],
        ["enroll", "Ann", probe],
        ["calibrate", people / "others", "--far", "0.1"],
    ):
        done = call("faces", name, "fashion", gallery, *words)
        assert (done.returncode, done.stderr.count("\n"), "is damaged: it" in done.stderr) == (1, 1, True)


def test_a_gallery_in_use_is_exit_1(call, people, gallery, monkeypatch):
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
    assert (done.returncode, "the traces that an earlier removal had left" in done.stdout) == (0, True)
    assert "note: 'person-02' was not enrolled (any more)" in done.stderr


# Evaluation


def test_evaluate_all_pairs_by_group_and_on_a_page(call, people, tmp_path):
    rows = [f"person-{number:02d},{'odd' if number % 2 else 'even'}" for number in range(3, 22)]
    (tmp_path / "groups.csv").write_text("\n".join(["person,group", *rows]))
    words = ["faces", "evaluate", "fashion", people / "others", "--groups", tmp_path / "groups.csv"]
    done = call(*words, "--output", tmp_path / "page", "--json")
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
    assert "<img" not in page  # nobody asked for images
    assert page.count("<svg") == 3
    assert "How well does fashion tell people apart?" in page
    assert "사람을 얼마나 잘 구별할까요?" in page
    assert f"{report['eer']:.1%}" in page
    assert "n = 20 people" in page
    assert not re.search(r"(src|href)=.https?:", page)

    shown = call(*words, "--output", tmp_path / "page", "--force", "--show-images").stdout
    assert (tmp_path / "page" / "index.html").read_text(encoding="utf-8").count("<img") == 48
    assert "equal error rate" in shown
    assert "false accepts / refusals at FAR 0.1 of all" in shown


def test_two_people_are_evaluated_without_intervals(call, people, tmp_path):
    (tmp_path / "without.txt").write_text("person-02\n")
    (tmp_path / "groups.csv").write_text("person-00,both\nperson-01,both\n")
    words = ["--without", tmp_path / "without.txt", "--groups", tmp_path / "groups.csv", "--output", tmp_path / "page"]
    done = call("faces", "evaluate", "fashion", people / "known", *words)
    assert (done.returncode, re.search(r"equal error rate +\d+\.\d\d% *\n", done.stdout) is not None) == (0, True)
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "n = 2 people: too few for intervals" in page
    assert "95 % interval " not in page


def test_evaluate_a_list_of_pairs(call, people, tmp_path):
    random = np.random.default_rng(0)
    listed = []
    for fold in range(10):
        names = [f"person-{3 + 2 * fold + side:02d}" for side in (0, 1)]
        for _ in range(5):
            one, other = random.choice(6, 2, replace=False) + 1
            listed.append(f"{names[0]}\t{one}\t{other}")
        listed += [f"{names[0]}\t{random.integers(1, 7)}\t{names[1]}\t{random.integers(1, 7)}" for _ in range(5)]
    (tmp_path / "pairs.txt").write_text("\n".join(["10\t5", *listed]))
    words = ["faces", "evaluate", "fashion", people / "others", "--pairs", tmp_path / "pairs.txt"]
    report = json.loads(call(*words, "--json").stdout)
    assert (report["genuine"], report["impostor"], report["people"]) == (50, 50, 20)
    assert (report["rank1"], report["dir"], [row["tar"] for row in report["tar"]]) == (None, [], [None] * 3)
    assert report["accuracy_std"] == pytest.approx(np.std(report["accuracy_folds"]))
    files = [[people / "others" / row.split("\t")[0] / f"{row.split(chr(9))[1]}.png" for row in listed]]
    files.append([people / "others" / row.split("\t")[-2] / f"{row.split(chr(9))[-1]}.png"
                  if row.count("\t") == 3 else people / "others" / row.split("\t")[0] / f"{row.split(chr(9))[2]}.png"
                  for row in listed])  # fmt: skip
    one, other = (Embedder("fashion").embed(map(str, some)).vectors for some in files)
    scores = (one * other).sum(axis=1)
    truth = np.tile([True] * 5 + [False] * 5, 10)
    worst = min(report["worst"]["genuine"], key=lambda row: row["score"])
    assert worst["score"] == pytest.approx(scores[truth].min(), abs=1e-6)
    assert call(*words, "--output", tmp_path / "page").returncode == 0


def test_names_are_text_on_the_page(call, people, tmp_path):
    names = ["<script>alert(1)", "a&b\"'", "<img src=x onerror=alert(1)>"]
    for name, folder in zip(names, sorted((people / "known").iterdir()), strict=True):
        shutil.copytree(folder, tmp_path / "people" / name)
    (tmp_path / "groups.csv").write_text("".join(f'"{name.replace(chr(34), 2 * chr(34))}",<b>all\n' for name in names))
    words = ["--groups", tmp_path / "groups.csv", "--output", tmp_path / "page", "--show-images"]
    assert call("faces", "evaluate", "fashion", tmp_path / "people", *words).returncode == 0
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;all" in page
    assert not any(bad in page for bad in ("<script>alert", "<img src=x", "<b>all"))


def test_the_page_in_a_browser(call, people, tmp_path, browser):
    """It fits a phone, speaks two languages, and runs nothing but the switch between them."""
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


def test_people_are_left_out(call, people, gallery, tmp_path):
    (tmp_path / "trained.txt").write_text("".join(f"person-{number:02d}\n" for number in range(3, 13)))
    words = ["faces", "evaluate", "fashion", people / "others", "--without", tmp_path / "trained.txt"]
    report = json.loads(call(*words, "--json").stdout)
    assert (report["people"], report["images"], report["genuine"]) == (10, 60, 150)
    worst = [Path(row["one"]).parent.name for row in report["worst"]["genuine"]]
    assert min(worst) >= "person-13"
    (tmp_path / "trained.txt").write_text("person-99\n")
    assert "Did you mean 'person-" in call(*words).stderr
    # Everybody in one folder: those who are enrolled are left out of the calibration.
    for name in ("known", "others"):
        for folder in (people / name).iterdir():
            (tmp_path / "all").mkdir(exist_ok=True)
            (tmp_path / "all" / folder.name).symlink_to(folder)
    (tmp_path / "known.txt").write_text("person-00\nperson-01\nperson-02\n")
    words = ["faces", "calibrate", "fashion", gallery, tmp_path / "all", "--far", "0.1", "--json"]
    assert call(*words).returncode == 2
    assert json.loads(call(*words, "--without", tmp_path / "known.txt").stdout)["identify"]["trials"] == 120


def test_an_image_under_two_names_is_told(call, people, gallery, tmp_path):
    """It would be an impostor pair with the score of one person."""
    shutil.copytree(people / "others", tmp_path / "others")
    shutil.copy(tmp_path / "others/person-04/2.png", tmp_path / "others/person-05/7.png")
    done = call("faces", "evaluate", "fashion", tmp_path / "others")
    assert (done.returncode, done.stderr.count("the same image has two names")) == (0, 1)
    assert "person-04/2.png' and '" in done.stderr
    before = gallery.read_bytes()
    done = call("faces", "calibrate", "fashion", gallery, tmp_path / "others", "--far", "0.1")
    assert (done.returncode, done.stderr.count("\n"), gallery.read_bytes() == before) == (2, 1, True)
    assert "DATA must have an image under one name, got the same in" in done.stderr


def test_people_that_the_bundle_was_trained_on_are_told(call, people, gallery, tmp_path):
    bundle = vitrail.load("fashion")
    known = {"faces": {"alignment": UNALIGNED, "people": 9}, "data": "somewhere/others: 90 training images"}
    vitrail.save(dataclasses.replace(bundle, provenance={**bundle.provenance, **known}), tmp_path / "face")
    (tmp_path / "people.txt").write_text("person-03\n")
    told = "was trained on people of 'somewhere/others'"
    words = ["faces", "evaluate", tmp_path / "face", people / "others"]
    assert call(*words).stderr.count(told) == 1
    assert told not in call(*words, "--without", tmp_path / "people.txt").stderr
    assert told not in call("faces", "evaluate", tmp_path / "face", people / "known").stderr
    vitrail.save(dataclasses.replace(bundle, provenance={"faces": "many"}), tmp_path / "odd")
    assert call("faces", "evaluate", tmp_path / "odd", people / "known").returncode == 0


def test_people_are_the_same_in_either_spelling_of_unicode(call, people, gallery, tmp_path):
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
    words = ["--without", tmp_path / "known.txt"]
    done = call("faces", "calibrate", "fashion", gallery, tmp_path / "all", "--far", "0.1", *words)
    assert (done.returncode, "got '김한', who is in the gallery" in done.stderr) == (2, True)
    (tmp_path / "known.txt").write_text("person-01\nperson-02\n김한\n", encoding="utf-8")
    (tmp_path / "groups.csv").write_text("이봄,one\n최별,one\n", encoding="utf-8")
    words += ["--groups", tmp_path / "groups.csv", "--json"]
    report = json.loads(call("faces", "evaluate", "fashion", tmp_path / "all", *words).stdout)
    assert (report["people"], report["images"]) == (19, 120)
    assert (report["groups"][0]["people"], report["groups"][0]["images"]) == (2, 18)


def test_faces_are_aligned_by_landmarks(call, people, tmp_path):
    """As in training: the same pixels, and a gallery of its own."""
    folder, files = people / "known", sorted((people / "known").rglob("*.png"))
    points = TEMPLATE * 32 / 112 + [2, 1]
    rows = [",".join([str(file.relative_to(folder)), *(f"{x:.4f}" for x in points.ravel())]) for file in files]
    header = ",".join(["file", *(f"{axis}{number}" for number in range(1, 6) for axis in "xy")])
    marks = tmp_path / "marks.csv"
    marks.write_text("\n".join([header, *rows]))
    aligned = [np.asarray(align(Image.open(file), points.round(4))) for file in files]
    expected = Embedder("fashion").embed(aligned).vectors
    found = Embedder("fashion", aligner=Aligner(marks, [str(folder)])).embed(map(str, files)).vectors
    np.testing.assert_allclose(found, expected, atol=1e-5)
    words = ["faces", "evaluate", "fashion", folder, "--json"]
    with_marks, without = (json.loads(call(*words, *more).stdout) for more in (["--landmarks", marks], []))
    assert with_marks["eer"] != without["eer"]

    gallery = tmp_path / "aligned.gallery"
    own = folder / "marks.csv"  # beside the images: files are named below its folder
    own.write_text(marks.read_text())
    try:
        enrolled = call("faces", "enroll", "fashion", gallery, "Ann", files[0], "--landmarks", own)
        assert enrolled.returncode == 0, enrolled.stderr
        done = call("faces", "identify", "fashion", gallery, files[1])
        assert (done.returncode, "of aligned and other faces" in done.stderr) == (2, True)
        rows = lines(call("faces", "identify", "fashion", gallery, files[0], "--landmarks", own, "--json"))
        assert rows[0]["candidates"][0]["score"] == pytest.approx(1, abs=1e-5)
    finally:
        own.unlink()
    done = call("faces", "enroll", "fashion", gallery, "Ann", files[1], "--landmarks", marks)
    assert (done.returncode, "got none for" in done.stderr) == (2, True)


def test_landmarks_are_pixels_of_the_whole_image_as_it_is_shown(tmp_path):
    """Also where the bundle decodes photos at a smaller scale, and where EXIF turns them."""
    bundle = vitrail.load("fashion")
    fast = dataclasses.replace(bundle, preprocess=bundle.preprocess.replace(jpeg="double"))
    pattern = np.random.default_rng(0).integers(0, 255, (20, 20), np.uint8)
    photo = Image.fromarray(pattern).resize((800, 800), Image.Resampling.BICUBIC)
    points = 4 * TEMPLATE + [150, 90]
    photo.save(tmp_path / "plain.jpg", quality=95)
    orientation = Image.Exif()
    orientation[0x0112] = 6  # to be turned by a quarter, clockwise
    photo.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.jpg", quality=95, exif=orientation)
    (tmp_path / "marks.json").write_text(json.dumps({name: points.tolist() for name in ("plain.jpg", "turned.jpg")}))
    expected = Embedder(bundle).embed([np.asarray(align(photo, points))]).vectors[0]
    for one in (bundle, fast):
        embedder = Embedder(one, aligner=Aligner(tmp_path / "marks.json"))
        found = embedder.embed([str(tmp_path / "plain.jpg"), str(tmp_path / "turned.jpg")]).vectors
        assert (found @ expected).min() > 0.999


def test_a_bundle_of_aligned_faces_asks_for_landmarks(call, people, tmp_path):
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


@pytest.mark.parametrize("words", [["faces"], *(["faces", name, "--help"] for name in FACES.commands)])
def test_help_imports_neither_torch_nor_numpy(words):
    script = (
        "import sys\nfrom vitrail.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as leaving:\n    assert not leaving.code, leaving.code\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy', 'PIL', 'sqlite3')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: vitrail faces")


def test_removing_imports_no_torch(gallery):
    script = "import sys\nfrom vitrail.cli import main\nmain(sys.argv[1:])\nsys.exit('torch' in sys.modules)\n"
    words = [sys.executable, "-c", script, "faces", "remove", str(gallery), "person-00"]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0


def test_help_of_a_nested_command(call):
    assert call("help", "faces").stdout == call("faces", "--help").stdout == call("faces").stdout
    assert call("help", "faces", "enroll").stdout == call("faces", "enroll", "--help").stdout
    assert "faces" in call("--help").stdout
