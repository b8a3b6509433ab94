"""A format of weights: an `nn.Sequential` of linear layers and GELUs on the pixels of a square grey image."""

import math
from collections.abc import Collection, Iterable
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from vitrail.bundles.bundle import Bundle
from vitrail.bundles.formats.base import InferredModel, LibraryCheckpoint, WeightFormat
from vitrail.bundles.infer_config import default_preprocess, with_published_name
from vitrail.bundles.parity import Forward
from vitrail.models.config import ModelConfig
from vitrail.models.families.mlp.config import MLPConfig
from vitrail.models.library_limits import require_head, require_settings
from vitrail.models.state_dict_mapping import Entry, parameter_names, renamed_entry


class Sequential(WeightFormat):
    """0 flattens, 1, 3, 5, ... are linear layers, the last of them the head; between them is a GELU."""

    def recognises(self, names: Collection[str]) -> bool:
        layers = range(1, len(names), 2)
        return set(names) == {f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias")}

    def read(self, checkpoint: LibraryCheckpoint, user_config: ModelConfig | None) -> InferredModel:
        shape, depth = checkpoint.shapes, len(checkpoint.tensors) // 2 - 1
        width, pixels = shape["1.weight"]
        classes, side = shape[f"{2 * depth + 1}.bias"][0], math.isqrt(pixels)
        config = MLPConfig(width=width, depth=depth, classes=classes, channels=1, resolution=(side, side))
        preprocess, about_pixels = default_preprocess(config)
        return InferredModel(with_published_name(config), preprocess, about_pixels=about_pixels)

    def entries(self, config: ModelConfig, names: Collection[str] | None = None) -> Iterable[Entry]:
        for name in parameter_names(config):
            *_, layer, leaf = name.split(".")
            yield renamed_entry(name, f"{2 * (config.depth if layer == 'head' else int(layer)) + 1}.{leaf}")

    def open_source(self, config: ModelConfig, checkpoint: LibraryCheckpoint) -> Forward:
        linear = [nn.Linear(*checkpoint.shapes[f"{2 * layer + 1}.weight"][::-1]) for layer in range(config.depth + 1)]
        model = nn.Sequential(nn.Flatten(), *(module for layer in linear for module in (layer, nn.GELU())))[:-1]
        model.load_state_dict(checkpoint.raw)
        return model

    def check(self, bundle: Bundle) -> list[str]:
        config = bundle.model.config
        require_head(config, "Sequential")
        require_settings(
            config, "Sequential", family="mlp", activation="gelu", channels=1, resolution=config.resolution[:1] * 2
        )
        return []

    def open_written(self, config: ModelConfig, folder: Path) -> Forward:
        tensors = load_file(folder / self.file)
        return self.open_source(config, LibraryCheckpoint(folder / self.file, tensors, raw=tensors))
