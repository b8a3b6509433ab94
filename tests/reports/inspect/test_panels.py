"""Panels of `vitrail inspect` and of other packages: import, missing parts, and conflicts."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.paths import TESTS
from tests.reports.inspect.pages import write_page
from vitrail.core import registry
from vitrail.core.errors import VitrailError
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.lab.exact import redraw
from vitrail.reports.inspect.panel import InspectionContext, Panel
from vitrail.reports.inspect.panel_results import compute_panels
from vitrail.reports.inspect.registry import PANELS

CLOTHES = list(open_data("fashion-40").splits["test"].images[:3])


@pytest.fixture
def brightness_panel(monkeypatch):
    """Install the package of tests/extending, and return its panel `brightness`."""
    monkeypatch.syspath_prepend(str(TESTS / "extending"))
    registry._entry_points.cache_clear()
    yield PANELS["brightness"]
    registry._entry_points.cache_clear()


def untrained_bundle(name, **settings):
    model = redraw(vitrail.create(name, **{"classes": 10, **settings}), std=0.05)
    values = (0.5,) * model.config.channels
    return vitrail.Bundle(model=model, preprocess=Preprocess(resolution=(28, 28), mean=values, std=values))


def test_panels_are_listed_without_import():
    code = """
        import sys
        from vitrail.reports.inspect.registry import PANELS
        assert list(PANELS)[:3] == ["answers", "walk", "attention"], list(PANELS)
        assert not {"torch", "numpy"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_panel_defaults_are_empty():
    panel = Panel("nothing", InspectionContext(vitrail.load("fashion"), "fashion", CLOTHES, ["a", "b", "c"]))
    panel.finish()
    assert not any(
        [panel.numbers(), panel.layer_numbers(0), panel.image_numbers(0), panel.arrays(), panel.script_data()]
    )
    assert not any(
        [*panel.figures(), *panel.smaller_versions(), *panel.missing_parts(), panel.html({}), panel.min_bytes()]
    )


def test_absent_panel_gives_its_reason_in_both_languages(brightness_panel, tmp_path):
    pixels = np.zeros((28, 28, 3), np.uint8)
    document = write_page(compute_panels(untrained_bundle("ViT-Nano/7", channels=3), [pixels]), tmp_path / "out")
    assert document["brightness"] == []
    assert {"panel": "brightness", "reason": "Images of family vit are coloured."} in document["absent"]
    text = (tmp_path / "out" / "index.html").read_text()
    assert '<section id="brightness">' not in text
    assert "vit 계열의 이미지에는 색이 있습니다." in text
    assert not (tmp_path / "out" / "figures" / "brightness.svg").exists()


def test_panel_script_gets_the_data_of_the_panel(brightness_panel, monkeypatch, tmp_path):
    monkeypatch.setattr(brightness_panel, "script", "document.title = data.title;", raising=False)
    monkeypatch.setattr(brightness_panel, "script_data", lambda self: {"title": "<b>"}, raising=False)
    monkeypatch.setitem(brightness_panel.messages, "grey", {"en": "only English"})
    write_page(compute_panels(vitrail.load("fashion"), CLOTHES[:1], layers=[0], heads=[0]), tmp_path / "out")
    text = (tmp_path / "out" / "index.html").read_text()
    assert '((data) => {\ndocument.title = data.title;})(pageData["brightness"]);' in text
    assert '"brightness":{"title":"\\u003cb>"}' in text
    assert '<span class="ko" lang="ko">only English</span>' in text


def test_panel_with_a_key_of_another_panel_is_an_error(brightness_panel, monkeypatch):
    monkeypatch.setattr(brightness_panel, "numbers", lambda self: {"filters": 1})
    with pytest.raises(VitrailError, match="must be its own, got 'filters' from two panels"):
        compute_panels(vitrail.load("fashion"), CLOTHES[:1]).to_json()


def test_broken_panel_of_another_package_is_absent(brightness_panel, monkeypatch, call, tmp_path):
    monkeypatch.setitem(sys.modules, "toy_panel", None)
    Image.fromarray(CLOTHES[0][..., 0]).save(tmp_path / "one.png")
    done = call("inspect", "fashion", tmp_path / "one.png", "--output", tmp_path / "out", "--json")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("note: Extension panel.brightness of toys 1.0 cannot be used (")
    document = json.loads(done.stdout)
    (absent,) = (row for row in document["absent"] if row["panel"] == "brightness")
    assert f"note: {absent['reason']}" == line
    assert document["pictures"][0]["predictions"]
    text = (tmp_path / "out" / "index.html").read_text()
    assert "Extension panel.brightness of toys 1.0 cannot be used (" in text
    assert '<section id="brightness">' not in text


def test_broken_built_in_panel_is_an_error(monkeypatch):
    monkeypatch.setitem(PANELS._built_ins, "maps", "nowhere:Maps")
    with pytest.raises(ImportError, match="nowhere"):
        compute_panels(vitrail.load("fashion"), CLOTHES[:1])


@pytest.mark.parametrize("name", ["ViT-Nano/7", "ResNet-Nano"])
def test_model_without_a_head_has_a_page(name, tmp_path):
    results = compute_panels(untrained_bundle(name, classes=0, channels=1), CLOTHES, evidence=True)
    document = write_page(results, tmp_path / "out")
    reasons = {row["panel"]: row["reason"] for row in document["absent"]}
    assert reasons["answers"] == reasons["evidence"] == "This model has no classification head: it returns features."
    assert "reach" in document["layers"][0]
    assert document["pictures"][0]["predictions"] == document["pictures"][0]["path"] == []
    keys = [step["key"] for step in document["pictures"][0]["walk"]]
    assert keys[-1] == "pooled"
    assert "relevance" not in document["pictures"][0]["maps"]
    assert "returns features" in (tmp_path / "out" / "index.html").read_text()
