"""Walkthroughs: the steps from an image to its logits, with equations, as `vitrail inspect` and `explain` show them.

The walkthrough of a family is a subclass in `families/<name>/walkthrough.py`, which its configuration names. The
messages of one family are in `families/<name>/walkthrough.toml`, shared messages in `models/walkthrough.toml`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from vitrail.core.message_files import Messages, load_messages
from vitrail.core.registry import load_object
from vitrail.core.settings import Pair
from vitrail.models.activations import Activations
from vitrail.models.base import AnyModel

ACTIVATION_SYMBOLS = {"gelu": "GELU", "gelu-tanh": "GELU", "quick-gelu": "GELU", "relu": "ReLU", "tanh": "tanh"}
"""The names of the activation functions of `layers.activate` in equations."""


class WalkthroughStep(NamedTuple):
    """One step of a walkthrough: its equation, its message and its values for one image.

    Equations are plain text, which `reports.equations` typesets: `z_1 = MLP(LN(z')) + z'`.
    """

    key: str
    """Name of the step; the name in `Activations.steps` if it is recorded there."""
    equation: str
    values: Tensor
    """Values (N, D) of the positions of `grid`, row by row, or (D) of the complete image. May be empty."""
    sentence: str
    """Name of the message of the step in `Walkthrough.messages`."""
    grid: Pair | None = None
    """Rows and columns of the positions."""
    shape: tuple[int, ...] = ()
    """Shape of the complete result, if it has more than `values`, such as [CLS]."""
    space: str = ""
    """Name of the feature space. Steps of the same space have the same colour scale; empty for a step with a scale of
    its own."""
    fields: Mapping[str, Any] = {}
    """Values for the placeholders of the message."""
    shows: Literal["", "image", "patch", "colours", "maps", "states", "reads"] = ""
    """Additional content of the figure: the image with its grid, the pixels of the followed patch, `values` as colours
    from -1 to 1, channels as feature maps, states in the order of reading (`extra`), or how much each position reads
    from the others (`extra`)."""
    extra: Tensor | None = None
    """States (N, S) in the order of reading, or weights (N, N) with which each position reads each other position."""
    layer: int | None = None
    """Index of the layer, if the step is the output of a layer."""


class ExplainStep(NamedTuple):
    """One step of the page of `vitrail explain`. Its messages are `NAME-title`, `NAME-says`, `NAME-asks` and
    `NAME-answer`."""

    name: str
    equation: str
    shape: str
    """Shape of the result, with the placeholders of `Explanation.fields`."""


class Explanation(NamedTuple):
    """The content of the page of `vitrail explain` that depends on the model."""

    parts: Mapping[str, tuple[ExplainStep, ...]]
    """The steps of each part of the page, by the name of the message with the part's title."""
    fields: Mapping[str, Any]
    """Values for the placeholders of messages and shapes."""
    variants: Mapping[str, str]
    """The version of each message that has several: `cls-says` -> `gap` means `cls-says.gap`."""
    tensors: Mapping[str, Tensor]
    """The tensors that `forward.js` reads, by name."""


M = TypeVar("M", bound=AnyModel)


class Walkthrough(Generic[M]):
    """The walkthrough of a model. The default has one step per layer."""

    messages: ClassVar[Messages] = load_messages(__file__)
    """The messages that the steps name."""
    has_patches: ClassVar[bool] = True
    """Whether the positions of `config.grid` are patches (or pixels) of the image, rather than cells of a feature
    map."""

    def __init__(self, model: M) -> None:
        self.model = model

    def steps(self, activations: Activations) -> list[WalkthroughStep]:
        """Return the steps of the first image in `activations`, from its pixels to its logits."""
        layers = [
            self.layer_step(layer, f"x_{layer + 1} = f_{layer + 1}(x_{layer})", activations, sentence="layer-output")
            for layer in sorted(activations.layers)
        ]
        return [self.image_step(), *layers, *self.head_steps(activations, "y")]

    # Steps that most families have

    def image_step(self) -> WalkthroughStep:
        """Return the first step: the image, with the positions that can be followed."""
        c = self.model.config
        rows, columns = c.grid or (1, 1)
        sentence = "picture-whole" if c.grid is None else "picture" if self.has_patches else "picture-map"
        fields = {"rows": rows, "columns": columns, "count": rows * columns}
        shape = (*c.resolution, c.channels)
        return WalkthroughStep(
            "picture", "x in R^(H x W x C)", torch.empty(0), sentence, shape=shape, fields=fields, shows="image"
        )

    def patch_steps(self, activations: Activations, sentence: str = "patches") -> list[WalkthroughStep]:
        """Return the steps of the patches, flattened and projected."""
        grid, patches = self.model.config.grid, activations.steps["patches"][0]
        projected = activations.steps["projected"][0]
        numbers, width = {"numbers": patches.shape[1]}, {"width": projected.shape[1]}
        return [
            WalkthroughStep("patches", "x_p in R^(N x P^2 C)", patches, sentence, grid, fields=numbers, shows="patch"),
            WalkthroughStep("projected", "x_p E", projected, "projected", grid, space="z", fields=width),
        ]

    def layer_step(self, layer: int, equation: str, activations: Activations, **step_fields: Any) -> WalkthroughStep:
        """Return the step of the output of a layer, at its positions or for the complete image. `step_fields` are
        further fields of the `WalkthroughStep`."""
        output, model = activations.steps[f"blocks.{layer}"], self.model
        shape, grid = tuple(output.shape[1:]), None
        if output.ndim == 4:
            grid, values = (output.shape[2], output.shape[3]), output[0].flatten(1).T
            step_fields = {"space": f"{shape[0]} channels", "shows": "maps", **step_fields}
        elif output.ndim == 3:
            grid, values = model.config.grid, model.in_raster_order(output[:, model.config.prefix :])[0]
            step_fields = {"space": "z", **step_fields}
        else:
            values = output[0]
        return WalkthroughStep(f"blocks.{layer}", equation, values, grid=grid, shape=shape, layer=layer, **step_fields)

    def head_steps(self, activations: Activations, pooled: str, logits: str = "y W + b") -> list[WalkthroughStep]:
        """Return the steps of the input of the head, and of the logits or the embedding, if the model has them."""
        c = self.model.config
        sentence = "pooled" if c.classes else "pooled-embedded" if c.embedding else "pooled-last"
        steps = [WalkthroughStep("pooled", f"y = {pooled}", activations.steps["pooled"][0], sentence)]
        if c.classifies:
            steps.append(WalkthroughStep("logits", logits, activations.logits[0], "logits"))
        elif c.embedding:
            equation, fields = f"BN({logits.removesuffix(' + b')})", {"width": c.embedding}
            steps.append(WalkthroughStep("embedding", equation, activations.logits[0], "embedding", fields=fields))
        return steps

    # The steps inside a layer, for models with `opens_blocks`

    def layer_equations(self, layer: int) -> dict[str, str]:
        """Return the equations of the steps inside a layer, by the names of `Activations.steps`, in the order of
        computation. The message of a step is `step-NAME`."""
        return {}

    def layer_input(self, layer: int, activations: Activations) -> Tensor:
        """Return the input of a layer (B, T, D). `activations` must have recorded the layer before it."""
        return activations.steps[f"blocks.{layer - 1}" if layer else "tokens"]

    def norm_statistics(self, z_BTD: Tensor) -> dict[str, Tensor]:
        """Return the statistics by which the norms of the layers normalise each token, by name, each (B, T): `mean` and
        `deviation`, or `rms`. Empty for a norm without statistics per token, such as BatchNorm."""
        return {}

    # Position embeddings

    def position_table(self) -> Tensor | None:
        """Return the position embedding that is added to each patch (N, D); None if nothing is added."""
        return None

    @property
    def position_origin(self) -> Literal["learned", "factored", "fixed"]:
        """Origin of the position table: learned, learned as a row part and a column part, or fixed. Its message is
        `position-ORIGIN`."""
        return "fixed"

    @property
    def position_tables(self) -> int:
        """Number of position tables: one, or one for each layer."""
        return 1

    # The page that runs the model

    def explanation(self) -> Explanation:
        """Return the content of the page of `vitrail explain`, for models that run in a page
        (`config.check_in_page`)."""
        raise NotImplementedError


def walkthrough_of(model: AnyModel) -> Walkthrough[Any]:
    """Return the walkthrough of the model's family."""
    return load_object(model.config.walkthrough)(model)
