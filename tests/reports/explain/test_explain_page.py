"""`vitrail explain`: which models and images it takes, and what its page holds."""

import dataclasses
import re

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.bundles.decision import MultiLabel
from vitrail.core.errors import UsageError
from vitrail.data.sources.registry import open_data
from vitrail.lab.exact import redraw
from vitrail.models.families.vit.walkthrough import ViTWalkthrough
from vitrail.models.walkthrough import walkthrough_of
from vitrail.reports.explain.explain_page import MESSAGES, ExplainImage, embedded_images, explain, make_page

TOLD = ViTWalkthrough.messages
GREY = vitrail.Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,), crop_fraction=1.0)

# What a beginner asks about ViT, and the station whose sentence or answer says it, with words that must stand there.
QUESTIONS = {
    "How does an image become tokens?": ("patches-says", "Each becomes one token"),
    "Why patches and not pixels?": ("patches-answer", "compares every token with every other"),
    "Does each patch have its own weights?": ("project-answer", "All {count} patches share E"),
    "What is [CLS], and what does it know at first?": ("cls-answer.cls", "the same for every image"),
    "Why are positions added?": ("positions-says.learned", "attention itself knows no order"),
    "Over what does LayerNorm normalise?": ("norm-answer", "Over the {width} features of one token"),
    "What are query, key and value?": ("qkv-says", "what it looks for"),
    "Why is the dot product divided by a square root?": ("scores-answer", "choose one token only"),
    "What moves information between patches?": ("mlp-answer", "only attention moves anything between patches"),
    "What does the classification head read?": ("read-says.cls", "[CLS] alone is normalised once more"),
}


def fields_of(text):
    return sorted(set(re.findall(r"\{(\w+)\}", text)))


@pytest.mark.parametrize("words", [MESSAGES, TOLD], ids=["words", "walkthrough"])
def test_english_and_korean_say_the_same(words):
    for name, sentence in words.items():
        assert sentence.keys() == {"en", "ko"}, name
        assert fields_of(sentence["en"]) == fields_of(sentence["ko"]), name
        assert all(text.strip() == text and text for text in sentence.values()), name


def test_every_word_is_used():
    scripts = "".join(path.read_text() for path in _sources())
    named = {name for name in MESSAGES if f'"{name}"' in scripts or f"'{name}'" in scripts}
    made = {name for name in MESSAGES if name.startswith("symbol-")}
    assert MESSAGES.keys() - named - made == set()


def _sources():
    from vitrail.reports.explain import explain_page

    return [explain_page._HERE, *explain_page._SCRIPTS]


def test_every_station_says_asks_and_answers(fashion):
    for title, steps in walkthrough_of(fashion.model).explanation().parts.items():
        assert title in TOLD
        for step in steps:
            for part in ("title", "says", "asks", "answer"):
                assert any(name.partition(".")[0] == f"{step.name}-{part}" for name in TOLD), (step.name, part)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_page_answers_what_beginners_ask(question):
    name, words = QUESTIONS[question]
    assert words in TOLD[name]["en"]


@pytest.fixture(scope="module")
def fashion():
    return vitrail.load("fashion")


def test_the_embedded_model_fits_into_its_limit(fashion, tmp_path):
    explain_page = explain(fashion, output=tmp_path / "walk")
    text = explain_page.read_text(encoding="utf-8")
    assert explain_page.stat().st_size <= 2_500_000
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\((?!data:)|@import|fetch\(|import\(""", text)
    assert "default-src 'none'" in text
    assert {file.name for file in explain_page.parent.iterdir()} == {"index.html", "manifest.json"}
    with pytest.raises(UsageError, match="must not exist yet"):
        explain(fashion, output=tmp_path / "walk")


def test_the_forty_are_shown_with_their_classes(fashion):
    shown = embedded_images(fashion)
    clothes = open_data("fashion-40").splits["test"]
    assert len(shown) == 40
    assert all(np.array_equal(one.pixels, pixels) for one, pixels in zip(shown, clothes.images, strict=True))
    assert {one.truth for one in shown} == set(fashion.labels)


def test_digits_are_shown_for_a_model_of_digits():
    model = vitrail.create("ViT-Pico/2", classes=10)
    eye = vitrail.Preprocess(resolution=(8, 8), mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    shown = embedded_images(vitrail.Bundle(model=model, preprocess=eye, labels=tuple("0123456789")))
    assert (len(shown), shown[0].pixels.shape, {one.truth for one in shown}) == (40, (8, 8, 1), set("0123456789"))


def test_other_models_need_images():
    model = vitrail.create("ViT-Nano/7", classes=3)
    bundle = vitrail.Bundle(model=model, preprocess=GREY, labels=("a", "b", "c"))
    with pytest.raises(UsageError, match="IMAGE must be given: the embedded images"):
        embedded_images(bundle)
    explain_page = make_page(bundle, [ExplainImage(np.zeros((28, 28, 1), np.uint8), "nothing.png")])
    assert "Nothing says that this model was trained" in explain_page


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pool": "map"}, "pool map"),
        ({"position": "rope-2d"}, "position rope-2d"),
        ({"position": "relative"}, "position relative"),
        ({"position_at": "every"}, "position_at every"),
        ({"attention": "local"}, "attention local"),
        ({"norm": "batch"}, "norm batch"),
        ({"norm_order": "post"}, "norm_order post"),
        ({"activation": "relu"}, "activation relu"),
        ({"layer_scale": 0.1}, "layer_scale 0.1"),
        ({"residual": False}, "residual False"),
        ({"attention_scale": 1.0}, "attention_scale 1.0"),
        ({"stride": (3, 3)}, "patches that overlap or are padded"),
        ({"channels": 4}, "4 channels"),
        ({"classes": 0}, "0 classes"),
        ({"width": 512}, "parameters, more than 3,000,000"),
        ({"patch": (1, 1)}, "multiply-accumulates, more than 250,000,000"),
    ],
)
def test_a_model_that_the_page_cannot_run_is_named(settings, why):
    assert why in vitrail.create("ViT-Nano/7", **{"classes": 3, **settings}).config.why_not_in_page


@pytest.mark.parametrize(
    "name", ["Hybrid-Nano", "ResNet-Nano", "Mixer-Nano/7", "LSTM-Nano/7", "iGPT-Micro", "MLP-Nano"]
)
def test_other_families_are_sent_to_inspect(name):
    model = vitrail.create(name, classes=3)
    eye = vitrail.Preprocess(
        resolution=model.config.resolution, mean=(0.5,) * model.config.channels, std=(0.5,) * model.config.channels
    )
    with pytest.raises(UsageError, match=rf"got family {model.config.family}\. `vitrail inspect`"):
        explain(vitrail.Bundle(model=model, preprocess=eye))


def test_a_model_of_several_labels_is_refused(fashion):
    several = dataclasses.replace(fashion, answer=MultiLabel(thresholds=(0.5,) * 10))
    with pytest.raises(UsageError, match="one class"):
        explain(several)


def test_the_command(call, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    done = call("explain", "fashion", "--output", tmp_path / "walk", "--open")
    assert (done.returncode, done.stdout.split()) == (0, ["page", str(tmp_path / "walk/index.html")])
    assert opened == [(tmp_path / "walk/index.html").as_uri()]
    again = call("explain", "fashion", "--output", tmp_path / "walk")
    assert (again.returncode, "must not exist yet" in again.stderr) == (2, True)
    assert call("explain", "fashion", "--output", tmp_path / "walk", "--force").returncode == 0


def test_wrong_images_and_bundles_are_one_line(call, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    Image.new("RGB", (60, 40), "red").save(tmp_path / "red.png")
    model = vitrail.create("ResNet-Nano", classes=10)
    vitrail.save(vitrail.Bundle(model=model, preprocess=GREY), tmp_path / "resnet")
    for words, code, expected in [
        (("fashion", tmp_path / "text.png"), 1, "cannot be decoded"),
        (("fashion", tmp_path / "none.png"), 2, "Image must be a file or folder that exists"),
        ((tmp_path / "resnet",), 2, "got family resnet. `vitrail inspect` shows"),
        (("fashion", *[tmp_path / "red.png"] * 41), 2, "Images must be at most 40, got 41"),
    ]:
        done = call("explain", *words, "--output", tmp_path / "walk")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
        assert expected in done.stderr
        assert not (tmp_path / "walk").exists()
    done = call("explain", "fashion", tmp_path / "red.png", "--output", tmp_path / "walk")
    assert done.returncode == 0
    assert '"name": "red.png"' in (tmp_path / "walk/index.html").read_text(encoding="utf-8")


def test_hostile_labels_and_names_stay_text():
    evil = '</script><img src=x onerror="document.title=1">'
    model = redraw(vitrail.create("ViT-Nano/7", classes=2, name=evil), std=0.2)
    bundle = vitrail.Bundle(model=model, preprocess=GREY, labels=(evil, "b"))
    text = make_page(bundle, [ExplainImage(np.zeros((28, 28, 1), np.uint8), evil, evil)])
    assert "<img" not in text
    assert text.count("</script>") == 3
