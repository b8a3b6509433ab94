"""The final evaluation of an embedding of faces in the report."""

from vitrail.core.message_files import load_messages
from vitrail.reports.translations import translator
from vitrail.training.objectives.judgement import PairVerification

t = translator(load_messages(__file__))
"""A sentence of the final evaluation, in both languages."""


def summary(judgement: PairVerification) -> list[tuple[str, str]]:
    """The equal error rate, and the pairs accepted at each false-accept rate that the data can support."""
    scores, people = judgement.scores, judgement.scores["people"]
    eer = t("eer", people=people)
    if scores["eer_interval"] is not None:
        low, high = (f"{end:.1%}" for end in scores["eer_interval"])
        eer = t("eer-within", people=people, low=low, high=high)
    accepted = [row for row in scores["tar"] if row["tar"] is not None]
    return [
        (eer, f"{scores['eer']:.1%}"),
        *((t("tar", far=f"{row['far']:g}"), f"{row['tar']:.1%}") for row in accepted),
    ]
