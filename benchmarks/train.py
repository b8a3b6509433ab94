"""Images per second of training, everything included: vitrail's loop beside the bare step of the same model, timm with
DataLoader and torchvision's transforms, and transformers' Trainer, all doing the same work.

    .venv/bin/python benchmarks/train.py                       (about 15 minutes on two cores)
    .venv/bin/python benchmarks/train.py --sizes 28 --rounds 3

The work of a step: pad and crop and flip (224 px: RandomResizedCrop and flip), forward, cross-entropy with smoothing,
backward, AdamW, a running average of the weights. Every round runs each engine once for some steps; a ratio is the
median of the rounds' ratios. The bare step has its images ready, and no average. Ours writes a checkpoint at the end
of every round. Memory is the peak of a process of its own and of the loader processes that it starts.
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


class Work:
    """One size: the images, the configuration, and the engines that train on them."""

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
        eye = Preprocess(
            resolution=self.size, crop_fraction=1.0, mean=(0.5,) * self.channels, std=(0.5,) * self.channels
        )
        split = Split("train", self.pixels, self.labels)
        trainer = Trainer(build(self.config), eye, split, None, recipe, Options(), Ranks())
        folder = Path(tempfile.mkdtemp())
        (folder / "checkpoints").mkdir()

        def run():
            trainer.total = trainer.step + self.steps
            with RunLog(folder, trainer.total, writes=True) as log:
                trainer.fit(log=log, checkpoints=folder / "checkpoints", stop=StopSignal())

        return run

    def _dataset(self):
        v1 = load_peer("torchvision.transforms")
        cut = (
            v1.RandomCrop(self.size, padding=2)
            if self.size < 100
            else v1.RandomResizedCrop(self.size, interpolation=v1.InterpolationMode.BICUBIC)
        )
        half = (0.5,) * self.channels
        transform = v1.Compose([cut, v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(half, half)])
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
    while True:
        yield from loader


ENGINES = ("bare", "vitrail", "timm", "transformers")


def make_engines(size, names):
    work, made = Work(size), {}
    for name in names:
        try:
            made[name] = getattr(work, name)()
            made[name]()
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            made.pop(name, None)
    return work, made


def race_all(sizes, rounds):
    columns = ("pixels", "model", "batch", "bare step", "vitrail", "timm + DataLoader", "transformers", "overhead")
    print("| " + " | ".join((*columns, "over timm", "over transformers")) + " |\n" + "|---" * 10 + "|")
    for size in sizes:
        work, engines = make_engines(size, ENGINES)
        times = {name: [] for name in engines}
        for _ in range(rounds):
            for name, run in engines.items():
                began = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - began)
        images = work.batch * work.steps
        speed = [f"{images / np.median(times[name]):,.0f}" if name in times else "-" for name in ENGINES]
        over = [
            f"{ratio(times['vitrail'], times[name]):.2f}x" if name in times else "-"
            for name in ("timm", "transformers")
        ]
        overhead = 1 / ratio(times["vitrail"], times["bare"]) - 1
        row = (size, work.config.name, work.batch, *speed, f"{overhead:.1%}", *over)
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def race_memory(sizes):
    print("\nPeak memory in training, with loader processes (and of the training process alone), MiB:\n")
    print("| pixels | " + " | ".join(ENGINES[1:]) + " |\n|---|---|---|---|")
    for size in sizes:
        row = [peak_of([sys.executable, __file__, "--peak", name, "--sizes", str(size)]) for name in ENGINES[1:]]
        print(f"| {size} | " + " | ".join(row) + " |", flush=True)


def peak_of(command):
    """The most that a process and its children held at a time, pages that they share counted once."""
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    most = 0
    while running.poll() is None:
        most = max(most, sum(map(resident, family(running.pid))))
        time.sleep(0.02)
    words = running.stdout.read().split()
    return f"{most // 1024} ({words[-1]})" if running.returncode == 0 and words else "-"


def family(pid):
    yield pid
    try:
        children = [task for path in Path(f"/proc/{pid}/task").glob("*/children") for task in path.read_text().split()]
    except OSError:  # it has ended
        return
    for child in children:
        yield from family(int(child))


def resident(pid):
    """KiB of a process, each page divided by the number of processes that share it."""
    try:
        return int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)[1])
    except OSError:
        return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=ENGINES, help="print the peak memory of one engine")
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if chosen.peak:
        make_engines(chosen.sizes[0], [chosen.peak])
        # Not getrusage: that remembers the parent's peak from before this program was loaded.
        status = Path("/proc/self/status").read_text()
        print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024)
        return
    race_all(chosen.sizes, chosen.rounds)
    race_memory(chosen.sizes)


if __name__ == "__main__":
    main()
