"""How expensive are the families? Parameters, MACs, measured time and memory against tokens and patch size.

Times are measured one at a time with one thread, while no other trial of the lab runs.
"""

import contextlib
import functools
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.bundles.catalogue import Published, catalogue
from vitrail.core.message_files import load_messages
from vitrail.lab.images import Images
from vitrail.lab.question import COLOURS, Question, Verdict
from vitrail.lab.questions.cost_attention import AttentionComparison
from vitrail.lab.statistics import Estimate
from vitrail.lab.trial import Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.models import zoo
from vitrail.models.config import ModelConfig, read_model
from vitrail.models.create import build
from vitrail.models.families.vit.attention_mask import attention_mask
from vitrail.models.families.vit.config import ViTConfig
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.families import family_label
from vitrail.reports.page_kit import figure, table

TOKENS = (256, 512, 1024, 2048, 4096)
"""Numbers of tokens for the time of attention alone."""
SEQUENCES = (64, 256, 1024)
"""Numbers of tokens for the latency of models."""
BATCHES = (1, 32)
_ROUNDS = 7  # repeated measurements
_MIN_SECONDS = 0.02  # smallest duration of a measurement
_PATCHED = ("vit", "mixer", "lstm")
_SIDES, _PATCHES = (32, 64, 128), (2, 8)  # image sides and patch sizes for the cost of small patches
_TASK = "vitrail.lab.questions.cost:"


class CostQuestion(Question):
    """Measures time and memory of models. Times are medians; exponents have intervals over repeated measurements."""

    messages = load_messages(__file__)
    claims = ("C30", "C31", "C32a", "C34c", "C42")

    @functools.cached_property
    def attention(self) -> Trial:
        """Trial that times attention alone, global and masked."""
        settings = {"tokens": list(TOKENS), "width": 64, "heads": 4, "rounds": _ROUNDS}
        work = 2 * 2 * 64 * _ROUNDS * float(np.square(TOKENS).sum())
        return Trial(f"{_TASK}time_attention", settings, work=work, alone=True)

    @functools.cached_property
    def latency(self) -> Trial:
        """Trial that times ViT and LSTM at several sequence lengths, with equal cost at each."""
        pairs = {str(count): [config.to_document() for config in pair(count)] for count in SEQUENCES}
        cost = sum(pair(count)[0].macs for count in SEQUENCES)
        settings = {"pairs": pairs, "batches": list(BATCHES), "rounds": _ROUNDS}
        return Trial(f"{_TASK}time_sequences", settings, work=2.0 * cost * sum(BATCHES) * _ROUNDS, alone=True)

    @functools.cached_property
    def families(self) -> dict[tuple[str, int | None], Trial]:
        """Footprint trials of every family on these images, by patch size where it can be changed."""
        images, trials = self.lab.images, {}
        side = min(images.resolution)
        sizes = [size for size in range(1, side) if not side % size and 4 <= (side // size) ** 2 <= 256]
        for name in self.lab.families:
            config = images.matched_config(name)
            if name in _PATCHED:
                trials |= {(name, size): _footprint_trial(config.replace(patch=size), 32) for size in sizes}
            else:
                trials[name, None] = _footprint_trial(config, 32)
        return trials

    @functools.cached_property
    def squares(self) -> dict[tuple[int, int], Trial]:
        """Footprint trials of the ViT on larger images, by side and patch size."""
        config = zoo.small("Nano", "vit")
        return {
            (side, patch): _footprint_trial(config.replace(resolution=side, patch=patch), 1)
            for side in _SIDES
            for patch in _PATCHES
        }

    @functools.cached_property
    def patterns(self) -> AttentionComparison:
        """Trials of ViT with local, strided and global attention."""
        return AttentionComparison(self.lab)

    def rounds(self) -> Sequence[Sequence[Trial]]:
        timings = ([self.attention, self.latency], [*self.families.values()], [*self.squares.values()])
        return (*timings, *self.patterns.rounds())

    def read(self, results: Results) -> None:
        self.patterns.read(results)
        self.attention_times = results.measured(self.attention)
        self.latencies = results.measured(self.latency)
        self.by_family = {
            key: footprint
            for key, trial in self.families.items()
            if (footprint := _read_footprint(results, trial)) is not None
        }
        self.by_side = {
            key: footprint
            for key, trial in self.squares.items()
            if (footprint := _read_footprint(results, trial)) is not None
        }

    # Verdicts

    def exponent(self, kind: str) -> Estimate | None:
        """Return the exponent of attention's time in the number of tokens."""
        if self.attention_times is None:
            return None
        return _mean_over_rounds([slope(TOKENS, times) for times in self.attention_times[kind]])

    def growth(self) -> Estimate | None:
        """Return the exponent of the LSTM's latency in the number of tokens minus the ViT's."""
        if self.latencies is None:
            return None
        slopes = {name: [slope(SEQUENCES, times) for times in self.latencies["1"][name]] for name in ("lstm", "vit")}
        return _mean_over_rounds([lstm - vit for lstm, vit in zip(slopes["lstm"], slopes["vit"], strict=True)])

    def verdicts(self) -> Iterator[Verdict]:
        exponent, masked = self.exponent("global"), self.exponent("masked")
        excess = None if exponent is None else exponent._replace(value=exponent.value - 1.5)
        fields = {}
        if exponent is not None and masked is not None and self.attention_times is not None:
            last = [statistics.median(times[-1] for times in self.attention_times[kind]) for kind in KINDS]
            ratio = last[1] / last[0]
            fields = {"exponent": f"{exponent.value:.2f}", "ratio": f"{ratio:.1f}"}
        yield Verdict("C30", "trained", excess, is_share=False, fields=fields)
        patches = self._patch_ratios()
        yield Verdict("C31", "reported", fields={"ratios": patches} if patches else {})
        yield Verdict("C32a", "trained", self.growth(), is_share=False)
        yield self._mixer_verdict()
        yield self.patterns.verdict()

    def _mixer_verdict(self) -> Verdict:
        """Return the verdict on C34c: the published Mixer costs more than a ViT that is at least as accurate."""
        mixer = catalogue()[MIXER]
        vit, namesake = cheapest_equal(mixer, "vit"), zoo.find("ViT-B/16")
        fields = {
            "mixer": f"{mixer.config.macs / 1e9:.1f}",
            "mixer_accuracy": f"{mixer.accuracy:.1f}",
            "checkpoint": vit.name,
            "vit": f"{vit.config.macs / 1e9:.1f}",
            "vit_accuracy": f"{vit.accuracy:.1f}",
            "namesake": f"{namesake.macs / 1e9:.1f}",
        }
        return Verdict("C34c", "exact", holds=mixer.config.macs > vit.config.macs, fields=fields)

    def _patch_ratios(self) -> str:
        ratios = []
        for side in _SIDES:
            small, large = ((side, patch) for patch in _PATCHES)
            if small in self.by_side and large in self.by_side:
                ratio = self.by_side[small]["latency"] / self.by_side[large]["latency"]
                ratios.append(f"{side} px {ratio:.0f}x")
        return ", ".join(ratios)

    # The page

    def figures(self) -> Iterator[tuple[str, str]]:
        tokens, milliseconds = self.t("tokens", "tspan"), self.t("milliseconds", "tspan")
        if self.attention_times is not None:
            lines = [
                Line(self.t(kind, "tspan"), TOKENS, _medians(self.attention_times[kind]), colour)
                for kind, colour in zip(KINDS, (0, 7), strict=True)
            ]
            yield "cost-attention", line_chart(lines, tokens, milliseconds, log=True, log_x=True, dots=True)
        if self.latencies is not None:
            lines = [
                Line(family_label(name), SEQUENCES, _medians(self.latencies["1"][name]), COLOURS[name])
                for name in ("vit", "lstm")
            ]
            yield "cost-latency", line_chart(lines, tokens, milliseconds, log=True, log_x=True, dots=True)
        for quantity, label in (("step", milliseconds), ("memory", self.t("megabytes", "tspan"))):
            lines = []
            for name in _PATCHED:
                footprints = [footprint for key, footprint in self.by_family.items() if key[0] == name]
                footprints.sort(key=lambda footprint: footprint["tokens"])
                if footprints:
                    xs, ys = (
                        [footprint["tokens"] for footprint in footprints],
                        [footprint[quantity] for footprint in footprints],
                    )
                    lines.append(Line(family_label(name), xs, ys, COLOURS[name]))
            if lines:
                yield f"cost-{quantity}", line_chart(lines, tokens, label, log=True, log_x=True, dots=True)

    def html(self, figures: dict[str, str]) -> str:
        patterns = self.patterns.table(self)
        if not figures and not self.by_side and not patterns:
            return str(self.t("nothing", "p"))
        panes = "".join(figure(self.t(f"{name}-title"), self.t(f"{name}-note"), svg) for name, svg in figures.items())
        names = ("parameters", "macs", "latency", "step", "memory")
        heads = tuple(self.t(name) for name in names)
        rows = [
            (
                name,
                "-" if footprint["patch"] is None else footprint["patch"],
                footprint["tokens"] or "-",
                *_footprint_texts(footprint),
            )
            for (name, _), footprint in self.by_family.items()
        ]
        first = ("", self.t("patch"), self.t("tokens"))
        family_table = table((*first, *heads), rows, frozenset(range(1, 8))) if rows else ""
        rows = [
            (side, patch, footprint["tokens"], *_footprint_texts(footprint))
            for (side, patch), footprint in self.by_side.items()
        ]
        first = (self.t("side"), self.t("patch"), self.t("tokens"))
        side_table = table((*first, *heads), rows, frozenset(range(8))) if rows else ""
        larger = f"{self.t('larger', 'p')}{side_table}" if side_table else ""
        tables = f"{family_table}{self._latency_table()}{larger}{patterns}"
        return f'<div class="panes">{panes}</div>{self.t("masked-note", "p")}{tables}'

    def _latency_table(self) -> str:
        """Return the table of ViT and LSTM latencies for one image and for batches."""
        if self.latencies is None:
            return ""
        rows = []
        for batch in BATCHES:
            vit, lstm = (_medians(self.latencies[str(batch)][name]) for name in ("vit", "lstm"))
            rows += [
                (count, batch, f"{vit_time:.2f}", f"{lstm_time:.2f}", f"{lstm_time / vit_time:.1f}")
                for count, vit_time, lstm_time in zip(SEQUENCES, vit, lstm, strict=True)
            ]
        heads = (self.t("tokens"), self.t("batch"), "vit, ms", "lstm, ms", "lstm / vit")
        return f"{self.t('levels', 'p')}{table(heads, rows, frozenset(range(5)))}"

    def numbers(self) -> dict[str, Any]:
        exponents = {kind: exponent for kind in KINDS if (exponent := self.exponent(kind)) is not None}
        return {
            "exponents": {kind: list(entry[:2]) for kind, entry in exponents.items()},
            "families": {
                f"{name} {entry['patch'] or ''}".strip(): entry for (name, _), entry in self.by_family.items()
            },
            "patterns": self.patterns.numbers(),
            "sides": {f"{side} px, patch {patch}": entry for (side, patch), entry in self.by_side.items()},
        }


KINDS = ("global", "masked")

MIXER = "mixer-b16.in21k-1k"
"""The published Mixer-B/16."""


def cheapest_equal(reference: Published, collection: str) -> Published:
    """Return the published model of a collection with the fewest MACs among those at least as accurate as `reference`.

    All are pre-trained on ImageNet-21k, then trained on ImageNet. Accuracies are those of the catalogue.
    """
    candidates = [
        published
        for published in catalogue().values()
        if published.collection == collection
        and "in21k-1k" in published.name
        and (published.accuracy or 0) >= (reference.accuracy or 0)
    ]
    return min(candidates, key=lambda published: published.config.macs)


def pair(tokens: int) -> tuple[ModelConfig, ModelConfig]:
    """Return a ViT and an LSTM on `tokens` patches with equal multiply-accumulates."""
    vit = zoo.small("Nano", "vit").replace(patch=4, resolution=4 * math.isqrt(tokens))
    lstm = zoo.small("Nano", "lstm").replace(patch=4, resolution=vit.resolution)
    return vit, lstm.with_macs(vit.macs)


def slope(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the exponent of the power law fitted to times against counts."""
    return float(np.polyfit(np.log(counts), np.log(seconds), 1)[0])


def _mean_over_rounds(values: Sequence[float]) -> Estimate:
    """Return the mean over repeated measurements with its standard error."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(float(np.mean(values)), error, len(values) - 1)


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the median over rounds of each time."""
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _footprint_texts(footprint: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{footprint['parameters']:,}",
        f"{footprint['macs'] / 1e6:.2f} M",
        f"{footprint['latency']:.2f}",
        f"{footprint['step']:.2f}",
        f"{footprint['memory']:.0f}",
    )


def _read_footprint(results: Results, trial: Trial) -> dict[str, Any] | None:
    result, measured = results.get(trial), results.measured(trial)
    return None if result is None or measured is None else {**result, **measured}


def _footprint_trial(config: ModelConfig, batch: int) -> Trial:
    settings = {"model": config.to_document(), "batch": batch, "rounds": _ROUNDS}
    work = config.macs * _ROUNDS * (3.0 * batch + 1) * 2
    return Trial(f"{_TASK}measure_footprint", settings, family=config.family, work=work, alone=True)


# Trial functions


def time_attention(settings: dict[str, Any], _images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: time the fused attention kernel for one image, global and masked to windows of 3 x 3.

    Times are in milliseconds, by type of attention, round and number of tokens.
    """
    head = settings["width"] // settings["heads"]
    runs: dict[str, list[Callable[[], Any]]] = {kind: [] for kind in KINDS}
    for count in settings["tokens"]:
        query, key, value = torch.randn(3, 1, settings["heads"], count, head)
        side = 2 ** (count.bit_length() // 2)
        mask = attention_mask(ViTConfig(resolution=(side, count // side), patch=(1, 1), pool="gap", attention="local"))
        runs["global"].append(functools.partial(F.scaled_dot_product_attention, query, key, value))
        runs["masked"].append(functools.partial(F.scaled_dot_product_attention, query, key, value, attn_mask=mask))
    return Outcome({}, {kind: _time_calls(calls, settings["rounds"]) for kind, calls in runs.items()})


def time_sequences(settings: dict[str, Any], _images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: time ViT and LSTM in milliseconds per batch, by batch size, round and number of tokens."""
    models = [[build(read_model(document)).eval() for document in pair] for pair in settings["pairs"].values()]
    times = {}
    for batch in settings["batches"]:
        times[str(batch)] = {
            name: _time_calls(
                [
                    functools.partial(pair[number], torch.zeros(batch, 1, *pair[number].config.resolution))
                    for pair in models
                ],
                settings["rounds"],
            )
            for number, name in enumerate(("vit", "lstm"))
        }
    return Outcome({}, times)


def measure_footprint(settings: dict[str, Any], _images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure times and memory of one model.

    It runs in a new process, where no earlier work has raised the peak memory.
    """
    code = "from vitrail.lab.questions.cost import report_footprint; report_footprint()"
    completed = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(settings), text=True, capture_output=True, check=True
    )
    config = read_model(settings["model"])
    patch = None if config.patch is None else config.patch[0]
    computed = {"parameters": config.parameters, "macs": config.macs, "tokens": config.tokens, "patch": patch}
    return Outcome(computed, json.loads(completed.stdout))


def report_footprint() -> None:
    """Print the latency of one image, the time of a training step per image (milliseconds), and its memory (MB)."""
    settings = json.load(sys.stdin)
    torch.set_num_threads(1)
    model = build(read_model(settings["model"])).train()
    shape = (model.config.channels, *model.config.resolution)
    batch, labels = torch.zeros(settings["batch"], *shape), torch.zeros(settings["batch"], dtype=torch.long)

    def step(count: int) -> None:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(batch[:count]), labels[:count]).backward()

    if len(batch) > 2:
        step(2)  # let the libraries allocate their own memory first
        model.zero_grad(set_to_none=True)
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5", encoding="ascii")  # resets the peak memory
    before = _peak_memory()
    train_batch = functools.partial(step, len(batch))
    steps = [times[0] for times in _time_calls([train_batch], settings["rounds"], gradient=True)]
    memory = _peak_memory() - before
    model.eval()
    predict_one = functools.partial(model, batch[:1])
    latencies = [times[0] for times in _time_calls([predict_one], settings["rounds"])]
    footprint = {
        "latency": statistics.median(latencies),
        "step": statistics.median(steps) / settings["batch"],
        "memory": memory / 2**20,
    }
    sys.stdout.write(json.dumps(footprint))


_CLEAR_REFS = Path("/proc/self/clear_refs")


def _peak_memory() -> float:
    """Return the peak memory of this process in bytes. `getrusage` may report the parent's, so it is the fallback."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _time_calls(calls: Sequence[Callable[[], Any]], rounds: int, *, gradient: bool = False) -> list[list[float]]:
    """Return the milliseconds of each call by round. An additional first round sets the number of repetitions."""
    repeats, milliseconds = [1] * len(calls), []
    with torch.set_grad_enabled(gradient):
        for number in range(rounds + 1):
            times = []
            for index, call in enumerate(calls):
                started = time.perf_counter()
                for _ in range(repeats[index]):
                    call()
                times.append((time.perf_counter() - started) / repeats[index])
            if number == 0:
                repeats = [max(1, math.ceil(_MIN_SECONDS / seconds)) for seconds in times]
            else:
                milliseconds.append([1000 * seconds for seconds in times])
    return milliseconds
