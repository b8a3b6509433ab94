"""Peak memory of one training step of ViT-B/16 at batch 8: vitrail beside its peers, each in a process of its own.

    .venv/bin/python benchmarks/memory.py

A step is forward, cross-entropy, backward and AdamW, twice, so that the optimiser's state is there. The figure is what
the process held at its highest, less what it had held after the same with ViT-Ti/16 at batch 1: libraries import parts
of themselves late.
"""

import resource
import subprocess
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from peers import huggingface_vit, timm_vit, torchvision_vit
from vitrail.models.create import build
from vitrail.models.zoo import find

BATCH = 8


def vitrail_vit(config):
    model = build(config)
    return model, dict, model


MAKERS = {"vitrail": vitrail_vit, "timm": timm_vit, "transformers": huggingface_vit, "torchvision": torchvision_vit}


def peak_mebibytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(name, config, batch):
    """Two steps of AdamW on random images."""
    model, _, run = MAKERS[name](config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    model.train()
    for _ in range(2):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(run(images), labels).backward()
        optimiser.step()


def measure(name):
    """Print the peak of `name` in this process."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    train(name, find("ViT-Ti/16"), 1)  # what imports and first calls hold is not the model's memory
    before = peak_mebibytes()
    train(name, find("ViT-B/16"), BATCH)
    print(f"{peak_mebibytes() - before:.0f}")


def main():
    if len(sys.argv) > 1:
        return measure(sys.argv[1])
    print("| engine | peak of a training step, MiB |\n|---|---|")
    for name in MAKERS:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
        print(f"| {name} | {done.stdout.strip()} |", flush=True)
    return None


if __name__ == "__main__":
    main()
