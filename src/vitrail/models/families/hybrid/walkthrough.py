"""The walkthrough of the hybrid: the walkthrough of the ViT, on patches of a feature map."""

from vitrail.core.message_files import load_messages
from vitrail.models.activations import Activations
from vitrail.models.families.vit.walkthrough import ViTWalkthrough
from vitrail.models.walkthrough import WalkthroughStep


class HybridWalkthrough(ViTWalkthrough):
    """The steps of a ViT whose patches have features of the stem instead of pixels."""

    messages = ViTWalkthrough.messages | load_messages(__file__)

    def patch_steps(self, activations: Activations, sentence: str = "features") -> list[WalkthroughStep]:
        return super().patch_steps(activations, sentence)
