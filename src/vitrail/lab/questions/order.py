"""Does the order in which patches are read matter? An LSTM under five orders, and ViT, which has none, beside it."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.bundles.bundle import load
from vitrail.lab.exact import DIFFERENT, EQUAL, difference, drawn, random_images
from vitrail.lab.images import Images
from vitrail.lab.measurements import looking_cell, open_model, read_test_images
from vitrail.lab.measures import influence, recency, strength_by_place, worth_by_place
from vitrail.lab.permute import move, patch_order
from vitrail.lab.question import COLOURS, Accuracies, Question, Verdict, bar, points
from vitrail.lab.results import Results
from vitrail.lab.statistics import Estimate, SeedNoise, mean_of, pool, smallest
from vitrail.lab.trial import Cell, Outcome
from vitrail.models.config import read_model
from vitrail.models.families.lstm.model import sequence_order
from vitrail.models.initialise import lecun_normal_
from vitrail.reports.messages import words_beside
from vitrail.reports.page import Line, Range, chart, figure, ranges, table

ORDERS = ("raster", "reversed", "random", "column", "snake")
_LOOKED_AT = 256  # test images whose gradients are taken


class Order(Question):
    """The same LSTM, reading in other orders."""

    words = words_beside(__file__)
    claims = ("C32b", "C33")

    @functools.cached_property
    def cells(self) -> dict[str, list[Cell]]:
        """The LSTM of each order, and ViT, a seed each."""

        def trained(family: str, **changes: Any) -> list[Cell]:
            seeds = self.lab.seeds_for(self.lab.usual_size)
            return [self.lab.train(family, count=self.lab.usual_size, seed=seed, changes=changes) for seed in seeds]

        control = {"vit": trained("vit")} if "vit" in self.lab.families else {}
        return {order: trained("lstm", order=order) for order in ORDERS} | control

    @functools.cached_property
    def measured(self) -> dict[str, list[Cell]]:
        """How strongly each patch counts, by the time at which it is read; ViT's in raster order."""
        task, passes = "vitrail.lab.questions.order:measure", 30.0 * _LOOKED_AT
        return {
            name: [
                looking_cell(task, cell, passes, order="raster" if name == "vit" else name, images=_LOOKED_AT)
                for cell in cells
            ]
            for name, cells in self.cells.items()
        }

    @functools.cached_property
    def proof(self) -> Cell:
        models = {family: self.lab.images.matched(family).to_document() for family in ("lstm", "vit")}
        return Cell("vitrail.lab.questions.order:prove", {"models": models}, work=1e9)

    def rounds(self) -> Sequence[Sequence[Cell]]:
        def some(names: Sequence[str], seeds: int | None = 2) -> list[Cell]:
            return [cell for name in names for of in (self.cells, self.measured) for cell in of[name][:seeds]]

        if "lstm" not in self.lab.families:
            return ([self.proof],)
        first = [name for name in self.cells if name not in ("column", "snake")]
        return [self.proof], some(first), some(tuple(self.cells)), some(tuple(self.cells), None)

    def read(self, results: Results) -> None:
        self.found = Accuracies(results, self.cells)
        self.proved = results.get(self.proof)
        self.looked: dict[str, list[dict[str, Any]]] = {}
        for name, cells in self.measured.items():
            if known := [found for cell in cells if (found := results.get(cell)) is not None]:
                self.looked[name] = known
        indices = {name: [one["after"]["recency"] for one in some] for name, some in self.looked.items()}
        self.noise: SeedNoise = pool(indices[order] for order in ORDERS if order in indices)
        self.control_noise: SeedNoise = pool([indices.get("vit", [])])

    def verdicts(self) -> Iterator[Verdict]:
        read = [order for order in ORDERS if order in self.looked]
        yield Verdict("C32b", "trained", smallest([self._forgets(order) for order in read]), is_share=False)
        yield Verdict("C33", "exact", holds=self._assumes_order())

    def _forgets(self, order: str) -> Estimate:
        """How much later than evenly the patches lie that count."""
        noise = self.noise if order in ORDERS else self.control_noise
        found = mean_of([one["after"]["recency"] - 0.5 for one in self.looked[order]], noise)
        return found._replace(is_cut_off=order in self.found.cut_off)

    def _assumes_order(self) -> bool | None:
        if self.proved is None:
            return None
        orders, moved, later = (self.proved[name] for name in ("orders", "moved", "later"))
        is_order_all = all(one > DIFFERENT for one in orders.values()) and all(one < EQUAL for one in moved.values())
        is_vit_free = later["vit"] > 0 and self.proved["vit without positions"] < EQUAL
        return is_order_all and later["lstm"] == 0 and is_vit_free

    def figures(self) -> Iterator[tuple[str, str]]:
        rows = []
        for order in ORDERS:
            if order in self.found:
                one = self.found.estimate(order)
                rows.append(Range(self.word(order, "tspan"), 100 * one.value, *bar(one), COLOURS["lstm"]))
        if rows:
            yield "order-accuracy", ranges(rows, self.word("accuracy", "tspan"))
        lines = [
            Line(self.word(f"line-{name}", "tspan"), list(range(1, len(ys) + 1)), ys.tolist(), colour)
            for name, ys, colour in self._courses()
        ]
        if lines:
            yield "order-strength", chart(lines, self.word("time", "tspan"), self.word("strength", "tspan"), dots=True)

    def _courses(self) -> Iterator[tuple[str, np.ndarray, int]]:
        """How strongly patches count by the time of reading, mean 1: over all orders, so that what an image shows where
        is averaged out."""
        orders = [order for order in ORDERS if order in self.looked]
        for when, colour in (("after", COLOURS["lstm"]), ("before", 7)):
            if orders:
                courses = [one[when]["strength"] for order in orders for one in self.looked[order]]
                yield when, np.mean([np.array(one) / np.mean(one) for one in courses], axis=0), colour
        if orders and "vit" in self.looked:
            grid = self.lab.images.matched("vit").grid or (1, 1)
            courses = [
                np.array(one["after"]["strength"])[sequence_order(order, grid).numpy()]
                for order in orders
                for one in self.looked["vit"]
            ]
            yield "vit", np.mean([one / one.mean() for one in courses], axis=0), COLOURS["vit"]

    def html(self, figures: dict[str, str]) -> str:
        if not self.found.right:
            return str(self.word("nothing", "p"))
        note = {"count": f"{self.lab.usual_size:,}", "seeds": self.found.seeds}
        panes = "".join(
            figure(self.word(f"{name}-title"), self.word(f"{name}-note", **note), svg) for name, svg in figures.items()
        )
        rows = []
        for name in (*ORDERS, "vit"):
            if name not in self.found:
                continue
            lead = self.found.difference(name, "raster") if name not in ("raster", "vit") else None
            said = "-"
            if lead is not None and lead.error == lead.error:
                low, high = (f"{value:+.1f}" for value in bar(lead))
                said = f"{points(lead.value)} ({low} … {high})"
            rows.append([self.word(name), f"{self.found.estimate(name).value:.1%}", said, *self._seen(name)])
        names = ("accuracy-head", "lead-head", "recency-before", "recency-after", "removal", "last-first", "agreement")
        listed = table(["", *(self.word(name) for name in names)], rows, frozenset(range(1, 8)))
        return f'<div class="panes">{panes}</div>{listed}{self.word("table-note", "p")}'

    def _seen(self, name: str) -> list[str]:
        if name not in self.looked:
            return ["-"] * 5
        some = self.looked[name]
        before, after = (float(np.mean([one[when]["recency"] for one in some])) for when in ("before", "after"))
        ratio = float(np.mean([one["after"]["strength"][-1] / one["after"]["strength"][0] for one in some]))
        removal, agreement = (float(np.mean([one[kind] for one in some])) for kind in ("removal", "agreement"))
        reach = self._forgets(name)
        low, high = reach.interval() if reach.error == reach.error else (reach.value, reach.value)
        said = f"{after:.2f} ({0.5 + low:.2f} … {0.5 + high:.2f})" if low < high else f"{after:.2f}"
        return [f"{before:.2f}", said, f"{removal:.2f}", f"{ratio:.1f}", f"{agreement:.0%}"]

    def numbers(self) -> dict[str, Any]:
        return {
            "accuracy": {name: list(self.found.estimate(name)[:2]) for name in self.found.right},
            "recency": {
                name: {when: [one[when]["recency"] for one in some] for when in ("before", "after")}
                for name, some in self.looked.items()
            },
            "removal": {name: [one["removal"] for one in some] for name, some in self.looked.items()},
            "agreement": {name: [one["agreement"] for one in some] for name, some in self.looked.items()},
            "exact": self.proved,
        }


def prove(settings: dict[str, Any], _images: Images, _of: list[Path], _folder: Path) -> Outcome:
    """Another order is another answer of an LSTM, whose states never see what comes later; ViT is the contrast."""
    lstm, vit = (read_model(settings["models"][family]) for family in ("lstm", "vit"))
    plain, patch = drawn(lstm), settings["models"]["lstm"]["patch"]
    images, grid = random_images(plain), lstm.grid or (1, 1)
    orders, moved = {}, {}
    with torch.no_grad():
        for name in ORDERS[1:]:
            other = drawn(lstm.replace(order=name))(images)
            as_read = move(images, patch_order(sequence_order(name, grid), lstm.resolution, patch))
            orders[name], moved[name] = difference(plain(images), other), difference(plain(as_read), other)
        without = drawn(vit.replace(position="none"))
        order = patch_order(sequence_order("random", grid), vit.resolution, patch)
        free = difference(without(images), without(move(images, order)))
    later = {name: int(influence(drawn(config), 0).tril(-1).sum()) for name, config in (("lstm", lstm), ("vit", vit))}
    return Outcome({"orders": orders, "moved": moved, "vit without positions": free, "later": later}, {})


def measure(settings: dict[str, Any], images: Images, of: list[Path], _folder: Path) -> Outcome:
    """How strongly patches count by the time of reading, untrained and trained, and what reading backwards changes.

    The head of an untrained model is zero, and would hear nothing: there it is drawn at random.
    """
    bundle = load(of[0])
    trained: Any = bundle.provenance["lab"]
    untrained = open_model(trained, [])
    lecun_normal_(untrained.head)
    pixels, classes = read_test_images(images, settings["images"])
    labels = torch.from_numpy(classes)
    patch, grid = trained["model"]["patch"], bundle.model.config.grid
    order = sequence_order(settings["order"], grid)
    result: dict[str, Any] = {}
    for when, model in (("before", untrained), ("after", bundle.model)):
        strength = strength_by_place(model, pixels, labels, patch, order)
        result[when] = {"strength": strength.tolist(), "recency": recency(strength)}
    result["removal"] = recency(worth_by_place(bundle.model, pixels, labels, patch, order))
    backwards = torch.empty_like(order)
    backwards[order] = order.flip(0)
    with torch.no_grad():
        answers = [
            bundle.model(one).argmax(1)
            for one in (pixels, move(pixels, patch_order(backwards, bundle.model.config.resolution, patch)))
        ]
    result["agreement"] = float((answers[0] == answers[1]).float().mean())
    return Outcome(result, {})
