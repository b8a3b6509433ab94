"""Optional outputs of `vitrail evaluate`: table of predictions, pages of mistakes, comparison with another model."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
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
from vitrail.data.corrections import relative_name
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
from vitrail.reports.contact_sheet import IMAGES_PER_PAGE, EvaluatedImage, t, write_mistake_pages
from vitrail.reports.corrections import Correctable, CorrectionControls, photo_link, storage_key
from vitrail.reports.page_kit import headline_numbers, table

_TOP_K = 5  # classes of an image in the table of predictions
_MAX_CONFUSIONS = 20  # pairs of classes on the page


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOutputs:
    """Outputs of `evaluate` that the user asked for besides the scores."""

    output: Path | None = None
    """File for a table of predictions, in one of the `FORMATS`, or .npz for saved predictions."""
    page: Path | None = None
    """Folder for pages of mistakes."""
    against: str | None = None
    """Bundle, or .npz file of saved predictions, to compare with."""
    other: Engine | SavedPredictions | None = None
    """The opened bundle or file `against`."""
    force: bool = False
    """Whether existing outputs are overwritten."""

    @classmethod
    def open(
        cls, *, output: Path | None, page: Path | None, against: str | None, force: bool, device: str | None
    ) -> Self:
        """Open the other model before anything is computed. Raise UsageError if an output cannot be written."""
        if output is not None:
            check_table(output, force=force, other_endings=[".npz"])
        if page is not None:
            check_output(page, force=force)
        other: Engine | SavedPredictions | None = None
        if against is not None and against.lower().endswith(".npz"):
            other = SavedPredictions.read(Path(against))
        elif against is not None:
            other = ENGINES["torch"].open(check_folder(against), device)
        return cls(output=output, page=page, against=against, other=other, force=force)

    def check(self, info: BundleInfo) -> None:
        """Raise UsageError for a bundle that does not predict one class."""
        info.check_single_label("--output, --page and --against")

    def write(
        self, evaluation: SplitEvaluation, scores: dict[str, Any], *, model: str, preprocess: Preprocess, workers: int
    ) -> None:
        """Write the outputs. Add the comparison with the other model to `scores`, as "against"."""
        if self.against is not None:
            other = self._predictions_of_other(evaluation, scores, workers)
            scores["against"] = comparison_json(to_saved_predictions(evaluation).compare(other), model, self.against)
        if self.output is not None:
            write_output(evaluation, self.output, force=self.force)
        if self.page is not None:
            write_mistakes(evaluation, scores, preprocess, self.page, model=model, workers=workers, force=self.force)

    def _predictions_of_other(
        self, evaluation: SplitEvaluation, scores: dict[str, Any], workers: int
    ) -> SavedPredictions:
        """Return the other model's predictions for the same images. Note in `scores` if it was trained on them."""
        if not isinstance(self.other, Engine):
            return cast(SavedPredictions, self.other)
        provenance = self.other.info.provenance
        scores["notes"] += note_if_trained_on(evaluation.dataset, evaluation.split, provenance, str(self.against))
        try:
            return to_saved_predictions(
                evaluate_split(self.other, evaluation.dataset, evaluation.evaluation_split, workers=workers)
            )
        except UsageError as error:
            raise UsageError(f"--against {self.against}: {error}") from None


def to_saved_predictions(evaluation: SplitEvaluation) -> SavedPredictions:
    """Return the predictions in the form that is saved and compared with other models."""
    return SavedPredictions.of(
        evaluation.dataset,
        evaluation.split,
        evaluation.predictions.indices,
        evaluation.predictions.probabilities,
        evaluation.class_indices,
    )


def write_output(evaluation: SplitEvaluation, output: Path, *, force: bool = False) -> None:
    """Write the true class and the top classes of each image to a table, or all probabilities to an .npz file."""
    if output.suffix.lower() == ".npz":
        to_saved_predictions(evaluation).write(output, force=force)
        return
    top_k = min(_TOP_K, len(evaluation.names))
    with open_table(output, top_k=top_k, has_truth=True, force=force) as table_file:
        for row in _prediction_rows(evaluation, top_k):
            table_file.add(row)


def _prediction_rows(evaluation: SplitEvaluation, top_k: int) -> Iterator[PredictionRow]:
    """Yield one table row per image, with its `top_k` most probable classes."""
    names = evaluation.names
    for index, truth, probabilities in zip(*evaluation.predictions, strict=True):
        classes = np.argsort(-probabilities, kind="stable")[:top_k]
        predictions = [{"label": names[label], "score": float(probabilities[label])} for label in classes]
        yield {"file": evaluation.split.image_name(int(index)), "truth": names[truth], "predictions": predictions}


def comparison_json(paired: PairedComparison, model: str, other: str) -> dict[str, Any]:
    """Return a comparison of two models as JSON. `model` and `other` are their names."""
    correct = [round(share * paired.count) for share in paired.accuracies]
    return {
        "bundle": other,
        "accuracy": paired.accuracies[1],
        "accuracy_interval": list(wilson_interval(correct[1], paired.count)),
        "only_this": paired.only_first,
        "only_other": paired.only_second,
        "p_value": paired.p_value,
        "sentence": paired.sentence(model, other),
    }


def write_mistakes(
    evaluation: SplitEvaluation,
    scores: dict[str, Any],
    preprocess: Preprocess,
    output: Path,
    *,
    model: str,
    workers: int = 2,
    force: bool = False,
) -> None:
    """Write pages of all mistakes to the folder `output`.

    Images whose label is likely wrong come first, then the most confident mistakes. The least certain correct
    predictions follow on a page of their own.
    """
    predictions, split, names = evaluation.predictions, evaluation.split, evaluation.names
    probabilities, labels, rows = predictions.probabilities, predictions.labels, np.arange(len(predictions.labels))
    predicted = probabilities.argmax(axis=1)
    confidence, truth_probability = probabilities[rows, predicted], probabilities[rows, labels]
    is_doubtful = find_doubtful_labels(probabilities, labels)

    def evaluated_images(rows: np.ndarray) -> list[EvaluatedImage]:
        """Return the images with these row indices of the predictions, with all that their tiles show."""
        return [
            EvaluatedImage(
                index=int(predictions.indices[row]),
                name=split.image_name(int(predictions.indices[row])),
                photo=photo_link(split.images[predictions.indices[row]], output),
                correctable=_correctable(evaluation, int(predictions.indices[row]), int(predicted[row])),
                truth=names[labels[row]],
                prediction=names[predicted[row]],
                confidence=float(confidence[row]),
                truth_probability=float(truth_probability[row]),
                is_doubtful=bool(is_doubtful[row]),
            )
            for row in rows
        ]

    def thumbnails(images: Sequence[EvaluatedImage]) -> Iterator[str]:
        """Yield the thumbnails of images in their order, made by threads."""
        jobs = (partial(_thumbnail, preprocess, split.images[image.index]) for image in images)
        return prefetch(jobs, workers, ahead=8 * max(workers, 1))

    wrong, correct = np.flatnonzero(predicted != labels), np.flatnonzero(predicted == labels)
    mistakes = evaluated_images(wrong[np.lexsort((-confidence[wrong], ~is_doubtful[wrong]))])
    write_mistake_pages(
        output,
        model,
        about=f"{scores['data']} ({scores['split']})",
        summary=_score_summary(scores, len(wrong)),
        confusions=_confusion_table(scores, names),
        mistakes=mistakes,
        correct=evaluated_images(correct[np.argsort(confidence[correct], kind="stable")][:IMAGES_PER_PAGE]),
        thumbnails=thumbnails,
        controls=_correction_controls(evaluation, [model, *(image.name for image in mistakes)]),
        force=force,
    )


def _correctable(evaluation: SplitEvaluation, index: int, predicted: int) -> Correctable:
    """Return how the label of an image can be corrected, with the class that is predicted for it."""
    dataset, split = evaluation.dataset, evaluation.split
    if split.in_memory is None:
        name = relative_name(str(split.images[index]), dataset.root)
    else:  # held-out images, and those after an image that was left out, have other indices than in the arrays
        is_complete = dataset.corrections is None or not dataset.corrections.left_out
        name = split.image_name(index) if is_complete and split.name in dataset.splits else ""
    guesses = np.flatnonzero(evaluation.class_indices == predicted)
    guess = dataset.labels[guesses[0]] if len(guesses) else ""
    return Correctable(name=name, label=dataset.labels[split.labels[index]], guess=guess)


def _correction_controls(evaluation: SplitEvaluation, texts: Iterable[str]) -> CorrectionControls:
    """Return the controls of pages with these texts. The labels to choose from are the classes of the data."""
    selectable_labels = []
    for label, class_index in zip(evaluation.dataset.labels, evaluation.class_indices, strict=True):
        name = evaluation.names[class_index]
        selectable_labels.append((label, label if label == name else f"{name} ({label})"))
    corrections = evaluation.dataset.corrections
    previous = {} if corrections is None else corrections.rows
    return CorrectionControls(selectable_labels=selectable_labels, key=storage_key(texts), previous=previous)


def _thumbnail(preprocess: Preprocess, image: str | np.ndarray) -> str:
    """Return the data URL of an image, or an empty string if its file became unreadable after the evaluation."""
    try:
        return thumbnail_data_url(preprocess.crop(image))
    except CorruptFileError:
        return ""


def _score_summary(scores: dict[str, Any], mistake_count: int) -> Html:
    """Return accuracy and number of mistakes as headline numbers."""
    low, high = scores["accuracy_interval"]
    caption = t("accuracy", count=scores["count"], split=scores["split"], low=f"{low:.1%}", high=f"{high:.1%}")
    return headline_numbers([(caption, f"{scores['accuracy']:.1%}"), (t("mistakes"), f"{mistake_count:,}")])


def _confusion_table(scores: dict[str, Any], names: Sequence[str]) -> Html:
    """Return a table of the most frequent pairs of true and predicted class. Empty if there are no mistakes."""
    if scores["confusion"] is None or scores["accuracy"] == 1:
        return Html("")
    confusion = np.array(scores["confusion"])
    class_counts = confusion.sum(axis=1)
    np.fill_diagonal(confusion, 0)
    largest = np.argsort(-confusion, axis=None, kind="stable")[:_MAX_CONFUSIONS]
    truths, predictions = np.unravel_index(largest, confusion.shape)
    rows = [
        (names[truth], names[predicted], f"{count:,}", f"{count / class_counts[truth]:.1%}")
        for truth, predicted in zip(truths.tolist(), predictions.tolist(), strict=True)
        if (count := confusion[truth, predicted])
    ]
    headers = [t(name) for name in ("is", "prediction", "times", "of-class")]
    return Html(f"<h2>{t('confused')}</h2>{table(headers, rows, numeric=frozenset({2, 3}))}")
