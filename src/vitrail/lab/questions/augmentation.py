"""Which family needs augmentation and regularisation more? ViT and CNN, few and many images, with and without."""

import functools
from collections.abc import Iterator, Mapping, Sequence

from vitrail.core.message_files import load_messages
from vitrail.lab.question import Verdict
from vitrail.lab.training import shift_augmentation
from vitrail.lab.variant_question import Key, Variant, VariantQuestion

FAMILIES = ("vit", "resnet")


class AugmentationQuestion(VariantQuestion):
    """Compares ViT and CNN under three training variants, at the smallest and the largest number of images.

    The variants add to the protocol: nothing, random shifts, or shifts with Mixup and four times the weight decay.
    """

    messages = load_messages(__file__)
    claims = ("C4",)

    @functools.cached_property
    def variants(self) -> Mapping[str, Variant]:
        shifts = shift_augmentation(self.lab.images.resolution)
        regularised = {"augment": {**shifts, "mixup": 0.2}, "weight_decay": 0.2}
        variants = {}
        for family in FAMILIES:
            plain = f"{family}-plain"
            variants[plain] = Variant(family=family)
            variants[f"{family}-augmented"] = Variant(family=family, against=plain, augment=True)
            variants[f"{family}-regularised"] = Variant(family=family, against=plain, recipe=regularised)
        return variants

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.lab.sizes[0], self.lab.sizes[-1])))

    def stages(self) -> Sequence[Sequence[Key]]:
        decisive = [key for key in self.keys if not key[0].endswith("regularised")]
        return [key for key in decisive if key[1] == self.counts[0]], decisive, self.keys

    def verdicts(self) -> Iterator[Verdict]:
        fewest = self.counts[0]
        terms = [
            (family_sign * variant_sign, (f"{family}-{variant}", fewest))
            for family, family_sign in (("vit", 1.0), ("resnet", -1.0))
            for variant, variant_sign in (("augmented", 1.0), ("plain", -1.0))
        ]
        yield Verdict("C4", "trained", self.accuracies.contrast(*terms), fields={"count": f"{fewest:,}"})
