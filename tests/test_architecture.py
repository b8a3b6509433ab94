"""Packages do not branch on a family, and models contain no display strings."""

import ast
import re
import tomllib

import pytest

from tests.paths import ROOT
from vitrail.core.registry import load_object
from vitrail.models.base import Model
from vitrail.models.config import ModelConfig
from vitrail.models.families import FAMILIES

SOURCE = ROOT / "src" / "vitrail"
OWN_PACKAGES = ("models",)
"""Folders of model families and position embeddings, which may branch on them."""
CHECKS_MODEL_TYPES = ("bundles/bundle.py",)
"""Exceptions, such as `Bundle(model=...)`, which rejects values that are not models."""

CLASSES = {"Model", "ModelConfig", "PatchedConfig"} | {
    name for family in FAMILIES for name in (FAMILIES[family].__name__, FAMILIES[family].model.partition(":")[2])
}
OTHERS = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.relative_to(SOURCE).parts[0] not in OWN_PACKAGES
    and path.relative_to(SOURCE).as_posix() not in CHECKS_MODEL_TYPES
]


def last_name(node):
    """Return the name `x` of the expressions `x`, `a.x` and `a.b.x`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_config(node):
    return last_name(node) in ("config", "c")


def offences(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            if any(last_name(side) == "family" for side in (node.left, *node.comparators)):
                yield node, "compares a family's name"
        elif isinstance(node, ast.Match) and last_name(node.subject) == "family":
            yield node, "switches on a family's name"
        elif isinstance(node, ast.Call) and last_name(node.func) in ("isinstance", "issubclass"):
            names = {last_name(part) for part in ast.walk(node.args[1])}
            if names & CLASSES:
                yield node, "asks for a model's or configuration's class"
        elif isinstance(node, ast.Call) and last_name(node.func) in ("getattr", "hasattr") and is_config(node.args[0]):
            yield node, "asks whether a configuration has a setting"


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_package_branches_on_a_family(path):
    lines = [f"line {node.lineno} {why}" for node, why in offences(ast.parse(path.read_text(encoding="utf-8")))]
    assert not lines


@pytest.mark.parametrize(
    "text",
    [
        "if model.config.family == 'vit': pass",
        "if 'vit' != config.family: pass",
        "x = isinstance(config, ViTConfig | HybridConfig)",
        "x = isinstance(model, (IGPT, vit.ViT))",
        "x = getattr(self.config, 'pool', None)",
        "x = getattr(config, name)",
        "x = hasattr(model.config, 'pool')",
        "match config.family:\n  case 'vit': pass",
    ],
)
def test_the_check_for_family_branches_detects(text):
    assert list(offences(ast.parse(text)))


def test_every_family_is_one_configuration_and_one_module():
    for name in FAMILIES:
        config = FAMILIES[name]
        assert (issubclass(config, ModelConfig), config.family) == (True, name)
        assert load_object(config.model).__module__.startswith("vitrail.models.")


LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
RANK = {name.removeprefix("vitrail."): rank for rank, row in enumerate(LAYERS) for name in row.split(" | ")}
LOADS_UPWARDS = ("faces/__init__.py",)
"""`vitrail.faces.train` and others load the functions of commands at first use."""


def upward_references(tree, package):
    """Yield strings that name a module or a file of a higher layer, or of another package in the same layer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = re.fullmatch(r"vitrail\.(\w+)[\w.]*(:\w*)?|(\w+)/[\w*/]+\.(toml|css|js)", node.value)
            package_name = named and (named[1] or named[3])
            if package_name in RANK and package_name != package and RANK[package_name] <= RANK[package]:
                yield f"line {node.lineno} names {node.value}"


@pytest.mark.parametrize("package", RANK)
def test_no_string_names_a_module_of_a_higher_layer(package):
    paths = [SOURCE / f"{package}.py", *(SOURCE / package).rglob("*.py")]
    references = {
        path.relative_to(SOURCE).as_posix(): list(upward_references(ast.parse(path.read_text()), package))
        for path in paths
        if path.exists()
    }
    assert references
    assert not {path: lines for path, lines in references.items() if lines and path not in LOADS_UPWARDS}


def test_the_check_for_upward_references_detects_one():
    tree = ast.parse('x = {"a": "vitrail.reports.charts:line_chart", "b": "vitrail.core.files:checksum"}')
    assert list(upward_references(tree, "models")) == ["line 1 names vitrail.reports.charts:line_chart"]
    tree = ast.parse('x = ("messages/errors.toml", "lab/questions/*.toml")')
    assert list(upward_references(tree, "core")) == ["line 1 names lab/questions/*.toml"]


# The models are models: no presentation, few methods


def literals(tree):
    """Return the string literals of a module without its docstrings."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def shown(literal):
    """Return whether a literal looks like an equation or a sentence. (Names of random streams have spaces, too.)"""
    return any(sign in literal for sign in " =+^") and literal != "palette pixels"


@pytest.mark.parametrize("family", tuple(FAMILIES))
def test_a_model_has_no_display_strings(family):
    path = SOURCE / "models" / "families" / family / "model.py"
    assert not [literal for literal in literals(ast.parse(path.read_text(encoding="utf-8"))) if shown(literal)]


def test_the_check_for_display_strings_detects_one():
    tree = ast.parse('"""Docs: z = 1."""\nequation = f"z_{layer} = MLP(z)"\nnote = "the head is dropped"\nkey = "cls"')
    assert [literal for literal in literals(tree) if shown(literal)] == ["the head is dropped", " = MLP(z)"]


def test_a_model_has_at_most_25_public_methods():
    """Those of timm's interface are counted in tests/models/test_timm_interface.py."""
    methods = [
        name
        for name, member in vars(Model).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    ]
    assert {"forward", "record", "features", "resize"} <= set(methods)
    assert len(methods) <= 25


def test_vit_model_is_at_most_a_few_screens_long():
    path = SOURCE / "models" / "families" / "vit" / "model.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 280


# Sizes


def test_the_package_has_at_most_16_parts():
    parts = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert len(parts - {"__init__", "__main__"}) <= 16


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_fit_on_a_few_screens(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            assert body[-1].end_lineno - body[0].lineno < 60, node.name
