"""Changes to the weights of the Transformer on pixels."""

import torch
from torch import Tensor

from vitrail.models.families.igpt.model import IGPT
from vitrail.models.surgery import Surgery


class IGPTSurgery(Surgery[IGPT]):
    """Changes to an iGPT. Without a causal mask, only the position embeddings depend on the order of the pixels."""

    @torch.no_grad()
    def permute_input_weights(self, order: Tensor) -> bool:
        """Permute the position embeddings. A causal model supports no permutation."""
        model = self.model
        if model.mask is not None or model.config.output == "pixels":
            return False
        model.pos_embed.copy_(model.pos_embed[:, order.to(model.pos_embed.device)])
        return True

    @property
    def new_head_notes(self) -> list[str]:
        if self.model.config.output == "classes":
            return super().new_head_notes
        return [*super().new_head_notes, "the start token is dropped and positions shift by one"]
