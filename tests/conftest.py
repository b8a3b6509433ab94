"""Fixtures of all tests."""

import os
import shutil
import subprocess
from pathlib import Path

# One thread per process: the models are small, and tests run in parallel on all cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VITRAIL_LANG"] = "en"

import hypothesis
import pytest
import torch

from vitrail.cli import main

hypothesis.settings.register_profile("vitrail", derandomize=True, deadline=None, database=None, max_examples=40)
hypothesis.settings.load_profile("vitrail")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of real weights and photos: $VITRAIL_SHARED, otherwise ../shared. Skip the test without it."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("VITRAIL_SHARED", beside)) / "data"
    if not folder.is_dir():
        pytest.skip("needs real weights and photos: set VITRAIL_SHARED to the folder that holds data/")
    return folder


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory) -> None:
    """Use a temporary cache folder for all commands."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a resumed run takes the number it began with


@pytest.fixture(scope="module")
def browser():
    """Yield Chromium, controlled by Playwright; skip the test if one of them is not installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        window = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield window
        window.close()


@pytest.fixture
def call(capsys, monkeypatch):
    """Return a function that runs a command in this process, which is faster than a new one that imports torch.

    The result is that of `subprocess.run`. An internal error fails the test, unless `call(..., internal=True)` expects
    it.
    """

    monkeypatch.setattr("vitrail.cli._busy_share", lambda: 0.0)  # it takes a moment to measure

    def run(*arguments, internal=False):
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        assert internal == ("internal error" in captured.err), captured.err
        return subprocess.CompletedProcess(arguments, code, captured.out, captured.err)

    return run
