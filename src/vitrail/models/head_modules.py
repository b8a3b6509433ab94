"""Torch's modules of a head that has more than one linear layer, and their description as text.

A model's head may be any `torch.nn` layers that `head_layers.py` knows. Assigning such a head to `model.head` writes
its description into the configuration, from which a bundle builds the same head again.
"""

import torch
from torch import nn

from vitrail.core.errors import UsageError
from vitrail.models.head_layers import LAYER_TYPES, HeadLayer, Value, parse_head_layers, write_layer


def build_head(text: str, width: int, classes: int) -> nn.Module:
    """Build the head that `text` describes: one layer as itself, several as a `Sequential`."""
    modules = [_build_layer(layer) for layer in parse_head_layers(text, width, classes)]
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


def _build_layer(layer: HeadLayer) -> nn.Module:
    if layer.name == "Sequential":
        return nn.Sequential(*map(_build_layer, layer.children))
    sizes = {
        "Linear": {"in_features": layer.width},
        "LayerNorm": {"normalized_shape": layer.width},
        "RMSNorm": {"normalized_shape": layer.width},
        "BatchNorm1d": {"num_features": layer.width},
    }
    return getattr(nn, layer.name)(**sizes.get(layer.name, {}), **layer.arguments)


def describe_head(head: nn.Module, width: int) -> tuple[str, int] | None:
    """Describe a head on features of `width`: its layers as text, empty for a plain linear layer, and its number of
    outputs.

    Return None for a head with another module, with hooks or parametrised weights, with a value or a length that a
    description cannot state, or of another input width. Such a head cannot be built again from a description.
    """
    layers = list(head) if type(head) is nn.Sequential else [head]
    if type(head) is nn.Sequential and len(layers) == 1:
        layers = [head]  # a Sequential of one layer has other tensor names than the layer
    classes = _output_width(head, width)
    last = last_linear(head)
    if classes is None or last is None or last.out_features != classes or _has_state_after(head, last):
        return None
    text = ", ".join(_describe_layer(layer, last) for layer in layers)
    try:
        parse_head_layers(text, width, classes)
    except UsageError:  # a value that a description cannot state, such as LeakyReLU(-0.1), or too many layers
        return None
    return "" if text == "Linear(classes)" else text, classes


@torch.no_grad()
def count_outputs(head: nn.Module, width: int) -> int | None:
    """Return the number of outputs of a head that cannot be described, by calling it on features of `width`.

    None if the call fails or the output is not one row per image. The modes of the head's modules stay as they are.
    """
    tensor = next(iter([*head.parameters(), *head.buffers()]), torch.zeros(()))
    dtype = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
    is_training = [module.training for module in head.modules()]
    try:
        outputs = head.eval()(torch.zeros(1, width, device=tensor.device, dtype=dtype))
    except Exception:  # the module is the user's, and may raise anything
        return None
    finally:
        for module, training in zip(head.modules(), is_training, strict=True):
            module.training = training
    return outputs.shape[1] if isinstance(outputs, torch.Tensor) and outputs.ndim == 2 else None


def last_linear(head: nn.Module) -> nn.Linear | None:
    """The last linear layer of a head, whose outputs are the logits."""
    return next((module for module in reversed(list(head.modules())) if isinstance(module, nn.Linear)), None)


def _has_state_after(head: nn.Module, last: nn.Linear) -> bool:
    """Whether a layer after the last linear one has parameters or statistics per class."""
    modules = list(head.modules())
    return any(module.state_dict() for module in modules[modules.index(last) + 1 :])


def _output_width(module: nn.Module, width: int) -> int | None:
    """Width of a module's output for an input of `width`; None if it does not fit or cannot be described."""
    name = type(module).__name__
    has_hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if type(module) is not getattr(nn, name, None) or name not in LAYER_TYPES or has_hooks:
        return None
    match module:
        case nn.Sequential():
            for child in module:
                output = _output_width(child, width)
                if output is None:
                    return None
                width = output
            return width
        case nn.Linear():
            return module.out_features if module.in_features == width else None
        case nn.LayerNorm() | nn.RMSNorm():
            return width if tuple(module.normalized_shape) == (width,) else None
        case nn.BatchNorm1d():
            return width if module.num_features == width else None
    return width


def _describe_layer(module: nn.Module, last: nn.Linear) -> str:
    """Write a module as text. The outputs of `last`, the last layer, are written as `classes`."""
    if isinstance(module, nn.Sequential):
        return f"Sequential({', '.join(_describe_layer(child, last) for child in module)})"
    name = type(module).__name__
    arguments: dict[str, Value | str] = {}
    for argument in LAYER_TYPES[name].arguments:
        value = getattr(module, argument)
        arguments[argument] = value is not None if isinstance(value, torch.Tensor) or argument == "bias" else value
    if module is last:
        arguments["out_features"] = "classes"
    return write_layer(name, arguments)
