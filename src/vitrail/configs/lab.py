"""The questions of the bias lab by name. Another package adds one as `question.NAME`."""

from typing import TYPE_CHECKING

from vitrail.extensions import Registry

if TYPE_CHECKING:
    from vitrail.lab.question import Question

QUESTIONS: "Registry[type[Question]]" = Registry(
    "question",
    {
        "data": "vitrail.lab.questions.data:Data",
        "position": "vitrail.lab.questions.position:Position",
    },
)

FAMILIES = ("vit", "hybrid", "resnet", "mixer", "lstm", "mlp")
"""The families that are compared unless others are asked for."""
