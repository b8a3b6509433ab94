"""The base class of all models: images in, logits out, and the methods that other packages call."""

import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.core.errors import UsageError
from vitrail.core.settings import Pair
from vitrail.models.activations import Activations, resolve_indices
from vitrail.models.config import ModelConfig
from vitrail.models.head_modules import build_head, count_outputs, describe_head, last_linear
from vitrail.models.layers import EmbeddingHead
from vitrail.models.roles import Role, decays
from vitrail.models.timm_interface import TimmInterface

Reads = Literal["[CLS]", "mean", "pool"]


class Layout(NamedTuple):
    """The tokens of a model with attention: their positions in the image, and the input of the head."""

    grid: Pair
    """Rows and columns of patches (or pixels)."""
    step: Pair
    """Pixels from one patch to the next, vertically and horizontally."""
    prefix: int
    """Number of [CLS] and register tokens, which come first in the sequence."""
    reads: Reads
    """Input of the head: [CLS], the mean of the patches, or all tokens through attention pooling."""
    allowed: np.ndarray | None = None
    """Boolean mask (N, N) of the patches that each patch may attend to; None without a mask."""
    merges: bool = False
    """Whether patches are merged between layers."""
    residual: bool = True
    """Whether each layer adds to its input."""


_DTYPES = {"bool": torch.bool, "int64": torch.int64, "float64": torch.float64}

Config = TypeVar("Config", bound=ModelConfig)


class Model(TimmInterface, nn.Module, Generic[Config]):
    """Base class of all families; `Model[ViTConfig]` has a `ViTConfig` as its configuration.

    A family must define `forward` and `init_weights`. The other methods have defaults for a network without tokens.
    """

    config: Config
    head: nn.Linear
    """The head: a linear layer, or the layers of `config.head_layers`; in a model without classes, an `EmbeddingHead`
    or `nn.Identity`. Assigning a module sets the configuration's classes and head layers."""
    head_width: int = 0
    """Width of the input of the head."""
    has_positional_weights = False
    """Whether weights depend on positions in the image, so that the model cannot be resized."""
    checkpoints_activations = False
    """Whether activation checkpointing is on."""
    projection: ClassVar[str] = ""
    """Name of the module that projects patches of pixels; empty for families without one."""
    reads_layers: ClassVar[bool] = False
    """Whether `read` computes logits from the output of any layer."""
    opens_blocks: ClassVar[bool] = False
    """Whether the steps inside a layer can be recorded, as in the blocks of a Transformer."""
    after_blocks: ClassVar[tuple[str, ...]] = ("head.", "head_dist.", "norm.", "pre_logits.", "attn_pool.")
    """Prefixes of the names of parameters that follow the last block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "head":
            self._count_classes()

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        """Return logits (B, K), or features (B, D) of a model without a head.

        `activations` records intermediate results and does not change them.
        """
        raise NotImplementedError

    def init_weights(self) -> None:
        """Initialise the parameters as the family's paper or code does."""
        raise NotImplementedError

    def initialise(self) -> None:
        """Call `init_weights`, except on the meta device, where it has no effect and its imports take a second."""
        if next(self.parameters()).device.type != "meta":
            self.init_weights()

    def make_tables(self) -> dict[str, Tensor | None]:
        """Compute the fixed tables, whose shapes are in `config.tables`."""
        return {}

    def fill_tables(self) -> None:
        """Register the fixed tables as buffers outside of the state dict, on the device and in the dtype of the
        weights.

        On the meta device they are not computed: building a model there allocates nothing.
        """
        weight, shapes = next(self.parameters()), self.config.tables
        tables: dict[str, Tensor | None] = dict.fromkeys(shapes)
        if weight.device.type == "meta":
            for name, table in shapes.items():
                if table is not None:
                    tables[name] = torch.empty(table.shape, dtype=_DTYPES[table.dtype], device="meta")
        elif any(shapes.values()):
            tables |= self.make_tables()
        for name, tensor in tables.items():
            if tensor is None:  # a plain attribute: torch.export counts empty buffers wrongly
                setattr(self, name, None)
                continue
            dtype = weight.dtype if tensor.is_floating_point() else tensor.dtype
            self.register_buffer(name, tensor.to(weight.device, dtype), persistent=False)

    def run_block(self, block: nn.Module, *arguments: Any) -> Any:
        """Call a block, with activation checkpointing if that is on."""
        if self.checkpoints_activations and self.training:
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)

    def make_head(self, width: int, *, bias: bool = True) -> nn.Linear:
        """Create the head: a linear layer, or the layers of `config.head_layers`; for a model without classes, the
        `EmbeddingHead` or `nn.Identity`."""
        self.head_width = width
        if self.config.head_layers:
            return cast(nn.Linear, build_head(self.config.head_layers, width, self.config.classes))
        if not self.config.classes:
            embedding = self.config.embedding
            return cast(nn.Linear, EmbeddingHead(width, embedding) if embedding else nn.Identity())
        return nn.Linear(width, self.config.classes, bias=bias)

    @torch.no_grad()
    def zero_head(self) -> None:
        """Set the layers that compute the logits to zero, as for fine-tuning (section 3.2). An embedding is initialised
        instead: zeros would have no gradient."""
        if self.config.embedding:
            cast(EmbeddingHead, self.head).initialise()
            return
        for layer in self.output_layers():
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def output_layers(self) -> list[nn.Linear]:
        """The linear layers whose outputs are the logits (their mean, if there are several); empty without a head."""
        layer = last_linear(self.head)
        return [] if layer is None else [layer]

    def _classify(self, pooled: Tensor, activations: Activations | None) -> Tensor:
        """Apply the head to its input, and record input and logits."""
        logits = self.head(pooled)
        if activations is not None:
            activations.steps["pooled"], activations.logits = pooled, logits
        return logits

    # The head

    def reset_classifier(self, classes: int) -> None:
        """Replace the head by a zero head for `classes` classes, in place, on the same device and in the same dtype.
        With 0 classes the model has no head.

        The hidden layer of the pre-training head is dropped, in the model and in `config`. Create the optimiser
        afterwards: the head has new parameters.

            >>> model = vitrail.create("ViT-Nano/7", classes=1000)
            >>> model.reset_classifier(2)
            >>> model.config.classes, model(torch.zeros(1, 1, 28, 28)).tolist()
            (2, [[0.0, 0.0]])
        """
        self.replace_head(classes)

    def replace_head(self, classes: int, *, embedding: int = 0) -> None:
        """Replace the head in place, as `reset_classifier` does; with 0 classes, the new head may be an embedding of
        this width. Families override it to drop modules that only pre-training needs."""
        if not self.head_width:
            raise UsageError(f"Head must be created by make_head, got another head in family {self.config.family}.")
        self.config = self.config.replace(classes=classes, embedding=embedding, head_layers="")
        weight = next(self.parameters())
        self.head = self.make_head(self.head_width).to(weight.device, weight.dtype).train(self.training)
        self.zero_head()

    def _count_classes(self) -> None:
        """Copy the number of classes and the layers of an assigned head to the configuration.

        A head with modules that the configuration cannot describe sets only the number of classes; saving such a model
        is an error. The configuration stays if the head is of another width or predicts the colours of pixels.
        """
        c, head = self.config, self.head
        if type(head) is nn.Linear and head.bias is not None and not c.head_layers and c.classes == head.out_features:
            return  # most heads: the one that the configuration describes
        if c.predicts == "pixels" or type(head) is EmbeddingHead:
            return
        if type(head) is nn.Identity:
            described = "", 0
        elif (described := describe_head(head, self.head_width)) is None:
            outputs = count_outputs(head, self.head_width)
            if outputs is None:
                return
            described = "", outputs
        head_layers, classes = described
        if (head_layers, classes, 0) != (c.head_layers, c.classes, c.embedding):
            self.config = c.replace(classes=classes, embedding=0, head_layers=head_layers)

    # Activations and features

    def record(
        self,
        images: Tensor,
        layers: Iterable[int] | None = (),
        *,
        attention: bool = False,
        inside: Iterable[int] | None = (),
    ) -> Activations:
        """Run the model in its present mode and return its intermediate results, with gradients if they are enabled.

        The outputs of `layers` are recorded, and every step inside the layers `inside`. Layers count from 0 (negative:
        from the last); None means all.
        """
        step_by_step = frozenset(self._layer_indices(inside))
        if step_by_step and not self.opens_blocks:
            raise UsageError(f"Inside must be layers of a Transformer, got family {self.config.family}.")
        if step_by_step and self.training:  # the layer is computed a second time, with another dropout
            raise UsageError(
                "Model must be in evaluation mode to record inside layers, got training mode. Call model.eval()."
            )
        activations = Activations(frozenset(self._layer_indices(layers)), with_attention=attention, inside=step_by_step)
        self(images, activations)
        return activations

    def features(self, images: Tensor) -> Tensor:
        """Return the features of each image (B, D), the input of the head: the pooled output of the last layer, before
        any hidden layer of the head. The model runs in its present mode, and gradients are kept.

            >>> model = vitrail.create("ViT-Nano/7")
            >>> model.features(torch.zeros(2, 1, 28, 28)).shape
            torch.Size([2, 64])
        """
        return self.record(images).steps["pooled"]

    def layer_tokens(
        self, images: Tensor, layers: Iterable[int] | None = (-1,), normalise: bool = True
    ) -> list[Tensor]:
        """Return the outputs of `layers` as sequences (B, T, D): [CLS] and registers first, then patches. The output of
        a CNN's layer is a sequence of its positions in raster order. Layers count from 0 (negative: from the last);
        None means all.

        With `normalise`, the norm before the head is applied to every output (in a CNN, to outputs with its number of
        channels). The model runs in its present mode, and gradients are kept.

            >>> model = vitrail.create("ViT-Nano/7")
            >>> first, last = model.layer_tokens(torch.zeros(2, 1, 28, 28), layers=(0, -1))
            >>> last.shape
            torch.Size([2, 17, 64])
        """
        outputs = self._layer_outputs(images, layers, normalise)
        return [output.flatten(2).transpose(1, 2) if output.ndim == 4 else output for output in outputs]

    def feature_maps(
        self, images: Tensor, layers: Iterable[int] | None = (-1,), normalise: bool = True
    ) -> list[Tensor]:
        """Return the outputs of `layers` as maps (B, D, rows, columns), without [CLS] and registers; arguments as in
        `layer_tokens`.

        Later layers of a CNN have smaller maps and more channels.

            >>> model = vitrail.create("ResNet-Nano")
            >>> [list(layer.shape) for layer in model.feature_maps(torch.zeros(2, 1, 28, 28), layers=None)]
            [[2, 8, 28, 28], [2, 16, 14, 14], [2, 32, 7, 7]]
        """
        return [self._as_feature_map(output) for output in self._layer_outputs(images, layers, normalise)]

    def normalise_layer(self, output: Tensor) -> Tensor:
        """Apply the norm before the head to a layer's output. Return the output as it is in a model without that
        norm."""
        return output

    def in_raster_order(self, tokens_BND: Tensor) -> Tensor:
        """Sort the tokens of patches row by row."""
        return tokens_BND

    def _layer_indices(self, layers: Iterable[int] | None) -> list[int]:
        depth = self.config.depth
        return resolve_indices("Layer", range(depth) if layers is None else layers, depth)

    def _layer_outputs(self, images_BCHW: Tensor, layers: Iterable[int] | None, normalise: bool) -> list[Tensor]:
        """Return the outputs of `layers`, in this order, with the norm before the head if `normalise`."""
        if self.config.grid is None:
            raise UsageError(
                "Tokens and feature maps must be of a family whose layers have positions in the image,"
                f" got family {self.config.family}. Use features() instead."
            )
        indices = self._layer_indices(layers)
        steps = self.record(images_BCHW, indices).steps
        outputs = {layer: steps[f"blocks.{layer}"] for layer in set(indices)}
        if normalise:
            outputs = {layer: self.normalise_layer(output) for layer, output in outputs.items()}
        return [outputs[layer] for layer in indices]

    def _as_feature_map(self, output: Tensor) -> Tensor:
        if output.ndim == 4:
            return output
        grid = self.config.grid or (1, 1)
        patches_BND = output[:, self.config.prefix :]
        if patches_BND.shape[1] != grid[0] * grid[1]:
            raise UsageError(
                f"Feature maps must have all {grid[0] * grid[1]} patches, got {patches_BND.shape[1]} because this"
                " model drops tokens in training mode. Call model.eval() first."
            )
        return self.in_raster_order(patches_BND).transpose(1, 2).unflatten(2, grid)

    # Hooks for other packages

    def layout(self) -> Layout | None:
        """Layout of the tokens; None for families without attention between positions."""
        return None

    def read(self, z_BTD: Tensor, activations: Activations | None = None) -> Tensor:
        """Compute logits from the output of any layer (B, T, D), as from the last one, if `reads_layers`."""
        raise NotImplementedError

    def encode_patches(self, images_BCHW: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the normalised output of the last block for each patch (B, N, D), if `config.can_mask_patches`.
        `change` is applied to the projected patches (B, N, D), for example to mask some of them."""
        raise NotImplementedError

    def prepare(self, read: Callable[[int], Tensor], seed: int) -> None:
        """Compute weights from the training images before training starts, such as a palette. `read(count)` returns
        `count` preprocessed images (B, C, H, W)."""

    def roles(self) -> dict[str, Role]:
        """Return the role of every parameter, by name."""
        roles = {}
        for name, parameter in self.named_parameters():
            block = re.match(r"blocks\.(\d+)\.", name)
            layer = int(block[1]) + 1 if block else self.config.depth + 1 if name.startswith(self.after_blocks) else 0
            is_matrix = decays(name, parameter) and parameter.ndim == 2 and "blocks." in name
            roles[name] = Role(decays(name, parameter), is_matrix, layer, 3 if name.endswith(".qkv.weight") else 1)
        return roles

    # Copies with changes

    def clone_with(
        self, tensors: dict[str, Tensor] | None = None, *, drop: tuple[str, ...] = (), **settings: Any
    ) -> Self:
        """Return a copy with changed settings, on torch's default device and in training mode.

        The copy takes its weights from `tensors` (default: the state dict of this model). Weights whose names begin
        with `drop` are initialised instead.
        """
        copy = type(self)(self.config.replace(**settings))
        source = self.state_dict() if tensors is None else tensors
        copied = {name: tensor for name, tensor in source.items() if not drop or not name.startswith(drop)}
        copy.load_state_dict({**copy.state_dict(), **copied})
        return copy

    # Tables and sizes

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Compute the tables again after a change of device or dtype, so that they are not rounded twice."""
        super()._apply(fn, recurse)
        self.fill_tables()
        return self

    def resize(self, resolution: int | Pair) -> Self:
        """Return a copy of this model for another resolution, on the same device. Raise `UsageError` if weights depend
        on positions."""
        config = self.config.replace(resolution=resolution)
        if self.has_positional_weights and config.resolution != self.config.resolution:
            raise UsageError(
                f"Resize must keep the resolution of family {config.family}, whose weights depend on positions, got"
                f" {config.resolution} after {self.config.resolution}. Create a new model instead."
            )
        return self.rebuild(config, {name: tensor.clone() for name, tensor in self.state_dict().items()})

    def rebuild(self, config: Config, tensors: dict[str, Tensor]) -> Self:
        """Return a model of `config` with these weights, in the same mode and with the same frozen parameters."""
        with torch.device("meta"):
            rebuilt = type(self)(config)
        rebuilt.load_state_dict(tensors, assign=True)
        rebuilt.fill_tables()
        for ours, theirs in zip(self.parameters(), rebuilt.parameters(), strict=True):
            theirs.requires_grad_(ours.requires_grad)
        return rebuilt.train(self.training)

    def _check_images(self, images_BCHW: Tensor) -> None:
        expected = (self.config.channels, *self.config.resolution)
        if not isinstance(images_BCHW, Tensor) or not images_BCHW.is_floating_point():
            got = images_BCHW.dtype if isinstance(images_BCHW, Tensor) else type(images_BCHW).__name__
            raise UsageError(f"Images must be a tensor of floating-point numbers, got {got}. Preprocess them.")
        if images_BCHW.ndim != 4 or tuple(images_BCHW.shape[1:]) != expected:
            raise UsageError(
                f"Images must have shape (batch, {', '.join(map(str, expected))}), got {tuple(images_BCHW.shape)}."
                " Preprocess them, or resize() the model."
            )


AnyModel = Model[Any]
