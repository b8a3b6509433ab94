"""Tensor names of the hybrid in other libraries: the names of the ViT, and the names of the stem."""

from collections.abc import Collection, Iterator
from typing import Any

from vitrail.models.families.hybrid.config import HybridConfig
from vitrail.models.families.vit.weights import (
    check_google,
    check_timm,
    google_entry,
    google_names,
    google_unverified,
)
from vitrail.models.library_limits import unsupported_model_error
from vitrail.models.state_dict_mapping import (
    Entry,
    StateDictMapping,
    jax_kernel_entry,
    jax_vector_entry,
    parameter_names,
    renamed_entry,
)


def _check_stem(config: HybridConfig, library: str) -> None:
    if config.stem != "resnet":
        raise unsupported_model_error(library, f"a hybrid with stem {config.stem}")


def _check_timm(config: HybridConfig) -> None:
    _check_stem(config, "timm")
    check_timm(config)


def _timm_settings(config: HybridConfig) -> dict[str, Any]:
    """Arguments of timm's functions for published hybrids."""
    return {"in_chans": config.channels, "img_size": list(config.resolution)}


def _timm_entries(config: HybridConfig, names: Collection[str] | None) -> Iterator[Entry]:
    for name in parameter_names(config):
        # Without stages, timm's backbone is the stem.
        yield renamed_entry(name, name if config.stem_layers else name.replace("backbone.stem.", "backbone."))


def _check_google(config: HybridConfig) -> None:
    _check_stem(config, "Google's code")
    check_google(config)


def _google_unverified(config: HybridConfig) -> str | None:
    return google_unverified(config) or (None if config.activation == "gelu" else "timm's hybrids have exact GELU")


def _google_entries(config: HybridConfig, names: Collection[str] | None) -> Iterator[Entry]:
    theirs = google_names(config, names)
    for name in parameter_names(config):
        if name.startswith("patch_embed.backbone."):
            yield _google_stem_entry(name, theirs.prefix)
        else:
            yield google_entry(name, config.heads, theirs)


def _google_stem_entry(ours: str, prefix: str) -> Entry:
    _, _, module, *rest = ours.split(".")
    if module == "stem":
        part, leaf = rest
        at = f"{prefix}conv_root" if part == "conv" else f"{prefix}gn_root"
    else:
        stage, _, unit, *inner, leaf = rest
        at = f"{prefix}block{int(stage) + 1}/unit{int(unit) + 1}/"
        part = inner[-1]
        is_shortcut = inner[0] == "downsample"
        at += ("conv" if part.startswith("conv") else "gn") + ("_proj" if is_shortcut else part[-1])
    if part.startswith("conv"):
        return jax_kernel_entry(ours, f"{at}/kernel")
    return jax_vector_entry(ours, f"{at}/{'scale' if leaf == 'weight' else 'bias'}")


MAPPINGS: dict[str, StateDictMapping[HybridConfig]] = {
    "timm": StateDictMapping(entries=_timm_entries, check=_check_timm, settings=_timm_settings),
    "google": StateDictMapping(entries=_google_entries, check=_check_google, why_unverified=_google_unverified),
}
