"""Forged bundles: documents with hostile values and valid checksums give a result or an error of one line, and stay
within bounds of time and memory."""

import itertools
import json
import random
import resource
import shutil
import time

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.bundles.test_bundle import remake_manifest
from vitrail.core.errors import CorruptFileError
from vitrail.core.files import MANIFEST
from vitrail.data.preprocess import Preprocess
from vitrail.lab.exact import redraw
from vitrail.models.create import build
from vitrail.models.families import FAMILIES

INPUT = {"classes": 3, "channels": 1, "resolution": (8, 8)}
VIT = {"patch": (2, 2), "width": 16, "depth": 2, "heads": 2, "mlp": 16}
MODELS = {
    "vit": {**VIT, "layer_scale": 0.1, "registers": 1},
    "vit, relative": {**VIT, "position": "relative", "attention": "local", "pool": "map", "representation": "tanh"},
    "vit, rope": {**VIT, "position": "rope-2d", "pool": "gap", "norm": "batch"},
    "vit, sincos": {**VIT, "position": "sincos-2d", "attention": "strided"},
    "hybrid": {**VIT, "patch": (1, 1), "stem": "light", "stem_layers": (4, 4), "stem_strides": (2, 1)},
    "resnet": {"kind": "plain", "layers": (1, 1), "base": 8},
    "mixer": {"patch": (2, 2), "width": 16, "depth": 2, "token_mlp": 8, "channel_mlp": 16},
    "lstm": {"patch": (2, 2), "width": 8, "hidden": 8, "depth": 1, "order": "random"},
    "igpt": {"palette": 8, "width": 16, "depth": 2, "heads": 2, "mlp": 16, "output": "classes"},
    "mlp": {"width": 16, "depth": 2},
}
PROVENANCE = {"objective": "classify", "steps": 3, "licence": "MIT", "damaged": {"files": [], "policy": "skip"}}
NUMBERS = (-1, 0, 1, 2, 3, 1000, 4096, 65_536, 10**9, 2**63, 10**400, 0.5, 8.0, -0.0, 1e308, 1e-308)
TEXTS = ("", "x", "x" * 5000, "\u202e\x1b[2J\ud800")
TABLES = ([], {}, [None], [1, 2], [8, 8], [1, 2, 3], [[[]]], {"a": {"b": [1]}})
REMOVE, EXTEND = object(), object()
HOSTILE = (None, True, False, *NUMBERS, float("nan"), float("inf"), *TEXTS, *TABLES, REMOVE, EXTEND)


def save_bundle(name, folder):
    """Save a small bundle with the model of `MODELS[name]`."""
    family = name.partition(",")[0]
    model = redraw(build(FAMILIES[family](**INPUT, **MODELS[name])))
    preprocess = Preprocess(resolution=(8, 8), crop_fraction=1.0, mean=(0.5,), std=(0.25,))
    vitrail.save(
        vitrail.Bundle(model=model, preprocess=preprocess, labels=("a", "b", "c"), provenance=PROVENANCE), folder
    )


def key_paths(document, path=()):
    """Yield the path of keys to every value of a document, which begins with the empty path to the document itself."""
    yield path
    items = document.items() if isinstance(document, dict) else enumerate(document if type(document) is list else ())
    for key, value in items:
        yield from key_paths(value, (*path, key))


def forge(document, path, value):
    """Return a copy of the document whose value at `path` is replaced, removed (`REMOVE`) or extended (`EXTEND`)."""
    if not path:
        extended = {**document, "unheard": 1} if isinstance(document, dict) else [*document, "unheard"]
        return extended if value is EXTEND else None if value is REMOVE else value
    copy = document.copy()
    key, *rest = path
    if rest:
        copy[key] = forge(document[key], rest, value)
    elif value is REMOVE:
        del copy[key]
    elif value is EXTEND:
        item = document[key]
        copy[key] = {**item, "unheard": 1} if isinstance(item, dict) else [item, item]
    else:
        copy[key] = value
    return copy


def forgeries(bundle):
    """Yield every JSON file of a bundle with every hostile value at every path: file name, path, document."""
    for name in ("config.json", "preprocess.json", "labels.json", "provenance.json", MANIFEST):
        document = json.loads((bundle / name).read_text())
        for path, value in itertools.product(key_paths(document), HOSTILE):
            yield name, path, forge(document, path, value)


def commands(bundle, images, output, *, inspects=True):
    """Yield the commands that read a bundle."""
    yield "info", bundle, "--json"
    yield "predict", bundle, images / "a" / "a.png", "--json"
    yield "evaluate", bundle, images, "--json"
    yield "evaluate", bundle, images, "--protocol", "knn", "--json"
    if inspects:  # takes ten times as long as the others together
        yield "inspect", bundle, images / "a" / "a.png", "--output", output, "--force", "--json"


@pytest.mark.parametrize("count", [4, pytest.param(None, marks=pytest.mark.slow, id="all")])
@pytest.mark.parametrize("name", MODELS)
def test_a_forged_document_gives_a_result_or_an_error_of_one_line(name, count, tmp_path, call):
    bundle, copy, images = (tmp_path / part for part in ("bundle", "copy", "images"))
    save_bundle(name, bundle)
    shutil.copytree(bundle, copy)
    levels = np.random.default_rng(0).integers(0, 256, (2, 12, 14, 3), np.uint8)
    for label, pixels in zip("ab", np.repeat(levels, 2, axis=0).reshape(2, 2, 12, 14, 3), strict=True):
        (images / label).mkdir(parents=True)
        for name_stem, array in zip((label, "more"), pixels, strict=True):
            Image.fromarray(array).save(images / label / f"{name_stem}.png")
    for command in commands(bundle, images, tmp_path / "page", inspects=count is None):
        done = call(*command)
        assert done.returncode == 0, done.stderr
    cases = list(forgeries(bundle))
    assert len(cases) > 1000
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sample = random.Random(name).sample(cases, count or len(cases))
    for number, (file, path, document) in enumerate(sample):
        case = f"{file} {path}: {str(document)[:300]}"
        (copy / file).write_text(json.dumps(document))
        if file != MANIFEST:
            remake_manifest(copy)
        for command in commands(copy, images, tmp_path / "page", inspects=number % 12 == 0):
            began = time.process_time()
            done = call(*command)  # an internal error fails the test
            assert time.process_time() - began < 10, case
            if done.returncode:
                assert done.returncode in (1, 2), case
                assert len(done.stderr.splitlines()) == 1, case
                assert len(done.stderr) < 1100, case
                assert done.stderr[:-1].isprintable(), case
            else:
                json.loads(done.stdout, parse_constant=pytest.fail)
        shutil.copy(bundle / file, copy)
        shutil.copy(bundle / MANIFEST, copy)
    # ru_maxrss is in kB on Linux.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 10**6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os').mkdir('created')", "must be calls"),
        ("Linear(1e9), Linear(classes)", "impossible value"),
        ("Linear(" + "-" * 1900 + "1), Linear(classes)", "must be calls"),
        ("Sequential(" * 120 + "Linear(3)" + ")" * 120, "must end with Linear"),
    ],
)
def test_a_forged_head_is_a_corrupt_configuration(text, message, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_bundle("mlp", tmp_path / "bundle")
    config = json.loads((tmp_path / "bundle/config.json").read_text())
    (tmp_path / "bundle/config.json").write_text(json.dumps({**config, "head_layers": text}))
    remake_manifest(tmp_path / "bundle")
    done = call("info", "bundle")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert "'bundle/config.json' is not a valid model: " in done.stderr
    assert message in done.stderr
    with pytest.raises(CorruptFileError, match=r"config.json' is not a valid model"):
        vitrail.load("bundle")
    assert not (tmp_path / "created").exists()
