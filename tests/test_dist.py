"""The wheel that `make dist` builds works outside the repository."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import vitrail
from tests.paths import ROOT
from vitrail.core.errors import MissingError


def run(*command, cwd, **environment):
    """Run a command without the Python environment of the tests."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(word) for word in command]
    done = subprocess.run(command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_citation_has_the_version_of_the_package():
    assert f"version: {vitrail.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_every_tool_that_an_extra_names_is_pinned():
    """`make` installs the tested versions, not the newest ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()}
    for extra in ("docs", "notebooks", "dist"):
        wanted = {word.split(">=")[0] for word in project["optional-dependencies"][extra]}
        assert {name for name in wanted if not name.startswith("vitrail[")} <= pins


def test_every_install_hint_names_an_existing_extra():
    """The name vitrail on a public index belongs to another project, so no page or message may install it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/vitrail/**/*.md")]
    pages.remove(ROOT / "CHANGELOG.md")
    commands = [hint for page in pages for hint in re.findall(r"pip install [^`\n]*", page.read_text(encoding="utf-8"))]
    assert len(commands) > 10
    for command in commands:
        hint = re.match(r'pip install -c constraints\.txt "\.\[([a-z,]+)\]"', command)
        assert hint, command
        assert set(hint[1].split(",")) <= extras.keys(), command

    code = {path: path.read_text(encoding="utf-8") for path in ROOT.glob("src/vitrail/**/*.py")}
    # The README of an exported model installs packages of others.
    assert {path.name for path, text in code.items() if "pip install" in text} == {"errors.py", "readme.py"}
    error = str(MissingError.for_extra("Engine onnx", "onnx", "onnxruntime"))
    assert error.endswith('Run, in the source folder of vitrail: pip install -c constraints.txt ".[onnx]".')
    named = {extra for text in code.values() for extra in re.findall(r'\bextra="(\w+)"', text)}
    assert {"lab", "dask", "hub"} <= named <= extras.keys()


def test_make_demo_installs_every_extra_that_a_command_of_the_readme_needs():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert makefile.split("$(VENV)/.ready-core:")[1].split("\n\n")[0].count('$(INSTALL) ".[all]"') == 1
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(everything.removeprefix("vitrail[").rstrip("]").split(",")) == {
        *extras.keys() - {"all", "bench", "dask", "dist", "docs", "notebooks", "peers", "test"}
    }
    # Whichever of these targets comes first, `make demo` need not install anything afterwards.
    for target, extra in re.findall(r'\.ready-(\w+):.*\n(?:\t@echo.*\n)?\t\$\(INSTALL\) "\.\[(\w+)\]"', makefile):
        marks = makefile.split(f"$(VENV)/.ready-{target}:")[1].split("\n\n")[0]
        if target != "core" and "$(VENV)/.ready-core" in marks:
            assert "all" in _reached(extra, extras)


def _reached(extra, extras):
    """Return the packages of an extra, with those of the extras that it includes."""
    inside = [name for word in extras[extra] for name in re.findall(r"vitrail\[(.*)\]", word)]
    return {extra}.union(*(_reached(name, extras) for names in inside for name in names.split(",")))


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment_away_from_the_repository(tmp_path):
    pytest.importorskip("build", reason="needs the extra `dist`")
    pins = str(ROOT / "constraints.txt")
    ours = {"PIP_CONSTRAINT": pins, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path, **ours)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.split("/")[0] for name in archive.namelist()}
    assert folders == {"vitrail", f"vitrail-{vitrail.__version__}.dist-info"}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.ko.md", "CONTRIBUTING.md", "CITATION.cff", "NOTICE", "Makefile", "docs/conf.py"} <= names
    assert not any(name.startswith(("docs/api/", "site/", ".venv")) for name in names)

    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    tools = tmp_path / "env" / "bin"
    run(tools / "python", "-m", "pip", "install", "--quiet", "-c", pins, wheel, cwd=tmp_path)
    home = run(tools / "python", "-c", "import vitrail; print(vitrail.__file__)", cwd=tmp_path)
    assert home.startswith(str(tmp_path))
    run(tools / "vitrail", "demo", "--epochs", 1, "--output", "demo", cwd=tmp_path)
    lines = run(tools / "vitrail", "predict", "fashion", "demo/images", "--json", cwd=tmp_path).splitlines()
    assert len(lines) == 40
    answers = [json.loads(line) for line in lines]
    named = [answer["predictions"][0]["label"].lower().replace("/", "-").replace(" ", "-") for answer in answers]
    assert sum(name in answer["file"] for name, answer in zip(named, answers, strict=True)) >= 35
    run(tools / "vitrail", "inspect", "fashion", answers[0]["file"], "--output", "inside", cwd=tmp_path)
    assert len(json.loads((tmp_path / "inside/inspect.json").read_text())["layers"]) == 5
