"""Names that stored data depend on. Old runs, bundles, galleries and labs hold them, so none may change or disappear.

A new name is added to frozen_names.toml; a name that has to change needs an alias where old files are read.
"""

import ast
import dataclasses
import tomllib

import pytest

from tests.paths import ROOT, TESTS
from vitrail.bundles import folder as bundle_folder
from vitrail.bundles.formats.registry import FORMATS
from vitrail.bundles.remote.registry import REMOTES
from vitrail.core import rng
from vitrail.core.registry import GROUP, load_object
from vitrail.data.augment.config import AUGMENTATIONS, Augment
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import SOURCES
from vitrail.faces import gallery
from vitrail.inference.registry import ENGINES, TARGETS
from vitrail.lab import trial
from vitrail.lab.registry import QUESTIONS
from vitrail.models.families import FAMILIES
from vitrail.models.positions import POSITIONS
from vitrail.reports.inspect.registry import PANELS
from vitrail.training.options import Options
from vitrail.training.recipe import OBJECTIVES, OPTIMISERS, Recipe

NAMES = tomllib.loads((TESTS / "frozen_names.toml").read_text(encoding="utf-8"))
SETTINGS = {
    settings.__name__: [field.name for field in dataclasses.fields(settings)]
    for settings in (Options, Preprocess, Recipe)
} | {"Augment": Augment.names()}
PLUGINS = {
    "source": SOURCES,
    "augmentation": AUGMENTATIONS,
    "family": FAMILIES,
    "position": POSITIONS,
    "format": FORMATS,
    "remote": REMOTES,
    "objective": OBJECTIVES,
    "optimiser": OPTIMISERS,
    "engine": ENGINES,
    "target": TARGETS,
    "question": QUESTIONS,
    "panel": PANELS,
}
TREES = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")]
STRINGS = {
    node.value
    for tree in TREES
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
}


@pytest.mark.parametrize("name", [*NAMES["streams"], *NAMES["stream_parts"]])
def test_random_stream_names_are_still_used(name):
    assert name in STRINGS


def test_every_stream_name_in_the_source_is_listed():
    calls = (node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = {
        keyword.value.value
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "stream" and isinstance(keyword.value, ast.Constant)
    }
    assert names <= set(NAMES["streams"])


def test_random_bits_are_those_of_every_earlier_version():
    assert [int(rng.bits(3, 5, 7, stream=name)[0]) for name in ("order", "flip")] == [
        1931133724301517859,
        11634291112839749501,
    ]


@pytest.mark.parametrize("name", NAMES["settings"])
def test_settings_of_recipes_and_runs_keep_their_names(name):
    assert SETTINGS[name] == NAMES["settings"][name]


@pytest.mark.parametrize("family", NAMES["models"])
def test_settings_of_models_keep_their_names(family):
    assert [field.name for field in dataclasses.fields(FAMILIES[family])] == NAMES["models"][family]


@pytest.mark.parametrize("sort", NAMES["plugins"])
def test_plugins_keep_their_names(sort):
    registry = PLUGINS[sort]
    assert registry.category == sort
    assert sorted(set(registry) - set(registry.extension_names)) == sorted(NAMES["plugins"][sort])


def test_the_group_of_entry_points_keeps_its_name():
    assert GROUP == "vitrail.extensions"


@pytest.mark.parametrize("task", NAMES["tasks"])
def test_tasks_of_stored_trials_can_be_run(task):
    assert callable(load_object(task))


def test_formats_of_files_change_only_on_purpose():
    assert (bundle_folder.FORMAT, gallery.FORMAT, trial.VERSION) == (2, 2, 3)
