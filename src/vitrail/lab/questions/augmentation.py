"""Who needs augmentation and regularisation more? Few and many images, with and without, for ViT and the CNN."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from vitrail.lab.question import COLOURS, Accuracies, Question, Verdict, bar, between, training_accuracies
from vitrail.lab.results import Results
from vitrail.lab.statistics import Estimate
from vitrail.lab.training import shifts
from vitrail.lab.trial import Cell
from vitrail.reports.messages import words_beside
from vitrail.reports.page import Range, figure, ranges, table

FAMILIES = ("vit", "resnet")
VARIANTS = ("plain", "augmented", "regularised")
"""What the protocol adds: nothing, a random shift of the image, or that with Mixup and four times the weight decay."""

Key = tuple[str, str, int]


class Augmentation(Question):
    """Two families, two numbers of images, three ways of training."""

    words = words_beside(__file__)
    claims = ("C4",)

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The smallest and the largest number of images."""
        return tuple(dict.fromkeys((self.lab.sizes[0], self.lab.sizes[-1])))

    def settings(self, variant: str) -> dict[str, Any]:
        """What a variant changes of the protocol."""
        match variant:
            case "augmented":
                return {"augment": True}
            case "regularised":
                shifted = shifts(self.lab.images.resolution)
                return {"recipe": {"augment": {**shifted, "mixup": 0.2}, "weight_decay": 0.2}}
        return {}

    @functools.cached_property
    def cells(self) -> dict[Key, list[Cell]]:
        """By family, variant and number of images; a seed each."""
        return {
            (family, variant, count): [
                self.lab.train(family, count=count, seed=seed, **self.settings(variant))
                for seed in self.lab.seeds_for(count)
            ]
            for family in self.lab.asked_for(FAMILIES)
            for variant in VARIANTS
            for count in self.ends
        }

    def rounds(self) -> Sequence[Sequence[Cell]]:
        def some(variants: tuple[str, ...], counts: tuple[int, ...], seeds: int | None) -> list[Cell]:
            return [
                cell
                for (_, variant, count), cells in self.cells.items()
                if variant in variants and count in counts
                for cell in cells[:seeds]
            ]

        decisive, all_of_them = VARIANTS[:2], VARIANTS
        return (
            some(decisive, self.ends[:1], 2),
            some(decisive, self.ends, 2),
            some(all_of_them, self.ends, 2),
            some(all_of_them, self.ends, None),
        )

    def read(self, results: Results) -> None:
        self.found = Accuracies(results, self.cells, alike=lambda key: key[2])
        self.fitted = training_accuracies(results, self.cells)

    def gain(self, family: str, variant: str, count: int) -> Estimate | None:
        """What a variant adds to the accuracy of plain training."""
        return self.found.difference((family, variant, count), (family, "plain", count))

    def verdicts(self) -> Iterator[Verdict]:
        least = self.ends[0]
        terms = [
            (sign * way, (family, variant, least))
            for family, sign in (("vit", 1.0), ("resnet", -1.0))
            for variant, way in (("augmented", 1.0), ("plain", -1.0))
        ]
        yield Verdict("C4", "trained", self.found.contrast(*terms), words={"count": f"{least:,}"})

    def figures(self) -> Iterator[tuple[str, str]]:
        gains = {key: gain for key in self.found.right if key[1] != "plain" and (gain := self.gain(*key)) is not None}
        for count in self.ends:
            rows = [
                Range(self.word(f"{family}-{variant}", "tspan"), 100 * gain.value, *bar(gain), COLOURS[family])
                for (family, variant, n), gain in gains.items()
                if n == count
            ]
            if rows:
                yield f"augmentation-{count}", ranges(rows, self.word("gain", "tspan"), zero=0.0)

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.word("nothing", "p"))
        panes = "".join(
            figure(
                self.word("figure-title", count=f"{count:,}"),
                self.word("figure-note", seeds=self.found.seeds),
                figures[name],
            )
            for count in self.ends
            if (name := f"augmentation-{count}") in figures
        )
        rows = []
        for family, variant, count in self.found.right:
            gain = None if variant == "plain" else self.gain(family, variant, count)
            accuracy = self.found.estimate((family, variant, count))
            rows.append(
                (
                    family,
                    f"{count:,}",
                    self.word(variant),
                    f"{self.fitted[family, variant, count]:.1%}",
                    f"{accuracy.value:.1%}",
                    "-" if gain is None else between(gain),
                )
            )
        heads = ("", "n", "", self.word("training"), self.word("accuracy"), self.word("gain"))
        return f'<div class="panes">{panes}</div>{table(heads, rows, frozenset((1, 3, 4, 5)))}'

    def numbers(self) -> dict[str, Any]:
        return {
            " ".join(map(str, key)): {"accuracy": self.found.estimate(key).value, "training_accuracy": self.fitted[key]}
            for key in self.found.right
        }
