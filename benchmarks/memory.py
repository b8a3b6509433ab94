"""Peak memory of a training step of ViT-B/16 at batch 8, for vitrail and other libraries.

    .venv/bin/python benchmarks/memory.py

Each library runs in a separate process. A step is forward, cross-entropy, backward and AdamW; it is run twice, so
that the optimiser's state exists. The result is the peak memory of the process minus its peak after the same steps
with ViT-Ti/16 at batch 1, because libraries import some of their modules late.
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
    """Return our model in the form of the peers: model, mapping of weights, and function from images to logits."""
    model = build(config)
    return model, dict, model


MAKERS = {"vitrail": vitrail_vit, "timm": timm_vit, "transformers": huggingface_vit, "torchvision": torchvision_vit}


def peak_mebibytes():
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(name, config, batch):
    """Run two training steps of AdamW on random images."""
    model, _, run = MAKERS[name](config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    model.train()
    for _ in range(2):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(run(images), labels).backward()
        optimiser.step()


def measure(name):
    """Print the peak memory of training with a library in this process."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    train(name, find("ViT-Ti/16"), 1)  # memory of imports and first calls, which is subtracted
    before = peak_mebibytes()
    train(name, find("ViT-B/16"), BATCH)
    print(f"{peak_mebibytes() - before:.0f}")


def main():
    if len(sys.argv) > 1:
        return measure(sys.argv[1])
    print("| engine | peak of a training step, MiB |\n|---|---|")
    for name in MAKERS:
        process = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
        print(f"| {name} | {process.stdout.strip()} |", flush=True)
    return None


if __name__ == "__main__":
    main()
