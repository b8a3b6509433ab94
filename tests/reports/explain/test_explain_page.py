"""The page of `vitrail explain`: supported models and images, messages, content."""

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

STEP_MESSAGES = ViTWalkthrough.messages
GREY = vitrail.Preprocess(resolution=(28, 28), mean=(0.5,), std=(0.5,), crop_fraction=1.0)

# Questions of beginners about ViT, with the message that answers each and a phrase of this message.
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


@pytest.mark.parametrize("messages", [MESSAGES, STEP_MESSAGES], ids=["page", "walkthrough"])
def test_messages_have_the_same_fields_in_both_languages(messages):
    for name, message in messages.items():
        assert message.keys() == {"en", "ko"}, name
        assert fields_of(message["en"]) == fields_of(message["ko"]), name
        assert all(text.strip() == text and text for text in message.values()), name


def test_every_message_is_used():
    sources = "".join(path.read_text() for path in _sources())
    used = {name for name in MESSAGES if f'"{name}"' in sources or f"'{name}'" in sources}
    composed = {name for name in MESSAGES if name.startswith("symbol-")}
    assert MESSAGES.keys() - used - composed == set()


def _sources():
    from vitrail.reports.explain import explain_page

    return [explain_page._HERE, *explain_page._SCRIPTS]


def test_every_step_has_its_four_messages(fashion):
    for title, steps in walkthrough_of(fashion.model).explanation().parts.items():
        assert title in STEP_MESSAGES
        for step in steps:
            for part in ("title", "says", "asks", "answer"):
                assert any(name.partition(".")[0] == f"{step.name}-{part}" for name in STEP_MESSAGES), (step.name, part)


@pytest.mark.parametrize("question", QUESTIONS)
def test_messages_answer_the_questions_of_beginners(question):
    name, phrase = QUESTIONS[question]
    assert phrase in STEP_MESSAGES[name]["en"]


@pytest.fixture(scope="module")
def fashion():
    return vitrail.load("fashion")


def test_page_of_the_embedded_model_is_small_and_self_contained(fashion, tmp_path):
    explain_page = explain(fashion, output=tmp_path / "walk")
    text = explain_page.read_text(encoding="utf-8")
    assert explain_page.stat().st_size <= 2_500_000
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\((?!data:)|@import|fetch\(|import\(""", text)
    assert "default-src 'none'" in text
    assert {file.name for file in explain_page.parent.iterdir()} == {"index.html", "manifest.json"}
    with pytest.raises(UsageError, match="must not exist yet"):
        explain(fashion, output=tmp_path / "walk")


def test_embedded_images_of_clothes_have_their_classes(fashion):
    images = embedded_images(fashion)
    clothes = open_data("fashion-40").splits["test"]
    assert len(images) == 40
    assert all(np.array_equal(image.pixels, pixels) for image, pixels in zip(images, clothes.images, strict=True))
    assert {image.truth for image in images} == set(fashion.labels)


def test_model_of_digits_gets_embedded_digits():
    model = vitrail.create("ViT-Pico/2", classes=10)
    preprocess = vitrail.Preprocess(resolution=(8, 8), mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    images = embedded_images(vitrail.Bundle(model=model, preprocess=preprocess, labels=tuple("0123456789")))
    assert (len(images), images[0].pixels.shape, {image.truth for image in images}) == (
        40,
        (8, 8, 1),
        set("0123456789"),
    )


def test_model_without_embedded_images_needs_images():
    model = vitrail.create("ViT-Nano/7", classes=3)
    bundle = vitrail.Bundle(model=model, preprocess=GREY, labels=("a", "b", "c"))
    with pytest.raises(UsageError, match="IMAGE must be given, because no embedded image"):
        embedded_images(bundle)
    explain_page = make_page(bundle, [ExplainImage(np.zeros((28, 28, 1), np.uint8), "nothing.png")])
    assert "The bundle does not record any training" in explain_page


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pool": "map"}, "pool map"),
        ({"position": "rope-2d"}, "position rope-2d"),
        ({"position": "relative"}, "position relative"),
        ({"position_at": "every"}, "position_at every"),
        ({"attention": "local"}, "attention local"),
        ({"norm": "batch"}, "norm batch"),
        ({"norm": "none"}, "norm none"),
        ({"activation": "none"}, "activation none"),
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
def test_unsupported_config_is_rejected_with_its_reason(settings, reason):
    assert reason in vitrail.create("ViT-Nano/7", **{"classes": 3, **settings}).config.why_not_in_page


@pytest.mark.parametrize(
    "name", ["Hybrid-Nano", "ResNet-Nano", "Mixer-Nano/7", "LSTM-Nano/7", "iGPT-Micro", "MLP-Nano"]
)
def test_other_families_are_rejected_with_a_hint_to_inspect(name):
    model = vitrail.create(name, classes=3)
    preprocess = vitrail.Preprocess(
        resolution=model.config.resolution, mean=(0.5,) * model.config.channels, std=(0.5,) * model.config.channels
    )
    with pytest.raises(UsageError, match=rf"got family {model.config.family}\. `vitrail inspect`"):
        explain(vitrail.Bundle(model=model, preprocess=preprocess))


def test_multi_label_bundle_is_rejected(fashion):
    multi_label = dataclasses.replace(fashion, answer=MultiLabel(thresholds=(0.5,) * 10))
    with pytest.raises(UsageError, match="one class"):
        explain(multi_label)


def test_command_writes_and_opens_the_page(call, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    done = call("explain", "fashion", "--output", tmp_path / "walk", "--open")
    assert (done.returncode, done.stdout.split()) == (0, ["page", str(tmp_path / "walk/index.html")])
    assert opened == [(tmp_path / "walk/index.html").as_uri()]
    again = call("explain", "fashion", "--output", tmp_path / "walk")
    assert (again.returncode, "must not exist yet" in again.stderr) == (2, True)
    assert call("explain", "fashion", "--output", tmp_path / "walk", "--force").returncode == 0


def test_unusable_images_and_bundles_give_one_error_line(call, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    Image.new("RGB", (60, 40), "red").save(tmp_path / "red.png")
    model = vitrail.create("ResNet-Nano", classes=10)
    vitrail.save(vitrail.Bundle(model=model, preprocess=GREY), tmp_path / "resnet")
    for arguments, code, expected in [
        (("fashion", tmp_path / "text.png"), 1, "cannot be decoded"),
        (("fashion", tmp_path / "none.png"), 2, "Image must be a file or folder that exists"),
        ((tmp_path / "resnet",), 2, "got family resnet. `vitrail inspect` shows"),
        (("fashion", *[tmp_path / "red.png"] * 41), 2, "Images must be at most 40, got 41"),
    ]:
        done = call("explain", *arguments, "--output", tmp_path / "walk")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
        assert expected in done.stderr
        assert not (tmp_path / "walk").exists()
    done = call("explain", "fashion", tmp_path / "red.png", "--output", tmp_path / "walk")
    assert done.returncode == 0
    assert '"name": "red.png"' in (tmp_path / "walk/index.html").read_text(encoding="utf-8")


def test_hostile_labels_and_names_are_escaped():
    evil = '</script><img src=x onerror="document.title=1">'
    model = redraw(vitrail.create("ViT-Nano/7", classes=2, name=evil), std=0.2)
    bundle = vitrail.Bundle(model=model, preprocess=GREY, labels=(evil, "b"))
    text = make_page(bundle, [ExplainImage(np.zeros((28, 28, 1), np.uint8), evil, evil)])
    assert "<img" not in text
    assert text.count("</script>") == 3
