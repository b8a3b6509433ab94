"""The layers of a head as one line of text: `Linear(256), GELU(), Dropout(0.1), Linear(classes)`.

The text is the setting `head_layers` of a model. It names torch's layers with their arguments; arguments that follow
from the width of the features are left out. This module parses and counts; `head_modules.py` builds torch's modules.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from vitrail.core.errors import UsageError, did_you_mean

Value = int | float | bool | str | None

_LONGEST = 2000  # characters: the text may come from the config.json of a stranger
_WIDEST = 10_000_000  # numbers


class LayerType(NamedTuple):
    """The arguments of a layer that the text may state."""

    arguments: Mapping[str, Value]
    """Torch's names of the arguments, with their defaults."""
    positional: str = ""
    """The argument that is written without its name."""


_EPSILON = {"eps": 1e-5}

LAYER_TYPES: dict[str, LayerType] = {
    "Linear": LayerType({"out_features": 0, "bias": True}, "out_features"),
    "LayerNorm": LayerType({**_EPSILON, "elementwise_affine": True, "bias": True}),
    "RMSNorm": LayerType({"eps": None, "elementwise_affine": True}),
    "BatchNorm1d": LayerType({**_EPSILON, "momentum": 0.1, "affine": True, "track_running_stats": True}),
    "Dropout": LayerType({"p": 0.5}, "p"),
    "GELU": LayerType({"approximate": "none"}),
    "ReLU": LayerType({}),
    "LeakyReLU": LayerType({"negative_slope": 0.01}, "negative_slope"),
    "ELU": LayerType({"alpha": 1.0}, "alpha"),
    "SiLU": LayerType({}),
    "Mish": LayerType({}),
    "Hardswish": LayerType({}),
    "Tanh": LayerType({}),
    "Sigmoid": LayerType({}),
    "Identity": LayerType({}),
    "Sequential": LayerType({}),
}
"""The layers that a head may have, by the names of `torch.nn`."""


class HeadLayer(NamedTuple):
    """One layer of a head."""

    name: str
    """Its class in `torch.nn`."""
    width: int
    """Width of its input."""
    arguments: Mapping[str, Value]
    children: "tuple[HeadLayer, ...]" = ()
    """The layers of a `Sequential`."""

    @property
    def output_width(self) -> int:
        """Width of its output."""
        if self.children:
            return self.children[-1].output_width
        return int(self.arguments["out_features"] or 0) if self.name == "Linear" else self.width

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        match self.name:
            case "Sequential":
                return sum(child.parameters for child in self.children)
            case "Linear":
                return self.output_width * (self.width + bool(self.arguments["bias"]))
            case "BatchNorm1d":
                return 2 * self.width * bool(self.arguments["affine"])
            case "LayerNorm" | "RMSNorm":
                has_bias = bool(self.arguments.get("bias", False))
                return (1 + has_bias) * self.width * bool(self.arguments["elementwise_affine"])
        return 0

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one image."""
        if self.name == "Linear":
            return self.width * self.output_width
        return sum(child.macs for child in self.children)


@functools.lru_cache(maxsize=256)
def parse_head_layers(text: str, width: int, classes: int) -> tuple[HeadLayer, ...]:
    """Parse a text such as `Linear(32), GELU(), Linear(classes)` for features of `width`.

    Raises UsageError for an unknown layer or argument, and if the last linear layer does not have `classes` outputs.
    """
    try:
        tree = ast.parse(f"[{text}]", mode="eval").body if len(text) <= _LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.List) or not tree.elts:
        raise UsageError(
            f"Head layers must be layers such as 'Linear(256), GELU(), Linear(classes)', got {text[:80]!r}."
        )
    try:
        layers = _parse_sequence(tree.elts, width, classes)
    except RecursionError:  # `ast.unparse` of a long chain of operators
        raise UsageError(f"Head layers must be calls such as GELU(), got {text[:80]!r}.") from None
    if "classes" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
        raise UsageError(f"Head layers must end with Linear(classes), got {text[:80]!r}.")
    if layers[-1].output_width != classes:
        raise UsageError(f"Head layers must have one output per class ({classes}), got {layers[-1].output_width}.")
    flat = list(_flatten(layers))
    last = max(index for index, layer in enumerate(flat) if layer.name == "Linear")
    if any(layer.name.endswith(("Norm", "Norm1d")) for layer in flat[last + 1 :]):
        raise UsageError(f"Head layers must not have a norm after Linear(classes), got {text[:80]!r}.")
    return layers


def _flatten(layers: tuple[HeadLayer, ...]) -> Iterator[HeadLayer]:
    for layer in layers:
        yield from _flatten(layer.children) if layer.children else (layer,)


def _parse_sequence(nodes: list[ast.expr], width: int, classes: int) -> tuple[HeadLayer, ...]:
    layers: list[HeadLayer] = []
    for node in nodes:
        layer = _parse_layer(node, width, classes)
        layers.append(layer)
        width = layer.output_width
    return tuple(layers)


def _parse_layer(node: ast.expr, width: int, classes: int) -> HeadLayer:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise UsageError(f"Head layers must be calls such as GELU(), got {ast.unparse(node)[:80]!r}.")
    name = node.func.id
    if name not in LAYER_TYPES:
        raise UsageError(
            f"Head layer must be one of {', '.join(LAYER_TYPES)}, got {name!r}.{did_you_mean(name, LAYER_TYPES)}"
        )
    if name == "Sequential":
        if node.keywords or not node.args:
            raise UsageError(f"Sequential must hold the layers of the head, got {ast.unparse(node)[:80]!r}.")
        return HeadLayer(name, width, {}, _parse_sequence(node.args, width, classes))
    return HeadLayer(name, width, _parse_arguments(node, name, classes))


def _parse_arguments(node: ast.Call, name: str, classes: int) -> dict[str, Value]:
    """Return all arguments of a layer, with defaults. Raises UsageError for one that the layer does not have."""
    layer_type = LAYER_TYPES[name]
    stated = {keyword.arg or "**": keyword.value for keyword in node.keywords}
    if node.args and layer_type.positional and len(node.args) == 1:
        stated[layer_type.positional] = node.args[0]
    elif node.args:
        raise UsageError(f"{name} must have named arguments, got {ast.unparse(node)[:80]!r}.")
    arguments = dict(layer_type.arguments)
    for argument, value in stated.items():
        if argument not in arguments:
            raise UsageError(f"Argument of {name} must be one of {', '.join(arguments) or 'none'}, got {argument!r}.")
        arguments[argument] = _parse_value(name, argument, value, arguments[argument], classes)
    if name == "Linear" and not 1 <= int(arguments["out_features"] or 0) <= _WIDEST:
        raise UsageError(f"Linear must have 1 to {_WIDEST:,} outputs, got {ast.unparse(node)[:80]!r}.")
    return arguments


def _parse_value(name: str, argument: str, node: ast.expr, default: Value, classes: int) -> Value:
    """Return the value of an argument. Its default determines the allowed type."""
    if argument == "out_features" and isinstance(node, ast.Name) and node.id == "classes":
        return classes
    value = node.value if isinstance(node, ast.Constant) else ...
    if argument == "approximate":
        is_allowed = value in ("none", "tanh")
    elif isinstance(default, bool):
        is_allowed = isinstance(value, bool)
    elif value is None:
        is_allowed = default is None or argument == "momentum"
    elif argument == "out_features":
        is_allowed = isinstance(value, int) and not isinstance(value, bool)
    else:
        upper = 1.0 if argument == "p" else 1e6
        is_allowed = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= upper
    if not is_allowed:
        raise UsageError(f"{argument} of {name} has an impossible value, got {ast.unparse(node)[:80]!r}.")
    return value if isinstance(value, int | float | str) else None


def write_layer(name: str, arguments: Mapping[str, Value | str]) -> str:
    """Write one layer as text, without the arguments that have their default."""
    layer_type = LAYER_TYPES[name]
    stated = {key: value for key, value in arguments.items() if value != layer_type.arguments[key]}
    parts = []
    if layer_type.positional in stated:
        value = stated.pop(layer_type.positional)
        parts.append(value if value == "classes" else repr(value))
    return f"{name}({', '.join([*map(str, parts), *(f'{key}={value!r}' for key, value in stated.items())])})"
