"""Test accuracy on Fashion-MNIST after five minutes on two cores: `vitrail train` and a typical loop with timm.

    .venv/bin/python benchmarks/fashion.py --seeds 3             (about 45 minutes on two cores)
    .venv/bin/python benchmarks/fashion.py --runs vitrail-nano --minutes 1

Recipe, learning rate and model were chosen on 5,000 held-out training images. Each run trains on all 60,000 images
and predicts the 10,000 test images once, at its end. The loop with timm uses timm's ViT (width 64, depth 6, patch 4,
the same as ViT-Micro/4), a torch DataLoader with two workers and torchvision's transforms, AdamW, and a cosine
schedule over the steps that fit into the time.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from images import PerSample
from peers import load_peer
from vitrail.data.sources.registry import open_data

VITRAIL_MODELS = {"vitrail-nano": "ViT-Nano/7", "vitrail-micro": "ViT-Micro/4"}
BATCH, VITRAIL_BATCH = 128, 256


def run_vitrail(model, seed, minutes):
    """Train with the command line. Return the test accuracy, the steps and the seconds of the process."""
    output = Path(tempfile.mkdtemp()) / "run"
    command = [
        sys.executable,
        "-m",
        "vitrail",
        "train",
        "fashion-mnist",
        "--model",
        model,
        "--output",
        str(output),
        "--minutes",
        str(minutes),
        "--seed",
        str(seed),
        "--set",
        "holdout=0",
        "augment.flip=random",
        "model.pool=gap",
        f"batch={VITRAIL_BATCH}",
    ]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    final = next(line for line in lines if line["event"] == "final")
    steps = next(line for line in lines if line["event"] == "start")["total"]
    shutil.rmtree(output.parent)
    return final["accuracy"], steps, seconds


def run_timm(seed, minutes):
    """Train with timm. Return the test accuracy, the steps and the seconds.

    The number of steps, which the cosine schedule needs, is computed after measuring 50 steps.
    """
    v1 = load_peer("torchvision.transforms")
    data = open_data("fashion-mnist").splits
    normalisation = [v1.ToTensor(), v1.Normalize((0.5,), (0.5,))]
    augmentation = v1.Compose([v1.RandomCrop(28, padding=2), v1.RandomHorizontalFlip(), *normalisation])
    training = PerSample(data["train"].images[..., 0], data["train"].labels, augmentation)
    torch.manual_seed(seed)
    model = load_peer("timm").models.VisionTransformer(
        img_size=28, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=6, num_heads=4, mlp_ratio=2
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    loader = torch.utils.data.DataLoader(training, BATCH, shuffle=True, num_workers=2, drop_last=True)
    start = time.perf_counter()
    total, step, measured_from = 10**9, 0, None
    model.train()
    while step < total:
        for images, labels in loader:
            if step == 10:
                measured_from = time.perf_counter()
            if step == 60:
                step_seconds = (time.perf_counter() - measured_from) / 50
                total = step + int(0.97 * (60 * minutes - (time.perf_counter() - start)) / step_seconds)
            share = min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / max(total, 1)))
            for group in optimiser.param_groups:
                group["lr"] = 1e-3 * share
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
            loss.backward()
            optimiser.step()
            step += 1
            if step >= total:
                break
    seconds = time.perf_counter() - start
    model.eval()
    test = torch.utils.data.DataLoader(
        PerSample(data["test"].images[..., 0], data["test"].labels, v1.Compose(normalisation)), 500
    )
    with torch.inference_mode():
        correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in test)
    return correct / len(data["test"]), step, seconds


def main():
    runs = (*VITRAIL_MODELS, "timm-micro")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=runs, default=runs)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=5.0)
    options = parser.parse_args()
    torch.set_num_threads(2)
    print("| run | seed | steps | epochs | seconds | test accuracy |\n|---|---|---|---|---|---|")
    for name in options.runs:
        accuracies = []
        for seed in range(options.seeds):
            accuracy, steps, seconds = (
                run_vitrail(VITRAIL_MODELS[name], seed, options.minutes)
                if name in VITRAIL_MODELS
                else run_timm(seed, options.minutes)
            )
            accuracies.append(accuracy)
            epochs = steps * (VITRAIL_BATCH if name in VITRAIL_MODELS else BATCH) / 60_000
            print(f"| {name} | {seed} | {steps:,} | {epochs:.1f} | {seconds:.0f} | {accuracy:.2%} |", flush=True)
        spread = f"{min(accuracies):.2%} to {max(accuracies):.2%}"
        print(f"| {name} | all | | | | mean {np.mean(accuracies):.2%}, {spread} |", flush=True)


if __name__ == "__main__":
    main()
