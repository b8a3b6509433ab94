"""Show the final evaluation of a face embedding in the run report."""

from vitrail.core.message_files import load_messages
from vitrail.reports.translations import translator
from vitrail.training.objectives.judgement import PairVerification

t = translator(load_messages(__file__))
"""Return a message of the final evaluation in both languages."""


def summary(judgement: PairVerification) -> list[tuple[str, str]]:
    """Return the equal error rate, and the true-accept rate at each false-accept rate that the data can resolve."""
    scores, people = judgement.scores, judgement.scores["people"]
    eer = t("eer", people=people)
    if scores["eer_interval"] is not None:
        low, high = (f"{end:.1%}" for end in scores["eer_interval"])
        eer = t("eer-within", people=people, low=low, high=high)
    rows = [row for row in scores["tar"] if row["tar"] is not None]
    return [
        (eer, f"{scores['eer']:.1%}"),
        *((t("tar", far=f"{row['far']:g}"), f"{row['tar']:.1%}") for row in rows),
    ]
