"""What every model of every family is: images in, logits out, a way to watch, and answers to what other rooms ask."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Generator
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.configs.base import ModelConfig
from vitrail.errors import UsageError
from vitrail.settings import Pair


@dataclasses.dataclass
class Seen:
    """What was seen of a model at work, by name, in the order in which it was computed."""

    layers: frozenset[int]
    """The layers that were asked for, from 0."""
    weighs: bool = True
    """Whether the attention weights of these layers are wanted, too."""
    steps: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Intermediate results. Every family: `blocks.0` and so on, what left each layer asked for, and `pooled`, what the
    head read. Models of patches: `patches` (flattened pixels, or features of a hybrid's stem) and `projected`.
    Transformers: `tokens`, with positions."""
    attention: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    """Attention weights (images, heads, queries, keys) of each layer asked for; rows sum to 1."""
    pooling: Tensor | None = None
    """Where the query of attention pooling looks (images, heads, 1, keys), in a model that has one."""
    logits: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """What the model answered, bit for bit what it answers unobserved."""

    def wants_attention(self, layer: int) -> bool:
        """Whether a layer's attention weights are to be computed: they take memory that grows with tokens squared."""
        return self.weighs and layer in self.layers

    def keep(self, layer: int, output: Tensor) -> None:
        """Write down what left a layer, if that layer was asked for."""
        if layer in self.layers:
            self.steps[f"blocks.{layer}"] = output

    def finish(self, pooled: Tensor, logits: Tensor) -> None:
        """Write down what the head read and said."""
        self.steps["pooled"] = pooled
        self.logits = logits


Reads = Literal["[CLS]", "mean", "pool"]


class Layout(NamedTuple):
    """Where the tokens of a model with attention stand in the image, and which of them its head reads."""

    grid: Pair
    """Rows and columns of patches (or pixels)."""
    step: Pair
    """Pixels from one to the next."""
    prefix: int
    """[CLS] and registers, which come first in the sequence and have no place in the image."""
    reads: Reads
    """What the head reads: [CLS], the mean of the patches, or all tokens through the query of attention pooling."""
    allowed: np.ndarray | None = None
    """(N, N): at which patches each patch may look, where attention is masked."""


class Role(NamedTuple):
    """What an optimiser must know of a parameter."""

    decays: bool
    """Whether weight decay applies: to matrices and kernels, not to biases, norms, scales, tokens and positions."""
    is_matrix: bool
    """Whether it is a matrix of a block, which Muon makes orthogonal."""
    layer: int
    """0 for what embeds the input, l for block l - 1, depth + 1 for what reads the last block's output."""
    parts: int
    """Matrices that are stacked in it: 3 for queries, keys and values."""


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to a parameter of this name."""
    return parameter.ndim >= 2 and name.rpartition(".")[2].startswith("weight")


class Equations(NamedTuple):
    """The equations of a Transformer as this model has them, in plain text."""

    sequence: str
    """The tokens before positions are added."""
    embedded: str
    """Eq. 1."""
    adds_once: bool
    """Whether positions are added once, to the embedded patches."""
    blocks: list[str]
    """Eqs. 2 and 3, for each block."""
    read: str
    """Eq. 4."""
    logits: str
    """The head."""


_DTYPES = {"bool": torch.bool, "int64": torch.int64, "float64": torch.float64}

Config = TypeVar("Config", bound=ModelConfig)


class Model(nn.Module, Generic[Config]):
    """The surface that all families share; `Model[ViTConfig]` is one of a family.

    A family must have `forward` and `init_weights`. The rest has defaults that suit a network without tokens.
    """

    config: Config
    head: nn.Linear
    """An `nn.Identity` in a model without classes."""
    places_own_weights = False
    """Whether weights belong to places of the image, so that another size is another model."""
    recomputes = False
    """Whether training computes each block again in the backward pass instead of remembering what was in it."""
    embedding: ClassVar[str] = ""
    """Name of the convolution or projection that reads pixels as patches; empty for families without one."""
    after_blocks: ClassVar[tuple[str, ...]] = ("head.", "norm.", "pre_logits.", "attn_pool.")
    """How the names of parameters begin that work on the last block's output."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, images_BCHW: Tensor, seen: Seen | None = None) -> Tensor:
        """Logits (B, K); features (B, D) of a model without a head. `seen` collects what passes by and changes
        nothing."""
        raise NotImplementedError

    def init_weights(self) -> None:
        """Initialise the parameters as the family's paper or code does."""
        raise NotImplementedError

    def initialise(self) -> None:
        """`init_weights`, unless parameters are empty shapes: random numbers for those would import a second of
        torch."""
        if next(self.parameters()).device.type != "meta":
            self.init_weights()

    def make_tables(self) -> dict[str, Tensor | None]:
        """The tables that follow from the configuration alone, as `config.tables` describes them."""
        return {}

    def fill_tables(self) -> None:
        """Compute the tables. On the meta device they are empty shapes: building a model there allocates nothing."""
        if next(self.parameters()).device.type != "meta":
            tables = self.make_tables()
        else:
            tables = {
                name: None if table is None else torch.empty(table.shape, dtype=_DTYPES[table.dtype], device="meta")
                for name, table in self.config.tables.items()
            }
        for name, table in tables.items():
            self.set_table(name, table)

    def run_block(self, block: nn.Module, *arguments: Any) -> Any:
        """Call one block of many, under activation checkpointing if that is on."""
        if self.recomputes and self.training:
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)

    def make_head(self, width: int, *, bias: bool = True) -> nn.Linear:
        """The linear head; of a model without classes, one that lets features through."""
        if not self.config.classes:
            return cast(nn.Linear, nn.Identity())
        return nn.Linear(width, self.config.classes, bias=bias)

    @torch.no_grad()
    def zero_head(self) -> None:
        """Set the head to zero, where there is one: a new head does not disturb what was pre-trained (section 3.2)."""
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def _classify(self, pooled: Tensor, seen: Seen | None) -> Tensor:
        """The head on what it reads."""
        logits = self.head(pooled)
        if seen is not None:
            seen.finish(pooled, logits)
        return logits

    # What other rooms ask

    def layout(self) -> Layout | None:
        """Where tokens stand; None for families without attention between places."""
        return None

    def equations(self) -> Equations | None:
        """The equations of the walk from image to logits; None for families that are not shown step by step."""
        return None

    def read(self, z_BTD: Tensor, seen: Seen | None = None) -> Tensor:
        """Logits from the tokens that left a block, for families that have `equations`."""
        raise NotImplementedError

    def encode_patches(self, images_BCHW: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """What leaves the last block and its norm at each patch, (B, N, D), after `change` of the embedded patches
        (B, N, D); for families that `can_mask_patches`."""
        raise NotImplementedError

    def quantise(self, images_BCHW: Tensor) -> Tensor:
        """The class of every pixel's colour, (B, N), for families that predict pixels."""
        raise NotImplementedError

    def paint(self, colours_BN: Tensor) -> Tensor:
        """The inverse of `quantise`: preprocessed images (B, C, H, W) of classes of colours."""
        raise NotImplementedError

    def prefix_tokens(self) -> Tensor | None:
        """The learned tokens before the patches, (prefix, D); None where there are none."""
        return None

    def position_table(self) -> Tensor | None:
        """What is added to each place, (N, D), where something is."""
        return None

    @property
    def position_origin(self) -> Literal["learned", "factored", "fixed"]:
        """Where the position table comes from: learned freely, learned as a part by row and one by column, or fixed."""
        return "fixed"

    @property
    def position_tables(self) -> int:
        """Number of position tables: one for all layers, or one for each."""
        return 1

    @property
    def resize_note(self) -> str:
        """How `resize` changes learned positions, in a few words; empty where it does not."""
        return ""

    def pixel_kernels(self) -> Tensor | None:
        """Kernels (D, C, P, P) that read patches of pixels; None for families without such."""
        return self.get_parameter(f"{self.embedding}.weight") if self.embedding else None

    def pool_layer(self, output: Tensor) -> Tensor:
        """What leaves a layer as one vector for each image, (B, D): the mean over places, tokens of none left out."""
        if output.ndim == 4:
            return output.mean(dim=(2, 3))
        return output[:, self.config.prefix :].mean(dim=1) if output.ndim == 3 else output

    @property
    def layer_pooling(self) -> str:
        """What `pool_layer` takes, in a word."""
        return "mean"

    def centre_place(self) -> int:
        """Which token of a layer's sequence, counted without the prefix, is that of the centre of the image."""
        rows, columns = self.config.grid or (1, 1)
        return rows // 2 * columns + columns // 2

    def input_of(self, images_BCHW: Tensor, seen: Seen) -> Tensor:
        """What gradients with respect to the image are taken of: the image itself, unless the family rounds it."""
        return images_BCHW

    @contextlib.contextmanager
    def differentiable_input(self) -> Generator[None]:
        """For a while, `input_of` has a gradient."""
        yield

    def prepare(self, read: Callable[[int], Tensor], seed: int) -> None:
        """What the family needs of the data before training. `read(count)` gives preprocessed images (B, C, H, W)."""

    @property
    def has_ordered_blocks(self) -> bool:
        """Whether the layers are one row of blocks, so that a learning rate can decay from the last to the first."""
        names = [name for name, _ in self.named_parameters()]
        return any(name.startswith("blocks.0.") for name in names) and not any("stages." in name for name in names)

    def roles(self) -> dict[str, Role]:
        """The role of every parameter, by name."""
        found = {}
        for name, parameter in self.named_parameters():
            block = re.match(r"blocks\.(\d+)\.", name)
            layer = int(block[1]) + 1 if block else self.config.depth + 1 if name.startswith(self.after_blocks) else 0
            is_matrix = decays(name, parameter) and parameter.ndim == 2 and "blocks." in name
            found[name] = Role(decays(name, parameter), is_matrix, layer, 3 if name.endswith(".qkv.weight") else 1)
        return found

    # Copies with something changed

    def changed(self, tensors: dict[str, Tensor] | None = None, *, drop: tuple[str, ...] = (), **settings: Any) -> Self:
        """A model with some settings changed and these tensors (its own), but for those whose names begin with `drop`,
        which are initialised anew."""
        made = type(self)(self.config.replace(**settings))
        given = self.state_dict() if tensors is None else tensors
        kept = {name: tensor for name, tensor in given.items() if not drop or not name.startswith(drop)}
        made.load_state_dict({**made.state_dict(), **kept})
        return made

    def with_new_head(self, classes: int) -> tuple[Self, list[str]]:
        """A copy with a zero head for so many classes, without what served pre-training alone; and notes of that."""
        made = self.changed(drop=("head.",), classes=classes)
        made.zero_head()
        return made, []

    def adapt_channels(
        self, channels: int, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> tuple[Self, tuple[float, ...], tuple[float, ...], str]:
        """The model for images of another number of channels, their mean and std, and a note of what was done.

        Grey images for a model of colours: exactly the same answers. Another number of bands: kernels are repeated.
        """
        own = self.config.channels
        if channels == 1 and own == 3 and self.embedding and self.config.padding == (0, 0):
            note = "the kernels of three colours became one that reads grey the same"
            return self._to_grey(mean, std), (0.5,), (0.5,), note
        if channels in (1, 3) and own in (1, 3):
            return self, mean, std, f"images with {channels} channel(s) are read with the model's {own}"
        if not self.embedding:
            raise UsageError(
                f"Images of {channels} bands must go to a family that reads patches, got family {self.config.family}."
            )
        bands = [band % own for band in range(channels)]
        tensors, name = self.state_dict(), f"{self.embedding}.weight"
        tensors[name] = tensors[name][:, bands] * (own / channels)
        mean, std = (tuple(values[band] for band in bands) for values in (mean, std))
        note = f"the kernels of {own} bands are repeated for {channels}, times {own}/{channels}"
        return self.changed(tensors, channels=channels), mean, std, note

    def _to_grey(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        """W' g' + b' = b + sum over colours of W_c (g - mean_c) / std_c for every grey level g = 0.5 + 0.5 g'."""
        mean_C11, std_C11 = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (mean, std))
        tensors, weight, bias = self.state_dict(), f"{self.embedding}.weight", f"{self.embedding}.bias"
        kernel, offset = tensors[weight].double(), tensors[bias].double()
        tensors[weight] = (0.5 * kernel / std_C11).sum(dim=1, keepdim=True).float()
        tensors[bias] = (offset + (kernel * (0.5 - mean_C11) / std_C11).sum(dim=(1, 2, 3))).float()
        return self.changed(tensors, channels=1)

    # Tables and sizes

    def set_table(self, name: str, table: Tensor | None) -> None:
        """Hold a fixed table with the weights' device and type, outside of the state dict. (None is a plain attribute:
        torch.export counts empty buffers wrongly.)"""
        if table is None:
            setattr(self, name, None)
            return
        weight = next(self.parameters())
        table = table.to(weight.device, weight.dtype if table.is_floating_point() else table.dtype)
        self.register_buffer(name, table, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """After a move to another device or type, tables are computed anew, so that they are never rounded twice."""
        super()._apply(fn, recurse)
        self.fill_tables()
        return self

    def resize(self, resolution: int | Pair) -> Self:
        """A copy of this model for another resolution, on the same device; refused where places have own weights."""
        config = self.config.replace(resolution=resolution)
        if self.places_own_weights and config.resolution != self.config.resolution:
            raise UsageError(
                f"Resize must keep the resolution of family {config.family}, whose weights belong to places, got"
                f" {config.resolution} after {self.config.resolution}. Create a new model instead."
            )
        return self._rebuild(config, {name: tensor.clone() for name, tensor in self.state_dict().items()})

    def _rebuild(self, config: Config, tensors: dict[str, Tensor]) -> Self:
        """A model of `config` with these tensors, frozen where this one is frozen, and in its mode."""
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
            kind = images_BCHW.dtype if isinstance(images_BCHW, Tensor) else type(images_BCHW).__name__
            raise UsageError(f"Images must be a tensor of floating-point numbers, got {kind}. Preprocess them.")
        if images_BCHW.ndim != 4 or tuple(images_BCHW.shape[1:]) != expected:
            raise UsageError(
                f"Images must have shape (batch, {', '.join(map(str, expected))}), got {tuple(images_BCHW.shape)}."
                " Preprocess them, or resize() the model."
            )


AnyModel = Model[Any]
