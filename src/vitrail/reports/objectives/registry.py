"""Functions that show the final evaluation of a run in its report, by the type of the `Judgement`.

A package whose objective returns its own type of `Judgement` registers functions with `summary.register` and
`sections.register`. Without them, the report shows only `Judgement.summary`.
"""

import functools

from vitrail.reports.objectives import classification, labelling, verification
from vitrail.training.objectives.judgement import Classification, Judgement, Labelling, PairVerification


@functools.singledispatch
def summary(judgement: Judgement) -> list[tuple[str, str]]:
    """Return the headline numbers of the final evaluation, as pairs of caption and number."""
    return list(judgement.summary)


@functools.singledispatch
def sections(judgement: Judgement) -> str:
    """Return the sections of the report about the final evaluation, as HTML."""
    return ""


summary.register(Classification, classification.summary)
summary.register(Labelling, labelling.summary)
summary.register(PairVerification, verification.summary)
sections.register(Classification, classification.sections)
sections.register(Labelling, labelling.sections)
