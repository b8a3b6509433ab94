"""What the data question trains: families and variants at each size, and longer training at the largest size."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from vitrail.lab.questions.data_classical import ClassicalLearners
from vitrail.lab.trial import Trial
from vitrail.lab.trial_results import Results
from vitrail.lab.variant_question import Key, Variant, VariantQuestion
from vitrail.models.config import ModelConfig

PAIR = ("vit", "resnet")
AXES = {
    "macs": ("vit", "resnet"),
    "parameters": ("vit", "resnet-parameters"),
    "time": ("vit-time", "resnet"),
}
"""Variants of ViT and CNN that have equal multiply-accumulates, equal parameters, or equal training time."""
MAX_DOUBLINGS = 4
"""Models are trained on at most 16 times the lab's number of images seen."""
MIN_GAIN = 0.003
"""Smallest gain in validation accuracy for which training is doubled again."""
_EQUAL_TIME_DEPTH = {"Pico": 3, "Nano": 5, "Nano/8": 7}
"""Depth at which ViT trains as long per image as the CNN, by size of the presets.

It was measured with one thread on a processor with AVX-512. It is fixed, so that a lab trains the same models on every
machine. The report shows the seconds that were measured.
"""


class DataTrials(VariantQuestion):
    """Trials of the data question, and their results."""

    @functools.cached_property
    def variants(self) -> Mapping[str, Variant]:
        variants = {family: Variant(family=family) for family in self.lab.families}
        if self._has_pair:
            vit, cnn = (self.lab.images.matched_config(family) for family in PAIR)
            base = {"base": _equal_parameters_base(cnn, vit.parameters)}
            variants["resnet-parameters"] = Variant(family="resnet", changes=base)
            depth = {"depth": _EQUAL_TIME_DEPTH[self.lab.images.size]}
            variants["vit-time"] = Variant(family="vit", changes=depth)
        longer = {
            f"{family}-{doublings}": Variant(family=family, doublings=doublings)
            for doublings in range(1, MAX_DOUBLINGS + 1)
            for family in self.lab.selected(PAIR)
        }
        return variants | longer

    @property
    def _has_pair(self) -> bool:
        return len(self.lab.selected(PAIR)) == len(PAIR)

    @property
    def counts(self) -> tuple[int, ...]:
        return self.lab.sizes

    @functools.cached_property
    def keys(self) -> tuple[Key, ...]:
        return tuple(
            (name, count)
            for name, variant in self.variants.items()
            for count in (self.counts[-1:] if variant.doublings else self.counts)
        )

    @functools.cached_property
    def classical(self) -> ClassicalLearners:
        """The learners that are not models of the lab."""
        return ClassicalLearners(self.lab)

    def stages(self) -> Sequence[Sequence[Key]]:
        def select(names: Sequence[str], counts: Sequence[int]) -> list[Key]:
            return [(name, count) for name in names for count in counts]

        few, largest = self.counts[:2], self.counts[-1:]
        decisive, families, axes = (*few, *largest), self.lab.families, ("resnet-parameters", "vit-time")
        longer = [select([f"{family}-{number}" for family in PAIR], largest) for number in range(1, MAX_DOUBLINGS + 1)]
        return (
            select(PAIR, few),
            select(["lstm"], few),
            select(PAIR, largest),
            select(families, decisive),
            select(families, self.counts),
            select(axes, decisive),
            *longer,
            select(axes, self.counts),
        )

    def rounds(self) -> Sequence[Sequence[Trial]]:
        first, second, *others = super().rounds()
        return first, [*second, *self.classical.trials], *others

    def is_needed(self, trial: Trial, results: Results) -> bool | None:
        """Return whether training must be doubled as often as in a trial: until validation accuracy no longer gains."""
        doublings = (trial.settings.get("seen", 0) // self.lab.seen).bit_length() - 1
        return True if doublings < 1 else self._needs_doubling(trial.family, doublings, results)

    def _needs_doubling(self, family: str, doublings: int, results: Results) -> bool | None:
        if doublings == 1:
            return True
        is_previous_needed = self._needs_doubling(family, doublings - 1, results)
        if not is_previous_needed:
            return is_previous_needed
        gain = self._validation_gain(family, doublings - 1, results)
        return None if gain is None else gain >= MIN_GAIN

    def _validation_gain(self, family: str, doublings: int, results: Results) -> float | None:
        """Return what the last of several doublings gained in validation accuracy."""
        keys = [self.longer_key(family, number) for number in (doublings - 1, doublings)]
        before, after = (results.validation_accuracy(self.trials[key][0]) for key in keys)
        return None if before is None or after is None else after - before

    def longer_key(self, family: str, doublings: int) -> Key:
        return (f"{family}-{doublings}" if doublings else family), self.counts[-1]

    # Results

    def read(self, results: Results) -> None:
        super().read(results)
        self.classical.read(results)
        self.gaps: dict[Key, dict[int, float]] = {}
        """Training accuracy minus test accuracy by variant, number of images and seed."""
        for key, trials in self.trials.items():
            outcomes = enumerate(map(results.get, trials))
            gaps = {seed: result["training_accuracy"] - result["accuracy"] for seed, result in outcomes if result}
            if gaps:
                self.gaps[key] = gaps
        self.validation_gains = {
            (family, number): self._validation_gain(family, number, results)
            for family in self.lab.selected(PAIR)
            for number in range(1, MAX_DOUBLINGS + 1)
        }
        self._read_times(results)

    def _read_times(self, results: Results) -> None:
        """Read training times. Seconds of different machines are not comparable, so only one machine counts."""
        largest = {name: trials for (name, count), trials in self.trials.items() if count == self.counts[-1]}
        machine = _most_used_machine(results, largest)
        self.seconds: dict[str, float] = {}
        """Seconds of training for 1,000 images."""
        self.training_curves: dict[str, tuple[list[float], ...]] = {}
        """Seconds of training and validation accuracy at that time, by family, at the largest size."""
        for name, trials in largest.items():
            finished = [trial for trial in trials if results.get(trial) and results.machine(trial) == machine]
            measured = [results.measured(trial) or {} for trial in finished]
            seconds = [entry["seconds"] for entry in measured if "seconds" in entry]
            if seconds:
                self.seconds[name] = 1000 * float(np.mean(seconds)) / finished[0].settings["seen"]
            curve_seconds = [entry.get("curve_seconds") for entry in measured]
            if name in self.lab.families and finished and all(curve_seconds):
                curves = [(results.get(trial) or {})["curve"] for trial in finished]
                self.training_curves[name] = tuple(
                    np.asarray(curve, float).mean(axis=0)[:, 1].tolist() for curve in (curve_seconds, curves)
                )

    def finished_sizes(self, name: str) -> list[int]:
        return [count for count in self.counts if (name, count) in self.accuracies]

    def doublings(self, family: str) -> list[int]:
        """Return the numbers of doublings with which a family was trained at the largest size."""
        numbers = range(MAX_DOUBLINGS + 1)
        return [number for number in numbers if self.longer_key(family, number) in self.accuracies]


def _equal_parameters_base(config: ModelConfig, parameters: int) -> int:
    """Return the channels with which a CNN comes closest to a number of parameters."""
    return min(range(1, 257), key=lambda base: abs(config.replace(base=base).parameters - parameters))


def _most_used_machine(results: Results, groups: Mapping[str, Sequence[Trial]]) -> str | None:
    """Return the machine that trained most variants. Seconds of different machines are not comparable."""
    counts = Counter(machine for trials in groups.values() for machine in set(map(results.machine, trials)))
    del counts[None]
    return max(counts, key=counts.__getitem__, default=None)
