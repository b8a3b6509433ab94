"""The questions of the bias lab by name. Another package adds one as `question.NAME`."""

from typing import TYPE_CHECKING

from vitrail.core.registry import Registry

if TYPE_CHECKING:
    from vitrail.lab.question import Question

QUESTIONS: "Registry[type[Question]]" = Registry(
    "question",
    {
        "data": "vitrail.lab.questions.data:Data",
        "augmentation": "vitrail.lab.questions.augmentation:Augmentation",
        "size": "vitrail.lab.questions.size:Size",
        "position": "vitrail.lab.questions.position:Position",
        "neighbourhood": "vitrail.lab.questions.neighbourhood:Neighbourhood",
        "translation": "vitrail.lab.questions.translation:Translation",
        "locality": "vitrail.lab.questions.locality:Locality",
        "robustness": "vitrail.lab.questions.robustness:Robustness",
        "range": "vitrail.lab.questions.range:Range",
        "order": "vitrail.lab.questions.order:Order",
        "encoder": "vitrail.lab.questions.encoder:Encoder",
        "compute": "vitrail.lab.questions.compute:Compute",
        "cost": "vitrail.lab.questions.cost:Cost",
        "transfer": "vitrail.lab.questions.transfer:Transfer",
        "self": "vitrail.lab.questions.self_supervision:SelfSupervision",
    },
    base="vitrail.lab.question:Question",
)

FAMILIES = ("vit", "hybrid", "resnet", "mixer", "lstm", "mlp")
"""The families that are compared unless others are asked for."""
