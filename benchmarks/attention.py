"""Time and memory of local and strided attention, as ratios to global attention.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/attention.py

Times are of the kernel: from queries, keys and values of 3 heads of 64 features (ViT-Ti) to the outputs of the heads,
and for "backward" to their gradients as well. They are CPU times of one thread, so that other programs on the machine
have less influence; the kernels take turns, and ratios and times are medians over the rounds. In brackets are ratios of
the fastest rounds: programs that use the cache and the memory slow down sparse attention more than global attention.
Memory is the peak of the tensors that exist at the same time, without queries, keys and values.
"""

import argparse
import math
import statistics
import time
import weakref

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.model import ViT
from vitrail.models.sparse_attention import SparsePattern, attend

SETTINGS = {
    "window 3 x 3": {"attention": "local", "attention_span": 1},
    "window 7 x 7": {"attention": "local", "attention_span": 3},
    "strided": {"attention": "strided"},
}


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist at the same time."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.counted = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self.counted:
                self.counted.add(storage)
                weakref.finalize(storage, self.release, storage.nbytes())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
        return result

    def release(self, size):
        self.live -= size


def attention_bias(side, settings):
    """Return the pattern or the mask of a layer for a square grid without [CLS]."""
    config = ViTConfig(
        resolution=(side, side), patch=1, channels=1, classes=0, width=16, heads=1, mlp=1, depth=1,
        pool="gap", position="none", **settings,
    )  # fmt: skip
    return ViT(config).attention_terms(0)[1]


def compute(query, key, value, bias):
    if isinstance(bias, SparsePattern):
        return attend(query, key, value, bias, None)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def make_run(tokens, batch, bias, backward):
    """Return a function that computes attention once, from the output of the layer's matrix of queries, keys and
    values."""
    qkv = torch.randn(batch, tokens, 576, requires_grad=backward)
    gradient = torch.randn(batch, 3, tokens, 64)

    def run():
        query, key, value = qkv.view(batch, tokens, 3, 3, 64).permute(2, 0, 3, 1, 4).unbind(0)
        output = compute(query, key, value, bias)
        if backward:
            output.backward(gradient)
            qkv.grad = None

    return run


def race(runs, rounds):
    """Return CPU times in milliseconds by name, a list with one time for each round."""
    times = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if number:  # the first round warms up
                times[name].append(1000 * (time.process_time() - start))
    return times


def measure_peak(run):
    run()
    with PeakBytes() as counter:
        run()
    return counter.peak


def print_ratios(sides, batches, rounds):
    print("| tokens | images | pass | global, ms | " + " | ".join(SETTINGS) + " |")
    print("|---" * (4 + len(SETTINGS)) + "|")
    for side in sides:
        biases = {"global": None} | {name: attention_bias(side, settings) for name, settings in SETTINGS.items()}
        for batch in batches:
            for backward in (False, True):
                runs = {name: make_run(side**2, batch, bias, backward) for name, bias in biases.items()}
                times = race(runs, rounds)
                ratios = [
                    statistics.median(a / b for a, b in zip(times["global"], times[name], strict=True))
                    for name in SETTINGS
                ]
                fastest = [min(times["global"]) / min(times[name]) for name in SETTINGS]
                cells = [f"{ratio:.2f}x ({best:.2f}x)" for ratio, best in zip(ratios, fastest, strict=True)]
                name = "forward + backward" if backward else "forward"
                print(
                    f"| {side**2:,} | {batch} | {name} | {statistics.median(times['global']):.2f} | "
                    + " | ".join(cells) + " |",
                    flush=True,
                )  # fmt: skip


def print_growth(sides, rounds):
    """Print the exponents of time and memory between the smallest and the largest grid."""
    print("\n| attention | pass | " + " | ".join(f"{side**2:,} tokens, ms" for side in sides) + " | exponent of time |"
          " memory, MiB | exponent of memory |")  # fmt: skip
    print("|---" * (5 + len(sides)) + "|")
    for name, settings in SETTINGS.items():
        biases = {side: attention_bias(side, settings) for side in sides}
        for backward in (False, True):
            runs = {side: make_run(side**2, 1, bias, backward) for side, bias in biases.items()}
            times = {side: statistics.median(values) for side, values in race(runs, rounds).items()}
            peaks = {side: measure_peak(run) for side, run in runs.items()}
            growth = math.log(sides[-1] ** 2 / sides[0] ** 2)
            exponents = [math.log(values[sides[-1]] / values[sides[0]]) / growth for values in (times, peaks)]
            print(
                f"| {name} | {'forward + backward' if backward else 'forward'} | "
                + " | ".join(f"{times[side]:.1f}" for side in sides)
                + f" | {exponents[0]:.2f} | {peaks[sides[0]] / 2**20:.1f} to {peaks[sides[-1]] / 2**20:.1f}"
                f" | {exponents[1]:.2f} |",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", type=int, nargs="*", default=[14, 32, 64])
    parser.add_argument("--growth", type=int, nargs="*", default=[32, 64, 128])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_ratios(arguments.sides, arguments.batches, arguments.rounds)
    if arguments.growth:
        print_growth(arguments.growth, max(arguments.rounds // 3, 1))


if __name__ == "__main__":
    main()
