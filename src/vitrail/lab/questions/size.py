"""When does a larger model pay? The model doubled once in width and once in depth, with few and with many images."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from vitrail.lab.question import (
    COLOURS,
    Accuracies,
    Question,
    Verdict,
    bar,
    between,
    points,
    training_accuracies,
)
from vitrail.lab.results import Results
from vitrail.lab.statistics import Estimate, smallest
from vitrail.lab.trial import Cell
from vitrail.reports.families import in_figure
from vitrail.reports.messages import words_beside
from vitrail.reports.page import Line, chart, figure, table

FAMILIES = ("vit", "resnet")
DOUBLED = ("deeper", "wider")
VARIANTS = ("base", *DOUBLED)

Key = tuple[str, str, int]


class Size(Question):
    """ViT decides; the CNN is reported beside it."""

    words = words_beside(__file__)
    claims = ("C5", "C9")

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The smallest and the largest number of images."""
        return tuple(dict.fromkeys((self.lab.sizes[0], self.lab.sizes[-1])))

    def changes(self, family: str, variant: str) -> dict[str, Any] | None:
        """What a variant changes of the family's model."""
        config = self.lab.images.matched(family)
        match variant:
            case "deeper":
                return config.deeper(2)
            case "wider":
                return config.wider(2)
        return None

    @functools.cached_property
    def cells(self) -> dict[Key, list[Cell]]:
        """By family, variant and number of images; a seed each."""
        return {
            (family, variant, count): [
                self.lab.train(family, count=count, seed=seed, changes=self.changes(family, variant))
                for seed in self.lab.seeds_for(count)
            ]
            for family in self.lab.asked_for(FAMILIES)
            for variant in VARIANTS
            for count in self.ends
        }

    def rounds(self) -> Sequence[Sequence[Cell]]:
        def some(families: Sequence[str], seeds: int | None) -> list[Cell]:
            groups = [cells for key, cells in self.cells.items() if key[0] in families]
            return [cell for cells in groups for cell in cells[:seeds]]

        return some(FAMILIES[:1], 2), some(FAMILIES, 2), some(FAMILIES, None)

    def read(self, results: Results) -> None:
        self.found = Accuracies(results, self.cells, alike=lambda key: key[2])
        self.fitted = training_accuracies(results, self.cells)

    def growth(self, family: str, variant: str) -> Estimate | None:
        """What doubling gains with many images, less what it gains with few."""
        few, many = self.ends[0], self.ends[-1]
        return self.found.contrast(
            (1.0, (family, variant, many)),
            (-1.0, (family, "base", many)),
            (-1.0, (family, variant, few)),
            (1.0, (family, "base", few)),
        )

    def verdicts(self) -> Iterator[Verdict]:
        grows = smallest([self.growth("vit", variant) for variant in DOUBLED]) if len(self.ends) > 1 else None
        yield Verdict("C5", "trained", grows, words=self._wins())
        yield Verdict("C9", "reported", words=self._gaps())

    def _wins(self) -> dict[str, str]:
        """Whether the large model is better at all, where there are most images."""
        many = self.ends[-1]
        leads = {variant: self.gain("vit", variant, many) for variant in DOUBLED}
        said = {variant: between(lead) for variant, lead in leads.items() if lead is not None}
        return said | {"count": f"{many:,}"} if len(said) == len(DOUBLED) else {}

    def _gaps(self) -> dict[str, str]:
        """Train-test gap of the ViT by its size, where there are fewest images."""
        few = self.ends[0]
        known = [variant for variant in VARIANTS if ("vit", variant, few) in self.found]
        said = {variant: points(self.gap(("vit", variant, few))) for variant in known}
        return said | {"count": f"{few:,}"} if len(said) == len(VARIANTS) else {}

    def gap(self, key: Key) -> float:
        """Training accuracy less test accuracy."""
        return self.fitted[key] - self.found.estimate(key).value

    def gain(self, family: str, variant: str, count: int) -> Estimate | None:
        """What doubling adds to the accuracy."""
        return self.found.difference((family, variant, count), (family, "base", count))

    def figures(self) -> Iterator[tuple[str, str]]:
        for variant in DOUBLED:
            lines = []
            for family in FAMILIES:
                gains = {count: self.gain(family, variant, count) for count in self.ends}
                known = {count: one for count, one in gains.items() if one is not None}
                if known:
                    values = [100 * one.value for one in known.values()]
                    bars = [bar(one) for one in known.values()]
                    lines.append(Line(in_figure(family), list(known), values, COLOURS[family], bars=bars))
            if lines:
                labels = self.word("images", "tspan"), self.word("gain", "tspan")
                yield f"size-{variant}", chart(lines, *labels, log_x=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        if not figures:
            return str(self.word("nothing", "p"))
        panes = "".join(
            figure(self.word(f"{variant}-title"), self.word("figure-note", seeds=self.found.seeds), figures[name])
            for variant in DOUBLED
            if (name := f"size-{variant}") in figures
        )
        rows = []
        for key in self.found.right:
            family, variant, count = key
            config = self.lab.images.matched(family, **(self.changes(family, variant) or {}))
            accuracy = self.found.estimate(key).value
            rows.append(
                (
                    family,
                    self.word(variant),
                    f"{count:,}",
                    f"{config.parameters:,}",
                    f"{config.macs / 1e6:.1f} M",
                    f"{self.fitted[key]:.1%}",
                    f"{accuracy:.1%}",
                    points(self.gap(key)),
                )
            )
        names = ("parameters", "macs", "training", "accuracy", "gap")
        heads = ("", "", "n", *(self.word(name) for name in names))
        return f'<div class="panes">{panes}</div>{table(heads, rows, frozenset(range(2, 8)))}'

    def numbers(self) -> dict[str, Any]:
        return {
            " ".join(map(str, key)): {"accuracy": self.found.estimate(key).value, "training_accuracy": self.fitted[key]}
            for key in self.found.right
        }
