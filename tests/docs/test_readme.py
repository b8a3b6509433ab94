"""Commands and code of the READMEs and of docs/ run as written, in both languages."""

import ast
import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch

import vitrail
from tests.blocks import RUNNER, blocks, runnable
from tests.hub_server import HubServer
from tests.paths import ROOT, TESTS
from vitrail.bundles.convert import convert
from vitrail.data.augment.config import Augment
from vitrail.data.preprocess import Preprocess
from vitrail.models.families.vit.config import ViTConfig
from vitrail.training.recipe import Recipe

ENGLISH = sorted(path for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")] if not path.stem.endswith(".ko"))
# Pages that run in one process and one folder, in this order: later pages use files of earlier ones, for instance
# `taste/` of commands and `run/` of train. The tests of different groups run in parallel.
GROUPS = {
    "README": ("README", "data", "engines", "weights", "families", "faces"),
    "commands": (
        "commands",
        "train",
        "finetune",
        "evaluate",
        "runs",
        "predict",
        "merging",
        "inspect",
        "explain",
    ),
    "python": ("python",),
}
# Chapters of the notes. tests/docs/test_notes.py runs their code.
CHAPTERS = tuple(f"notes-{number}" for number in range(1, 6))
# Reasons why no test runs a block, as in the comments above the blocks.
NOT_RUN = {
    "faces": ["needs DeiT's weights and the photos of faces, which we may not distribute"],
    "engines": ["measures for a minute"],
    "merging": ["searches for half a minute"],
    "lab": ["takes minutes to hours", "takes a minute"],
    "python": ["needs DeiT's weights and photos, with which tests/test_public_interface.py runs it"],
    "weights": ["fetches from outside; test_remote.py does the same with a server on this machine"],
    "scale": ["needs several processes and hours", "needs several machines"],
}
PREPARE = """
import os, numpy as np
from PIL import Image

rng = np.random.default_rng(0)
for split, count in (("train", 3), ("val", 1)):
    for label, tint in (("ants", 60), ("bees", 180)):
        os.makedirs(f"photos/{split}/{label}")
        for number in range(count):
            pixels = rng.integers(0, 70, (150, 200, 3)) + tint
            Image.fromarray(pixels.astype(np.uint8)).save(f"photos/{split}/{label}/{number}.jpg")
os.makedirs("new-photos")
Image.fromarray(rng.integers(0, 250, (90, 120, 3)).astype(np.uint8)).save("new-photos/1.jpg")
"""


@pytest.fixture
def hub(tmp_path):
    """Return a local Hub that has DeiT-Ti/16 with random weights, in the formats of timm and of its authors."""
    torch.manual_seed(0)
    model = vitrail.create("ViT-Ti/16", resolution=224)
    bundle = vitrail.Bundle(model=model, preprocess=Preprocess(resolution=224))
    vitrail.save(bundle, tmp_path / "deit")
    server = HubServer()
    for to, name in (("timm", "timm/deit_tiny_patch16_224.fb_in1k"), ("huggingface", "facebook/deit-tiny-patch16-224")):
        convert(str(tmp_path / "deit"), tmp_path / to, to, verifies=False, images=())
        names = ("config.json", "preprocessor_config.json", "model.safetensors")
        files = {path.name: path.read_bytes() for path in (tmp_path / to).iterdir() if path.name in names}
        server.publish(name, files)
    yield server
    server.close()


def korean_page(path):
    return path.with_name(f"{path.stem}.ko.md")


@pytest.mark.parametrize("path", ENGLISH, ids=lambda path: path.stem)
def test_every_block_is_run_or_has_a_reason(path):
    languages = ("bash", "python", "text", "toml")
    assert [
        block.text
        for block in blocks(path)
        if block.language not in languages and not block.language.startswith("{literalinclude}")
    ] == []
    assert [block.reason for block in blocks(path) if block.reason] == NOT_RUN.get(path.stem, [])
    if runnable(path):
        assert path.stem in (*itertools.chain(*GROUPS.values()), *CHAPTERS)


# Files that the pages of a group write.
WRITTEN = {
    "README": ["README/look/index.html", "docs/fashion-again/manifest.json", "docs/my.gallery"],
    "commands": ["docs/taste/bundle/manifest.json", "docs/growing/index.html", "docs/walk-python/index.html"],
    "python": ["docs/my-bundle/manifest.json", "docs/shades-torch/README.md"],
}


@pytest.mark.parametrize("group", GROUPS)
def test_commands_and_code_of_pages_run(group, tmp_path, hub):
    """The photos of a reader are generated, and the Hub is local. The README has a folder of its own."""
    jobs = []
    for folder in ("README", "docs"):
        (tmp_path / folder).mkdir()
        jobs.append(("photos", str(tmp_path / folder), [("python", PREPARE, None)]))
    if group == "python":
        jobs.append(("deit", str(tmp_path / "docs"), [("bash", ["convert", "deit-ti16.in1k", "deit"], None)]))
    for name in GROUPS[group]:
        path, folder = (ROOT / "README.md", "README") if name == "README" else (ROOT / "docs" / f"{name}.md", "docs")
        jobs.append((path.name, str(tmp_path / folder), runnable(path)))
    assert all(steps for _, _, steps in jobs)
    command = [sys.executable, "-c", RUNNER]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # a second thread slows small models down
    one_thread |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": hub.token}
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, env=one_thread, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [name for name in WRITTEN[group] if not (tmp_path / name).exists()] == []
    if group == "README":
        source = json.loads((tmp_path / "README/deit/provenance.json").read_text(encoding="utf-8"))["source"]
        assert source["address"].startswith("hf:timm/deit_tiny_patch16_224.fb_in1k@")
        assert {"README.md", "config.json", "model.safetensors"} <= hub.uploads["me/clothes"].keys()


@pytest.mark.parametrize("path", ENGLISH, ids=lambda path: path.stem)
def test_both_languages_have_the_same_structure(path):
    """Same headings, tables, images and commands; same Python except comments and string literals."""

    def structure(page):
        text = page.read_text(encoding="utf-8")
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        python = ast.dump(ast.parse("\n".join(block.text for block in blocks(page) if block.language == "python")))
        return {
            "headings": re.findall(r"^#+ ", prose, re.MULTILINE),
            "rows": len(re.findall(r"^\|", prose, re.MULTILINE)),
            "images": [name.replace(".ko.", ".") for name in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", prose)],
            "lines": [
                shlex.split(line, comments=True)
                for block in blocks(page)
                if block.language == "bash"
                for line in block.text.splitlines()
            ],
            "other blocks": [block for block in blocks(page) if block.language not in ("bash", "python", "text")],
            "python": re.sub(r"Constant\(value='.*?'\)", "Constant()", python),
        }

    assert structure(path) == structure(korean_page(path))


def test_readmes_have_at_most_150_lines():
    for name in ("README.md", "README.ko.md"):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    "name",
    [f"{page}{ending}" for page in ("README", "docs/proved", "docs/security") for ending in (".md", ".ko.md")],
)
def test_every_claim_names_an_existing_test(name):
    tests = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    section = (ROOT / name).read_text(encoding="utf-8")
    if name.startswith("README"):
        section = re.split(r"^## (?:What is proved|증명된 것)$|^## ", section, flags=re.MULTILINE)[-4]
    claims = re.findall(r"^(?:- |\| (?!---)).*?(?=^- |^\||^$)", section, re.MULTILINE | re.DOTALL)
    tests_by_claim = [re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)?(?:::)?(test_\w+)?`", claim) for claim in claims]
    claims_without = [claim for claim, names in zip(claims, tests_by_claim, strict=True) if not names]
    assert len(claims) >= 10
    assert [claim for claim in claims_without if not re.match(r"\| (claim|주장) \|", claim)] == []
    for file, function in (name for names in tests_by_claim for name in names):
        texts = [tests[file]] if file else tests.values()
        assert not function or any(f"def {function}(" in text for text in texts), function


@pytest.mark.parametrize("page", ["docs/settings.md", "docs/settings.ko.md"])
def test_every_setting_is_on_its_page(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    names = {field.name for settings in (ViTConfig, Recipe, Preprocess) for field in dataclasses.fields(settings)}
    assert {name for name in {*names, *Augment.names()} - {"name"} if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")], ids=lambda path: path.name)
def test_pages_have_no_todo_and_their_links_exist(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^[A-Z]{3,}_[A-Z]{3,}$|TODO|FIXME", text, re.MULTILINE)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
