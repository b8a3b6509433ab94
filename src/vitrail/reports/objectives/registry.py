"""How the report shows the final evaluation of a run: by the type of its result.

A package whose objective returns a `Judgement` of its own type registers functions for that type with
`summary.register` and `sections.register`. Without them the report shows the names and numbers of `Judgement.summary`.
"""

import functools

from vitrail.reports.objectives import classification, labelling, verification
from vitrail.training.objectives.judgement import Classification, Judgement, Labelling, PairVerification


@functools.singledispatch
def summary(judgement: Judgement) -> list[tuple[str, str]]:
    """The main numbers of the final evaluation: names and values."""
    return list(judgement.summary)


@functools.singledispatch
def sections(judgement: Judgement) -> str:
    """Sections of the report about the final evaluation, as HTML."""
    return ""


summary.register(Classification, classification.summary)
summary.register(Labelling, labelling.summary)
summary.register(PairVerification, verification.summary)
sections.register(Classification, classification.sections)
sections.register(Labelling, labelling.sections)
