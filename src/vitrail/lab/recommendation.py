"""One recommendation for images like these, from the differences that the lab decided.

Every family is compared with every other at the largest number of training images, and ViT and CNN with and without
augmentation. All these intervals hold together with 95 % (Bonferroni), so that the best family may be picked after
looking. A difference counts only by the rules of a verdict, also that no plausible learning rate changes its sign.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.lab.question import Question, Verdict
from vitrail.lab.statistics import LEVEL, Estimate
from vitrail.lab.variant_question import VariantQuestion
from vitrail.reports.translations import in_language, translator

MESSAGES = load_messages(__file__)
t = translator(MESSAGES)
"""Return a message in both languages."""


class Advice(NamedTuple):
    """A sentence of the recommendation."""

    name: str
    """Name of its message."""
    fields: dict[str, Any]

    def text(self, language: str) -> str:
        """Return the sentence in one language."""
        return in_language(self.html(), language)

    def html(self, tag: str = "span") -> Html:
        """Return the sentence in both languages."""
        return t(self.name, tag, **self.fields)


def recommend(questions: Mapping[str, Question]) -> list[Advice]:
    """Return the sentences of the recommendation. Empty if no difference is decided."""
    data = questions.get("data")
    if not isinstance(data, VariantQuestion):
        return []
    count = data.counts[-1]
    families = [name for name in data.lab.families if (name, count) in data.accuracies]
    families.sort(key=lambda name: -data.accuracies.estimate((name, count)).value)
    leads = {pair: data.lead(*pair, count) for pair in itertools.combinations(families, 2)}
    gains = _augmentation_gains(questions, count)
    comparisons = [estimate for estimate in (*leads.values(), *gains.values()) if _has_error(estimate)]
    level = LEVEL / max(len(comparisons), 1)
    advice = [
        *_best_family(families, leads, level, count),
        *_transformer(leads, level),
        *_augmentation(gains, families, level),
    ]
    if not advice:
        return []
    macs = f"{data.lab.images.matched_config('vit').macs / 1e6:.2g}"
    return [*advice, Advice("caveat", {"macs": macs, "seen": f"{data.lab.seen:,}", "count": f"{count:,}"})]


def _has_error(estimate: Estimate | None) -> bool:
    return estimate is not None and not math.isnan(estimate.error)


def _sign(estimate: Estimate | None, level: float) -> int:
    """Return the sign of a difference: 1 or -1 if it is decided, otherwise 0."""
    state = Verdict("", "trained", estimate).state(level)
    return {"supported": 1, "contradicted": -1}.get(state, 0)


def _names(families: Sequence[str]) -> Html:
    """Return the names of families in both languages, separated by commas."""
    return Html(", ".join(t(name) if name in MESSAGES else escape(name) for name in families))


def _evidence(estimate: Estimate | None, level: float, sign: int = 1) -> dict[str, str]:
    """Return a difference with its interval as fields of a message. A sign of -1 turns it round."""
    assert estimate is not None
    ends = sorted(sign * end for end in estimate.interval(level))
    values = (sign * estimate.value, *ends)
    return {name: f"{100 * value:.1f}" for name, value in zip(("lead", "low", "high"), values, strict=True)}


def _best_family(
    families: Sequence[str], leads: Mapping[tuple[str, str], Estimate | None], level: float, count: int
) -> list[Advice]:
    """Return the family with the highest accuracy, with those it cannot be told from, if it is ahead of any other."""
    best, others = families[:1], families[1:]
    behind = [other for other in others if _sign(leads[best[0], other], level) > 0]
    tied = [other for other in others if other not in behind]
    if not behind:
        return []
    evidence = _evidence(leads[best[0], behind[0]], level)
    fields = {"count": f"{count:,}", "best": _names(best), "behind": _names(behind), "nearest": _names(behind[:1])}
    return [Advice("best-tied" if tied else "best", fields | evidence | {"tied": _names(tied)})]


def _transformer(leads: Mapping[tuple[str, str], Estimate | None], level: float) -> list[Advice]:
    """Return which of hybrid and ViT is ahead."""
    for pair in (("hybrid", "vit"), ("vit", "hybrid")):
        if _sign(leads.get(pair), level) > 0:
            return [Advice(f"{pair[0]}-ahead", _evidence(leads[pair], level))]
    return []


def _augmentation_gains(questions: Mapping[str, Question], count: int) -> dict[str, Estimate | None]:
    """Return what ViT and CNN gain by random shifts."""
    question = questions.get("augmentation")
    if not isinstance(question, VariantQuestion) or count not in question.counts:
        return {}
    return {name: question.gain(f"{name}-augmented", count) for name in question.lab.selected(("vit", "resnet"))}


def _augmentation(gains: Mapping[str, Estimate | None], families: Sequence[str], level: float) -> list[Advice]:
    """Return whether augmentation helps the best family. If that one was not run with it, ViT and CNN."""
    names = families[:1] if families and families[0] in gains else list(gains)
    signs = {name: _sign(gains[name], level) for name in names}
    return [
        Advice(
            "augmentation-helps" if sign > 0 else "augmentation-hurts",
            {"family": _names([name]), **_evidence(gains[name], level, sign)},
        )
        for name, sign in signs.items()
        if sign
    ]
