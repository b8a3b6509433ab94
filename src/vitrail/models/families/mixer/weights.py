"""Tensor names of MLP-Mixer in other libraries."""

from collections.abc import Collection, Iterable
from typing import Any

from vitrail.models.families.mixer.config import MixerConfig
from vitrail.models.state_dict_mapping import (
    Entry,
    StateDictMapping,
    jax_kernel_entry,
    jax_layer_entry,
    parameter_names,
    renamed_entry,
)


def _timm_entries(config: MixerConfig, names: Collection[str] | None) -> Iterable[Entry]:
    return (renamed_entry(name, name) for name in parameter_names(config))


def _timm_settings(config: MixerConfig) -> dict[str, Any]:
    """Arguments of timm's functions for published Mixers."""
    return {"in_chans": config.channels, "img_size": list(config.resolution)}


def _google_entries(config: MixerConfig, names: Collection[str] | None) -> Iterable[Entry]:
    return map(_google_entry, parameter_names(config))


def _google_entry(ours: str) -> Entry:
    if ours == "stem.proj.weight":
        return jax_kernel_entry(ours, "stem/kernel")
    if ours == "stem.proj.bias":
        return renamed_entry(ours, "stem/bias")
    if not ours.startswith("blocks."):
        return jax_layer_entry(ours, "pre_head_layer_norm" if ours.startswith("norm.") else "head")
    _, layer, part, *_ = ours.split(".")
    at = f"MixerBlock_{layer}/"
    if part.startswith("norm"):
        return jax_layer_entry(ours, f"{at}LayerNorm_{int(part[-1]) - 1}")
    dense = int(ours.split(".")[3][-1]) - 1
    return jax_layer_entry(ours, f"{at}{'token' if part == 'mlp_tokens' else 'channel'}_mixing/Dense_{dense}")


def _google_unverified(config: MixerConfig) -> str:
    return "none of the supported libraries reads Google's Mixer files"


MAPPINGS: dict[str, StateDictMapping[MixerConfig]] = {
    "timm": StateDictMapping(entries=_timm_entries, settings=_timm_settings),
    "google": StateDictMapping(entries=_google_entries, why_unverified=_google_unverified),
}
