"""Changes to the weights of a Vision Transformer."""

import torch
from torch import Tensor

from vitrail.models.families.vit.model import ViT
from vitrail.models.surgery import Surgery, permute_kernels, split_order


class ViTSurgery(Surgery[ViT]):
    """Changes to a ViT, in which only the position embeddings depend on the order of the patches."""

    def permute_input_weights(self, order: Tensor) -> bool:
        """Permute the projection and the position embeddings. `order` may move pixels within patches, the same way in
        every patch, and patches if the position embeddings can be permuted."""
        model, c = self.model, self.model.config
        reads_pixels = bool(model.projection) and model.patch_embed.is_plain
        if not reads_pixels or (orders := split_order(order, c.resolution, c.patch)) is None:
            return False
        patches, inside = orders
        moves_patches = not torch.equal(patches, torch.arange(c.patches))
        if moves_patches and not (c.attention == "global" and model.position.permute_patches(model, patches)):
            return False
        permute_kernels(model.patch_embed, inside)
        return True

    @torch.no_grad()
    def with_mean_pooling(self) -> tuple[ViT, str | None]:
        """Return a model whose head reads the mean of the patches. [CLS] becomes a register that contains its position:
        patches attend to it, so without it their values would change."""
        model, c = self.model, self.model.config
        added_TD = model.position.added(model, 0)
        if c.pool != "cls" or (added_TD is not None and c.placement != "once"):
            return model, None
        tensors = model.position.without_class(model.state_dict())
        token_11D = tensors.pop("cls_token")
        if added_TD is not None:
            token_11D = token_11D + added_TD[:1]
        registers = [tensors["reg_token"]] if c.registers else []
        tensors["reg_token"] = torch.cat([token_11D, *registers], dim=1)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head_dist.")}
        pooled = model.clone_with(tensors, pool="gap", registers=c.registers + 1, distilled=False)
        return pooled, "the head reads the mean of the patches in place of [CLS], which stays as a register"

    @property
    def new_head_notes(self) -> list[str]:
        if self.model.config.representation == "none":
            return super().new_head_notes
        return [*super().new_head_notes, "the hidden layer of the pre-training head is dropped"]

    @property
    def resize_note(self) -> str:
        model = self.model
        return f"positions interpolated by the rule of {model.config.resize_rule}" if model.position.learned else ""
