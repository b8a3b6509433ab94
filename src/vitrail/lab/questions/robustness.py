"""How robust are models to perturbed images? Shuffled blocks, dropped patches, filtered frequencies."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.lab import perturbations
from vitrail.lab.images import Images
from vitrail.lab.measurements import MeasuredValues, measurement_trial, open_model, read_test_images
from vitrail.lab.question import COLOURS, FIRST_SEEDS, Question, interval_text, percent_interval
from vitrail.lab.trial import Outcome, Trial, pack, unpack
from vitrail.lab.trial_results import Results
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

_MAX_IMAGES = 2000  # test images


class RobustnessQuestion(Question):
    """Measures accuracy on perturbed test images of models trained on unperturbed images. It has no claims."""

    messages = load_messages(__file__)

    @functools.cached_property
    def trials(self) -> dict[str, list[Trial]]:
        """Measurements of each family at the largest size, one per seed."""
        count = self.lab.sizes[-1]
        passes = (len(_perturbations(self.lab.images)) + 1) * min(_MAX_IMAGES, len(self.lab.images.test))
        return {
            family: [
                measurement_trial(
                    "vitrail.lab.questions.robustness:measure",
                    self.lab.train(family, count=count, seed=seed),
                    passes,
                )
                for seed in range(self.lab.seeds)
            ]
            for family in self.lab.families
        }

    def rounds(self) -> Sequence[Sequence[Trial]]:
        first = [name for name in ("vit", "resnet") if name in self.trials]
        return (
            [trial for family in first for trial in self.trials[family][:FIRST_SEEDS]],
            [trial for family_trials in self.trials.values() for trial in family_trials[:FIRST_SEEDS]],
            [trial for family_trials in self.trials.values() for trial in family_trials],
        )

    def read(self, results: Results) -> None:
        self.names = ["", *_perturbations(self.lab.images)]
        self.accuracies = {
            name: MeasuredValues(results, self.trials, functools.partial(_read_right, name)) for name in self.names
        }

    @property
    def _finished_families(self) -> list[str]:
        return [name for name in self.lab.families if name in self.accuracies[""]]

    def figures(self) -> Iterator[tuple[str, str]]:
        for kind in perturbations.CURVES if self._finished_families else ():
            points = perturbations.curve_points(kind, self.names)
            lines = []
            for family in self._finished_families:
                estimates = [self.accuracies[name].estimate(family) for _, name in points]
                values = [100 * estimate.value for estimate in estimates]
                colour = COLOURS.get(family, 7)
                lines.append(
                    Line(
                        family_label(family),
                        [x for x, _ in points],
                        values,
                        colour,
                        bars=[percent_interval(estimate) for estimate in estimates],
                    )
                )
            x_label, y_label = self.t(kind, "tspan"), self.t("accuracy", "tspan")
            yield f"robustness-{kind}", line_chart(lines, x_label, y_label, dots=True, log_x=kind == "shuffle")

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.t("nothing", "p"))
        note = self.t("note", count=f"{self.lab.sizes[-1]:,}", seeds=self.accuracies[""].seeds)
        panes = "".join(figure(self.t(f"{name}-title"), note, svg) for name, svg in figures.items())
        labels = [(self.t("unchanged"), "")]
        for kind in perturbations.CURVES:
            labels += [
                (Html(f"{self.t(kind)}: {x:g}"), name)
                for x, name in perturbations.curve_points(kind, self.names)
                if name
            ]
        rows = [
            [label, *(interval_text(self.accuracies[name].estimate(family)) for family in self._finished_families)]
            for label, name in labels
        ]
        accuracy_table = table(
            ["", *self._finished_families], rows, frozenset(range(1, len(self._finished_families) + 1))
        )
        return f'<div class="panes">{panes}</div>{accuracy_table}'

    def numbers(self) -> dict[str, Any]:
        return {
            name or "unchanged": {
                family: list(self.accuracies[name].estimate(family)[:2]) for family in self._finished_families
            }
            for name in self.names
        }


def _read_right(name: str, result: dict[str, Any]) -> np.ndarray:
    return unpack(result["right"][name], result["count"])


def _perturbations(images: Images) -> dict[str, perturbations.Perturbation]:
    """Return the perturbations of the lab's images. Dropped patches are those of the lab's ViT."""
    grid = images.config(images.size, "vit").grid or (1, 1)
    return perturbations.other_perturbations(perturbations.shuffle_grids(images.resolution), grid)


def measure(settings: dict[str, Any], images: Images, bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: record which test predictions are correct under each perturbation."""
    model = open_model(settings, bundles)
    pixels, labels = read_test_images(images, _MAX_IMAGES)
    plain = perturbations.predict_probabilities(model, pixels).argmax(axis=1)
    right = {"": pack(plain == labels)}
    for name, predictions in perturbations.predict_perturbed(
        model, pixels, labels, _perturbations(images), plain=plain
    ):
        right[name] = pack(predictions.right)
    return Outcome({"count": len(labels), "right": right, "accuracy": float((plain == labels).mean())}, {})
