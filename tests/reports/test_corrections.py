"""Links to photos and controls of corrections on pages of `evaluate` and `predict`."""

import os
import re
import urllib.parse
import zipfile

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.data.decode import StoredImage
from vitrail.data.sources.registry import open_data
from vitrail.reports.corrections import Correctable, CorrectionControls, photo_link, storage_key

NAMES = ("a b#1%?.png", "개미 사진.png", os.fsdecode(b"caf\xe9.png"), '"<&>.png', "two\nlines.png", "http:x.png")


@pytest.mark.parametrize("name", NAMES)
def test_photo_link_leads_from_page_to_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    photo, page = tmp_path / "photos" / name, tmp_path / "pages" / "of a model"
    for path in (f"photos/{name}", str(photo)):
        url = urllib.parse.urljoin(f"{page.as_uri()}/index.html", photo_link(path, page))
        assert urllib.parse.unquote_to_bytes(url.removeprefix("file://")) == os.fsencode(photo)
    assert photo_link(name, tmp_path).isascii()
    assert urllib.parse.urlsplit(photo_link(name, tmp_path))[:2] == ("", "")


def test_pixels_and_members_of_archives_have_no_link(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "1.png")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for label in ("a", "b"):
            archive.write(tmp_path / "1.png", f"{label}/1.png")
    member = open_data(tmp_path / "data.zip").first_split.images[0]
    assert isinstance(member, StoredImage)
    assert photo_link(member, tmp_path) == photo_link(np.zeros((8, 8, 1), np.uint8), tmp_path) == ""


def test_attributes_and_choices_are_escaped():
    correctable = Correctable(name='a"\r\n<b>.png', label="x", guess="")
    assert correctable.attributes == ' data-file="a&quot;&#13;\n&lt;b&gt;.png" data-label="x"'
    assert Correctable(name="", label="x").attributes == ""
    bar = CorrectionControls(selectable_labels=[("<1>", "one & all")], key="k", previous={'"': "<1>"}).bar
    assert '<option value="&lt;1&gt;">one &amp; all</option>' in bar
    assert 'data-previous="{&quot;\\&quot;&quot;: &quot;&lt;1&gt;&quot;}"' in bar
    assert storage_key(["a", "b"]) != storage_key(["a", "c"])


def read_attributes(page, name):
    return re.findall(rf'data-{name}="([^"]*)"', page.read_text(encoding="utf-8"))


def test_pages_offer_classes_of_the_data_under_their_own_names(tmp_path, monkeypatch):
    """Class folders that are called by numbers: the page shows the bundle's names, and saves the numbers."""
    monkeypatch.chdir(tmp_path)
    split = open_data("fashion-40").splits["test"]
    for index in range(12):
        folder = tmp_path / "photos" / str((split.labels[index] + index % 2) % 10)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(split.images[index][..., 0]).save(folder / f"{index}.png")
    vitrail.evaluate("fashion", "photos", page="pages")
    page = tmp_path / "pages" / "index.html"
    files = read_attributes(page, "file")
    assert files
    assert all((tmp_path / "photos" / file).is_file() for file in files)
    assert [file.split("/")[0] for file in files] == read_attributes(page, "label")
    assert {'<option value="1">Bag (1)</option>'} <= set(
        re.findall("<option value=.*?</option>", page.read_text(encoding="utf-8"))
    )
    assert read_attributes(page, "guess")
    assert f'href="../photos/{files[0]}"' in page.read_text(encoding="utf-8")


def test_pages_of_arrays_name_images_of_splits_and_no_held_out_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    split = open_data("fashion-40").splits["test"]
    names = np.array(open_data("fashion-40").labels)
    arrays = {"images": split.images, "labels": names[(split.labels + 1) % 10]}
    vitrail.evaluate("fashion", arrays, page="all")
    page = tmp_path / "all" / "index.html"
    assert all(file.startswith("all image ") for file in read_attributes(page, "file"))
    assert "<a href" not in "".join(re.findall("<figure.*?</figure>", page.read_text(encoding="utf-8"), re.DOTALL))
    run = vitrail.finetune("fashion", arrays, steps=0, output="run")
    vitrail.evaluate("run/bundle", arrays, page="held-out")
    assert run.scores["split"] == "held-out"
    assert not read_attributes(tmp_path / "held-out" / "mistakes-1.html", "file")
