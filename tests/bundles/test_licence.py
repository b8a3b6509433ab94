"""The licence that a user states for weights: in the bundle, on its card, in `info` and in other formats."""

import json

import pytest

import vitrail
from tests.paths import TESTS
from vitrail.bundles.card import check_licence
from vitrail.core.errors import UsageError

FIXTURE = TESTS / "fixtures" / "bundle-format-1"


def licence_of(bundle):
    return json.loads((bundle / "provenance.json").read_text(encoding="utf-8"))["licence"]


def test_licence_is_stored_and_shown_and_kept_when_resumed(tmp_path, call):
    options = {"model": "ViT-Pico/2", "steps": 2, "batch": 16}
    vitrail.train("digits", **options, output=tmp_path / "plain")
    assert licence_of(tmp_path / "plain" / "bundle") == "cc-by-4.0"  # of the data
    vitrail.train("digits", **options, output=tmp_path / "run", licence=" Our licence ")
    vitrail.train("digits", **options, output=tmp_path / "run", resume=True)
    bundle = tmp_path / "run" / "bundle"
    assert licence_of(bundle) == "Our licence"
    assert 'license: other\nlicense_name: "Our licence"\n' in (bundle / "README.md").read_text(encoding="utf-8")
    assert call("info", bundle).stdout.splitlines()[-1].split(maxsplit=1) == ["licence", "Our licence"]
    assert json.loads(call("info", bundle, "--json").stdout)["licence"] == "Our licence"
    vitrail.train("digits", **options, output=tmp_path / "run", resume=True, licence="mit")
    assert licence_of(bundle) == "mit"

    tuned = vitrail.finetune(bundle, "digits", steps=1, licence="apache-2.0").bundle
    assert tuned.provenance["licence"] == "apache-2.0"
    assert tuned.provenance["finetuned_from"]["licence"] == "mit"


def test_converted_weights_get_the_licence_in_every_format(tmp_path):
    vitrail.convert(FIXTURE, tmp_path / "bundle", licence="cc0-1.0")
    assert licence_of(tmp_path / "bundle") == "cc0-1.0"
    vitrail.convert("fashion", tmp_path / "timm", to="timm", licence="cc0-1.0", verify=False)
    assert json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]["license"] == "cc0-1.0"
    vitrail.convert(tmp_path / "timm", tmp_path / "again", licence="mit", verify=False)
    assert licence_of(tmp_path / "again") == "mit"


def test_info_shows_the_licence_of_weights_only(call):
    assert json.loads(call("info", "vit-b16.in21k", "--json").stdout)["licence"] == "apache-2.0"
    assert json.loads(call("info", "fashion", "--json").stdout)["licence"] == "mit"
    assert json.loads(call("info", FIXTURE, "--json").stdout)["licence"] == "apache-2.0"
    without = TESTS / "fixtures" / "bundle-without-head"
    assert json.loads(call("info", without, "--json").stdout)["licence"] == "unknown"
    assert "licence" not in json.loads(call("info", "ViT-B/16", "--json").stdout)


@pytest.mark.parametrize("licence", ["", "  ", "a\nb", "a\x1b[31m", "x" * 201])
def test_licence_that_is_not_a_line_of_text_is_an_error(licence, tmp_path):
    with pytest.raises(UsageError, match="Licence must be one line of 1 to 200 printable characters"):
        check_licence(licence)
    with pytest.raises(UsageError, match="Licence must be"):
        vitrail.train("digits", "ViT-Pico/2", steps=1, output=tmp_path / "run", licence=licence)
    assert not (tmp_path / "run").exists()
