"""The methods and attributes by which code written for timm's models uses a model."""

import re
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vitrail.core.errors import UsageError
from vitrail.core.settings import check_integer
from vitrail.models.activations import resolve_indices

if TYPE_CHECKING:
    from vitrail.data.preprocess import Preprocess
    from vitrail.models.base import AnyModel

Groups = dict[str, str | list[tuple[str, tuple[int, ...] | None]]]

# timm merges a group with this ordinal into the one before: the final norm belongs to the last block.
_WITH_LAST_BLOCK = (99999,)


def timm_data_config(preprocess: "Preprocess") -> dict[str, Any]:
    """Return a preprocessing under the names of timm's `pretrained_cfg`."""
    return {
        "input_size": (preprocess.channels, *preprocess.resolution),
        "interpolation": preprocess.interpolation,
        "crop_pct": preprocess.crop_fraction,
        "crop_mode": {"shorter": "center", "squash": "squash", "pad": "border"}[preprocess.resize],
        "mean": preprocess.mean,
        "std": preprocess.std,
    }


class TimmInterface:
    """timm's names for what `Model` has: features, head, groups of parameters and settings of the data."""

    preprocess: "Preprocess | None" = None
    """Preprocessing of the bundle that the model comes from, for `default_cfg`; the model does not apply it."""

    @property
    def num_classes(self: "AnyModel") -> int:
        """Number of classes; 0 without a head."""
        return self.config.classes

    @property
    def num_features(self: "AnyModel") -> int:
        """Width of the features, the input of the head."""
        return self.head_width

    embed_dim = head_hidden_size = num_features

    @property
    def default_cfg(self: "AnyModel") -> dict[str, Any]:
        """What `timm.data.resolve_model_data_config` reads, and the names of the first layer and the head.

        Mean, std, interpolation and crop are those of the bundle that the model comes from. A model without a bundle
        states only its input size, and timm fills in its defaults.
        """
        c = self.config
        names = {"num_classes": c.classes, "classifier": "head", "first_conv": self.projection or None}
        data = {} if self.preprocess is None else timm_data_config(self.preprocess)
        return {**data, "input_size": (c.channels, *c.resolution), **names}

    pretrained_cfg = default_cfg

    def get_classifier(self: "AnyModel") -> nn.Module:
        """The head."""
        return self.head

    def forward_features(self: "AnyModel", images: Tensor) -> Tensor:
        """The normalised output of the last layer: tokens (B, T, D) with [CLS] and registers first, or the feature map
        (B, D, H, W) of a CNN."""
        last = self.config.depth - 1
        return self.normalise_layer(self.record(images, (last,)).steps[f"blocks.{last}"])

    def forward_intermediates(
        self: "AnyModel",
        images: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the output of `forward_features` and a list of the outputs of the layers `indices`, in the order of
        the layers; with `intermediates_only`, only this list.

        A number of layers stands for the last ones, None for all. Outputs are maps (B, D, H, W), or with `output_fmt`
        "NLC" sequences (B, N, D), without [CLS] and registers; with `return_prefix_tokens`, each is a pair with these
        tokens. `norm` applies the norm before the head. With `stop_early`, the first result is the normalised output
        of the last of these layers; all layers are computed nevertheless.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise UsageError(f"Output format must be NCHW or NLC, got {output_fmt!r}.")
        depth = self.config.depth
        if indices is None or isinstance(indices, int):
            count = depth if indices is None else check_integer("indices", indices, low=1, high=depth)
            indices = list(range(depth - count, depth))
        layers = sorted(set(resolve_indices("Layer", indices, depth)))
        last = max(layers, default=depth - 1) if stop_early else depth - 1
        *outputs, final = self._layer_outputs(images, [*layers, last], normalise=False)
        if norm:
            outputs = [self.normalise_layer(output) for output in outputs]
        maps = [self._as_feature_map(output) for output in outputs]
        if output_fmt == "NLC":
            maps = [grid.flatten(2).transpose(1, 2) for grid in maps]
        intermediates: list[Any] = maps
        if return_prefix_tokens and self.config.prefix:
            intermediates = [
                (grid, output[:, : self.config.prefix]) for grid, output in zip(maps, outputs, strict=True)
            ]
        return intermediates if intermediates_only else (self.normalise_layer(final), intermediates)

    def pool(self, output: Tensor) -> Tensor:
        """Return the input of the head (B, D) from the output of `forward_features`. Families with tokens or feature
        maps override it."""
        return output

    def forward_head(self: "AnyModel", features: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (B, K) from the output of `forward_features`; with `pre_logits`, the pooled features (B, D)."""
        pooled = self.pool(features)
        return pooled if pre_logits else self.head(pooled)

    def no_weight_decay(self: "AnyModel") -> set[str]:
        """Names of the tokens and position tables, which have no weight decay. Parameters of one dimension have none
        either, as in timm, which does not list them."""
        return {
            name
            for name, role in self.roles().items()
            if not role.decays and self.get_parameter(name).ndim > 1 and not name.startswith("attn_pool.")
        }

    def group_matcher(self: "AnyModel", coarse: bool = False) -> Groups:
        """Patterns of the parameters before the blocks and of each block, by which timm's optimiser factory scales
        learning rates; the head matches none. `coarse` groups the units of a CNN by stage."""
        after = "|".join(re.escape(prefix) for prefix in self.after_blocks)
        stages = r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.blocks\.(\d+)"
        blocks = [(pattern, None) for pattern in (r"^blocks\.(\d+)", r"^layers\.(\d+)", stages)]
        return {
            "stem": rf"^(?!blocks\.|layers\.|stages\.|{after})",
            "blocks": [*blocks, (r"^norm\.", _WITH_LAST_BLOCK)],
        }

    def set_grad_checkpointing(self: "AnyModel", enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass, which takes less memory and more time."""
        self.checkpoints_activations = enable
