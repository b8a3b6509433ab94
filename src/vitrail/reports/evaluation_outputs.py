"""What `vitrail evaluate` leaves of each image: a table of answers, a page of mistakes, a comparison with another
model."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from vitrail.bundles.folder import check_folder
from vitrail.bundles.metadata import BundleInfo
from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import check_output
from vitrail.core.html import Html
from vitrail.core.intervals import wilson_interval
from vitrail.data.prefetch import prefetch
from vitrail.data.preprocess import Preprocess
from vitrail.data.thumbnail import thumbnail_data_url
from vitrail.evaluation.metrics import find_doubtful_labels
from vitrail.evaluation.paired import PairedComparison
from vitrail.evaluation.predictions.prediction_tables import PredictionRow, check_table, open_table
from vitrail.evaluation.predictions.saved_predictions import SavedPredictions
from vitrail.evaluation.protocols import SplitEvaluation, evaluate_split
from vitrail.evaluation.splits import note_if_trained_on
from vitrail.inference.engine import Engine
from vitrail.inference.registry import ENGINES
from vitrail.reports.contact_sheet import ON_PAGE, EvaluatedImage, t, write_mistake_pages
from vitrail.reports.page_kit import headline_numbers, table

_BEST = 5  # answers of an image in a table
_CONFUSIONS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOutputs:
    """What is made of the predictions of `evaluate` besides the scores: a table or file of predictions, a page of
    mistakes, and the comparison with another bundle or with saved predictions."""

    output: Path | None = None
    """A table of one of the `FORMATS`, or an .npz file of saved predictions."""
    page: Path | None = None
    """A folder for pages of mistakes."""
    against: str | None = None
    """Name of the other bundle, or of the file of its saved predictions."""
    other: Engine | SavedPredictions | None = None
    """The same, opened."""
    force: bool = False
    """Whether existing outputs are overwritten."""

    @classmethod
    def open(
        cls, *, output: Path | None, page: Path | None, against: str | None, force: bool, device: str | None
    ) -> Self:
        """Refuse what cannot be written, and open what is compared with, before any work is done."""
        if output is not None:
            check_table(output, force=force, others=[".npz"])
        if page is not None:
            check_output(page, force=force)
        other: Engine | SavedPredictions | None = None
        if against is not None and against.lower().endswith(".npz"):
            other = SavedPredictions.read(Path(against))
        elif against is not None:
            other = ENGINES["torch"].open(check_folder(against), device)
        return cls(output=output, page=page, against=against, other=other, force=force)

    def check(self, parts: BundleInfo) -> None:
        """Refuse a bundle that does not predict one class."""
        parts.check_single_label("--output, --page and --against")

    def take(
        self, answered: SplitEvaluation, scores: dict[str, Any], *, model: str, preprocess: Preprocess, workers: int
    ) -> None:
        """Write the predictions of a model, and add the comparison to its scores."""
        if self.against is not None:
            other = self._predictions_of_other(answered, scores, workers)
            scores["against"] = comparison_json(to_saved_predictions(answered).against(other), model, self.against)
        if self.output is not None:
            write_output(answered, self.output, force=self.force)
        if self.page is not None:
            write_mistakes(answered, scores, preprocess, self.page, model=model, workers=workers, force=self.force)

    def _predictions_of_other(
        self, answered: SplitEvaluation, scores: dict[str, Any], workers: int
    ) -> SavedPredictions:
        """The other model's predictions of the same images. A note says if it was trained on them."""
        if not isinstance(self.other, Engine):
            return cast(SavedPredictions, self.other)
        provenance = self.other.info.provenance
        scores["notes"] += note_if_trained_on(answered.dataset, answered.split, provenance, str(self.against))
        try:
            return to_saved_predictions(evaluate_split(self.other, answered.dataset, answered.chosen, workers=workers))
        except UsageError as error:
            raise UsageError(f"--against {self.against}: {error}") from None


def to_saved_predictions(answered: SplitEvaluation) -> SavedPredictions:
    """The answers, to compare them with other models' later."""
    return SavedPredictions.of(
        answered.dataset,
        answered.split,
        answered.answers.indices,
        answered.answers.probabilities,
        answered.place,
    )


def write_output(answered: SplitEvaluation, output: Path, *, force: bool = False) -> None:
    """Write each image's truth and best answers to a table, or all answers to an .npz file."""
    if output.suffix.lower() == ".npz":
        to_saved_predictions(answered).write(output, force=force)
        return
    best = min(_BEST, len(answered.names))
    with open_table(output, best=best, truth=True, force=force) as rows:
        for row in _rows(answered, best):
            rows.add(row)


def _rows(answered: SplitEvaluation, best: int) -> Iterator[PredictionRow]:
    for index, truth, probabilities in zip(*answered.answers, strict=True):
        chosen = np.argsort(-probabilities, kind="stable")[:best]
        named = [{"label": answered.names[place], "score": float(probabilities[place])} for place in chosen]
        yield {"file": answered.split.image_name(int(index)), "truth": answered.names[truth], "predictions": named}


def comparison_json(paired: PairedComparison, one: str, other: str) -> dict[str, Any]:
    """A comparison as JSON."""
    right = [round(share * paired.count) for share in paired.accuracies]
    return {
        "bundle": other,
        "accuracy": paired.accuracies[1],
        "accuracy_interval": list(wilson_interval(right[1], paired.count)),
        "only_this": paired.one,
        "only_other": paired.other,
        "p_value": paired.p_value,
        "sentence": paired.sentence(one, other),
    }


def write_mistakes(
    answered: SplitEvaluation,
    scores: dict[str, Any],
    preprocess: Preprocess,
    output: Path,
    *,
    model: str,
    workers: int = 2,
    force: bool = False,
) -> None:
    """Write a page of mistakes: likely wrong labels first, then the most certain; all of them."""
    answers, split, names = answered.answers, answered.split, answered.names
    probabilities, rows = answers.probabilities, np.arange(len(answers.labels))
    said = probabilities.argmax(axis=1)
    score, own = probabilities[rows, said], probabilities[rows, answers.labels]
    is_doubtful = find_doubtful_labels(probabilities, answers.labels)

    def judged(chosen: np.ndarray) -> list[EvaluatedImage]:
        return [
            EvaluatedImage(
                index=int(answers.indices[row]),
                name=split.image_name(int(answers.indices[row])),
                truth=names[answers.labels[row]],
                answer=names[said[row]],
                score=float(score[row]),
                own=float(own[row]),
                is_doubtful=bool(is_doubtful[row]),
            )
            for row in chosen
        ]

    def thumbnails(some: Sequence[EvaluatedImage]) -> Iterator[str]:
        jobs = (partial(_thumbnail, preprocess, split.images[one.index]) for one in some)
        return prefetch(jobs, workers, ahead=8 * max(workers, 1))

    wrong, right = np.flatnonzero(said != answers.labels), np.flatnonzero(said == answers.labels)
    write_mistake_pages(
        output,
        model,
        about=f"{scores['data']} ({scores['split']})",
        summary=_summary(scores, len(wrong)),
        confusions=_confusions(scores, names),
        mistakes=judged(wrong[np.lexsort((-score[wrong], ~is_doubtful[wrong]))]),
        right=judged(right[np.argsort(score[right], kind="stable")][:ON_PAGE]),
        thumbnails=thumbnails,
        force=force,
    )


def _thumbnail(preprocess: Preprocess, image: str | np.ndarray) -> str:
    try:
        return thumbnail_data_url(preprocess.crop(image))
    except CorruptFileError:  # it was readable when it was evaluated
        return ""


def _summary(scores: dict[str, Any], wrong: int) -> Html:
    low, high = scores["accuracy_interval"]
    about = t("accuracy", count=scores["count"], split=scores["split"], low=f"{low:.1%}", high=f"{high:.1%}")
    return headline_numbers(
        [
            (about, f"{scores['accuracy']:.1%}"),
            (t("mistakes"), f"{wrong:,}"),
        ]
    )


def _confusions(scores: dict[str, Any], names: Sequence[str]) -> Html:
    if scores["confusion"] is None or scores["accuracy"] == 1:
        return Html("")
    confusion = np.array(scores["confusion"])
    counts = confusion.sum(axis=1)
    np.fill_diagonal(confusion, 0)
    found = np.argsort(-confusion, axis=None, kind="stable")[:_CONFUSIONS]
    pairs = zip(*(one.tolist() for one in np.unravel_index(found, confusion.shape)), strict=True)
    rows = [
        (names[true], names[said], f"{confusion[true, said]:,}", f"{confusion[true, said] / counts[true]:.1%}")
        for true, said in pairs
        if confusion[true, said]
    ]
    heads = [t(name) for name in ("is", "answer", "times", "of-class")]
    return Html(f"<h2>{t('confused')}</h2>{table(heads, rows, frozenset({2, 3}))}")
