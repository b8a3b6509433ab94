"""Tensor names of BiT in other libraries. No library has the plain ResNet."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from vitrail.models.families.resnet.config import ResNetConfig
from vitrail.models.library_limits import require_settings
from vitrail.models.state_dict_mapping import (
    Entry,
    StateDictMapping,
    jax_kernel_entry,
    jax_vector_entry,
    parameter_names,
    renamed_entry,
    reshaped_entry,
)


def _check_timm(config: ResNetConfig) -> None:
    require_settings(config, "timm", kind="bit")


def _timm_settings(config: ResNetConfig) -> dict[str, Any]:
    """Arguments of timm's functions for published ResNets."""
    return {"in_chans": config.channels}


def _timm_entries(config: ResNetConfig, names: Collection[str] | None) -> Iterator[Entry]:
    for name in parameter_names(config):
        theirs = name.replace("head.", "head.fc.") if name.startswith("head.") else name
        if name == "head.weight":  # a convolution
            yield reshaped_entry(
                name, theirs, lambda kernel: kernel[:, :, 0, 0], lambda matrix: matrix[:, :, None, None]
            )
        else:
            yield renamed_entry(name, theirs)


def _check_google(config: ResNetConfig) -> None:
    require_settings(config, "Google's code", kind="bit")


def _google_entries(config: ResNetConfig, names: Collection[str] | None) -> Iterable[Entry]:
    return map(_google_entry, parameter_names(config))


def _google_entry(ours: str) -> Entry:
    """Return the entry of a parameter for Google's checkpoints of BiT. `ours` is its name in the model."""
    root = "resnet/"
    if ours.startswith("head."):
        if ours == "head.bias":
            return renamed_entry(ours, f"{root}head/conv2d/bias")
        return reshaped_entry(
            ours, f"{root}head/conv2d/kernel", lambda kernel: kernel[0, 0].T, lambda matrix: matrix.T[None, None]
        )
    if ours == "stem.conv.weight":
        return jax_kernel_entry(ours, f"{root}root_block/standardized_conv2d/kernel")
    leaf = {"weight": "gamma", "bias": "beta"}[ours.rpartition(".")[2]]
    if ours.startswith("norm."):
        return jax_vector_entry(ours, f"{root}group_norm/{leaf}")
    _, stage, _, unit, part, *_ = ours.split(".")
    at = f"{root}block{int(stage) + 1}/unit{int(unit) + 1:02}/"
    if part == "downsample":
        return jax_kernel_entry(ours, f"{at}a/proj/standardized_conv2d/kernel")
    letter = "abc"[int(part[-1]) - 1]
    if part.startswith("conv"):
        return jax_kernel_entry(ours, f"{at}{letter}/standardized_conv2d/kernel")
    return jax_vector_entry(ours, f"{at}{letter}/group_norm/{leaf}")


MAPPINGS: dict[str, StateDictMapping[ResNetConfig]] = {
    "timm": StateDictMapping(entries=_timm_entries, check=_check_timm, settings=_timm_settings),
    "google": StateDictMapping(entries=_google_entries, check=_check_google),
}
