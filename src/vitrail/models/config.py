"""The base classes of model configurations: name, input, classes, patches, and the rows of `vitrail info`."""

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, Pair, Settings, jsonable
from vitrail.models.families import FAMILIES
from vitrail.models.head_layers import parse_head_layers

INFO_KEYS = (
    "name",
    "family",
    "parameters",
    "macs",
    "tokens",
    "grid",
    "patch",
    "resolution",
    "width",
    "depth",
    "heads",
    "classes",
    "channels",
)

Output = Literal["classes", "pixels", "features"]

# Setting names of timm, transformers, torchvision and vit-pytorch, each with ours.
_ALIASES = {
    "num_classes": "classes", "n_classes": "classes", "num_labels": "classes",
    "img_size": "resolution", "image_size": "resolution", "input_size": "resolution",
    "in_chans": "channels", "in_channels": "channels", "num_channels": "channels", "num_input_channels": "channels",
    "patch_size": "patch", "patch_stride": "stride",
    "embed_dim": "width", "hidden_size": "width", "hidden_dim": "width", "dim": "width",
    "num_layers": "depth", "num_hidden_layers": "depth", "num_blocks": "depth",
    "num_heads": "heads", "num_attention_heads": "heads",
    "mlp_dim": "mlp", "mlp_ratio": "mlp", "intermediate_size": "mlp",
    "global_pool": "pool", "pos_embed": "position", "reg_tokens": "registers", "num_register_tokens": "registers",
    "no_embed_class": "class_position", "init_values": "layer_scale", "layerscale_value": "layer_scale",
    "drop_rate": "dropout", "proj_drop_rate": "dropout", "hidden_dropout_prob": "dropout", "emb_dropout": "dropout",
    "drop_path_rate": "drop_path", "stochastic_depth_prob": "drop_path", "patch_drop_rate": "token_drop",
    "act_layer": "activation", "hidden_act": "activation", "layer_norm_eps": "norm_epsilon", "norm_layer": "norm",
    "representation_size": "representation", "tokens_mlp_dim": "token_mlp", "channels_mlp_dim": "channel_mlp",
}  # fmt: skip

_SMALL_RESOLUTION = 64  # pixels: presets up to this size take the resolution of the data
_MAX_IMAGE_VALUES = 2**28  # a gigabyte as 32-bit floats
_MAX_TABLE_BYTES = 2**29


class Table(NamedTuple):
    """Shape and dtype of a fixed table that follows from the configuration: positions, indices, masks, orders."""

    shape: tuple[int, ...]
    dtype: Literal["bool", "int64", "float64"]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * (1 if self.dtype == "bool" else 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """Base class of the configurations of all families. Families add fields; parameters and MACs are counted without
    torch."""

    title: ClassVar[str] = "Model configuration"
    aliases: ClassVar[Mapping[str, str]] = _ALIASES
    family: ClassVar[str]
    model: ClassVar[str]
    """The family's module, as `package.module:Class`."""
    sizes: ClassVar[str] = ""
    """The family's named models, as `package.module:SIZES`, a `models.sizes.Sizes`."""
    weights: ClassVar[str] = ""
    """The family's state-dict mappings, as `package.module:MAPPINGS`: a `StateDictMapping` for each weight format that
    has models of the family."""
    walkthrough: ClassVar[str] = "vitrail.models.walkthrough:Walkthrough"
    """The steps and equations of the family that pages show, as `package.module:Class`."""
    surgery: ClassVar[str] = "vitrail.models.surgery:Surgery"
    """The family's `Surgery`, which changes weights for other packages, as `package.module:Class`."""
    scaled_by: ClassVar[str] = "width"
    """The setting that `with_macs` and `wider` change: it scales the cost and leaves the rest of the architecture as it
    is."""

    name: str = ""
    """Name in `vitrail models`. It stays when settings change."""
    classes: Annotated[int, Bounds(0, 10_000_000)] = 1000
    """Number of classes. 0: no head, the model returns its features."""
    embedding: Annotated[int, Bounds(0, 65_536)] = 0
    """Width of the embedding that a model without classes returns instead of its features: a linear layer and its own
    BatchNorm, as face recognition has them. 0: none."""
    head_layers: str = ""
    """Layers of the head in place of a single linear layer, such as `Linear(256), GELU(), Linear(classes)`. Assigning
    such a module to `model.head` sets it."""
    channels: Annotated[int, Bounds(1, 4096)] = 3
    """Input channels: 3 for colour, 1 for grey, any number of bands."""
    resolution: Annotated[Pair, Bounds(1, 65_536)] = (224, 224)
    """Height and width of the input in pixels; one number means a square."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isprintable():
            raise UsageError(f"Name must be a printable text, got {self.name!r}.")
        super().__post_init__()
        if self.embedding and self.classes:
            raise UsageError(f"Embedding must go with classes 0, got {self.embedding} with {self.classes} classes.")
        if not isinstance(self.head_layers, str):
            raise UsageError(f"Head layers must be a text, got {self.head_layers!r}.")
        if self.head_layers and not self.classifies:
            raise UsageError(f"Head layers must be empty for a model without classes, got {self.head_layers!r}.")
        if self.head_layers:
            parse_head_layers(self.head_layers, 1, self.classes)  # raises for a wrong text, whatever the width
        height, width = self.resolution
        if height * width * self.channels > _MAX_IMAGE_VALUES:
            raise UsageError(
                f"Height x width x channels of an image must be at most {_MAX_IMAGE_VALUES:,}, got {height:,} x"
                f" {width:,} x {self.channels:,}."
            )

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        raise NotImplementedError

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one image, counted as in the literature: matrix products and convolutions."""
        raise NotImplementedError

    def _head_parameters(self, width: int) -> int:
        """Count the parameters of the head on features of this width: the layers for the classes, or an embedding."""
        if self.head_layers:
            return sum(layer.parameters for layer in parse_head_layers(self.head_layers, width, self.classes))
        return width * self.classes + self.classes if self.classes else width * self.embedding + 2 * self.embedding

    def _head_macs(self, width: int) -> int:
        if self.head_layers:
            return sum(layer.macs for layer in parse_head_layers(self.head_layers, width, self.classes))
        return width * (self.classes or self.embedding)

    # Defaults, which a family overrides with a field or a property

    @property
    def tokens(self) -> int | None:
        """Length of the sequence."""
        return None

    @property
    def grid(self) -> Pair | None:
        """Rows and columns of the last layer's output."""
        return None

    @property
    def patch(self) -> Pair | None:
        """Height and width of a patch in pixels."""
        return None

    @property
    def padding(self) -> Pair:
        """Zeros added on each side before an image is cut into patches."""
        return 0, 0

    @property
    def width(self) -> int | None:
        """Width of a token, or of the input of the head."""
        return None

    @property
    def depth(self) -> int:
        """Number of layers whose outputs `look` can record."""
        return 1

    @property
    def heads(self) -> int | None:
        """Attention heads of a layer."""
        return None

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches: [CLS] and registers."""
        return 0

    @property
    def predicts(self) -> Output:
        """The output of the model: logits of classes, logits of each pixel's colour, or features. A model that predicts
        pixels has a buffer `palette` (colours, channels) with its colours."""
        return "classes" if self.classes else "features"

    @property
    def classifies(self) -> bool:
        """Whether the output is logits of classes."""
        return self.predicts == "classes"

    def predicting(self, output: Output) -> Self:
        """Return this configuration with another output. Raise `UsageError` if the family does not have it."""
        if output == "pixels":
            raise UsageError(f"Model must be of a family that predicts pixels (igpt), got family {self.family}.")
        return self

    @property
    def can_mask_patches(self) -> bool:
        """Whether the model has `encode_patches`, so that projected patches can be masked before the first block."""
        return False

    @property
    def can_merge(self) -> bool:
        """Whether the family has the setting `merge` and the other settings allow it."""
        return False

    @property
    def why_not_in_page(self) -> str | None:
        """The setting, such as `pool map`, that prevents `vitrail explain` from running this model in a page; None if
        it runs."""
        return f"family {self.family}"

    def check_in_page(self) -> None:
        """Raise `UsageError` for a model that `vitrail explain` cannot run in a page."""
        if (reason := self.why_not_in_page) is not None:
            raise UsageError(
                f"Bundle must have a small plain ViT that runs in a page, got {reason}."
                " `vitrail inspect` shows the inside of any model."
            )

    def for_data(
        self, *, classes: int, channels: int, resolution: Pair | None, settings: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the configuration for a data set. Presets for small images take the resolution of the data, if all
        images have the same one. `settings` override the values of the data set."""
        changes: dict[str, Any] = {"classes": classes, "channels": channels}
        if resolution is not None and max(self.resolution) <= _SMALL_RESOLUTION:
            changes["resolution"] = resolution
        return self.replace(**{**changes, **(settings or {})})

    def with_macs(self, macs: int) -> Self:
        """Return this configuration with the value of `scaled_by` (from 1 to 4096) whose MACs are nearest to `macs`."""
        values = range(1, 4097)
        above = bisect.bisect(values, macs, key=lambda value: self._scaled(value).macs)
        nearest_values = {values[max(above - 1, 0)], values[min(above, len(values) - 1)]}
        return min(map(self._scaled, nearest_values), key=lambda config: abs(config.macs - macs))

    @property
    def receptive_field(self) -> int | None:
        """Side of the square of pixels that a unit of a CNN's last layer depends on; None for families whose units
        depend on the complete image."""
        return None

    def wider(self, factor: float) -> dict[str, Any]:
        """Return the settings that multiply the width by `factor`."""
        return {self.scaled_by: round(getattr(self, self.scaled_by) * factor)}

    def deeper(self, factor: int) -> dict[str, Any]:
        """Return the settings that multiply the depth by `factor`."""
        return {"depth": factor * self.depth}

    def _scaled(self, value: int) -> Self:
        return self.replace(**{self.scaled_by: value})

    def to_document(self) -> dict[str, Any]:
        """Return `to_json` with the family's name, from which `read_model` builds the configuration again."""
        return {"family": self.family, **self.to_json()}

    @property
    def extensions(self) -> dict[str, str]:
        """Extensions that this model needs: `family.NAME` mapped to the package with its version."""
        package = FAMILIES.provider(self.family)
        return {} if package is None else {f"family.{self.family}": package}

    @property
    def tables(self) -> dict[str, Table | None]:
        """The family's fixed tables by name; None for a table that the settings do not need."""
        return {}

    def _check_tables(self) -> None:
        """Raise `UsageError` for tables that would fill the memory: they can be large even if the model has few
        weights."""
        size = sum(table.size for table in self.tables.values() if table is not None)
        if size > _MAX_TABLE_BYTES:
            raise UsageError(
                f"Tables of positions and masks must take at most {_MAX_TABLE_BYTES:,} bytes, got {size:,} at"
                f" resolution {self.resolution}. Choose a smaller one, or larger patches."
            )

    def info(self) -> dict[str, Any]:
        """Return the row of `vitrail info` in JSON types, with null for a property that the family does not have."""
        return jsonable({key: getattr(self, key) for key in INFO_KEYS})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchedConfig(ModelConfig):
    """Base class of the configurations of families that cut images into patches."""

    patch: Annotated[Pair, Bounds(1, 4096)] = (16, 16)
    """Height and width of a patch in pixels."""
    stride: Annotated[Pair | None, Bounds(1, 4096)] = None
    """Step from patch to patch; none means the patch size, so that patches do not overlap."""
    padding: Annotated[Pair, Bounds(0, 4096)] = (0, 0)
    """Zeros added on each side before the image is cut into patches."""
    width: Annotated[int, Bounds(1, 65_536)] = 768
    """Width D of a token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_grid()

    @property
    def step(self) -> Pair:
        """Pixels from one patch to the next."""
        return self.stride or self.patch

    @property
    def canvas(self) -> tuple[int, int, int]:
        """Channels, height and width of the input that is cut into patches: the image, or the feature map of a stem."""
        return self.channels, *self.resolution

    @property
    def canvas_scale(self) -> int:
        """Image pixels per canvas pixel, vertically and horizontally."""
        return 1

    @property
    def grid(self) -> Pair:
        """Rows and columns of patches."""
        sides = zip(self.canvas[1:], self.padding, self.patch, self.step, strict=True)
        rows, columns = ((side + 2 * pad - patch) // step + 1 for side, pad, patch, step in sides)
        return rows, columns

    @property
    def patches(self) -> int:
        """Number N of patches."""
        return self.grid[0] * self.grid[1]

    @property
    def _embed_parameters(self) -> int:
        return self.canvas[0] * self.patch[0] * self.patch[1] * self.width + self.width

    @property
    def _embed_macs(self) -> int:
        return self.patches * self.canvas[0] * self.patch[0] * self.patch[1] * self.width

    def _check_grid(self) -> None:
        """Raise UsageError unless whole patches cover the padded image and each patch contains pixels of the image."""
        # Also a limit: without this check, a small configuration could have millions of patches.
        if any(pad >= patch for pad, patch in zip(self.padding, self.patch, strict=True)):
            raise UsageError(
                f"Padding must be smaller than the patch {self.patch}, got {self.padding}: some patches would"
                " contain only padding."
            )
        for side, resolution, size, pad, patch, step in zip(
            ("height", "width"), self.resolution, self.canvas[1:], self.padding, self.patch, self.step, strict=True
        ):
            if size + 2 * pad >= patch and (size + 2 * pad - patch) % step == 0:
                continue
            scale = self.canvas_scale
            got = f"got {side} {resolution}" + (f" (a feature map of {size})" if scale > 1 else "")
            if size + 2 * pad < patch:
                raise UsageError(
                    f"Resolution must be at least one patch, {got} with patch {patch}."
                    " Choose a larger resolution or a smaller patch."
                )
            lower = size - (size + 2 * pad - patch) % step
            is_plain = self.stride is None and not pad
            geometry = f"patch {patch}" if is_plain else f"patch {patch}, stride {step}, padding {pad}"
            raise UsageError(
                f"Resolution must divide into whole patches, {got} with {geometry}."
                f" Use {f'{scale * lower} or ' if lower > 0 else ''}{scale * (lower + step)}."
            )


def model_settings() -> dict[str, str]:
    """Return the settings of the built-in families by name, each with its meaning and the families that have it."""
    families_by_meaning: dict[str, dict[str, list[str]]] = {}
    built_in = [name for name in FAMILIES if name not in FAMILIES.extension_names]
    for family in built_in:
        for setting, meaning in FAMILIES[family].meanings().items():
            families_by_meaning.setdefault(setting, {}).setdefault(meaning, []).append(family)
    return {
        setting: " ".join(
            meaning if families == built_in else f"{', '.join(families)}: {meaning}"
            for meaning, families in meanings.items()
        )
        for setting, meanings in families_by_meaning.items()
    }


def read_model(document: object) -> ModelConfig:
    """Return the configuration in a document of `ModelConfig.to_document`. Raise `UsageError` for an invalid one."""
    if not isinstance(document, dict):
        raise UsageError(f"Model must be a JSON object, got {type(document).__name__}.")
    settings = dict(document)
    return FAMILIES[settings.pop("family", None)].from_json(settings)
