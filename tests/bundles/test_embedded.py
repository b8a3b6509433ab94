"""The embedded bundle `fashion`: its size, model card, predictions and name."""

import json
from pathlib import Path

import numpy as np
import pytest

import vitrail
from vitrail.bundles.card import model_card
from vitrail.core.errors import UsageError, VitrailError
from vitrail.data.sources.registry import open_data

PACKAGE = Path(vitrail.__file__).parent


@pytest.fixture(scope="module")
def bundle():
    return vitrail.load("fashion")


def test_the_embedded_bundle_is_small_and_the_only_one(bundle):
    config = bundle.model.config
    assert config.parameters <= 400_000
    assert (config.family, config.pool, config.position, config.patch) == ("vit", "cls", "learned-1d", (4, 4))
    assert [path.parent for path in PACKAGE.rglob("model.safetensors")] == [PACKAGE / "embedded" / "fashion"]
    assert sum(path.stat().st_size for path in (PACKAGE / "embedded" / "fashion").iterdir()) <= 3_000_000


def test_the_embedded_model_card_equals_the_one_that_this_version_writes(bundle):
    card = (PACKAGE / "embedded" / "fashion" / "README.md").read_text()
    assert card == model_card(bundle.model.config, bundle.provenance)


def test_the_embedded_model_classifies_held_out_images(bundle):
    data = open_data("fashion-40")
    clothes = data.splits["test"]
    predictions = vitrail.Classifier(bundle).predict(clothes.images, top_k=1)
    is_correct = [
        prediction[0]["label"] == data.labels[label]
        for prediction, label in zip(predictions, clothes.labels, strict=True)
    ]
    assert np.sum(is_correct) >= 35
    assert bundle.provenance["scores"]["count"] == 10_000
    assert bundle.provenance["scores"]["split"] == "test"
    assert bundle.provenance["licence"] == "mit"


@pytest.mark.slow
def test_the_embedded_model_has_the_accuracy_in_its_provenance(bundle, call):
    try:
        open_data("fashion-mnist")
    except VitrailError as error:
        pytest.skip(str(error))
    scores = json.loads(call("evaluate", "fashion", "fashion-mnist", "--json").stdout)
    assert scores["count"] == 10_000
    assert round(scores["accuracy"] * 10_000) == 9_297
    assert bundle.provenance["scores"]["accuracy"] == pytest.approx(0.9297)


def test_commands_open_the_embedded_bundle_by_its_name(call, tmp_path, monkeypatch):
    (tmp_path / "fashion").mkdir()  # the name of an embedded bundle takes precedence over a folder
    monkeypatch.chdir(tmp_path)
    done = call("info", "fashion", "--json")
    assert json.loads(done.stdout)["name"] == "ViT-Fashion/4"
    done = call("evaluate", "fashion", "fashion-40", "--json")
    assert json.loads(done.stdout)["count"] == 40
    with pytest.raises(UsageError, match="Bundle must be a folder that vitrail wrote"):
        vitrail.load(tmp_path / "fashion")
