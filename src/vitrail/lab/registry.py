"""Registry of the questions of the bias lab. Other packages add entry points `question.NAME`."""

from typing import TYPE_CHECKING

from vitrail.core.registry import Registry

if TYPE_CHECKING:
    from vitrail.lab.question import Question

QUESTIONS: "Registry[type[Question]]" = Registry(
    "question",
    {
        "data": "vitrail.lab.questions.data:DataQuestion",
        "augmentation": "vitrail.lab.questions.augmentation:AugmentationQuestion",
        "size": "vitrail.lab.questions.size:SizeQuestion",
        "position": "vitrail.lab.questions.position:PositionQuestion",
        "neighbourhood": "vitrail.lab.questions.neighbourhood:NeighbourhoodQuestion",
        "translation": "vitrail.lab.questions.translation:TranslationQuestion",
        "locality": "vitrail.lab.questions.locality:LocalityQuestion",
        "robustness": "vitrail.lab.questions.robustness:RobustnessQuestion",
        "range": "vitrail.lab.questions.range:RangeQuestion",
        "order": "vitrail.lab.questions.order:OrderQuestion",
        "encoder": "vitrail.lab.questions.encoder:EncoderQuestion",
        "compute": "vitrail.lab.questions.compute:ComputeQuestion",
        "cost": "vitrail.lab.questions.cost:CostQuestion",
        "transfer": "vitrail.lab.questions.transfer:TransferQuestion",
        "self": "vitrail.lab.questions.self_supervision:SelfSupervisionQuestion",
    },
    base="vitrail.lab.question:Question",
)

FAMILIES = ("vit", "hybrid", "resnet", "mixer", "lstm", "mlp")
"""Families compared by default."""
