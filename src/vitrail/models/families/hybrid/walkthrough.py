"""The walkthrough of the hybrid: that of the ViT, on patches of a feature map."""

from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.models.families.vit.walkthrough import ViTWalkthrough
from vitrail.models.walkthrough import WalkthroughStep


class HybridWalkthrough(ViTWalkthrough):
    """A ViT whose patches are features of the stem."""

    messages = ViTWalkthrough.messages | load_messages(__file__)

    def patch_steps(self, activations: Activations, sentence: str = "features") -> list[WalkthroughStep]:
        return super().patch_steps(activations, sentence)
