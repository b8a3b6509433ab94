"""An LSTM over patches: the image as a sequence that is read in one order into a state of fixed size.

Shapes: B images, N patches in the chosen order, D width, S state, K classes.

    x_n        = x_p^(order n) E + b         as in ViT, without positions: the order is the position
    h_n, c_n   = LSTM(x_n, h_(n-1), c_(n-1))
    logits     = head(h_N)                   the last state, of both directions if there are two
"""

import random
from array import array

import torch
from torch import Tensor, nn

from vitrail.core.settings import Pair
from vitrail.models.activations import Activations
from vitrail.models.base import Model
from vitrail.models.families.lstm.config import LSTMConfig
from vitrail.models.initialise import lecun_normal_
from vitrail.models.layers import PatchEmbed, drop


class LSTM(Model[LSTMConfig]):
    """An LSTM over the sequence of patches; its last state is the input of the head."""

    order: Tensor
    projection = "patch_embed.proj"
    reads_layers = True

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        c = config
        self.patch_embed = PatchEmbed(
            channels=c.channels, width=c.width, patch=c.patch, stride=c.step, padding=c.padding
        )
        inputs = [c.width, *(c.directions * c.hidden for _ in range(c.depth - 1))]
        # One nn.LSTM per layer, so that the output of each layer can be recorded.
        self.layers = nn.ModuleList(
            nn.LSTM(size, c.hidden, batch_first=True, bidirectional=c.bidirectional) for size in inputs
        )
        self.head = self.make_head(c.directions * c.hidden)
        self.initialise()
        self.fill_tables()

    def forward(self, images_BCHW: Tensor, activations: Activations | None = None) -> Tensor:
        self._check_images(images_BCHW)
        x_BND = self.patch_embed(images_BCHW, activations)[:, self.order]
        for layer, recurrent in enumerate(self.layers):
            if layer:
                x_BND = drop(x_BND, self.config.dropout, self.training)
            x_BND, (last_LBS, _) = recurrent(x_BND)
            if activations is not None:
                activations.record_output(layer, x_BND)
        return self._classify(last_LBS.transpose(0, 1).flatten(1), activations)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise input weights by Xavier, recurrent weights as orthogonal matrices, and the bias of forget gates by
        1 (Jozefowicz et al. 2015)."""
        lecun_normal_(self.patch_embed.proj)
        for name, parameter in self.layers.named_parameters():
            leaf = name.rpartition(".")[2]
            if leaf.startswith("bias"):
                nn.init.zeros_(parameter)
                if leaf.startswith("bias_ih"):
                    # The order of the gates is input, forget, cell, output.
                    parameter[self.config.hidden : 2 * self.config.hidden] = 1
                continue
            for gate in parameter.chunk(4):
                if leaf.startswith("weight_ih"):
                    nn.init.xavier_uniform_(gate)
                else:
                    gate.copy_(nn.init.orthogonal_(torch.empty_like(gate, dtype=torch.float32)))
        self.zero_head()

    def read(self, z_BTD: Tensor, activations: Activations | None = None) -> Tensor:
        """Compute logits from the states of any layer."""
        return self._classify(self.pool(z_BTD), activations)

    def pool(self, output: Tensor) -> Tensor:
        """The last state of each direction."""
        size = self.config.hidden
        last_states = [output[:, -1, :size], *([output[:, 0, size:]] if self.config.bidirectional else [])]
        return torch.cat(last_states, dim=1)

    def in_raster_order(self, tokens_BND: Tensor) -> Tensor:
        return tokens_BND[:, self.order.argsort()]

    def make_tables(self) -> dict[str, Tensor | None]:
        """Return the order in which the patches are read."""
        return {"order": sequence_order(self.config.order, self.config.grid, self.config.order_seed)}


def sequence_order(name: str, grid: Pair, seed: int = 0) -> Tensor:
    """Return the raster indices of the patches in reading order (N,), for a value of the setting `order`."""
    raster = torch.arange(grid[0] * grid[1], device="cpu").reshape(grid)
    match name:
        case "raster":
            order = raster
        case "reversed":
            order = raster.flip((0, 1))
        case "column":
            order = raster.T
        case "snake":
            order = raster.clone()
            order[1::2] = order[1::2].flip(1)
        case "random" | "random-reversed":
            # Python guarantees this sequence in all versions: a saved model must read in the order of its training.
            generator = random.Random(seed)
            keys = array("d", (generator.random() for _ in range(raster.numel())))
            order = torch.frombuffer(keys, dtype=torch.float64).argsort(stable=True)
            order = order.flip(0) if name == "random-reversed" else order
        case _:
            raise ValueError(name)
    return order.flatten()
