"""Images per second of training: vitrail, the bare step of the same model, timm with DataLoader, transformers' Trainer.

    .venv/bin/python benchmarks/train.py                       (about 15 minutes on two cores)
    .venv/bin/python benchmarks/train.py --sizes 28 --rounds 3

Every engine does the same work in a step: pad, crop and flip (224 px: RandomResizedCrop and flip), forward,
cross-entropy with label smoothing, backward, AdamW, and a running average of the weights. Each round runs every
engine once for several steps; ratios are medians of the rounds' ratios. The bare step has its images in memory and no
average. vitrail writes a checkpoint at the end of every round. Memory is the peak of a separate process and its
loader processes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from forward import ratio
from images import PerSample
from peers import huggingface_vit, load_peer, timm_vit
from vitrail.data.dataset import Split
from vitrail.data.preprocess import Preprocess
from vitrail.models.create import build
from vitrail.models.zoo import find
from vitrail.training.loop import Trainer
from vitrail.training.options import Options
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import Recipe
from vitrail.training.run_log import RunLog
from vitrail.training.stop import StopSignal

# pixels: model, channels, batch, steps of a round, images
SIZES = {
    28: ("ViT-Micro/4", 1, 128, 60, 7680),
    32: ("ViT-Micro/4", 3, 128, 60, 7680),
    224: ("ViT-Ti/16", 3, 16, 20, 320),
}
SMOOTHING, RATE, DECAY, AVERAGE = 0.1, 1e-3, 0.05, 0.999


class TrainingBenchmark:
    """Random images of one size, a model, and a function of each engine that trains on them for a round."""

    def __init__(self, size):
        self.size = size
        name, self.channels, self.batch, self.steps, count = SIZES[size]
        self.config = find(name).replace(resolution=size, channels=self.channels, classes=10)
        rng = np.random.default_rng(0)
        self.pixels = rng.integers(0, 256, (count, size, size, self.channels), dtype=np.uint8)
        self.labels = rng.integers(0, 10, count)

    def bare(self):
        model = build(self.config).train()
        optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=True)
        images = torch.randn(self.batch, self.channels, self.size, self.size)
        labels = torch.from_numpy(self.labels[: self.batch])

        def run():
            for _ in range(self.steps):
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=SMOOTHING).backward()
                optimiser.step()

        return run

    def vitrail(self):
        augment = (
            {"crop": "pad", "padding": 2, "flip": "random"}
            if self.size < 100
            else {"crop": "resized", "flip": "random"}
        )
        recipe = Recipe(
            steps=10**9,
            batch=self.batch,
            learning_rate=RATE,
            weight_decay=DECAY,
            label_smoothing=SMOOTHING,
            average=AVERAGE,
            augment=augment,
        )
        preprocess = Preprocess(
            resolution=self.size, crop_fraction=1.0, mean=(0.5,) * self.channels, std=(0.5,) * self.channels
        )
        split = Split("train", self.pixels, self.labels)
        trainer = Trainer(build(self.config), preprocess, split, None, recipe, Options(), Ranks())
        folder = Path(tempfile.mkdtemp())
        (folder / "checkpoints").mkdir()

        def run():
            trainer.total = trainer.step + self.steps
            with RunLog(folder, trainer.total, writes=True) as log:
                trainer.fit(log=log, checkpoints=folder / "checkpoints", stop=StopSignal())

        return run

    def _dataset(self):
        v1 = load_peer("torchvision.transforms")
        crop = (
            v1.RandomCrop(self.size, padding=2)
            if self.size < 100
            else v1.RandomResizedCrop(self.size, interpolation=v1.InterpolationMode.BICUBIC)
        )
        half = (0.5,) * self.channels
        transform = v1.Compose([crop, v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(half, half)])
        return PerSample(self.pixels if self.channels == 3 else self.pixels[..., 0], self.labels, transform)

    def timm(self):
        model, _, _ = timm_vit(self.config) if self.channels == 3 else self._grey_timm()
        average = load_peer("timm.utils").ModelEmaV3(model, decay=AVERAGE, foreach=True)
        optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=True)
        loader = torch.utils.data.DataLoader(
            self._dataset(), self.batch, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True
        )
        stream = endless(loader)
        model.train()

        def run():
            for _ in range(self.steps):
                images, labels = next(stream)
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=SMOOTHING).backward()
                optimiser.step()
                average.update(model)

        return run

    def _grey_timm(self):
        c = self.config
        model = load_peer("timm").models.VisionTransformer(
            img_size=c.resolution,
            patch_size=c.patch,
            in_chans=1,
            embed_dim=c.width,
            depth=c.depth,
            num_heads=c.heads,
            mlp_ratio=c.mlp / c.width,
            num_classes=10,
        )
        return model, None, model

    def transformers(self):
        transformers = load_peer("transformers")
        model, _, _ = huggingface_vit(self.config)
        if self.channels == 1:
            settings = model.config.to_dict() | {"num_channels": 1}
            model = transformers.ViTForImageClassification(transformers.ViTConfig(**settings))
        dataset = self._dataset()

        def collate(rows):
            images, labels = zip(*rows, strict=True)
            return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}

        folder = tempfile.mkdtemp()

        def run():
            arguments = transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=self.batch,
                max_steps=self.steps,
                learning_rate=RATE,
                use_cpu=True,
                weight_decay=DECAY,
                label_smoothing_factor=SMOOTHING,
                dataloader_num_workers=2,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                logging_steps=10,
                optim="adamw_torch_fused",
                remove_unused_columns=False,
            )
            trainer = transformers.Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collate)
            trainer.train()

        return run


def endless(loader):
    """Yield the batches of a loader, epoch after epoch."""
    while True:
        yield from loader


ENGINES = ("bare", "vitrail", "timm", "transformers")


def warm_up_engines(size, names):
    """Return the benchmark of a size, and a function for each engine after a first round."""
    benchmark, engines = TrainingBenchmark(size), {}
    for name in names:
        try:
            engines[name] = getattr(benchmark, name)()
            engines[name]()
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            engines.pop(name, None)
    return benchmark, engines


def race_all(sizes, rounds):
    """Print the table of images per second."""
    columns = ("pixels", "model", "batch", "bare step", "vitrail", "timm + DataLoader", "transformers", "overhead")
    print("| " + " | ".join((*columns, "over timm", "over transformers")) + " |\n" + "|---" * 10 + "|")
    for size in sizes:
        benchmark, engines = warm_up_engines(size, ENGINES)
        times = {name: [] for name in engines}
        for _ in range(rounds):
            for name, run in engines.items():
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
        images = benchmark.batch * benchmark.steps
        speed = [f"{images / np.median(times[name]):,.0f}" if name in times else "-" for name in ENGINES]
        speedups = [
            f"{ratio(times['vitrail'], times[name]):.2f}x" if name in times else "-"
            for name in ("timm", "transformers")
        ]
        overhead = 1 / ratio(times["vitrail"], times["bare"]) - 1
        row = (size, benchmark.config.name, benchmark.batch, *speed, f"{overhead:.1%}", *speedups)
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def compare_memory(sizes):
    """Print the table of peak memory."""
    print("\nPeak memory in training, with loader processes (and of the training process alone), MiB:\n")
    print("| pixels | " + " | ".join(ENGINES[1:]) + " |\n|---|---|---|---|")
    for size in sizes:
        row = [
            measure_peak_memory([sys.executable, __file__, "--peak", name, "--sizes", str(size)])
            for name in ENGINES[1:]
        ]
        print(f"| {size} | " + " | ".join(row) + " |", flush=True)


def measure_peak_memory(command):
    """Return the peak memory of a process and its children in MiB, and in brackets the number that it prints.

    Shared pages are counted once.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(resident_kibibytes, process_tree(process.pid))))
        time.sleep(0.02)
    output = process.stdout.read().split()
    return f"{peak // 1024} ({output[-1]})" if process.returncode == 0 and output else "-"


def process_tree(pid):
    """Yield the ids of a process and all of its descendants."""
    yield pid
    try:
        children = [task for path in Path(f"/proc/{pid}/task").glob("*/children") for task in path.read_text().split()]
    except OSError:  # the process has ended
        return
    for child in children:
        yield from process_tree(int(child))


def resident_kibibytes(pid):
    """Return the memory of a process in KiB. A shared page is divided by the number of processes that share it."""
    try:
        return int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)[1])
    except OSError:
        return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=ENGINES, help="print the peak memory of one engine")
    options = parser.parse_args()
    torch.set_num_threads(2)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if options.peak:
        warm_up_engines(options.sizes[0], [options.peak])
        # getrusage would include the peak of the parent process before this program was loaded.
        status = Path("/proc/self/status").read_text()
        print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024)
        return
    race_all(options.sizes, options.rounds)
    compare_memory(options.sizes)


if __name__ == "__main__":
    main()
